"""Workers of a server with many open files, and of one that reached the limit."""

import asyncio
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from workers_harness import call, first_value, processes, wait_until

from dragoman.workers.channel import Channel, socket_pair
from dragoman.workers.frames import FrameKind, encode

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what is left over is counted as Linux counts it")


@contextmanager
def files(limit: int, held: int) -> Iterator[Callable[[], None]]:
    """Set the limit of open files and open `held` files; the returned function opens missing ones again."""
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


async def test_long_frames_are_sent_on_file_descriptors_above_1024() -> None:
    with files(4096, held=1100):
        ours, theirs = socket_pair()
        assert theirs.fileno() > 1024
        chunks = encode(FrameKind.RESPONSE, 1, b"x" * (64 << 20))
        left = sum(map(len, chunks))

        def read() -> int:
            missing = left
            while missing:
                missing -= len(ours.recv(1 << 14))
            return missing

        channel = Channel(theirs, lambda _: None, lambda: None)
        channel.send(chunks)
        reading = asyncio.create_task(asyncio.to_thread(read))
        await asyncio.sleep(0)
        channel.flush_all()
        assert await asyncio.wait_for(reading, 30) == 0
        channel.close()
        ours.close()


async def test_a_worker_is_restarted_once_files_can_be_opened_again(caplog: pytest.LogCaptureFixture) -> None:
    async with processes("Actions") as pool:
        old = first_value(await call(pool, do="pid"))
        highest = max(int(each) for each in os.listdir("/proc/self/fd"))
        with files(highest + 1, held=highest) as take:
            os.kill(old, signal.SIGKILL)
            await wait_until(lambda: take() or "Too many open files" in caplog.text)
        await wait_until(lambda: pool.ready)
        assert first_value(await call(pool, do="pid")) != old
