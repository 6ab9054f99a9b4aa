"""Reading and writing of large messages in threads, so that other clients are served meanwhile."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any, TypeVar

from dragoman.core.calls import Inference
from dragoman.core.datatypes import BYTES
from dragoman.core.tensor import Tensor

A = TypeVar("A")
B = TypeVar("B")

# Bytes from which on a message takes longer to read or write than to hand to a thread and back.
LARGE = 1 << 20
# Python runs one of its threads at a time; more of them would only leave less to the event loop.
_THREADS = 2
# An element of BYTES takes as long as this many bytes of numbers.
_ELEMENT = 64


class Aside:
    """Runs pure functions, where what they are given is large in a thread."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "dragoman-aside")

    async def read(self, function: Callable[[A], B], given: A, size: int) -> B:
        """`function(given)`, where `size` tells how many bytes it is about."""
        if size <= LARGE:
            return function(given)
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, given)

    async def write(self, function: Callable[[A], B], answer: A) -> B:
        """`function(response)`, in a thread where the response's answer is large."""
        return await self.read(function, answer, weight(getattr(answer, "answer", None)))


def weight(answer: Any) -> int:
    """About how many bytes of work it is to write an answer."""
    if isinstance(answer, Inference):
        total = 0
        for tensor in answer.outputs.values():
            total += prod(tensor.shape) * _ELEMENT if tensor.datatype is BYTES else tensor.data.nbytes
        return total
    return answer.data.nbytes if isinstance(answer, Tensor) else 0
