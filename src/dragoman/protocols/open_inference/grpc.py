"""The Open Inference Protocol over gRPC: the table of its methods."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from dragoman.core.calls import (
    Describe,
    DescribeServer,
    Inference,
    Live,
    ModelDescription,
    Ready,
    Request,
    Response,
    ServerDescription,
)
from dragoman.core.errors import (
    CallerError,
    DeadlineExceeded,
    DragomanError,
    Forbidden,
    InvalidInput,
    ModelNotFound,
    NotReady,
    NotSupported,
    Overloaded,
    ServerError,
    Unauthorized,
    WorkerLost,
)
from dragoman.core.signature import TensorSpec
from dragoman.formats import oip_messages as m
from dragoman.protocols.open_inference import extensions as oip
from dragoman.protocols.open_inference import repository as oip_repository
from dragoman.protocols.open_inference.derivatives import derivative, told
from dragoman.protocols.open_inference.exchange import exchange
from dragoman.protocols.open_inference.headers import checked_metadata
from dragoman.protocols.open_inference.inference import FINAL, Form, named, read_infer, write_infer, write_parts
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
)

# The nearest class of an error decides. NotSupported is UNIMPLEMENTED: no other request of this kind would do.
STATUS: Mapping[type[DragomanError], str] = {
    InvalidInput: "INVALID_ARGUMENT",
    ModelNotFound: "NOT_FOUND",
    NotSupported: "UNIMPLEMENTED",
    NotReady: "UNAVAILABLE",
    Overloaded: "RESOURCE_EXHAUSTED",
    DeadlineExceeded: "DEADLINE_EXCEEDED",
    Unauthorized: "UNAUTHENTICATED",
    Forbidden: "PERMISSION_DENIED",
    WorkerLost: "UNAVAILABLE",
    CallerError: "INVALID_ARGUMENT",
    ServerError: "INTERNAL",
    DragomanError: "INTERNAL",
}

# Metadata of a stream: `bare` answers with ModelInferResponse itself, as some servers and their clients do.
SHAPE = "dragoman-stream-shape"
# Triton's: a fault ends the stream with a status instead of being told in it.
TRUE_STATUS = "triton_grpc_error"

_INFER_RESPONSE: int = m.ModelStreamInferResponse.DESCRIPTOR.fields_by_name["infer_response"].number


def protocol(policy: Policy) -> GrpcProtocol:
    """The table, under the operator's policy."""
    return GrpcProtocol(
        service=m.SERVICE,
        methods=(
            GrpcMethod("ServerLive", _server_live, health=True),
            GrpcMethod("ServerReady", _server_ready, health=True),
            GrpcMethod("ModelReady", _model_ready, health=True),
            GrpcMethod("ServerMetadata", _server_metadata),
            GrpcMethod("ModelMetadata", _model_metadata),
            GrpcMethod("ModelInfer", partial(_infer, policy)),
            GrpcStreamMethod("ModelStreamInfer", partial(_stream_infer, policy), _stream_fault),
            GrpcMethod("RepositoryIndex", oip_repository.index),
            GrpcMethod("RepositoryModelLoad", oip_repository.load),
            GrpcMethod("RepositoryModelUnload", oip_repository.unload),
        ),
        status=_status,
        descriptors=m.DESCRIPTORS,
    )


def _status(error: DragomanError) -> str:
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


# --- health and metadata ---------------------------------------------------------------------------------


def _server_live(request: GrpcRequest) -> EngineCall[bool, bytes]:
    m.parsed(m.ServerLiveRequest, request.body)
    return exchange(Request(Live(), deadline_s=request.deadline_s), lambda live: m.ServerLiveResponse(live=live))


def _server_ready(request: GrpcRequest) -> EngineCall[bool, bytes]:
    m.parsed(m.ServerReadyRequest, request.body)
    asked = Request(Ready(), deadline_s=request.deadline_s)
    return exchange(asked, lambda ready: m.ServerReadyResponse(ready=ready))


def _model_ready(request: GrpcRequest) -> EngineCall[bool, bytes]:
    message = m.parsed(m.ModelReadyRequest, request.body)
    asked = Request(Ready(), named(message.name), message.version, deadline_s=request.deadline_s)
    return exchange(asked, lambda ready: m.ModelReadyResponse(ready=ready))


def _server_metadata(request: GrpcRequest) -> EngineCall[ServerDescription, bytes]:
    def written(answer: ServerDescription) -> Any:
        extensions = dict.fromkeys((*oip.EXTENSIONS, *answer.extensions))
        return m.ServerMetadataResponse(name=answer.name, version=answer.version, extensions=extensions)

    m.parsed(m.ServerMetadataRequest, request.body)
    return exchange(Request(DescribeServer(), deadline_s=request.deadline_s), written)


def _model_metadata(request: GrpcRequest) -> EngineCall[ModelDescription, bytes]:
    message = m.parsed(m.ModelMetadataRequest, request.body)
    asked = Request(Describe(), named(message.name), message.version, deadline_s=request.deadline_s)
    return exchange(asked, _written_description)


def _written_description(answer: ModelDescription) -> Any:
    return m.ModelMetadataResponse(
        name=answer.name,
        versions=answer.versions,
        platform=answer.platform,
        inputs=_written_specs(answer.signature.inputs),
        outputs=_written_specs(answer.signature.outputs),
    )


def _written_specs(specs: tuple[TensorSpec, ...]) -> list[Any]:
    made = m.ModelMetadataResponse.TensorMetadata
    return [made(name=n, datatype=datatype, shape=shape) for n, datatype, shape, _ in oip.metadata_tensors(specs)]


# --- inference -------------------------------------------------------------------------------------------


def _infer(policy: Policy, request: GrpcRequest) -> EngineCall[Any, bytes] | EngineCall[Any, GrpcResult]:
    asked, form = read_infer(request, policy)
    call: Any = asked.call
    derived = derivative(asked) if call.parameters else None
    if derived is not None:
        return EngineCall(derived, lambda response: write_infer(told(asked, response), form))
    return EngineCall(asked, partial(_written, form=form))


def _written(response: Response[Inference], form: Form) -> GrpcResult:
    message = write_parts(response, form)
    metadata = response.answer.metadata
    return GrpcResponse(message, checked_metadata(metadata)) if metadata else message


def _stream_infer(policy: Policy, request: GrpcRequest) -> GrpcStream[Inference]:
    asked, form = read_infer(request, policy)
    bare = _is_bare(request)

    def piece(response: Response[Inference]) -> bytes:
        written = write_infer(response, form)
        return written if bare else _in_stream(written)

    end = _end(form)
    return GrpcStream(asked, piece, end if bare or end is None else _in_stream(end))


def _end(form: Form) -> bytes | None:
    """The response without outputs that says that no further one follows, where the client wants it."""
    if not form.final:
        return None
    message = m.ModelInferResponse(model_name=form.model, model_version=form.version, id=form.id)
    message.parameters[FINAL].bool_param = True
    return bytes(message.SerializeToString())


def _in_stream(response: bytes) -> bytes:
    return b"".join(m.length_delimited(_INFER_RESPONSE, response))


def _stream_fault(request: GrpcRequest, error: DragomanError) -> bytes | None:
    """The fault as a message that names the request by its id; None where only a status can tell it."""
    if _is_bare(request) or request.metadata.get(TRUE_STATUS, "").lower() == "true":
        return None
    try:
        failed = m.ModelInferResponse(id=m.parsed(m.ModelInferRequest, request.body).id)
    except InvalidInput:
        failed = m.ModelInferResponse()
    # Clients take an empty error_message for a success.
    message = error.message or type(error).__name__
    return bytes(m.ModelStreamInferResponse(error_message=message, infer_response=failed).SerializeToString())


def _is_bare(request: GrpcRequest) -> bool:
    return request.metadata.get(SHAPE, "").lower() == "bare"
