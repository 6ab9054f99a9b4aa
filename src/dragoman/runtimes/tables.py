"""Arrays and data frames for frameworks, from calls with a content type."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dragoman.codecs.decode import Defaults, request_codec, with_defaults
from dragoman.core.calls import Infer
from dragoman.core.datatypes import Array
from dragoman.core.errors import InvalidInput
from dragoman.core.signature import check_columns


def content(call: Infer, defaults: Defaults) -> Any:
    """Decode all inputs by the content type of the call or of the model: an array, data frame or list.

    None without a content type. Raises InvalidInput naming the input.
    """
    codec = request_codec(call, defaults)
    return None if codec is None else codec.to_value(with_defaults(call.inputs, defaults), "input")


def columns_in_order(frame: Any, names: Sequence[str]) -> Any:
    """Return a data frame with the columns of the training data in their order. Raises InvalidInput for other
    columns."""
    given = [str(label) for label in frame.columns]
    check_columns(given, names, "table")
    return frame if given == list(names) else frame[list(names)]


def matrix(value: Any, width: int, names: Sequence[str] | None = None) -> Array:
    """Return the numbers of an array or data frame, [rows, width]. Raises InvalidInput naming the column."""
    if hasattr(value, "columns"):
        if names:
            value = columns_in_order(value, names)
        for label, dtype in value.dtypes.items():
            if getattr(dtype, "kind", "O") not in "biuf":
                raise InvalidInput(f"input '{label}': content type 'pd': expected numbers, got {dtype}")
        array = value.to_numpy()
        # Booleans beside numbers, and nullable columns, have no common dtype.
        value = array if array.dtype.kind in "biuf" else value.to_numpy(dtype=np.float64, na_value=np.nan)
    if getattr(value, "ndim", 0) != 2 or value.shape[1] != width:
        shape = list(getattr(value, "shape", (len(value),)))
        raise InvalidInput(f"expected a table of shape [-1, {width}], got {shape}")
    numbers: Array = value
    if numbers.dtype.kind not in "biuf":
        raise InvalidInput(f"expected numbers, got an array of dtype {numbers.dtype}")
    return numbers


def check_fp32(array: Array, names: Sequence[str] = ("input",)) -> None:
    """Raise InvalidInput naming the input if a number does not fit FP32 (other than by rounding).

    `names`: one name for the whole array, or one per column.
    """
    if array.dtype.kind == "f" and array.dtype.itemsize > 4:
        with np.errstate(over="ignore"):
            changed = np.isinf(array.astype(np.float32)) & np.isfinite(array)
    elif array.dtype.kind in "iu" and array.dtype.itemsize > 2:
        changed = np.zeros(array.shape, np.bool_)
        large = (array > _EXACT) | (array < -_EXACT)
        if large.any():
            changed[large] = [int(np.float32(each)) != each for each in array[large].tolist()]
    else:
        return
    if changed.any():
        column = int(np.argwhere(changed)[0][-1]) if len(names) > 1 else 0
        raise InvalidInput(f"input '{names[column]}': {array[changed].flat[0]} does not fit into FP32")


# Up to here every integer is one of FP32.
_EXACT = 1 << 24
