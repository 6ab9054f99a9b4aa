"""Pictures and sounds in files as inputs of a model.

Size, layout and scale of a picture and the rate of a sound come from options, else from the signature and the example
of the model, by the rule of `core.pictures`. What was chosen is noted, for the user to see.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from dragoman.cli.files import read_file
from dragoman.core.datatypes import BYTES, Array
from dragoman.core.errors import InvalidInput, NotSupported
from dragoman.core.examples import RATE_NAMES
from dragoman.core.pictures import Fit, Layout, PictureSettings, kept_size, picture_settings
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.tensor import Tensor
from dragoman.pipelines.audio import read_wav, resample

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
SOUND_SUFFIXES = (".wav",)
MEDIA_SUFFIXES = (*PICTURE_SUFFIXES, *SOUND_SUFFIXES)
_MAX_PIXELS = 1 << 14  # of a side
_IMAGENET = {"scale": 1 / 255, "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
_HOW = {"stretch": " stretched", "letterbox": " with borders", "crop": " cut to the middle"}
_RANGE = re.compile(r"(-?[0-9.]+)\.\.(-?[0-9.]+)")


@dataclass
class Media:
    """Reads media for the inputs of a model.

    resize: as `640`, `640x480` (width x height) or `own`. scale: as `0..1` or `imagenet`. layout: nchw or nhwc. All ""
    and sample_rate 0 if not given. example_shape: returns the shape of an input in the example of the model, () if
    unknown. fit: how a picture of another shape gets the size, "" for what suits `outputs`, which the model declares.
    """

    resize: str = ""
    fit: Fit | Literal[""] = ""
    scale: str = ""
    layout: str = ""
    sample_rate: int = 0
    example_shape: Callable[[str], tuple[int, ...]] = lambda _: ()
    outputs: Sequence[TensorSpec] = ()
    notes: list[str] = field(default_factory=list)
    rate: int = 0  # of the sounds that were read
    has_pictures: bool = False  # that were read as pixels

    def read(self, text: str, spec: TensorSpec) -> Any:
        """Return the array or the list of bytes for one or more files, separated by commas; None for another text.

        Raises InvalidInput if a file or an option does not suit the input.
        """
        for suffixes, read in ((PICTURE_SUFFIXES, self._picture), (SOUND_SUFFIXES, self._sound)):
            paths = [text] if Path(text).is_file() else text.split(",")
            if all(path.lower().endswith(suffixes) for path in paths):
                contents = [read_file(path) for path in paths]
                if spec.datatype is BYTES or spec.datatype is None:
                    self._check_unused(spec)
                    return contents
                arrays = [read(path, content, spec) for path, content in zip(paths, contents, strict=True)]
                if len({array.shape[1:] for array in arrays}) > 1:
                    raise InvalidInput(f"expected files of one size, got {', '.join(_size(a) for a in arrays)}")
                if len(arrays) > 1 and suffixes == PICTURE_SUFFIXES and len(spec.shape or ()) == 3:
                    raise InvalidInput(f"expected one picture for {list(spec.shape or ())}, got {len(arrays)}")
                return np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
        return None

    def add_rate(self, values: Mapping[str, Any], signature: Signature) -> dict[str, Any]:
        """Return the values with the rate of the sound for an input that takes it, unless it has a value."""
        found = dict(values)
        for spec in signature.inputs if self.rate else ():
            if spec.name in RATE_NAMES and spec.name not in values:
                found[spec.name] = [self.rate] if spec.shape else Tensor.of(np.asarray(self.rate), spec.datatype)
                self.notes.append(f"{spec.name}={self.rate}")
        return found

    def _check_unused(self, spec: TensorSpec) -> None:
        options: dict[str, object] = {"--resize": self.resize, "--fit": self.fit, "--scale": self.scale}
        options |= {"--layout": self.layout, "--sample-rate": self.sample_rate}
        if given := next((name for name, value in options.items() if value), ""):
            raise InvalidInput(f"{given}: the model decodes files itself, as input '{spec.name}' of bytes")

    # --- pictures ----------------------------------------------------------------------------------------------------

    def _picture(self, path: str, content: bytes, spec: TensorSpec) -> Array:
        from dragoman.client.pictures import open_picture, picture

        settings = self._settings(spec)
        try:
            image = open_picture(content, path)
        except ImportError as error:
            raise NotSupported(f"'{path}' needs the package 'pillow': pip install 'dragoman[images]'") from error
        own = image.height, image.width
        options, scale = self._scale_options(spec, settings)
        fit = self.fit or settings.fit
        layout: Layout = "NHWC" if settings.layout == "NHWC" else "NCHW"
        size = self._size(own, settings)
        try:
            pixels = picture(image, size=size, layout=layout, channels=settings.channels, fit=fit, **options)
        except InvalidInput as error:
            raise InvalidInput(f"'{path}': {error.message}") from error
        height, width = pixels.shape[1:3] if layout == "NHWC" else pixels.shape[2:]
        is_similar = abs(own[0] * width - own[1] * height) <= max(own) / 2  # but for rounding to pixels
        how = "" if (height, width) == own else f" to {width}x{height}{'' if is_similar else _HOW[fit]}"
        self.notes.append(f"{path}: {own[1]}x{own[0]}{how}, values {scale}, {settings.layout}")
        self.has_pictures = True
        pixels = _as_type(pixels, spec)
        shape = spec.shape or ()
        if len(shape) == 2:
            return pixels.reshape(1, -1)
        if settings.layout == "NHW":
            return pixels[:, 0]
        return pixels[0] if len(shape) == 3 else pixels

    def _settings(self, spec: TensorSpec) -> PictureSettings:
        shape = tuple(spec.shape or ())
        example = self.example_shape(spec.name)
        if len(shape) == 2 and math.isqrt(max(0, shape[1])) ** 2 == shape[1] > 1:  # rows of pixels
            side = math.isqrt(shape[1])
            spec = replace(spec, shape=(shape[0], 1, side, side))
        chosen = next((each for each in get_args(Layout) if each == self.layout.upper()), None)
        found = picture_settings(spec, example, self.outputs, chosen)
        if found is None:
            shown = "no shape" if spec.shape is None else str(list(shape))
            if chosen and picture_settings(spec, example, self.outputs):
                at = {"NCHW": -3, "NHWC": -1}[chosen]
                raise InvalidInput(f"--layout: expected 1, 3 or 4 channels, and as {chosen} {shown} has {shape[at]}")
            raise InvalidInput(f"a picture needs an input [N,C,H,W], [N,H,W,C] or [N, pixels of a square], got {shown}")
        return found

    def _size(self, own: tuple[int, int], settings: PictureSettings) -> tuple[int | None, int | None]:
        """Return height and width for a picture, whose own ones are given; None for a side in proportion."""
        declared = settings.height, settings.width
        if not self.resize and not settings.keeps_size:
            return declared
        wanted = kept_size(*own) if self.resize in ("", "own") else _parse_size(self.resize)
        if not settings.is_free and any(side not in (None, each) for side, each in zip(declared, wanted, strict=True)):
            height, width = (-1 if side is None else side for side in declared)
            raise InvalidInput(f"--resize: the input takes {width}x{height} (-1: any), got {self.resize}")
        return wanted

    def _scale_options(self, spec: TensorSpec, settings: PictureSettings) -> tuple[dict[str, Any], str]:
        """Return what the pixels are multiplied by, and its name."""
        assert spec.datatype is not None
        is_float = spec.datatype.kind == "float"
        scale = self.scale or settings.values
        if scale == "imagenet":
            if settings.channels != 3 or not is_float:
                raise InvalidInput("--scale imagenet: expected an input of floats with three channels")
            return dict(_IMAGENET), scale
        found = _RANGE.fullmatch(scale)
        try:
            low, high = (float(found[1]), float(found[2])) if found else (0.0, 0.0)
        except ValueError:
            low = high = 0.0
        if not low < high:
            raise InvalidInput(f"--scale: expected LOW..HIGH, such as 0..1, or imagenet, got '{scale}'")
        if not is_float and (high - low < 255 or not _fits(low, spec) or not _fits(high, spec)):
            raise InvalidInput(f"--scale: {spec.datatype} does not hold values {scale}")
        return ({} if (low, high) == (0, 255) else {"scale": (high - low) / 255, "mean": -low}), scale

    # --- sounds ------------------------------------------------------------------------------------------------------

    def _sound(self, path: str, content: bytes, spec: TensorSpec) -> Array:
        where = f"'{path}'"
        samples, own = read_wav(content, where)
        rate = self.sample_rate or own
        samples = resample(samples, own, rate, where)
        if self.rate not in (0, rate):
            raise InvalidInput(f"expected sounds of one rate, got {self.rate} and {rate} Hz: give --sample-rate")
        self.rate = rate
        changed = "" if rate == own else f" to {rate} Hz"
        note = f"{path}: {len(samples)} samples, {own} Hz{changed}"
        assert spec.datatype is not None
        if spec.datatype.name == "INT16":
            samples = np.clip(np.rint(samples * 32768), -32768, 32767).astype(np.int16)
        elif spec.datatype.kind != "float":
            raise InvalidInput(f"a sound needs an input of floats, INT16 or bytes, got {spec.datatype}")
        placed = _place(samples, spec)
        if placed.size != len(samples):
            rows = f"{len(placed)} windows of " if len(placed) > 1 else ""
            note += f", as {rows}{placed.size // len(placed) if rows else placed.size} with zeros at the end"
        self.notes.append(note)
        return _as_type(placed, spec)


def _place(samples: Array, spec: TensorSpec) -> Array:
    """Return samples in the declared shape: along its last axis that is not 1, in windows if that is shorter."""
    shape = tuple(spec.shape) if spec.shape is not None else (-1,)
    if not shape:
        raise InvalidInput("a sound needs an input with an axis of samples")
    at = next((i for i in reversed(range(len(shape))) if shape[i] != 1), len(shape) - 1)
    others = [length for i, length in enumerate(shape) if i != at]
    if any(length not in (-1, 1) for length in others):
        raise InvalidInput(f"a sound of one channel needs other axes of length 1, got {list(shape)}")
    length = shape[at] if shape[at] > 0 else len(samples)
    windows = max(1, math.ceil(len(samples) / length))
    if windows > 1 and (at == 0 or shape[0] != -1):
        raise InvalidInput(f"expected {length} samples, got {len(samples)}: cut the file")
    padded = np.pad(samples, (0, windows * length - len(samples)))
    return padded.reshape([length if i == at else windows if i == 0 else 1 for i in range(len(shape))])


# --- files -----------------------------------------------------------------------------------------------------------


def _parse_size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,5})(?:x(\d{1,5}))?", text)
    if found is None or not all(0 < int(n) <= _MAX_PIXELS for n in found.groups() if n):
        raise InvalidInput(f"--resize: expected WIDTHxHEIGHT in pixels, such as 640x480, or one number, got '{text}'")
    return int(found[2] or found[1]), int(found[1])


def _as_type(array: Array, spec: TensorSpec) -> Array:
    assert spec.datatype is not None
    whole = spec.datatype.kind != "float" and array.dtype.kind == "f"
    return (np.rint(array) if whole else array).astype(spec.datatype.dtype)


def _fits(value: float, spec: TensorSpec) -> bool:
    assert spec.datatype is not None
    if spec.datatype.kind not in ("int", "uint"):
        return False
    limits = np.iinfo(spec.datatype.dtype)
    return limits.min <= value <= limits.max


def _size(array: Array) -> str:
    return "x".join(map(str, array.shape[1:]))
