"""A text engine without a model, for measurements: each open stream gets one token per step, all in the same step.

Standard library only, because it also runs in the environments of other servers.
"""

import asyncio
from collections.abc import AsyncGenerator

TOKENS_PER_S = 20
TOKEN = " word~"  # the load generator counts `~`


class TokenEngine:
    """Steps at a fixed rate. A stream that has not taken its tokens before the next step gets them together."""

    def __init__(self) -> None:
        self._streams: dict[asyncio.Event, int] = {}  # tokens that a stream has not taken yet
        self._steps: asyncio.Task[None] | None = None

    async def tokens(self, count: int) -> AsyncGenerator[tuple[str, int], None]:
        """Yield text and its number of tokens, `count` tokens in all."""
        if self._steps is None or self._steps.done():
            self._steps = asyncio.create_task(self._step())
        ready = asyncio.Event()
        self._streams[ready] = 0
        try:
            while count:
                if not self._streams[ready]:
                    ready.clear()
                    await ready.wait()
                new = min(count, self._streams[ready])
                self._streams[ready] = 0
                count -= new
                yield TOKEN * new, new
        finally:
            del self._streams[ready]

    async def _step(self) -> None:
        clock = asyncio.get_running_loop()
        due_s = clock.time()
        while self._streams:
            due_s += 1 / TOKENS_PER_S
            await asyncio.sleep(due_s - clock.time())
            for ready in self._streams:
                self._streams[ready] += 1
                ready.set()
