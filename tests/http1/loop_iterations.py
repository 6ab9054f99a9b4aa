"""A counter of event loop iterations."""

import asyncio


class Iterations:
    """Counts the iterations of the event loop."""

    def __init__(self) -> None:
        self.number = 0
        self._next()

    def _next(self) -> None:
        self.number += 1
        self._handle = asyncio.get_running_loop().call_soon(self._next)

    def stop(self) -> None:
        self._handle.cancel()
