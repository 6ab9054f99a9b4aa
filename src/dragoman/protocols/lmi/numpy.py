"""NumPy's `.npy` and `.npz` files, parsed with checks of their sizes and without pickles."""

import io
import math
import zipfile
import zlib
from collections.abc import Mapping

import numpy as np
from numpy.lib import format as npy

from dragoman.core.datatypes import Array
from dragoman.core.errors import InvalidInput

# Maximum total size of the arrays in a compressed file.
_MOST_BYTES = 1 << 28
_MOST_ARRAYS = 1024


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
        raise InvalidInput(f"a .npy file must hold numbers, booleans or texts; got {dtype}")
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
            if not members or len(members) > _MOST_ARRAYS:
                raise InvalidInput(f"a .npz file must hold 1 to {_MOST_ARRAYS} arrays; got {len(members)}")
            if sum(each.file_size for each in members) > max(_MOST_BYTES, len(data)):
                raise InvalidInput(f"the arrays of a .npz file may hold {_MOST_BYTES} bytes together")
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
    """Serialize arrays as an uncompressed `.npz`."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            archive.writestr(f"{name}.npy", to_npy(array))
    return file.getvalue()


def _storable(array: Array) -> Array:
    return array.astype(np.bytes_) if array.dtype.hasobject else array
