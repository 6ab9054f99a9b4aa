"""A gRPC server on `grpc.aio`."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import grpc

from dragoman.engine.answers import Answers
from dragoman.protocols.wire import GrpcAnswer, GrpcProtocol, GrpcRequest
from dragoman.transports.grpc_calls import Handler, Refusal, Reply, StreamHandler, UnaryHandler, whole
from dragoman.transports.grpc_services import handlers
from dragoman.transports.limits import Limits

log = logging.getLogger("dragoman.grpc")

Tls = tuple[bytes, bytes, bytes | None]


class GrpcServer:
    """Serves protocol tables on one port.

    `tls` is the key, the certificate chain and, where clients have to show certificates, the authority that
    signs them, each as PEM.
    """

    def __init__(
        self, engine: Answers, protocols: Sequence[GrpcProtocol], *, limits: Limits, tls: Tls | None = None
    ) -> None:
        self._engine = engine
        self._protocols = tuple(protocols)
        self._options = _options(limits)
        self._max_calls = limits.max_grpc_calls
        self._tls = tls
        self._server: Any = None
        self._stopping: asyncio.Future[None] | None = None

    async def start(self, host: str, port: int, *, shared: bool = False) -> int:
        """Listens and returns the port, which the system chooses where 0 is asked for.

        Raises OSError where that cannot be, e.g. because another server has the port.
        """
        stopping = asyncio.get_running_loop().create_future()
        options = (*self._options, ("grpc.so_reuseport", int(shared)))  # else a busy port is an error
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=self._max_calls)
        server.add_generic_rpc_handlers([self._handlers(stopping)])
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        bound = _bind(server, address, self._tls)
        await server.start()
        self._server, self._stopping = server, stopping
        return bound

    def begin_drain(self) -> None:
        """Nothing: grpcio closes connections when it stops, not before."""

    async def stop(self, grace_s: float) -> None:
        """Takes no more calls and waits for those in flight, which are cancelled after `grace_s` seconds.

        Streams end after the answer that they are at; health tells NOT_SERVING.
        """
        if self._server is None or self._stopping is None:
            return
        if not self._stopping.done():
            self._stopping.set_result(None)
        await self._server.stop(grace_s)

    def _handlers(self, stopping: asyncio.Future[None]) -> Any:
        found = {path: _method(handler) for path, handler in handlers(self._engine, self._protocols, stopping).items()}
        return _Paths(found)


class _Paths(grpc.GenericRpcHandler):  # type: ignore[misc]
    """The methods by their paths."""

    def __init__(self, methods: Mapping[str, Any]) -> None:
        self._methods = methods

    def service(self, details: Any) -> Any:
        return self._methods.get(details.method)


def _options(limits: Limits) -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.max_receive_message_length", limits.max_body_bytes),
        ("grpc.max_concurrent_streams", limits.max_streams),
        ("grpc.max_send_message_length", -1),
        # Clients may ask every ten seconds whether the connection lives, also between calls.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    )


def _bind(server: Any, address: str, tls: Tls | None) -> int:
    try:
        if tls is not None:
            return int(server.add_secure_port(address, _credentials(tls)))
        return int(server.add_insecure_port(address))
    except RuntimeError as fault:
        raise OSError(f"cannot listen for gRPC on {address}; is the port taken, or the host another one's?") from fault


def _credentials(tls: Tls) -> Any:
    key, certificate, client_ca = tls
    return grpc.ssl_server_credentials(
        [(key, certificate)], root_certificates=client_ca, require_client_auth=client_ca is not None
    )


class _Peer:
    """The client of a call with streams."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.metadata = _metadata(context)
        self.deadline_s = _deadline_s(context)

    async def read(self) -> Any:
        message = await self._context.read()
        return None if message is grpc.aio.EOF else message

    async def write(self, message: Reply) -> None:
        try:
            await self._context.write(whole(message))
        except Exception as fault:  # what is written are bytes of ours, so it can only be that nobody is there
            log.debug("a client left its stream: %s", fault)
            raise asyncio.CancelledError from None


def _method(handler: Handler) -> Any:
    # `abort` raises, so it stands outside of what is caught; a client that leaves cancels these coroutines.
    async def unary(body: bytes, context: Any) -> bytes:
        assert isinstance(handler, UnaryHandler)
        request = GrpcRequest(body, _metadata(context), _deadline_s(context))
        try:
            reply = await handler.answer(request)
            if isinstance(reply, GrpcAnswer):
                context.set_trailing_metadata(reply.metadata)
                reply = reply.message
            return whole(reply)
        except Refusal as fault:
            refused = fault
        return await _abort(context, refused)

    async def stream(_: object, context: Any) -> None:
        assert isinstance(handler, StreamHandler)
        try:
            await handler.talk(_Peer(context))
            return
        except Refusal as fault:
            refused = fault
        await _abort(context, refused)

    if isinstance(handler, UnaryHandler):
        return grpc.unary_unary_rpc_method_handler(unary)
    return grpc.stream_stream_rpc_method_handler(stream)


def _metadata(context: Any) -> dict[str, str]:
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


def _deadline_s(context: Any) -> float | None:
    left_s = context.time_remaining()
    return None if left_s is None else time.monotonic() + left_s


async def _abort(context: Any, fault: Refusal) -> NoReturn:
    await context.abort(grpc.StatusCode[fault.status], fault.message, fault.metadata)
    raise AssertionError("abort raises")
