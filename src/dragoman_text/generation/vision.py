"""Images of prompts: decode them within limits, and make them arguments of a vision-language model."""

import io
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.text import Chat
from dragoman.formats.base64_text import decode_base64
from dragoman_text.generation.chat_template import render, try_template
from dragoman_text.generation.message_forms import shows_parts
from dragoman_text.limits import MAX_IMAGE_RATIO

_SAMPLE = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a b c"}]}]

# Arguments of a model by name, besides the tokens: tensors whose first axis is the sequence, or images.
Features = Mapping[str, Any]
NO_FEATURES: Features = {}


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits of the images of one prompt: their number, and the bytes of their files and the pixels of all together."""

    count: int = 8
    file_bytes: int = 20 << 20
    pixels: int = 1 << 25


class VisionProcessor:
    """The processor of a vision-language model, in a folder as transformers saves it. Thread-safe.

    prompt_s: seconds for an example that the chat template writes. Raises ModelFailed if it takes longer, or if the
    folder's processor needs a package that is missing.
    """

    def __init__(self, folder: Path, limits: ImageLimits, prompt_s: float) -> None:
        self._limits, self._prompt_s = limits, prompt_s
        # Processors change settings of their tokenizers during calls; and decoding one prompt at a time bounds memory.
        self._lock = threading.Lock()
        try:
            self._processor = load_processor(folder)
        except ImportError as error:
            line = next((line for line in str(error).splitlines() if line.strip()), "a package is missing")
            raise ModelFailed(f"'{folder.name}': the processor of its images cannot be loaded: {line}") from error
        self._placeholder: str = self._processor.image_token
        self.chat_template: str | None = (
            getattr(self._processor, "chat_template", None) or self._processor.tokenizer.chat_template
        )
        # Texts that stand for images; in a message they would take the places of these.
        names = ("image_token", "boi_token", "eoi_token", "image_start_token", "image_end_token")
        words = {getattr(owner, name, None) for owner in (self._processor, self._processor.tokenizer) for name in names}
        self._reserved = sorted(word for word in words if isinstance(word, str) and word)
        template = self.chat_template
        self._takes_parts = template is not None and try_template(lambda: self._shows_parts(template), prompt_s)

    # --- prompts -----------------------------------------------------------------------------------------

    def messages(self, chat: Chat) -> list[dict[str, Any]]:
        """Return messages as the chat template expects them: with parts, or with the placeholder of images in the text.

        Raises InvalidInput if the text contains a placeholder beside images.
        """
        takes_parts = self._takes_parts if not chat.template else self._shows_parts(chat.template)
        return [self._message(message, takes_parts, bool(chat.images)) for message in chat.messages]

    def encode(self, text: str, images: Sequence[str], *, special: bool) -> tuple[list[int], Features]:
        """Return the tokens of a text and the arguments of the model for its images, files in base64.

        Raises InvalidInput for a file that is not an image, or is over a limit.
        """
        limits, size = self._limits, sum(map(len, images)) * 3 // 4
        if len(images) > limits.count:
            raise InvalidInput(f"images: expected at most {limits.count} (max_images), got {len(images)}")
        if size > limits.file_bytes:
            raise InvalidInput(f"images: expected at most {limits.file_bytes} bytes (max_image_bytes), got {size}")
        placed = text.count(self._placeholder)
        if placed != len(images):
            raise InvalidInput(f"images: the chat template has places for {placed} of the {len(images)} images")
        with self._lock:
            return self._process(text, self._decode(images), special=special)

    def sample(self) -> tuple[list[int], Features]:
        """Return the tokens and the arguments of a prompt with a small image, for checks."""
        from PIL import Image

        image = Image.new("RGB", (64, 48), (200, 100, 50))
        image.paste((10, 200, 90), (8, 8, 40, 24))
        text = self._placeholder + " a b c"
        template = self.chat_template
        if template is not None and self._takes_parts:
            text = try_template(lambda: self._render(template, _SAMPLE), self._prompt_s)
        with self._lock:
            return self._process(text, [image], special=False)

    # --- private -----------------------------------------------------------------------------------------

    def _message(self, message: Mapping[str, Any], takes_parts: bool, has_images: bool) -> dict[str, Any]:
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        for part in parts if has_images else ():
            reserved = [word for word in self._reserved if word in part.get("text", "")]
            if reserved:
                raise InvalidInput(
                    f"messages: expected no {reserved[0]!r} in texts beside images: it marks their places"
                )
        if not isinstance(content, list):
            return dict(message)
        if takes_parts:
            plain = [{"type": "image"} if part["type"] == "image" else part for part in parts]
            return {**message, "content": [part for part in plain if part.get("text", True)]}
        text = "".join(
            "\n" * (part["type"] == before["type"] == "text") + part.get("text", self._placeholder)
            for before, part in zip([{"type": ""}, *parts], parts, strict=False)
        )
        return {**message, "content": text}

    def _shows_parts(self, template: str) -> bool:
        return shows_parts(lambda messages, _: self._render(template, messages))

    def _render(self, template: str, messages: Sequence[Mapping[str, Any]]) -> str:
        return render(template, messages, variables=self._processor.tokenizer.special_tokens_map)

    def _process(self, text: str, images: Sequence[Any], *, special: bool) -> tuple[list[int], Features]:
        try:
            output = self._processor(
                text=[text], images=[list(images)], return_tensors="pt", add_special_tokens=special
            )
        except ValueError as error:  # such as an image with a side of one pixel
            raise InvalidInput(f"images: the model's processor rejects them: {error}") from error
        features = {name: value for name, value in output.items() if name not in ("input_ids", "attention_mask")}
        return output["input_ids"][0].tolist(), features

    def _decode(self, images: Sequence[str]) -> list[Any]:
        remaining, decoded = self._limits.pixels, []
        for index, data in enumerate(images):
            image, remaining = self._decode_image(data, f"images[{index}]", remaining)
            decoded.append(image)
        return decoded

    def _decode_image(self, data: str, where: str, remaining: int) -> tuple[Any, int]:
        """Return an image in RGB, and the number of pixels that further ones may have."""
        from PIL import Image, ImageOps

        from dragoman.codecs.image import FORMATS, depth_error, scans_error

        try:
            file = decode_base64(data.encode())
        except ValueError as error:
            raise InvalidInput(f"{where}: expected base64: {error}") from error
        try:
            image = Image.open(io.BytesIO(file), formats=FORMATS)  # reads only the header
            remaining -= image.width * image.height
            if remaining < 0:
                limit, size = self._limits.pixels, f"{image.width} x {image.height}"
                raise InvalidInput(f"{where}: expected at most {limit} pixels in all (max_image_pixels), got {size}")
            if max(image.size) > MAX_IMAGE_RATIO * min(image.size):
                size = f"{image.width} x {image.height}"
                raise InvalidInput(f"{where}: expected sides in a ratio of at most {MAX_IMAGE_RATIO}, got {size}")
            if reason := scans_error(image, file) or depth_error(image):
                raise InvalidInput(f"{where}: {reason}")
            image = ImageOps.exif_transpose(image)
            if image.has_transparency_data:  # the colors of transparent pixels are often black, as is a text on them
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
            return image.convert("RGB"), remaining
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            limit = self._limits.pixels
            raise InvalidInput(
                f"{where}: expected at most {limit} pixels in all (max_image_pixels), got more"
            ) from error
        except (OSError, SyntaxError, EOFError, ValueError, struct.error) as error:
            names = ", ".join(FORMATS)
            reason = str(error).partition(" <")[0]  # the rest is the address of an object
            raise InvalidInput(f"{where}: expected an image ({names}): {reason}") from error


def load_processor(folder: Path) -> Any:
    """Load the processor of a folder; one that also reads videos is loaded without that part."""
    local = {"local_files_only": True, "trust_remote_code": False}
    import transformers  # takes seconds, which models without vision do not need

    values, _ = transformers.ProcessorMixin.get_processor_dict(folder, **local)
    base = getattr(transformers, str(values.get("processor_class")), None)
    if base is None or "video_processor" not in base.get_attributes():
        return transformers.AutoProcessor.from_pretrained(folder, **local)

    def check(self: Any, name: str, value: Any) -> Any:
        return None if value is None else base.check_argument_for_proper_class(self, name, value)

    kind = type(base.__name__, (base,), {"check_argument_for_proper_class": check})
    parts = dict.fromkeys(base.get_attributes())
    parts |= {"image_processor": transformers.AutoImageProcessor.from_pretrained(folder, **local)}
    parts |= {"tokenizer": transformers.AutoTokenizer.from_pretrained(folder, **local)}
    rest = {n: v for n, v in values.items() if n != "processor_class" and not n.endswith(("processor", "tokenizer"))}
    return kind(**parts, **rest)
