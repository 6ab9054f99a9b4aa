"""Request bodies: how much memory they take together, and buffers that receive them."""

import mmap
import tempfile

from dragoman.core.errors import Overloaded
from dragoman.protocols.wire import Buffer, HttpError, Spool
from dragoman.system.shared_memory import allocate

# Most memory allocated at first, because a client may announce any length. Pages that are not written take no memory.
_FIRST_BYTES = 1 << 20
_GROWTH = 4
# With each read, half as many of the bytes received before are copied: all of them before the memory grows again.
_BYTES_PER_COPIED = 2
# Bodies up to this size (bytes) may exceed the limit by a share of it, 1 / SMALL_SHARE.
SMALL_BODY = 1 << 16
SMALL_SHARE = 16
# Bodies up to this size stay in memory also where larger ones go to a file, of which this much is read at a time.
SMALL_SPOOL = 1 << 18
_SPOOL_BLOCK = 1 << 18


class BodyMemory:
    """Counts the bytes of requests that are received or answered, and of responses that clients do not read.

    `limit` 0 allows any number. `is_over_limit`: requests and unread responses take more than the limit, so no large
    response is kept any more. Small requests are accepted then, up to a share of the limit on top of it, so that no
    client can take all memory for bodies from the others.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._requests = self._unread = 0
        self.is_over_limit = False
        self.rejected = 0  # requests

    @property
    def size(self) -> int:
        """Bytes that are counted."""
        return self._requests + self._unread

    def reserve(self, size: int, body_size: int = 0) -> None:
        """Count `size` bytes more of a request body, whose size so far, or whole size if known, is `body_size`.

        Raises HttpError 503, and counts none of them, if they exceed the limit.
        """
        requests, limit = self._requests + size, self._limit
        if limit and size > 0 and requests + self._unread > limit:
            is_small = max(size, body_size) <= SMALL_BODY
            if not is_small or requests > limit + limit // SMALL_SHARE:
                self.rejected += 1
                text = f"the requests in flight take all of the {limit} bytes that bodies may take together"
                raise HttpError(503, text, (("retry-after", "1"), ("connection", "close")))
        self._requests = requests

    def release(self, size: int) -> None:
        self._requests -= size
        if self.is_over_limit:
            self.count_unread(0)

    def count_unread(self, size: int) -> None:
        """Count `size` bytes more, or fewer if negative, of responses that exist already."""
        self._unread += size
        self.is_over_limit = 0 < self._limit < self._requests + self._unread

    @property
    def unread_error(self) -> Overloaded:
        text = f"responses that clients do not read take all of the {self._limit} bytes that bodies may take together"
        return Overloaded(text)


class ReceiveBuffer:
    """Receives `length` bytes into one piece of memory, which grows as they arrive.

    When it grows, the bytes received so far are copied little by little, along with those that follow: a copy of 16 MiB
    into new pages would stop the event loop for 10 to 40 ms. Sizes are quotients of `length`, so that there is enough
    to follow after the last growth, too.
    """

    __slots__ = ("_copied", "_earlier", "_space", "length", "size")

    def __init__(self, length: int) -> None:
        self.length = length
        self.size = 0  # bytes received
        self._space = allocate(self._capacity(_FIRST_BYTES))
        self._earlier: memoryview | None = None  # the memory before the last growth, until it is copied
        self._copied = 0  # bytes of it

    def _capacity(self, most: int) -> int:
        """Return the largest size of the memory up to `most`."""
        size = self.length
        while size > most:
            size = -(-size // _GROWTH)
        return size

    def free_space(self) -> memoryview:
        """Return where the next bytes go; empty once all have been received."""
        if self.size == len(self._space) < self.length:
            self._earlier, self._copied = self._space, 0
            self._space = allocate(self._capacity(_GROWTH * self.size))
        return self._space[self.size :]

    def _copy(self, count: int) -> None:
        """Copy the next bytes, at most `count`, of the memory before the last growth."""
        if self._earlier is None:
            return
        begin, end = self._copied, min(self._copied + count, len(self._earlier))
        self._space[begin:end] = self._earlier[begin:end]
        self._copied = end
        if end == len(self._earlier):
            self._earlier = None

    def advance(self, count: int) -> None:
        """Count bytes that were written to `free_space()`."""
        self.size += count
        if self._earlier is not None:
            self._copy(-(-count // _BYTES_PER_COPIED))

    def append(self, data: bytes | memoryview) -> None:
        """Append bytes that were read elsewhere; at most those that are missing."""
        view = memoryview(data)
        while len(view):
            target = self.free_space()
            count = min(len(target), len(view))
            target[:count] = view[:count]
            self.advance(count)
            view = view[count:]

    def take(self) -> Buffer:
        """Return the bytes, once all have been received, and keep no reference, so that the caller can free them."""
        data, self._space = self._space, memoryview(b"")
        return data.toreadonly()


class FixedBody:
    """A body of known length. `append` and `advance` raise HttpError 503 if all bodies take too much memory."""

    __slots__ = ("_buffer", "_memory", "free_space", "length", "take")

    def __init__(self, length: int, memory: BodyMemory) -> None:
        self.length = length
        self._memory = memory
        self._buffer = ReceiveBuffer(length)
        self.free_space = self._buffer.free_space
        self.take = self._buffer.take

    @property
    def size(self) -> int:
        """Bytes received, which are counted in `memory`."""
        return self._buffer.size

    def advance(self, count: int) -> None:
        self._memory.reserve(count, self.length)
        self._buffer.advance(count)

    def append(self, data: bytes) -> None:
        self._memory.reserve(len(data), self.length)
        self._buffer.append(data)


class GrowingBody:
    """A body of unknown length."""

    __slots__ = ("_data", "_max_bytes", "_memory", "size")

    def __init__(self, max_bytes: int, memory: BodyMemory) -> None:
        self.size = 0
        self._max_bytes = max_bytes
        self._memory = memory
        self._data = bytearray()

    def append(self, data: bytes) -> None:
        """Raises HttpError 413 if the body is too large, 503 if all bodies take too much memory."""
        if self.size + len(data) > self._max_bytes:
            raise too_large(self._max_bytes)
        self._memory.reserve(len(data), self.size + len(data))
        self.size += len(data)
        self._data += data

    def take(self) -> Buffer:
        data, self._data = self._data, bytearray()
        return memoryview(data).toreadonly()


class SpooledBody:
    """A body that is received into a file without a name, which ends with it. `length`: -1 if it is not known.

    Its bytes count in `memory` too, which so bounds all uploads together. Writing to a file is a copy to the page cache
    as a rule. `append` and `advance` raise HttpError 507 if the disk is full.
    """

    __slots__ = ("_block", "_file", "_max_bytes", "_memory", "length", "size")

    def __init__(self, length: int, memory: BodyMemory, spool: Spool) -> None:
        self.length = length
        self.size = 0
        self._memory = memory
        self._max_bytes = spool.max_bytes
        self._block = memoryview(bytearray(_SPOOL_BLOCK))
        try:
            self._file = tempfile.TemporaryFile(buffering=0, dir=spool.folder or None)  # noqa: SIM115
        except OSError as error:
            raise _storage_full(error) from error

    def free_space(self) -> memoryview:
        return self._block[: min(_SPOOL_BLOCK, self.length - self.size)]

    def advance(self, count: int) -> None:
        self.append(self._block[:count])

    def append(self, data: bytes | memoryview) -> None:
        """Raises HttpError 413 if the body is too large, 503 if all bodies take too much, 507 if the disk is full."""
        if self.size + len(data) > self._max_bytes:
            raise too_large(self._max_bytes)
        self._memory.reserve(len(data), self.size + len(data))
        self.size += len(data)
        view = memoryview(data)
        try:
            while len(view):
                view = view[self._file.write(view) :]
        except OSError as error:
            raise _storage_full(error) from error

    def take(self) -> Buffer:
        """Return the bytes, which stay in the file."""
        if not self.size:
            return b""
        return memoryview(mmap.mmap(self._file.fileno(), self.size, access=mmap.ACCESS_READ))

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()  # the memory that `take` has returned stays


def _storage_full(error: OSError) -> HttpError:
    return HttpError(507, f"the upload cannot be stored: {error.strerror or error}", (("connection", "close"),))


def fixed_body(length: int, memory: BodyMemory, spool: Spool | None) -> FixedBody | SpooledBody:
    """Return what receives a body of known length."""
    return FixedBody(length, memory) if spool is None or length <= SMALL_SPOOL else SpooledBody(length, memory, spool)


def growing_body(max_bytes: int, memory: BodyMemory, spool: Spool | None) -> GrowingBody | SpooledBody:
    """Return what receives a body of unknown length."""
    return GrowingBody(max_bytes, memory) if spool is None else SpooledBody(-1, memory, spool)


def too_large(max_bytes: int) -> HttpError:
    return HttpError(413, f"the body is larger than the limit of {max_bytes} bytes", (("connection", "close"),))
