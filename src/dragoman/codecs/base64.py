"""Content type `base64`: bytes as base64 text, for encodings that cannot carry bytes."""

from base64 import b64decode, b64encode
from functools import partial

from dragoman.codecs.elements import ElementCodec


class Base64Codec(ElementCodec):
    """`list[bytes]`, one per element, sent as base64 in every encoding. A single `bytes` is a list of one."""

    content_type = "base64"
    type_hint = list[bytes]
    element_type, expected = bytes, "base64"
    encode_element, decode_element = staticmethod(b64encode), staticmethod(partial(b64decode, validate=True))
