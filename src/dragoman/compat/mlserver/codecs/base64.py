"""Content type `base64`."""

from dragoman.compat.mlserver.codecs.adapted import AdaptedInputCodec
from dragoman.compat.mlserver.codecs.base import register_input_codec


@register_input_codec
class Base64Codec(AdaptedInputCodec):
    """Lists of bytes, sent as base64."""

    ContentType = "base64"
    TypeHint = list[bytes]
