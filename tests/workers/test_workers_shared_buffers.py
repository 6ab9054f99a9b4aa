"""Shared buffers: large tensors are not copied between processes, and their memory is freed."""

import gc
import os
from typing import Any

import numpy as np
import pytest

from dragoman.core.calls import Infer, Request
from dragoman.core.tensor import Tensor
from dragoman.system.shared_memory import LARGE, SharedBuffer, allocate, find_buffer
from dragoman.workers import shared_blocks
from workers.workers_harness import descriptors, first_value, processes, wait_until

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no files in memory")


def test_a_shared_buffer_is_opened_by_path_and_freed_with_its_last_array() -> None:
    before = descriptors()
    buffer = SharedBuffer.create(1000)
    array = np.frombuffer(buffer, np.uint8)
    array[:] = 7
    view = np.frombuffer(SharedBuffer.open(buffer.path), np.uint8)
    assert (view == 7).all()
    array[3] = 8
    assert view[3] == 8
    assert not view.flags.writeable
    path = buffer.path
    del buffer, array
    gc.collect()
    with pytest.raises(OSError, match="No such file"):
        SharedBuffer.open(path)
    assert view[3] == 8
    del view
    gc.collect()
    assert descriptors() == before


@pytest.mark.parametrize("size", [0, 1, 1001, LARGE - 1, LARGE, LARGE + 5])
def test_the_end_of_allocated_memory_is_aligned(size: int) -> None:
    memory = allocate(size)
    assert len(memory) == size
    assert not memory.readonly
    assert (np.frombuffer(memory, np.uint8).ctypes.data + size) % 64 == 0 or not size
    assert (find_buffer(memory) is not None) == (size + 64 > LARGE)


def test_find_buffer_returns_buffer_and_offset() -> None:
    memory = allocate(LARGE)
    whole = find_buffer(memory)
    part = find_buffer(np.frombuffer(memory, np.float32)[5:].data)
    assert whole is not None
    assert part is not None
    assert part[0] is whole[0]
    assert part[1] == whole[1] + 20
    assert find_buffer(memoryview(b"abc")) is None


def test_allocate_works_without_memory_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_oserror(*_: Any) -> int:
        raise OSError("too many open files")

    monkeypatch.setattr(os, "memfd_create", raise_oserror)
    assert find_buffer(allocate(LARGE)) is None


def shared_buffer_count(pool: Any) -> int:
    return int(pool.supervisor.running[0].channel.arena.shared_buffers)


async def test_a_tensor_in_a_shared_buffer_returns_in_the_same_buffer() -> None:
    async with processes("Echo", heartbeat_s=0) as pool:
        memory = allocate(LARGE)
        array = np.frombuffer(memory, np.uint8)
        array[:] = 3
        response = await pool.call(Request(Infer({"n": Tensor.of(array)})))
        data = response.outputs["n"].data
        returned, sent = find_buffer(data.data), find_buffer(memory)
        assert returned is not None
        assert sent is not None
        assert returned[0].path == sent[0].path
        assert (data == 3).all()
        del response, data, returned
        await wait_until(lambda: not shared_buffer_count(pool))  # without another message


async def test_a_tensor_larger_than_the_arena_gets_a_shared_buffer() -> None:
    async with processes("Echo") as pool:
        response = await pool.call(Request(Infer({"n": Tensor.of(np.full(shared_blocks.ARENA_SIZE // 8 + 1, 7))})))
        assert first_value(response) == 7
        assert (response.outputs["n"].data == 7).all()
        assert find_buffer(response.outputs["n"].data.data) is not None


async def test_tensors_are_sent_without_shared_buffers_if_none_can_be_created(monkeypatch: pytest.MonkeyPatch) -> None:
    async with processes("Echo") as pool:

        def raise_oserror(*_: Any) -> SharedBuffer:
            raise OSError("too many open files")

        monkeypatch.setattr(SharedBuffer, "create", raise_oserror)
        response = await pool.call(Request(Infer({"n": Tensor.of(np.full(shared_blocks.ARENA_SIZE // 8 + 1, 7))})))
        assert first_value(response) == 7


async def test_a_freed_shared_buffer_fails_only_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async with processes("Echo") as pool:
        monkeypatch.setattr(SharedBuffer, "open", lambda *_: (_ for _ in ()).throw(OSError("gone")))
        with pytest.raises(Exception, match="cannot be decoded"):
            await pool.call(Request(Infer({"n": Tensor.of(np.full(LARGE // 8, 7.0))})))
        assert first_value(await pool.call(Request(Infer({"n": Tensor.of(np.full(9, 5))})))) == 5
