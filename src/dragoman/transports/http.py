"""The HTTP server that the settings choose, around one application."""

import ssl
from collections.abc import Sequence
from typing import Literal, Protocol

from dragoman.engine.answers import AnswersNow
from dragoman.protocols.wire import GrpcProtocol, HttpProtocol
from dragoman.transports.application import Application
from dragoman.transports.grpc_own.calls import Calls
from dragoman.transports.http1.connection import http1
from dragoman.transports.http1.incoming import Desk
from dragoman.transports.http2.protocol import http2
from dragoman.transports.http2.requests import Requests
from dragoman.transports.http2.terms import terms
from dragoman.transports.limits import Limits
from dragoman.transports.listener import Listener

Kind = Literal["own", "uvicorn"]


class HttpServer(Protocol):
    """What serves HTTP on some addresses."""

    async def start(self, addresses: Sequence[tuple[str, int]], *, shared: bool = False) -> list[int]:
        """Listen; gives the bound ports. Raises OSError where an address cannot be bound."""

    def begin_drain(self) -> None:
        """Close idle connections, and every other one after its next answer; new ones are still accepted."""

    async def stop(self, grace_s: float) -> None:
        """Accept nothing new and let requests under way finish, for at most `grace_s` seconds."""


def http_server(
    engine: AnswersNow,
    protocols: Sequence[HttpProtocol],
    *,
    limits: Limits,
    tls: ssl.SSLContext | None = None,
    kind: Kind = "own",
    grpc: Sequence[GrpcProtocol] = (),
) -> HttpServer:
    """A server that does not listen yet. Our own serves the tables of `grpc` on the same ports."""
    application = Application(engine, protocols, limits)
    if kind == "own":
        return OwnServer(engine, application, tls, grpc)
    from dragoman.transports.asgi import UvicornServer

    return UvicornServer(application, tls=tls)


class OwnServer:
    """Our own connections, on one or more addresses: HTTP/1.1, HTTP/2 and, where there are tables for it, gRPC."""

    def __init__(
        self, engine: AnswersNow, application: Application, tls: ssl.SSLContext | None, grpc: Sequence[GrpcProtocol]
    ) -> None:
        self._engine = engine
        self._application = application
        self._tls = tls
        self._grpc = grpc
        self._calls: Calls | None = None
        self._listener: Listener | None = None

    async def start(self, addresses: Sequence[tuple[str, int]], *, shared: bool = False) -> list[int]:
        application, limits = self._application, self._application.limits
        streams: Requests | Calls = Requests(application)
        if self._grpc:
            streams = self._calls = Calls(self._engine, self._grpc, limits, application.bodies, streams)
        wires = http1(Desk(application)), http2(streams, terms(limits), application.bodies)
        self._listener = Listener(*wires, limits=limits, tls=self._tls)
        return await self._listener.start(addresses, shared=shared)

    def begin_drain(self) -> None:
        if self._listener is not None:
            self._listener.begin_drain()

    async def stop(self, grace_s: float) -> None:
        if self._listener is None:
            return
        if self._calls is not None:
            self._calls.begin_stop()
        await self._listener.stop(grace_s)
        if self._calls is not None:
            await self._calls.ended(grace_s)
