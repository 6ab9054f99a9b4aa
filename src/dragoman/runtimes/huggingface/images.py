"""Decode images."""

import base64
import binascii
import io
import re
from typing import Any

from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import Tensor
from dragoman.runtimes.huggingface import RUNTIME

# The formats that are decoded: Pillow has more, some of them little tested.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_DATA_URL = re.compile(rb"\s*data:image/[\w.+-]+;base64,")
_MAX_PIXELS = 64 * 2**20


def decode_images(tensor: Tensor, name: str) -> list[Any]:
    """Decode the image in each element: the bytes of a file, or base64, also as a data URL.

    Raises InvalidInput if it is not an image. Paths and addresses are never opened.
    """
    image = RUNTIME.require("PIL.Image")
    return [_decode_image(image, element, name) for element in tensor.data.flat]


def images_of_pixels(tensor: Tensor) -> list[Any]:
    """Convert an array of bytes [images, height, width, 3] to images."""
    image = RUNTIME.require("PIL.Image")
    return [image.fromarray(pixels) for pixels in tensor.data]


def _decode_image(image: Any, element: bytes, name: str) -> Any:
    last_error: Exception | None = None
    for content in (element, _from_base64(element)):
        try:
            picture = image.open(io.BytesIO(content), formats=_FORMATS)
            if picture.width * picture.height > _MAX_PIXELS:
                raise InvalidInput(f"input '{name}': expected at most {_MAX_PIXELS} pixels, got {picture.size}")
            picture.load()
        except (OSError, SyntaxError, ValueError, image.DecompressionBombError) as error:
            last_error = error
        else:
            return picture
    raise InvalidInput(
        f"input '{name}': expected an image ({', '.join(_FORMATS)}) as bytes or base64, got {element[:20]!r}"
    ) from last_error


def _from_base64(element: bytes) -> bytes:
    try:
        return base64.b64decode(_DATA_URL.sub(b"", element, count=1).strip(), validate=True)
    except binascii.Error:
        return b""
