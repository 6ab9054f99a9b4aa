"""Data and parameters of tensors of KServe's types."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dragoman.core.bytes_tensor import BytesTensor, texts_of
from dragoman.core.datatypes import BYTES, Array, Datatype, datatype, round_to
from dragoman.core.errors import InvalidInput, InvalidOutput
from dragoman.core.tensor import NONE, Parameters, Tensor, object_array
from dragoman.formats import message

# The parameter that describes the encoding of a tensor in a REST message.
_BINARY_SIZE = "binary_data_size"


def elements(tensor: Tensor) -> list[Any]:
    """Return the elements as a flat list. Those of BYTES are text if all of them are valid UTF-8, else bytes."""
    if tensor.datatype is not BYTES:
        return message.elements(tensor)
    try:
        return list(texts_of(tensor))
    except UnicodeDecodeError:
        values: list[Any] = tensor.data.reshape(-1).tolist()
        return values


def output_tensor(where: str, data: Any, name: str, shape: Sequence[int], parameters: Parameters) -> Tensor:
    """Return a flat or nested list or an array as a tensor. Raises InvalidOutput naming where it is."""
    try:
        return _tensor_of(data, datatype(name), tuple(int(n) for n in shape), parameters)
    except (TypeError, ValueError, OverflowError, InvalidInput) as error:
        raise InvalidOutput(f"{where}: expected {name} data of shape {list(shape)}: {error}") from error


def _tensor_of(data: Any, kind: Datatype, shape: tuple[int, ...], parameters: Parameters) -> Tensor:
    flat = data.reshape(-1).tolist() if isinstance(data, np.ndarray) else list(_flat(data))
    if len(flat) != math.prod(shape):
        raise ValueError(f"got {len(flat)} elements")
    if kind is not BYTES:
        return Tensor(_numbers(flat, kind).reshape(shape), kind, parameters)
    if all(isinstance(each, str) for each in flat):
        return BytesTensor.of_any_texts([str(each) for each in flat], shape, parameters)
    return Tensor(object_array(list(map(_bytes, flat)), shape), kind, parameters)


def _numbers(flat: list[Any], kind: Datatype) -> Array:
    """Return numbers, with None as NaN. Raises ValueError for an integer or boolean that would change."""
    if kind.kind == "float":
        return round_to(np.asarray([math.nan if each is None else each for each in flat], float), kind)
    given, numbers = np.asarray(flat), np.asarray(flat, dtype=kind.dtype)
    if given.dtype.kind in "iuf" and (changed := numbers != given).any():
        raise ValueError(f"{given[changed][0]} does not fit into {kind}")
    return numbers


def _flat(data: Any) -> Iterator[Any]:
    """Yield the elements of nested lists; text and bytes are elements."""
    for each in data if isinstance(data, list | tuple) else (data,):
        yield from _flat(each) if isinstance(each, list | tuple) else (each,)


def _bytes(element: Any) -> bytes:
    match element:
        case bytes() | bytearray() | memoryview():
            return bytes(element)
        case str():
            return element.encode()
    raise TypeError(f"expected bytes or text, got {type(element).__name__}")


def plain_parameters(parameters: Mapping[str, Any] | None) -> Parameters:
    """Return parameters as plain values, without those that describe an encoding; those of gRPC are messages."""
    plain = {name: _plain(value) for name, value in (parameters or {}).items()}
    return {name: value for name, value in plain.items() if value is not None and name != _BINARY_SIZE} or NONE


def _plain(value: Any) -> Any:
    return getattr(value, value.WhichOneof("parameter_choice")) if hasattr(value, "WhichOneof") else value
