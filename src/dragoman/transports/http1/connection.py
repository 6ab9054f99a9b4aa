"""One HTTP/1.1 connection: responds to requests in order, within its timeouts.

Nearly every read of a client that keeps its connection is one small request. `_respond_at_once` finds its headers in
a cache, begins the request in the application and writes the response, without leaving `buffer_updated`. Everything
else goes through the `RequestReader`: `_advance` takes one of its events after the other, the next request once the
response to the last one is complete. A large request first waits for its turn (`LoopBudget`). A response that is not
there at once is a coroutine, which `_run` makes a task of; meanwhile reading goes on until a little of the next
requests is held.

The stage says what the connection waits for while it responds to nothing, and so which timeout holds. While it
responds (`_is_responding`) that is the writer's, for a client that reads nothing.

    stage    waits for                         until
    NEW      the first request                 its headers have begun, or it has been handled
    IDLE     the next request                  its headers have begun
    HEAD     the rest of headers               they are complete
    BODY     the rest of a body                it is complete
    LINGER   the client to read an error that  it disconnects
             was sent before its body had come
    GONE     nothing: it is closed
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from functools import partial
from typing import Any

from dragoman.core.sizes import INLINE
from dragoman.protocols.wire import HttpError, HttpRequest, HttpResponse
from dragoman.system.coroutines import Start
from dragoman.system.request_context import new_context, new_number, variables_of
from dragoman.transports.clients import TOO_MANY_CONNECTIONS
from dragoman.transports.executor import LoopBudget, ReadLimiter, is_large
from dragoman.transports.http1.admission import RequestAdmission
from dragoman.transports.http1.headers import NO_HEADERS, Http1Headers
from dragoman.transports.http1.request_reader import Http1Context, Http1Request, RejectedRequest, RequestReader
from dragoman.transports.http1.response_headers import ResponseHeaderWriter
from dragoman.transports.http1.response_writer import Http1ResponseWriter, StreamFlushes
from dragoman.transports.http1.timeouts import Stage, deadline_s
from dragoman.transports.listener import Listener, end_output

log = logging.getLogger("dragoman.http")

# Bytes of pipelined requests that are held while a response is in progress; then reading pauses.
_MAX_PIPELINED_BYTES = 1 << 14
# Requests of one connection that are handled in an iteration of the event loop.
_MAX_REQUESTS = 16


class Http1Connection(asyncio.BufferedProtocol):
    """Passes requests to the application and its responses to the transport."""

    __slots__ = (
        "_admission",
        "_body_size",
        "_budget",
        "_context",
        "_ignores_input",
        "_is_health_only",
        "_is_idle",
        "_is_queued",
        "_is_responding",
        "_is_scheduled",
        "_last_headers",
        "_listener",
        "_read_limiter",
        "_reader",
        "_reading",
        "_since_s",
        "_stage",
        "_task",
        "_transport",
        "_unread",
        "_writer",
        "slot",
    )

    def __init__(
        self,
        context: Http1Context,
        outgoing: ResponseHeaderWriter,
        flushes: StreamFlushes,
        budget: LoopBudget,
        listener: Listener,
    ) -> None:
        self.slot = 0
        self._context = context
        self._budget = budget
        self._listener = listener
        self._admission = admission = RequestAdmission(context.application)
        self._reader = RequestReader(context, admission.check)
        self._writer = Http1ResponseWriter(outgoing, flushes, context.counters, listener.loop)
        self._writer.draining = listener.draining
        self._transport: Any = None
        self._stage = Stage.NEW
        self._since_s = 0.0  # start of the stage
        self._is_responding = False
        self._task: asyncio.Task[None] | None = None  # that responds, unless the response was ready at once
        self._body_size = 0  # of the request that is responded to
        self._unread = 0  # bytes of responses that are counted because the client does not read them
        self._is_scheduled = False  # `_advance` will be called
        self._is_queued = False  # the request waits for a later iteration of the event loop
        self._is_idle = False  # the next byte is the first one of a request
        self._last_headers = NO_HEADERS  # of the last request that was handled by `_respond_at_once`
        self._ignores_input = False
        self._reading = True
        # Only of a connection with large requests, which it references: the garbage collector is slow for thousands.
        self._read_limiter: ReadLimiter | None = None
        self._is_health_only = False  # only health checks are accepted

    # --- called by the transport --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = self._admission.transport = transport
        self._writer.open(transport)
        if self._ignores_input:  # the server stopped before the connection was made
            transport.close()
        if not self._listener.admits(self, transport):
            self._is_health_only = self._writer.draining = True
        self._enter_stage(Stage.NEW)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._context.scratch if self._is_idle or self._ignores_input else self._reader.free_space()

    def buffer_updated(self, nbytes: int) -> None:
        self._context.counters.received += nbytes
        if self._is_idle:
            data = bytes(self._context.scratch[:nbytes])
            if self._respond_at_once(data):
                return
            self._is_idle = False
            self._reader.append(data)
            self._advance()
        elif not self._ignores_input:
            if self._reader.advance(nbytes):
                self._advance()
            if nbytes >= INLINE:
                if self._read_limiter is None:
                    self._read_limiter = ReadLimiter(self._budget, self._read_or_wait)
                self._read_limiter.count(nbytes)

    def begin(self, data: bytes) -> None:
        self._context.counters.received += len(data)
        self._reader.append(data)
        self._advance()

    def eof_received(self) -> bool:
        return False  # the transport closes once all is written

    def pause_writing(self) -> None:
        self._is_idle = False
        self._writer.pause()
        self._count(max(0, self._writer.size - self._body_size))  # a part keeps the whole response in memory
        self._listener.wheel.watch(self, self._listener.loop.time() + self._context.limits.write_timeout_s)

    def resume_writing(self) -> None:
        self._writer.resume()
        self._count(0)
        if not self._is_responding and not self._ignores_input:
            self._since_s = self._listener.loop.time()
            self._schedule()

    def _count(self, unread: int) -> None:
        self._context.bodies.count_unread(unread - self._unread)
        self._unread = unread

    def connection_lost(self, exc: Exception | None) -> None:
        self._count(0)
        self._ignore_input()
        self._read_limiter = None  # a cycle would keep the connection until the next full garbage collection
        self._stage = Stage.GONE
        self._listener.wheel.forget(self)
        if self._task is None:
            self._listener.remove(self)
        elif not self._writer.is_disconnected:
            self._task.cancel()
        self._writer.is_disconnected = True

    # --- requests -----------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._listener.loop.call_soon(self._run_scheduled)

    def _run_scheduled(self) -> None:
        self._is_scheduled = False
        self._advance()

    def _advance(self) -> None:
        """Handle the requests that have arrived."""
        try:
            count, reader = 0, self._reader
            while not (self._is_responding or self._ignores_input or self._writer.is_paused):
                if count:
                    if self._transport.is_closing():
                        break
                    if count == _MAX_REQUESTS:
                        self._schedule()
                        break
                event = reader.next()
                if event is None:
                    break
                count += 1
                if type(event) is Http1Request:
                    self._start_request(event)
                elif type(event) is RejectedRequest:
                    self._reject(event)
                else:
                    self._writer.send_continue()
            if not self._ignores_input:
                self._update_stage(count)
        except Exception:
            log.exception("HTTP/1.1 connection failed")
            self._abort()

    def _respond_at_once(self, data: bytes) -> bool:
        """Respond if `data` is one complete, plain request; return whether it is.

        This is the shortest path, for clients that keep their connection and send one small request after the other.
        """
        context, head, admission = self._context, self._last_headers, self._admission
        if len(data) != head.whole or not data.startswith(head.raw):
            head = self._last_headers = context.heads.get(data[: data.find(b"\r\n\r\n") + 4], NO_HEADERS)
            if len(data) != head.whole:
                return False
        if context.bodies.is_over_limit:
            return False
        writer, running = self._writer, context.running
        try:
            match: Any = head.match
            writer.context = running.context = new_number()
            if admission.is_needed and (error := admission.check(head)) is not None:
                response: Any = context.application.reject(error, head.summary(writer.context))
            else:
                body = data[head.size :]
                application = admission.application if admission.is_needed else context.application
                request = HttpRequest(
                    head.method,
                    head.path,
                    match.params,
                    head.headers,
                    body,
                    head.query,
                    writer.context,
                    application.caller,
                )
                response = copy_context().run(application.begin, match, request, writer)
            if type(response) is HttpResponse:
                self._since_s = now_s = self._listener.loop.time()
                writer.write_plain(head, response, now_s)
                if writer.close:
                    self._end_response(unread=False)
            else:
                self._respond_later(response, head)
        except Exception:
            log.exception("HTTP/1.1 connection failed")
            self._abort()
        finally:
            running.context = ()
        return True

    def _respond_later(self, responding: Any, head: Http1Headers) -> None:
        """Run a coroutine that responds; the body of the request is counted from now on."""
        self._is_idle = False
        self._writer.begin(head)
        try:
            self._context.bodies.reserve(head.length)
        except HttpError as error:
            responding.close()
            self._reject(RejectedRequest(None, error, fatal=True))
            return
        self._is_responding, self._body_size = True, head.length
        self._run(responding)
        if not self._ignores_input:
            self._update_stage(1)

    def _update_stage(self, handled: int) -> None:
        """Set the stage after `handled` requests, and pause or resume reading."""
        reader = self._reader
        if not (self._is_responding or self._is_scheduled or self._writer.is_paused):
            stage = Stage.BODY if reader.in_body else Stage.HEAD if reader.unparsed_size else Stage.IDLE
            if stage is Stage.IDLE:
                self._is_idle = not self._writer.draining
                if handled:
                    self._stage = stage
            elif handled or stage is not self._stage:
                self._enter_stage(stage)
        self._read_or_wait()

    def _read_or_wait(self) -> None:
        limiter = self._read_limiter
        reading = self._ignores_input or (
            self._reader.unparsed_size < _MAX_PIPELINED_BYTES and not (limiter is not None and limiter.is_paused)
        )
        if reading is not self._reading and not self._transport.is_closing():
            self._set_reading(reading)

    def _set_reading(self, reading: bool) -> None:
        self._reading = reading
        transport = self._transport
        (transport.resume_reading if reading else transport.pause_reading)()

    def _enter_stage(self, stage: Stage) -> None:
        self._stage = stage
        self._since_s = self._listener.loop.time()
        self._listener.wheel.watch(self, deadline_s(stage, self._since_s, 0, self._context.limits))

    def _reject(self, rejected: RejectedRequest) -> None:
        head = rejected.head
        self._identify(head)
        response = self._context.application.reject(rejected.error, (head or NO_HEADERS).summary(self._writer.context))
        self._writer.begin(head)
        self._writer.write_whole(response, sum(map(len, response.body)), close=rejected.fatal)
        self._end_response(unread=rejected.fatal)

    # --- one request --------------------------------------------------------------------------------------------

    def _start_request(self, event: Http1Request) -> None:
        head = event.head
        match: Any = head.match
        if head.whole >= 0:
            self._last_headers = head
        if self._is_health_only and not match.health:
            self._context.bodies.release(len(event.body))
            self._reject(RejectedRequest(head, TOO_MANY_CONNECTIONS, fatal=True))
            return
        self._identify(head)
        self._is_responding, self._body_size = True, len(event.body)
        self._writer.begin(head)
        context, caller = self._writer.context, self._admission.application.caller
        request = HttpRequest(
            head.method, head.path, match.params, head.headers, event.body, head.query, context, caller
        )
        if self._body_size > INLINE:
            self._is_queued = not self._budget.run(partial(self._respond_in_turn, head, request))
        else:
            self._respond(head, request)

    def _identify(self, head: Http1Headers | None) -> None:
        """Give a request the client's id or a new one."""
        self._writer.context = new_context("" if head is None else head.request_id)

    def _respond_in_turn(self, head: Http1Headers, request: HttpRequest) -> None:
        """Respond to a large request, whose client may have disconnected while it was queued."""
        queued, self._is_queued = self._is_queued, False
        try:
            if self._writer.is_disconnected:
                self._finish(None)
            else:
                self._respond(head, request)
        except Exception:
            log.exception("HTTP/1.1 connection failed")
            self._abort()
        if queued:
            self._advance()

    def _respond(self, head: Http1Headers, request: HttpRequest) -> None:
        writer, application = self._writer, self._admission.application
        match: Any = head.match
        at_once = head.plain and not is_large(request)
        self._context.running.context = writer.context
        try:
            response: Any = copy_context().run(application.begin, match, request, writer) if at_once else None
        finally:
            self._context.running.context = ()
        if type(response) is HttpResponse:
            self._context.bodies.release(self._body_size)
            self._is_responding, self._body_size = False, 0
            writer.write_plain(head, response, self._listener.loop.time())
            self._end_response(unread=False)
        else:
            self._run(response or application.answer(match, request, writer))

    def _run(self, responding: Coroutine[Any, Any, None]) -> None:
        start = Start(responding, self._listener.loop, variables_of(self._writer.context))
        self._task = start.task
        if start.task is not None:
            start.task.add_done_callback(self._task_done)
        else:
            self._finish(start.error)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        self._finish(None if task.cancelled() else task.exception())
        if self._stage is Stage.GONE:
            self._listener.remove(self)
        else:
            self._advance()

    def _finish(self, error: BaseException | None) -> None:
        """The application has responded; `error` is an unexpected one."""
        self._context.bodies.release(self._body_size)
        self._is_responding, self._body_size = False, 0
        if error is not None and not isinstance(error, asyncio.CancelledError):
            log.error("HTTP/1.1 connection failed", exc_info=error)
            self._abort()
        elif self._writer.is_disconnected:
            self._ignore_input()
        elif self._writer.started:
            self._end_response(unread=False)
        else:
            self._abort()

    def _end_response(self, *, unread: bool) -> None:
        """Wait for the next request, or close after the last response. `unread`: the client may still be sending."""
        if not self._writer.close and not self._writer.draining:
            self._stage = Stage.IDLE
            self._since_s = self._listener.loop.time()
            return
        unread = unread or self._reader.unparsed_size > 0
        self._ignore_input()
        if unread:
            # Closing at once could discard the response before the client has read it.
            end_output(self._transport)
            self._set_reading(True)
            self._enter_stage(Stage.LINGER)
        else:
            self._transport.close()

    def _ignore_input(self) -> None:
        self._is_idle, self._ignores_input = False, True
        self._reader.drop()

    def _abort(self) -> None:
        self._ignore_input()
        self._writer.abort()

    # --- timeouts and shutdown ----------------------------------------------------------------------------------

    def check_timeouts(self, now_s: float) -> float:
        limits = self._context.limits
        if self._writer.is_paused:
            return self._writer.check_timeouts(now_s, limits.write_timeout_s, self._listener.warnings)
        if self._is_responding or self._is_scheduled:
            return now_s + limits.header_timeout_s
        deadline = deadline_s(self._stage, self._since_s, self._reader.body_size, limits)
        if now_s < deadline:
            return deadline
        error = self._stage.timeout_error(limits, self._reader.body_size)
        if error is not None:
            self._reject(RejectedRequest(None, error, fatal=True))
        elif self._transport.get_write_buffer_size():
            self._transport.abort()  # close() would wait for a client that does not read its last response
        else:
            self._transport.close()
        return 0.0

    def drain(self) -> None:
        self._is_idle = False
        self._writer.draining = True
        if not (self._is_responding or self._ignores_input or self._reader.in_body):
            self._ignore_input()
            if self._transport is not None:
                self._transport.close()

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def http1(context: Http1Context) -> Callable[[Listener], Http1Connection]:
    """Return the function with which a `Listener` creates HTTP/1.1 connections."""
    outgoing, flushes, budget = ResponseHeaderWriter(), StreamFlushes(), context.application.executor.budget
    return lambda listener: Http1Connection(context, outgoing, flushes, budget, listener)
