"""Content type `datetime`: dates and times as ISO 8601."""

import re
from datetime import datetime

from dragoman.codecs.elements import ElementCodec

# More than six decimals of a second, which Python would truncate to microseconds.
_FINER_THAN_MICROSECONDS = re.compile(r"[.,]\d{6}\d*[1-9]")


def _parse(element: bytes) -> datetime:
    text = element.decode()
    if len(text) > 26 and _FINER_THAN_MICROSECONDS.search(text):
        raise ValueError("finer than microseconds")
    return datetime.fromisoformat(text)


class DatetimeCodec(ElementCodec):
    """`list[datetime]`, one per element. A single one is encoded as a list of one.

    UTC offsets are preserved; of a named time zone only its offset at that time.
    """

    content_type = "datetime"
    type_hint = list[datetime]
    element_type, expected = datetime, "ISO 8601"
    encode_element, decode_element = staticmethod(lambda each: each.isoformat().encode()), staticmethod(_parse)
