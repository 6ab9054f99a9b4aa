"""What answers the calls of a front end: the engine, and what is about all front ends."""

import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any, NoReturn

from dragoman.core.calls import Measure, Ready, Request, Response
from dragoman.core.errors import DragomanError, ServerError
from dragoman.core.metrics import Family, Sample
from dragoman.engine.call_handler import CallHandler
from dragoman.front import Shelved
from dragoman.system.coroutines import begin

log = logging.getLogger("dragoman.front_end")


class Desk:
    """The engine, for the front end of a number, whichever process that is at the time.

    `ready` tells whether the server as a whole is, `measured` what there is to measure of its front ends, `kept` gives
    what is asked about answers that are fetched later. `calls` counts what was asked, `restarts` how often the process
    has died.
    """

    name = "server"

    def __init__(
        self,
        engine: CallHandler,
        ready: Callable[[], bool],
        measured: Callable[[], tuple[Family, ...]],
        kept: Callable[[Shelved], Awaitable[Any]],
    ) -> None:
        self._engine = engine
        self._ready = ready
        self._measured = measured
        self._kept = kept
        self.calls = 0
        self.restarts = 0

    def unavailable(self) -> str:
        return ""

    def one(self, request: Request[Any]) -> NoReturn:
        raise AssertionError("front ends ask side by side")

    def begin(self, request: Request[Any]) -> Response[Any] | Awaitable[Response[Any]]:
        """Start a call: return its response, or an awaitable of it if something has to wait."""
        return begin(self.one_async(request))

    async def one_async(self, request: Request[Any]) -> Response[Any]:
        self.calls += 1
        try:
            if isinstance(request.call, Shelved):
                return Response(await self._kept(request.call))
            return self._completed(await self._engine.call(request), request)
        except Exception as fault:
            raise _told(fault, request) from fault

    def _completed(self, response: Response[Any], request: Request[Any]) -> Response[Any]:
        """The engine's answer, with what it does not know: how the front ends are."""
        match request.call:
            case Ready() if not request.model:
                return Response(response.answer and self._ready(), response.model, response.version)
            case Measure():
                return Response((*response.answer, *self._measured()), response.model, response.version)
        return response

    async def pieces_async(self, request: Request[Any]) -> AsyncGenerator[Response[Any], None]:
        self.calls += 1
        try:
            async with aclosing(self._engine.stream(request)) as pieces:
                async for piece in pieces:
                    yield piece
        except Exception as fault:
            raise _told(fault, request) from fault


def families(desks: Iterable[Desk]) -> tuple[Family, ...]:
    """What there is to measure of front ends, by their numbers."""
    told = [({"front_end": str(number)}, desk) for number, desk in enumerate(desks)]
    calls, restarts = "dragoman_front_end_calls_total", "dragoman_front_end_restarts_total"
    return (
        Family(
            calls,
            "counter",
            "What each front end asked of the engine.",
            tuple(Sample(calls, labels, desk.calls) for labels, desk in told),
        ),
        Family(
            restarts,
            "counter",
            "How often each front end died and was started again.",
            tuple(Sample(restarts, labels, desk.restarts) for labels, desk in told),
        ),
    )


def _told(fault: Exception, request: Request[Any]) -> DragomanError:
    """What the caller is told of a fault; one that is not meant for callers is logged in full."""
    if isinstance(fault, DragomanError):
        return fault
    request_id = request.id or uuid.uuid4().hex[:12]
    log.error("unexpected fault, request id %r", request_id, exc_info=fault)
    return ServerError(f"internal error; the log has more under request id {request_id}")
