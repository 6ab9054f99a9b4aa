"""Open Inference Protocol over gRPC: messages with raw tensors, parsers of the responses, and the transport."""

import inspect
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Iterator, Sequence
from typing import Any

from dragoman.client import errors
from dragoman.client.messages import (
    Address,
    Deadline,
    Headers,
    RemoteCall,
    RemoteStream,
    RpcRequest,
    labels_of_metadata,
    spec_of_metadata,
)
from dragoman.core.calls import IndexEntry, ModelDescription, ServerDescription
from dragoman.core.datatypes import datatype
from dragoman.core.errors import DragomanError, InvalidInput, InvalidOutput, ServerError
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.tensor import Tensor
from dragoman.formats import grpc_messages as m
from dragoman.formats.grpc_messages import SERVICE, tensor_from_contents
from dragoman.formats.message import InferenceRequest, InferenceResponse
from dragoman.formats.policy import Buffer, Policy
from dragoman.formats.raw import raw_from_tensor, tensor_from_raw

try:
    import grpc
except ModuleNotFoundError as missing:
    text = "a client for a grpc:// URL needs the package 'grpcio': pip install 'dragoman[grpc]'"
    raise ImportError(text) from missing

_POLICY = Policy(max_bytes_elements=1 << 31)  # limits protect servers; a client trusts the server that it chose
_RAW_INPUT_CONTENTS: int = m.ModelInferRequest.DESCRIPTOR.fields_by_name["raw_input_contents"].number


class Rpc:
    """Builds requests for any server."""

    def infer(self, model: str, version: str, request: InferenceRequest) -> RemoteCall[InferenceResponse]:
        return RemoteCall(RpcRequest("ModelInfer", _serialize(model, version, request)), _read_infer)

    def stream(self, model: str, version: str, request: InferenceRequest) -> RemoteStream:
        return RemoteStream(RpcRequest("ModelStreamInfer", _serialize(model, version, request)), _responses)

    def live(self) -> RemoteCall[bool]:
        return _exchange("ServerLive", m.ServerLiveRequest(), m.ServerLiveResponse, lambda r: bool(r.live))

    def ready(self, model: str, version: str) -> RemoteCall[bool]:
        if model:
            request = m.ModelReadyRequest(name=model, version=version)
            return _exchange("ModelReady", request, m.ModelReadyResponse, lambda r: bool(r.ready))
        return _exchange("ServerReady", m.ServerReadyRequest(), m.ServerReadyResponse, lambda r: bool(r.ready))

    def server(self) -> RemoteCall[ServerDescription]:
        def read(r: Any) -> ServerDescription:
            return ServerDescription(r.name, r.version, tuple(r.extensions))

        return _exchange("ServerMetadata", m.ServerMetadataRequest(), m.ServerMetadataResponse, read)

    def model(self, model: str, version: str) -> RemoteCall[ModelDescription]:
        request = m.ModelMetadataRequest(name=model, version=version)
        return _exchange("ModelMetadata", request, m.ModelMetadataResponse, _description)

    def models(self) -> RemoteCall[list[str]]:
        """List names from the index, which needs the token: the protocol has no other list over gRPC."""
        request = m.RepositoryIndexRequest()
        return _exchange("RepositoryIndex", request, m.RepositoryIndexResponse, _names)

    def index(self, ready: bool) -> RemoteCall[list[IndexEntry]]:
        request = m.RepositoryIndexRequest(ready=ready)
        return _exchange("RepositoryIndex", request, m.RepositoryIndexResponse, _index)

    def load(self, model: str) -> RemoteCall[None]:
        request = m.RepositoryModelLoadRequest(model_name=model)
        return _exchange("RepositoryModelLoad", request, m.RepositoryModelLoadResponse, lambda _: None)

    def unload(self, model: str) -> RemoteCall[None]:
        request = m.RepositoryModelUnloadRequest(model_name=model)
        return _exchange("RepositoryModelUnload", request, m.RepositoryModelUnloadResponse, lambda _: None)


def _exchange(method: str, request: Any, kind: Any, read: Callable[[Any], Any]) -> RemoteCall[Any]:
    return RemoteCall(RpcRequest(method, request.SerializeToString()), lambda response: read(_parse(kind, response)))


# --- writing ---------------------------------------------------------------------------------------------------


def _serialize(model: str, version: str, request: InferenceRequest) -> bytes:
    """Serialize a ModelInferRequest; elements are copied once, directly from the arrays."""
    if not model:
        raise InvalidInput("expected the name of a model, got none")
    message = m.ModelInferRequest(model_name=model, model_version=version, id=request.id)
    try:
        m.parameters_to_proto(request.parameters, message.parameters)
        for name, tensor in request.tensors.items():
            one = message.inputs.add(name=name, datatype=tensor.datatype.name, shape=tensor.shape)
            m.parameters_to_proto(tensor.parameters, one.parameters)
        for output in request.outputs:
            m.parameters_to_proto(output.parameters, message.outputs.add(name=output.name).parameters)
    except InvalidOutput as error:
        raise InvalidInput(error.message) from error
    parts: list[Buffer] = [message.SerializeToString()]
    for tensor in request.tensors.values():  # a message's fields may be appended to its wire form
        parts += m.length_delimited(_RAW_INPUT_CONTENTS, raw_from_tensor(tensor))
    return b"".join(parts)


# --- reading ---------------------------------------------------------------------------------------------------


def _parse(kind: Any, response: bytes) -> Any:
    try:
        return m.parse_message(kind, response)
    except InvalidInput as error:
        raise _unreadable(error) from error


def _unreadable(error: InvalidInput) -> InvalidOutput:
    return InvalidOutput(f"the server's response cannot be read: {error.message}")


def _read_infer(response: bytes) -> InferenceResponse:
    return _response(_parse(m.ModelInferResponse, response))


def _response(message: Any) -> InferenceResponse:
    try:
        return InferenceResponse.of(
            _outputs(message),
            model_name=message.model_name,
            model_version=message.model_version,
            parameters=m.parameters_from_proto(message.parameters, ""),
            id=message.id,
        )
    except InvalidInput as error:
        raise _unreadable(error) from error


def _outputs(message: Any) -> dict[str, Tensor]:
    raw = message.raw_output_contents
    if raw and len(raw) != len(message.outputs):
        raise InvalidInput(f"expected {len(message.outputs)} 'raw_output_contents', one an output, got {len(raw)}")
    tensors: dict[str, Tensor] = {}
    for at, output in enumerate(message.outputs):
        where = f"output '{output.name}'"
        parameters = m.parameters_from_proto(output.parameters, f"{where}: ")
        name = where, datatype(output.datatype), output.shape
        if raw:
            tensors[output.name] = tensor_from_raw(*name, raw[at], _POLICY, parameters)
        else:
            tensors[output.name] = tensor_from_contents(*name, output.contents, _POLICY, parameters)
    return tensors


def _responses() -> Callable[[Buffer], Iterator[InferenceResponse]]:
    def read(response: Buffer) -> Iterator[InferenceResponse]:
        message = _parse(m.ModelStreamInferResponse, bytes(response))
        if message.error_message:
            raise ServerError(message.error_message)
        yield _response(message.infer_response)

    return read


def _description(message: Any) -> ModelDescription:
    content_type = message.properties.get("content_type", "")
    signature = Signature(_specs(message.inputs), _specs(message.outputs), content_type=content_type)
    labels = labels_of_metadata((row.name, _texts(row)) for row in message.outputs)
    return ModelDescription(message.name, tuple(message.versions), message.platform, signature, labels=labels)


def _specs(rows: Sequence[Any]) -> tuple[TensorSpec, ...]:
    return tuple(spec_of_metadata(row.name, row.datatype, row.shape, _texts(row)) for row in rows)


def _texts(row: Any) -> dict[str, Any]:
    return {key: value.string_param or value.bool_param for key, value in row.parameters.items()}


def _index(message: Any) -> list[IndexEntry]:
    return [IndexEntry(row.name, row.version, row.state, row.reason) for row in message.models]


def _names(message: Any) -> list[str]:
    return list(dict.fromkeys(row.name for row in message.models))


_COMPRESSION = {None: None, "gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}

_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    # Reconnect as soon as our own retries need it.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 20_000),  # in fact the time limit of one attempt to connect
    ("grpc.max_reconnect_backoff_ms", 5000),
)

# Triton extension: report an error as the status of the stream instead of as text in a message.
_TRUE_STATUS = ("triton_grpc_error", "true")


class GrpcTransport:
    """Transport to one server: thread-safe, or for one event loop if `asynchronous`."""

    def __init__(self, address: Address, *, asynchronous: bool) -> None:
        self._address = address
        library = grpc.aio if asynchronous else grpc
        if address.uses_tls:
            credentials = grpc.ssl_channel_credentials(root_certificates=address.tls_roots())
            self._channel = library.secure_channel(address.authority, credentials, _OPTIONS)
        else:
            self._channel = library.insecure_channel(address.authority, _OPTIONS)

    async def send(self, request: RpcRequest, deadline: Deadline) -> bytes:
        """Return the message of the response. Raises the error of its status."""
        method = self._channel.unary_unary(f"/{SERVICE}/{request.method}")
        try:
            call = method(request.message, **self._options(deadline, self._address.headers))
            return bytes(await call if inspect.isawaitable(call) else call)
        except grpc.RpcError as error:
            raise _error_of(error, deadline, self._address) from error

    async def stream(self, request: RpcRequest, deadline: Deadline) -> AsyncGenerator[bytes, None]:
        """Yield the messages as they arrive. Raises the error of the final status."""
        method = self._channel.stream_stream(f"/{SERVICE}/{request.method}")
        call = method(iter([request.message]), **self._options(deadline, (*self._address.headers, _TRUE_STATUS)))
        try:
            async for message in call if isinstance(call, AsyncIterable) else _iterate(call):
                yield message
        except grpc.RpcError as error:
            raise _error_of(error, deadline, self._address) from error
        finally:
            call.cancel()

    async def close(self) -> None:
        closing = self._channel.close()
        if inspect.isawaitable(closing):
            await closing

    def interrupt(self) -> None:
        """End the calls of all threads with an error; only for a blocking client."""
        self._channel.close()

    def _options(self, deadline: Deadline, metadata: Headers) -> dict[str, Any]:
        compression = _COMPRESSION[self._address.compression]
        return {"timeout": deadline.left_s(), "metadata": metadata, "compression": compression}


async def _iterate(messages: Iterable[bytes]) -> AsyncGenerator[bytes, None]:
    for message in messages:
        yield message


def _error_of(error: Any, deadline: Deadline, address: Address) -> DragomanError:
    code, details = error.code().name, error.details() or ""
    if code == "DEADLINE_EXCEEDED" and details.lower() == "deadline exceeded":  # written by grpcio, not by the server
        return deadline.deadline_error()
    metadata = {key: value for key, value in error.trailing_metadata() or () if isinstance(value, str)}
    return errors.error_of_code(code, details, metadata, address.name)
