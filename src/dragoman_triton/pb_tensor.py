"""Tensors of `triton_python_backend_utils`, and Triton's numbers of datatypes."""

from typing import Any

import numpy as np

from dragoman.core.datatypes import BYTES, DATATYPES, Array, datatype_of
from dragoman.core.errors import InvalidInput

# Triton's numbers of datatypes are their positions here.
TYPES = (
    *("INVALID", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "STRING", "BF16"),
)
NUMPY_TYPES = {
    f"TYPE_{name}": np.object_ if name == "STRING" else DATATYPES[name].dtype.type
    for name in TYPES
    if name == "STRING" or (name in DATATYPES and DATATYPES[name].wire_view is None)
}
# The dtypes that NumPy lacks, by name.
_OTHER_DTYPES = {d.dtype.name: d.dtype for d in DATATYPES.values() if d.wire_view is not None}
# Elements that are taken as they are.
_BYTES = (bytes, bytearray, memoryview)


class TritonModelException(Exception):
    """An error of a model, whose message is sent to the client."""


class Tensor:
    """A named array. Text is encoded as UTF-8; BF16 is available by DLPack only."""

    def __init__(self, name: str, array: Array) -> None:
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        if not isinstance(array, np.ndarray):
            raise TritonModelException(f"tensor '{name}': expected a NumPy array, got {type(array).__name__}")
        self._name = name
        try:
            self._array = as_elements(array)
            self._datatype = datatype_of(self._array.dtype)
        except InvalidInput as error:
            raise TritonModelException(f"tensor '{name}': {error.message}") from error

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Array:
        """Return the array, which may be changed."""
        if self._datatype.wire_view is not None:
            name = self._datatype.dtype.name
            raise TritonModelException(f"tensor '{self._name}': NumPy has no {name}: use to_dlpack")
        if not self._array.flags.writeable:
            self._array = self._array.copy()
        return self._array

    def elements(self) -> Array:
        """Return the array of any datatype, which may be read-only."""
        return self._array

    def triton_dtype(self) -> int:
        return TYPES.index("STRING" if self._datatype is BYTES else self._datatype.name)

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        return True

    def to_dlpack(self) -> Any:
        return self.__dlpack__()

    def __dlpack__(self, **options: Any) -> Any:
        if self._datatype is BYTES:
            raise TritonModelException(f"tensor '{self._name}': DLPack does not support TYPE_STRING")
        array = self.as_numpy() if self._datatype.wire_view is None else self._array
        return array.__dlpack__(**{k: v for k, v in options.items() if v is not None})

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # CPU

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> "Tensor":
        """Return a tensor of an object with `__dlpack__`, such as a PyTorch tensor."""
        dtype = _OTHER_DTYPES.get(str(getattr(tensor, "dtype", "")).rpartition(".")[2])
        if dtype is not None and hasattr(tensor, "float"):
            return Tensor(name, tensor.detach().float().cpu().numpy().astype(dtype))
        if hasattr(tensor, "__dlpack_device__") and tensor.__dlpack_device__()[0] != 1 and hasattr(tensor, "cpu"):
            tensor = tensor.cpu()
        if not hasattr(tensor, "__dlpack__"):
            tensor = _Capsule(tensor)
        return Tensor(name, np.from_dlpack(tensor).copy())


class _Capsule:
    """A DLPack capsule as an object with the protocol's methods."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_options: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def as_elements(array: Array) -> Array:
    """Return an array in row-major order, with text as bytes; other objects are their text, as in Triton."""
    if array.dtype.kind in "SUO":
        flat = [bytes(e) if isinstance(e, _BYTES) else str(e).encode() for e in array.astype(object).flat]
        return np.fromiter(flat, object).reshape(array.shape)
    return array if array.flags.c_contiguous else array.copy()
