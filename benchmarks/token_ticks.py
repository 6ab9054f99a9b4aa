"""A text engine without a model, for measurements: each open stream gets one token per step, all in the same step.

Standard library only, because it also runs in the environments of other servers.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable

TOKENS_PER_S = 20
TOKEN = " word~"  # the load generator counts `~`


class TokenEngine:
    """Steps at a fixed rate. A stream that has not taken its tokens before the next step gets them together."""

    def __init__(self) -> None:
        self._streams: dict[Callable[[], None], int] = {}  # tokens that a stream has not taken yet
        self._steps: asyncio.Task[None] | None = None

    def join(self, wake: Callable[[], None]) -> None:
        """Call `wake` at each step, until `leave`."""
        if self._steps is None or self._steps.done():
            self._steps = asyncio.create_task(self._step())
        self._streams[wake] = 0

    def take(self, wake: Callable[[], None]) -> int:
        """Return the number of tokens that a stream has not taken yet, and take them."""
        count = self._streams[wake]
        self._streams[wake] = 0
        return count

    def leave(self, wake: Callable[[], None]) -> None:
        del self._streams[wake]

    async def tokens(self, count: int) -> AsyncGenerator[tuple[str, int], None]:
        """Yield text and its number of tokens, `count` tokens in all, as vLLM's engine does: a task waits for them."""
        ready = asyncio.Event()
        wake = ready.set
        self.join(wake)
        try:
            while count:
                if not self._streams[wake]:
                    ready.clear()
                    await ready.wait()
                new = min(count, self.take(wake))
                count -= new
                yield TOKEN * new, new
        finally:
            self.leave(wake)

    async def _step(self) -> None:
        clock = asyncio.get_running_loop()
        due_s = clock.time()
        while self._streams:
            due_s += 1 / TOKENS_PER_S
            await asyncio.sleep(due_s - clock.time())
            for wake in [*self._streams]:
                if wake in self._streams:
                    self._streams[wake] += 1
                    wake()
