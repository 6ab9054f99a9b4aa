"""Content type `str`: BYTES as UTF-8 text."""

from typing import Any

from dragoman.codecs.codec import FirstTensorCodec, InputCodec
from dragoman.codecs.elements import decode_elements, encode_elements, is_one_or_more
from dragoman.core.datatypes import BYTES
from dragoman.core.tensor import Tensor


class StringCodec(InputCodec):
    """`list[str]`, one per element. A single `str` is encoded as a list of one."""

    content_type = "str"
    type_hint = list[str]
    datatype = BYTES

    @classmethod
    def can_encode(cls, value: Any) -> bool:
        return is_one_or_more(value, str)

    @classmethod
    def to_tensor(cls, value: Any, **options: Any) -> Tensor:
        return encode_elements(value, cls.content_type, str, str.encode)

    @classmethod
    def to_value(cls, tensor: Tensor, where: str = "tensor") -> Any:
        return decode_elements(tensor, where, cls.content_type, "UTF-8 text", bytes.decode)


class StringRequestCodec(FirstTensorCodec):
    """A whole request of one text tensor."""

    content_type = "str"
    type_hint = list[str]
    codec = StringCodec
