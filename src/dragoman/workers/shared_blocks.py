"""Large arrays in memory that the server shares with a worker process: written once, read in place.

Each direction has an arena. Only its writer decides where blocks lie; the reader reports each block that it no longer
references, and until then the block does not change. Arrays that already lie in a `SharedBuffer`, and arrays that are
too large for the arena, are shared as buffers of their own.
"""

import mmap
import os
import re
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import numpy as np

from dragoman.system.shared_memory import LARGE, SharedBuffer, create_memory_file, find_buffer

# Size of an arena in bytes. Pages that are never written take no memory.
ARENA_SIZE = 64 << 20
_ALIGNMENT = 64
# Block numbers above this are shared buffers, numbers below are offsets in an arena.
_BUFFERS = 1 << 62
_BUFFER_PATH = re.compile(r"/proc/\d+/fd/\d+", re.ASCII)


def is_buffer(number: int) -> bool:
    """Return whether a block number is that of a shared buffer, not an offset in an arena."""
    return number > _BUFFERS


def create_arena_files() -> tuple[int, int] | None:
    """Return two memory files, one for each direction; None if the system has none."""
    try:
        to_worker = create_memory_file("dragoman-to-worker", ARENA_SIZE)
    except OSError:
        return None
    try:
        return to_worker, create_memory_file("dragoman-to-server", ARENA_SIZE)
    except OSError:
        os.close(to_worker)
        return None


def close_files(descriptors: Iterable[int]) -> None:
    """Close the files; mappings stay."""
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)


class BlockWriter:
    """The writer's side of an arena: the blocks in use, as sorted intervals."""

    def __init__(self, descriptor: int) -> None:
        self._memory = memoryview(mmap.mmap(descriptor, 0))
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._buffers: dict[int, SharedBuffer] = {}
        self._buffer_count = 0

    def put(self, data: "bytes | memoryview") -> int | None:
        """Copy data into the first gap that is large enough; return its offset, or None if the arena is full."""
        size = -(-len(data) // _ALIGNMENT) * _ALIGNMENT
        offset, index = 0, len(self._starts)
        for i, start in enumerate(self._starts):
            if start - offset >= size:
                index = i
                break
            offset = self._ends[i]
        if offset + size > len(self._memory):
            return None
        self._memory[offset : offset + len(data)] = data
        self._starts.insert(index, offset)
        self._ends.insert(index, offset + size)
        return offset

    def share(self, data: "bytes | memoryview") -> tuple[int, int, str] | None:
        """Share data that lies in a shared buffer, or copy it to a new one if it is large.

        Return the block number, the offset in the buffer and its path; None for smaller data.
        """
        buffer_and_offset = find_buffer(data) if isinstance(data, memoryview) else None
        if buffer_and_offset is None:
            if len(data) < LARGE:
                return None
            try:
                buffer = SharedBuffer.create(len(data))
            except OSError:
                return None
            memoryview(buffer)[:] = data
            buffer_and_offset = buffer, 0
        self._buffer_count += 1
        number = _BUFFERS + self._buffer_count
        self._buffers[number] = buffer_and_offset[0]
        return number, buffer_and_offset[1], buffer_and_offset[0].path

    def free(self, number: int) -> None:
        if is_buffer(number):
            del self._buffers[number]
            return
        index = bisect_left(self._starts, number)
        del self._starts[index], self._ends[index]

    @property
    def used_bytes(self) -> int:
        """Number of bytes of the arena in use."""
        return sum(self._ends) - sum(self._starts)

    @property
    def shared_buffers(self) -> int:
        return len(self._buffers)


class BlockReader:
    """The reader's side. unused: called with the number of each block that is no longer referenced, in any thread."""

    def __init__(self, descriptor: int, unused: Callable[[int], None]) -> None:
        self._memory = mmap.mmap(descriptor, 0)
        self._unused = unused
        self._blocks: dict[int, weakref.ref[Any]] = {}

    def block(self, offset: int, size: int) -> memoryview:
        """Return a block of the arena, read-only. It stays in use while anything made from this view exists."""
        return self._view(self._memory, offset, offset, size)

    def open_shared(self, number: int, offset: int, size: int, path: str) -> memoryview:
        """Return a block in a shared buffer; an empty one if the buffer cannot be opened.

        Raises ValueError for a path of anything but an open file of a process.
        """
        if not _BUFFER_PATH.fullmatch(path):
            raise ValueError(f"expected the path of a shared buffer, got {path!r}")
        try:
            return self._view(SharedBuffer.open(path), number, offset, size)
        except OSError:
            self._unused(number)
            return memoryview(b"")

    def _view(self, memory: mmap.mmap, number: int, offset: int, size: int) -> memoryview:
        # An array made from a memoryview refers to its owner; one made from an array would refer to `memory` instead.
        owner: Any = np.frombuffer(memory, np.uint8, size, offset)
        self._blocks[number] = weakref.ref(owner, lambda _: self._release(number))
        return memoryview(owner).toreadonly()

    def _release(self, number: int) -> None:
        del self._blocks[number]
        self._unused(number)
