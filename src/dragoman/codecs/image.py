"""Content type `pillow_image`: images as PNG, JPEG or other files, or as arrays of pixels."""

import io
import re
import struct
from base64 import b64encode
from collections.abc import Callable
from typing import Any

from dragoman.codecs.codec import InputCodec
from dragoman.codecs.elements import content_error, decode_elements, encode_elements
from dragoman.core.datatypes import BYTES, UINT8
from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import Tensor
from dragoman.core.text_limits import MAX_JPEG_SCANS
from dragoman.formats.base64_text import decode_base64

try:
    from PIL import Image
except ImportError as missing:
    raise ImportError(
        f"content type 'pillow_image' needs the package 'pillow' ({missing}); pip install 'dragoman[images]'"
    ) from missing

# Formats accepted in requests: widely used, and none that makes Pillow start a program (EPS).
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
# Modes of Pillow with 8 bits for each channel, which a conversion to RGB keeps.
_RGB_MODES = frozenset({"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"})
_PNG_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})
# The beginning of base64, also of the alphabet for URLs and in lines; a PPM file may begin with such characters.
_BASE64 = re.compile(rb"\s*[A-Za-z0-9+/_-]{2}[A-Za-z0-9+/_\-=\s]*")
_PPM = re.compile(rb"P[1-7]\s")
_DATA_URL = re.compile(rb"\s*data:[^,]*,")
_SCAN = b"\xff\xda"
_MAX_PIXELS = 64 << 20
_MAX_PIXELS_IN_ALL = 4 * _MAX_PIXELS  # of an input or call
_BOMBS = (Image.DecompressionBombError, Image.DecompressionBombWarning)


class PillowImageCodec(InputCodec):
    """A list of `PIL.Image.Image`, one an element. A single image is encoded as a list of one.

    Elements are image files, raw or as base64 (also as a `data:` URL). They are encoded as base64, because JSON cannot
    carry raw bytes. UINT8 arrays [H, W], [H, W, 3 or 4] and [N, H, W, 3 or 4] are decoded as images too.
    Encoding option: `format`, by default PNG, which is lossless.
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
        file_format = str(options.get("format") or "PNG").upper()
        if file_format not in FORMATS:
            text = f"expected one of the formats {', '.join(FORMATS)}, got {file_format!r}"
            raise content_error("value", cls.content_type, text)
        return encode_elements(value, cls.content_type, Image.Image, lambda image: _encode(image, file_format))

    @classmethod
    def to_value(cls, tensor: Tensor, where: str = "tensor") -> Any:
        if tensor.datatype is BYTES:
            flat = Tensor(tensor.data.reshape(-1), BYTES, tensor.parameters)
            return decode_elements(flat, where, cls.content_type, f"an image ({', '.join(FORMATS)})", _decoder())
        return _from_pixels(tensor, where)


def _encode(image: Any, file_format: str) -> bytes:
    if file_format == "PNG" and image.mode not in _PNG_MODES:
        text = f"PNG does not support mode {image.mode}: convert the image, or pass format=TIFF"
        raise content_error("value", "pillow_image", text)
    file = io.BytesIO()
    try:
        image.save(file, format=file_format)
    except (OSError, ValueError) as error:
        text = f"{file_format} does not support mode {image.mode}: {error}"
        raise content_error("value", "pillow_image", text) from error
    return b64encode(file.getvalue())


def _decoder() -> Callable[[bytes], Any]:
    """Return a function that decodes images of one input or call. It raises ValueError."""
    left = _MAX_PIXELS_IN_ALL

    def decode(element: bytes) -> Any:
        nonlocal left
        file = file_bytes(element)
        try:
            image = Image.open(io.BytesIO(file), formats=FORMATS)  # reads only the header
            pixels = image.width * image.height
            if pixels > _MAX_PIXELS:
                raise ValueError(f"expected at most {_MAX_PIXELS} pixels, got {image.width} x {image.height}")
            if pixels > left:
                raise ValueError(f"expected at most {_MAX_PIXELS_IN_ALL} pixels in all images, got more")
            left -= pixels
            if reason := scans_error(image, file):
                raise ValueError(reason)
            image.load()
        except (OSError, SyntaxError, EOFError, struct.error, *_BOMBS) as error:
            # Pillow's message ends with the address of an object.
            raise ValueError(str(error).partition(" <")[0]) from error
        return image

    return decode


def scans_error(image: Any, file: bytes) -> str:
    """Return why a JPEG would take too long: each of its scans is a pass over all pixels. "" if it would not."""
    scans = file.count(_SCAN) if image.format == "JPEG" else 0
    return f"expected a JPEG of at most {MAX_JPEG_SCANS} scans, got {scans}" if scans > MAX_JPEG_SCANS else ""


def depth_error(image: Any) -> str:
    """Return why an image cannot be converted to RGB: Pillow would cut off what 8 bits do not hold. "" if it can."""
    return "" if image.mode in _RGB_MODES else f"expected 8 bits for each channel, got an image of mode {image.mode}"


def image_decoder() -> Callable[[bytes, str], Any]:
    """Return a function of an element and its place that decodes the images of a call, for models of RGB images.

    Elements are files, as they are, in base64 or as `data:` URLs; paths and addresses are never opened. It raises
    InvalidInput.
    """
    decode_file = _decoder()

    def decode(element: bytes, where: str) -> Any:
        try:
            image = decode_file(element)
            if reason := depth_error(image):
                raise ValueError(reason)
            return image
        except ValueError as error:
            shown = element if len(element) <= 40 else element[:40] + b"..."
            raise InvalidInput(
                f"{where}: expected an image ({', '.join(FORMATS)}) as bytes or base64, got {shown!r} ({error})"
            ) from error

    return decode


def file_bytes(element: bytes) -> bytes:
    """Return the bytes of an image file given raw, as base64 or as a `data:` URL. Raises ValueError.

    Base64 may be in lines, and of the alphabet for URLs. Every accepted format begins with a signature that is not
    base64.
    """
    url = _DATA_URL.match(element[:256])
    if url is None and (not _BASE64.fullmatch(element[:16]) or _PPM.match(element)):
        return element
    return decode_base64(element[url.end() if url else 0 :])


def _from_pixels(tensor: Tensor, where: str) -> list[Any]:
    data = tensor.data
    if tensor.datatype is not UINT8:
        raise content_error(where, "pillow_image", f"expected datatype BYTES or UINT8, got {tensor.datatype}")
    rank = data.ndim
    if not (rank == 2 or (rank in (3, 4) and data.shape[-1] in (3, 4))) or not data.size:
        text = f"expected shape [H, W], [H, W, 3 or 4] or [N, H, W, 3 or 4], got {list(data.shape)}"
        raise content_error(where, "pillow_image", text)
    try:
        return [Image.fromarray(pixels) for pixels in (data if rank == 4 else [data])]
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"{where}: not an image: {error}") from error
