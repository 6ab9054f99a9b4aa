"""The elements of a tensor as plain lists, and back."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dragoman.core.datatypes import BF16, BYTES, datatype, fp32_to_bf16
from dragoman.core.tensor import Parameters, Tensor, object_array
from dragoman.payload import message


class Text(str):
    """An element of a BYTES tensor that is text. Over gRPC their code knows it as bytes, and decodes it."""

    __slots__ = ()

    def decode(self, *_: str) -> str:
        return str(self)


def elements(tensor: Tensor) -> list[Any]:
    """The elements, flat, as their code expects them."""
    return message.elements(tensor, Text)


def tensor_of(data: Any, name: str, shape: Sequence[int], parameters: Parameters) -> Tensor:
    """The tensor of a list, flat or nested, or an array. Raises ValueError, TypeError or InvalidInput."""
    kind, size = datatype(name), tuple(int(n) for n in shape)
    flat = data.reshape(-1) if isinstance(data, np.ndarray) else list(_flat(data))
    if len(flat) != math.prod(size):
        raise ValueError(f"{len(flat)} elements")
    if kind is BYTES:
        return Tensor(object_array(map(_bytes, flat), size), kind, parameters)
    if kind.kind == "float":
        flat = [math.nan if v is None else v for v in flat] if isinstance(flat, list) else flat
        numbers = fp32_to_bf16(np.asarray(flat)) if kind is BF16 else np.asarray(flat, dtype=kind.dtype)
    else:
        numbers = np.asarray(flat, dtype=kind.dtype)
    return Tensor(numbers.reshape(size), kind, parameters)


def _flat(data: Any) -> Iterator[Any]:
    """The elements of nested lists; text and bytes count as one element."""
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
    raise TypeError(f"a BYTES tensor holds bytes or text, got {type(element).__name__}")
