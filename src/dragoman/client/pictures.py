"""Pictures as inputs: images of Pillow and image files as arrays of pixels."""

import io
from os import PathLike
from typing import Any

import numpy as np

from dragoman.core.datatypes import BYTES, UINT8, Array
from dragoman.core.errors import InvalidInput
from dragoman.core.pictures import Fit, Layout, axes_of, layouts_of, rounded
from dragoman.core.signature import TensorSpec
from dragoman.core.tensor import Tensor

# Modes of Pillow by number of channels.
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
# What detectors are trained with around a picture of another shape.
_GREY = 114
_MAX_PATH = 255  # characters of a path that a message repeats


def picture(
    image: Any,
    *,
    size: int | tuple[int | None, int | None] | None = None,
    layout: Layout = "NCHW",
    scale: float | None = None,
    mean: Any = None,
    std: Any = None,
    fit: Fit = "stretch",
    channels: int = 3,
) -> Array:
    """Return a picture as an array [1, channels, height, width], or [1, height, width, channels] for "NHWC".

    image: a path, the bytes of an image file, or an image of Pillow; turned upright as its EXIF data say.
    size: (height, width) in pixels, or one number for both; None keeps the size of the picture, and None for one side
    its proportions.
    fit: how a picture of another shape gets that size: "stretch" ignores its proportions, "letterbox" adds grey (114)
    borders, "crop" cuts off what is too much.
    scale: factor of the pixels, such as 1 / 255 for 0 to 1; the array is then float32, else uint8 with 0 to 255.
    mean, std: subtracted and divided by after scaling, one number or one for each channel.
    channels: 1 for grey, 3 for RGB, 4 with transparency; without it, what is transparent becomes white.

    Needs Pillow: pip install 'dragoman[images]'. Raises InvalidInput if the image cannot be read or an argument is
    invalid.
    """
    if channels not in _MODES:
        raise InvalidInput(f"channels: expected 1, 3 or 4, got {channels!r}")
    if layout not in ("NCHW", "NHWC"):
        raise InvalidInput(f"layout: expected 'NCHW' or 'NHWC', got {layout!r}")
    if fit not in ("stretch", "letterbox", "crop"):
        raise InvalidInput(f"fit: expected 'stretch', 'letterbox' or 'crop', got {fit!r}")
    opened = _converted(open_picture(image), channels)
    if size is not None:
        opened = _resized(opened, *((size, size) if isinstance(size, int) else size), fit)
    pixels = np.asarray(opened).reshape(1, opened.height, opened.width, channels)
    if scale is not None or mean is not None or std is not None:
        pixels = pixels.astype(np.float32) * np.float32(1 if scale is None else scale)
        pixels -= np.asarray(0 if mean is None else mean, np.float32)
        pixels /= np.asarray(1 if std is None else std, np.float32)
    return np.ascontiguousarray(pixels if layout == "NHWC" else pixels.transpose(0, 3, 1, 2))


def is_picture(value: Any) -> bool:
    """Return whether a value is an image of Pillow, or a list of them."""
    if isinstance(value, list):
        return bool(value) and all(map(is_picture, value))
    return type(value).__module__.partition(".")[0] == "PIL" and hasattr(value, "getbands")


def takes_pixels(spec: TensorSpec) -> bool:
    """Return whether an input takes numbers, not files or values that its model decodes."""
    return spec.datatype not in (None, BYTES) and not spec.content_type


def picture_to_tensor(value: Any, spec: TensorSpec) -> Tensor:
    """Return pictures as the pixels of an input, unless that needs a choice: of a size, a scale or a layout.

    Raises InvalidInput that says what to call then.
    """
    images = value if isinstance(value, list) else [value]
    axes = _axes(spec)
    if axes is None:
        shape = "any shape" if spec.shape is None else f"shape {list(spec.shape)}"
        raise InvalidInput(f"a picture needs an input [N, 3, H, W] or [N, H, W, 3], and this one has {shape}")
    layout, channels, height, width = axes
    sizes = {(image.height, image.width) for image in images}
    needed = tuple(own if free == -1 else free for own, free in zip(min(sizes), (height, width), strict=True))
    call = [f"size={needed}"] if sizes != {needed} else []
    call += [f'layout="{layout}"'] + ([f"channels={channels}"] if channels != 3 else [])
    if spec.datatype is not UINT8:
        call.append("scale=1 / 255")
    if sizes != {needed} or spec.datatype is not UINT8:
        got = ", ".join(f"{h} x {w}" for h, w in sorted(sizes))
        taken = f"pictures of {'any' if height == -1 else height} x {'any' if width == -1 else width} pixels"
        zero_to_one = "" if spec.datatype is UINT8 else " (1 / 255 for values from 0 to 1, 1 for 0 to 255)"
        raise InvalidInput(
            f"expected {taken} as {spec.datatype}, got {got}: convert it with "
            f"dragoman.client.picture(image, {', '.join(call)}){zero_to_one}"
        )
    return Tensor.of(np.concatenate([picture(each, layout=layout, channels=channels) for each in images]))


def path_hint(path: str | bytes, spec: TensorSpec) -> str:
    """Return how to send a file if an input of pictures got its path, else ""."""
    path = path if isinstance(path, str) else path.decode(errors="replace")
    if _axes(spec) is None or len(path) > _MAX_PATH:
        return ""
    scale = "" if spec.datatype is UINT8 else ", scale=1 / 255"
    layout, _, height, width = _axes(spec) or ("NCHW", 3, -1, -1)
    size = "" if -1 in (height, width) else f", size=({height}, {width})"
    form = "" if layout == "NCHW" else f', layout="{layout}"'
    return f"a file is read by dragoman.client.picture({path!r}{size}{form}{scale})"


def _axes(spec: TensorSpec) -> tuple[Layout, int, int, int] | None:
    """Return layout, channels, height and width of an input of pictures; None if it is not one."""
    shape = spec.shape or ()
    layouts = layouts_of(shape, shape) if len(shape) == 4 else ()
    if not layouts or shape[axes_of(layouts[0], 4)["C"]] < 0:
        return None
    at = axes_of(layouts[0], 4)
    return layouts[0], shape[at["C"]], shape[at["H"]], shape[at["W"]]


def open_picture(image: Any, name: str = "") -> Any:
    """Return an image of Pillow, upright, from a path, the bytes of a file, or an image. `name` is that of the file.

    Raises ImportError without Pillow, InvalidInput if the image cannot be read or has no 8 bits for each channel.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ImportError(f"pictures need the package 'pillow' ({error}): pip install 'dragoman[images]'") from None
    if isinstance(image, (str, PathLike, bytes, bytearray, memoryview)):
        source = image if isinstance(image, (str, PathLike)) else io.BytesIO(image)
        shown = name or (str(source) if isinstance(source, (str, PathLike)) else "")
        try:
            image = Image.open(source)
            image.load()
        except Image.UnidentifiedImageError as error:
            subject = f"'{shown}' is" if shown else "these bytes are"
            raise InvalidInput(f"{subject} not a picture, or one of a format that Pillow does not read") from error
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            reason = f"'{name}' cannot be read as a picture" if name else "the image cannot be read"
            raise InvalidInput(f"{reason}: {error}") from error
    elif not is_picture(image):
        raise InvalidInput(f"expected a path, bytes or an image of Pillow, got {type(image).__name__}")
    if len(image.getbands()) == 1 and image.mode not in ("1", "L", "P"):
        where = f"'{name}': " if name else ""
        raise InvalidInput(
            f"{where}expected 8 bits for each channel, got an image of mode {image.mode}: convert it first"
        )
    return ImageOps.exif_transpose(image)


def _converted(image: Any, channels: int) -> Any:
    """Return an image with so many channels; without the fourth, transparent pixels lie on white."""
    from PIL import Image

    if channels < 4 and ("A" in image.getbands() or "transparency" in image.info):
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert(_MODES[channels])


def _resized(image: Any, height: int | None, width: int | None, fit: Fit) -> Any:
    from PIL import Image, ImageOps

    if height is None or width is None:
        height = height or rounded(image.height * (width or image.width) / image.width)
        width = width or rounded(image.width * height / image.height)
    if height < 1 or width < 1:
        raise InvalidInput(f"size: expected (height, width) of at least one pixel, got ({height}, {width})")
    target = width, height
    if image.size == target:
        return image
    if fit == "stretch":
        return image.resize(target, Image.Resampling.BILINEAR)
    if fit == "crop":
        return ImageOps.fit(image, target, Image.Resampling.BILINEAR)
    scale = min(width / image.width, height / image.height)
    inner = rounded(image.width * scale), rounded(image.height * scale)
    color = (_GREY, _GREY, _GREY, 255)[: len(image.getbands())]
    bordered = Image.new(image.mode, target, color if len(color) > 1 else _GREY)
    bordered.paste(image.resize(inner, Image.Resampling.BILINEAR), ((width - inner[0]) // 2, (height - inner[1]) // 2))
    return bordered
