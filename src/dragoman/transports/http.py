"""The HTTP server that the settings choose, around one application."""

import ssl
from collections.abc import Sequence
from typing import Literal, Protocol

from dragoman.engine.engine import Engine
from dragoman.protocols.wire import HttpProtocol
from dragoman.transports.application import Application
from dragoman.transports.limits import Limits

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
    kind: Kind = "uvicorn",
) -> HttpServer:
    """A server that does not listen yet."""
    application = Application(engine, protocols, limits)
    from dragoman.transports.asgi import UvicornServer

    return UvicornServer(application, tls=tls)
