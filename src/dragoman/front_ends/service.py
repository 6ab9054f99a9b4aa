"""The engine as a service for one front end, with what concerns all front ends."""

import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any, NoReturn

from dragoman.core.calls import Measure, Ready, Request, Response
from dragoman.core.errors import DragomanError, ServerError
from dragoman.core.metrics import Family, Sample
from dragoman.engine.call_handler import CallHandler
from dragoman.server_transports import StoredResultCall
from dragoman.system.coroutines import begin

log = logging.getLogger("dragoman.front_end")


class FrontEndService:
    """The engine, for one front end and the processes that take its place after restarts.

    is_complete: whether every front end runs. metrics: the metrics of all front ends. fetch: answer a request about
    responses that are fetched later. calls, restarts: counters of this front end.
    """

    name = "server"

    def __init__(
        self,
        engine: CallHandler,
        is_complete: Callable[[], bool],
        metrics: Callable[[], tuple[Family, ...]],
        fetch: Callable[[StoredResultCall], Awaitable[Any]],
    ) -> None:
        self._engine = engine
        self._is_complete = is_complete
        self._metrics = metrics
        self._fetch = fetch
        self.calls = 0
        self.restarts = 0

    def unavailable(self) -> str:
        return ""

    def one(self, request: Request[Any]) -> NoReturn:
        raise AssertionError("front ends send concurrent calls")

    def begin(self, request: Request[Any]) -> Response[Any] | Awaitable[Response[Any]]:
        """Start a call: return its response, or an awaitable of it if something has to wait."""
        return begin(self.one_async(request))

    async def one_async(self, request: Request[Any]) -> Response[Any]:
        self.calls += 1
        try:
            if isinstance(request.call, StoredResultCall):
                return Response(await self._fetch(request.call))
            return self._complete(await self._engine.call(request), request)
        except Exception as error:
            raise _public(error, request) from error

    def _complete(self, response: Response[Any], request: Request[Any]) -> Response[Any]:
        """Add the state of the front ends to a response of the engine."""
        match request.call:
            case Ready() if not request.model:
                return Response(response.answer and self._is_complete(), response.model, response.version)
            case Measure():
                return Response((*response.answer, *self._metrics()), response.model, response.version)
        return response

    async def pieces_async(self, request: Request[Any]) -> AsyncGenerator[Response[Any], None]:
        self.calls += 1
        try:
            async with aclosing(self._engine.stream(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except Exception as error:
            raise _public(error, request) from error


def families(services: Iterable[FrontEndService]) -> tuple[Family, ...]:
    """Return the metrics of front ends, labelled with their numbers."""
    labelled = [({"front_end": str(number)}, service) for number, service in enumerate(services)]
    calls, restarts = "dragoman_front_end_calls_total", "dragoman_front_end_restarts_total"
    return (
        Family(
            calls,
            "counter",
            "Calls that each front end sent to the engine.",
            tuple(Sample(calls, labels, service.calls) for labels, service in labelled),
        ),
        Family(
            restarts,
            "counter",
            "Restarts of each front end.",
            tuple(Sample(restarts, labels, service.restarts) for labels, service in labelled),
        ),
    )


def _public(error: Exception, request: Request[Any]) -> DragomanError:
    """Return the error for the client; log an unexpected one with the request id that the client gets."""
    if isinstance(error, DragomanError):
        return error
    request_id = request.id or uuid.uuid4().hex[:12]
    log.error("unexpected error, request id %r", request_id, exc_info=error)
    return ServerError(f"internal error; the log has more under request id {request_id}")
