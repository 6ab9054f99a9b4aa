"""Content type `datetime`."""

from datetime import datetime
from typing import Any

from dragoman.compat.mlserver.codecs.adapted import AdaptedInputCodec
from dragoman.compat.mlserver.codecs.base import register_input_codec
from dragoman.compat.mlserver.types import RequestInput, ResponseOutput


@register_input_codec
class DatetimeCodec(AdaptedInputCodec):
    """Lists of datetimes, or of ISO 8601 text."""

    ContentType = "datetime"
    TypeHint = list[datetime]

    @classmethod
    def encode_output(cls, name: str, payload: Any, use_bytes: bool = True, **kwargs: Any) -> ResponseOutput:
        return super().encode_output(name, _parse(payload), **kwargs)

    @classmethod
    def encode_input(cls, name: str, payload: Any, use_bytes: bool = True, **kwargs: Any) -> RequestInput:
        return super().encode_input(name, _parse(payload), **kwargs)


def _parse(payload: Any) -> Any:
    if isinstance(payload, str):
        return datetime.fromisoformat(payload)
    if isinstance(payload, list):
        return [datetime.fromisoformat(each) if isinstance(each, str) else each for each in payload]
    return payload
