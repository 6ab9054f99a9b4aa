"""Engine for the requests of one caller: in its name, for its models only, within its limits."""

import dataclasses
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

import msgspec
from msgspec import structs

from dragoman.access.grants import EVERYTHING, Grant, Permit
from dragoman.access.key_calls import OutcomeCounts, calls_of
from dragoman.access.refusals import Refusals
from dragoman.core.callers import ANYONE, Priority
from dragoman.core.calls import (
    Authorize,
    Call,
    ConcurrentCalls,
    Describe,
    DescribeModels,
    DescribeServer,
    Embed,
    Generate,
    Index,
    ListModels,
    Live,
    Load,
    MayControl,
    ModelCall,
    ReadStatistics,
    Ready,
    Request,
    Response,
    ScaleModel,
    ServerCall,
    States,
    Unload,
)
from dragoman.core.chunks import ChunkStream, Take
from dragoman.core.errors import DragomanError, Forbidden, RateLimited
from dragoman.core.record_calls import AppendRecord, DeleteRecord, KeepLoaded, ListLoaded, ReadRecord, SaveRecord
from dragoman.core.scoring import Score
from dragoman.core.services import ServiceCall
from dragoman.core.usage import RateLimits, ReadUsage, TokenBudget, UsageMeter
from dragoman.engine.call_handler import CallHandler
from dragoman.engine.counters import OK
from dragoman.system.coroutines import begin

A = TypeVar("A")

_REFUSED = (Forbidden, RateLimited)
_OPEN = (  # records and usage are those of the key
    Live, Ready, MayControl, DescribeServer, SaveRecord, AppendRecord, ReadRecord, DeleteRecord, ReadUsage,
)  # fmt: skip
_OF_TEXT = (Generate, Embed, Score)
_OF_ONE_MODEL = (Authorize, KeepLoaded, Load, ScaleModel, Unload)
# Lists of the server: how the name of a model follows from an element.
_LISTS: dict[type[Any], Callable[[Any], str]] = {
    ListLoaded: lambda model: model.name,
    ListModels: lambda name: name,
    DescribeModels: lambda model: model.name,
    Index: lambda entry: entry.name,
    States: lambda entry: entry.name,
    ReadStatistics: lambda statistics: statistics.name,
}


class KeyLimits(NamedTuple):
    """The limits of a key, as a server process sends them to the engine."""

    name: str
    models: frozenset[str] | None
    calls_per_s: float
    max_concurrent: int
    owner: str
    tokens_per_minute: int = 0
    tokens_per_day: int = 0
    priority: Priority = ""

    @classmethod
    def of(cls, grant: Grant) -> Self:
        return cls(*(getattr(grant, name) for name in cls._fields))

    def grant(self) -> Grant:
        """Return a grant with these limits, for calls whose role has been checked."""
        return Grant(roles=EVERYTHING, **self._asdict())


class LimitedCall(msgspec.Struct, ServerCall[Any], frozen=True):
    """A call of a key with limits, on its way from a server process to the engine, which counts those of all."""

    call: Call[Any]
    limits: KeyLimits


class CallerEngine:
    """A `CallHandler` for the calls of one caller. Raises Forbidden and RateLimited, besides the engine's errors.

    If the engine is in another process, the limits are counted there. `refusals` logs calls that are refused. `counts`:
    of the calls that have ended; None if the process of the client counts them.
    """

    is_remote = False

    def __init__(
        self,
        engine: CallHandler,
        grant: Grant,
        address: str = "",
        refusals: Refusals | None = None,
        counts: OutcomeCounts | None = None,
    ) -> None:
        self._engine = engine
        self._refusals = refusals
        self._counts = counts
        self.grant = grant
        self.caller = grant.caller(address)
        self._limiter = None if engine.is_remote else grant.limiter
        self._budget: TokenBudget | None = None
        self._limits: KeyLimits | None = None  # for the engine in another process
        if engine.is_remote and grant.has_limits:
            self._limits = KeyLimits.of(grant)
        elif grant.limits_tokens:
            meter: UsageMeter | None = getattr(engine, "meter", None)
            assert meter is not None, "keys with limits of tokens are refused without it"
            self._budget = meter.budget(self.caller, grant.tokens_per_minute, grant.tokens_per_day)
        self._is_limited = self._limiter is not None or self._budget is not None
        self.ready = engine.ready
        self.wait_for_change = engine.wait_for_change

    def begin(self, request: Request[A]) -> Response[A] | Awaitable[Response[A]]:
        call: Any = request.call
        number = 1 if isinstance(call, ModelCall) else calls_of(call)
        permit = name_of = None
        try:
            if number and self._is_limited:
                permit = self._acquire()
            response = self._engine.begin(self._restrict(request))
        except BaseException as error:
            self._end(request, number, error)
            raise
        if self.grant.models is not None:
            name_of = _LISTS.get(type(call))
        if isinstance(response, Response):
            if permit is not None:
                permit.release()
            if number and self._counts is not None:
                self._counts[OK] += number
            return self._complete(request, response, name_of) if self._is_limited or name_of else response
        if number and not self._is_limited and self._counts is None:
            return response
        return begin(self._finish(request, response, permit, name_of, number))

    async def call(self, request: Request[A]) -> Response[A]:
        response = self.begin(request)
        return response if isinstance(response, Response) else await response

    def stream(self, request: Request[A]) -> ChunkStream[Response[A]]:
        return ChunkStream(partial(self._stream, request))

    async def _stream(self, request: Request[A], take: Take[Response[A]]) -> None:
        permit = None
        failure: BaseException | None = None
        is_first = self._is_limited

        def take_chunk(response: Response[A]) -> Awaitable[None] | None:
            nonlocal is_first, failure
            if isinstance(response.answer, DragomanError):  # after which the stream goes on
                failure = response.answer
            if is_first:
                is_first = False
                response = self._with_limits(request, response)
            return take(response)

        try:
            permit = self._acquire()
            await self._engine.stream(self._restrict(request)).send_to(take_chunk)
        except BaseException as error:
            failure = error
            raise
        finally:
            self._end(request, 1, failure)
            failure = None  # it refers to this frame
            if permit is not None:
                permit.release()

    def _end(self, request: Request[Any], number: int, error: BaseException | None) -> None:
        """Count calls that have ended, and log them if they were refused."""
        if number and self._counts is not None:
            self._counts.add(number, error)
        if self._refusals is not None and isinstance(error, _REFUSED):
            where = f"{type(request.call).__name__} {request.model}".rstrip()
            self._refusals.add(error, where, self.caller.name, self.caller.address)

    def _acquire(self) -> Permit | None:
        if self._budget is not None:
            self._budget.check()
        return None if self._limiter is None else self._limiter.acquire()

    async def _finish(
        self,
        request: Request[A],
        response: Awaitable[Response[A]],
        permit: Permit | None,
        name_of: Callable[[Any], str] | None,
        number: int,
    ) -> Response[A]:
        error: BaseException | None = None
        try:
            return self._complete(request, await response, name_of)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._end(request, number, error)
            del error  # which refers to this frame
            if permit is not None:
                permit.release()

    def _complete(
        self, request: Request[A], response: Response[A], name_of: Callable[[Any], str] | None
    ) -> Response[A]:
        """Return a list without the models that the key may not use, and what is left of the limits with a text."""
        models, answer = self.grant.models, response.answer
        if name_of is not None and models is not None:
            assert isinstance(answer, tuple)
            response = structs.replace(response, answer=tuple(each for each in answer if name_of(each) in models))
        return self._with_limits(request, response)

    def _with_limits(self, request: Request[A], response: Response[A]) -> Response[A]:
        """Return the response to a call about text with what is left of the key's limits."""
        if not self._is_limited or not isinstance(request.call, _OF_TEXT):
            return response
        limits = RateLimits() if self._limiter is None else self._limiter.limits()
        if self._budget is not None:
            left = self._budget.limits()
            limits = structs.replace(
                limits,
                tokens=left.tokens,
                remaining_tokens=left.remaining_tokens,
                reset_tokens_s=left.reset_tokens_s,
            )
        return structs.replace(response, limits=limits)

    def _restrict(self, request: Request[A]) -> Request[A]:
        """Return the request as the engine gets it."""
        request = self._bind(request)
        if self._limits is None:
            return request
        return structs.replace(request, call=LimitedCall(request.call, self._limits))

    def _bind(self, request: Request[A]) -> Request[A]:
        """Return the request in the name of the caller, with the models that it may use: the engine checks the one that
        it chooses by itself."""
        call: Any = request.call
        models, caller = self.grant.models, request.caller
        if caller is ANYONE:  # else a server process has set it
            caller = self.caller
        if isinstance(call, ReadUsage) and "admin" not in self.grant.roles:
            request = structs.replace(request, call=dataclasses.replace(call, owner=caller.owner))
        if isinstance(call, ConcurrentCalls):
            call = ConcurrentCalls(tuple(map(self._bind, call.requests)))
            return structs.replace(request, call=call, caller=caller)
        if isinstance(call, ServiceCall):
            if call.runs_later and self.grant.has_limits and caller.owner.startswith("jwt:"):
                raise Forbidden("a token with limits cannot leave work for later, when it is not known: use an API key")
            return structs.replace(request, models=models, caller=caller)
        if models is None or isinstance(call, _OPEN):
            return structs.replace(request, caller=caller)
        if request.models != models:
            self._check(request, models)
        return structs.replace(request, models=models, caller=caller)

    def _check(self, request: Request[Any], models: frozenset[str]) -> None:
        """Raise Forbidden unless the caller may send a request, as far as that is known without the engine."""
        call = request.call
        if request.model in models:
            if isinstance(call, Load) and (call.config or call.files):  # which may call other models
                raise Forbidden("this key is for some models only: it cannot send configurations or files of models")
            if isinstance(call, (ModelCall, Describe, *_OF_ONE_MODEL, *_LISTS)):
                return
        elif not request.model and isinstance(call, (ModelCall, Describe, *_LISTS)):
            return
        raise Forbidden(f"this key is for some models only: {', '.join(sorted(models))}")
