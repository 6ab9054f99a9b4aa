"""Parse and format messages without keeping the event loop from other clients."""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any, TypeVar

from dragoman.core.calls import Inference
from dragoman.core.datatypes import BYTES
from dragoman.core.metrics import Family
from dragoman.core.tensor import Tensor
from dragoman.protocols.wire import HttpRequest
from dragoman.transports.bodies import BodyMemory
from dragoman.transports.counters import TransportCounters
from dragoman.transports.loop_budget import LARGE_MESSAGE, LoopBudget

A = TypeVar("A")
B = TypeVar("B")

# Messages with more bytes of tensors than this are parsed and formatted in a thread.
LARGE = 1 << 20
# The same for text that has to be parsed: a list of JSON objects of this size takes up to 40 ms.
LARGE_TEXT = 1 << 18
# Only one thread of Python runs at a time; more of them would leave less time to the event loop.
_THREADS = 2
# Formatting an element of BYTES takes as long as this many bytes of numbers.
_BYTES_ELEMENT_SIZE = 64


class MessageExecutor:
    """Parses and formats messages: small ones at once, large ones within `budget`, very large ones in threads.

    The transports of a server share it, with the memory of bodies and the counters.
    """

    def __init__(self, bodies: BodyMemory) -> None:
        self.bodies = bodies
        self.counters = TransportCounters()
        self.budget = LoopBudget()
        self._threads = ThreadPoolExecutor(_THREADS, "dragoman-messages")

    def metrics(self) -> Iterable[Family]:
        """Return the metrics of the transports."""
        self.counters.rejected["bodies_memory"] = self.bodies.rejected
        return self.counters.families()

    async def parse(self, function: Callable[[A], B], argument: A, size: int, *, in_thread: bool) -> B:
        """Return `function(argument)`, which parses `size` bytes."""
        if in_thread:
            return await self.run_in_thread(function, argument)
        return function(argument) if size <= LARGE_MESSAGE else await self.budget.call(function, argument)

    async def format(self, function: Callable[[A], B], response: A, size: int = -1) -> B:
        """Return `function(response)`, which formats about `size` bytes; by default those of the response's tensors.

        Very large ones count among the bodies meanwhile. Raises Overloaded if these are at their limit.
        """
        size = weight(getattr(response, "answer", None)) if size < 0 else size
        if size <= LARGE_MESSAGE:
            return function(response)
        if size <= LARGE:
            return await self.budget.call(function, response)
        if self.bodies.is_over_limit:
            raise self.bodies.unread_error
        self.bodies.count_unread(size)
        try:
            return await self.run_in_thread(function, response)
        finally:
            self.bodies.count_unread(-size)

    async def run_in_thread(self, function: Callable[[A], B], argument: A) -> B:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, argument)


def is_large(request: HttpRequest) -> bool:
    """Return whether a request is to be parsed in a thread."""
    size = len(request.body)
    return size > LARGE_TEXT and (size > LARGE or request.text_size > LARGE_TEXT)


def weight(answer: Any) -> int:
    """Return about how many bytes of tensors there are to format."""
    if isinstance(answer, Inference):
        total = 0
        for tensor in answer.outputs.values():
            total += prod(tensor.shape) * _BYTES_ELEMENT_SIZE if tensor.datatype is BYTES else tensor.data.nbytes
        return total
    return answer.data.nbytes if isinstance(answer, Tensor) else 0
