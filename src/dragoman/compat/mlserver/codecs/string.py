"""The content type `str`."""

from dragoman.compat.mlserver.codecs.adapted import AdaptedInput, AdaptedRequest
from dragoman.compat.mlserver.codecs.base import register_input_codec, register_request_codec


@register_input_codec
class StringCodec(AdaptedInput):
    """Lists of text in UTF-8."""

    ContentType = "str"
    TypeHint = list[str]


@register_request_codec
class StringRequestCodec(AdaptedRequest):
    """A request of one list of text."""

    ContentType = "str"
    TypeHint = list[str]
    InputCodec = StringCodec


def encode_str(elem: str) -> bytes:
    """The bytes of a text."""
    return elem.encode()


def decode_str(encoded: bytes | str, str_codec: str = "utf-8") -> str:
    """The text of bytes; text stays as it is."""
    return encoded.decode(str_codec) if isinstance(encoded, bytes) else str(encoded)
