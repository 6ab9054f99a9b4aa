"""Content types `json` and `pd_json`: one JSON text per element."""

import json
from functools import partial
from typing import Any, ClassVar, NoReturn

from dragoman.codecs.codec import InputCodec
from dragoman.codecs.elements import bytes_tensor, content_error, decode_elements, is_one_or_more
from dragoman.core import documents
from dragoman.core.datatypes import BYTES
from dragoman.core.tensor import Tensor

_SCALARS = (str, int, float, bool, type(None))


class JsonCodec(InputCodec):
    """A list of JSON values, one per element. Any other value is encoded as a list of one."""

    content_type = "json"
    datatype = BYTES
    allows_nonfinite: ClassVar[bool] = False

    @classmethod
    def can_encode(cls, value: Any) -> bool:
        return is_one_or_more(value, dict)

    @classmethod
    def to_tensor(cls, value: Any, **options: Any) -> Tensor:
        elements: list[bytes] = []
        for at, element in enumerate(value if isinstance(value, list) else [value]):
            try:
                elements.append(serialize_json(element, nonfinite=cls.allows_nonfinite))
            except ValueError as error:
                text = f"expected JSON values, got {type(element).__name__} at element {at} ({error})"
                raise content_error("value", cls.content_type, text) from error
        return bytes_tensor(elements, {"content_type": cls.content_type})

    @classmethod
    def to_value(cls, tensor: Tensor, where: str = "tensor") -> Any:
        parse = partial(parse_json, nonfinite=cls.allows_nonfinite)
        return decode_elements(tensor, where, cls.content_type, "JSON", parse)


class PandasJsonCodec(JsonCodec):
    """Elements of a data frame column of mixed types; NaN is written as the bare word."""

    content_type = "pd_json"
    allows_nonfinite = True

    @classmethod
    def can_encode(cls, value: Any) -> bool:
        return False


def serialize_json(value: Any, *, nonfinite: bool = False) -> bytes:
    """Return a value as JSON. Raises ValueError if parsing it again would give a different value.

    With `nonfinite`, NaN and infinities are written as the words that Python's parser reads.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=nonfinite, separators=(",", ":"))
        if not isinstance(value, _SCALARS) and documents.parse_json(text) != value:
            raise ValueError("it changes when written as JSON")
        return text.encode()
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def parse_json(text: bytes, *, nonfinite: bool = False) -> Any:
    """Return the value of a JSON text. Raises ValueError for invalid JSON and unpaired surrogates."""
    value = documents.parse_json(text.decode(), parse_constant=None if nonfinite else _reject_constant)
    if b"\\u" in text:  # raises UnicodeEncodeError, a ValueError, for an unpaired surrogate
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _reject_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")
