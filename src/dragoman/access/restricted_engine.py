"""The engine as the holder of a restricted key sees it: its models, within its limits."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from msgspec import structs

from dragoman.access.grants import Grant, Permit
from dragoman.core.calls import (
    ConcurrentCalls,
    Describe,
    DescribeModels,
    DescribeServer,
    Index,
    ListModels,
    Live,
    Load,
    ModelCall,
    Ready,
    Request,
    Response,
    ScaleModel,
    States,
    Unload,
)
from dragoman.core.errors import Forbidden
from dragoman.engine.call_handler import CallHandler

A = TypeVar("A")

_OPEN = (Live, Ready, DescribeServer)
_OF_ONE_MODEL = (Load, ScaleModel, Unload)
# Lists of the server: how the name of a model follows from an element.
_LISTS: dict[type[Any], Callable[[Any], str]] = {
    ListModels: lambda name: name,
    DescribeModels: lambda model: model.name,
    Index: lambda entry: entry.name,
    States: lambda entry: entry.name,
}


class RestrictedEngine:
    """A `CallHandler` for the calls of one key. Raises Forbidden and RateLimited, besides the engine's errors."""

    def __init__(self, engine: CallHandler, grant: Grant) -> None:
        self._engine = engine
        self._grant = grant
        self.ready = engine.ready
        self.changed = engine.changed

    def begin(self, request: Request[A]) -> Response[A] | Awaitable[Response[A]]:
        call: Any = request.call
        permit = self._acquire() if isinstance(call, ModelCall | ConcurrentCalls) else None
        response = self._engine.begin(self._restrict(request))
        name_of = _LISTS.get(type(call)) if self._grant.models is not None else None
        if isinstance(response, Response):
            if permit is not None:
                permit.release()
            return self._select(response, name_of)
        return response if permit is None and name_of is None else self._finish(response, permit, name_of)

    async def call(self, request: Request[A]) -> Response[A]:
        response = self.begin(request)
        return response if isinstance(response, Response) else await response

    async def stream(self, request: Request[A]) -> AsyncGenerator[Response[A], None]:
        permit = self._acquire()
        try:
            async with aclosing(self._engine.stream(self._restrict(request))) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            if permit is not None:
                permit.release()

    def _acquire(self) -> Permit | None:
        return None if self._grant.limiter is None else self._grant.limiter.acquire()

    async def _finish(
        self, response: Awaitable[Response[A]], permit: Permit | None, name_of: Callable[[Any], str] | None
    ) -> Response[A]:
        try:
            return self._select(await response, name_of)
        finally:
            if permit is not None:
                permit.release()

    def _select(self, response: Response[A], name_of: Callable[[Any], str] | None) -> Response[A]:
        """Return a list without the models that the key may not use."""
        models, answer = self._grant.models, response.answer
        if name_of is None or models is None:
            return response
        assert isinstance(answer, tuple)
        return structs.replace(response, answer=tuple(each for each in answer if name_of(each) in models))

    def _restrict(self, request: Request[A]) -> Request[A]:
        """Return the request with the models that it may use: the engine checks the one that it chooses by itself."""
        call, models = request.call, self._grant.models
        if models is None or request.models == models or isinstance(call, _OPEN) or type(call) in _LISTS:
            return request
        if isinstance(call, ConcurrentCalls):
            return structs.replace(request, call=ConcurrentCalls(tuple(map(self._restrict, call.requests))))
        if isinstance(call, ModelCall | Describe) and (not request.model or request.model in models):
            return structs.replace(request, models=models)
        if isinstance(call, _OF_ONE_MODEL) and request.model in models:
            return request
        raise Forbidden(f"this key is for some models only: {', '.join(sorted(models))}")
