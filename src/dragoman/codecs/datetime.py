"""The content type `datetime`: points in time as ISO 8601."""

import re
from datetime import datetime
from typing import Any

from dragoman.codecs.codec import InputCodec
from dragoman.codecs.elements import decoded, encoded, is_one_or_more
from dragoman.core.datatypes import BYTES
from dragoman.core.tensor import Tensor

# Python would drop what is finer than microseconds.
_TOO_FINE = re.compile(r"[.,]\d{6}\d*[1-9]")


class DatetimeCodec(InputCodec):
    """`list[datetime]`, one an element. A single one is encoded as a list of one.

    An offset is kept; of a zone with a name only its offset at that time is kept.
    """

    content_type = "datetime"
    type_hint = list[datetime]
    datatype = BYTES

    @classmethod
    def can_encode(cls, value: Any) -> bool:
        return is_one_or_more(value, datetime)

    @classmethod
    def to_tensor(cls, value: Any, **options: Any) -> Tensor:
        return encoded(value, cls.content_type, datetime, _written)

    @classmethod
    def to_value(cls, tensor: Tensor, where: str = "tensor") -> Any:
        return decoded(tensor, where, cls.content_type, "ISO 8601", _read)


def _written(value: datetime) -> bytes:
    return value.isoformat().encode()


def _read(element: bytes) -> datetime:
    text = element.decode()
    if len(text) > 26 and _TOO_FINE.search(text):
        raise ValueError("finer than microseconds")
    return datetime.fromisoformat(text)
