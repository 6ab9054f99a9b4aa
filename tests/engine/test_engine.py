"""The engine without a server: calls, deadlines, limits, streams, control and replacement."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

import dragoman
from dragoman import FP64, Infer, Inference, Tensor, TensorSpec, errors
from dragoman.core.calls import Describe, DescribeServer, Index, ListModels, Load, Ready, Request, Response, Unload
from dragoman.core.spec import ModelSpec
from dragoman.engine.engine import Engine, ServerIdentity
from dragoman.engine.repository import Repository, Source


class Doubler(dragoman.Model):
    inputs = (TensorSpec("x", FP64, (-1,)),)
    outputs = (TensorSpec("y", FP64, (-1,)), TensorSpec("sum", FP64, (), optional=True))
    placement = "inline"

    def infer(self, call: Infer) -> Any:
        x = call.inputs["x"].data
        return {"y": x * 2, "sum": x.sum()}


class Sleeper(dragoman.Model):
    """Sleeps until it is cancelled; `cancelled` counts cancelled calls."""

    placement = "inline"
    cancelled = 0

    def load(self) -> None:
        self.gate = asyncio.Event()

    async def infer(self, call: Infer) -> Any:
        try:
            await asyncio.sleep(float(call.inputs["seconds"].data[0]))
        except asyncio.CancelledError:
            type(self).cancelled += 1
            raise
        return {"slept": call.inputs["seconds"]}


class Counter(dragoman.Model):
    placement = "inline"

    def infer(self, call: Infer) -> Iterator[Any]:
        for i in range(int(call.inputs["n"].data[0])):
            yield {"i": np.array([i])}
        if "fail" in call.parameters:
            raise ValueError("at the end")


X = np.array([1.0, 2.5])


async def test_infer_with_arrays() -> None:
    async with dragoman.open_engine(Doubler) as engine:
        assert engine.ready()
        outputs = await engine.infer("Doubler", {"x": X})
        assert list(outputs) == ["y"]
        np.testing.assert_array_equal(outputs["y"], X * 2)
        selected = await engine.infer("Doubler", {"x": X}, outputs=["sum", "y"])
        assert float(selected["sum"]) == 3.5


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        ({"z": X}, (), "unexpected inference input 'z' for model 'Doubler'; expected 'x'"),
        ({}, (), r"expected 1 inputs but got 0 inputs for model 'Doubler'.*missing required input\(s\) \['x'\]"),
        ({"x": X.astype(np.float32)}, (), "input 'x': expected datatype FP64, got FP32"),
        ({"x": X.reshape(1, 2)}, (), r"input 'x': expected shape \[-1\], got \[1, 2\]"),
        ({"x": X}, ("w",), "unexpected inference output 'w' for model 'Doubler'; expected 'y', 'sum'"),
        ({"x": X}, ("y", "y"), "output 'y' already exists in request"),
    ],
)
async def test_invalid_calls_are_rejected(inputs: Any, outputs: tuple[str, ...], message: str) -> None:
    async with dragoman.open_engine(Doubler) as engine:
        with pytest.raises(errors.InvalidInput, match=message):
            await engine.infer("Doubler", inputs, outputs=outputs)


class Other(Doubler): ...


class Secret(Doubler): ...


async def test_the_default_model_is_for_callers_that_may_use_it() -> None:
    call = Infer({"x": Tensor.of(X)}, (), {})
    async with dragoman.open_engine(Doubler, Other, Secret, default_model="Secret") as engine:
        for models in ({"Doubler", "Other"}, {"Unknown"}):
            with pytest.raises(errors.Forbidden, match="this key may not use model 'Secret'"):
                await engine.call(Request(call, models=frozenset(models)))
        for name in ("Doubler", "Secret"):
            assert (await engine.call(Request(call, models=frozenset({name})))).model == name


async def test_a_deadline_cancels_the_call() -> None:
    Sleeper.cancelled = 0
    async with dragoman.open_engine(Sleeper) as engine:
        call = Infer({"seconds": Tensor.of([60.0])})
        with pytest.raises(errors.DeadlineExceeded, match="Request timeout expired"):
            await engine.call(Request(call, "Sleeper", deadline_s=time.monotonic() + 0.02))
        with pytest.raises(errors.DeadlineExceeded):
            await engine.call(Request(call, "Sleeper", deadline_s=time.monotonic() - 1))
    assert Sleeper.cancelled >= 1


@pytest.mark.parametrize(("limit_s", "timeout_s", "named"), [(0.02, 60, True), (60, 0.02, True), (0.02, 1e-5, False)])
async def test_the_earlier_of_two_deadlines_counts(limit_s: float, timeout_s: float, named: bool) -> None:
    """One is of the transport, one the parameter `timeout` of the request, which has none below a millisecond."""
    timeout_us = round(timeout_s * 1e6)
    async with dragoman.open_engine(Sleeper) as engine:
        call = Infer({"seconds": Tensor.of([60.0])}, parameters={"timeout": timeout_us})
        with pytest.raises(errors.DeadlineExceeded) as error:
            await asyncio.wait_for(engine.call(Request(call, "Sleeper", deadline_s=time.monotonic() + limit_s)), 60)
    assert (f"the parameter 'timeout' of the request is {timeout_us} microseconds" in str(error.value)) is named


async def test_calls_after_their_deadline_are_rejected() -> None:
    async with dragoman.open_engine(Doubler) as engine:
        call = Infer({"x": Tensor.of(X)})
        response = engine.begin(Request(call, "Doubler", deadline_s=time.monotonic() + 60))
        assert isinstance(response, Response)
        np.testing.assert_array_equal(response.answer.outputs["y"].data, X * 2)
        expired = Request(call, "Doubler", deadline_s=time.monotonic() - 0.001)
        with pytest.raises(errors.DeadlineExceeded, match="Request timeout expired"):
            engine.begin(expired)
        with pytest.raises(errors.DeadlineExceeded, match="Request timeout expired"):
            await engine.call(expired)


async def test_calls_beyond_max_queue_are_rejected() -> None:
    async with dragoman.open_engine(Sleeper, max_queue=2) as engine:
        running = [asyncio.ensure_future(engine.infer("Sleeper", {"seconds": [60.0]})) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(errors.Overloaded, match="Exceeds maximum queue size") as raised:
            await engine.infer("Sleeper", {"seconds": [0.0]})
        assert raised.value.retry_after_s
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await engine.infer("Sleeper", {"seconds": [0.0]})


async def test_a_stream_yields_chunks_before_its_error() -> None:
    async with dragoman.open_engine(Counter) as engine:
        call = Infer({"n": Tensor.of([3])}, parameters={"fail": True})
        received = []
        with pytest.raises(errors.ModelFailed, match="model 'Counter' failed: ValueError: at the end"):
            async for chunk in engine.stream(Request(call, "Counter")):
                assert isinstance(chunk.answer, Inference)
                received.append(int(chunk.answer.outputs["i"].data[0]))
        assert received == [0, 1, 2]
        with pytest.raises(errors.NotSupported, match="several responses"):
            await engine.infer("Counter", {"n": [2]})
        assert int((await engine.infer("Counter", {"n": [1]}))["i"][0]) == 0


async def test_model_and_server_metadata() -> None:
    async with dragoman.open_engine(Doubler, Counter) as engine:
        description = (await engine.call(Request(Describe(), "Doubler"))).answer
        assert (description.name, description.versions, description.platform) == ("Doubler", (), "python_function")
        assert [s.name for s in description.signature.outputs] == ["y", "sum"]
        assert (await engine.call(Request(ListModels()))).answer == ("Counter", "Doubler")
        assert (await engine.call(Request(DescribeServer()))).answer.name == "dragoman"
        with pytest.raises(errors.ModelNotFound):
            await engine.call(Request(Ready(), "nope"))


async def test_a_server_with_no_model_or_a_failed_one_is_not_ready() -> None:
    async with Engine(Repository()) as empty:
        assert not empty.ready()

    class Broken(dragoman.Model):
        def load(self) -> None:
            raise OSError("no such weights")

    async with dragoman.open_engine(Broken, Doubler) as engine:
        assert not engine.ready()
        assert (await engine.call(Request(Ready(), "Doubler"))).answer
        assert not (await engine.call(Request(Ready(), "Broken"))).answer
        with pytest.raises(errors.NotReady, match="is not ready: UNAVAILABLE; the reason is in the log"):
            await engine.infer("Broken", {})
        reasons = {each.spec.name: each.reason for each in engine.deployments()}
        assert reasons["Broken"] == "failed to load 'Broken', OSError: no such weights"
        await engine.infer("Doubler", {"x": X})


class ChangeableRepository(Repository):
    """A repository whose models a test can replace."""

    def __init__(self) -> None:
        super().__init__()
        self.models: dict[str, Any] = {}

    def scan(self) -> dict[str, Source]:
        def source(target: Any) -> Source:
            return Source(lambda: [ModelSpec(name="m", runtime="python", target=target)])

        return {name: source(target) for name, target in self.models.items()}


class Slow(dragoman.Model):
    placement = "inline"

    async def infer(self, call: Infer) -> Any:
        await asyncio.sleep(0.05)
        return {"name": np.array([b"old"])}


class New(dragoman.Model):
    placement = "inline"

    def infer(self, call: Infer) -> Any:
        return {"name": np.array([b"new"])}


class Unloadable(dragoman.Model):
    def load(self) -> None:
        raise ValueError("bad weights")


@pytest.fixture
async def changing() -> AsyncIterator[tuple[Engine, ChangeableRepository]]:
    repository = ChangeableRepository()
    repository.models["m"] = Slow
    async with Engine(repository, ServerIdentity(control_token="secret")) as engine:
        yield engine, repository


async def model_name(engine: Engine) -> bytes:
    name: bytes = (await engine.infer("m", {}))["name"][0]
    return name


async def test_replacing_a_model_does_not_drop_calls(changing: tuple[Engine, ChangeableRepository]) -> None:
    engine, repository = changing
    before = [asyncio.ensure_future(model_name(engine)) for _ in range(5)]
    await asyncio.sleep(0)
    repository.models["m"] = New
    await engine.call(Request(Load("secret"), "m"))
    assert await model_name(engine) == b"new"
    assert await asyncio.gather(*before) == [b"old"] * 5


async def test_the_old_model_stays_if_the_new_one_cannot_be_loaded(
    changing: tuple[Engine, ChangeableRepository],
) -> None:
    engine, repository = changing
    repository.models["m"] = Unloadable
    with pytest.raises(errors.InvalidInput, match="failed to load 'm', ValueError: bad weights"):
        await engine.call(Request(Load("secret"), "m"))
    assert await model_name(engine) == b"old"
    assert engine.ready()


async def test_unloading_a_model_is_shown_in_the_index(changing: tuple[Engine, ChangeableRepository]) -> None:
    engine, _ = changing
    in_flight = asyncio.ensure_future(model_name(engine))
    await asyncio.sleep(0)
    await engine.call(Request(Unload("secret"), "m"))
    with pytest.raises(errors.ModelNotFound):
        await model_name(engine)
    (entry,) = (await engine.call(Request(Index("secret")))).answer
    assert (entry.name, entry.state, entry.reason) == ("m", "UNAVAILABLE", "unloaded")
    assert (await engine.call(Request(Index("secret", ready=True)))).answer == ()
    assert await in_flight == b"old"
    with pytest.raises(errors.ModelNotFound):
        await engine.call(Request(Unload("secret"), "m"))
    await engine.call(Request(Load("secret"), "m"))
    assert await model_name(engine) == b"old"


@pytest.mark.parametrize("call", [Load, Unload, Index])
async def test_control_needs_the_token(changing: tuple[Engine, ChangeableRepository], call: Any) -> None:
    engine, repository = changing
    with pytest.raises(errors.Unauthorized):
        await engine.call(Request(call("wrong"), "m"))
    async with Engine(repository) as closed:
        with pytest.raises(errors.Forbidden, match="--control-token"):
            await closed.call(Request(call(""), "m"))


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "a b", "x\n"])
async def test_control_does_not_read_the_disk_for_invalid_names(
    changing: tuple[Engine, ChangeableRepository], name: str
) -> None:
    engine, _ = changing
    with pytest.raises(errors.InvalidInput, match=r"(?i)model name"):
        await engine.call(Request(Load("secret"), name))


async def test_draining_finishes_calls_in_flight_and_rejects_new_ones(
    changing: tuple[Engine, ChangeableRepository],
) -> None:
    engine, _ = changing
    in_flight = asyncio.ensure_future(model_name(engine))
    await asyncio.sleep(0)
    draining = asyncio.ensure_future(engine.drain())
    await asyncio.sleep(0)
    assert not engine.ready()
    with pytest.raises(errors.NotReady):
        await model_name(engine)
    await draining
    assert await in_flight == b"old"


class Hanging(dragoman.Model):
    placement = "inline"
    started: asyncio.Event

    async def load(self) -> None:
        type(self).started.set()
        await asyncio.Event().wait()

    def infer(self, call: Infer) -> Any:
        return {}


async def test_a_load_continues_if_its_caller_is_cancelled(changing: tuple[Engine, ChangeableRepository]) -> None:
    engine, repository = changing

    class Gated(New):
        gate = asyncio.Event()
        started = asyncio.Event()

        async def load(self) -> None:
            type(self).started.set()
            await type(self).gate.wait()

    repository.models["m"] = Gated
    loading = asyncio.ensure_future(engine.call(Request(Load("secret"), "m")))
    await Gated.started.wait()
    loading.cancel()
    await asyncio.gather(loading, return_exceptions=True)
    assert engine.ready()
    assert await model_name(engine) == b"old"
    Gated.gate.set()
    async with asyncio.timeout(60):
        while await model_name(engine) != b"new":
            await asyncio.sleep(0.001)


async def test_a_failed_first_load_does_not_change_readiness(changing: tuple[Engine, ChangeableRepository]) -> None:
    engine, repository = changing

    class Broken(dragoman.Model):
        def load(self) -> None:
            raise ValueError("bad weights")

    repository.models["n"] = Broken
    with pytest.raises(errors.InvalidInput, match="bad weights"):
        await engine.call(Request(Load("secret"), "n"))
    assert engine.ready()
    entries = (await engine.call(Request(Index("secret")))).answer
    assert {e.name: e.state for e in entries} == {"m": "READY", "n": "UNAVAILABLE"}
    assert "bad weights" in next(e.reason for e in entries if e.name == "n")


async def test_unloading_cancels_a_load_that_hangs(changing: tuple[Engine, ChangeableRepository]) -> None:
    engine, repository = changing
    Hanging.started = asyncio.Event()
    repository.models["m"] = Hanging
    loading = asyncio.ensure_future(engine.call(Request(Load("secret"), "m")))
    await Hanging.started.wait()
    async with asyncio.timeout(60):
        await engine.call(Request(Unload("secret"), "m"))
        with pytest.raises(errors.InvalidInput, match="it was unloaded meanwhile"):
            await loading
    with pytest.raises(errors.ModelNotFound):
        await model_name(engine)


async def test_control_with_an_unknown_version_changes_nothing(changing: tuple[Engine, ChangeableRepository]) -> None:
    engine, _ = changing
    with pytest.raises(errors.InvalidInput, match="version '7' is not among"):
        await engine.call(Request(Load("secret"), "m", "7"))
    with pytest.raises(errors.ModelNotFound, match="version 7"):
        await engine.call(Request(Unload("secret"), "m", "7"))
    assert await model_name(engine) == b"old"


@pytest.mark.parametrize("name", [0, "", "\ud800", None])
async def test_output_names_must_be_strings(name: Any) -> None:
    class Misnaming(dragoman.Model):
        placement = "inline"

        def infer(self, call: Infer) -> Any:
            return {name: np.zeros(1)}

    async with dragoman.open_engine(Misnaming) as engine:
        with pytest.raises(errors.InvalidOutput, match="expected non-empty strings as names of outputs"):
            await engine.infer("Misnaming", {})


async def test_models_are_loaded_on_request() -> None:
    repository = ChangeableRepository()
    repository.models["m"] = New
    async with Engine(repository, ServerIdentity(control_token="secret", load_at_start=False)) as engine:
        assert engine.ready()
        (entry,) = (await engine.call(Request(Index("secret")))).answer
        assert (entry.name, entry.state, entry.reason) == ("m", "UNAVAILABLE", "not loaded at the start")
        with pytest.raises(errors.ModelNotFound):
            await model_name(engine)
        await engine.call(Request(Load("secret"), "m"))
        assert await model_name(engine) == b"new"


async def test_optional_inputs_are_not_reported_as_missing() -> None:
    def scaled(x: float, y: float, factor: float = 2.0) -> float:
        return (x + y) * factor

    async with dragoman.open_engine(scaled) as engine:
        message = (
            r"^expected number of inputs between 2 and 3 but got 2 inputs for model 'scaled'.* input\(s\) \['x'\]\."
        )
        with pytest.raises(errors.InvalidInput, match=message):
            await engine.infer("scaled", {"factor": np.ones(1), "y": np.ones(1)})


async def test_a_model_without_methods_is_rejected() -> None:
    class Idle(dragoman.Model):
        placement = "inline"

    async with dragoman.open_engine(Idle) as engine:
        (deployment,) = engine.deployments()
        assert deployment.state == "UNAVAILABLE"
        assert deployment.reason.startswith(
            "failed to load 'Idle', Idle has no method that answers calls: expected predict, "
        )
