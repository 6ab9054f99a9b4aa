"""Arrays in binary form: NumPy's `.npy` and `.npz`, parsed without pickles, and DJL's `tensor/ndlist`.

An NDList is a list of arrays, each with a name or without, as `NDList.encode` writes it (version 3).

All numbers are big-endian, texts are their length in two bytes and UTF-8:

    count:int32, then of each array
    "NDAR":text  version:int32  named:byte  [name:text]  sparse format:text  datatype:text
    axes:int32  size:int64 for each  layouts:int32  layout:uint16 for each
    byte order:"<" or ">"  length:int32  data
"""

import io
import math
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.lib import format as npy

from dragoman.core.datatypes import Array
from dragoman.core.errors import InvalidInput, NotSupported

_MAGIC = "NDAR"
_VERSION = 3
_MAX_ARRAYS = 1024
_MAX_AXES = 32
_MAX_BYTES = (1 << 31) - 1
_DATATYPES: Mapping[str, str] = {
    "BOOLEAN": "u1",
    "BOOL": "u1",  # as DJL's Python side calls it
    **{
        f"{kind}{bits}": f"{letter}{bits // 8}"
        for kind, letter in (("INT", "i"), ("UINT", "u"))
        for bits in (8, 16, 32, 64)
    },
    **{f"FLOAT{bits}": f"f{bits // 8}" for bits in (16, 32, 64)},
}
_NAMES: Mapping[str, str] = {code: name for name, code in _DATATYPES.items() if not name.startswith("BOOL")}


def from_ndlist(data: bytes) -> Sequence[tuple[str, Array]]:
    """Parse the arrays and their names, "" for none. Raises InvalidInput."""
    reader = _Reader(data)
    (count,) = reader.numbers("i")
    if not 0 < count <= _MAX_ARRAYS:
        raise InvalidInput(f"tensor/ndlist: expected 1 to {_MAX_ARRAYS} arrays, got {count}")
    arrays = [reader.array(i) for i in range(count)]
    if reader.remaining:
        raise InvalidInput(f"tensor/ndlist: {reader.remaining} bytes are left behind the last of {count} arrays")
    return arrays


class _Reader:
    """A cursor over the bytes of a list."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def remaining(self) -> int:
        return len(self._data) - self._at

    def numbers(self, form: str) -> tuple[Any, ...]:
        form = f">{form}"
        return struct.unpack(form, self.bytes(struct.calcsize(form)))

    def bytes(self, count: int) -> memoryview:
        if not 0 <= count <= self.remaining:
            raise InvalidInput(f"tensor/ndlist: expected {count} more bytes at {self._at}, there are {self.remaining}")
        self._at += count
        return memoryview(self._data)[self._at - count : self._at]

    def text(self) -> str:
        (length,) = self.numbers("H")
        try:
            return bytes(self.bytes(length)).decode()
        except UnicodeDecodeError as error:
            raise InvalidInput(f"tensor/ndlist: a string is not valid UTF-8: {error.reason}") from error

    def array(self, at: int) -> tuple[str, Array]:
        """Parse the next array, number `at` of the list."""
        magic = self.text()
        (version,) = self.numbers("i")
        if (magic, version) != (_MAGIC, _VERSION):
            raise InvalidInput(
                f"tensor/ndlist: array {at} must begin with {_MAGIC} and version {_VERSION}; got {magic[:16]!r} and "
                f"{version}"
            )
        (named,) = self.numbers("B")
        name = self.text() if named == 1 else ""
        self.text()  # the sparse format, which DJL ignores
        datatype = self.text()
        shape = self._shape(at)
        order, length = self.numbers("ci")
        code = _DATATYPES.get(datatype)
        if code is None or order not in (b"<", b">"):
            raise InvalidInput(
                f"tensor/ndlist: array {at} must be of {', '.join(_DATATYPES)} and in the order < or >; "
                f"got {datatype[:16]!r} and {order!r}"
            )
        return name, _array(self.bytes(length), np.dtype(f"{str(order, 'ascii')}{code}"), shape, at, datatype)

    def _shape(self, at: int) -> tuple[int, ...]:
        (axes,) = self.numbers("i")
        if not 0 <= axes <= _MAX_AXES:
            raise InvalidInput(f"tensor/ndlist: array {at} must have at most {_MAX_AXES} axes; got {axes}")
        shape = self.numbers(f"{axes}q")
        (layouts,) = self.numbers("i")
        self.bytes(2 * layouts)  # names of the axes
        return shape


def _array(data: memoryview, dtype: "np.dtype[np.generic]", shape: tuple[int, ...], at: int, datatype: str) -> Array:
    needed = math.prod(shape) * dtype.itemsize
    if any(size < 0 for size in shape) or needed != len(data):
        raise InvalidInput(
            f"tensor/ndlist: array {at} of shape {list(shape)} and {datatype} needs {needed} bytes; got {len(data)}"
        )
    try:
        array: Array = np.frombuffer(data, dtype).reshape(shape)
    except (ValueError, OverflowError) as error:
        raise InvalidInput(f"tensor/ndlist: array {at} of shape {list(shape)}: {error}") from error
    return array != 0 if datatype.startswith("BOOL") else array.astype(dtype.newbyteorder("="), copy=False)


def to_ndlist(arrays: Mapping[str, Array]) -> bytes:
    """Serialize named arrays. Raises NotSupported for strings, and for arrays that are too large."""
    return struct.pack(">i", len(arrays)) + b"".join(_encode(name, array) for name, array in arrays.items())


def _encode(name: str, array: Array) -> bytes:
    datatype = "BOOLEAN" if array.dtype.kind == "b" else _NAMES.get(array.dtype.str[1:])
    if datatype is None or array.nbytes > _MAX_BYTES:
        raise NotSupported(
            f"output '{name}' is of {array.dtype} and {array.nbytes} bytes; tensor/ndlist holds numbers and booleans "
            f"of at most {_MAX_BYTES} bytes: ask with accept: application/json"
        )
    axes = array.ndim
    shape = struct.pack(f">i{axes}qi", axes, *array.shape, axes) + b"\0?" * axes  # DJL: unknown layout
    data = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    head = b"".join((_text(_MAGIC), struct.pack(">iB", _VERSION, 1), _text(name), _text("DENSE"), _text(datatype)))
    return b"".join((head, shape, b"<", struct.pack(">i", len(data)), data))


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack(">H", len(data)) + data


# Maximum total size of the arrays in a compressed file.
_MAX_UNPACKED_BYTES = 1 << 28


def from_npy(data: bytes) -> Array:
    """Parse a `.npy` file, without a copy where possible. Raises InvalidInput, also for Python objects."""
    file = io.BytesIO(data)
    try:
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except (ValueError, OSError, SyntaxError, TypeError) as error:
        raise InvalidInput(f"the request body is not a .npy file: {error}") from error
    if dtype.hasobject or dtype.names is not None or dtype.subdtype is not None:
        raise InvalidInput(f"a .npy file must hold numbers, booleans or strings; got {dtype}")
    count, start = math.prod(shape), file.tell()
    needed, there = count * dtype.itemsize, len(data) - start
    if needed != there:
        raise InvalidInput(f"a .npy file of shape {list(shape)} and {dtype} needs {needed} bytes, got {there}")
    flat: Array = np.frombuffer(data, dtype, count, start) if count and dtype.itemsize else np.empty(count, dtype)
    try:
        array = flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)
    except (ValueError, OverflowError) as error:
        raise InvalidInput(f"a .npy file of shape {str(shape)[:80]}: {error}") from error
    native: Array = np.ascontiguousarray(array).astype(dtype.newbyteorder("="), copy=False)
    return native.reshape(shape)


def from_npz(data: bytes) -> Mapping[str, Array]:
    """Parse the arrays of a `.npz` file by name. Raises InvalidInput as `from_npy`, or if their total size is too
    large."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [each for each in archive.infolist() if each.filename.endswith(".npy")]
            if not members or len(members) > _MAX_ARRAYS:
                raise InvalidInput(f"a .npz file must hold 1 to {_MAX_ARRAYS} arrays; got {len(members)}")
            if sum(each.file_size for each in members) > max(_MAX_UNPACKED_BYTES, len(data)):
                raise InvalidInput(f"the arrays of a .npz file may hold {_MAX_UNPACKED_BYTES} bytes together")
            return {each.filename.removesuffix(".npy"): from_npy(_member(archive, each)) for each in members}
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, OSError, EOFError) as error:
        raise InvalidInput(f"the request body is not a .npz file: {error}") from error


def _member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    with archive.open(member) as file:
        return file.read(member.file_size)


def to_npy(array: Array) -> bytes:
    """Serialize an array as `.npy`; BYTES as fixed-length strings, because objects would be pickled."""
    file = io.BytesIO()
    npy.write_array(file, _storable(array), allow_pickle=False)
    return file.getvalue()


def to_npz(arrays: Mapping[str, Array]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            archive.writestr(f"{name}.npy", to_npy(array))
    return file.getvalue()


def _storable(array: Array) -> Array:
    return array.astype(np.bytes_) if array.dtype.hasobject else array
