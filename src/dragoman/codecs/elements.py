"""BYTES tensors as lists of elements: text, or what one codec makes of each."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from dragoman.core.bytes_tensor import BytesTensor, texts_of
from dragoman.core.datatypes import BYTES, Array
from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import Scalar, Tensor, object_array

T = TypeVar("T")


def strings(tensor: Tensor, name: str) -> Array:
    """The `str` of every element, in an object array of the same shape; InvalidInput where one is not UTF-8."""
    return object_array(texts(tensor, f"input '{name}'"), tensor.data.shape)


def texts(tensor: Tensor, where: str) -> list[str]:
    """The `str` of every element, in row-major order; InvalidInput naming the first that is not UTF-8."""
    try:
        return list(texts_of(tensor))
    except UnicodeDecodeError as bad:
        at, element = next((i, e) for i, e in enumerate(tensor.data.flat) if _broken(e))
        raise InvalidInput(f"{where}: expected text in UTF-8, got {element[:20]!r} at element {at}") from bad


def _broken(element: bytes) -> bool:
    try:
        element.decode()
    except UnicodeDecodeError:
        return True
    return False


def is_one_or_more(value: Any, kind: type) -> bool:
    """Whether a value is of that type, or a list of such."""
    listed = isinstance(value, list) and bool(value)
    return isinstance(value, kind) or (listed and all(isinstance(v, kind) for v in value))


def fault(where: str, content_type: str, text: str) -> InvalidInput:
    """What is wrong with a tensor, for whoever sent it."""
    return InvalidInput(f"{where}: content type '{content_type}' {text}")


def decoded(tensor: Tensor, where: str, content_type: str, what: str, decode: Callable[[bytes], T]) -> list[Any]:
    """The value of each element of a BYTES tensor, as `listed` has it.

    `decode` raises ValueError for an element that is not `what`. Raises InvalidInput naming the content type and the
    first bad element.
    """
    if tensor.datatype is not BYTES:
        raise fault(where, content_type, f"needs datatype BYTES, got {tensor.datatype}")
    if decode == bytes.decode and (known := _known_texts(tensor)) is not None:
        return listed(known, tensor.shape)
    values: list[Any] = []
    for at, element in enumerate(tensor.data.flat):
        try:
            values.append(decode(element))
        except ValueError as bad:
            shown = element if len(element) <= 40 else element[:40] + b"..."
            raise fault(where, content_type, f"expects {what}, got {shown!r} at element {at} ({bad})") from bad
    return listed(values, tensor.data.shape)


def _known_texts(tensor: Tensor) -> list[str] | None:
    try:
        return list(texts_of(tensor))
    except UnicodeDecodeError:
        return None


def listed(values: list[T], shape: tuple[int, ...]) -> list[Any]:
    """Elements in row-major order as a list: flat for [N] and [N, 1], which mean the same; else nested as the shape."""
    if len(shape) <= 1 or (len(shape) == 2 and shape[1] == 1):
        return values
    return object_array(values, shape).tolist()  # type: ignore[no-any-return]


def encoded(
    value: Any, content_type: str, kinds: type | tuple[type, ...], encode: Callable[[Any], bytes], **extra: Scalar
) -> Tensor:
    """The BYTES tensor [N, 1] of N elements, or of one where the value itself is one.

    Raises InvalidInput naming the first element that is of none of the `kinds`.
    """
    elements: list[Any] = [value] if isinstance(value, kinds) else _elements(value, content_type)
    text = encode is str.encode and set(map(type, elements)) == {str}
    for at, element in enumerate(() if text else elements):
        if not isinstance(element, kinds):
            shown = " or ".join(k.__name__ for k in (kinds if isinstance(kinds, tuple) else (kinds,)))
            raise fault("value", content_type, f"takes a list of {shown}, got {type(element).__name__} at element {at}")
    parameters: dict[str, Scalar] = {"content_type": content_type, **extra}
    try:
        return text_tensor(elements, parameters) if text else tensor_of(map(encode, elements), parameters)
    except UnicodeEncodeError as bad:  # half of a surrogate pair
        at = next(i for i, e in enumerate(elements) if e is bad.object or e == bad.object)
        raise fault(
            "value", content_type, f"takes text that UTF-8 can hold, got {bad.object!r} at element {at}"
        ) from bad


def _elements(value: Any, content_type: str) -> list[Any]:
    if isinstance(value, Mapping) or not isinstance(value, Iterable) or isinstance(value, str | bytes):
        raise fault("value", content_type, f"takes a list, got {type(value).__name__}")
    return list(value)


def tensor_of(elements: Iterable[bytes], parameters: Mapping[str, Scalar]) -> Tensor:
    """The BYTES tensor [N, 1] of N elements."""
    flat = list(elements)
    return Tensor(object_array(flat, (len(flat), 1)), BYTES, parameters)


def text_tensor(elements: list[str], parameters: Mapping[str, Scalar]) -> Tensor:
    """The BYTES tensor [N, 1] of N texts, whose list is kept.

    UnicodeEncodeError with the first that UTF-8 cannot hold.
    """
    try:
        return BytesTensor.of_any_texts(elements, (len(elements), 1), parameters)
    except UnicodeEncodeError:
        return tensor_of((element.encode() for element in elements), parameters)
