"""Reads DER (X.690), as far as certificates and revocation lists need it."""

import calendar
import time

_UTC_TIME = 0x17


def read_der(data: bytes) -> list[tuple[int, bytes]]:
    """Return the tag and the content of each value. Raises IndexError for truncated data."""
    found, at = [], 0
    while at < len(data):
        tag, size, at = data[at], data[at + 1], at + 2
        if size & 0x80:
            count = size & 0x7F
            size, at = int.from_bytes(data[at : at + count], "big"), at + count
        if at + size > len(data):
            raise IndexError("truncated")
        found.append((tag, data[at : at + size]))
        at += size
    return found


def read_time_s(tag: int, content: bytes) -> float:
    """Return an UTCTime, whose years are 1950 to 2049, or a GeneralizedTime in seconds since 1970.

    Raises ValueError.
    """
    text = content.decode("ascii")
    if tag == _UTC_TIME:
        text = ("19" if text >= "5" else "20") + text
    return calendar.timegm(time.strptime(text, "%Y%m%d%H%M%SZ"))
