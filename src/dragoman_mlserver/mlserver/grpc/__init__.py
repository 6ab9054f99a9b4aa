"""Clients of MLServer over gRPC: messages, the stub of the service, and converters between messages and types."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from dragoman.core.datatypes import datatype
from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import Tensor
from dragoman.formats import grpc_messages
from dragoman.formats.grpc_messages import (
    SERVICE,
    InferParameter,
    InferTensorContents,
    ModelInferRequest,
    ModelInferResponse,
    ModelMetadataRequest,
    ModelMetadataResponse,
    ModelReadyRequest,
    ModelReadyResponse,
    RepositoryIndexRequest,
    RepositoryIndexResponse,
    RepositoryModelLoadRequest,
    RepositoryModelLoadResponse,
    RepositoryModelUnloadRequest,
    RepositoryModelUnloadResponse,
    ServerLiveRequest,
    ServerLiveResponse,
    ServerMetadataRequest,
    ServerMetadataResponse,
    ServerReadyRequest,
    ServerReadyResponse,
    parameters_from_proto,
    parameters_to_proto,
    tensor_from_contents,
)
from dragoman_mlserver.mlserver import types
from dragoman_mlserver.mlserver.raw import POLICY, next_raw, pack, unpack_tensor

_UNARY = (
    "ServerLive",
    "ServerReady",
    "ModelReady",
    "ServerMetadata",
    "ModelMetadata",
    "ModelInfer",
    "RepositoryIndex",
    "RepositoryModelLoad",
    "RepositoryModelUnload",
)


class GRPCInferenceServiceStub:
    """The methods of the service, each a callable for a channel of `grpc` or `grpc.aio`."""

    def __init__(self, channel: Any) -> None:
        for method in _UNARY:
            request, response = (getattr(grpc_messages, f"{method}{kind}") for kind in ("Request", "Response"))
            setattr(self, method, self._method(channel.unary_unary, method, request, response))
        self.ModelStreamInfer = self._method(
            channel.stream_stream, "ModelStreamInfer", ModelInferRequest, ModelInferResponse
        )

    @staticmethod
    def _method(factory: Any, name: str, request: Any, response: Any) -> Any:
        return factory(
            f"/{SERVICE}/{name}",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )


# --- converters ------------------------------------------------------------------------------------------------


class ParametersConverter:
    """Parameters: those that are objects or lists are not sent."""

    @classmethod
    def to_types(cls, pb_object: Mapping[str, Any]) -> types.Parameters | None:
        return types.Parameters(**parameters_from_proto(pb_object, "")) if pb_object else None

    @classmethod
    def from_types(cls, type_object: types.Parameters) -> dict[str, Any]:
        message = ModelInferRequest()
        _add_parameters(type_object, message)
        return dict(message.parameters)


def _add_parameters(parameters: types.Parameters | None, message: Any) -> None:
    if parameters is not None:
        given = parameters.model_dump()
        scalars = {name: each for name, each in given.items() if isinstance(each, bool | int | float | str)}
        parameters_to_proto(scalars, message.parameters)


class InferInputTensorConverter:
    """Inputs of requests."""

    types_class: ClassVar[Any] = types.RequestInput
    message_class: ClassVar[Any] = ModelInferRequest.InferInputTensor

    @classmethod
    def to_types(cls, pb_object: Any, raw: Iterable[bytes] = ()) -> Any:
        """Return a tensor with its typed contents, or with the next raw contents. Raises InvalidInput."""
        shape, contents = list(pb_object.shape), pb_object.contents
        if contents.ListFields() or 0 in shape:
            where = f"'{pb_object.name}'"
            tensor = tensor_from_contents(where, datatype(pb_object.datatype), shape, contents, POLICY)
        else:
            tensor = unpack_tensor(pb_object.name, pb_object.datatype, shape, next_raw(iter(raw), pb_object.name))
        converted = cls.types_class.from_tensor(pb_object.name, tensor)
        converted.parameters = ParametersConverter.to_types(pb_object.parameters)
        return converted

    @classmethod
    def from_types(cls, type_object: Any, raw: Any = None) -> Any:
        """Return a message with typed contents; or without contents, which are added to `raw`."""
        message = cls.message_class(name=type_object.name, datatype=str(type_object.datatype), shape=type_object.shape)
        _add_parameters(type_object.parameters, message)
        if raw is not None:
            raw.append(pack(type_object))
            return message
        tensor: Tensor = type_object.to_tensor()
        field = tensor.datatype.contents_field
        if not field:
            raise InvalidInput(f"'{type_object.name}': {tensor.datatype} has no typed contents; set use_raw=True")
        getattr(message.contents, field).extend(tensor.data.reshape(-1).tolist())
        return message


class InferOutputTensorConverter(InferInputTensorConverter):
    """Outputs of responses."""

    types_class = types.ResponseOutput
    message_class = ModelInferResponse.InferOutputTensor


class ModelInferRequestConverter:
    """Inference requests."""

    @classmethod
    def to_types(cls, pb_object: Any) -> types.InferenceRequest:
        raw = iter(pb_object.raw_input_contents)
        return types.InferenceRequest(
            id=pb_object.id,
            parameters=ParametersConverter.to_types(pb_object.parameters),
            inputs=[InferInputTensorConverter.to_types(each, raw) for each in pb_object.inputs],
            outputs=[
                types.RequestOutput(name=each.name, parameters=ParametersConverter.to_types(each.parameters))
                for each in pb_object.outputs
            ]
            or None,
        )

    @classmethod
    def from_types(
        cls, type_object: types.InferenceRequest, model_name: str, model_version: str = "", use_raw: bool = False
    ) -> Any:
        message = ModelInferRequest(model_name=model_name, model_version=model_version or "", id=type_object.id or "")
        _add_parameters(type_object.parameters, message)
        raw = message.raw_input_contents if use_raw else None
        message.inputs.extend(InferInputTensorConverter.from_types(each, raw) for each in type_object.inputs)
        for output in type_object.outputs or ():
            _add_parameters(output.parameters, message.outputs.add(name=output.name))
        return message


class ModelInferResponseConverter:
    """Inference responses."""

    @classmethod
    def to_types(cls, pb_object: Any) -> types.InferenceResponse:
        raw = iter(pb_object.raw_output_contents)
        return types.InferenceResponse(
            id=pb_object.id,
            model_name=pb_object.model_name,
            model_version=pb_object.model_version or None,
            parameters=ParametersConverter.to_types(pb_object.parameters),
            outputs=[InferOutputTensorConverter.to_types(each, raw) for each in pb_object.outputs],
        )

    @classmethod
    def from_types(cls, type_object: types.InferenceResponse, use_raw: bool = False) -> Any:
        message = ModelInferResponse(
            model_name=type_object.model_name, model_version=type_object.model_version or "", id=type_object.id or ""
        )
        _add_parameters(type_object.parameters, message)
        raw = message.raw_output_contents if use_raw else None
        message.outputs.extend(InferOutputTensorConverter.from_types(each, raw) for each in type_object.outputs)
        return message


class ServerMetadataResponseConverter:
    """Metadata of the server."""

    @classmethod
    def to_types(cls, pb_object: Any) -> types.MetadataServerResponse:
        return types.MetadataServerResponse(
            name=pb_object.name, version=pb_object.version, extensions=list(pb_object.extensions)
        )


class ModelMetadataResponseConverter:
    """Metadata of a model."""

    @classmethod
    def to_types(cls, pb_object: Any) -> types.MetadataModelResponse:
        return types.MetadataModelResponse(
            name=pb_object.name,
            versions=list(pb_object.versions),
            platform=pb_object.platform,
            inputs=[_metadata_tensor(each) for each in pb_object.inputs] or None,
            outputs=[_metadata_tensor(each) for each in pb_object.outputs] or None,
        )


def _metadata_tensor(message: Any) -> types.MetadataTensor:
    return types.MetadataTensor(
        name=message.name,
        datatype=message.datatype,
        shape=list(message.shape),
        parameters=ParametersConverter.to_types(message.parameters),
    )


__all__ = [
    "GRPCInferenceServiceStub",
    "InferInputTensorConverter",
    "InferOutputTensorConverter",
    "InferParameter",
    "InferTensorContents",
    "ModelInferRequest",
    "ModelInferRequestConverter",
    "ModelInferResponse",
    "ModelInferResponseConverter",
    "ModelMetadataRequest",
    "ModelMetadataResponse",
    "ModelMetadataResponseConverter",
    "ModelReadyRequest",
    "ModelReadyResponse",
    "ParametersConverter",
    "RepositoryIndexRequest",
    "RepositoryIndexResponse",
    "RepositoryModelLoadRequest",
    "RepositoryModelLoadResponse",
    "RepositoryModelUnloadRequest",
    "RepositoryModelUnloadResponse",
    "ServerLiveRequest",
    "ServerLiveResponse",
    "ServerMetadataRequest",
    "ServerMetadataResponse",
    "ServerMetadataResponseConverter",
    "ServerReadyRequest",
    "ServerReadyResponse",
]
