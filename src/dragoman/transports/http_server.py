"""The server of HTTP/1.1, HTTP/2 and gRPC on shared ports."""

import ssl
from collections.abc import Sequence

from dragoman.access.certificates import CertificateId
from dragoman.protocols.wire import GrpcProtocol
from dragoman.transports.application import Application
from dragoman.transports.grpc.calls import GrpcCalls
from dragoman.transports.http1.connection import http1
from dragoman.transports.http1.request_reader import Http1Context
from dragoman.transports.http2.limits import http2_limits
from dragoman.transports.http2.protocol import http2
from dragoman.transports.http2.requests import Http2Requests
from dragoman.transports.listener import NONE_INHERITED, Inherited, Listener


class HttpServer:
    """Serves HTTP/1.1 and HTTP/2 on one or more addresses, and on the same ports the gRPC services of `grpc`."""

    def __init__(
        self, application: Application, grpc: Sequence[GrpcProtocol] = (), *, tls: ssl.SSLContext | None = None
    ) -> None:
        self._application = application
        self._tls = tls
        self._grpc = grpc
        self._calls: GrpcCalls | None = None
        self._listener: Listener | None = None

    async def start(
        self, addresses: Sequence[tuple[str, int]], *, shared: bool = False, inherited: Inherited = NONE_INHERITED
    ) -> list[int]:
        """Listen and return the bound ports. Raises OSError if an address cannot be bound."""
        application, limits = self._application, self._application.limits
        streams: Http2Requests | GrpcCalls = Http2Requests(application)
        if self._grpc:
            streams = self._calls = GrpcCalls(
                application.engine, self._grpc, limits, application.executor, streams, application.access
            )
        wires = http1(Http1Context(application)), http2(streams, http2_limits(limits), application.executor)
        self._listener = Listener(*wires, limits=limits, tls=self._tls, counters=application.counters)
        return await self._listener.start(addresses, shared=shared, inherited=inherited)

    def abort_revoked(self, revoked: frozenset[CertificateId]) -> None:
        """Close the connections of clients whose certificates have been revoked."""
        if self._listener is not None:
            self._listener.abort_revoked(revoked)

    async def begin_accepting(self) -> None:
        """See `Listener`."""
        if self._listener is not None:
            await self._listener.begin_accepting()

    def begin_leave(self) -> None:
        """Announce with each response over HTTP/1.1 that its connection closes."""
        if self._listener is not None:
            self._listener.begin_leave()

    def begin_drain(self) -> None:
        """Close idle connections, and every other one after its next response; new ones are still accepted."""
        if self._listener is not None:
            self._listener.begin_drain()

    async def stop(self, grace_s: float) -> None:
        """Accept no new connection and let requests in flight finish, for at most `grace_s` seconds."""
        if self._listener is None:
            return
        if self._calls is not None:
            self._calls.begin_stop()
        await self._listener.stop(grace_s)
        if self._calls is not None:
            await self._calls.wait_until_idle(grace_s)
