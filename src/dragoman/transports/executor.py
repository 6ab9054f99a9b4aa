"""Parses and formats large messages in threads, so that other clients are served meanwhile."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any, TypeVar

from dragoman.core.calls import Inference
from dragoman.core.datatypes import BYTES
from dragoman.core.tensor import Tensor
from dragoman.protocols.wire import HttpRequest
from dragoman.transports.bodies import Bodies

A = TypeVar("A")
B = TypeVar("B")

# Bytes of tensors from which on a message takes longer to read or write than to hand to a thread and back.
LARGE = 1 << 20
# The same for text that has to be parsed: lists of JSON objects take up to 40 ms on the event loop.
LARGE_TEXT = 1 << 18
# Python runs one of its threads at a time; more of them would only leave less to the event loop.
_THREADS = 2
# An element of BYTES takes as long as this many bytes of numbers.
_ELEMENT = 64


class MessageExecutor:
    """Runs pure functions, where what they are given is large in a thread."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._threads = ThreadPoolExecutor(_THREADS, "dragoman-aside")

    async def run(self, function: Callable[[A], B], given: A) -> B:
        """`function(given)` in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, given)

    async def write(self, function: Callable[[A], B], answer: A, size: int = -1) -> B:
        """`function(response)`, in a thread where the response's answer is large; it counts among the bodies there.

        Raises Overloaded where those take too much already.
        """
        size = weight(getattr(answer, "answer", None)) if size < 0 else size
        if size <= LARGE:
            return function(answer)
        if self._bodies.over:
            raise self._bodies.unread
        self._bodies.keep(size)
        try:
            return await self.run(function, answer)
        finally:
            self._bodies.keep(-size)


def is_large(request: HttpRequest) -> bool:
    """Whether a request is to be parsed in a thread."""
    size = len(request.body)
    return size > LARGE_TEXT and (size > LARGE or request.text_size > LARGE_TEXT)


def weight(answer: Any) -> int:
    """About how many bytes of work it is to write an answer."""
    if isinstance(answer, Inference):
        total = 0
        for tensor in answer.outputs.values():
            total += prod(tensor.shape) * _ELEMENT if tensor.datatype is BYTES else tensor.data.nbytes
        return total
    return answer.data.nbytes if isinstance(answer, Tensor) else 0
