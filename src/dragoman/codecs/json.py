"""The content types `json` and `pd_json`: one JSON text an element."""

from functools import partial
from typing import Any, ClassVar

from dragoman.codecs.codec import InputCodec
from dragoman.codecs.elements import decoded, fault, tensor_of
from dragoman.codecs.json_texts import json_text, json_value
from dragoman.core.datatypes import BYTES
from dragoman.core.tensor import Tensor


class JsonCodec(InputCodec):
    """A list of any JSON values, one an element. Anything but a list is encoded as a list of one."""

    content_type = "json"
    datatype = BYTES
    nonfinite: ClassVar[bool] = False

    @classmethod
    def can_encode(cls, value: Any) -> bool:
        return isinstance(value, dict) or (
            isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)
        )

    @classmethod
    def to_tensor(cls, value: Any, **options: Any) -> Tensor:
        elements: list[bytes] = []
        for at, element in enumerate(value if isinstance(value, list) else [value]):
            try:
                elements.append(json_text(element, nonfinite=cls.nonfinite))
            except ValueError as bad:
                text = f"takes JSON values, got {type(element).__name__} at element {at} ({bad})"
                raise fault("value", cls.content_type, text) from bad
        return tensor_of(elements, {"content_type": cls.content_type})

    @classmethod
    def to_value(cls, tensor: Tensor, where: str = "tensor") -> Any:
        read = partial(json_value, nonfinite=cls.nonfinite)
        return decoded(tensor, where, cls.content_type, "JSON", read)


class PandasJsonCodec(JsonCodec):
    """The elements of a data frame's column that are neither all text nor all numbers; NaN is the bare word."""

    content_type = "pd_json"
    nonfinite = True

    @classmethod
    def can_encode(cls, value: Any) -> bool:
        return False
