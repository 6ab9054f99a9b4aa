"""How late an event loop is, as a metric."""

import asyncio
from collections.abc import Iterable
from typing import Final

from dragoman.core.metrics import Family, Histogram

_NAME: Final = "dragoman_event_loop_delay_seconds"
_HELP: Final = "Seconds that the event loop was late for a timer: what a new request would have waited."
_BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_INTERVAL_S: Final = 0.25
_MAX_TICKS: Final = 1000


class LoopMonitor:
    """Measures four times a second how late the event loop is in which it runs.

    A loop that is blocked for seconds counts as often as timers would have been due, as otherwise one long block would
    weigh no more than one short delay.
    """

    def __init__(self) -> None:
        self._delays = Histogram(_BOUNDS)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + _INTERVAL_S
            await asyncio.sleep(_INTERVAL_S)
            late_s = max(0.0, loop.time() - due_s)
            for _ in range(_MAX_TICKS):
                self._delays.observe(late_s)
                late_s -= _INTERVAL_S
                if late_s <= 0:
                    break

    def families(self) -> Iterable[Family]:
        yield Family(_NAME, "histogram", _HELP, distributions=(self._delays.distribution(_NAME, {}),))
