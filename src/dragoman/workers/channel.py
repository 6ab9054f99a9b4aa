"""A Unix stream socket that carries frames, on the event loop."""

import asyncio
import logging
import select
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Protocol

from dragoman.system.call_times import NO_STAMPS, Stamps
from dragoman.workers.frames import Buffer, Frame, FrameKind, FrameParser, Serializer, encode, serialize
from dragoman.workers.shared_blocks import BlockReader, BlockWriter, is_buffer
from dragoman.workers.worker_messages import serialize_message

log = logging.getLogger("dragoman.worker")

_BUFFERS_PER_CALL = 512  # IOV_MAX is 1024


class ChannelSocket(Protocol):
    """The methods of a socket that a channel uses."""

    def setblocking(self, blocking: bool, /) -> None: ...

    def fileno(self) -> int: ...

    def recv_into(self, buffer: memoryview, /) -> int: ...

    def sendmsg(self, buffers: Sequence[Buffer], /) -> int: ...

    def close(self) -> None: ...


class Channel:
    """A socket that carries frames, on the running event loop.

    on_frame: called with each frame.
    on_close: called once when the other end has closed; a truncated frame is dropped.
    on_idle: called when all frames that one turn of the loop brought have been received.
    memory: the memory files that both ends share, the one to write and the one to read.
    serializer: serializes the values that `encode` gets.

    It is not an asyncio transport, because those copy what the socket does not accept at once.
    """

    def __init__(
        self,
        sock: ChannelSocket,
        on_frame: Callable[[Frame], None],
        on_close: Callable[[], None],
        on_idle: Callable[[], None] | None = None,
        memory: tuple[int, int] | None = None,
        serializer: Serializer = serialize,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._on_frame = on_frame
        self._on_close = on_close
        self._on_idle = on_idle
        self._serializer = serializer
        self.arena = None if memory is None else BlockWriter(memory[0])
        self._unused: deque[int] = deque()  # blocks of shared memory; appended to in any thread
        self._parser = FrameParser(None if memory is None else BlockReader(memory[1], self._record_unused))
        self._unsent: deque[Buffer] = deque()
        self._is_flush_scheduled = False
        self._is_blocked = False
        self._drained: asyncio.Future[None] | None = None
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), self._readable)

    def _readable(self) -> None:
        self.read()
        if self._on_idle is not None:
            self._on_idle()

    def read(self) -> None:
        """Receive what has arrived, without waiting."""
        while not self.closed:
            buffer = self._parser.buffer()
            try:
                count = self._sock.recv_into(buffer)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                count = 0
            if not count:
                self.close()
                self._on_close()
                return
            for frame in self._parse(count):
                self._on_frame(frame)
            if count < len(buffer):
                return

    def _parse(self, count: int) -> list[Frame]:
        """Return the frames that `count` further bytes complete, without those about shared memory.

        Bytes that are not frames close the channel, because the start of the next frame is unknown.
        """
        try:
            frames = self._parser.feed(count)
            for frame in frames:
                if frame.kind == FrameKind.UNUSED and self.arena is not None:
                    for number in frame.message():
                        self.arena.free(number)
            return [frame for frame in frames if frame.kind != FrameKind.UNUSED]
        except Exception:
            log.exception("closed the connection of a worker: invalid frame")
            self.close()
            self._on_close()
            return []

    def encode(self, kind: FrameKind, job: int = 0, value: object = None, stamps: Stamps = NO_STAMPS) -> list[Buffer]:
        """Return a frame that must be sent, because its large arrays are in shared memory now."""
        return encode(kind, job, value, self.arena, self._serializer, stamps)

    def send(self, frame: list[Buffer], *, now: bool = False) -> None:
        """Send a frame. A small one is sent at the next turn of the loop; one that refers to memory of arrays, now."""
        if self.closed:
            return
        if self._unused:
            blocks = [self._unused.popleft() for _ in range(len(self._unused))]
            self._unsent.extend(encode(FrameKind.UNUSED, 0, blocks, serializer=serialize_message))
        self._unsent.extend(frame)
        if now or len(frame) > 1:
            self.flush()
        elif not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            self._loop.call_soon(self.flush)

    def _record_unused(self, number: int) -> None:
        """Record a block of shared memory that is no longer referenced; runs in any thread.

        A block of the arena is reported with the next frame, because the other end has no use for it before. A shared
        buffer is reported at once, because that frees its memory.
        """
        self._unused.append(number)
        if is_buffer(number):
            with suppress(RuntimeError):  # the loop is closed, and the memory is freed with the process
                self._loop.call_soon_threadsafe(self._report_unused)

    def _report_unused(self) -> None:
        if self._unused:
            self.send([])

    def flush(self) -> None:
        """Send as much as the system accepts, and the rest later."""
        self._is_flush_scheduled = False
        while self._unsent:
            if not self._send_some():
                if not self._is_blocked:
                    self._is_blocked = True
                    self._loop.add_writer(self._sock.fileno(), self.flush)
                return
        self._all_sent()

    def flush_all(self) -> None:
        """Send everything, and block while the system accepts nothing."""
        while self._unsent:
            if not self._send_some():
                wait_until_writable(self._sock)
        self._all_sent()

    def _send_some(self) -> bool:
        """Return False if the system accepts nothing now."""
        try:
            sent = self._sock.sendmsg(list(islice(self._unsent, _BUFFERS_PER_CALL)))
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:  # the other end is closed; data that it has sent before can still be received
            self._unsent.clear()
            return True
        while sent:
            first = self._unsent[0]
            if sent < len(first):
                self._unsent[0] = memoryview(first)[sent:]
                break
            sent -= len(first)
            self._unsent.popleft()
        return True

    async def drain(self) -> None:
        """Wait until everything is sent."""
        self.flush()
        while self._unsent:
            if self._drained is None:
                self._drained = self._loop.create_future()
            await asyncio.shield(self._drained)

    def close(self) -> None:
        """Close the socket; `on_close` is not called."""
        if self.closed:
            return
        self._loop.remove_reader(self._sock.fileno())
        self._unsent.clear()
        self._all_sent()
        self.closed = True
        self._sock.close()
        self.arena, self._parser = None, FrameParser()  # shared memory is freed with the last array in it

    def _all_sent(self) -> None:
        if self._is_blocked:
            self._is_blocked = False
            self._loop.remove_writer(self._sock.fileno())
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None


def wait_until_writable(sock: "ChannelSocket") -> None:
    """Block until a socket accepts data."""
    if hasattr(select, "poll"):  # `select` supports only the first 1024 file descriptors
        poll = select.poll()
        poll.register(sock.fileno(), select.POLLOUT)
        poll.poll()
    else:
        select.select([], [sock.fileno()], [])


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a channel, with large send buffers."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * 1024 * 1024)
    return ends


def receive(sock: socket.socket) -> Frame | None:
    """Return the next frame of a blocking socket, None at EOF. No other frame may follow it."""
    parser = FrameParser()
    while True:
        count = sock.recv_into(parser.buffer())
        if not count:
            return None
        for frame in parser.feed(count):
            return frame
