"""An exchange over gRPC whose answer is one message."""

from collections.abc import Callable
from typing import Any, TypeVar

from dragoman.core.calls import Request, Response
from dragoman.protocols.wire import EngineCall

A = TypeVar("A")


def exchange(request: Request[A], written: Callable[[A], Any]) -> EngineCall[A, bytes]:
    """An exchange whose answer is written as a message."""

    def reply(response: Response[A]) -> bytes:
        return bytes(written(response.answer).SerializeToString())

    return EngineCall(request, reply)
