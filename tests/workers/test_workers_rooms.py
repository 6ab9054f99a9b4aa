"""Memory that processes let each other into: large tensors are not copied on their way, and nothing is left of it."""

import gc
import os
from typing import Any

import numpy as np
import pytest
from workers_harness import descriptors, first, processes, until

from dragoman.core.calls import Infer, Request
from dragoman.core.tensor import Tensor
from dragoman.system.shared_memory import LARGE, SharedBuffer, allocate, find_buffer
from dragoman.workers import shared_blocks

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no files in memory")


def test_a_room_is_entered_by_its_place_and_gone_with_its_last_array() -> None:
    before = descriptors()
    made = SharedBuffer.create(1000)
    array = np.frombuffer(made, np.uint8)
    array[:] = 7
    seen = np.frombuffer(SharedBuffer.open(made.path), np.uint8)
    assert (seen == 7).all()
    array[3] = 8
    assert seen[3] == 8
    assert not seen.flags.writeable
    path = made.path
    del made, array
    gc.collect()
    with pytest.raises(OSError, match="No such file"):
        SharedBuffer.open(path)
    assert seen[3] == 8
    del seen
    gc.collect()
    assert descriptors() == before


@pytest.mark.parametrize("size", [0, 1, 1001, LARGE - 1, LARGE, LARGE + 5])
def test_space_ends_where_a_processor_wants_a_number(size: int) -> None:
    memory = allocate(size)
    assert len(memory) == size
    assert not memory.readonly
    assert (np.frombuffer(memory, np.uint8).ctypes.data + size) % 64 == 0 or not size
    assert (find_buffer(memory) is not None) == (size + 64 > LARGE)


def test_a_piece_knows_where_in_its_room_it_lies() -> None:
    memory = allocate(LARGE)
    whole = find_buffer(memory)
    found = find_buffer(np.frombuffer(memory, np.float32)[5:].data)
    assert whole is not None
    assert found is not None
    assert found[0] is whole[0]
    assert found[1] == whole[1] + 20
    assert find_buffer(memoryview(b"abc")) is None


def test_space_is_there_where_files_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise OSError("too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert find_buffer(allocate(LARGE)) is None


def lent(pool: Any) -> int:
    return int(pool._supervisor.running[0]._channel.arena.shared_buffers)


async def test_a_tensor_in_a_room_comes_back_in_the_same_room() -> None:
    async with processes("Echo", heartbeat_s=0) as pool:
        memory = allocate(LARGE)
        array = np.frombuffer(memory, np.uint8)
        array[:] = 3
        answer = await pool.call(Request(Infer({"n": Tensor.of(array)})))
        data = answer.outputs["n"].data
        found, given = find_buffer(data.data), find_buffer(memory)
        assert found is not None
        assert given is not None
        assert found[0].path == given[0].path
        assert (data == 3).all()
        del answer, data, found
        await until(lambda: not lent(pool))  # with no further message


async def test_a_tensor_that_no_arena_has_room_for_gets_one() -> None:
    async with processes("Echo") as pool:
        answer = await pool.call(Request(Infer({"n": Tensor.of(np.full(shared_blocks.ARENA_SIZE // 8 + 1, 7))})))
        assert first(answer) == 7
        assert (answer.outputs["n"].data == 7).all()
        assert find_buffer(answer.outputs["n"].data.data) is not None


async def test_where_rooms_cannot_be_had_all_goes_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async with processes("Echo") as pool:

        def refuse(*_: Any) -> SharedBuffer:
            raise OSError("too many open files")

        monkeypatch.setattr(SharedBuffer, "create", refuse)
        answer = await pool.call(Request(Infer({"n": Tensor.of(np.full(shared_blocks.ARENA_SIZE // 8 + 1, 7))})))
        assert first(answer) == 7


async def test_a_room_that_is_gone_is_the_calls_fault_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with processes("Echo") as pool:
        monkeypatch.setattr(SharedBuffer, "open", lambda *_: (_ for _ in ()).throw(OSError("gone")))
        with pytest.raises(Exception, match="cannot be decoded"):
            await pool.call(Request(Infer({"n": Tensor.of(np.full(LARGE // 8, 7.0))})))
        assert first(await pool.call(Request(Infer({"n": Tensor.of(np.full(9, 5))})))) == 5
