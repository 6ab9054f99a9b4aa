"""One HTTP/1.1 connection: answers requests in order, within its timeouts."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from functools import partial
from typing import Any

from dragoman.protocols.wire import HttpError, HttpRequest, HttpResponse
from dragoman.system.coroutines import Start
from dragoman.transports.executor import is_large
from dragoman.transports.http1.headers import NO_HEAD, Http1Headers
from dragoman.transports.http1.request_reader import Http1Context, Http1Request, RejectedRequest, RequestReader
from dragoman.transports.http1.response_headers import ResponseHeaderWriter
from dragoman.transports.http1.response_writer import Http1ResponseWriter
from dragoman.transports.http1.timeouts import Stage, due_s
from dragoman.transports.listener import Listener
from dragoman.transports.loop_budget import LARGE_MESSAGE, LoopBudget, ReadLimiter
from dragoman.transports.reserve import TOO_MANY_CONNECTIONS

log = logging.getLogger("dragoman.http")

# How many bytes of further requests may wait for the one under way, before no more are read.
_AHEAD = 1 << 14
# How many requests of one connection are answered in a turn of the loop, so that others have theirs.
_TURNS = 16


class Http1Connection(asyncio.BufferedProtocol):
    """Moves bytes between a transport, what they mean, and the application."""

    __slots__ = (
        "_asking",
        "_budget",
        "_calm",
        "_context",
        "_held",
        "_incoming",
        "_later",
        "_listener",
        "_out",
        "_over",
        "_queued",
        "_read_limiter",
        "_reading",
        "_reserved",
        "_since_s",
        "_stage",
        "_task",
        "_transport",
        "_unread",
        "_usual",
        "slot",
    )

    def __init__(
        self, context: Http1Context, outgoing: ResponseHeaderWriter, budget: LoopBudget, listener: Listener
    ) -> None:
        self.slot = 0
        self._context = context
        self._budget = budget
        self._listener = listener
        self._incoming = RequestReader(context)
        self._out = Http1ResponseWriter(outgoing, listener.loop)
        self._out.draining = listener.draining
        self._transport: Any = None
        self._stage = Stage.NEW  # what is awaited,
        self._since_s = 0.0  # and since when
        self._asking = False  # a request is under way,
        self._task: asyncio.Task[None] | None = None  # in this task, unless it is answered at once,
        self._held = 0  # and its body has so many bytes
        self._unread = 0  # bytes of its answer that are counted, as the client does not take them
        self._later = False  # `_advance` will be called
        self._queued = False  # the request under way waits for a later turn of the loop
        self._calm = False  # nothing is under way, and what comes next is the first byte of a request
        self._usual = NO_HEAD  # that of the last whole, plain request
        self._over = False  # nothing that comes is looked at any more
        self._reading = True
        self._read_limiter = ReadLimiter(budget, self._read_or_wait)
        self._reserved = False  # for a health check alone

    # --- what the transport tells -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._out.open(transport)
        if self._over:  # the server stopped before the connection was made
            transport.close()
        if not self._listener.admits(self, transport):
            self._reserved = self._out.draining = True
        self._enter(Stage.NEW)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._context.scratch if self._calm or self._over else self._incoming.room()

    def buffer_updated(self, nbytes: int) -> None:
        if self._calm:
            data = bytes(self._context.scratch[:nbytes])
            if self._is_answered(data):
                return
            self._calm = False
            self._incoming.put(data)
            self._advance()
        elif not self._over:
            if self._incoming.came(nbytes):
                self._advance()
            if nbytes >= LARGE_MESSAGE:
                self._read_limiter.count(nbytes)

    def begin(self, data: bytes) -> None:
        self._incoming.put(data)
        self._advance()

    def eof_received(self) -> bool:
        return False  # the transport closes, when what was written is gone

    def pause_writing(self) -> None:
        self._calm = False
        self._out.pause()
        self._count(max(0, self._out.size - self._held))  # all of it, for a part that is left keeps the whole
        self._listener.wheel.watch(self, self._listener.loop.time() + self._context.limits.write_timeout_s)

    def resume_writing(self) -> None:
        self._out.resume()
        self._count(0)
        if not self._asking and not self._over:
            self._since_s = self._listener.loop.time()
            self._soon()

    def _count(self, unread: int) -> None:
        self._context.bodies.keep(unread - self._unread)
        self._unread = unread

    def connection_lost(self, exc: Exception | None) -> None:
        self._count(0)
        self._stop_listening()
        self._stage = Stage.GONE
        self._listener.wheel.forget(self)
        if self._task is None:
            self._listener.lost(self)
        elif not self._out.left:
            self._task.cancel()
        self._out.left = True

    # --- what comes in ------------------------------------------------------------------------------------------

    def _soon(self) -> None:
        if not self._later:
            self._later = True
            self._listener.loop.call_soon(self._resumed)

    def _resumed(self) -> None:
        self._later = False
        self._advance()

    def _advance(self) -> None:
        """Answer what is there, as far as that goes."""
        try:
            turns, out, incoming = 0, self._out, self._incoming
            while not (self._asking or self._over or out.choked):
                if turns:
                    if self._transport.is_closing():
                        break
                    if turns == _TURNS:
                        self._soon()
                        break
                arrival = incoming.next()
                if arrival is None:
                    break
                turns += 1
                if type(arrival) is Http1Request:
                    self._ask(arrival)
                elif type(arrival) is RejectedRequest:
                    self._refuse(arrival)
                else:
                    self._out.go_on()
            if not self._over:
                self._settle(turns)
        except Exception:
            log.exception("a connection failed")
            self._hang_up()

    def _is_answered(self, data: bytes) -> bool:
        """Answer one whole, plain request in the fewest steps; False where these bytes are anything else.

        Most are such: what a client on a kept connection sends again and again, answered without waiting.
        """
        context, head = self._context, self._usual
        if len(data) != head.whole or not data.startswith(head.raw):
            head = self._usual = context.heads.known(data[: data.find(b"\r\n\r\n") + 4], NO_HEAD)
        if len(data) != head.whole or context.bodies.over:
            return False
        try:
            match: Any = head.match
            request = HttpRequest(head.method, head.path, match.params, head.headers, data[len(head.raw) :], head.query)
            done = copy_context().run(context.application.begin, match, request, self._out)
            if type(done) is HttpResponse:
                self._since_s = self._listener.loop.time()
                self._out.write_plain(head, done)
                if self._out.close:
                    self._turn_over(unread=False)
            else:
                self._wait_for(done, head)
        except Exception:
            log.exception("a connection failed")
            self._hang_up()
        return True

    def _wait_for(self, answering: Any, head: Http1Headers) -> None:
        """The answer to a request takes its time; its body counts from now on."""
        self._calm = False
        self._out.begin(head)
        try:
            self._context.bodies.take(head.length)
        except HttpError as fault:
            answering.close()
            self._refuse(RejectedRequest(None, fault, fatal=True))
            return
        self._asking, self._held = True, head.length
        self._run(answering)
        if not self._over:
            self._settle(1)

    def _settle(self, turns: int) -> None:
        """Note what is awaited now, and read no further ahead than is good."""
        incoming = self._incoming
        if not (self._asking or self._later or self._out.choked):
            stage = Stage.BODY if incoming.in_body else Stage.HEAD if incoming.waiting else Stage.IDLE
            if stage is Stage.IDLE:
                self._calm = not self._out.draining
                if turns:
                    self._stage = stage
            elif turns or stage is not self._stage:
                self._enter(stage)
        self._read_or_wait()

    def _read_or_wait(self) -> None:
        reading = self._over or (self._incoming.waiting < _AHEAD and not self._read_limiter.is_paused)
        if reading is not self._reading and not self._transport.is_closing():
            self._read(reading)

    def _read(self, reading: bool) -> None:
        self._reading = reading
        transport = self._transport
        (transport.resume_reading if reading else transport.pause_reading)()

    def _enter(self, stage: Stage) -> None:
        """From now on this is awaited."""
        self._stage = stage
        self._since_s = self._listener.loop.time()
        self._listener.wheel.watch(self, due_s(stage, self._since_s, 0, self._context.limits))

    def _refuse(self, refused: RejectedRequest) -> None:
        head = refused.head
        protocol = head.match.protocol if head is not None and head.match is not None else None
        response = self._context.application.refusal(refused.fault, protocol)
        self._out.begin(head)
        self._out.write_whole(response, sum(map(len, response.body)), close=refused.fatal)
        self._turn_over(unread=refused.fatal)

    # --- the request under way ----------------------------------------------------------------------------------

    def _ask(self, asked: Http1Request) -> None:
        head = asked.head
        match: Any = head.match
        if self._reserved and not match.health:
            self._context.bodies.give_back(len(asked.body))
            self._refuse(RejectedRequest(head, TOO_MANY_CONNECTIONS, fatal=True))
            return
        self._asking, self._held = True, len(asked.body)
        self._out.begin(head)
        request = HttpRequest(head.method, head.path, match.params, head.headers, asked.body, head.query)
        if self._held > LARGE_MESSAGE:
            self._queued = not self._budget.run(partial(self._answer_in_turn, head, request))
        else:
            self._answer(head, request)

    def _answer_in_turn(self, head: Http1Headers, request: HttpRequest) -> None:
        """Answer a large request, whose client may have left while it was queued."""
        queued, self._queued = self._queued, False
        try:
            if self._out.left:
                self._answered(None)
            else:
                self._answer(head, request)
        except Exception:
            log.exception("a connection failed")
            self._hang_up()
        if queued:
            self._advance()

    def _answer(self, head: Http1Headers, request: HttpRequest) -> None:
        out, application = self._out, self._context.application
        match: Any = head.match
        at_once = head.plain and not is_large(request)
        done: Any = copy_context().run(application.begin, match, request, out) if at_once else None
        if type(done) is HttpResponse:
            self._context.bodies.give_back(self._held)
            self._asking, self._held = False, 0
            out.write_plain(head, done)
            self._turn_over(unread=False)
        else:
            self._run(done or application.answer(match, request, out))

    def _run(self, answering: Coroutine[Any, Any, None]) -> None:
        start = Start(answering, self._listener.loop)
        self._task = start.task
        if start.task is not None:
            start.task.add_done_callback(self._done)
        else:
            self._answered(start.error)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        self._answered(None if task.cancelled() else task.exception())
        if self._stage is Stage.GONE:
            self._listener.lost(self)
        else:
            self._advance()

    def _answered(self, fault: BaseException | None) -> None:
        """The request under way is done with; a fault is one of the application itself."""
        self._context.bodies.give_back(self._held)
        self._asking, self._held = False, 0
        if fault is not None and not isinstance(fault, asyncio.CancelledError):
            log.error("a connection failed", exc_info=fault)
            self._hang_up()
        elif self._out.left:
            self._stop_listening()
        elif self._out.started:
            self._turn_over(unread=False)
        else:
            self._hang_up()

    def _turn_over(self, *, unread: bool) -> None:
        """An answer was written; the next request is awaited, unless it was the last."""
        if not self._out.close and not self._out.draining:
            self._stage = Stage.IDLE
            self._since_s = self._listener.loop.time()
            return
        unread = unread or self._incoming.waiting > 0
        self._stop_listening()
        if unread:
            # To close at once would lose a client that still sends the answer.
            if self._transport.can_write_eof():
                self._transport.write_eof()
            self._read(True)
            self._enter(Stage.LINGER)
        else:
            self._transport.close()

    def _stop_listening(self) -> None:
        self._calm, self._over = False, True
        self._incoming.drop()

    def _hang_up(self) -> None:
        self._stop_listening()
        self._out.hang_up()

    # --- patience, and the end of the server --------------------------------------------------------------------

    def overdue(self, now_s: float) -> float:
        limits = self._context.limits
        if self._out.choked:
            return self._out.overdue(now_s, limits.write_timeout_s)
        if self._asking or self._later:
            return now_s + limits.header_timeout_s
        due = due_s(self._stage, self._since_s, self._incoming.held, limits)
        if now_s < due:
            return due
        fault = self._stage.fault(limits, self._incoming.held)
        if fault is not None:
            self._refuse(RejectedRequest(None, fault, fatal=True))
        elif self._transport.get_write_buffer_size():
            self._transport.abort()  # to close would wait for a client that does not even read its last answer
        else:
            self._transport.close()
        return 0.0

    def drain(self) -> None:
        self._calm = False
        self._out.draining = True
        if not (self._asking or self._over or self._incoming.in_body):
            self._stop_listening()
            if self._transport is not None:
                self._transport.close()

    def cut(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def http1(context: Http1Context) -> Callable[[Listener], Http1Connection]:
    """The wire, for a listener."""
    outgoing, budget = ResponseHeaderWriter(), context.application.executor.budget
    return lambda listener: Http1Connection(context, outgoing, budget, listener)
