"""BYTES tensors whose elements are made when somebody asks for them, as bytes or as text.

A Python object for each of many short strings costs more than everything else that is done with them, and who wants
text does not want bytes as well.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import msgspec
import numpy as np

from dragoman.core.datatypes import BYTES, Array, Datatype
from dragoman.core.tensor import NONE, Parameters, Tensor, object_array

MANY = 1 << 12  # elements from which on they are pickled in one piece
GAP = b"\0\0\0\0"  # what stands before each element where all lie in one piece, as long as a length on the wire
_DATA: Any = Tensor.__dict__["data"]


class BytesTensor(Tensor, frozen=True, eq=False):
    """A BYTES tensor made of texts, or of one piece of bytes in which each element comes after a gap.

    The field `data` is None until somebody asks for the array. `came_as_text` tells whether the elements were given as
    text, as in JSON, rather than as bytes.
    """

    datatype: Datatype = BYTES
    parameters: Parameters = NONE
    _texts: list[str] | None = None
    _piece: bytes | None = None
    _shape: tuple[int, ...] | None = None
    came_as_text: bool = False
    _lengths: Array | None = None  # of the elements, where the piece has no gaps

    @classmethod
    def of_texts(cls, texts: list[str], shape: Sequence[int], parameters: Parameters = NONE) -> Self:
        """From text that UTF-8 can hold, in row-major order. The list is kept, and is not changed any more."""
        return cls._of(texts, None, shape, parameters, True)

    @classmethod
    def of_any_texts(cls, texts: list[str], shape: Sequence[int], parameters: Parameters = NONE) -> Self:
        """The same from any text; UnicodeEncodeError where UTF-8 cannot hold it."""
        piece = GAP.decode().join(["", *texts]).encode()
        return cls._of(texts, piece, shape, parameters, True)

    @classmethod
    def of_piece(cls, piece: bytes, shape: Sequence[int], parameters: Parameters = NONE) -> Self:
        """From the elements in one piece, each after a gap, none of which holds a zero byte."""
        return cls._of(None, piece, shape, parameters, False)

    @classmethod
    def of_lengths(
        cls, piece: Array, lengths: Array, shape: Sequence[int], parameters: Parameters, came_as_text: bool
    ) -> Self:
        """From the elements one after the other, an array of bytes, and how long each of them is."""
        make: Any = cls
        made: Self = make(None, BYTES, parameters, None, piece.tobytes(), tuple(shape), came_as_text, lengths)
        return made

    @classmethod
    def _of(
        cls,
        texts: list[str] | None,
        piece: bytes | None,
        shape: Sequence[int],
        parameters: Parameters,
        came_as_text: bool,
    ) -> Self:
        make: Any = cls
        made: Self = make(None, BYTES, parameters, texts, piece, tuple(shape), came_as_text)
        return made

    @property  # type: ignore[misc]
    def data(self) -> Array:
        """The elements as `bytes`; the array is read-only."""
        found: Array | None = _DATA.__get__(self)
        if found is None:
            texts = self._texts
            elements = self._elements() if texts is None else [text.encode() for text in texts]
            found = object_array(elements, self.shape)
            found.flags.writeable = False
            _DATA.__set__(self, found)
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape if self._shape is None else self._shape

    @property
    def count(self) -> int:
        """How many elements there are, which whoever made it has to compare with the shape."""
        if self._lengths is not None:
            return self._lengths.size
        return len(self._texts) if self._texts is not None else self.data.size

    def _elements(self) -> list[bytes]:
        """The elements of the one piece."""
        piece, lengths = self._piece or b"", self._lengths
        if lengths is None:
            return _split(piece)
        elements: list[bytes] = []
        end = 0
        for at in range(0, lengths.size, MANY):  # so that there is no integer for each of them at a time
            for length in lengths[at : at + MANY].tolist():
                elements.append(piece[end : end + length])
                end += length
        return elements

    @property
    def in_one_piece(self) -> bool:
        return self._piece is not None and self._lengths is None

    @property
    def is_text(self) -> bool:
        """Whether the texts are there already."""
        return self._texts is not None

    def piece(self) -> bytes:
        """All elements in one piece, each after a gap; they may hold zero bytes themselves."""
        if self._piece is None and self._texts is not None:
            return GAP.decode().join(["", *self._texts]).encode()
        return _joined(self.data) if self._piece is None or self._lengths is not None else self._piece

    def texts(self) -> list[str]:
        """The text of each element, in a list that is not to be changed. UnicodeDecodeError where one has none."""
        if self._texts is None:
            piece = self._piece if self.in_one_piece else None
            found = _decoded(self.data) if piece is None else piece.decode().split(GAP.decode())[1:]
            struct: Any = self
            msgspec.structs.force_setattr(struct, "_texts", found)
            return found
        return self._texts

    def told_anew(self, shape: tuple[int, ...], parameters: Parameters) -> Tensor:
        """The same elements in another shape of as many, with other parameters."""
        if self._lengths is not None:
            piece = np.frombuffer(self._piece or b"", np.uint8)
            return BytesTensor.of_lengths(piece, self._lengths, shape, parameters, self.came_as_text)
        if self._texts is None and self._piece is None:
            return Tensor(self.data.reshape(shape), BYTES, parameters)
        return BytesTensor._of(self._texts, self._piece, shape, parameters, self.came_as_text)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        if self._lengths is not None:
            piece = np.frombuffer(self._piece or b"", np.uint8)
            return BytesTensor.of_lengths, (piece, self._lengths, self.shape, self.parameters, self.came_as_text)
        if self._texts is not None and len(self._texts) > MANY and self._piece is None:
            joined = "".join(self._texts)
            texts = self._texts if joined.isascii() else [text.encode() for text in self._texts]
            return _packed([joined.encode()], map(len, texts), self)
        if self._texts is not None and (self.came_as_text or self._piece is None):
            return BytesTensor._of, (self._texts, None, self.shape, self.parameters, self.came_as_text)
        if self._piece is not None:
            return BytesTensor._of, (None, self._piece, self.shape, self.parameters, self.came_as_text)
        return many_packed(self) or (Tensor, (self.data, BYTES, self.parameters))


def many_packed(tensor: Tensor) -> tuple[Any, tuple[Any, ...]] | None:
    """How to pickle a BYTES tensor of many elements without an object for each; None where these are few.

    Whoever unpickles it makes no objects either until they are asked for, so that a server passes them on in no time.
    """
    if tensor.data.size <= MANY:
        return None
    elements = tensor.data.reshape(-1).tolist()
    return _packed(elements, map(len, elements), tensor)


def _packed(elements: Sequence[bytes], lengths: Iterable[int], tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
    joined = np.frombuffer(b"".join(elements), np.uint8)
    given = joined, np.fromiter(lengths, np.int64), tensor.shape, tensor.parameters
    return BytesTensor.of_lengths, (*given, isinstance(tensor, BytesTensor) and tensor.came_as_text)


def packed_texts(portions: Iterable[list[str]], shape: tuple[int, ...], parameters: Parameters = NONE) -> BytesTensor:
    """A tensor of texts that come in portions, none of which is kept as an object."""
    pieces: list[bytes] = []
    lengths: list[Array] = []
    for texts in portions:
        elements = [text.encode() for text in texts]
        pieces.append(b"".join(elements))
        lengths.append(np.fromiter(map(len, elements), np.int64, len(elements)))
    joined = np.frombuffer(b"".join(pieces), np.uint8)
    return BytesTensor.of_lengths(joined, np.concatenate(lengths), shape, parameters, True)


def came_as_text(tensor: Tensor) -> bool:
    """Return whether the elements of a BYTES tensor were given as text, as in JSON, rather than as bytes."""
    return isinstance(tensor, BytesTensor) and tensor.came_as_text


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors of one datatype and of equal rows as one, in order, with the parameters of the first."""
    first = tensors[0]
    if all(map(came_as_text, tensors)):
        shape = (sum(tensor.shape[0] for tensor in tensors), *first.shape[1:])
        texts = [text for tensor in tensors for text in texts_of(tensor)]
        return BytesTensor.of_texts(texts, shape, first.parameters)
    return Tensor(np.concatenate([tensor.data for tensor in tensors]), first.datatype, first.parameters)


def texts_of(tensor: Tensor) -> list[str]:
    """The text of each element of a BYTES tensor, in row-major order, in a list that is not to be changed.

    UnicodeDecodeError where one is no UTF-8.
    """
    return tensor.texts() if isinstance(tensor, BytesTensor) else _decoded(tensor.data)


def piece_of(tensor: Tensor) -> bytes:
    """All elements of a BYTES tensor in one piece, each after a gap."""
    return tensor.piece() if isinstance(tensor, BytesTensor) else _joined(tensor.data)


def portions(tensor: Tensor, count: int) -> Iterator[Tensor]:
    """The elements of a BYTES tensor in portions of so many, or at once where they lie in one piece already."""
    if isinstance(tensor, BytesTensor) and tensor.in_one_piece:
        yield tensor
    elif isinstance(tensor, BytesTensor) and tensor.is_text:
        texts = tensor.texts()
        for at in range(0, len(texts), count):
            yield BytesTensor.of_texts(part := texts[at : at + count], (len(part),))
    else:
        flat = tensor.data.reshape(-1)
        yield from (Tensor(flat[at : at + count], BYTES) for at in range(0, flat.size, count))


def flattened(tensor: Tensor) -> Tensor:
    """The tensor with one axis."""
    if isinstance(tensor, BytesTensor):
        return tensor.told_anew((_size(tensor.shape),), tensor.parameters)
    return Tensor(tensor.data.reshape(-1), tensor.datatype, tensor.parameters)


def with_parameters(tensor: Tensor, parameters: Parameters) -> Tensor:
    """The tensor with other parameters."""
    if isinstance(tensor, BytesTensor):
        return tensor.told_anew(tensor.shape, parameters)
    return Tensor(tensor.data, tensor.datatype, parameters)


def _size(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _decoded(data: Array) -> list[str]:
    return [element.decode() for element in data.reshape(-1).tolist()]


def _joined(data: Array) -> bytes:
    return GAP.join([b"", *data.reshape(-1).tolist()])


def _split(piece: bytes) -> list[bytes]:
    return piece.split(GAP)[1:]
