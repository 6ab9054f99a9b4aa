"""The HTTP server that the settings choose, around one application."""

import ssl
from collections.abc import Sequence
from typing import Literal, Protocol

from dragoman.engine.engine import Engine
from dragoman.protocols.wire import HttpProtocol
from dragoman.transports.application import Application
from dragoman.transports.http1.connection import http1
from dragoman.transports.http1.incoming import Desk
from dragoman.transports.limits import Limits
from dragoman.transports.listener import Listener

Kind = Literal["own", "uvicorn"]


class HttpServer(Protocol):
    """What serves HTTP on some addresses."""

    async def start(self, addresses: Sequence[tuple[str, int]]) -> list[int]:
        """Listen; gives the bound ports. Raises OSError where an address cannot be bound."""

    async def stop(self, grace_s: float) -> None:
        """Accept nothing new and let requests under way finish, for at most `grace_s` seconds."""


def http_server(
    engine: Engine,
    protocols: Sequence[HttpProtocol],
    *,
    limits: Limits,
    tls: ssl.SSLContext | None = None,
    kind: Kind = "own",
) -> HttpServer:
    """A server that does not listen yet."""
    application = Application(engine, protocols, limits)
    if kind == "own":
        return OwnServer(application, tls)
    from dragoman.transports.asgi import UvicornServer

    return UvicornServer(application, tls=tls)


class OwnServer:
    """Our own connections, on one or more addresses."""

    def __init__(self, application: Application, tls: ssl.SSLContext | None) -> None:
        self._application = application
        self._tls = tls
        self._listener: Listener | None = None

    async def start(self, addresses: Sequence[tuple[str, int]]) -> list[int]:
        wire = http1(Desk(self._application))
        self._listener = Listener(wire, limits=self._application.limits, tls=self._tls)
        return await self._listener.start(addresses)

    async def stop(self, grace_s: float) -> None:
        if self._listener is not None:
            await self._listener.stop(grace_s)
