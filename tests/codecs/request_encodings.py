"""Encode a request and parse it again, for each encoding."""

from collections.abc import Callable, Mapping

from dragoman.core.tensor import Tensor
from dragoman.formats.grpc_messages import ModelInferRequest, parameters_to_proto
from dragoman.formats.message import InferenceRequest, RequestInput
from dragoman.formats.raw import raw_from_tensor
from dragoman.protocols.open_inference.grpc_inference import parse_infer_request
from dragoman.protocols.wire import GrpcRequest, Policy


def unencoded(request: InferenceRequest) -> InferenceRequest:
    return request


def as_json(request: InferenceRequest) -> InferenceRequest:
    return InferenceRequest.from_json(request.to_json())


def as_dict(request: InferenceRequest) -> InferenceRequest:
    return InferenceRequest.from_dict(request.to_dict())


def as_binary(request: InferenceRequest) -> InferenceRequest:
    parts, length = request.to_binary()
    return InferenceRequest.from_json(b"".join(parts), str(length))


def as_grpc(request: InferenceRequest) -> InferenceRequest:
    message = ModelInferRequest(model_name="m")
    parameters_to_proto(request.parameters, message.parameters)
    for one in request.inputs:
        added = message.inputs.add(name=one.name, datatype=one.datatype, shape=one.shape)
        parameters_to_proto(one.parameters, added.parameters)
        message.raw_input_contents.append(bytes(raw_from_tensor(one.tensor)))
    read, _ = parse_infer_request(GrpcRequest(message.SerializeToString()), Policy())
    call = read.call
    return of_tensors(call.inputs, call.parameters)  # type: ignore[attr-defined]


def of_tensors(tensors: Mapping[str, Tensor], parameters: Mapping[str, str | bool | int | float]) -> InferenceRequest:
    return InferenceRequest(inputs=[RequestInput(n, t) for n, t in tensors.items()], parameters=parameters)


ENCODINGS: list[Callable[[InferenceRequest], InferenceRequest]] = [
    unencoded,
    as_json,
    as_dict,
    as_binary,
    as_grpc,
]
# Encodings that can carry every number and byte.
EXACT = [unencoded, as_binary, as_grpc]
