"""Open Inference Protocol over gRPC."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, TypeVar

from dragoman.core.calls import (
    Call,
    ClassLabels,
    Describe,
    DescribeServer,
    Index,
    IndexEntry,
    Inference,
    Live,
    Load,
    ModelDescription,
    ModelStatistics,
    ReadStatistics,
    Ready,
    Request,
    Response,
    ServerDescription,
    Unload,
)
from dragoman.core.errors import (
    AlreadyLoaded,
    CallerError,
    CancelledByModel,
    DeadlineExceeded,
    DragomanError,
    Forbidden,
    InvalidInput,
    ModelNotFound,
    NotReady,
    NotSupported,
    Overloaded,
    RateLimited,
    ServerError,
    Unauthorized,
    UnknownFailure,
    WorkerLost,
)
from dragoman.core.signature import TensorSpec
from dragoman.core.spec import check_name
from dragoman.formats import grpc_messages as m
from dragoman.formats.config_override import parse_overrides
from dragoman.formats.grpc_messages import split_raw_contents
from dragoman.protocols.custom_handlers import check_metadata
from dragoman.protocols.open_inference import extensions as oip
from dragoman.protocols.open_inference import server_settings, shared_memory
from dragoman.protocols.open_inference.classification import classified_call, classify
from dragoman.protocols.open_inference.derivatives import derivative_request, inference_response
from dragoman.protocols.open_inference.grpc_inference import (
    GrpcOutputOptions,
    format_infer_buffers,
    format_infer_response,
    parse_infer_request,
    require_model_name,
)
from dragoman.protocols.open_inference.model_config import config_message
from dragoman.protocols.open_inference.statistics import statistics_message
from dragoman.protocols.wire import (
    EngineCall,
    GrpcMethod,
    GrpcProtocol,
    GrpcRequest,
    GrpcResponse,
    GrpcResult,
    GrpcStream,
    GrpcStreamMethod,
    Policy,
    PreliminaryCall,
    bearer_token,
)

A = TypeVar("A")

# The nearest base class of an error decides.
STATUS: Mapping[type[DragomanError], str] = {
    AlreadyLoaded: "ALREADY_EXISTS",
    InvalidInput: "INVALID_ARGUMENT",
    ModelNotFound: "NOT_FOUND",
    NotSupported: "UNIMPLEMENTED",
    NotReady: "UNAVAILABLE",
    Overloaded: "RESOURCE_EXHAUSTED",
    RateLimited: "RESOURCE_EXHAUSTED",
    DeadlineExceeded: "DEADLINE_EXCEEDED",
    Unauthorized: "UNAUTHENTICATED",
    Forbidden: "PERMISSION_DENIED",
    WorkerLost: "UNAVAILABLE",
    CallerError: "INVALID_ARGUMENT",
    CancelledByModel: "CANCELLED",
    UnknownFailure: "UNKNOWN",
    ServerError: "INTERNAL",
    DragomanError: "INTERNAL",
}

# Metadata of a stream: with `bare` its messages are ModelInferResponse as in MLServer, with `triton` those of Triton.
SHAPE = "dragoman-stream-shape"
BARE = "bare"
# Triton: the parameter of a response in a stream that says whether it is the last one of its request.
FINAL = "triton_final_response"
# Triton: with `true`, an error ends the stream with a status instead of being a message of it.
TRUE_STATUS = "triton_grpc_error"

INFER_RESPONSE = 2  # the number of a field of ModelStreamInferResponse


def protocol(policy: Policy) -> GrpcProtocol:
    """Return the methods of the service."""
    stream_error = partial(_format_stream_error, policy)
    return GrpcProtocol(
        service=m.SERVICE,
        methods=(
            GrpcMethod("ServerLive", _server_live, health=True),
            GrpcMethod("ServerReady", _server_ready, health=True),
            GrpcMethod("ModelReady", _model_ready, health=True),
            GrpcMethod("ServerMetadata", _server_metadata, role="read"),
            GrpcMethod("ModelMetadata", _model_metadata, role="read"),
            GrpcMethod("ModelConfig", _model_config, role="read"),
            GrpcMethod("ModelStatistics", _model_statistics, role="read"),
            GrpcMethod("ModelInfer", partial(_infer, policy), role="infer"),
            GrpcStreamMethod("ModelStreamInfer", partial(_stream_infer, policy), stream_error, role="infer"),
            GrpcMethod("RepositoryIndex", _repository_index, role="admin"),
            GrpcMethod("RepositoryModelLoad", partial(_repository_load, policy), role="admin"),
            GrpcMethod("RepositoryModelUnload", _repository_unload, role="admin"),
            *shared_memory.methods(policy),
            *server_settings.methods(policy),
        ),
        status=_status,
        descriptors=m.DESCRIPTORS + m.REPOSITORY_DESCRIPTORS,
        other_services={
            m.REPOSITORY_SERVICE: frozenset(("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"))
        },
    )


def _status(error: DragomanError) -> str:
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


def _message_call(request: Request[A], to_message: Callable[[A], Any]) -> EngineCall[A, bytes]:
    """Return a call whose response is formatted as the protobuf message that `to_message` makes of it."""

    def format_response(response: Response[A]) -> bytes:
        return bytes(to_message(response.answer).SerializeToString())

    return EngineCall(request, format_response)


# --- health and metadata ---------------------------------------------------------------------------------


def _server_live(request: GrpcRequest) -> EngineCall[bool, bytes]:
    m.parse_message(m.ServerLiveRequest, request.body)
    return _message_call(Request(Live(), deadline_s=request.deadline_s), lambda live: m.ServerLiveResponse(live=live))


def _server_ready(request: GrpcRequest) -> EngineCall[bool, bytes]:
    m.parse_message(m.ServerReadyRequest, request.body)
    ready = Request(Ready(), deadline_s=request.deadline_s)
    return _message_call(ready, lambda ready: m.ServerReadyResponse(ready=ready))


def _model_ready(request: GrpcRequest) -> EngineCall[bool, bytes]:
    message = m.parse_message(m.ModelReadyRequest, request.body)
    call, model = Ready(may_be_unknown=True), require_model_name(message.name)
    ready = Request(call, model, message.version, deadline_s=request.deadline_s)
    return _message_call(ready, lambda ready: m.ModelReadyResponse(ready=ready))


def _server_metadata(request: GrpcRequest) -> EngineCall[ServerDescription, bytes]:
    def to_message(server: ServerDescription) -> Any:
        return m.ServerMetadataResponse(name=server.name, version=server.version, extensions=server.extensions)

    m.parse_message(m.ServerMetadataRequest, request.body)
    return _message_call(Request(DescribeServer(), deadline_s=request.deadline_s), to_message)


def _model_metadata(request: GrpcRequest) -> EngineCall[ModelDescription, bytes]:
    def to_message(model: ModelDescription) -> Any:
        return m.ModelMetadataResponse(
            name=model.name,
            **oip.platform_and_versions(model),
            inputs=_tensor_metadata(model.signature.inputs, {}),
            outputs=_tensor_metadata(model.signature.outputs, model.labels),
            properties={"content_type": model.signature.content_type} if model.signature.content_type else {},
        )

    message = m.parse_message(m.ModelMetadataRequest, request.body)
    describe = Request(Describe(), require_model_name(message.name), message.version, deadline_s=request.deadline_s)
    return _message_call(describe, to_message)


def _model_config(request: GrpcRequest) -> EngineCall[ModelDescription, bytes]:
    message = m.parse_message(m.ModelConfigRequest, request.body)
    describe = Request(Describe(), require_model_name(message.name), message.version, deadline_s=request.deadline_s)
    return _message_call(describe, lambda model: m.ModelConfigResponse(config=config_message(model)))


def _model_statistics(request: GrpcRequest) -> EngineCall[tuple[ModelStatistics, ...], bytes]:
    message = m.parse_message(m.ModelStatisticsRequest, request.body)
    read = Request(ReadStatistics(), message.name, message.version, deadline_s=request.deadline_s)
    return _message_call(read, statistics_message)


def _tensor_metadata(specs: tuple[TensorSpec, ...], labels: Mapping[str, ClassLabels]) -> list[Any]:
    message = m.ModelMetadataResponse.TensorMetadata
    tensors = []
    for name, datatype, shape, parameters in oip.metadata_tensors(specs, labels):
        tensor = message(name=name, datatype=datatype, shape=shape)
        for key, value in parameters.items():
            if isinstance(value, str):
                tensor.parameters[key].string_param = value
            else:
                tensor.parameters[key].bool_param = value
        tensors.append(tensor)
    return tensors


# --- inference -------------------------------------------------------------------------------------------


def _infer(policy: Policy, request: GrpcRequest) -> EngineCall[Any, bytes] | EngineCall[Any, GrpcResult]:
    infer, options = parse_infer_request(request, policy)
    call: Any = infer.call
    derivative = derivative_request(infer) if call.parameters else None
    if derivative is not None:
        return EngineCall(
            derivative, lambda response: format_infer_response(inference_response(infer, response), options)
        )
    if options.classes:
        return classified_call(infer, options.classes, partial(_format_infer, options=options))
    return EngineCall(infer, partial(_format_infer, options=options))


def _format_infer(response: Response[Inference], options: GrpcOutputOptions) -> GrpcResult:
    message = format_infer_buffers(response, options)
    metadata = response.answer.metadata
    return GrpcResponse(message, check_metadata(metadata)) if metadata else message


def _stream_infer(policy: Policy, request: GrpcRequest) -> PreliminaryCall[ModelDescription]:
    infer, options = parse_infer_request(request, policy)
    shape = _stream_shape(request, options)

    def stream(described: Response[ModelDescription]) -> GrpcStream[Inference]:
        model = described.answer
        is_bare = shape == BARE or (not shape and model.signature.unchecked)
        wrap = bytes if is_bare else _wrap_in_stream_response
        is_marked = not is_bare or options.final is not None
        ended = not model.streams  # whether a response has been the last one

        def format_chunk(response: Response[Inference]) -> bytes:
            nonlocal ended
            if options.classes:
                response = classify(model, options.classes, response)
            ended = ended or response.answer.is_last
            return wrap(format_infer_response(response, options) + (_final_mark(ended) if is_marked else b""))

        def format_error(error: DragomanError) -> bytes | None:
            return None if is_bare or _wants_status(request) else _error_message(infer.id, error, is_final=False)

        def format_end() -> bytes | None:
            return wrap(_final_response(options)) if options.final and not ended else None

        return GrpcStream(infer, format_chunk, format_error, format_end, ends_with_status=is_bare)

    return PreliminaryCall(Request(Describe(), infer.model, infer.version, infer.id), stream)


def _stream_shape(request: GrpcRequest, options: GrpcOutputOptions) -> str:
    """Return the shape of the messages that the client of a stream expects; "" if the model decides it.

    Triton's clients send raw contents, those of MLServer typed contents, mostly with content types. A typed request
    without any is from a client of MLServer if the model is one of MLServer, and otherwise from a stub of Triton's.
    """
    shape = request.metadata.get(SHAPE, "").lower()
    if shape in (BARE, "triton"):
        return shape
    if options.has_raw or options.final is not None or options.region_slices or _wants_status(request):
        return "triton"
    return BARE if options.has_content_type else ""


@cache
def _final_mark(is_final: bool) -> bytes:
    """Return the parameter that says whether a response is the last one; appended to a message, it is part of it."""
    message = m.ModelInferResponse()
    message.parameters[FINAL].bool_param = is_final
    return bytes(message.SerializeToString())


def _final_response(options: GrpcOutputOptions) -> bytes:
    """Return a response without outputs that marks the end of a stream."""
    message = m.ModelInferResponse(model_name=options.model, model_version=options.version, id=options.id)
    return bytes(message.SerializeToString()) + _final_mark(True)


def _wrap_in_stream_response(response: bytes) -> bytes:
    return b"".join(m.length_delimited(INFER_RESPONSE, response))


def _format_stream_error(policy: Policy, request: GrpcRequest, error: DragomanError) -> bytes | None:
    """Return a message with the error and the id of the request; None if the client expects a status."""
    shape = request.metadata.get(SHAPE, "").lower()
    is_typed = not shape and policy.dialect.bare_streams and split_raw_contents(request.body) is None
    if shape == BARE or is_typed or _wants_status(request):
        return None
    try:
        id_ = m.parse_message(m.ModelInferRequest, request.body).id
    except InvalidInput:
        id_ = ""
    return _error_message(id_, error, is_final=True)


def _error_message(id_: str, error: DragomanError, *, is_final: bool) -> bytes:
    """Return the message of an error, which is the last response of its request or one of several."""
    response = m.ModelInferResponse(id=id_)
    response.parameters[FINAL].bool_param = is_final
    # Clients take an empty error_message for a success.
    message = error.message or type(error).__name__
    return bytes(m.ModelStreamInferResponse(error_message=message, infer_response=response).SerializeToString())


def _wants_status(request: GrpcRequest) -> bool:
    return request.metadata.get(TRUE_STATUS, "").lower() == "true"


# --- model repository ------------------------------------------------------------------------------------


def _repository_index(request: GrpcRequest) -> EngineCall[tuple[IndexEntry, ...], bytes]:
    def to_message(entries: tuple[IndexEntry, ...]) -> Any:
        row = m.RepositoryIndexResponse.ModelIndex
        rows = [row(name=e.name, version=e.version, state=e.state, reason=e.reason) for e in entries]
        return m.RepositoryIndexResponse(models=rows)

    message = m.parse_message(m.RepositoryIndexRequest, request.body)
    _check_repository(message)
    call = Index(bearer_token(request.metadata), message.ready)
    return _message_call(Request(call, deadline_s=request.deadline_s), to_message)


def _repository_load(policy: Policy, request: GrpcRequest) -> EngineCall[None, bytes]:
    message = m.parse_message(m.RepositoryModelLoadRequest, request.body)
    parameters = m.parameters_from_proto(message.parameters, "")
    weights = oip.parse_version_weights(parameters)
    config, files = parse_overrides(message.model_name, parameters, policy, oip.LOAD_PARAMETERS)
    call = Load(bearer_token(request.metadata), version_weights=weights, config=config, files=files)
    load = _control_request(call, message, request, parameters)
    return _message_call(load, lambda _: m.RepositoryModelLoadResponse())


def _repository_unload(request: GrpcRequest) -> EngineCall[None, bytes]:
    message = m.parse_message(m.RepositoryModelUnloadRequest, request.body)
    parameters = m.parameters_from_proto(message.parameters, "")
    oip.check_unload_parameters(parameters)
    unload = _control_request(Unload(bearer_token(request.metadata), may_be_unknown=True), message, request, parameters)
    return _message_call(unload, lambda _: m.RepositoryModelUnloadResponse())


def _control_request(
    call: Call[None], message: Any, request: GrpcRequest, parameters: Mapping[str, Any]
) -> Request[None]:
    """Return the request to load or unload the model of a message, and the version if a parameter names one."""
    _check_repository(message)
    version = parameters.get("version", "")
    if not isinstance(version, str):
        raise InvalidInput(f"parameter 'version': expected text, got {version!r}")
    if version:
        check_name(version, "version")
    return Request(call, message.model_name, version, deadline_s=request.deadline_s)


def _check_repository(message: Any) -> None:
    if message.repository_name:
        raise NotSupported(f"there is one repository; expected no repository_name, got '{message.repository_name}'")
