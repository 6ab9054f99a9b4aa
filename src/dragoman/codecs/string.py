"""Content type `str`: BYTES as UTF-8 text."""

from dragoman.codecs.codec import FirstTensorCodec
from dragoman.codecs.elements import ElementCodec


class StringCodec(ElementCodec):
    """`list[str]`, one per element. A single `str` is encoded as a list of one."""

    content_type = "str"
    type_hint = list[str]
    element_type, expected = str, "UTF-8 text"
    encode_element, decode_element = staticmethod(str.encode), staticmethod(bytes.decode)


class StringRequestCodec(FirstTensorCodec):
    """A whole request of one text tensor."""

    content_type = "str"
    type_hint = list[str]
    codec = StringCodec
