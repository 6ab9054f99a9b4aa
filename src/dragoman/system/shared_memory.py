"""Shared memory buffers: large arrays that several processes map instead of copying them."""

import fcntl
import mmap
import os
from contextlib import suppress
from typing import Any, Self

import numpy as np

# Minimum size in bytes of an array with a buffer of its own; malloc reuses smaller blocks.
LARGE = 32 << 20
ALIGNMENT = 64  # of the end of allocated memory


class SharedBuffer(mmap.mmap):
    """An anonymous memory file. It is freed with the last array in it, in any process.

    path: where other processes of the same user can open it, as long as the process that created it keeps it.
    """

    path = ""
    _descriptor = -1

    @classmethod
    def create(cls, size: int) -> Self:
        """Return a new buffer, filled with zeros. Raises OSError if the system has no memory files, or no memory."""
        descriptor = create_memory_file("dragoman-buffer", size)
        try:
            buffer = cls(descriptor, size)
        except OSError:
            os.close(descriptor)
            raise
        buffer._descriptor, buffer.path = descriptor, f"/proc/{os.getpid()}/fd/{descriptor}"
        return buffer

    @classmethod
    def open(cls, path: str) -> Self:
        """Map the buffer of another process, read-only. Raises OSError if it was freed."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            buffer = cls(descriptor, 0, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        buffer.path = path
        return buffer

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


def create_memory_file(name: str, size: int) -> int:
    """Return the descriptor of a new memory file of fixed size. Raises OSError if that is not possible.

    It is sealed: a process that truncated it would kill those that read from it.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("memory files need Linux")
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def allocate(size: int) -> memoryview:
    """Return uninitialized memory whose end is aligned: arrays at the end of a message then need no copy."""
    memory = _allocate(size + ALIGNMENT)
    start = -(memory.ctypes.data + size) % ALIGNMENT
    return memory[start : start + size].data


def empty_array(count: int, dtype: "np.dtype[Any]") -> "np.ndarray[Any, np.dtype[Any]]":
    """Return an uninitialized array; large ones are in shared buffers, not copied for worker processes."""
    size = count * dtype.itemsize
    return np.empty(count, dtype) if size < LARGE else np.frombuffer(allocate(size), dtype)


def _allocate(size: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    if size >= LARGE:
        with suppress(OSError):  # too many open files, for example
            return np.frombuffer(SharedBuffer.create(size), np.uint8)
    return np.empty(size, np.uint8)


def find_buffer(memory: memoryview) -> tuple[SharedBuffer, int] | None:
    """Return the shared buffer that contains this memory and the offset in it; None if there is none."""
    owner: Any = memory
    while owner is not None and not isinstance(owner, SharedBuffer):
        owner = owner.obj if isinstance(owner, memoryview) else getattr(owner, "base", None)
    return None if owner is None else (owner, _address(memory) - _address(owner))


def discard(memory: memoryview) -> None:
    """Free this memory if it is in a shared buffer: its whole pages then contain zeros, and take no memory."""
    found, page = find_buffer(memory), mmap.PAGESIZE
    if found is not None and hasattr(mmap, "MADV_REMOVE"):
        buffer, offset = found
        start, end = -(-offset // page) * page, (offset + len(memory)) // page * page
        if end > start:
            with suppress(OSError):  # the memory is freed later, with the buffer
                buffer.madvise(mmap.MADV_REMOVE, start, end - start)


def _address(memory: "memoryview | SharedBuffer") -> int:
    return int(np.frombuffer(memory, np.uint8, 1).ctypes.data)
