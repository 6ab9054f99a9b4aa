"""Requests and answers; their tensors stay arrays until somebody asks for lists."""

from collections.abc import Callable, Iterator, Mapping
from enum import Enum, StrEnum
from typing import Any, ClassVar, Self

from dragoman.compat.mlserver.types.base import BaseModel, each
from dragoman.compat.mlserver.types.data import elements, tensor_of
from dragoman.core.errors import InvalidInput, InvalidOutput
from dragoman.core.tensor import NONE, Tensor


class Datatype(StrEnum):
    """The names of the datatypes."""

    BOOL = "BOOL"
    UINT8 = "UINT8"
    UINT16 = "UINT16"
    UINT32 = "UINT32"
    UINT64 = "UINT64"
    INT8 = "INT8"
    INT16 = "INT16"
    INT32 = "INT32"
    INT64 = "INT64"
    FP16 = "FP16"
    FP32 = "FP32"
    FP64 = "FP64"
    BYTES = "BYTES"


class TensorData:
    """The elements of a tensor: a list as `root`, which is made when it is first asked for."""

    def __init__(self, root: Any = None, *, tensor: Tensor | None = None) -> None:
        self._root = root
        self.tensor = tensor

    @property
    def root(self) -> Any:
        # What is handed out may be changed: from then on the list counts, not the array.
        if self.tensor is not None:
            self._root, self.tensor = elements(self.tensor), None
        return self._root

    @classmethod
    def of(cls, value: Any) -> "TensorData":
        return value if isinstance(value, TensorData) else cls(value)

    def plain(self) -> Any:
        found = elements(self.tensor) if self.tensor is not None else self._root
        found = found.tolist() if hasattr(found, "tolist") else found
        return [_utf8(e) for e in found] if isinstance(found, list | tuple) else found

    def __len__(self) -> int:
        return self.tensor.data.size if self.tensor is not None else len(self._root)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.root)

    def __getitem__(self, index: Any) -> Any:
        return self.root[index]

    def __eq__(self, other: object) -> bool:
        found: bool = self.plain() == (other.plain() if isinstance(other, TensorData) else other)
        return found

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TensorData(root={self.plain()!r})"


class Parameters(BaseModel):
    """Parameters of a request, an answer or a tensor: any keyword."""

    _open = True
    content_type: str | None = None
    headers: dict[str, Any] | None = None


_Readers = Mapping[str, Callable[[Any], Any]]


class _NamedTensor(BaseModel):
    """A tensor with its name. `_decoder` and `_decoded` are what codecs remember of it."""

    name: str
    shape: list[int]
    datatype: str
    parameters: Parameters | None = None
    data: TensorData
    _readers: ClassVar[_Readers] = {
        "shape": list,
        "datatype": lambda d: d.value if isinstance(d, Enum) else str(d),
        "parameters": Parameters.of,
        "data": TensorData.of,
    }

    @classmethod
    def from_tensor(cls, name: str, tensor: Tensor) -> Self:
        """Around an array, which is not copied."""
        return cls(
            name=name,
            shape=list(tensor.shape),
            datatype=tensor.datatype.name,
            parameters=dict(tensor.parameters) if tensor.parameters else None,
            data=TensorData(tensor=tensor),
        )

    def to_tensor(self) -> Tensor:
        """As an array again, of the shape and datatype that it has now; InvalidOutput where they do not fit."""
        told = self.parameters.model_dump() if self.parameters is not None else {}
        told.pop("headers", None)
        data: Any = self.data
        kept = data.tensor if isinstance(data, TensorData) else None
        if kept is not None and list(kept.shape) == list(self.shape) and kept.datatype.name == self.datatype:
            return Tensor(kept.data, kept.datatype, told or NONE)
        found = data.root if isinstance(data, TensorData) else data
        try:
            return tensor_of(found, str(self.datatype), self.shape, told or NONE)
        except (TypeError, ValueError, OverflowError, InvalidInput) as fault:
            raise InvalidOutput(f"'{self.name}' has data that is no {self.datatype} {self.shape}: {fault}") from fault


class RequestInput(_NamedTensor):
    """An input of a request."""


class ResponseOutput(_NamedTensor):
    """An output of an answer."""


class RequestOutput(BaseModel):
    """An output that a request asks for."""

    name: str
    parameters: Parameters | None = None
    _readers: ClassVar[_Readers] = {"parameters": Parameters.of}


class InferenceRequest(BaseModel):
    """A request."""

    id: str | None = None
    parameters: Parameters | None = None
    inputs: list[RequestInput]
    outputs: list[RequestOutput] | None = None
    _readers: ClassVar[_Readers] = {
        "parameters": Parameters.of,
        "inputs": each(RequestInput),
        "outputs": each(RequestOutput),
    }


class InferenceResponse(BaseModel):
    """An answer."""

    model_name: str
    model_version: str | None = None
    id: str | None = None
    parameters: Parameters | None = None
    outputs: list[ResponseOutput]
    _readers: ClassVar[_Readers] = {"parameters": Parameters.of, "outputs": each(ResponseOutput)}


class MetadataTensor(BaseModel):
    """What metadata tells of one input or output."""

    name: str
    datatype: str
    shape: list[int]
    parameters: Parameters | None = None
    _readers: ClassVar[_Readers] = {"datatype": _NamedTensor._readers["datatype"], "parameters": Parameters.of}


class MetadataModelResponse(BaseModel):
    """What metadata tells of a model."""

    name: str
    versions: list[str] | None = None
    platform: str
    inputs: list[MetadataTensor] | None = None
    outputs: list[MetadataTensor] | None = None
    parameters: Parameters | None = None
    _readers: ClassVar[_Readers] = {
        "parameters": Parameters.of,
        "inputs": each(MetadataTensor),
        "outputs": each(MetadataTensor),
    }


class MetadataServerResponse(BaseModel):
    """What metadata tells of the server."""

    name: str
    version: str
    extensions: list[str]


class _Error(BaseModel):
    error: str | None = None


class MetadataServerErrorResponse(_Error):
    """A fault in telling of the server."""


class MetadataModelErrorResponse(_Error):
    """A fault in telling of a model."""


class InferenceErrorResponse(_Error):
    """A fault in answering."""


def _utf8(element: Any) -> Any:
    if not isinstance(element, bytes):
        return element
    try:
        return element.decode()
    except UnicodeDecodeError:
        return element
