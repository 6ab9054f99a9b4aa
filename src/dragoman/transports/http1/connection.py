"""One HTTP/1.1 connection: responds to requests in order, within its timeouts.

Nearly every read of a client that keeps its connection is one small request. `_respond_at_once` finds its headers in
a cache, begins the request in the application and writes the response, without leaving `buffer_updated`. Everything
else goes through the `RequestReader`: `_advance` takes one of its events after the other, the next request once the
response to the last one is complete. A large request first waits for its turn (`LoopBudget`). A response that is not
there at once is a coroutine, which `_run` makes a task of; meanwhile reading goes on until a little of the next
requests is held.

Stages up to BODY wait for the client, and have a timeout; in those from LINGER on, what the client sends is ignored.

    stage       waits for                                           becomes
    NEW         the first request                                   HEAD, BODY, QUEUED, RESPONDING
    BETWEEN     a look at what has arrived behind the last request  IDLE, HEAD, BODY, or the next request
    IDLE        the first byte of the next request                  as NEW; BETWEEN if the client stops reading
    HEAD        the rest of headers                                 BODY, QUEUED, RESPONDING
    BODY        the rest of a body, also of a rejected request      QUEUED, RESPONDING; IDLE if it was rejected
    QUEUED      the turn of a large request                         RESPONDING
    RESPONDING  the application                                     BETWEEN; LINGER or CLOSING after the last response
    LINGER      the client to read an error that was sent before    GONE
                its request had come
    CLOSING     the client to read the last response                GONE
    GONE        the task that responds, if there is one

Any stage becomes GONE when the connection is lost, and CLOSING when it fails. `drain` closes it up to HEAD, and after
the rest of a rejected body; otherwise the response is the last one. `retire` closes it after the next response whose
headers announce that, so that a client cannot be sending another request. A request that becomes a WebSocket makes it
GONE: a `WebSocketConnection` has the transport then.

Independent of the stage, the writer is paused while the client reads too slowly: its timeout holds then, and no request
is begun. Reading is paused while too much has arrived. A call of `_advance` is scheduled after many requests at once.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from functools import partial
from typing import Any, cast

from dragoman.core.errors import DragomanError, NotReady
from dragoman.core.sizes import INLINE
from dragoman.protocols.wire import HttpError, HttpRequest, HttpResponse
from dragoman.system.coroutines import Start
from dragoman.system.request_context import new_context, new_number, variables_of
from dragoman.transports.clients import TOO_MANY_CONNECTIONS, client_host
from dragoman.transports.executor import LoopBudget, ReadLimiter, is_large
from dragoman.transports.http1.admission import RequestAdmission
from dragoman.transports.http1.headers import NO_HEADERS, Http1Headers
from dragoman.transports.http1.request_reader import Http1Context, Http1Request, RejectedRequest, RequestReader
from dragoman.transports.http1.response_headers import ResponseHeaderWriter
from dragoman.transports.http1.response_writer import Http1ResponseWriter, StreamFlushes
from dragoman.transports.http1.timeouts import Stage, deadline_s
from dragoman.transports.listener import Listener, end_output
from dragoman.transports.routing import Match

log = logging.getLogger("dragoman.http")

# Bytes of pipelined requests that are held while a response is in progress; then reading pauses.
_MAX_PIPELINED_BYTES = 1 << 14
# Requests of one connection that are handled in an iteration of the event loop.
_MAX_REQUESTS = 16

NEW, BETWEEN, IDLE, HEAD, BODY, QUEUED, RESPONDING, LINGER, CLOSING, GONE = Stage


class Http1Connection(asyncio.BufferedProtocol):
    """Passes requests to the application and its responses to the transport."""

    __slots__ = (
        "_admission",
        "_body_size",
        "_budget",
        "_context",
        "_is_draining",
        "_is_health_only",
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
        self._writer.draining = listener.leaving  # whether the next response is the last one
        self._is_draining = listener.draining  # whether it closes without a further response
        self._transport: Any = None
        self._stage = NEW
        self._since_s = 0.0  # start of the stage
        self._task: asyncio.Task[None] | None = None  # that responds, unless the response was ready at once
        self._body_size = 0  # of the request that is responded to
        self._unread = 0  # bytes of responses that are counted because the client does not read them
        self._is_scheduled = False  # `_advance` will be called
        self._last_headers = NO_HEADERS  # of the last request that was handled by `_respond_at_once`
        self._reading = True
        # Only of a connection with large requests, which it references: the garbage collector is slow for thousands.
        self._read_limiter: ReadLimiter | None = None
        self._is_health_only = False  # only health checks are accepted

    # --- called by the transport --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = self._admission.transport = transport
        self._writer.open(transport, client_host(transport) if self._context.application.is_observed else "")
        if self._stage is CLOSING:  # the server stopped before the connection was made
            transport.close()
            return
        if not self._listener.admits(self, transport):
            self._is_health_only = self._is_draining = self._writer.draining = True
        self._enter_stage(NEW)

    def get_buffer(self, sizehint: int) -> memoryview:
        stage = self._stage
        return self._context.scratch if stage is IDLE or stage >= LINGER else self._reader.free_space()

    def buffer_updated(self, nbytes: int) -> None:
        self._context.counters.received += nbytes
        if self._stage is IDLE:
            data = self._context.scratch[:nbytes].tobytes()
            if self._respond_at_once(data):
                return
            self._stage = BETWEEN
            self._reader.append(data)
            self._advance()
        elif self._stage < LINGER:
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
        if self._stage is IDLE:
            self._stage = BETWEEN
        self._writer.pause()
        self._count(max(0, self._writer.size - self._body_size))  # a part keeps the whole response in memory
        self._listener.wheel.watch(self, self._listener.loop.time() + self._context.limits.write_timeout_s)

    def resume_writing(self) -> None:
        self._writer.resume()
        self._count(0)
        self._since_s = self._listener.loop.time()
        if self._stage < QUEUED:
            self._schedule()

    def _count(self, unread: int) -> None:
        self._context.bodies.count_unread(unread - self._unread)
        self._unread = unread

    def connection_lost(self, exc: Exception | None) -> None:
        self._count(0)
        self._ignore_input(GONE)
        self._read_limiter = None  # a cycle would keep the connection until the next full garbage collection
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
            while self._stage < QUEUED and not self._writer.is_paused:
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
            if self._stage < LINGER:
                self._update_stage()
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
                response: Any = context.application.reject(error, head.summary(writer.context, writer.client))
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
                    writer.client,
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
        self._writer.begin(head)
        try:
            self._context.bodies.reserve(head.length)
        except HttpError as error:
            responding.close()
            self._reject(RejectedRequest(None, error, fatal=True))
            return
        self._stage, self._body_size = RESPONDING, head.length
        self._run(responding)
        if self._stage < LINGER:
            self._update_stage()

    def _update_stage(self) -> None:
        """Set the stage by what has arrived, unless a request is under way, and pause or resume reading."""
        reader, last = self._reader, self._stage
        if last < QUEUED and not (self._is_scheduled or self._writer.is_paused):
            stage = BODY if reader.in_body else HEAD if reader.unparsed_size else IDLE
            if stage is not IDLE:
                if stage is not last:
                    self._enter_stage(stage)
            elif self._is_draining:
                if last is not NEW:
                    self._close()
            elif last is BETWEEN:
                self._stage = IDLE  # since the end of the last response
            elif last is BODY:  # of a rejected request
                self._enter_stage(IDLE)
        self._read_or_wait()

    def _read_or_wait(self) -> None:
        limiter = self._read_limiter
        reading = self._stage >= LINGER or (
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
        summary = (head or NO_HEADERS).summary(self._writer.context, self._writer.client)
        response = self._context.application.reject(rejected.error, summary)
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
        if head.upgrades:
            self._upgrade(event)
            return
        self._stage, self._body_size = RESPONDING, len(event.body)
        self._writer.begin(head)
        context, caller = self._writer.context, self._admission.application.caller
        request = HttpRequest(
            head.method, head.path, match.params, head.headers, event.body, head.query, context, caller,
            self._writer.client, head.version,
        )  # fmt: skip
        if self._body_size > INLINE:
            if not self._budget.run(partial(self._respond_in_turn, head, request)):
                self._stage = QUEUED
        else:
            self._respond(head, request)

    def _upgrade(self, event: Http1Request) -> None:
        """Answer the handshake of a WebSocket, and hand the transport over to it."""
        # Imported when it is needed: most servers get no WebSocket.
        from dragoman.transports.http1.websocket import WebSocketConnection, upgrade_response

        head, match, caller = event.head, cast("Match", event.head.match), self._admission.application.caller
        self._context.bodies.release(len(event.body))
        if self._is_draining:
            self._reject(RejectedRequest(head, NotReady("the server is shutting down"), fatal=True))
            return
        assert match.session is not None
        try:
            response = upgrade_response(head)
            request = HttpRequest(
                head.method, head.path, match.params, head.headers, b"", head.query, self._writer.context, caller,
                self._writer.client, head.version,
            )  # fmt: skip
            session = match.session(request)
        except (HttpError, DragomanError) as error:
            self._reject(RejectedRequest(head, error, fatal=True))
            return
        listener, transport = self._listener, self._transport
        self._writer.begin(head)
        self._writer.write_upgrade(response)
        rest = self._reader.take_rest()
        self._ignore_input(GONE)
        listener.wheel.forget(self)
        connection = WebSocketConnection(self._context, listener, self._admission, head, session, self._writer.client)
        listener.add(connection)
        listener.remove(self)
        transport.set_protocol(connection)
        # uvloop checks only here whether the protocol is a BufferedProtocol.
        transport.pause_reading()
        transport.resume_reading()
        connection.connection_made(transport)
        connection.begin(rest)

    def _identify(self, head: Http1Headers | None) -> None:
        """Give a request the client's id or a new one."""
        self._writer.context = new_context("" if head is None else head.request_id)

    def _respond_in_turn(self, head: Http1Headers, request: HttpRequest) -> None:
        """Respond to a large request, whose client may have disconnected while it was queued."""
        if queued := self._stage is QUEUED:
            self._stage = RESPONDING
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
            self._body_size = 0
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
        if self._stage is GONE:
            self._listener.remove(self)
        else:
            self._advance()

    def _finish(self, error: BaseException | None) -> None:
        """The application has responded; `error` is an unexpected one."""
        self._context.bodies.release(self._body_size)
        self._body_size = 0
        if error is not None and not isinstance(error, asyncio.CancelledError):
            log.error("HTTP/1.1 connection failed", exc_info=error)
            self._abort()
        elif self._writer.is_disconnected:
            self._ignore_input(CLOSING)
        elif self._writer.started:
            self._end_response(unread=False)
        else:
            self._abort()

    def _end_response(self, *, unread: bool) -> None:
        """Wait for the next request, or close after the last response. `unread`: the client may still be sending."""
        if not self._writer.close and not self._is_draining:
            self._stage = BETWEEN
            self._since_s = self._listener.loop.time()
        elif unread or self._reader.unparsed_size:
            # Closing at once could discard the response before the client has read it.
            self._reader.drop()
            end_output(self._transport)
            self._set_reading(True)
            self._enter_stage(LINGER)
        else:
            self._close()

    def _close(self) -> None:
        """Close the connection once the client has read what was written."""
        if self._transport is None:
            self._ignore_input(CLOSING)
        else:
            self._reader.drop()
            self._enter_stage(CLOSING)
            self._transport.close()

    def _abort(self) -> None:
        self._ignore_input(CLOSING)
        self._context.bodies.release(self._body_size)
        self._body_size = 0
        self._writer.abort()

    def _ignore_input(self, stage: Stage) -> None:
        if self._stage is not GONE:
            self._stage = stage
        self._reader.drop()

    # --- timeouts and shutdown ----------------------------------------------------------------------------------

    def check_timeouts(self, now_s: float) -> float:
        limits = self._context.limits
        if self._writer.is_paused:
            return self._writer.check_timeouts(now_s, limits.write_timeout_s, self._listener.warnings)
        if self._stage in (BETWEEN, QUEUED, RESPONDING):
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

    def announce_close(self) -> None:
        self.retire()

    def retire(self) -> None:
        self._writer.draining = True  # a response that has begun did not announce it: then the next one is the last

    def drain(self) -> None:
        self._writer.draining = self._is_draining = True
        if self._stage < QUEUED and not self._reader.in_body:
            self._close()

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
