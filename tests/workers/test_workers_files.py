"""Workers of a server with many open files, and of one that reached the limit."""

import asyncio
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from dragoman.workers.channel import Channel, socket_pair
from dragoman.workers.frames import FrameKind, encode
from workers.workers_harness import call, first_value, processes, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and RLIMIT_NOFILE of Linux")


@contextmanager
def open_files(limit: int, count: int) -> Iterator[Callable[[], None]]:
    """Set the limit of open files and open `count` files; the yielded function opens missing ones again."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < limit:
        pytest.skip(f"the hard limit of open files is below {limit}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    descriptors: list[int] = []

    def open_missing() -> None:
        with suppress(OSError):
            while len(descriptors) < count:
                descriptors.append(os.open(os.devnull, os.O_RDONLY))

    try:
        open_missing()
        yield open_missing
    finally:
        for each in descriptors:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_long_frames_are_sent_on_file_descriptors_above_1024() -> None:
    with open_files(4096, count=1100):
        ours, theirs = socket_pair()
        assert theirs.fileno() > 1024
        chunks = encode(FrameKind.RESPONSE, 1, b"x" * (64 << 20))
        size = sum(map(len, chunks))

        def read() -> int:
            remaining = size
            while remaining:
                remaining -= len(ours.recv(1 << 14))
            return remaining

        channel = Channel(theirs, lambda _: None, lambda: None)
        channel.send(chunks)
        reading = asyncio.create_task(asyncio.to_thread(read))
        await asyncio.sleep(0)
        channel.flush_all()
        assert await asyncio.wait_for(reading, 60) == 0
        channel.close()
        ours.close()


async def test_a_worker_is_restarted_once_files_can_be_opened_again(caplog: pytest.LogCaptureFixture) -> None:
    async with processes("Actions") as pool:
        old = first_value(await call(pool, do="pid"))
        highest = max(int(each) for each in os.listdir("/proc/self/fd"))
        with open_files(highest + 1, count=highest) as open_missing:
            os.kill(old, signal.SIGKILL)
            await wait_until(lambda: open_missing() or "Too many open files" in caplog.text)
        await wait_until(lambda: pool.ready)
        assert first_value(await call(pool, do="pid")) != old
