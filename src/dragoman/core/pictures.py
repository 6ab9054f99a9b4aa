"""How a photo becomes the input of a model: axes, size, fit and values of its pixels, from the signature alone.

The one rule of the console, which gets its result from the server, of `dragoman infer` and of the Python client.
"""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from dragoman.core.signature import Shape, TensorSpec

# NHW: a batch of grey pictures without an axis of channels. An input of three axes has no N otherwise.
Layout = Literal["NCHW", "NHWC", "NHW"]
Fit = Literal["stretch", "letterbox", "crop"]

CHANNELS = (1, 3, 4)
MAX_OWN_SIDE = 1024  # pixels of a photo that keeps its size
_MAX_LENGTH = 8192  # longer axes are sounds
_MIN_SIDE = {3: 8, 4: 2}  # by number of axes: three say less
_USEFUL_SIDE = 64  # an example of a smaller picture says only what runs
_CLASSIFIER_SIDE, _OTHER_SIDE = 224, 640  # sizes that classifiers and detectors are mostly trained with
_IMAGENET = (1000, 1001)  # numbers of classes
_NUMBERS = frozenset({"UINT8", "INT8", "UINT16", "INT16", "UINT32", "INT32", "FP16", "FP32", "FP64"})


class PictureSettings(msgspec.Struct, frozen=True):
    """How a photo is sent unless the user chooses otherwise. Sizes in pixels.

    layout: where the axes are; `layouts` are all that the shape allows. channels: 1 for grey, 3 for RGB, 4 with
    transparency. height, width: None for a free side beside a fixed one, which keeps the proportions of the photo.
    is_free: the shape leaves both open. keeps_size: the photo keeps its own size, reduced so that no side is above
    MAX_OWN_SIDE; height, width and fit are those for a user who chooses a size. values: LOW..HIGH of black and white,
    or "imagenet" for its mean and deviation.
    """

    layout: Layout
    layouts: tuple[Layout, ...]
    channels: int
    height: int | None
    width: int | None
    is_free: bool
    keeps_size: bool
    fit: Fit
    values: str


def picture_settings(
    spec: TensorSpec, example: Shape = (), outputs: Sequence[TensorSpec] = (), layout: Layout | None = None
) -> PictureSettings | None:
    """Return how to send photos as an input; None if its shape, with the given layout, is not that of pictures.

    example: shape of the input in a request that the model answers, () if unknown. outputs: those of the model.
    """
    shape = spec.shape or ()
    known = example if len(example) == len(shape) and _is_useful(example) else shape
    layouts = layouts_of(shape, known)
    layout = layout or next(iter(layouts), None)
    if layout not in layouts or spec.datatype is None:
        return None
    at = axes_of(layout, len(shape))
    channels = shape[at["C"]] if "C" in at else 1
    if channels < 0:
        channels = known[at["C"]] if known[at["C"]] in CHANNELS else 3
    height, width = (None if shape[at[side]] < 0 else shape[at[side]] for side in "HW")
    is_free, is_float = height is width is None, spec.datatype.kind == "float"
    shapes = [tuple(each.shape or ()) for each in outputs]
    has_boxes = any(len(each) == 3 or (len(each) == 2 and each[1] == 4) for each in shapes)
    is_classifier = bool(shapes) and not (len(shapes) > 1 and has_boxes) and all(map(_is_classes, shapes))
    counts = [each[1] for each in shapes if is_classifier and len(each) > 1]
    if is_free:
        side = _CLASSIFIER_SIDE if any(count > 2 for count in counts) else _OTHER_SIDE
        height, width = (known[at[each]] if known[at[each]] >= _USEFUL_SIDE else side for each in "HW")
    is_imagenet = channels == 3 and is_float and any(count in _IMAGENET for count in counts)
    integers = "-128..127" if spec.datatype.name == "INT8" else "0..255"
    return PictureSettings(
        layout,
        layouts,
        channels,
        height,
        width,
        is_free,
        keeps_size=is_free and not is_float,
        fit="crop" if is_classifier else "letterbox" if is_free or has_boxes else "stretch",
        values="imagenet" if is_imagenet else "0..1" if is_float else integers,
    )


def takes_pictures(spec: TensorSpec) -> bool:
    """Return whether an input most likely takes pictures: not states, nor series such as [-1, 100, 3]."""
    shape = spec.shape or ()
    layouts = layouts_of(shape, shape)
    if spec.datatype is None or spec.datatype.name not in _NUMBERS or not layouts or max(shape) > _MAX_LENGTH:
        return False
    at = axes_of(layouts[0], len(shape))
    height, width = shape[at["H"]], shape[at["W"]]
    if layouts[0] == "NHW" and height != width:  # matrices are pictures if they are square, else steps of time
        return False
    is_series = at["H"] == 0 and height < 0 < width
    return not is_series and all(side < 0 or side >= _MIN_SIDE[len(shape)] for side in (height, width))


def layouts_of(shape: Shape, known: Shape) -> tuple[Layout, ...]:
    """Return the layouts of pictures that a shape allows, the likely one first.

    known: the shape, or that of an example, which tells more about free axes.
    """
    if len(shape) not in (3, 4):
        return ()
    if len(shape) == 3 and shape[0] < 0 < min(shape[1:]) and not any(length in CHANNELS for length in shape):
        return ("NHW",)
    first, last = shape[-3], shape[-1]
    allowed: list[Layout] = []
    if first in CHANNELS or (first < 0 and last not in CHANNELS):
        allowed.append("NCHW")
    if last in CHANNELS or (last < 0 and first not in CHANNELS):
        allowed.append("NHWC")
    # Of [4, 4, 3] both ends may be channels: pictures are rather square.
    is_last = known[-1] in CHANNELS and (known[-3] not in CHANNELS or known[-3] == known[-2])
    return tuple(reversed(allowed) if is_last else allowed)


def axes_of(layout: Layout, count: int) -> dict[str, int]:
    """Return the axes of an input with so many of them, by letter of the layout."""
    return {letter: axis for axis, letter in enumerate(layout[-count:])}


def kept_size(height: int, width: int) -> tuple[int, int]:
    """Return the size of a photo that keeps its own as far as it is not too large."""
    factor = min(1, MAX_OWN_SIDE / max(height, width))
    return rounded(height * factor), rounded(width * factor)


def rounded(length: float) -> int:
    """Return a length in whole pixels, at least one; halves are rounded up."""
    return max(1, math.floor(length + 0.5))


def _is_useful(example: Shape) -> bool:
    """Return whether an example has the size of a picture: two sides, beside channels."""
    return len(example) in (3, 4) and sorted(example[-3:])[1] >= _USEFUL_SIDE


def _is_classes(shape: Shape) -> bool:
    """Return whether an output has scores of classes, or a number, for each picture."""
    return len(shape) == 1 or (len(shape) > 1 and shape[1] != 1 and all(length == 1 for length in shape[2:]))
