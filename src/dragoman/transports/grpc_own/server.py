"""A gRPC server on our own HTTP/2."""

import asyncio
import errno
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dragoman.protocols.wire import GrpcProtocol
from dragoman.transports.bodies import Bodies
from dragoman.transports.grpc_calls import Answers, Handler, Refusal, UnaryHandler
from dragoman.transports.grpc_own.call import Call
from dragoman.transports.grpc_own.head import CallHead, call_head, is_grpc
from dragoman.transports.grpc_own.status import trailers_only
from dragoman.transports.grpc_own.streaming import StreamCall
from dragoman.transports.grpc_own.unary import UnaryCall
from dragoman.transports.grpc_services import handlers
from dragoman.transports.http2 import frames
from dragoman.transports.http2.fields import encoded
from dragoman.transports.http2.protocol import READ_BYTES, Http2Protocol
from dragoman.transports.http2.request import Head
from dragoman.transports.http2.stream import Listener, Stream, Streams
from dragoman.transports.http2.terms import Terms
from dragoman.transports.limits import Limits

# Calls and streams at a time; further ones get RESOURCE_EXHAUSTED before their message is read.
_MAX_CALLS = 1000
# How long clients may take to hear of the end and to leave.
_PARTING_S = 1.0

_NOT_GRPC = encoded([(b":status", b"415"), (b"content-length", b"0")])
_BUSY = Refusal("RESOURCE_EXHAUSTED", f"there are {_MAX_CALLS} calls under way already")
_STOPPED = Refusal("UNAVAILABLE", "the server is shutting down")


class Calls:
    """Answers the streams of any HTTP/2 connection that are calls; `others` answers those that are not."""

    def __init__(self, engine: Answers, protocols: Sequence[GrpcProtocol], limits: Limits, bodies: Bodies) -> None:
        self.loop = asyncio.get_running_loop()
        self.limits = limits
        self.bodies = bodies
        self.others: Streams | None = None
        self.stopping: asyncio.Future[None] = self.loop.create_future()
        self.handlers: Mapping[str, Handler] = handlers(engine, protocols, self.stopping)
        self._calls: set[Call] = set()
        self._idle: asyncio.Future[None] | None = None

    # --- streams -------------------------------------------------------------------------------------------------

    def open(self, stream: Stream, head: Head, ended: bool) -> Listener:
        """A request begins."""
        if not head.note:
            head.note.append(call_head(head, self.handlers) if is_grpc(head) else None)
        found: CallHead | None = head.note[0]
        if found is None:
            return self._other(stream, head, ended)
        refused = found.refused or (_BUSY if len(self._calls) >= _MAX_CALLS else None)
        if refused is not None:
            stream.head(trailers_only(refused), ended=True)
            return Nobody()
        if isinstance(found.handler, UnaryHandler):
            call: Call = UnaryCall(self, stream, found)
        else:
            call = StreamCall(self, stream, found)
        if ended:
            call.receive(b"", 0, 0, True)
        return call

    def _other(self, stream: Stream, head: Head, ended: bool) -> Listener:
        if self.others is not None:
            return self.others.open(stream, head, ended)
        stream.head(_NOT_GRPC, ended=True)
        return Nobody()

    # --- calls ---------------------------------------------------------------------------------------------------

    def enter(self, call: Call) -> None:
        self._calls.add(call)

    def leave(self, call: Call) -> None:
        self._calls.discard(call)
        if self._idle is not None and not self._calls and not self._idle.done():
            self._idle.set_result(None)

    def begin_stop(self) -> None:
        """Streams end after the answer that they are at; health tells NOT_SERVING."""
        if not self.stopping.done():
            self.stopping.set_result(None)

    async def end(self, grace_s: float) -> None:
        """Wait for the calls under way; they are cancelled after `grace_s` seconds."""
        if not await self._emptied(grace_s):
            for call in list(self._calls):
                call.refuse(_STOPPED)
            await self._emptied(_PARTING_S)

    async def _emptied(self, within_s: float) -> bool:
        if self._calls:
            self._idle = self.loop.create_future()
            await asyncio.wait((self._idle,), timeout=within_s)
            self._idle = None
        return not self._calls


class Nobody:
    """Hears what is left of a request that has been answered."""

    def receive(self, data: bytes | memoryview, at: int, stop: int, ended: bool) -> None: ...

    def room(self, size: int) -> memoryview | None: ...

    def filled(self, size: int, ended: bool) -> None: ...

    def drained(self) -> None: ...

    def watch(self, now_s: float) -> None: ...

    def broken(self, code: int) -> None: ...


class OwnGrpcServer:
    """Serves protocol tables on one port."""

    def __init__(
        self,
        engine: Answers,
        protocols: Sequence[GrpcProtocol],
        *,
        limits: Limits,
        tls: ssl.SSLContext | None = None,
        bodies: Bodies | None = None,
    ) -> None:
        self._engine = engine
        self._protocols = tuple(protocols)
        self._limits = limits
        self._bodies = bodies or Bodies(limits.max_bodies_bytes)
        self._tls = tls
        self._calls: Calls | None = None
        self._server: asyncio.Server | None = None
        self._members: set[Http2Protocol] = set()

    def made(self) -> Calls:
        """What answers the calls."""
        return Calls(self._engine, self._protocols, self._limits, self._bodies)

    async def start(self, host: str, port: int) -> int:
        """Listens and returns the port, which the system chooses where 0 is asked for.

        Raises OSError where that cannot be, e.g. because another server has the port.
        """
        calls = self.made()
        terms = replace(Terms(), max_header_bytes=self._limits.max_header_bytes)
        buffer = memoryview(bytearray(READ_BYTES))

        def connection() -> Http2Protocol:
            return Http2Protocol(calls, terms, self._limits, buffer, self._members)

        if self._tls is not None:
            self._tls.set_alpn_protocols(["h2"])
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(connection, host, port, ssl=self._tls, backlog=2048)
        except OSError as fault:
            why = "; is the port taken, or the host another one's?" if fault.errno != errno.EACCES else ""
            raise OSError(f"cannot listen for gRPC on {host}:{port}{why}") from fault
        self._calls = calls
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def stop(self, grace_s: float) -> None:
        """Takes no more calls and waits for those in flight, which are cancelled after `grace_s` seconds.

        Streams end after the answer that they are at; health tells NOT_SERVING.
        """
        if self._server is None or self._calls is None:
            return
        server, self._server = self._server, None
        server.close()
        self._calls.begin_stop()
        end_s = time.monotonic() + grace_s
        for member in list(self._members):
            member.connection.drain()
        await self._calls.end(grace_s)
        for member in list(self._members):
            member.connection.fail(frames.NO_ERROR, "")
        await self._parted(min(_PARTING_S, max(0.1, end_s - time.monotonic())))

    async def _parted(self, within_s: float) -> None:
        """Wait for clients to read what they were sent; then they are cut off."""
        for cut_off in (False, True):
            gone = [member.gone for member in self._members]
            if cut_off:
                for member in list(self._members):
                    member.abort()
            if gone:
                await asyncio.wait(gone, timeout=within_s)
