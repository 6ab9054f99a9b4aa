"""Binary contents of tensors in gRPC messages."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from dragoman.core.datatypes import datatype
from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import Tensor
from dragoman.formats.policy import Policy
from dragoman.formats.raw import raw_from_tensor, tensor_from_raw
from dragoman_mlserver.mlserver.types import RequestInput, ResponseOutput, TensorData
from dragoman_mlserver.mlserver.types.data import elements

T = TypeVar("T", RequestInput, ResponseOutput)

# Limits protect servers; a client trusts the server that it chose.
POLICY = Policy(max_bytes_elements=1 << 31)


def pack(elem: Any) -> bytes:
    """Return the elements of an input or output as bytes. Raises InvalidOutput if they do not fit its datatype."""
    return bytes(raw_from_tensor(elem.to_tensor()))


def unpack(elem: Any, raw: bytes) -> list[Any]:
    """Return bytes as elements with the datatype and shape of an input or output. Raises InvalidInput."""
    return elements(unpack_tensor(elem.name, elem.datatype, elem.shape, raw))


def unpack_tensor(name: str, datatype_name: str, shape: Sequence[int], raw: bytes) -> Tensor:
    return tensor_from_raw(f"'{name}'", datatype(str(datatype_name)), shape, raw, POLICY)


def extract_raw(elems: list[T]) -> tuple[list[T], list[bytes]]:
    """Remove the elements of inputs or outputs, and return them as bytes."""
    contents = [pack(elem) for elem in elems]
    for elem in elems:
        elem.data = TensorData([])
    return elems, contents


def inject_raw(elems: list[T], raw_contents: Sequence[bytes]) -> list[T]:
    """Set the elements of those inputs or outputs that have none. Raises InvalidInput."""
    remaining = iter(raw_contents)
    for elem in elems:
        if not len(elem.data):
            elem.data = TensorData(unpack(elem, next_raw(remaining, elem.name)))
    return elems


def next_raw(contents: Iterator[bytes], name: str) -> bytes:
    """Return the next raw contents. Raises InvalidInput, naming the tensor that they are missing for."""
    raw = next(contents, None)
    if raw is None:
        raise InvalidInput(f"'{name}': expected typed or raw contents, got none")
    return raw
