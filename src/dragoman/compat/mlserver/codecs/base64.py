"""The content type `base64`."""

from dragoman.compat.mlserver.codecs.adapted import AdaptedInput
from dragoman.compat.mlserver.codecs.base import register_input_codec


@register_input_codec
class Base64Codec(AdaptedInput):
    """Lists of bytes, which travel as base64."""

    ContentType = "base64"
    TypeHint = list[bytes]
