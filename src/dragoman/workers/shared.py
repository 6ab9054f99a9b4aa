"""Memory that the server shares with one of its worker processes: large arrays are put there once, and read in place.

Each direction has an arena of its own, in which the writer alone decides what lies where. The reader says when nothing
of it refers to a block any more, however long a model or a slow client keeps an array; until then it stays as it is.
What lies in a room is not copied: the reader is let in. So is what an arena is too small for, in a room made for it.
"""

import fcntl
import mmap
import os
import weakref
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from dragoman.system.shared_memory import LARGE, SharedBuffer, room_of

LEAST = 64 << 10  # bytes of an array from which on it goes this way
_SIZE = 64 << 20  # of an arena; what is never written takes no memory
_ALIGN = 64
_LENT = 1 << 62  # numbers of blocks that are no places in an arena


def is_lent(start: int) -> bool:
    """Whether this is the number of memory that was lent, and no place in an arena."""
    return start > _LENT


def files() -> tuple[int, int] | None:
    """Return two memory files, one for each direction; None if the system has none."""
    made: list[int] = []
    try:
        for name in ("dragoman-to-worker", "dragoman-to-server"):
            made.append(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            os.ftruncate(made[-1], _SIZE)
            # Sealed, because truncating it would kill processes that read from it.
            fcntl.fcntl(made[-1], fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except (AttributeError, OSError):
        close(made)
        return None
    return made[0], made[1]


def close(descriptors: "tuple[int, ...] | list[int]") -> None:
    """Close the files; mappings stay."""
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)


class Arena:
    """The writer's side: the blocks in use, as intervals in order."""

    def __init__(self, descriptor: int) -> None:
        self._memory = memoryview(mmap.mmap(descriptor, 0))
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._lent: dict[int, SharedBuffer] = {}
        self._lendings = 0

    def put(self, data: "bytes | memoryview") -> int | None:
        """Copy some bytes in; where they begin, or None where there is no room for them."""
        size = -(-len(data) // _ALIGN) * _ALIGN
        at, place = 0, len(self._starts)
        for index, start in enumerate(self._starts):
            if start - at >= size:
                place = index
                break
            at = self._ends[index]
        if at + size > len(self._memory):
            return None
        self._memory[at : at + len(data)] = data
        self._starts.insert(place, at)
        self._ends.insert(place, at + size)
        return at

    def lend(self, part: "bytes | memoryview") -> tuple[int, int, str] | None:
        """Let the reader into memory that lies in a room, or is so large that it is copied into one.

        Gives the number of the block, where it begins, and the room's place; None for memory that is not for that.
        """
        found = room_of(part) if isinstance(part, memoryview) else None
        if found is None:
            if len(part) < LARGE:
                return None
            try:
                room = SharedBuffer.made(len(part))
            except OSError:
                return None
            memoryview(room)[:] = part
            found = room, 0
        self._lendings += 1
        number = _LENT + self._lendings
        self._lent[number] = found[0]
        return number, found[1], found[0].place

    def free(self, start: int) -> None:
        """Release a block."""
        if is_lent(start):
            del self._lent[start]
            return
        place = bisect_left(self._starts, start)
        del self._starts[place], self._ends[place]

    @property
    def taken(self) -> int:
        """Number of bytes in use."""
        return sum(self._ends) - sum(self._starts)


class View:
    """The reader's side. unused: called with the offset of each block that is no longer referenced, in any thread."""

    def __init__(self, descriptor: int, unused: Callable[[int], None]) -> None:
        self._memory = mmap.mmap(descriptor, 0)
        self._unused = unused
        self._blocks: dict[int, weakref.ref[Any]] = {}

    def block(self, start: int, size: int) -> memoryview:
        """A block, read-only. It lasts as long as anything that is made of this view of it."""
        # Arrays made of a memoryview refer to its owner, which would be passed over in arrays made of an array.
        return self._held(self._memory, start, start, size)

    def entered(self, number: int, start: int, size: int, place: str) -> memoryview:
        """The same for a block of a room that was lent; nothing where that cannot be entered."""
        try:
            return self._held(SharedBuffer.entered(place), number, start, size)
        except OSError:
            self._unused(number)
            return memoryview(b"")

    def _held(self, memory: mmap.mmap, number: int, start: int, size: int) -> memoryview:
        owner: Any = np.frombuffer(memory, np.uint8, size, start)
        self._blocks[number] = weakref.ref(owner, lambda _: self._gone(number))
        return memoryview(owner).toreadonly()

    def _gone(self, number: int) -> None:
        del self._blocks[number]
        self._unused(number)
