"""Decode images."""

import base64
import binascii
import io
import re
from typing import Any

from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import Tensor
from dragoman.runtimes.huggingface import RUNTIME

# The formats that are decoded; Pillow knows many more, of which some are little tested.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_DATA_URL = re.compile(rb"\s*data:image/[\w.+-]+;base64,")
_MAX_PIXELS = 64 * 2**20


def decoded(tensor: Tensor, name: str) -> list[Any]:
    """Decode the image in each element: the bytes of a file, or base64, also as a data URL.

    Raises InvalidInput if it is not an image. Paths and addresses are never opened.
    """
    image = RUNTIME.require("PIL.Image")
    return [_picture(image, element, name) for element in tensor.data.flat]


def of_pixels(tensor: Tensor) -> list[Any]:
    """Convert an array of bytes [images, height, width, 3] to images."""
    image = RUNTIME.require("PIL.Image")
    return [image.fromarray(pixels) for pixels in tensor.data]


def _picture(image: Any, element: bytes, name: str) -> Any:
    fault: Exception | None = None
    for content in (element, _from_base64(element)):
        try:
            found = image.open(io.BytesIO(content), formats=_FORMATS)
            if found.width * found.height > _MAX_PIXELS:
                raise InvalidInput(f"input '{name}': expected at most {_MAX_PIXELS} pixels, got {found.size}")
            found.load()
        except (OSError, SyntaxError, ValueError, image.DecompressionBombError) as error:
            fault = error
        else:
            return found
    raise InvalidInput(
        f"input '{name}': expected an image ({', '.join(_FORMATS)}) as bytes or base64, got {element[:20]!r}"
    ) from fault


def _from_base64(element: bytes) -> bytes:
    try:
        return base64.b64decode(_DATA_URL.sub(b"", element, count=1).strip(), validate=True)
    except binascii.Error:
        return b""
