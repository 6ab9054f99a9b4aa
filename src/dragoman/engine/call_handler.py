"""The engine as transports use it: in this process, or behind a socket."""

from collections.abc import Awaitable
from typing import Protocol, TypeVar

from dragoman.core.calls import Request, Response
from dragoman.core.chunks import ChunkStream

A = TypeVar("A")


class CallHandler(Protocol):
    """Answers calls. Raises the errors of `dragoman.core.errors`.

    is_remote: whether another process does, which counts the calls of restricted keys for all processes.
    """

    is_remote: bool

    def begin(self, request: Request[A]) -> Response[A] | Awaitable[Response[A]]:
        """Start a call: return its response, or an awaitable of it if something has to wait."""

    async def call(self, request: Request[A]) -> Response[A]:
        """Return the one response. Cancelling it cancels the call."""

    def stream(self, request: Request[A]) -> ChunkStream[Response[A]]:
        """Return the responses as they come. Cancelling the task that reads them cancels the call."""

    def ready(self) -> bool:
        """Return True if every model is ready."""

    async def wait_for_change(self) -> None:
        """Return when `ready` may have changed."""
