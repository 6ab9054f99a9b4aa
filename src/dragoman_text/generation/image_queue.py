"""Queue of calls with images: one is processed at a time, and the memory of all of them is limited."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from dragoman.core.errors import Overloaded
from dragoman.core.text import Chat, Prompt
from dragoman.system.threads import DaemonThreads, run_stoppable

A = TypeVar("A")
DEFAULT_MIB = 1024


class ImageQueue:
    """Processes images in a thread of its own, one call after the other: waiting for it takes no thread of other work.

    max_bytes: limit of the images of all calls together, of their files and of what the model reads; a call alone is
    accepted whatever its size.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._turn = asyncio.Lock()  # the executor's own queue would keep the images of cancelled calls
        self._thread = DaemonThreads(1, "dragoman-images")

    @contextmanager
    def reserve(self, size: int) -> Iterator[Callable[[int], None]]:
        """Count bytes until the block ends; the value counts more of them. Both raise Overloaded above the limit."""
        reserved = 0

        def add(count: int) -> None:
            nonlocal reserved
            if count and self._bytes > reserved and self._bytes + count > self._max_bytes:
                raise Overloaded(
                    f"images: too many are waiting: expected at most {self._max_bytes >> 20} MiB (image_memory)"
                )
            reserved += count
            self._bytes += count

        try:
            add(size)
            yield add
        finally:
            self._bytes -= reserved

    async def run(self, function: Callable[[], A], limit_s: float) -> A:
        """Return the value of a function. Raises TimeLimitExceededError if it takes longer than `limit_s`.

        Then, and when this is cancelled, the function is stopped; this ends when the function has ended.
        """
        async with self._turn:
            return await run_stoppable(self._thread, function, limit_s, until_ended=True)

    def close(self) -> None:
        self._thread.shutdown(wait=False)


def image_bytes(prompts: Iterable[Prompt]) -> int:
    """Return the characters of the images of prompts, whose files are in base64."""
    return sum(len(image) for prompt in prompts if isinstance(prompt, Chat) for image in prompt.images)


def feature_bytes(requests: Iterable[Any]) -> int:
    """Return the bytes of the tensors that a model reads with processed prompts."""
    return sum(getattr(each, "nbytes", 0) for request in requests for each in request.features.values())
