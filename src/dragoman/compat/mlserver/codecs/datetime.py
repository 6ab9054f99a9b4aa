"""The content type `datetime`."""

from datetime import datetime
from typing import Any

from dragoman.compat.mlserver.codecs.adapted import AdaptedInput
from dragoman.compat.mlserver.codecs.base import register_input_codec
from dragoman.compat.mlserver.types import RequestInput, ResponseOutput


@register_input_codec
class DatetimeCodec(AdaptedInput):
    """Lists of points in time as ISO 8601, which may be given as text too."""

    ContentType = "datetime"
    TypeHint = list[datetime]

    @classmethod
    def encode_output(cls, name: str, payload: Any, use_bytes: bool = True, **kwargs: Any) -> ResponseOutput:
        return super().encode_output(name, _parsed(payload), **kwargs)

    @classmethod
    def encode_input(cls, name: str, payload: Any, use_bytes: bool = True, **kwargs: Any) -> RequestInput:
        return super().encode_input(name, _parsed(payload), **kwargs)


def _parsed(payload: Any) -> Any:
    if isinstance(payload, str):
        return datetime.fromisoformat(payload)
    if isinstance(payload, list):
        return [datetime.fromisoformat(each) if isinstance(each, str) else each for each in payload]
    return payload
