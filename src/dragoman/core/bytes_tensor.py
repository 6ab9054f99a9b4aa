"""BYTES tensors whose elements are created on demand, as bytes or as text.

One Python object per element would dominate the cost of large tensors, and most callers need either text or bytes.
"""

import math
import struct
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from dragoman.core.datatypes import BYTES, Array, Buffer, Datatype
from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import NONE, Parameters, Tensor, object_array

_LENGTH = struct.Struct("<I")
_GAP = b"\0\0\0\0"  # as long as a length
_FEW = 16  # performance only: elements below which a plain loop is the fastest
_CHUNK = 1 << 14  # performance only: elements joined at a time, since no other thread runs while Python joins
_DATA: Any = Tensor.__dict__["data"]


class BytesTensor(Tensor, frozen=True, eq=False):
    """A BYTES tensor in one of two forms: a list of texts, or the raw encoding.

    In the raw encoding each element follows its length as four bytes, little-endian (Open Inference, binary tensor data
    extension). `_starts`: the result of `find_starts`, if it is known. `data` is created on first use.
    `came_as_text`: the elements were received as text, as in JSON, not as bytes.
    """

    datatype: Datatype = BYTES
    parameters: Parameters = NONE
    _texts: list[str] | None = None
    _raw: bytes = b""
    _starts: Array | None = None
    _shape: tuple[int, ...] = ()
    came_as_text: bool = False

    @classmethod
    def of_texts(cls, texts: list[str], shape: Sequence[int], parameters: Parameters = NONE) -> Self:
        """Make a tensor of valid text, in row-major order. The list must not be changed afterwards."""
        return cls._of(parameters, texts, b"", None, tuple(shape), True)

    @classmethod
    def of_any_texts(cls, texts: list[str], shape: Sequence[int], parameters: Parameters = NONE) -> Self:
        """Make a tensor of any text. Raises UnicodeEncodeError for lone surrogates."""
        "".join(texts).encode()
        return cls.of_texts(texts, shape, parameters)

    @classmethod
    def of_raw(
        cls,
        raw: bytes,
        starts: Array | None,
        shape: Sequence[int],
        parameters: Parameters = NONE,
        came_as_text: bool = False,
    ) -> Self:
        """Make a tensor of the raw encoding, which is valid. starts: of `find_starts`, None if not known."""
        return cls._of(parameters, None, raw, starts, tuple(shape), came_as_text)

    @classmethod
    def _of(cls, parameters: Parameters, *form: Any) -> Self:
        make: Any = cls
        tensor: Self = make(None, BYTES, parameters, *form)
        return tensor

    @property  # type: ignore[misc]
    def data(self) -> Array:
        """The elements as `bytes`; read-only."""
        array: Array | None = _DATA.__get__(self)
        if array is None:
            texts = self._texts
            elements = self._elements() if texts is None else [text.encode() for text in texts]
            array = object_array(elements, self.shape)
            array.flags.writeable = False
            _DATA.__set__(self, array)
        return array

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    def texts(self) -> list[str]:
        """Return the elements as text, in a list that must not be changed. Raises UnicodeDecodeError."""
        if self._texts is not None:
            return self._texts
        if (joined := self._with_gaps()) is None:
            return [element.decode() for element in self._elements()]
        return joined.decode().split(_GAP.decode())[1:]

    def raw(self) -> Buffer:
        """Return the raw encoding of all elements."""
        return self._raw if self._texts is None else encode_elements(self._texts)

    @property
    def is_raw(self) -> bool:
        """True if the elements exist in the raw encoding."""
        return self._texts is None

    def replace(self, shape: tuple[int, ...], parameters: Parameters) -> Tensor:
        """Return the elements with another shape of equal size, and other parameters."""
        return self._of(parameters, self._texts, self._raw, self._starts, shape, self.came_as_text)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        if self._texts is not None:
            return BytesTensor.of_texts, (self._texts, self._shape, self.parameters)
        return BytesTensor.of_raw, (self._raw, self._starts, self._shape, self.parameters, self.came_as_text)

    def _elements(self) -> list[bytes]:
        joined = self._with_gaps()
        return _split_bytes(self._raw, math.prod(self._shape), "") if joined is None else joined.split(_GAP)[1:]

    def _with_gaps(self) -> bytes | None:
        """Return the elements with four zeros before each, which Python splits fast; None if they may not be short."""
        starts = find_starts(self._raw, math.prod(self._shape)) if self._starts is None else self._starts
        if starts is None:
            return None
        data = np.frombuffer(self._raw, np.uint8).copy()
        data[starts] = 0
        return data.tobytes()


def bytes_from_raw(
    where: str, shape: Sequence[int], raw: Buffer, parameters: Parameters, came_as_text: bool = False
) -> Tensor:
    """Return the BYTES tensor of a raw encoding. Raises InvalidInput if its elements are not those of the shape."""
    count = math.prod(shape)
    if (starts := find_starts(raw, count)) is not None:
        return BytesTensor.of_raw(bytes(raw), starts, shape, parameters, came_as_text)
    elements = _split_bytes(raw, count, where)
    if came_as_text:
        return BytesTensor.of_texts([each.decode() for each in elements], shape, parameters)
    return Tensor(reshape_read_only(object_array(elements, (count,)), shape, where), BYTES, parameters)


def find_starts(raw: Buffer, count: int) -> Array | None:
    """Return where the lengths of many short elements start; None if they are few or may not be short.

    A length below 256 is one byte and three zeros. If no element holds a zero byte, all of these are found at once,
    and they are the lengths if each leads to the next.
    """
    if not _FEW <= count <= len(raw) // 5:
        return None
    data = np.frombuffer(raw, np.uint8)
    zero = data == 0
    starts = np.flatnonzero(zero[1:-2] & zero[2:-1] & zero[3:])
    if starts.size != count or np.count_nonzero(zero) != 3 * count:
        return None
    ends = starts + 4 + data[starts]
    if starts[0] != 0 or ends[-1] != data.size or (starts[1:] != ends[:-1]).any():
        return None
    return starts


def _split_bytes(raw: Buffer, count: int, where: str) -> list[bytes]:
    elements: list[bytes] = []
    data = bytes(raw)  # its slices are the elements
    read, add = _LENGTH.unpack_from, elements.append
    at, end = 0, len(data)
    while at + 4 <= end and len(elements) <= count:
        start = at + 4
        at = start + read(data, at)[0]
        if at > end:
            needed, left = at - start, end - start
            raise InvalidInput(f"{where}: BYTES element {len(elements)} needs {needed} bytes, {left} are left")
        add(data[start:at])
    if at < end and len(elements) <= count:
        raise InvalidInput(f"{where}: incomplete length of BYTES element {len(elements)}")
    if len(elements) != count:
        more = " or more" if at < end else ""
        raise InvalidInput(f"{where}: the shape needs {count} BYTES elements, got {len(elements)}{more}")
    return elements


def reshape_read_only(array: Array, shape: Sequence[int], where: str) -> Array:
    """Return the array reshaped and read-only; the number of elements must agree."""
    try:
        array = array.reshape(shape)
    except ValueError as error:  # for example [0, 2^62, 4]: no elements, but sizes beyond the address space
        raise InvalidInput(f"{where}: shape {list(shape)} is too large") from error
    array.flags.writeable = False
    return array


def came_as_text(tensor: Tensor) -> bool:
    """Return whether the elements of a BYTES tensor were received as text, as in JSON, not as bytes."""
    return isinstance(tensor, BytesTensor) and tensor.came_as_text


def concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors of one datatype along the first axis; keep the parameters of the first."""
    first = tensors[0]
    if all(map(came_as_text, tensors)):
        shape = (sum(tensor.shape[0] for tensor in tensors), *first.shape[1:])
        texts = [text for tensor in tensors for text in texts_of(tensor)]
        return BytesTensor.of_texts(texts, shape, first.parameters)
    return Tensor(np.concatenate([tensor.data for tensor in tensors]), first.datatype, first.parameters)


def texts_of(tensor: Tensor) -> list[str]:
    """Return the elements of a BYTES tensor as text, in row-major order, in a list that must not be changed.

    Raises UnicodeDecodeError.
    """
    return tensor.texts() if isinstance(tensor, BytesTensor) else _decode(tensor.data)


def raw_of(tensor: Tensor) -> Buffer:
    """Return the raw encoding of a BYTES tensor. Raises TypeError for an element that is not bytes."""
    return tensor.raw() if isinstance(tensor, BytesTensor) else encode_elements(tensor.data.reshape(-1).tolist())


def flatten(tensor: Tensor) -> Tensor:
    if isinstance(tensor, BytesTensor):
        return tensor.replace((_size(tensor.shape),), tensor.parameters)
    return Tensor(tensor.data.reshape(-1), tensor.datatype, tensor.parameters)


def with_parameters(tensor: Tensor, parameters: Parameters) -> Tensor:
    if isinstance(tensor, BytesTensor):
        return tensor.replace(tensor.shape, parameters)
    return Tensor(tensor.data, tensor.datatype, parameters)


def _size(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _decode(data: Array) -> list[str]:
    return [element.decode() for element in data.reshape(-1).tolist()]


def encode_elements(elements: list[Any]) -> Buffer:
    """Return the raw encoding of texts or bytes. Raises TypeError for an element that is neither."""
    if len(elements) <= _CHUNK:
        return _encode_chunk(elements)
    return b"".join(_encode_chunk(elements[at : at + _CHUNK]) for at in range(0, len(elements), _CHUNK))


def _encode_chunk(elements: list[Any]) -> Buffer:
    is_text = bool(elements) and type(elements[0]) is str
    if len(elements) >= _FEW:
        joined = _GAP.decode().join(["", *elements]).encode() if is_text else _GAP.join([b"", *elements])
        data = np.frombuffer(bytearray(joined), np.uint8)
        gaps = np.flatnonzero(data == 0)
        if gaps.size == 4 * len(elements):  # no element holds a zero
            lengths = np.diff(gaps[::4], append=data.size) - 4
            data[gaps] = lengths.astype("<u4").view(np.uint8)
            return data.data
    encoded = [each.encode() for each in elements] if is_text else elements
    return b"".join(part for each in encoded for part in (_LENGTH.pack(len(each)), each))
