"""Memory for large arrays into which processes of ours let each other, so that nothing is copied between them."""

import fcntl
import mmap
import os
from typing import Any, Self

import numpy as np

LARGE = 32 << 20  # bytes from which on memory is worth a file of its own; below, malloc keeps it for the next
_ALIGN = 64


class SharedBuffer(mmap.mmap):
    """A file in memory that has no name. It lasts as long as an array that lies in it, in any process.

    `place` is where other processes of the same user find it, while this one keeps it.
    """

    place = ""
    _descriptor = -1

    @classmethod
    def made(cls, size: int) -> Self:
        """A new one, all zeros. Raises OSError where the system has no such thing, or no memory."""
        if not hasattr(os, "memfd_create"):
            raise OSError("files in memory are Linux's")
        descriptor = os.memfd_create("dragoman-room", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            # Nobody can cut it off, which would kill whoever reads there.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            room = cls(descriptor, size)
        except OSError:
            os.close(descriptor)
            raise
        room._descriptor, room.place = descriptor, f"/proc/{os.getpid()}/fd/{descriptor}"
        return room

    @classmethod
    def entered(cls, place: str) -> Self:
        """That of another process, to read in. Raises OSError where it is gone."""
        descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
        try:
            room = cls(descriptor, 0, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        room.place = place
        return room

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


def space(size: int) -> memoryview:
    """Memory of that size which nobody has cleared, whose end is where the processor wants a number.

    What comes last in a message are numbers; they then need no copy. The system gives pages as they are filled.
    """
    memory = _memory(size + _ALIGN)
    begin = -(memory.ctypes.data + size) % _ALIGN
    return memory[begin : begin + size].data


def empty_array(count: int, dtype: "np.dtype[Any]") -> "np.ndarray[Any, np.dtype[Any]]":
    """Return an uninitialized array; a large one lies in memory that worker processes can map, so it is not copied."""
    size = count * dtype.itemsize
    return np.empty(count, dtype) if size < LARGE else np.frombuffer(space(size), dtype)


def _memory(size: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    if size >= LARGE:
        try:
            return np.frombuffer(SharedBuffer.made(size), np.uint8)
        except OSError:  # too many files, say
            pass
    return np.empty(size, np.uint8)


def room_of(part: memoryview) -> tuple[SharedBuffer, int] | None:
    """The room that a piece of memory lies in, and where in it."""
    found: Any = part
    while found is not None and not isinstance(found, SharedBuffer):
        found = found.obj if isinstance(found, memoryview) else getattr(found, "base", None)
    return None if found is None else (found, _address(part) - _address(found))


def _address(memory: "memoryview | SharedBuffer") -> int:
    return int(np.frombuffer(memory, np.uint8, 1).ctypes.data)
