"""The memory that receives a request body grows with the bytes that have arrived."""

import random

import pytest

from dragoman.transports import bodies
from dragoman.transports.bodies import ReceiveBuffer

MIB = 1 << 20


@pytest.mark.parametrize("length", [0, 1, 100, MIB, MIB + 1, 4 * MIB, 4 * MIB + 5, 5 * MIB + 3, 17 * MIB + 1])
@pytest.mark.parametrize("read", [MIB, 70_001])
def test_the_bytes_of_a_body_stay_in_order(length: int, read: int) -> None:
    sent = random.Random(length).randbytes(length)
    buffer = ReceiveBuffer(length)
    while buffer.size < length:
        space = buffer.free_space()
        count = min(len(space), read)
        space[:count] = sent[buffer.size : buffer.size + count]
        buffer.advance(count)
    assert len(buffer.free_space()) == 0
    assert bytes(buffer.take()) == sent


@pytest.mark.parametrize("length", [MIB + 1, 5 * MIB + 3, 17 * MIB + 1])
def test_no_read_copies_more_than_it_brings(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """A copy of all earlier bytes into larger memory would stop the event loop for milliseconds."""
    memory = [bytearray()]

    def allocate(size: int) -> memoryview:
        memory.append(bytearray(size))
        return memoryview(memory[-1])

    monkeypatch.setattr(bodies, "allocate", allocate)
    buffer, read = ReceiveBuffer(length), MIB // 4
    written: dict[int, int] = {}  # bytes, by memory
    while buffer.size < length:
        space = buffer.free_space()
        count = min(len(space), read)
        space[:count] = b"\1" * count
        buffer.advance(count)
        before, written[len(memory)] = written.get(len(memory), 0), memory[-1].count(1)
        assert written[len(memory)] - before <= 2 * count
    assert len(memory) > 2
    assert memory[-1].count(1) == length


@pytest.mark.parametrize("length", [3 * MIB, 1 << 30, (1 << 40) + 7])
def test_memory_is_at_most_four_times_what_has_arrived(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    allocated: list[int] = []

    def allocate(size: int) -> memoryview:
        allocated.append(size)
        return memoryview(bytearray(size))

    monkeypatch.setattr(bodies, "allocate", allocate)
    buffer = ReceiveBuffer(length)
    for _ in range(80):
        buffer.advance(min(1 << 15, len(buffer.free_space())))
        assert max(allocated) <= max(MIB, 4 * buffer.size)
