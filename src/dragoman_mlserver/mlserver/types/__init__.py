"""Types of requests, responses and metadata for custom models."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Self

from dragoman.core.bytes_tensor import with_parameters
from dragoman.core.tensor import NONE, Tensor
from dragoman_mlserver.mlserver.types.base import BaseModel, ErrorResponse, plain_text
from dragoman_mlserver.mlserver.types.data import elements, output_tensor


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
    """The elements of a tensor, as a list in `root`, which is created when it is first read."""

    def __init__(self, root: Any = None, *, tensor: Tensor | None = None) -> None:
        self._root = root
        self.tensor = tensor

    @property
    def root(self) -> Any:
        # The caller may change the list, so from here on it replaces the array.
        if self.tensor is not None:
            self._root, self.tensor = elements(self.tensor), None
        return self._root

    @classmethod
    def of(cls, value: Any) -> "TensorData":
        return value if isinstance(value, TensorData) else cls(value)

    @classmethod
    def model_validate(cls, value: Any) -> "TensorData":
        return cls.of(value)

    def model_dump(self, **_: Any) -> Any:
        return self.plain()

    def plain(self) -> Any:
        values = elements(self.tensor) if self.tensor is not None else self._root
        values = values.tolist() if hasattr(values, "tolist") else values
        return [plain_text(e) for e in values] if isinstance(values, list | tuple) else values

    def __len__(self) -> int:
        return self.tensor.data.size if self.tensor is not None else len(self._root)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.root)

    def __getitem__(self, index: Any) -> Any:
        return self.root[index]

    def __eq__(self, other: object) -> bool:
        is_equal: bool = self.plain() == (other.plain() if isinstance(other, TensorData) else other)
        return is_equal

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TensorData(root={self.plain()!r})"


class Parameters(BaseModel):
    """Parameters of a request, a response or a tensor; any field is accepted."""

    _allows_extra = True
    content_type: str | None = None
    headers: dict[str, Any] | None = None

    def scalars(self) -> dict[str, Any]:
        """Return the parameters without headers and those that are None."""
        values = vars(self)
        if values.keys() == _CONTENT_TYPE_ONLY:  # most often
            content_type = values["content_type"]
            if content_type is None or type(content_type) is str:
                return {} if content_type is None else {"content_type": content_type}
        fields = self.model_dump()
        fields.pop("headers", None)
        return fields


_CONTENT_TYPE_ONLY = {"content_type", "headers"}


class _NamedTensor(BaseModel):
    """A named tensor. Codecs store its codec in `_decoder` and its value in `_decoded`."""

    name: str
    shape: list[int]
    datatype: str
    parameters: Parameters | None = None
    data: TensorData

    @classmethod
    def from_tensor(cls, name: str, tensor: Tensor) -> Self:
        """Return a tensor as an instance; the array is not copied."""
        return cls(
            name=name,
            shape=list(tensor.shape),
            datatype=tensor.datatype.name,
            parameters=dict(tensor.parameters) if tensor.parameters else None,
            data=TensorData(tensor=tensor),
        )

    def to_tensor(self) -> Tensor:
        """Return the data as a tensor with the current shape and datatype. Raises InvalidOutput."""
        parameters = self.parameters.scalars() if self.parameters is not None else {}
        data: Any = self.data
        tensor = data.tensor if isinstance(data, TensorData) else None
        if tensor is not None and list(tensor.shape) == list(self.shape) and tensor.datatype.name == self.datatype:
            return with_parameters(tensor, parameters or NONE)
        values = data.root if isinstance(data, TensorData) else data
        where, datatype = f"'{self.name}'", str(self.datatype)
        return output_tensor(
            where, values, datatype, self.shape, parameters or NONE, allows_null=isinstance(self, RequestInput)
        )


class RequestInput(_NamedTensor):
    """An input of a request."""


class ResponseOutput(_NamedTensor):
    """An output of a response."""


class RequestOutput(BaseModel):
    """An output that a request asks for."""

    name: str
    parameters: Parameters | None = None


class InferenceRequest(BaseModel):
    """A request."""

    id: str | None = None
    parameters: Parameters | None = None
    inputs: list[RequestInput]
    outputs: list[RequestOutput] | None = None


class InferenceResponse(BaseModel):
    """A response."""

    model_name: str
    model_version: str | None = None
    id: str | None = None
    parameters: Parameters | None = None
    outputs: list[ResponseOutput]


class MetadataTensor(BaseModel):
    """Metadata of an input or output."""

    name: str
    datatype: str
    shape: list[int]
    parameters: Parameters | None = None


class MetadataModelResponse(BaseModel):
    """Metadata of a model."""

    name: str
    versions: list[str] | None = None
    platform: str
    inputs: list[MetadataTensor] | None = None
    outputs: list[MetadataTensor] | None = None
    parameters: Parameters | None = None


class MetadataServerResponse(BaseModel):
    """Metadata of the server."""

    name: str
    version: str
    extensions: list[str]


class MetadataServerErrorResponse(ErrorResponse):
    """Error of a request for the metadata of the server."""


class MetadataModelErrorResponse(ErrorResponse):
    """Error of a request for the metadata of a model."""


class InferenceErrorResponse(ErrorResponse):
    """Error of an inference request."""


class State(StrEnum):
    """State of a model version."""

    UNKNOWN = "UNKNOWN"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"
    LOADING = "LOADING"
    UNLOADING = "UNLOADING"


class RepositoryIndexRequest(BaseModel):
    """A request for the index."""

    ready: bool | None = None


class RepositoryIndexResponseItem(BaseModel):
    """One model version in the index."""

    name: str
    version: str | None = None
    state: State
    reason: str


class RepositoryIndexResponse(list[RepositoryIndexResponseItem]):
    """The index."""


class RepositoryLoadErrorResponse(ErrorResponse):
    """Error of a load request."""


class RepositoryUnloadErrorResponse(ErrorResponse):
    """Error of an unload request."""


__all__ = [
    "BaseModel",
    "Datatype",
    "InferenceErrorResponse",
    "InferenceRequest",
    "InferenceResponse",
    "MetadataModelErrorResponse",
    "MetadataModelResponse",
    "MetadataServerErrorResponse",
    "MetadataServerResponse",
    "MetadataTensor",
    "Parameters",
    "RepositoryIndexRequest",
    "RepositoryIndexResponse",
    "RepositoryIndexResponseItem",
    "RepositoryLoadErrorResponse",
    "RepositoryUnloadErrorResponse",
    "RequestInput",
    "RequestOutput",
    "ResponseOutput",
    "State",
    "TensorData",
]
