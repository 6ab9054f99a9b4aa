"""Read and check the header and the table of tensors of a GGUF file, and map its data.

The file has magic bytes, a version, the numbers of tensors and of metadata; the metadata: key, type and value; the
table of tensors: name, dimensions, type and offset; then, aligned, the data. All of the table is compared with the size
of the file before any data is read. Sources: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (layout) and
https://github.com/ggml-org/ggml/blob/master/src/gguf.cpp (what llama.cpp accepts).
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
# Limits on what a header may hold; the largest known vocabularies have 262144 tokens and take 10 MB.
_MAX_HEADER_BYTES, _MAX_ELEMENTS = 1 << 28, 1 << 23
_MAX_KEY_BYTES, _MAX_NAME_BYTES, _MAX_DIMENSIONS, _MAX_ALIGNMENT = 65535, 63, 4, 1 << 20

# Formats of scalars of the metadata by their type in the file; a boolean is 0 or 1.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorType:
    """A type of tensors: its number in the file, and how many elements of a row are in how many bytes."""

    name: str
    number: int
    elements: int
    bytes: int


# All types of ggml but those that it has removed (ggml.h, `ggml_type`; ggml-common.h for the blocks).
TYPES: Mapping[int, TensorType] = {
    number: TensorType(name, number, elements, size)
    for number, name, elements, size in (
        *((0, "F32", 1, 4), (1, "F16", 1, 2), (30, "BF16", 1, 2), (28, "F64", 1, 8)),
        *((24, "I8", 1, 1), (25, "I16", 1, 2), (26, "I32", 1, 4), (27, "I64", 1, 8)),
        *((2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24)),
        *((8, "Q8_0", 32, 34), (15, "Q8_K", 256, 292)),
        *((10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144)),
        *((13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210)),
        *((16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50)),
        *((20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82), (23, "IQ4_XS", 256, 136)),
        *((29, "IQ1_M", 256, 56), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66)),
        *((39, "MXFP4", 32, 17), (40, "NVFP4", 64, 36), (41, "Q1_0", 128, 18)),
    )
}

# What a file states to be quantized as, by `general.file_type` (llama.h, `llama_ftype`).
_FILE_TYPES = (
    "F32 F16 Q4_0 Q4_1 - - - Q8_0 Q5_0 Q5_1 Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M Q6_K IQ2_XXS IQ2_XS "
    "Q2_K_S IQ3_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ3_M IQ2_S IQ2_M IQ4_XS IQ1_M BF16 - - - TQ1_0 TQ2_0 MXFP4_MOE NVFP4 "
    "Q1_0"
)


class GgufError(ValueError):
    """A file is not valid; the message names the key or the tensor, what was expected and what came."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where a tensor is. shape: the rows first, as in NumPy, so the reverse of the file. offset: in the file."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) // self.type.elements * self.type.bytes

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.type.elements * self.type.bytes


class GgufFile:
    """A file, mapped into memory: its metadata by key, and its tensors by name in the order of the file.

    Raises GgufError if it is not valid, and OSError. Memory and time depend on the size of the header alone, which is
    limited. The file must not be changed or truncated while it is mapped.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            start = file.read(len(MAGIC))
            if start != MAGIC:
                raise GgufError(f"expected the bytes 'GGUF' at its start, got {start!r}")
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        header = _Header(self.data)
        tensors, entries = header.counts()
        self.metadata = header.metadata(entries)
        self.alignment = _alignment(self.metadata)
        self.tensors = header.tensors(tensors, self.alignment)

    @property
    def quantization(self) -> str:
        """The quantization that the file states, such as Q4_1 or F16; "" if it states none."""
        stated = self.metadata.get("general.file_type")
        names = _FILE_TYPES.split()
        return names[stated].strip("-") if isinstance(stated, int) and 0 <= stated < len(names) else ""

    @property
    def parameters(self) -> int:
        """Number of elements of all tensors."""
        return sum(math.prod(each.shape) for each in self.tensors.values())

    def bytes_of(self, tensor: Tensor) -> memoryview:
        """Return the data of a tensor, which is read from the file when it is used."""
        return memoryview(self.data)[tensor.offset : tensor.offset + tensor.size]


_open: WeakValueDictionary[tuple[Any, ...], GgufFile] = WeakValueDictionary()


def open_file(path: Path) -> GgufFile:
    """Return the file, which is read once as long as somebody uses it and it does not change. Raises as GgufFile."""
    status = path.stat()
    key = (path.resolve(), status.st_ino, status.st_size, status.st_mtime_ns)
    if (file := _open.get(key)) is None:
        file = _open[key] = GgufFile(path)
    return file


class _Header:
    """Reads values in order and compares each length with what is left of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at, self._size = data, len(MAGIC), len(data)
        self._stop = min(len(data), _MAX_HEADER_BYTES)
        self._elements = 0

    def counts(self) -> tuple[int, int]:
        """Return the numbers of tensors and of metadata."""
        version = self._scalar("I", "version")
        if version not in _VERSIONS:
            swapped = int.from_bytes(int(version).to_bytes(4, "little"), "big")
            reason = ", in big-endian byte order, which is not supported" if swapped in _VERSIONS else ""
            raise GgufError(f"version: expected 2 or 3, got {version}{reason}")
        tensors, entries = self._scalar("Q", "number of tensors"), self._scalar("Q", "number of metadata")
        # An entry has at least a name with its length, and for a tensor a dimension, its type and its offset.
        self._fits(tensors, 8 + 4 + 8 + 4 + 8, "number of tensors")
        self._fits(entries, 8 + 4 + 1, "number of metadata")
        return tensors, entries

    def metadata(self, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number in range(count):
            key = self._string(f"key {number + 1} of {count}", _MAX_KEY_BYTES)
            if key in found:
                raise GgufError(f"key {key!r}: expected once, got it twice")
            found[key] = self._value(f"key {key!r}")
        return found

    def tensors(self, count: int, alignment: int) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for number in range(count):
            name = self._string(f"name of tensor {number + 1} of {count}", _MAX_NAME_BYTES)
            if name in found:
                raise GgufError(f"tensor {name!r}: expected once, got it twice")
            found[name] = self._tensor(name, alignment)
        start = -(-self._at // alignment) * alignment
        placed = [Tensor(each.name, each.type, each.shape, start + each.offset) for each in found.values()]
        self._check_places(placed)
        return {each.name: each for each in placed}

    def _tensor(self, name: str, alignment: int) -> Tensor:
        named = f"tensor {name!r}"
        dimensions = self._scalar("I", f"{named}: number of dimensions")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise GgufError(f"{named}: expected 1 to {_MAX_DIMENSIONS} dimensions, got {dimensions}")
        shape = tuple(self._scalar("Q", f"{named}: dimension {i}") for i in range(dimensions))[::-1]
        type_ = TYPES.get(number := self._scalar("I", f"{named}: type"))
        offset = self._scalar("Q", f"{named}: offset")
        if type_ is None:
            raise GgufError(f"{named}: expected a type of ggml, got number {number}")
        if 0 in shape:
            raise GgufError(f"{named}: expected dimensions of at least 1, got {list(shape)}")
        if shape[-1] % type_.elements:
            raise GgufError(
                f"{named}: expected rows of a multiple of {type_.elements} elements for {type_.name}, got {shape[-1]}"
            )
        if offset % alignment:
            raise GgufError(f"{named}: expected an offset that is a multiple of {alignment}, got {offset}")
        return Tensor(name, type_, shape, offset)

    def _check_places(self, tensors: list[Tensor]) -> None:
        """Raise GgufError for data beyond the end of the file, or of two tensors in one place."""
        before: Tensor | None = None
        for each in sorted(tensors, key=lambda tensor: tensor.offset):
            if each.offset + each.size > self._size:
                raise GgufError(
                    f"tensor {each.name!r}: expected {each.size} bytes at {each.offset} for {each.type.name} "
                    f"{list(each.shape)}, got a file of {self._size} bytes"
                )
            if before is not None and before.offset + before.size > each.offset:
                raise GgufError(
                    f"tensor {each.name!r}: expected data behind that of {before.name!r}, which ends at "
                    f"{before.offset + before.size}, got offset {each.offset}"
                )
            before = each

    # --- values ----------------------------------------------------------------------------------------------

    def _value(self, named: str) -> Any:
        kind = self._scalar("I", f"{named}: type")
        if kind != _ARRAY:
            return self._single(kind, named)
        element, count = self._scalar("I", f"{named}: type of elements"), self._scalar("Q", f"{named}: length")
        self._elements += count
        if self._elements > _MAX_ELEMENTS:
            raise GgufError(f"{named}: expected at most {_MAX_ELEMENTS} elements in all arrays, got {self._elements}")
        if element == _STRING:
            self._fits(count, 8, f"{named}: length")
            return self._strings(count, named)
        if element not in _SCALARS:
            raise GgufError(f"{named}: expected an array of scalars or strings, got elements of type {element}")
        form = f"<{count}{_SCALARS[element]}"
        values = list(struct.unpack(form, self._take(struct.calcsize(form), named)))
        return [self._boolean(each, named) for each in values] if element == _BOOL else values

    def _single(self, kind: int, named: str) -> Any:
        if kind == _STRING:
            return self._string(named)
        if kind not in _SCALARS:
            raise GgufError(f"{named}: expected a type of metadata, 0 to 12, got {kind}")
        value = self._scalar(_SCALARS[kind], named)
        return self._boolean(value, named) if kind == _BOOL else value

    @staticmethod
    def _boolean(value: int, named: str) -> bool:
        if value not in (0, 1):
            raise GgufError(f"{named}: expected a boolean, 0 or 1, got {value}")
        return bool(value)

    def _string(self, named: str, limit: int = _MAX_HEADER_BYTES) -> str:
        length = self._scalar("Q", f"{named}: length")
        if length > limit:
            raise GgufError(f"{named}: expected at most {limit} bytes, got {length}")
        content = self._take(length, named)
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise GgufError(f"{named}: expected UTF-8, got {content[:40]!r}") from error

    def _strings(self, count: int, named: str) -> list[str]:
        """Read many strings, as `_string` does but for its limit."""
        values, at, read_length = [], self._at, _LENGTH.unpack_from
        for _ in range(count):
            if at + 8 > self._stop:
                break
            start, at = at + 8, at + 8 + read_length(self._data, at)[0]
            if at > self._stop:
                break
            try:
                values.append(self._data[start:at].decode())
            except UnicodeDecodeError:
                break
            self._at = at
        return values if len(values) == count else [*values, self._string(named)]  # which raises the error

    def _scalar(self, form: str, named: str) -> Any:
        return struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}"), named))[0]

    def _take(self, count: int, named: str) -> bytes:
        self._fits(count, 1, named)
        self._at += count
        return self._data[self._at - count : self._at]

    def _fits(self, count: int, size: int, named: str) -> None:
        """Raise GgufError if the header has no place for so many elements of at least this size."""
        if count * size <= self._stop - self._at:
            return
        if self._stop < self._size:
            raise GgufError(f"{named}: expected a header of at most {_MAX_HEADER_BYTES} bytes, got a larger one")
        raise GgufError(
            f"{named}: expected {count * size} bytes or more at {self._at}, got the end of the file at {self._size}"
        )


def _alignment(metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    is_power = isinstance(alignment, int) and 0 < alignment <= _MAX_ALIGNMENT and alignment & (alignment - 1) == 0
    if not is_power or isinstance(alignment, bool):
        raise GgufError(f"key 'general.alignment': expected a power of two up to {_MAX_ALIGNMENT}, got {alignment!r}")
    return int(alignment)
