"""BYTES tensors that create their elements on demand, as bytes or as text.

One Python object per element would dominate the cost of large tensors, and most callers need either text or bytes.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import msgspec
import numpy as np

from dragoman.core.datatypes import BYTES, Array, Datatype
from dragoman.core.tensor import NONE, Parameters, Tensor, object_array

MANY = 1 << 12  # larger tensors are pickled as one buffer
GAP = b"\0\0\0\0"  # precedes each element in a buffer; as long as an element's length in raw encoding
_DATA: Any = Tensor.__dict__["data"]


class BytesTensor(Tensor, frozen=True, eq=False):
    """A BYTES tensor of strings, or of a buffer in which a gap precedes each element.

    `data` is created on first use. `came_as_text`: the elements were received as text, as in JSON, not as bytes.
    """

    datatype: Datatype = BYTES
    parameters: Parameters = NONE
    _texts: list[str] | None = None
    _buffer: bytes | None = None
    _shape: tuple[int, ...] | None = None
    came_as_text: bool = False
    _lengths: Array | None = None  # of the elements, if the buffer has no gaps

    @classmethod
    def of_texts(cls, texts: list[str], shape: Sequence[int], parameters: Parameters = NONE) -> Self:
        """Make a tensor of valid text, in row-major order. The list must not be changed afterwards."""
        return cls._of(texts, None, shape, parameters, True)

    @classmethod
    def of_any_texts(cls, texts: list[str], shape: Sequence[int], parameters: Parameters = NONE) -> Self:
        """Make a tensor of any text. Raises UnicodeEncodeError for lone surrogates."""
        buffer = GAP.decode().join(["", *texts]).encode()
        return cls._of(texts, buffer, shape, parameters, True)

    @classmethod
    def of_buffer(cls, buffer: bytes, shape: Sequence[int], parameters: Parameters = NONE) -> Self:
        """Make a tensor of a buffer with a gap before each element; no element has a zero byte."""
        return cls._of(None, buffer, shape, parameters, False)

    @classmethod
    def of_lengths(
        cls, buffer: Array, lengths: Array, shape: Sequence[int], parameters: Parameters, came_as_text: bool
    ) -> Self:
        """Make a tensor of concatenated elements, an array of bytes, and their lengths."""
        make: Any = cls
        tensor: Self = make(None, BYTES, parameters, None, buffer.tobytes(), tuple(shape), came_as_text, lengths)
        return tensor

    @classmethod
    def _of(
        cls,
        texts: list[str] | None,
        buffer: bytes | None,
        shape: Sequence[int],
        parameters: Parameters,
        came_as_text: bool,
    ) -> Self:
        make: Any = cls
        tensor: Self = make(None, BYTES, parameters, texts, buffer, tuple(shape), came_as_text)
        return tensor

    @property  # type: ignore[misc]
    def data(self) -> Array:
        """The elements as `bytes`; read-only."""
        array: Array | None = _DATA.__get__(self)
        if array is None:
            texts = self._texts
            elements = self._split_buffer() if texts is None else [text.encode() for text in texts]
            array = object_array(elements, self.shape)
            array.flags.writeable = False
            _DATA.__set__(self, array)
        return array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape if self._shape is None else self._shape

    @property
    def count(self) -> int:
        """The number of elements, which may differ from the shape until it has been checked."""
        if self._lengths is not None:
            return self._lengths.size
        return len(self._texts) if self._texts is not None else self.data.size

    def _split_buffer(self) -> list[bytes]:
        buffer, lengths = self._buffer or b"", self._lengths
        if lengths is None:
            return buffer.split(GAP)[1:]
        elements: list[bytes] = []
        end = 0
        for at in range(0, lengths.size, MANY):  # bounds the number of integers that exist at a time
            for length in lengths[at : at + MANY].tolist():
                elements.append(buffer[end : end + length])
                end += length
        return elements

    @property
    def has_gaps(self) -> bool:
        return self._buffer is not None and self._lengths is None

    @property
    def is_text(self) -> bool:
        """True if the elements exist as text."""
        return self._texts is not None

    def to_buffer(self) -> bytes:
        """Return a buffer with a gap before each element; elements may contain zero bytes."""
        if self._buffer is None and self._texts is not None:
            return GAP.decode().join(["", *self._texts]).encode()
        return _join(self.data) if self._buffer is None or self._lengths is not None else self._buffer

    def texts(self) -> list[str]:
        """Return the elements as text, in a list that must not be changed. Raises UnicodeDecodeError."""
        if self._texts is None:
            buffer = self._buffer if self.has_gaps else None
            texts = _decode(self.data) if buffer is None else buffer.decode().split(GAP.decode())[1:]
            struct: Any = self
            msgspec.structs.force_setattr(struct, "_texts", texts)
            return texts
        return self._texts

    def replace(self, shape: tuple[int, ...], parameters: Parameters) -> Tensor:
        """Return the elements with another shape of equal size, and other parameters."""
        if self._lengths is not None:
            buffer = np.frombuffer(self._buffer or b"", np.uint8)
            return BytesTensor.of_lengths(buffer, self._lengths, shape, parameters, self.came_as_text)
        if self._texts is None and self._buffer is None:
            return Tensor(self.data.reshape(shape), BYTES, parameters)
        return BytesTensor._of(self._texts, self._buffer, shape, parameters, self.came_as_text)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        if self._lengths is not None:
            buffer = np.frombuffer(self._buffer or b"", np.uint8)
            return BytesTensor.of_lengths, (buffer, self._lengths, self.shape, self.parameters, self.came_as_text)
        if self._texts is not None and len(self._texts) > MANY and self._buffer is None:
            text = "".join(self._texts)
            elements = self._texts if text.isascii() else [each.encode() for each in self._texts]
            return _reduce_elements([text.encode()], map(len, elements), self)
        if self._texts is not None and (self.came_as_text or self._buffer is None):
            return BytesTensor._of, (self._texts, None, self.shape, self.parameters, self.came_as_text)
        if self._buffer is not None:
            return BytesTensor._of, (None, self._buffer, self.shape, self.parameters, self.came_as_text)
        return reduce_large(self) or (Tensor, (self.data, BYTES, self.parameters))


def reduce_large(tensor: Tensor) -> tuple[Any, tuple[Any, ...]] | None:
    """Return the pickle of a large BYTES tensor as one buffer; None for a small one.

    Unpickling creates no elements either, so that a server forwards such tensors cheaply.
    """
    if tensor.data.size <= MANY:
        return None
    elements = tensor.data.reshape(-1).tolist()
    return _reduce_elements(elements, map(len, elements), tensor)


def _reduce_elements(elements: Sequence[bytes], lengths: Iterable[int], tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
    buffer = np.frombuffer(b"".join(elements), np.uint8)
    arguments = buffer, np.fromiter(lengths, np.int64), tensor.shape, tensor.parameters
    return BytesTensor.of_lengths, (*arguments, came_as_text(tensor))


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


def buffer_of(tensor: Tensor) -> bytes:
    """Return the elements of a BYTES tensor in a buffer with a gap before each."""
    return tensor.to_buffer() if isinstance(tensor, BytesTensor) else _join(tensor.data)


def iterate_chunks(tensor: Tensor, count: int) -> Iterator[Tensor]:
    """Yield chunks of up to `count` elements of a BYTES tensor, or all at once if they are in a buffer with gaps."""
    if isinstance(tensor, BytesTensor) and tensor.has_gaps:
        yield tensor
    elif isinstance(tensor, BytesTensor) and tensor.is_text:
        texts = tensor.texts()
        for at in range(0, len(texts), count):
            yield BytesTensor.of_texts(chunk := texts[at : at + count], (len(chunk),))
    else:
        flat = tensor.data.reshape(-1)
        yield from (Tensor(flat[at : at + count], BYTES) for at in range(0, flat.size, count))


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


def _join(data: Array) -> bytes:
    return GAP.join([b"", *data.reshape(-1).tolist()])
