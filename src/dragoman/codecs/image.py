"""The content type `pillow_image`: images as files such as PNG and JPEG, or as arrays of pixels."""

import io
from base64 import b64decode, b64encode
from typing import Any

from dragoman.codecs.codec import InputCodec
from dragoman.codecs.elements import decoded, encoded, fault
from dragoman.core.datatypes import BYTES, UINT8
from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import Tensor

try:
    from PIL import Image
except ImportError as missing:
    raise ImportError(
        f"content type 'pillow_image' needs the package 'pillow' ({missing}); pip install 'dragoman[images]'"
    ) from missing

# What is read from a request: no format that starts a program (EPS), and those that everybody uses.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_KEPT_BY_PNG = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})
_BASE64_BEGINS = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")
_BOMBS = (Image.DecompressionBombError, Image.DecompressionBombWarning)


class PillowImageCodec(InputCodec):
    """A list of `PIL.Image.Image`, one an element. A single image is encoded as a list of one.

    Elements are files, raw or as base64 (also as a `data:` URL); JSON carries only the latter, so that is written.
    UINT8 arrays [H, W], [H, W, 3 or 4] and [N, H, W, 3 or 4] are images as well. Options of encoding:
    `format`, PNG by default, which keeps every pixel; JPEG does not.
    """

    content_type = "pillow_image"
    type_hint = Image.Image

    @classmethod
    def can_encode(cls, value: Any) -> bool:
        return isinstance(value, Image.Image) or (
            isinstance(value, list) and bool(value) and all(isinstance(v, Image.Image) for v in value)
        )

    @classmethod
    def to_tensor(cls, value: Any, **options: Any) -> Tensor:
        style = str(options.get("format") or "PNG").upper()
        if style not in FORMATS:
            raise fault("value", cls.content_type, f"knows the formats {', '.join(FORMATS)}, got {style!r}")
        return encoded(value, cls.content_type, Image.Image, lambda image: _written(image, style))

    @classmethod
    def to_value(cls, tensor: Tensor, where: str = "tensor") -> Any:
        if tensor.datatype is BYTES:
            flat = Tensor(tensor.data.reshape(-1), BYTES, tensor.parameters)
            return decoded(flat, where, cls.content_type, f"an image ({', '.join(FORMATS)})", _read)
        return _from_pixels(tensor, where)


def _written(image: Any, style: str) -> bytes:
    if style == "PNG" and image.mode not in _KEPT_BY_PNG:
        raise fault(
            "value", "pillow_image", f"as PNG has no form for mode {image.mode}; convert it, or say format=TIFF"
        )
    file = io.BytesIO()
    try:
        image.save(file, format=style)
    except (OSError, ValueError) as bad:
        raise fault("value", "pillow_image", f"as {style} does not take mode {image.mode}: {bad}") from bad
    return b64encode(file.getvalue())


def _read(element: bytes) -> Any:
    try:
        image = Image.open(io.BytesIO(_file(element)), formats=FORMATS)
        image.load()  # opening alone reads the head only
    except (OSError, SyntaxError, EOFError, *_BOMBS) as bad:
        # Pillow's own message repeats the object's address.
        raise ValueError(str(bad).partition(" <")[0]) from bad
    return image


def _file(element: bytes) -> bytes:
    """The bytes of an image file: every format begins with a byte sequence that is no base64 as a whole."""
    if element.startswith(b"data:"):
        element = element.partition(b",")[2]
    elif not element or any(byte not in _BASE64_BEGINS for byte in element[:16].rstrip(b"=")):
        return element
    return b64decode(element, validate=True)


def _from_pixels(tensor: Tensor, where: str) -> list[Any]:
    data = tensor.data
    if tensor.datatype is not UINT8:
        raise fault(where, "pillow_image", f"needs datatype BYTES or UINT8, got {tensor.datatype}")
    rank = data.ndim
    if not (rank == 2 or (rank in (3, 4) and data.shape[-1] in (3, 4))) or not data.size:
        raise fault(
            where, "pillow_image", f"needs shape [H, W], [H, W, 3 or 4] or [N, H, W, 3 or 4], got {list(data.shape)}"
        )
    try:
        return [Image.fromarray(pixels) for pixels in (data if rank == 4 else [data])]
    except (ValueError, TypeError) as bad:
        raise InvalidInput(f"{where}: no image: {bad}") from bad
