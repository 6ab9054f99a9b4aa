"""Sends the lines of a batch and writes their results to its journal, in order.

Lines have the lowest priority. While no calls of others have been queued or running for a second, as many run as the
gate lets through, shared equally by the keys that have some. Beside calls of others one line runs at a time, and then
none for four times as long as it took. A line that is rejected because the server is overloaded, not ready, or a limit
of the key is reached, is sent again later, and no further line of its batch is sent meanwhile.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec

from dragoman.core.errors import DragomanError
from dragoman.core.services import WireResponse
from dragoman_batches.input import Input, Line
from dragoman_batches.journal import Journal

# Statuses after which a line is sent again.
_RETRIED = (429, 503)
_FIRST_RETRY_S, _MAX_RETRY_S = 0.05, 30.0
# Time for which a server may say that it cannot answer before that is the result of a line.
_GIVE_UP_S = 600.0
# How much longer than a line took no other one is begun while there are calls of others.
_REST = 4.0
# Seconds after the last look that found calls of others for which there are some: clients send the next one soon.
CALM_S = 1.0
# Seconds between looks at whether there still are.
_LOOK_S = 0.005
# Lines that may be answered before the one that is written next.
_MAX_AHEAD = 4
# Bytes of results that wait to be written; then no further line is begun.
_MAX_UNWRITTEN_BYTES = 16 << 20
# Time for lines that run when a batch is cancelled.
_CANCEL_S = 10.0

Send = Callable[[str, bytes, str], Awaitable[WireResponse]]
FormatLine = Callable[[int, str, WireResponse], bytes]


class LineGate:
    """Lets lines through, of all batches of a server. limit: how many run at once. is_busy: whether others wait."""

    def __init__(
        self,
        limit: int,
        is_busy: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        calm_s: float = CALM_S,
    ) -> None:
        self.limit, self._is_busy, self._clock, self._calm_s = limit, is_busy, clock, calm_s
        self._batches: Counter[str] = Counter()  # that run, by owner
        self._running: Counter[str] = Counter()  # lines, by owner
        self.running = 0
        self._rests_until_s = 0.0
        self._busy_until_s = -math.inf
        self._waiting: list[asyncio.Future[None]] = []

    def open(self, owner: str) -> None:
        self._batches[owner] += 1

    def close(self, owner: str) -> None:
        self._batches[owner] -= 1
        if not self._batches[owner]:
            del self._batches[owner]

    async def enter(self, owner: str) -> None:
        """Wait until a line may be sent. `leave` follows."""
        while not self.try_enter(owner):
            await self._change()

    def try_enter(self, owner: str) -> bool:
        """Return whether a line may be sent now, which then has to `leave`."""
        if not self._has_place(owner):
            return False
        self._running[owner] += 1
        self.running += 1
        return True

    def leave(self, owner: str, took_s: float) -> None:
        self._running[owner] -= 1
        self.running -= 1
        self._rests_until_s = self._clock() + _REST * took_s
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                each.set_result(None)

    def _has_place(self, owner: str) -> bool:
        share = max(1, self.limit // max(1, len(self._batches)))
        if self.running >= self.limit or self._running[owner] >= share:
            return False
        now_s = self._clock()
        if self._is_busy():
            self._busy_until_s = now_s + self._calm_s
        return now_s >= self._busy_until_s or (not self.running and now_s >= self._rests_until_s)

    async def _change(self) -> None:
        changing = asyncio.get_running_loop().create_future()
        self._waiting.append(changing)
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await changing


class LineRun:
    """One run of the lines of a batch that have no result yet.

    send: sends a body to a path under an id. format_line: returns the line for a result, in the form of an API.
    deadline_s: Unix time after which no line is begun. line_id: returns the id of the request of a line.
    """

    def __init__(
        self,
        lines: Input,
        journal: Journal,
        send: Send,
        format_line: FormatLine,
        gate: LineGate,
        *,
        owner: str = "",
        deadline_s: float,
        line_id: Callable[[int], str],
    ) -> None:
        self._lines, self._journal, self._gate, self._owner = lines, journal, gate, owner
        self._send, self._format, self._line_id = send, format_line, line_id
        self._deadline_s = deadline_s
        self._results: dict[int, bytes] = {}  # not written yet, by line
        self._result_bytes = 0
        self._next = journal.lines  # the line to write next
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._can_go_on = asyncio.Event()
        self._stop = asyncio.Event()
        self._error: BaseException | None = None
        self._refused = 0  # lines that wait until they are sent again

    def stop(self) -> None:
        """Begin no further line."""
        self._stop.set()

    async def run(self) -> None:
        """Return when all lines have a result, the deadline has passed, or `stop` was called.

        Raises StorageFull or ServerError if results cannot be written, and the errors of `send`.
        """
        writing = asyncio.create_task(self._write())
        self._gate.open(self._owner)
        try:
            await self._send_lines()
            if self._tasks:
                stops = self._stop.is_set() or self._error is not None
                await asyncio.wait({*self._tasks}, timeout=_CANCEL_S if stops else None)
        finally:
            self._gate.close(self._owner)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
        if self._error is None:
            await self._append()
        if self._error is not None:
            raise self._error

    async def _send_lines(self) -> None:
        stopping = asyncio.create_task(self._stop.wait())
        try:
            for number in range(self._next, len(self._lines)):
                # One line in each iteration of the event loop, in which requests of others have their turn.
                await asyncio.sleep(0)
                if self._stop.is_set() or not (self._may_send(number) and self._gate.try_enter(self._owner)):
                    entering = asyncio.ensure_future(self._enter(number))
                    await asyncio.wait({entering, stopping}, return_when=asyncio.FIRST_COMPLETED)
                    if not await self._has_entered(entering):
                        return
                task = asyncio.create_task(self._answer(number))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        finally:
            stopping.cancel()

    async def _has_entered(self, entering: asyncio.Future[bool]) -> bool:
        """Return whether a line has a place of the gate, which it leaves if the run was stopped meanwhile."""
        if not entering.done():
            entering.cancel()
        (has_place,) = await asyncio.gather(entering, return_exceptions=True)
        if has_place is True and self._stop.is_set():
            self._gate.leave(self._owner, 0.0)
            return False
        return has_place is True

    def _may_send(self, number: int) -> bool:
        """Return whether nothing in this batch holds a line back."""
        return (
            number - self._next < _MAX_AHEAD * self._gate.limit
            and self._result_bytes < _MAX_UNWRITTEN_BYTES
            and not self._refused
            and time.time() < self._deadline_s
        )

    async def _enter(self, number: int) -> bool:
        """Wait until a line may be sent; return False if none may be any more."""
        while not self._may_send(number):
            if time.time() >= self._deadline_s:
                return False
            self._can_go_on.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(0.25):
                    await self._can_go_on.wait()
        await self._gate.enter(self._owner)
        return True

    async def _answer(self, number: int) -> None:
        """Send a line until it has a result. It has a place of the gate."""
        try:
            line = self._lines.line(number)
            response = await self._send_until_accepted(number, line)
            if response is not None:
                self._results[number] = result = self._format(number, line.custom_id, response)
                self._result_bytes += len(result)
                self._changed.set()
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                raise
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._stop.set()

    async def _send_until_accepted(self, number: int, line: Line) -> WireResponse | None:
        delay_s, give_up_s = _FIRST_RETRY_S, time.monotonic() + _GIVE_UP_S
        body, line_id = bytes(line.body), self._line_id(number)
        while True:
            started_s = time.monotonic()
            try:
                response = STREAMED if _asks_for_stream(body) else await self._send(line.url, body, line_id)
            finally:
                self._gate.leave(self._owner, time.monotonic() - started_s)
            if response.status not in _RETRIED or (response.status == 503 and time.monotonic() > give_up_s):
                return response
            wait_s = min(max(delay_s, _retry_after_s(response)), _MAX_RETRY_S)
            delay_s = min(2 * delay_s, _MAX_RETRY_S)
            self._refused += 1
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._stop.wait()
                if self._stop.is_set() or time.time() >= self._deadline_s:
                    return None
                await self._gate.enter(self._owner)
            finally:
                self._refused -= 1
                self._can_go_on.set()

    async def _write(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._append()

    async def _append(self) -> None:
        """Write the results that follow the last one that is written."""
        ready: list[bytes] = []
        while self._next in self._results:
            ready.append(self._results.pop(self._next))
            self._next += 1
        if not ready or self._error is not None:
            return
        appending = asyncio.ensure_future(asyncio.to_thread(self._journal.append, ready))
        try:
            await asyncio.shield(appending)
        except asyncio.CancelledError:
            await asyncio.wait({appending})  # the journal is closed next
            if (error := appending.exception()) is not None:
                self._fail(error)
            raise
        except DragomanError as error:
            self._fail(error)
        self._result_bytes -= sum(map(len, ready))
        self._can_go_on.set()


class _StreamOption(msgspec.Struct):
    stream: Any = None


def _asks_for_stream(body: bytes) -> bool:
    if b'"stream"' not in body:
        return False
    try:
        return msgspec.json.decode(body, type=_StreamOption).stream is True
    except msgspec.DecodeError:
        return False


_ERROR = {
    "message": "`stream`: expected false in a batch, got true",
    "type": "invalid_request_error",
    "param": "stream",
}
STREAMED = WireResponse(400, {"content-type": "application/json"}, msgspec.json.encode({"error": _ERROR}))


def _retry_after_s(response: WireResponse) -> float:
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdecimal() and len(text) < 6 else 0.0
