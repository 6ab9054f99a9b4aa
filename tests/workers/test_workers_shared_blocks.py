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

from dragoman.core.calls import Infer, Request
from dragoman.core.sizes import SHARED
from dragoman.core.tensor import Tensor
from dragoman.workers import child_process, shared_blocks
from dragoman.workers.frames import FrameKind, FrameParser, encode
from dragoman.workers.shared_blocks import BlockReader, BlockWriter
from workers.workers_harness import call, first_value, processes

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no files in memory")


@pytest.fixture
def arena_ends() -> Iterator[tuple[BlockWriter, BlockReader, list[int]]]:
    files = shared_blocks.create_arena_files()
    assert files is not None
    unused: list[int] = []
    yield BlockWriter(files[0]), BlockReader(files[0], unused.append), unused
    shared_blocks.close_files(files)


ArenaEnds = tuple[BlockWriter, BlockReader, list[int]]


def test_blocks_are_read_in_place_and_reported_unused(arena_ends: ArenaEnds) -> None:
    arena, view, unused = arena_ends
    start = arena.put(b"abc")
    assert start == 0
    block = view.block(start, 3)
    assert bytes(block) == b"abc"
    assert block.readonly
    del block
    assert unused == [0]


@pytest.mark.parametrize(
    "make_view", [lambda b: b[5:], lambda b: np.frombuffer(b, np.uint8)[2:][::2], lambda b: b.cast("I")]
)
def test_views_of_a_block_keep_it_in_use(arena_ends: ArenaEnds, make_view: Any) -> None:
    arena, view, unused = arena_ends
    start = arena.put(bytes(100))
    assert start is not None
    array = make_view(view.block(start, 100))
    gc.collect()
    assert unused == []
    if isinstance(array, np.ndarray):
        array = array.reshape(-1, 1).view(np.int8)[:3]
        gc.collect()
        assert unused == []
        assert not array.flags.writeable
    del array
    assert unused == [start]


def test_a_full_arena_accepts_data_after_a_block_is_freed(arena_ends: ArenaEnds) -> None:
    arena, _, _ = arena_ends
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
    files = shared_blocks.create_arena_files()
    assert files is not None
    arena = BlockWriter(files[0])
    shared_blocks.close_files(files)
    sizes: dict[int, int] = {}
    for is_put, n in steps:
        if is_put or not sizes:
            start = arena.put(bytes(n))
            assert start is not None
            assert start % 16 == 0
            assert all(start + n <= s or s + size <= start for s, size in sizes.items())
            sizes[start] = n
        else:
            freed = sorted(sizes)[n % len(sizes)]
            del sizes[freed]
            arena.free(freed)
    assert arena.used_bytes >= sum(sizes.values())
    assert bool(arena.used_bytes) == bool(sizes)


def test_frames_and_their_values_keep_blocks_in_use(arena_ends: ArenaEnds) -> None:
    arena, view, unused = arena_ends
    large, small = np.arange(SHARED, dtype=np.uint8), np.arange(9)
    data = b"".join(encode(FrameKind.CHUNK, 1, [large, small], arena))
    assert len(data) < SHARED
    parser = FrameParser(view)
    parser.buffer()[: len(data)] = data
    (frame,) = parser.feed(len(data))
    values = frame.value()
    assert np.array_equal(values[0], large)
    assert np.array_equal(values[1], small)
    del frame
    assert unused == []
    del values
    assert unused == [0]


def large_request(n: int, size: int = 100_000) -> Request[Any]:
    return Request(Infer({"n": Tensor.of(np.full(size, n))}))


def bytes_in_use(pool: Any) -> int:
    return int(pool.supervisor.running[0].channel.arena.used_bytes)


async def test_calls_use_shared_memory_and_free_it() -> None:
    async with processes("Echo") as pool:
        for n in range(200):  # far more than the arena can hold at once
            response = await pool.call(large_request(n))
            assert first_value(response) == n
            assert not response.outputs["n"].data.flags.writeable
        assert 0 < bytes_in_use(pool) <= 2 * 800_064


async def test_responses_that_the_caller_references_do_not_change() -> None:
    async with processes("Echo") as pool:
        responses = [await pool.call(large_request(n)) for n in range(120)]  # more than fit into the arena
        assert [first_value(response) for response in responses] == list(range(120))
        assert all((response.outputs["n"].data == n).all() for n, response in enumerate(responses))
    assert all((response.outputs["n"].data == n).all() for n, response in enumerate(responses))


async def test_concurrent_calls_through_shared_memory() -> None:
    async with processes("AsyncEcho", replicas=2) as pool:
        responses = await asyncio.gather(*(pool.call(large_request(n, 10_000 + n)) for n in range(300)))
        assert [first_value(response) for response in responses] == list(range(300))


async def test_arrays_larger_than_the_arena_do_not_use_it() -> None:
    async with processes("Echo") as pool:
        response = await pool.call(large_request(7, shared_blocks.ARENA_SIZE // 8 + 1))
        assert first_value(response) == 7
        assert bytes_in_use(pool) == 0


async def test_without_shared_memory_arrays_are_sent_through_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "create_arena_files", lambda: None)
    async with processes("Echo") as pool:
        assert first_value(await pool.call(large_request(3))) == 3
        assert first_value(await call(pool, 4)) == 4
