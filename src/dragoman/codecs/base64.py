"""Content type `base64`: bytes as base64 text, for encodings that cannot carry bytes."""

from base64 import b64decode, b64encode
from functools import partial
from typing import Any

from dragoman.codecs.codec import InputCodec
from dragoman.codecs.elements import decode_elements, encode_elements, is_one_or_more
from dragoman.core.datatypes import BYTES
from dragoman.core.tensor import Tensor

_decode = partial(b64decode, validate=True)


class Base64Codec(InputCodec):
    """`list[bytes]`, one per element, sent as base64 in every encoding. A single `bytes` is a list of one."""

    content_type = "base64"
    type_hint = list[bytes]
    datatype = BYTES

    @classmethod
    def can_encode(cls, value: Any) -> bool:
        return is_one_or_more(value, bytes)

    @classmethod
    def to_tensor(cls, value: Any, **options: Any) -> Tensor:
        return encode_elements(value, cls.content_type, bytes, b64encode)

    @classmethod
    def to_value(cls, tensor: Tensor, where: str = "tensor") -> Any:
        return decode_elements(tensor, where, cls.content_type, "base64", _decode)
