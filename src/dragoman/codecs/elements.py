"""BYTES tensors as lists of elements: text, or one decoded value per element."""

from collections.abc import Callable, Iterable, Mapping
from operator import countOf
from typing import Any, ClassVar, TypeVar

from dragoman.codecs.codec import InputCodec
from dragoman.core.bytes_tensor import BytesTensor, texts_of
from dragoman.core.datatypes import BYTES, Array
from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import Scalar, Tensor, object_array

T = TypeVar("T")


def strings(tensor: Tensor, name: str) -> Array:
    """Return the elements of an input as an object array of `str` of the same shape. Raises InvalidInput."""
    return object_array(decode_texts(tensor, f"input '{name}'"), tensor.data.shape)


def decode_texts(tensor: Tensor, where: str) -> list[str]:
    """Return the elements as `str`, in row-major order. Raises InvalidInput naming the first that is not UTF-8."""
    try:
        return list(texts_of(tensor))
    except UnicodeDecodeError as error:
        at, element = next((i, e) for i, e in enumerate(tensor.data.flat) if not _is_utf8(e))
        raise InvalidInput(f"{where}: expected UTF-8 text, got {element[:20]!r} at element {at}") from error


def _is_utf8(element: bytes) -> bool:
    try:
        element.decode()
    except UnicodeDecodeError:
        return False
    return True


def is_one_or_more(value: Any, kind: type) -> bool:
    """Return whether a value is an instance of `kind` or a non-empty list of such."""
    is_list = isinstance(value, list) and bool(value)
    return isinstance(value, kind) or (is_list and all(isinstance(v, kind) for v in value))


class ElementCodec(InputCodec):
    """Codec of values of one type, each an element of a BYTES tensor. A single value is encoded as a list of one.

    element_type: the type. expected: the format of an element, for messages. encode_element, decode_element: functions
    of one element; `decode_element` raises ValueError.
    """

    datatype = BYTES
    element_type: ClassVar[type]
    expected: ClassVar[str]
    encode_element: ClassVar[Any]
    decode_element: ClassVar[Any]

    @classmethod
    def can_encode(cls, value: Any) -> bool:
        return is_one_or_more(value, cls.element_type)

    @classmethod
    def to_tensor(cls, value: Any, **options: Any) -> Tensor:
        return encode_elements(value, cls.content_type, cls.element_type, cls.encode_element)

    @classmethod
    def to_value(cls, tensor: Tensor, where: str = "tensor") -> Any:
        return decode_elements(tensor, where, cls.content_type, cls.expected, cls.decode_element)


def content_error(where: str, content_type: str, text: str) -> InvalidInput:
    """Return the error for a tensor or value that does not fit its content type."""
    return InvalidInput(f"{where}: content type '{content_type}': {text}")


def decode_elements(
    tensor: Tensor, where: str, content_type: str, expected: str, decode: Callable[[bytes], T]
) -> list[Any]:
    """Decode each element of a BYTES tensor; the result is nested as in `nest`.

    `decode` raises ValueError for an element that is not `expected`. Raises InvalidInput naming the content type and
    the first such element.
    """
    if tensor.datatype is not BYTES:
        raise content_error(where, content_type, f"expected datatype BYTES, got {tensor.datatype}")
    if decode == bytes.decode and (texts := _all_texts(tensor)) is not None:
        return nest(texts, tensor.shape)
    values: list[Any] = []
    for at, element in enumerate(tensor.data.flat):
        try:
            values.append(decode(element))
        except ValueError as error:
            shown = element if len(element) <= 40 else element[:40] + b"..."
            text = f"expected {expected}, got {shown!r} at element {at} ({error})"
            raise content_error(where, content_type, text) from error
    return nest(values, tensor.data.shape)


def _all_texts(tensor: Tensor) -> list[str] | None:
    try:
        return list(texts_of(tensor))
    except UnicodeDecodeError:
        return None


def nest(values: list[T], shape: tuple[int, ...]) -> list[Any]:
    """Return row-major elements as a flat list for shapes [N] and [N, 1], which mean the same, else nested lists."""
    if len(shape) <= 1 or (len(shape) == 2 and shape[1] == 1):
        return values
    return object_array(values, shape).tolist()  # type: ignore[no-any-return]


def encode_elements(value: Any, content_type: str, kind: type, encode: Callable[[Any], bytes]) -> Tensor:
    """Return the BYTES tensor [N, 1] of a list of N elements, or of a single one.

    Raises InvalidInput naming the first element that is not an instance of `kind`.
    """
    elements: list[Any] = [value] if isinstance(value, kind) else _list_of(value, content_type)
    is_text = encode is str.encode and 0 < len(elements) == countOf(map(type, elements), str)
    for at, element in enumerate(() if is_text else elements):
        if not isinstance(element, kind):
            text = f"expected a list of {kind.__name__}, got {type(element).__name__} at element {at}"
            raise content_error("value", content_type, text)
    parameters: dict[str, Scalar] = {"content_type": content_type}
    try:
        return text_tensor(elements, parameters) if is_text else bytes_tensor(map(encode, elements), parameters)
    except UnicodeEncodeError as error:  # an unpaired surrogate
        at = next(i for i, e in enumerate(elements) if e is error.object or e == error.object)
        text = f"expected text that UTF-8 can encode, got {error.object!r} at element {at}"
        raise content_error("value", content_type, text) from error


def _list_of(value: Any, content_type: str) -> list[Any]:
    if isinstance(value, Mapping) or not isinstance(value, Iterable) or isinstance(value, str | bytes):
        raise content_error("value", content_type, f"expected a list, got {type(value).__name__}")
    return list(value)


def bytes_tensor(elements: Iterable[bytes], parameters: Mapping[str, Scalar]) -> Tensor:
    """Return the BYTES tensor [N, 1] of N elements."""
    flat = list(elements)
    return Tensor(object_array(flat, (len(flat), 1)), BYTES, parameters)


def text_tensor(elements: list[str], parameters: Mapping[str, Scalar]) -> Tensor:
    """Return the BYTES tensor [N, 1] of N texts; it keeps a reference to the list.

    Raises UnicodeEncodeError with the first text that UTF-8 cannot encode.
    """
    try:
        return BytesTensor.of_any_texts(elements, (len(elements), 1), parameters)
    except UnicodeEncodeError:
        return bytes_tensor((element.encode() for element in elements), parameters)
