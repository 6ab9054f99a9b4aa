"""JSON of values with bytes or arrays, and lists of text or bytes, under the names of MLServer's modules."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from dragoman.core.documents import parse_json
from dragoman.formats import fast_json
from dragoman_mlserver.mlserver.codecs.adapted import decode_str

ListElement = bytes | str
ListPayload = ListElement | list[ListElement]


def is_list_of(payload: Any, instance_type: type[Any]) -> bool:
    return isinstance(payload, list) and all(isinstance(each, instance_type) for each in payload)


def as_list(payload: ListPayload) -> Iterator[ListElement]:
    """Yield the elements of a list, or a single element."""
    yield from payload if isinstance(payload, list) else (payload,)


def encode_to_json_bytes(v: Any) -> bytes:
    """Return a value as JSON; bytes are text, NaN and infinities are null."""
    return fast_json.dumps(v, default=_text)


def decode_from_bytelike_json_to_dict(v: bytes | str) -> dict[str, Any]:
    value: dict[str, Any] = fast_json.loads(v)
    return value


class JSONEncoderWithArray(json.JSONEncoder):
    """Encode arrays as lists, and numbers of NumPy as those of Python."""

    def default(self, o: Any) -> Any:
        return o.tolist() if isinstance(o, np.ndarray | np.floating | np.integer) else super().default(o)


def encode_to_json(v: Any, use_bytes: bool = True) -> str | bytes:
    """Return a value with arrays as JSON. Raises ValueError for NaN and infinities."""
    text = json.dumps(v, ensure_ascii=False, allow_nan=False, separators=(",", ":"), cls=JSONEncoderWithArray)
    return text.encode() if use_bytes else text


def decode_json_input_or_output(input_or_output: Any) -> list[Any]:
    """Return the values of a BYTES tensor whose elements are JSON."""
    return [parse_json(each) for each in as_list(input_or_output.data.root)]


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return decode_str(value)
    raise TypeError(f"{type(value).__name__} is not JSON")
