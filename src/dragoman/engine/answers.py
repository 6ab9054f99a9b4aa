"""What transports need of an engine, wherever it is."""

from collections.abc import AsyncGenerator
from typing import Protocol, TypeVar

from dragoman.core.calls import Request, Response

A = TypeVar("A")


class Answers(Protocol):
    """Answers calls; raises the errors of `dragoman.core.errors`."""

    def now(self, request: Request[A]) -> Response[A] | None:
        """The one answer where it is there without anybody waiting; None where `call` is to be awaited."""

    async def call(self, request: Request[A]) -> Response[A]:
        """The one answer. Cancelling it cancels the call."""

    def stream(self, request: Request[A]) -> AsyncGenerator[Response[A], None]:
        """The answers as they come; closing the generator cancels the call."""

    def ready(self) -> bool:
        """Whether every model is ready to answer."""

    async def changed(self) -> None:
        """Returns when that may have changed."""


class AnswersNow(Answers, Protocol):
    """Answers some calls without anybody waiting."""

    def now(self, request: Request[A]) -> Response[A] | None:
        """The answer of `call` where it is there at once, else None. Raises as `call`."""
