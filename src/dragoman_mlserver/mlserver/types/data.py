"""Elements of a tensor as plain lists, and back."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dragoman.core.bytes_tensor import BytesTensor, came_as_text, texts_of
from dragoman.core.datatypes import BYTES, Array, Datatype, datatype, round_to
from dragoman.core.errors import InvalidInput, InvalidOutput
from dragoman.core.tensor import Parameters, Tensor, object_array
from dragoman.formats import message


class ElementText(str):
    """An element of a BYTES tensor that was sent as text. It has `decode`, for code written for bytes."""

    __slots__ = ()

    def decode(self, *_: str) -> str:
        return str(self)


def elements(tensor: Tensor) -> list[Any]:
    """Return the elements as a flat list; those of BYTES as text if they were sent as text, else as bytes."""
    if tensor.datatype is not BYTES:
        return message.elements(tensor)
    if came_as_text(tensor):
        return list(map(ElementText, texts_of(tensor)))
    values: list[Any] = tensor.data.reshape(-1).tolist()
    return [None if each is None else ElementText(each.decode()) for each in values] if has_null(tensor) else values


def has_null(tensor: Tensor) -> bool:
    """Return whether a BYTES tensor was sent as text of which some elements are null."""
    return type(tensor) is Tensor and tensor.datatype is BYTES and None in tensor.data.reshape(-1).tolist()


def tensor_of(
    data: Any, name: str, shape: Sequence[int], parameters: Parameters, *, allows_null: bool = False
) -> Tensor:
    """Return a flat or nested list or an array as a tensor; elements of BYTES may be None with `allows_null`.

    Raises ValueError, TypeError or InvalidInput.
    """
    kind, size = datatype(name), tuple(int(n) for n in shape)
    flat = data.reshape(-1) if isinstance(data, np.ndarray) else list(_flat(data))
    is_single = kind is BYTES and len(flat) == 1 and len(size) == 1 and isinstance(flat[0], str | bytes)
    if is_single and size[0] in (len(flat[0]), len(_bytes(flat[0]))):
        size = (1,)  # models of MLServer may state the length of a single text as its shape
    if len(flat) != math.prod(size):
        raise ValueError(f"got {len(flat)} elements")
    if kind is BYTES and flat and all(isinstance(each, str) for each in flat):
        return BytesTensor.of_any_texts([str(each) for each in flat], size, parameters)
    if kind is BYTES:
        elements = [None if each is None and allows_null else _bytes(each) for each in flat]
        return Tensor(object_array(elements, size), kind, parameters)
    numbers = _floats(flat, kind) if kind.kind == "float" else _exact(flat, kind)
    return Tensor(numbers.reshape(size), kind, parameters)


def output_tensor(
    where: str, data: Any, name: str, shape: Sequence[int], parameters: Parameters, *, allows_null: bool = False
) -> Tensor:
    """Return the data of an output as `tensor_of` does. Raises InvalidOutput naming where it is."""
    try:
        return tensor_of(data, name, shape, parameters, allows_null=allows_null)
    except (TypeError, ValueError, OverflowError, InvalidInput) as error:
        raise InvalidOutput(f"{where}: expected {name} data of shape {list(shape)}: {error}") from error


def _floats(flat: Any, kind: Datatype) -> Array:
    if isinstance(flat, list):
        flat = [math.nan if v is None else v for v in flat]
    return round_to(flat if hasattr(flat, "dtype") and flat.dtype.kind in "biufV" else np.asarray(flat, float), kind)


def _exact(flat: Any, kind: Datatype) -> Array:
    """Return integers or booleans. Raises ValueError for a number that would change."""
    numbers = np.asarray(flat, dtype=kind.dtype)
    given = np.asarray(flat)
    if given.dtype.kind in "iuf" and (changed := numbers != given).any():
        raise ValueError(f"{given[changed][0]} does not fit into {kind}")
    return numbers


def _flat(data: Any) -> Iterator[Any]:
    """Yield the elements of nested lists; text and bytes are elements."""
    if isinstance(data, list | tuple):
        for each in data:
            yield from _flat(each) if isinstance(each, list | tuple) else (each,)
    else:
        yield data


def _bytes(element: Any) -> bytes:
    match element:
        case bytes() | bytearray() | memoryview():
            return bytes(element)
        case str():
            return element.encode()
    raise TypeError(f"expected bytes or text, got {type(element).__name__}")
