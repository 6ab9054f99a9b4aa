"""Open Inference Protocol over gRPC: messages with raw tensors, parsers of the responses, and the transport."""

import math
from base64 import b64encode
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from dragoman.client import errors
from dragoman.client.http import Connect, Connection, ConnectionPool, Parser, compress
from dragoman.client.http2 import Http2Parser, status_message
from dragoman.client.messages import (
    Address,
    Deadline,
    RemoteCall,
    RemoteStream,
    RpcRequest,
    labels_of_metadata,
    spec_of_metadata,
)
from dragoman.core.calls import IndexEntry, ModelDescription, ServerDescription
from dragoman.core.datatypes import datatype
from dragoman.core.errors import InvalidInput, InvalidOutput, ServerError
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.tensor import Tensor
from dragoman.formats import grpc_messages as m
from dragoman.formats.grpc_messages import SERVICE, tensor_from_contents
from dragoman.formats.grpc_status import CODES
from dragoman.formats.http2.fields import Field
from dragoman.formats.message import InferenceRequest, InferenceResponse
from dragoman.formats.policy import Buffer, Policy
from dragoman.formats.raw import raw_from_tensor, tensor_from_raw

_POLICY = Policy(max_bytes_elements=1 << 31)  # limits protect servers; a client trusts the server that it chose


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
        parts += m.length_delimited(m.RAW_INPUT_CONTENTS, raw_from_tensor(tensor))
    return b"".join(parts)


# --- reading ---------------------------------------------------------------------------------------------------


def _parse(kind: Any, response: Buffer) -> Any:
    try:
        return m.parse_message(kind, response)
    except InvalidInput as error:
        raise _unreadable(error) from error


def _unreadable(error: InvalidInput) -> InvalidOutput:
    return InvalidOutput(f"the server's response cannot be read: {error.message}")


def _read_infer(response: Buffer) -> InferenceResponse:
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
        message = _parse(m.ModelStreamInferResponse, response)
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


# --- transport -------------------------------------------------------------------------------------------------

# Triton extension: report an error as the status of the stream instead of as text in a message.
_TRUE_STATUS = ("triton_grpc_error", "true")
_NAMES = {str(number): name for name, number in CODES.items()}
_LONGEST_TIMEOUT_MS = 99_999_999  # eight digits


class GrpcTransport(ConnectionPool):
    """Transport to one server over HTTP/2, on our own parser; each call in progress has a connection."""

    def __init__(self, address: Address, connector: Callable[[Address, Callable[[], Parser]], Connect]) -> None:
        super().__init__(address, connector(address, Http2Parser))
        encoding = address.compression or "identity"
        self._fields: list[Field] = [
            (b":method", b"POST"),
            (b":scheme", b"https" if address.uses_tls else b"http"),
            (b":authority", address.authority.encode()),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"user-agent", b"dragoman"),
            (b"grpc-encoding", encoding.encode()),
            (b"grpc-accept-encoding", b"identity,deflate,gzip"),
            *(_metadata(name, value) for name, value in address.headers),
        ]

    async def send(self, request: RpcRequest, deadline: Deadline) -> Any:
        """Return the message of the response. Raises the error of its status."""
        async with self._call(request, deadline, streams=False) as connection:
            while not connection.parser.done:
                await self._more(connection, deadline)
            messages = connection.parser.messages()
            self._check(connection.parser)
        if len(messages) != 1:
            raise ServerError(f"expected one message in the response, got {len(messages)}")
        return messages[0]

    async def stream(self, request: RpcRequest, deadline: Deadline) -> AsyncGenerator[Any, None]:
        """Yield the messages as they arrive. Raises the error of the final status."""
        async with self._call(replace(request, metadata=(_TRUE_STATUS,)), deadline, streams=True) as connection:
            while True:
                is_last = connection.parser.done  # before the messages: more may arrive while one is yielded
                for message in connection.parser.messages():
                    yield message
                if is_last:
                    break
                connection.take()
                await self._more(connection, deadline)
            self._check(connection.parser)

    async def _send(self, connection: Connection, request: RpcRequest, deadline: Deadline) -> None:
        """Send a request as far as the windows of the server allow, until it is complete or answered."""
        fields = [(b":path", f"/{SERVICE}/{request.method}".encode()), *map(_encoded, request.metadata)]
        left_s = deadline.left_s()
        if left_s is not None:
            fields.append((b"grpc-timeout", b"%dm" % min(math.ceil(left_s * 1000), _LONGEST_TIMEOUT_MS)))
        encoding, message = self._address.compression, request.message
        if encoding:
            (message,) = map(bytes, compress([message], encoding))
        parser: Http2Parser = connection.parser
        parser.start([*self._fields[:3], *fields, *self._fields[3:]], message, is_compressed=bool(encoding))
        await connection.send(parser.body(), deadline)
        while parser.is_blocked:
            await self._more(connection, deadline)

    async def _more(self, connection: Connection, deadline: Deadline) -> None:
        await connection.more(deadline)
        if connection.parser.replies or connection.parser.is_blocked:
            await connection.send(connection.parser.body(), deadline)

    def _check(self, parser: Http2Parser) -> None:
        """Raise the error of a response, unless its status is OK."""
        if parser.reset_status:
            raise errors.error_of_code(parser.reset_status, "the server reset the stream", {}, self._address.name)
        status, code = parser.headers.get(":status", ""), parser.trailers.get("grpc-status")
        if code is None and status != "200":
            raise errors.error_of_status(int(status) if status.isdecimal() else 500, parser.headers, parser.raw)
        if code is None:
            raise ServerError("the response is not gRPC: it has no grpc-status")
        if code != "0":
            name = _NAMES.get(code, "UNKNOWN")
            raise errors.error_of_code(name, status_message(parser.trailers), parser.trailers, self._address.name)


def _metadata(name: str, value: str) -> Field:
    """Return a field of metadata; binary metadata (`-bin`) is sent as base64."""
    data = value.encode()
    return name.encode(), b64encode(data).rstrip(b"=") if name.endswith("-bin") else data


def _encoded(field: tuple[str, str]) -> Field:
    return field[0].encode(), field[1].encode()
