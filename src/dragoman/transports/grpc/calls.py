"""Routes HTTP/2 streams to gRPC calls and counts the calls."""

import asyncio
from collections.abc import Mapping, Sequence

from dragoman.engine.call_handler import CallHandler
from dragoman.protocols.wire import GrpcProtocol
from dragoman.transports.executor import MessageExecutor
from dragoman.transports.grpc import health
from dragoman.transports.grpc.admission import Admission
from dragoman.transports.grpc.call import GrpcCall
from dragoman.transports.grpc.call_headers import CallHeaders, parse_call_headers
from dragoman.transports.grpc.handlers import Handler, UnaryHandler, table_handlers
from dragoman.transports.grpc.health import Health
from dragoman.transports.grpc.reflection import make_reflection
from dragoman.transports.grpc.status import trailers_only
from dragoman.transports.grpc.streaming import StreamCall
from dragoman.transports.grpc.unary import UnaryCall
from dragoman.transports.http2.fields import encoded
from dragoman.transports.http2.request import Http2Headers
from dragoman.transports.http2.stream import Http2Handler, Http2Service, Http2Stream
from dragoman.transports.limits import Limits

_NOT_GRPC = encoded([(b":status", b"415"), (b"content-length", b"0")])


class GrpcCalls:
    """Answers the streams of any HTTP/2 connection that are calls; `others` answers those that are not."""

    def __init__(
        self,
        engine: CallHandler,
        protocols: Sequence[GrpcProtocol],
        limits: Limits,
        executor: MessageExecutor,
        others: Http2Service | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.limits = limits
        self.bodies = executor.bodies
        self.executor = executor
        self.others = others
        self.stopping: asyncio.Future[None] = self.loop.create_future()
        self.handlers: Mapping[str, Handler] = make_handlers(engine, protocols, self.stopping, executor)
        self._calls: set[GrpcCall] = set()
        self._admission = Admission(limits)
        self._idle: asyncio.Future[None] | None = None

    # --- streams -------------------------------------------------------------------------------------------------

    def open(self, stream: Http2Stream, head: Http2Headers, ended: bool) -> Http2Handler:
        """Begin a request."""
        if not head.note:
            head.note.append(parse_call_headers(head, self.handlers) if head.is_grpc else None)
        found: CallHeaders | None = head.note[0]
        if found is None:
            return self._other(stream, head, ended)
        error = found.error or self._admission.enter(stream.connection, found.health)
        if error is not None:
            stream.send_headers(trailers_only(error), ended=True)
            return IgnoredRequest()
        if isinstance(found.handler, UnaryHandler):
            call: GrpcCall = UnaryCall(self, stream, found)
        else:
            call = StreamCall(self, stream, found)
        if ended:
            call.receive(b"", 0, 0, True)
        return call

    def _other(self, stream: Http2Stream, head: Http2Headers, ended: bool) -> Http2Handler:
        if self.others is not None:
            return self.others.open(stream, head, ended)
        stream.send_headers(_NOT_GRPC, ended=True)
        return IgnoredRequest()

    # --- calls ---------------------------------------------------------------------------------------------------

    def enter(self, call: GrpcCall) -> None:
        self._calls.add(call)

    def leave(self, call: GrpcCall) -> None:
        self._calls.discard(call)
        self._admission.leave(call.connection, call.head.health)
        if self._idle is not None and not self._calls and not self._idle.done():
            self._idle.set_result(None)

    def begin_stop(self) -> None:
        """End streams after their current response; health becomes NOT_SERVING."""
        if not self.stopping.done():
            self.stopping.set_result(None)

    async def ended(self, within_s: float) -> None:
        """Wait for the work of calls whose clients have disconnected."""
        if self._calls:
            self._idle = self.loop.create_future()
            await asyncio.wait((self._idle,), timeout=within_s)
            self._idle = None


class IgnoredRequest:
    """Ignores the rest of a request that has been answered."""

    def receive(self, data: bytes | memoryview, at: int, stop: int, ended: bool) -> None: ...

    def buffer(self, size: int) -> memoryview | None: ...

    def buffer_filled(self, size: int, ended: bool) -> None: ...

    def drained(self) -> None: ...

    def check_timeout(self, now_s: float) -> None: ...

    def cancel(self) -> None: ...

    def closed(self, code: int) -> None: ...


def make_handlers(
    engine: CallHandler, protocols: Sequence[GrpcProtocol], stopping: asyncio.Future[None], executor: MessageExecutor
) -> dict[str, Handler]:
    """Return the handler of each path, `/service/method`.

    Once `stopping` is done, streams end and health is NOT_SERVING. `executor` parses and formats the messages
    of the protocols.
    """
    checks = Health(engine, [p.service for p in protocols], stopping)
    reflection = make_reflection(protocols, [(health.SERVICE, health.DESCRIPTOR)], stopping)
    tables = table_handlers(engine, protocols, stopping, executor)
    return {**tables, **checks.handlers(), **reflection.handlers()}
