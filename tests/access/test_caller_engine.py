"""What the engine gets of the requests of one caller, and what the caller gets back."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from types import SimpleNamespace
from typing import Any

import pytest

from dragoman.access.caller_engine import CallerEngine, LimitedCall
from dragoman.access.grants import EVERYTHING, Grant
from dragoman.access.refusals import Refusals
from dragoman.core.callers import Caller
from dragoman.core.calls import (
    Authorize,
    ConcurrentCalls,
    Describe,
    Generate,
    Index,
    Infer,
    ListModels,
    Live,
    Load,
    ReadStatistics,
    Request,
    Response,
    States,
    Unload,
)
from dragoman.core.chunks import ChunkStream
from dragoman.core.errors import Forbidden, RateLimited
from dragoman.core.record_calls import ListLoaded, ReadRecord

INFER = Infer({})
MODELS = frozenset(("a", "b"))
CALLER = Caller("key:ann", "ann", "10.0.0.1")
NAMED = (SimpleNamespace(name="a"), SimpleNamespace(name="c"), SimpleNamespace(name="b"))


class RecordingEngine:
    """Keeps the requests that it gets; its responses come at once or later."""

    def __init__(self, answer: Any = None, *, is_remote: bool = False, waits: bool = False) -> None:
        self.requests: list[Request[Any]] = []
        self.answer, self.is_remote, self._waits = answer, is_remote, waits
        self.error: Exception | None = None

    def begin(self, request: Request[Any]) -> Response[Any] | Awaitable[Response[Any]]:
        self.requests.append(request)
        return self._later() if self._waits else Response(self.answer)

    async def _later(self) -> Response[Any]:
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return Response(self.answer)

    async def call(self, request: Request[Any]) -> Response[Any]:
        raise AssertionError

    def stream(self, request: Request[Any]) -> ChunkStream[Response[Any]]:
        return ChunkStream.of(self._responses(request))

    async def _responses(self, request: Request[Any]) -> AsyncGenerator[Response[Any], None]:
        self.requests.append(request)
        for part in (1, 2):
            yield Response(part)

    def ready(self) -> bool:
        return True

    async def wait_for_change(self) -> None:
        return


class RecordedRefusals(Refusals):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, ...]] = []

    def add(self, error: Any, where: str, key: str, client: str) -> None:
        self.found.append((error.status, where, key, client))


def grant(models: frozenset[str] | None = MODELS, calls_per_s: float = 0.0, max_concurrent: int = 0) -> Grant:
    return Grant("ann", EVERYTHING, models, calls_per_s, max_concurrent, owner="key:ann")


def caller_engine(engine: RecordingEngine, given: Grant | None = None) -> tuple[CallerEngine, RecordedRefusals]:
    refusals = RecordedRefusals()
    return CallerEngine(engine, given or grant(), "10.0.0.1", refusals), refusals


@pytest.mark.parametrize("models", [None, MODELS])
@pytest.mark.parametrize(
    "call", [INFER, Describe(), Load(), Unload(), Authorize(), ListModels(), Index(), Live(), ReadRecord("r", "i")]
)
async def test_requests_are_those_of_the_caller(models: frozenset[str] | None, call: Any) -> None:
    engine = RecordingEngine(())
    await caller_engine(engine, grant(models))[0].call(Request(call, "a", id="i"))
    (request,) = engine.requests
    expected = None if isinstance(call, Live | ReadRecord) else models
    assert (request.call, request.model, request.id) == (call, "a", "i")
    assert (request.models, request.caller) == (expected, CALLER)


async def test_the_requests_of_concurrent_calls_are_those_of_the_caller() -> None:
    engine = RecordingEngine(())
    ours, _ = caller_engine(engine)
    await ours.call(Request(ConcurrentCalls((Request(INFER, "a"), Request(INFER, "b")))))
    (outer,) = engine.requests
    assert outer.caller == CALLER
    inner = outer.call.requests  # type: ignore[attr-defined]
    assert [(each.model, each.models, each.caller) for each in inner] == [
        ("a", MODELS, CALLER),
        ("b", MODELS, CALLER),
    ]
    with pytest.raises(Forbidden):
        await ours.call(Request(ConcurrentCalls((Request(INFER, "a"), Request(INFER, "c")))))
    assert len(engine.requests) == 1


async def test_a_caller_that_a_server_process_has_set_stays() -> None:
    engine, bob = RecordingEngine(), Caller("key:bob", "bob", "10.0.0.2")
    await caller_engine(engine, grant(None))[0].call(Request(INFER, "a", caller=bob))
    await caller_engine(engine)[0].call(Request(INFER, "a", caller=bob))
    assert [request.caller for request in engine.requests] == [bob, bob]


@pytest.mark.parametrize(
    ("call", "model", "where"),
    [
        (INFER, "c", "Infer c"),
        (Describe(), "c", "Describe c"),
        (Load(), "c", "Load c"),
        (Load(), "", "Load"),
        (Unload(), "", "Unload"),
        (Load(config="max_batch_size: 1"), "a", "Load a"),
        (Load(files={"f": b""}), "a", "Load a"),
    ],
)
async def test_requests_for_other_models_never_reach_the_engine(call: Any, model: str, where: str) -> None:
    engine = RecordingEngine()
    ours, refusals = caller_engine(engine)
    with pytest.raises(Forbidden, match="for some models only"):
        ours.begin(Request(call, model))
    assert engine.requests == []
    assert refusals.found == [(403, where, "ann", "10.0.0.1")]


async def test_a_request_without_a_model_is_left_to_the_engine() -> None:
    engine = RecordingEngine(())
    for call in (INFER, Describe(), Index()):
        await caller_engine(engine)[0].call(Request(call))
    assert [request.models for request in engine.requests] == [MODELS] * 3


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("call", [Index(), States(), ReadStatistics(), ListLoaded()])
async def test_lists_have_the_models_of_the_key_only(call: Any, waits: bool) -> None:
    engine = RecordingEngine(NAMED, waits=waits)
    for models, expected in ((MODELS, ["a", "b"]), (None, ["a", "c", "b"])):
        found = await caller_engine(engine, grant(models))[0].call(Request(call))
        assert [each.name for each in found.answer] == expected
    engine.answer = ("a", "c")
    assert (await caller_engine(engine)[0].call(Request(ListModels()))).answer == ("a",)


@pytest.mark.parametrize("waits", [False, True])
async def test_a_call_counts_until_it_ends(waits: bool) -> None:
    engine = RecordingEngine(waits=waits)
    ours, refusals = caller_engine(engine, grant(None, max_concurrent=1))
    for call in (INFER, ConcurrentCalls((Request(INFER, "a"),))):
        first = ours.begin(Request(call, "a"))
        if waits:
            with pytest.raises(RateLimited):
                ours.begin(Request(INFER, "a"))
            assert refusals.found.pop() == (429, "Infer a", "ann", "10.0.0.1")
            await ours.call(Request(Describe(), "a"))  # counts as none
            assert isinstance(await first, Response)  # type: ignore[misc]
        else:
            assert isinstance(first, Response)
    stream = ours.stream(Request(Generate(prompts=()), "a"))
    part: Any = (await anext(stream)).answer
    assert part == 1
    with pytest.raises(RateLimited):
        ours.begin(Request(INFER, "a"))
    await stream.aclose()
    await ours.call(Request(INFER, "a"))


async def test_a_failed_call_ends_too() -> None:
    engine = RecordingEngine(waits=True)
    ours, refusals = caller_engine(engine, grant(None, max_concurrent=1))
    for error in (ValueError("wrong"), Forbidden("not this one")):
        engine.error = error
        with pytest.raises(type(error)):
            await ours.call(Request(INFER, "a"))
    assert refusals.found == [(403, "Infer a", "ann", "10.0.0.1")]


async def test_another_process_counts_the_calls_of_a_key_with_limits() -> None:
    engine = RecordingEngine(is_remote=True)
    ours, _ = caller_engine(engine, grant(MODELS, 2.0, 1))
    for _ in range(3):  # none is refused here
        await ours.call(Request(INFER, "a"))
    stream: list[Any] = [part.answer async for part in ours.stream(Request(Generate(prompts=()), "a"))]
    assert stream == [1, 2]
    found: list[Any] = [request.call for request in engine.requests]
    assert [type(call) for call in found] == [LimitedCall] * 4
    assert found[0].call == INFER
    limits = found[0].limits
    assert limits == ("ann", MODELS, 2.0, 1, "key:ann", 0, 0, "")
    granted = limits.grant()
    assert granted.is_equivalent(grant(MODELS, 2.0, 1))
    assert granted.limiter is not None
    assert [request.caller for request in engine.requests] == [CALLER] * 4
    free = RecordingEngine(is_remote=True)
    await caller_engine(free)[0].call(Request(INFER, "a"))
    assert free.requests[0].call == INFER


async def test_streams_of_other_models_are_refused() -> None:
    ours, refusals = caller_engine(RecordingEngine())
    with pytest.raises(Forbidden):
        await anext(ours.stream(Request(Generate(prompts=()), "c")))
    assert refusals.found == [(403, "Generate c", "ann", "10.0.0.1")]
