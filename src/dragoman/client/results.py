"""The outputs of a response as arrays and values, and how a notebook shows them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dragoman.client.html import Html, bars, code, escape, image, table
from dragoman.codecs.codec import CODECS
from dragoman.core.datatypes import BYTES, UINT8, Array
from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import Tensor, numpy_numbers
from dragoman.formats.message import InferenceResponse

Labels = Mapping[str, Sequence[str]]

_SHOWN_TEXT = 60
_SHOWN_ELEMENTS = 8
_SHOWN_ROWS = 3
_SHOWN_BARS = 5
_PLOTTED_ROWS, _PLOTTED_BARS = 16, 20
_MOST_SCORES = 100_000
_MOST_PIXELS = 1 << 22
_SMALLEST_IMAGE = 8
_CHANNELS = (1, 3, 4)


class Result(Mapping[str, Array]):
    """Outputs of one response by name, in the order of the model.

    `result["y"]` is an array; with a content type, and unless `decode=False`, the value that it stands for: a list of
    strings or datetimes, for example. Arrays are read-only views of the response: copy them before writing. BF16 is an
    array of `ml_dtypes.bfloat16`, BYTES an object array of `bytes`. Notebooks show a table, scores as bars, and images.
    """

    def __init__(self, response: InferenceResponse, decode: bool = True, labels: Labels | None = None) -> None:
        self.response = response
        self._decode = decode
        self._labels: Labels = labels or {}
        self._tensors = response.tensors
        self._values: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Array:
        if name not in self._values:
            self._values[name] = self._value(name, self._tensors[name])
        value: Array = self._values[name]
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        lines = [f"{name}: {t.datatype}{list(t.shape)} {shown(t)}".rstrip() for name, t in self._tensors.items()]
        between = " " if len(lines) == 1 else "\n  "
        return f"<Result of {self.response.model_name}:{between}{between.join(lines)}>"

    def _repr_html_(self) -> str:
        rows = [
            (escape(name), str(t.datatype), escape(list(t.shape)), self._picture(name, t) or code(shown(t)))
            for name, t in self._tensors.items()
        ]
        version = f" {escape(self.response.model_version)}" if self.response.model_version else ""
        caption = f"Result of <b>{escape(self.response.model_name)}</b>{version}"
        return table(caption, ("output", "datatype", "shape", "value"), rows)

    def plot(self, name: str = "") -> Html:
        """Return the scores of an output as bars, or its images, for a notebook; by default of all outputs.

        Scores are the rows of an output of numbers [classes] or [N, classes]; images are outputs such as [N, 3, H, W].
        Raises InvalidInput if there is nothing to plot, KeyError for an unknown name.
        """
        tensors = {name: self._tensors[name]} if name else self._tensors
        found = {n: _images_html(t) or self._bars(n, t, _PLOTTED_ROWS, _PLOTTED_BARS) for n, t in tensors.items()}
        if not any(found.values()):
            raise InvalidInput("nothing to plot: expected an output of scores [N, classes] or of images [N, 3, H, W]")
        titled = [f"<div><b>{escape(n)}</b></div>{picture}" for n, picture in found.items() if picture]
        return Html("".join(titled))

    @property
    def value(self) -> Any:
        """The response as one value: decoded by its content type (a DataFrame for `pd`), else its only output.

        A response with several outputs and no content type is a dict.
        """
        kind = self.response.parameters.get("content_type")
        codec = CODECS.request(str(kind)) if kind and self._decode else None
        if codec is not None:
            return codec.decode_response(self.response)
        return next(iter(self.values())) if len(self) == 1 else dict(self)

    def to_numpy(self, name: str = "") -> Array:
        """Return the array of an output without decoding; the name may be left out if there is one output.

        Raises InvalidInput if there are several outputs and no name, KeyError for an unknown name.
        """
        if not name and len(self) != 1:
            raise InvalidInput(f"expected the name of an output, one of {', '.join(map(repr, self))}")
        return self._tensors[name or next(iter(self))].data

    def to_dataframe(self) -> Any:
        """Return the outputs as columns of a pandas DataFrame; a matrix [N, k] as k columns `name_0` or `name_label`.

        Raises InvalidInput if they cannot be columns.
        """
        codec = CODECS.request("pd")
        assert codec is not None
        columns: dict[str, Tensor] = {}
        for name, tensor in self._tensors.items():
            if len(tensor.shape) != 2 or tensor.shape[1] == 1:
                columns[name] = tensor
                continue
            for at, label in enumerate(self._labels_of(name, tensor.shape[1])):
                columns[f"{name}_{label}"] = Tensor(tensor.data[:, at], tensor.datatype, tensor.parameters)
        return codec.to_value(columns, "output")

    def _value(self, name: str, tensor: Tensor) -> Any:
        content_type = tensor.parameters.get("content_type")
        if not content_type or not self._decode:
            return tensor.data
        where = f"output '{name}'"
        return CODECS.input(str(content_type), where).to_value(tensor, where)

    # --- pictures --------------------------------------------------------------------------------------------

    def _picture(self, name: str, tensor: Tensor) -> str:
        """Return the picture of an output that surely has one: images, and scores that are named or probabilities."""
        if found := _images_html(tensor):
            return found
        if not (_is_scores(tensor) and (name in self._labels or _are_probabilities(tensor))):
            return ""
        return self._bars(name, tensor, _SHOWN_ROWS, _SHOWN_BARS)

    def _bars(self, name: str, tensor: Tensor, most_rows: int, most_bars: int) -> str:
        if not _is_scores(tensor):
            return ""
        rows = numpy_numbers(tensor).reshape(-1, tensor.shape[-1]).astype(float)
        labels = self._labels_of(name, rows.shape[1])
        titles = [f"row {at}" for at in range(len(rows))] if len(rows) > 1 else [""]
        drawn = [
            f"<div>{title and f'<div>{title}</div>'}{bars(labels, row.tolist(), most_bars)}</div>"
            for title, row in zip(titles, rows[:most_rows], strict=False)
        ]
        if len(rows) > most_rows:
            drawn.append(f"<div>and {len(rows) - most_rows} more rows</div>")
        return "".join(drawn)

    def _labels_of(self, name: str, count: int) -> list[str]:
        labels = list(self._labels.get(name, ()))
        return labels if len(labels) == count else [str(i) for i in range(count)]


def shown(tensor: Tensor) -> str:
    """Return the elements in one line, shortened."""
    if 0 in tensor.shape:
        return ""
    if tensor.datatype is BYTES:
        elements = [_shown_element(each) for each in tensor.data.reshape(-1)[: _SHOWN_ELEMENTS + 1].tolist()]
        more = ", ..." if len(elements) > _SHOWN_ELEMENTS else ""
        return f"[{', '.join(elements[:_SHOWN_ELEMENTS])}{more}]"
    array = numpy_numbers(tensor)
    if array.ndim == 0:
        return f"{array.item():.6g}" if tensor.datatype.kind == "float" else str(array.item())
    text = np.array2string(array, precision=6, threshold=_SHOWN_ELEMENTS, edgeitems=2, separator=", ")
    return re.sub(r"(?<=\[) | (?=[,\]])", "", " ".join(text.split()))


def _shown_element(element: bytes) -> str:
    try:
        text = repr(element.decode())
    except UnicodeDecodeError:
        text = repr(element)
    return text if len(text) <= _SHOWN_TEXT else f"{text[: _SHOWN_TEXT - 1]}…"


def _is_scores(tensor: Tensor) -> bool:
    """Return whether the rows of a tensor can be drawn as bars."""
    shape = tensor.shape
    if not (1 <= len(shape) <= 2 and shape[-1] >= 2 and 0 < np.prod(shape) <= _MOST_SCORES):
        return False
    return tensor.datatype.kind in ("float", "int", "uint") and bool(np.isfinite(numpy_numbers(tensor)).all())


def _are_probabilities(tensor: Tensor) -> bool:
    if tensor.datatype.kind != "float":
        return False
    rows = numpy_numbers(tensor).astype(float)
    return bool((rows >= 0).all() and np.allclose(rows.sum(axis=-1), 1, atol=1e-2))


def _images_html(tensor: Tensor) -> str:
    """Return the images of an output; "" if it is none: UINT8 pixels, or floats from 0 to 1 or 0 to 255."""
    pixels = _pixels(tensor)
    if pixels is None:
        return ""
    more = f" and {len(pixels) - _SHOWN_ROWS} more" if len(pixels) > _SHOWN_ROWS else ""
    return " ".join(map(image, pixels[:_SHOWN_ROWS])) + more


def _pixels(tensor: Tensor) -> Array | None:
    """Return UINT8 pixels [N, H, W, channels]; None if the tensor is not one of images."""
    shape = tensor.shape
    if len(shape) == 3 and shape[2] in _CHANNELS and tensor.datatype is UINT8:
        shape = (1, *shape)
    if len(shape) != 4 or not 0 < np.prod(shape[1:]) <= _MOST_PIXELS or tensor.datatype.kind not in ("uint", "float"):
        return None
    array = numpy_numbers(tensor).reshape(shape)[: _SHOWN_ROWS + 1]
    if shape[3] not in _CHANNELS:
        if shape[1] not in _CHANNELS:
            return None
        array = array.transpose(0, 2, 3, 1)
    if min(array.shape[1:3]) < _SMALLEST_IMAGE or not len(array):
        return None
    if tensor.datatype is UINT8:
        return array
    numbers = array.astype(float)
    if not np.isfinite(numbers).all() or numbers.min() < 0 or numbers.max() > 255:
        return None
    pixels: Array = np.rint(numbers * (255 if numbers.max() <= 1 else 1)).astype(np.uint8)
    return pixels
