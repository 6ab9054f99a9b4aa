"""Valid requests derived from a model's metadata, as JSON and as binary tensors."""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Bytes of one element and the format of `struct`; BYTES has neither.
ELEMENT_SIZES = {
    "BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8, "INT8": 1, "INT16": 2, "INT32": 4, "INT64": 8,
    "FP16": 2, "BF16": 2, "FP32": 4, "FP64": 8,
}  # fmt: skip
_FORMATS = {
    "BOOL": "?", "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q", "INT8": "b", "INT16": "h", "INT32": "i",
    "INT64": "q", "FP16": "e", "FP32": "f", "FP64": "d",
}  # fmt: skip
DATATYPES = (*ELEMENT_SIZES, "BYTES")


@dataclass(frozen=True, slots=True)
class TensorShape:
    """Name, datatype and shape of a tensor as metadata declares them; -1 is a variable axis."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SampleTensor:
    """An input tensor: concrete shape and flat elements."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: tuple[Any, ...]

    def as_json(self, nested: bool = False) -> dict[str, Any]:
        data: Any = list(self.values)
        if nested and len(self.shape) > 1:
            for length in reversed(self.shape[1:]):
                data = [data[i : i + length] for i in range(0, len(data), length)]
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape), "data": data}

    def as_bytes(self) -> bytes:
        """Return the elements in the binary form of the protocol: row-major, little-endian."""
        if self.datatype == "BYTES":
            parts = [v.encode() if isinstance(v, str) else bytes(v) for v in self.values]
            return b"".join(struct.pack("<I", len(part)) + part for part in parts)
        if self.datatype == "BF16":  # the upper half of an FP32
            return b"".join(struct.pack("<f", v)[2:] for v in self.values)
        return struct.pack(f"<{len(self.values)}{_FORMATS[self.datatype]}", *self.values)


def sample_of(spec: TensorShape, rows: int = 1) -> SampleTensor:
    """Return a tensor that fits the metadata: variable axes have length 1, or `rows` for the first one."""
    shape = tuple(rows if n < 0 and i == 0 else 1 if n < 0 else n for i, n in enumerate(spec.shape))
    count = math.prod(shape)
    return SampleTensor(spec.name, spec.datatype, shape, (_element(spec.datatype),) * count)


def _element(datatype: str) -> Any:
    if datatype == "BOOL":
        return True
    if datatype == "BYTES":
        return "text"
    return 0.5 if datatype in ("FP16", "BF16", "FP32", "FP64") else 1


def samples_of_request(request: Mapping[str, Any]) -> list[SampleTensor]:
    """Return the inputs of a V2 request in JSON. Raises ValueError, KeyError or TypeError if it is not one."""
    return [
        SampleTensor(one["name"], one["datatype"], tuple(map(int, one["shape"])), tuple(_flatten(one["data"])))
        for one in request["inputs"]
    ]


def _flatten(data: Any) -> list[Any]:
    return [v for each in data for v in _flatten(each)] if isinstance(data, list) else [data]


def json_request(samples: Sequence[SampleTensor], nested: bool = False) -> dict[str, Any]:
    """Return a V2 request."""
    return {"inputs": [sample.as_json(nested) for sample in samples]}
