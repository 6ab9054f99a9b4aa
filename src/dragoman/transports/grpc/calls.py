"""Route HTTP/2 streams to gRPC calls, count the calls, and limit them per server, client and connection."""

import asyncio
import ssl
import time
from collections.abc import Mapping, Sequence
from weakref import WeakValueDictionary

from msgspec.structs import replace

from dragoman.access.caller_engine import CallerEngine
from dragoman.access.certificates import CertificateId
from dragoman.access.control import AccessControl
from dragoman.core.errors import DragomanError
from dragoman.engine.call_handler import CallHandler
from dragoman.formats.grpc_status import CODES
from dragoman.formats.http2.fields import encode_fields, encode_request_id
from dragoman.protocols.wire import GrpcProtocol
from dragoman.system.request_context import Context, new_context, running_in_thread
from dragoman.transports.bodies import BodyMemory
from dragoman.transports.clients import TOO_MANY_CONNECTIONS
from dragoman.transports.executor import MessageExecutor
from dragoman.transports.grpc.call import GrpcCall
from dragoman.transports.grpc.call_headers import CallHeaders, parse_call_headers, trailers_only
from dragoman.transports.grpc.handlers import (
    GrpcError,
    Handler,
    UnaryHandler,
    retry_metadata,
    status_error,
    table_handlers,
)
from dragoman.transports.grpc.method_calls import StreamCall, UnaryCall
from dragoman.transports.grpc.services import Health, Reflection
from dragoman.transports.http2.limits import http2_limits
from dragoman.transports.http2.protocol import http2
from dragoman.transports.http2.request import Http2Headers
from dragoman.transports.http2.stream import Http2Handler, Http2Service, Http2Stream, StreamConnection
from dragoman.transports.limits import Limits
from dragoman.transports.listener import NONE_INHERITED, Inherited, Listener
from dragoman.transports.loop_delay import LOOP_LATE
from dragoman.transports.observation import Observation, RequestRecord

# Health checks at a time of one connection; no other limit holds for them, so that no other client can stop them.
MAX_HEALTH_CALLS = 16


class AddressCalls:
    """How many calls of one address are under way."""

    __slots__ = ("__weakref__", "calls")

    def __init__(self) -> None:
        self.calls = 0


class ConnectionCalls:
    """How many health checks of one connection are under way, and the calls of its address."""

    __slots__ = ("address", "health_checks")

    def __init__(self, address: AddressCalls) -> None:
        self.address = address
        self.health_checks = 0


_LOOP_LATE = GrpcError("UNAVAILABLE", LOOP_LATE.message, retry_metadata(1.0))
_NOT_GRPC = encode_fields([(b":status", b"415"), (b"content-length", b"0")])


class GrpcCalls:
    """Answers the streams of any HTTP/2 connection that are calls; `others` answers those that are not."""

    def __init__(
        self,
        engine: CallHandler,
        protocols: Sequence[GrpcProtocol],
        limits: Limits,
        executor: MessageExecutor,
        others: Http2Service | None = None,
        access: AccessControl | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.limits = limits
        self.bodies = executor.bodies
        self.executor = executor
        self.others = others
        self.running = running_in_thread()
        self.stopping: asyncio.Future[None] = self.loop.create_future()
        self._engine: CallHandler = engine
        self._observation: Observation | None = executor.observation
        self._protocols = protocols
        self._access = access
        self.handlers: Mapping[str, Handler] = make_handlers(engine, protocols, self.stopping, executor)
        for path, handler in self.handlers.items():  # exported before the first call
            protocol = handler.protocol or path.split("/")[1]
            executor.counters.statuses(protocol, CODES, is_health=handler.health)
        self._calls: set[GrpcCall] = set()
        self._running_calls = 0  # without health checks
        # An address is forgotten with the last connection from there.
        self._addresses: WeakValueDictionary[str, AddressCalls] = WeakValueDictionary()
        self._idle: asyncio.Future[None] | None = None

    # --- streams -------------------------------------------------------------------------------------------------

    def open(self, stream: Http2Stream, headers: Http2Headers, ended: bool) -> Http2Handler:
        """Begin a request."""
        if not headers.note:
            note = parse_call_headers(headers, self.handlers, self.executor.counters) if headers.is_grpc else None
            headers.note.append(note)
        call_headers: CallHeaders | None = headers.note[0]
        if call_headers is None:
            if self.others is not None:
                return self.others.open(stream, headers, ended)
            stream.send_headers(_NOT_GRPC, ended=True)
            return IgnoredRequest()
        error, handler, access = call_headers.error, call_headers.handler, self._access
        if error is None and handler is not None and not handler.health:
            # The rules for web pages do not hold: browsers cannot send a call.
            if access is not None and (handler.role == "admin" or handler.role not in access.open_roles):
                try:
                    call_headers = self._authorize_again(access, call_headers, headers, stream.connection)
                except GrpcError as denied:
                    error = denied
            if error is None and handler.role == "infer" and self.executor.loop_delay.rejects():
                error = _LOOP_LATE
        error = error or self._admit(stream.connection, health=call_headers.health)
        if error is not None:
            return self._reject(stream, call_headers, error, headers)
        context, record, timeout_s = new_context(call_headers.request_id), None, call_headers.timeout_s
        if self._observation is not None:
            record = self._observe(self._observation, call_headers, context, headers, stream.connection)
            context = context if record is None else record.context
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        call_class = UnaryCall if isinstance(call_headers.handler, UnaryHandler) else StreamCall
        call: GrpcCall = call_class(
            self, stream, stream.connection, call_headers, record, context, deadline_s, self.loop.time()
        )
        self._calls.add(call)
        if ended:
            call.receive(b"", 0, 0, True)
        return call

    def _observe(
        self,
        observation: Observation,
        headers: CallHeaders,
        context: Context,
        fields: Http2Headers,
        connection: StreamConnection,
    ) -> RequestRecord | None:
        if observation.ignores(headers.metadata):
            return None
        record = observation.begin(
            context, headers.protocol, "POST", headers.path, headers.metadata, client=connection.host,
            key=headers.caller.name, http_version="2", host=fields.authority, is_health=headers.health,
        )  # fmt: skip
        if record is not None:
            record.is_grpc = True
        return record

    def _authorize_again(
        self, access: AccessControl, call: CallHeaders, headers: Http2Headers, connection: StreamConnection
    ) -> CallHeaders:
        """Return the headers with the handler for this caller, from the last call with these headers if that holds.

        Raises GrpcError.
        """
        note = headers.note
        if len(note) > 1 and access.is_current(note[1], note[2]):
            authorized: CallHeaders = note[3]
            return authorized
        version = access.version
        authorized, expires_s = self._authorize(access, call, headers, connection)
        note[1:] = version, expires_s, authorized
        return authorized

    def _authorize(
        self, access: AccessControl, call: CallHeaders, headers: Http2Headers, connection: StreamConnection
    ) -> tuple[CallHeaders, float]:
        """Return the headers with the handler for this caller, and until when they hold. Raises GrpcError."""
        assert call.handler is not None, "an unknown method is an error"
        try:
            # The authority is not metadata; over HTTP it is the field Host.
            fields = {**call.metadata, "host": headers.authority}
            of_client = (lambda: connection.host), headers.path, (lambda: connection.certificate)
            grant = access.authorize(call.handler.role, fields, *of_client)
        except DragomanError as error:
            raise status_error(self._protocols[0], error) from error
        if grant.is_anonymous and call.handler.role != "admin":
            return call, grant.expires_s
        counts, handler = self.executor.counters.key_calls.of(grant.name), call.handler
        engine = CallerEngine(self._engine, grant, connection.host, access.refusals, counts)
        if handler.with_engine is not None:
            handler = handler.with_engine(engine)
        return replace(call, handler=handler, caller=engine.caller), grant.expires_s

    def _reject(
        self, stream: Http2Stream, headers: CallHeaders, error: GrpcError, fields: Http2Headers
    ) -> Http2Handler:
        headers.statuses[error.status] += 1
        context = new_context(headers.request_id)
        if self._observation is not None:
            record = self._observe(self._observation, headers, context, fields, stream.connection)
            if record is not None:
                record.is_rejected = True
                self._observation.end(record, error.status, 0)
        request_id = encode_request_id(context)
        stream.send_headers(trailers_only(error) + request_id, ended=True)
        return IgnoredRequest()

    # --- calls ---------------------------------------------------------------------------------------------------

    def _admit(self, connection: StreamConnection, *, health: bool) -> GrpcError | None:
        """Count a further call of this connection; return the error if it is rejected."""
        limits, of = self.limits, connection.calls
        if of is None:
            of = connection.calls = ConnectionCalls(self._addresses.setdefault(connection.address, AddressCalls()))
        if health:
            if of.health_checks >= MAX_HEALTH_CALLS:
                return self._too_many(f"this connection has {MAX_HEALTH_CALLS} health checks under way already")
            of.health_checks += 1
            return None
        if connection.reserved:
            return self._too_many(TOO_MANY_CONNECTIONS.message, "UNAVAILABLE")
        if self._running_calls >= limits.max_grpc_calls:
            return self._too_many(f"the server has {limits.max_grpc_calls} calls under way already (max_grpc_calls)")
        address, most = of.address, limits.max_grpc_calls_per_address
        if most and address.calls >= most:
            return self._too_many(f"this address has {most} calls under way already (max_grpc_calls_per_address)")
        self._running_calls += 1
        address.calls += 1
        return None

    def _too_many(self, message: str, status: str = "RESOURCE_EXHAUSTED") -> GrpcError:
        self.executor.counters.rejected["grpc_calls"] += 1
        return GrpcError(status, message)

    def leave(self, call: GrpcCall) -> None:
        """The work of a call has ended; it counts until then, also if its client has left before."""
        self._calls.discard(call)
        of: ConnectionCalls = call.connection.calls
        if call.headers.health:
            of.health_checks -= 1
        else:
            self._running_calls -= 1
            of.address.calls -= 1
        if self._idle is not None and not self._calls and not self._idle.done():
            self._idle.set_result(None)

    def begin_stop(self) -> None:
        """End streams after their current response; health becomes NOT_SERVING."""
        if not self.stopping.done():
            self.stopping.set_result(None)

    async def wait_until_idle(self, within_s: float) -> None:
        """Wait for the work of calls whose clients have disconnected."""
        if self._calls:
            self._idle = self.loop.create_future()
            await asyncio.wait((self._idle,), timeout=within_s)
            self._idle = None


class IgnoredRequest:
    """Ignores the rest of a request that has been answered."""

    def receive(self, data: bytes | memoryview, at: int, stop: int, ended: bool) -> None: ...

    def buffer(self, size: int) -> memoryview | None: ...

    def on_buffer_filled(self, size: int, ended: bool) -> None: ...

    def on_drained(self) -> None: ...

    def check_timeout(self, now_s: float) -> None: ...

    def cancel(self) -> None: ...

    def on_closed(self, code: int) -> None: ...


def make_handlers(
    engine: CallHandler, protocols: Sequence[GrpcProtocol], stopping: asyncio.Future[None], executor: MessageExecutor
) -> dict[str, Handler]:
    """Return the handler of each path, `/service/method`.

    Once `stopping` is done, streams end and health is NOT_SERVING. `executor` parses and formats the messages
    of the protocols.
    """
    checks = Health(engine, [service for p in protocols for service in p.services], stopping)
    tables = table_handlers(engine, protocols, stopping, executor)
    return {**tables, **checks.handlers(), **Reflection(protocols, stopping).handlers()}


# Time for cancelled work to end.
_CANCEL_S = 1.0


class GrpcServer:
    """Serves the gRPC services of protocols on one port."""

    def __init__(
        self,
        engine: CallHandler,
        protocols: Sequence[GrpcProtocol],
        *,
        limits: Limits,
        tls: ssl.SSLContext | None = None,
        executor: MessageExecutor | None = None,
        access: AccessControl | None = None,
    ) -> None:
        self._engine = engine
        self._protocols = tuple(protocols)
        self._limits = limits
        self._executor = executor or MessageExecutor(BodyMemory(limits.max_bodies_bytes), limits.max_loop_delay_s)
        self._tls = tls
        self._access = access
        self._calls: GrpcCalls | None = None
        self._listener: Listener | None = None

    def make_calls(self) -> GrpcCalls:
        return GrpcCalls(self._engine, self._protocols, self._limits, self._executor, access=self._access)

    async def start(self, host: str, port: int, *, shared: bool = False, inherited: Inherited = NONE_INHERITED) -> int:
        """Listen and return the port, which the system chooses for port 0. Raises OSError if it cannot be bound."""
        calls = self.make_calls()
        wire = http2(calls, http2_limits(self._limits), self._executor)
        listener = Listener(wire, limits=self._limits, tls=self._tls, counters=self._executor.counters)
        if self._tls is not None:
            self._tls.set_alpn_protocols(["h2"])
        (bound,) = await listener.start([(host, port)], shared=shared, inherited=inherited)
        self._calls, self._listener = calls, listener
        return bound

    def abort_revoked(self, revoked: frozenset[CertificateId]) -> None:
        """Close the connections of clients whose certificates have been revoked."""
        if self._listener is not None:
            self._listener.abort_revoked(revoked)

    async def begin_accepting(self) -> None:
        """See `Listener`."""
        if self._listener is not None:
            await self._listener.begin_accepting()

    def begin_drain(self) -> None:
        """Send GOAWAY to the clients; new connections get one too."""
        if self._listener is not None:
            self._listener.begin_drain()

    async def stop(self, grace_s: float) -> None:
        """Accept no more calls and wait for those in flight, which are cancelled after `grace_s` seconds.

        Streams end after their current response; health becomes NOT_SERVING.
        """
        if self._listener is None or self._calls is None:
            return
        listener, self._listener = self._listener, None
        self._calls.begin_stop()
        await listener.stop(grace_s)
        await self._calls.wait_until_idle(_CANCEL_S)
