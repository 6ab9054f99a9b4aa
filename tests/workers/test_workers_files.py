"""Workers of a server that has many files open, as one with many clients has, and of one that may open no more."""

import asyncio
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from workers_harness import ask, first, processes, until

from dragoman.workers.channel import Channel, socket_pair
from dragoman.workers.frames import FrameKind, encode

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what is left over is counted as Linux counts it")


@contextmanager
def files(limit: int, held: int) -> Iterator[Callable[[], None]]:
    """At most so many open files in all, and so many more than before, or as many as there can be; that is seen to
    again by calling what is given."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < limit:
        pytest.skip("so many files may not be opened here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    taken: list[int] = []

    def take() -> None:
        with suppress(OSError):
            while len(taken) < held:
                taken.append(os.open(os.devnull, os.O_RDONLY))

    try:
        take()
        yield take
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_a_long_frame_waits_for_room_whatever_number_its_socket_has() -> None:
    with files(4096, held=1100):
        ours, theirs = socket_pair()
        assert theirs.fileno() > 1024
        pieces = encode(FrameKind.RESPONSE, 1, b"x" * (64 << 20))
        left = sum(map(len, pieces))

        def read() -> int:
            missing = left
            while missing:
                missing -= len(ours.recv(1 << 14))
            return missing

        channel = Channel(theirs, lambda _: None, lambda: None)
        channel.send(pieces)
        reading = asyncio.create_task(asyncio.to_thread(read))
        await asyncio.sleep(0)
        channel.flush_all()
        assert await asyncio.wait_for(reading, 30) == 0
        channel.close()
        ours.close()


async def test_a_worker_comes_back_once_files_can_be_opened_again(caplog: pytest.LogCaptureFixture) -> None:
    async with processes("Acts") as pool:
        old = first(await pool.call(ask(do="pid")))
        highest = max(int(each) for each in os.listdir("/proc/self/fd"))
        with files(highest + 1, held=highest) as take:
            os.kill(old, signal.SIGKILL)
            await until(lambda: take() or "Too many open files" in caplog.text)
        await until(lambda: pool.ready)
        assert first(await pool.call(ask(do="pid"))) != old
