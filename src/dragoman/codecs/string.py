"""The content type `str`: BYTES as text in UTF-8."""

from typing import Any

from dragoman.codecs.codec import FirstTensorCodec, InputCodec
from dragoman.codecs.elements import decoded, encoded, is_one_or_more
from dragoman.core.datatypes import BYTES
from dragoman.core.tensor import Tensor

CONTENT_TYPE = "str"


class StringCodec(InputCodec):
    """`list[str]`, one an element. A single `str` is encoded as a list of one."""

    content_type = CONTENT_TYPE
    type_hint = list[str]
    datatype = BYTES

    @classmethod
    def can_encode(cls, value: Any) -> bool:
        return is_one_or_more(value, str)

    @classmethod
    def to_tensor(cls, value: Any, **options: Any) -> Tensor:
        return encoded(value, cls.content_type, str, str.encode)

    @classmethod
    def to_value(cls, tensor: Tensor, where: str = "tensor") -> Any:
        return decoded(tensor, where, cls.content_type, "text in UTF-8", bytes.decode)


class StringRequestCodec(FirstTensorCodec):
    """A whole request of one tensor of text."""

    content_type = CONTENT_TYPE
    type_hint = list[str]
    codec = StringCodec
