"""Running the event loop of a server does not change settings of the process."""

import asyncio
import sys

from dragoman.system import event_loop, process


def test_running_an_event_loop_does_not_change_the_process() -> None:
    original_s = sys.getswitchinterval()
    before_s = 0.005  # Python's own; a test before this one may have run the command in this process
    try:
        sys.setswitchinterval(before_s)
        assert event_loop.run(asyncio.sleep(0, 7)) == 7
        assert sys.getswitchinterval() == before_s
        process.shorten_switch_interval()
        assert sys.getswitchinterval() < before_s
    finally:
        sys.setswitchinterval(original_s)
