"""A Unix stream socket that carries frames, on the event loop."""

import asyncio
import select
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice

from dragoman.workers.frames import Buffer, Frame, FrameKind, FrameParser, encode
from dragoman.workers.shared import Arena, View, is_lent

_AT_ONCE = 512  # pieces a system call; IOV_MAX is 1024


class Channel:
    """A socket that carries frames, on the running event loop.

    `received` gets each frame. `rest` is called when all that one turn of the loop brought has been received.
    `lost` is called once, when the other end is gone; a frame cut off by that is dropped. Asyncio's own transports
    would copy what does not fit into the socket at once. `memory` are the files of memory that both ends share: the one
    to write, and the one to read.
    """

    def __init__(
        self,
        sock: socket.socket,
        received: Callable[[Frame], None],
        lost: Callable[[], None],
        rest: Callable[[], None] | None = None,
        memory: tuple[int, int] | None = None,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._received = received
        self._lost = lost
        self._rest = rest
        self._arena = None if memory is None else Arena(memory[0])
        self._unused: deque[int] = deque()  # blocks of shared memory, appended to in any thread
        self._parser = FrameParser(None if memory is None else View(memory[1], self._block_unused))
        self._out: deque[Buffer] = deque()
        self._soon = False
        self._blocked = False
        self._drained: asyncio.Future[None] | None = None
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), self._turn)

    def _turn(self) -> None:
        self.read()
        if self._rest is not None:
            self._rest()

    def read(self) -> None:
        """Receive what has arrived, without waiting."""
        while not self.closed:
            room = self._parser.room()
            try:
                count = self._sock.recv_into(room)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                count = 0
            if not count:
                self.close()
                self._lost()
                return
            for frame in self._parser.take(count):
                if frame.kind == FrameKind.UNUSED and self._arena is not None:
                    for start in frame.value():
                        self._arena.free(start)
                else:
                    self._received(frame)
            if count < len(room):
                return

    def encode(self, kind: FrameKind, job: int = 0, value: object = None) -> list[Buffer]:
        """A frame for `send`, which has to be sent: large arrays are in shared memory by now."""
        return encode(kind, job, value, self._arena)

    def send(self, pieces: list[Buffer], *, now: bool = False) -> None:
        """Send a frame. Small ones gather until the loop's next turn; a large one shares memory, so it goes now."""
        if self.closed:
            return
        if self._unused:  # reported with the next frame
            blocks = [self._unused.popleft() for _ in range(len(self._unused))]
            self._out.extend(encode(FrameKind.UNUSED, 0, blocks))
        self._out.extend(pieces)
        if now or len(pieces) > 1:
            self.flush()
        elif not self._soon:
            self._soon = True
            self._loop.call_soon(self.flush)

    def _block_unused(self, start: int) -> None:
        """Remember a block of shared memory that nothing refers to any more; runs in any thread.

        The other end is told with the next frame, since it has no use for an arena's block before. A large array in
        memory of its own is freed by that, so it is told at once.
        """
        self._unused.append(start)
        if is_lent(start):
            with suppress(RuntimeError):  # the loop is closed, and the memory goes with the process
                self._loop.call_soon_threadsafe(self._send_unused)

    def _send_unused(self) -> None:
        if self._unused:
            self.send([])

    def flush(self) -> None:
        """Send as much as the system accepts."""
        self._soon = False
        while self._out:
            if not self._sent_some():
                if not self._blocked:
                    self._blocked = True
                    self._loop.add_writer(self._sock.fileno(), self.flush)
                return
        self._all_sent()

    def flush_all(self) -> None:
        """Send everything, and block while the system accepts nothing."""
        while self._out:
            if not self._sent_some():
                _wait_for_room(self._sock)
        self._all_sent()

    def _sent_some(self) -> bool:
        try:
            self._forget(self._sock.sendmsg(list(islice(self._out, _AT_ONCE))))
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:  # the other end is closed; what it has sent before can still be read
            self._out.clear()
        return True

    async def drain(self) -> None:
        """Wait until everything is sent."""
        self.flush()
        while self._out:
            if self._drained is None:
                self._drained = self._loop.create_future()
            await asyncio.shield(self._drained)

    def close(self) -> None:
        """Close the socket; `lost` is not called."""
        if self.closed:
            return
        self._loop.remove_reader(self._sock.fileno())
        self._out.clear()
        self._all_sent()
        self.closed = True
        self._sock.close()
        self._arena, self._parser = None, FrameParser()  # shared memory goes with what still refers to it

    def _forget(self, sent: int) -> None:
        while sent:
            first = self._out[0]
            if sent < len(first):
                self._out[0] = memoryview(first)[sent:]
                return
            sent -= len(first)
            self._out.popleft()

    def _all_sent(self) -> None:
        if self._blocked:
            self._blocked = False
            self._loop.remove_writer(self._sock.fileno())
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None


def _wait_for_room(sock: socket.socket) -> None:
    if hasattr(select, "poll"):  # `select` knows no file beyond the first 1024, and a server with many clients has more
        poll = select.poll()
        poll.register(sock, select.POLLOUT)
        poll.poll()
    else:
        select.select([], [sock], [])


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a channel, with large send buffers."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * 1024 * 1024)
    return ends


def receive(sock: socket.socket) -> Frame | None:
    """Return the next frame of a blocking socket, None at EOF. No other frame may follow it."""
    parser = FrameParser()
    while True:
        count = sock.recv_into(parser.room())
        if not count:
            return None
        for frame in parser.take(count):
            return frame
