"""A fake engine, a server and messages for the tests of gRPC."""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc
import pytest
from msgspec import structs

from dragoman.core.calls import (
    Describe,
    DescribeServer,
    Index,
    IndexEntry,
    Infer,
    Inference,
    Live,
    ModelDescription,
    Ready,
    Request,
    Response,
    ServerDescription,
)
from dragoman.core.chunks import ChunkStream
from dragoman.core.datatypes import FP32, INT32
from dragoman.core.errors import ModelNotFound
from dragoman.core.signature import Signature, TensorSpec
from dragoman.formats import grpc_messages as m
from dragoman.protocols.open_inference import grpc as oip_grpc
from dragoman.protocols.wire import (
    EngineCall,
    GrpcMethod,
    GrpcRequest,
    GrpcStream,
    GrpcStreamMethod,
    Policy,
    PreliminaryCall,
)
from dragoman.system.coroutines import begin
from dragoman.transports.grpc.calls import GrpcServer
from dragoman.transports.limits import Limits

A = TypeVar("A")
SERVICE = "/inference.GRPCInferenceService/"
LIMIT = 1 << 20
LIMITS = Limits(max_body_bytes=LIMIT)
TABLE = oip_grpc.protocol(Policy())
SIGNATURE = Signature(
    inputs=(TensorSpec("x", FP32, (-1, 2)), TensorSpec("any")),
    outputs=(TensorSpec("y", INT32, ()), TensorSpec("z", FP32)),
)


def method(name: str) -> GrpcMethod | GrpcStreamMethod:
    return next(row for row in TABLE.methods if row.name == name)


def parse_request(name: str, body: bytes, metadata: Mapping[str, str] | None = None) -> EngineCall[Any, Any]:
    row = method(name)
    assert isinstance(row, GrpcMethod)
    return row.endpoint(GrpcRequest(body, metadata or {}))


def parse_stream_request(
    body: bytes, metadata: Mapping[str, str] | None = None, *, streams: bool = True, unchecked: bool = False
) -> GrpcStream[Any]:
    """Parse a message of a stream to a model that `streams` or not, and is one of MLServer if `unchecked`."""
    row = method("ModelStreamInfer")
    assert isinstance(row, GrpcStreamMethod)
    preliminary = row.endpoint(GrpcRequest(body, metadata or {}))
    assert isinstance(preliminary, PreliminaryCall)
    model = ModelDescription("echo", (), "python", Signature(unchecked=unchecked), streams=streams)
    stream = preliminary.then(Response(model))
    assert isinstance(stream, GrpcStream)
    return stream


def infer_message(model: str = "echo", raw: bool = True, **fields: Any) -> Any:
    """Return a ModelInferRequest with the INT32 input `x`, the elements 1 and 2."""
    message = m.ModelInferRequest(model_name=model, **fields)
    tensor = message.inputs.add(name="x", datatype="INT32", shape=[2])
    if raw:
        message.raw_input_contents.append(b"\1\0\0\0\2\0\0\0")
    else:
        tensor.contents.int_contents.extend([1, 2])
    return message


def parsed_call(parsed: EngineCall[Any, Any] | GrpcStream[Any]) -> Any:
    """Return the call of a parsed request."""
    return parsed.request.call


def make_server(engine: Any, limits: Limits = LIMITS, tls: tuple[Path, Path, bool] | None = None) -> GrpcServer:
    """Return a server; `tls`: the files of key and certificates, and whether clients need one too."""
    context = None
    if tls is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(tls[1], tls[0])
        if tls[2]:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(tls[1])
    return GrpcServer(engine, [TABLE], limits=limits, tls=context)


async def rpc_error(awaitable: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return caught.value


class FakeEngine:
    """Returns the inputs of inference.

    The model `slow` never ends, `wide` negates, `headed` sets a header, those in `errors` raise.
    """

    is_remote = False

    def __init__(self) -> None:
        self.errors: dict[str, Exception] = {}
        self.requests: list[Request[Any]] = []
        self.chunk_count = 3
        self.sent_chunks = 0
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()
        self._ready = True
        self._change = asyncio.Event()

    def begin(self, request: Request[Any]) -> Any:
        return begin(self.call(request))

    def ready(self) -> bool:
        return self._ready

    def set_ready(self, ready: bool) -> None:
        self._ready = ready
        self._change.set()
        self._change = asyncio.Event()

    async def wait_for_change(self) -> None:
        await self._change.wait()

    async def call(self, request: Request[A]) -> Response[A]:
        self.requests.append(request)
        if request.model in self.errors:
            raise self.errors[request.model]
        if request.model == "slow" and not isinstance(request.call, Describe):
            await self._forever()
        return Response(cast("A", _answer(request)), request.model, "1")

    def stream(self, request: Request[A]) -> ChunkStream[Response[A]]:
        return ChunkStream.of(self._responses(request))

    async def _responses(self, request: Request[A]) -> AsyncGenerator[Response[A], None]:
        self.requests.append(request)
        if request.model in self.errors:
            raise self.errors[request.model]
        try:
            for _ in range(self.chunk_count):
                self.sent_chunks += 1
                yield Response(cast("A", _answer(request)), request.model, "1")
            if request.model == "slow":
                await self._forever()
        finally:
            self.cancelled.set()

    async def _forever(self) -> None:
        self.started.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()


def _answer(request: Request[Any]) -> object:
    if request.model == "nope":
        raise ModelNotFound("Request for unknown model: 'nope' is not found")
    match request.call:
        case Infer(inputs=inputs) if request.model == "wide":  # small negative numbers take ten bytes each
            return Inference({name: structs.replace(t, data=-t.data) for name, t in inputs.items()})
        case Infer(inputs=inputs, parameters=parameters) if request.model == "headed":
            return Inference(inputs, metadata={str(parameters["name"]): str(parameters["value"])})
        case Infer(inputs=inputs):
            return Inference(inputs)
        case Live() | Ready():
            return True
        case DescribeServer():
            return ServerDescription("dragoman", "1.0", ("special",))
        case Describe():
            return ModelDescription(request.model, ("1", "2"), "python", SIGNATURE, streams=True)
        case Index():
            return (IndexEntry("a", "1", "READY", ""), IndexEntry("b", "", "UNAVAILABLE", "unloaded"))
    return None
