"""Content type `str`."""

from dragoman.compat.mlserver.codecs.adapted import AdaptedInputCodec, AdaptedRequestCodec
from dragoman.compat.mlserver.codecs.base import register_input_codec, register_request_codec


@register_input_codec
class StringCodec(AdaptedInputCodec):
    """Lists of UTF-8 text."""

    ContentType = "str"
    TypeHint = list[str]


@register_request_codec
class StringRequestCodec(AdaptedRequestCodec):
    """A request of one list of text."""

    ContentType = "str"
    TypeHint = list[str]
    InputCodec = StringCodec


def encode_str(elem: str) -> bytes:
    """Return text as UTF-8."""
    return elem.encode()


def decode_str(encoded: bytes | str, str_codec: str = "utf-8") -> str:
    """Return bytes as text, and text unchanged."""
    return encoded.decode(str_codec) if isinstance(encoded, bytes) else str(encoded)
