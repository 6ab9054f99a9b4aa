"""Content type `datetime`: dates and times as ISO 8601."""

import re
from datetime import datetime
from typing import Any

from dragoman.codecs.codec import InputCodec
from dragoman.codecs.elements import decode_elements, encode_elements, is_one_or_more
from dragoman.core.datatypes import BYTES
from dragoman.core.tensor import Tensor

# More than six decimals of a second, which Python would truncate to microseconds.
_FINER_THAN_MICROSECONDS = re.compile(r"[.,]\d{6}\d*[1-9]")


class DatetimeCodec(InputCodec):
    """`list[datetime]`, one per element. A single one is encoded as a list of one.

    UTC offsets are preserved; of a named time zone only its offset at that time.
    """

    content_type = "datetime"
    type_hint = list[datetime]
    datatype = BYTES

    @classmethod
    def can_encode(cls, value: Any) -> bool:
        return is_one_or_more(value, datetime)

    @classmethod
    def to_tensor(cls, value: Any, **options: Any) -> Tensor:
        return encode_elements(value, cls.content_type, datetime, lambda each: each.isoformat().encode())

    @classmethod
    def to_value(cls, tensor: Tensor, where: str = "tensor") -> Any:
        return decode_elements(tensor, where, cls.content_type, "ISO 8601", _parse)


def _parse(element: bytes) -> datetime:
    text = element.decode()
    if len(text) > 26 and _FINER_THAN_MICROSECONDS.search(text):
        raise ValueError("finer than microseconds")
    return datetime.fromisoformat(text)
