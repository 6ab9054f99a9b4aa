"""Arenas: blocks of shared memory are in use exactly as long as they are referenced."""

import asyncio
import gc
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from workers_harness import call, first_value, processes

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


def test_blocks_are_read_in_place_and_reported_unused(ends: Ends) -> None:
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
def test_views_of_a_block_keep_it_in_use(ends: Ends, keep: Any) -> None:
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


def test_a_full_arena_accepts_data_after_a_block_is_freed(ends: Ends) -> None:
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


def test_frames_and_their_values_keep_blocks_in_use(ends: Ends) -> None:
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
    return int(pool.supervisor.running[0].channel.arena.used)


async def test_calls_use_shared_memory_and_free_it() -> None:
    async with processes("Echo") as pool:
        for n in range(200):  # far more than the arena can hold at once
            response = await pool.call(big(n))
            assert first_value(response) == n
            assert not response.outputs["n"].data.flags.writeable
        assert 0 < taken(pool) <= 2 * 800_064


async def test_responses_that_are_kept_do_not_change() -> None:
    async with processes("Echo") as pool:
        kept = [await pool.call(big(n)) for n in range(120)]  # more than fit into the arena
        assert [first_value(response) for response in kept] == list(range(120))
        assert all((response.outputs["n"].data == n).all() for n, response in enumerate(kept))
    assert all((response.outputs["n"].data == n).all() for n, response in enumerate(kept))


async def test_concurrent_calls_through_shared_memory() -> None:
    async with processes("AsyncEcho", replicas=2) as pool:
        responses = await asyncio.gather(*(pool.call(big(n, 10_000 + n)) for n in range(300)))
        assert [first_value(response) for response in responses] == list(range(300))


async def test_arrays_larger_than_the_arena_do_not_use_it() -> None:
    async with processes("Echo") as pool:
        response = await pool.call(big(7, shared_blocks.ARENA_SIZE // 8 + 1))
        assert first_value(response) == 7
        assert taken(pool) == 0


async def test_without_shared_memory_arrays_are_sent_through_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "create_arena_files", lambda: None)
    async with processes("Echo") as pool:
        assert first_value(await pool.call(big(3))) == 3
        assert first_value(await call(pool, 4)) == 4
