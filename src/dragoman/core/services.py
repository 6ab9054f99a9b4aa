"""The hook for services: features with state of their own that work beside the engine, such as batches.

An entry point of the group `dragoman.services` is a function of a `ServiceContext` that returns a `Service`. Protocols
of the feature send it `ServiceCall`s through the engine, so they work as every other call does.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from dragoman.core.callers import Caller
from dragoman.core.calls import Request, ServerCall
from dragoman.core.jobs import Jobs
from dragoman.core.metrics import Family
from dragoman.core.state_store import StateStore

A = TypeVar("A")


class ServiceCall(ServerCall[A]):
    """Base of the calls to a service. service: its name, that of its entry point.

    runs_later: it begins work that goes on in the name of its caller.
    """

    __slots__ = ()
    service: ClassVar[str]
    runs_later: ClassVar[bool] = False


class WireResponse(NamedTuple):
    """A whole response over HTTP, as a client would get it. Names of headers are lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Sender(Protocol):
    """Sends requests over HTTP to the server itself, in the name of a key, through the path of every other request."""

    def route(self, path: str) -> str:
        """Return the role that POST to a path needs; "" if there is no such path."""

    async def send(
        self, path: str, body: bytes, caller: Caller, models: frozenset[str] | None, request_id: str
    ) -> WireResponse:
        """POST a JSON body and return the response. Raises Forbidden if the key does not exist any more.

        models: the only models that the caller may use if it has no key of its own, but a JSON Web Token.
        """

    def is_busy(self) -> bool:
        """Return whether calls of others are queued or running."""


class ServiceContext(NamedTuple):
    """What a service works with.

    settings: the `Settings` of the server. folder: for its files, which exists; of files that outlive the server if
    the state does. jobs: of all services.
    """

    settings: Any
    store: StateStore
    jobs: Jobs
    folder: Path
    sender: Sender


class Service(Protocol):
    """A service, used on the engine's event loop."""

    async def start(self) -> None:
        """Begin to work. The models may still be loading."""

    def answer(self, request: Request[Any]) -> Awaitable[Any]:
        """Return the answer to a call of `request.caller`, who may use `request.models` only (None: all)."""

    def families(self) -> Iterable[Family]: ...

    async def close(self) -> None:
        """Stop at once. Work that is not finished goes on when the server starts again, if it has a state store."""


MakeService = Callable[[ServiceContext], Service]
