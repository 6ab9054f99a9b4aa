"""Content type `np`."""

from typing import Any

import numpy as np

from dragoman.compat.mlserver.codecs.adapted import AdaptedInputCodec, AdaptedRequestCodec
from dragoman.compat.mlserver.codecs.base import register_input_codec, register_request_codec
from dragoman.core.datatypes import datatype, datatype_of


@register_input_codec
class NumpyCodec(AdaptedInputCodec):
    """Arrays; [N] is encoded as [N, 1]."""

    ContentType = "np"
    TypeHint = np.ndarray


@register_request_codec
class NumpyRequestCodec(AdaptedRequestCodec):
    """A request of one array."""

    ContentType = "np"
    TypeHint = np.ndarray
    InputCodec = NumpyCodec


def to_datatype(dtype: Any) -> str:
    """Return the name of the datatype of a dtype."""
    return datatype_of(np.dtype(dtype)).name


def to_dtype(input_or_output: Any) -> np.dtype[Any]:
    """Return the dtype of the datatype of a tensor."""
    return datatype(input_or_output.datatype).dtype
