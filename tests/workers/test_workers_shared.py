"""Large arrays lie in shared memory as long as anybody refers to them, and no longer."""

import asyncio
import gc
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from workers_harness import ask, first, processes

from dragoman.core.calls import Infer, Request
from dragoman.core.tensor import Tensor
from dragoman.workers import child_process, shared_blocks
from dragoman.workers.frames import FrameKind, FrameParser, encode
from dragoman.workers.shared_blocks import MIN_SIZE, BlockReader, BlockWriter

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no files in memory")


@pytest.fixture
def ends() -> Iterator[tuple[BlockWriter, BlockReader, list[int]]]:
    made = shared_blocks.create_arena_files()
    assert made is not None
    unused: list[int] = []
    yield BlockWriter(made[0]), BlockReader(made[0], unused.append), unused
    shared_blocks.close_files(made)


Ends = tuple[BlockWriter, BlockReader, list[int]]


def test_a_block_is_read_where_it_was_written(ends: Ends) -> None:
    arena, view, unused = ends
    start = arena.put(b"abc")
    assert start == 0
    block = view.block(start, 3)
    assert bytes(block) == b"abc"
    assert block.readonly
    del block
    assert unused == [0]


@pytest.mark.parametrize(
    "keep", [lambda b: b[5:], lambda b: np.frombuffer(b, np.uint8)[2:][::2], lambda b: b.cast("I")]
)
def test_whatever_is_made_of_a_block_keeps_it(ends: Ends, keep: Any) -> None:
    arena, view, unused = ends
    start = arena.put(bytes(100))
    assert start is not None
    kept = keep(view.block(start, 100))
    gc.collect()
    assert unused == []
    if isinstance(kept, np.ndarray):
        kept = kept.reshape(-1, 1).view(np.int8)[:3]
        gc.collect()
        assert unused == []
        assert not kept.flags.writeable
    del kept
    assert unused == [start]


def test_a_full_arena_takes_nothing_until_something_is_freed(ends: Ends) -> None:
    arena, _, _ = ends
    half = bytes(shared_blocks.ARENA_SIZE // 2)
    assert arena.put(half) == 0
    assert arena.put(half) == len(half)
    assert arena.put(b"a") is None
    arena.free(0)
    assert arena.put(b"a") == 0
    assert arena.put(half) is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 300)), max_size=40))
def test_blocks_never_overlap(steps: list[tuple[bool, int]]) -> None:
    made = shared_blocks.create_arena_files()
    assert made is not None
    arena = BlockWriter(made[0])
    shared_blocks.close_files(made)
    taken: dict[int, int] = {}
    for puts, n in steps:
        if puts or not taken:
            start = arena.put(bytes(n))
            assert start is not None
            assert start % 16 == 0
            assert all(start + n <= s or s + size <= start for s, size in taken.items())
            taken[start] = n
        else:
            gone = sorted(taken)[n % len(taken)]
            del taken[gone]
            arena.free(gone)
    assert arena.used >= sum(taken.values())
    assert bool(arena.used) == bool(taken)


def test_a_frame_holds_its_blocks_whether_it_is_unpacked_or_not(ends: Ends) -> None:
    arena, view, unused = ends
    large, small = np.arange(MIN_SIZE, dtype=np.uint8), np.arange(9)
    text = b"".join(encode(FrameKind.CHUNK, 1, [large, small], arena))
    assert len(text) < MIN_SIZE
    parser = FrameParser(view)
    parser.buffer()[: len(text)] = text
    (frame,) = parser.feed(len(text))
    found = frame.value()
    assert np.array_equal(found[0], large)
    assert np.array_equal(found[1], small)
    del frame
    assert unused == []
    del found
    assert unused == [0]


def big(n: int, size: int = 100_000) -> Request[Any]:
    return Request(Infer({"n": Tensor.of(np.full(size, n))}))


def taken(pool: Any) -> int:
    return int(pool._supervisor.running[0]._channel.arena.used)


async def test_calls_go_through_shared_memory_and_leave_it() -> None:
    async with processes("Echo") as pool:
        for n in range(200):  # far more than there is room for
            answer = await pool.call(big(n))
            assert first(answer) == n
            assert not answer.outputs["n"].data.flags.writeable
        assert 0 < taken(pool) <= 2 * 800_064


async def test_answers_that_are_kept_stay_as_they_are() -> None:
    async with processes("Echo") as pool:
        kept = [await pool.call(big(n)) for n in range(120)]  # some had no room left and came by themselves
        assert [first(answer) for answer in kept] == list(range(120))
        assert all((answer.outputs["n"].data == n).all() for n, answer in enumerate(kept))
    assert all((answer.outputs["n"].data == n).all() for n, answer in enumerate(kept))


async def test_many_calls_at_a_time() -> None:
    async with processes("AsyncEcho", replicas=2) as pool:
        answers = await asyncio.gather(*(pool.call(big(n, 10_000 + n)) for n in range(300)))
        assert [first(answer) for answer in answers] == list(range(300))


async def test_what_is_too_large_for_an_arena_takes_none_of_it() -> None:
    async with processes("Echo") as pool:
        answer = await pool.call(big(7, shared_blocks.ARENA_SIZE // 8 + 1))
        assert first(answer) == 7
        assert taken(pool) == 0


async def test_without_shared_memory_all_goes_through_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "create_arena_files", lambda: None)
    async with processes("Echo") as pool:
        assert first(await pool.call(big(3))) == 3
        assert first(await pool.call(ask(4))) == 4
