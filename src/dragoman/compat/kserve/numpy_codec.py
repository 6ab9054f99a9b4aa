"""Datatypes of Open Inference and of NumPy."""

from typing import Any

import numpy as np

from dragoman.core.datatypes import BF16, BYTES, DATATYPES, datatype_of
from dragoman.core.errors import InvalidInput


def to_np_dtype(dtype: str) -> Any:
    """Return NumPy's type for a datatype, None for an unknown one and for BF16, which NumPy lacks."""
    datatype = DATATYPES.get(dtype)
    if datatype is None or datatype is BF16:
        return None
    return np.object_ if datatype is BYTES else datatype.dtype.type


def from_np_dtype(np_dtype: Any) -> str | None:
    """Return the datatype for a type of NumPy, None if there is none."""
    dtype = np.dtype(np_dtype)
    if dtype.kind in "OSUM":
        return BYTES.name
    try:
        return datatype_of(dtype).name
    except InvalidInput:
        return None
