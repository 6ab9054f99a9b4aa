"""The content type `base64`: bytes as text, for wires that carry no bytes."""

from base64 import b64decode, b64encode
from functools import partial
from typing import Any

from dragoman.codecs.codec import InputCodec
from dragoman.codecs.elements import decoded, encoded, is_one_or_more
from dragoman.core.datatypes import BYTES
from dragoman.core.tensor import Tensor

_decode = partial(b64decode, validate=True)


class Base64Codec(InputCodec):
    """`list[bytes]`, one an element, which travels as base64 on every wire. A single `bytes` is a list of one."""

    content_type = "base64"
    type_hint = list[bytes]
    datatype = BYTES

    @classmethod
    def can_encode(cls, value: Any) -> bool:
        return is_one_or_more(value, bytes)

    @classmethod
    def to_tensor(cls, value: Any, **options: Any) -> Tensor:
        return encoded(value, cls.content_type, bytes, b64encode)

    @classmethod
    def to_value(cls, tensor: Tensor, where: str = "tensor") -> Any:
        return decoded(tensor, where, cls.content_type, "base64", _decode)
