"""The trial of a model when it is loaded: an example that it answers, or the reason why it answers none."""

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dragoman
from dragoman import FP32, FP64, INT64, Infer, TensorSpec
from dragoman.core.calls import Generate, Index, ReadStatistics, Request, States
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.sequences import SequenceOptions
from dragoman.core.spec import Placement
from dragoman.core.text import Generation, Text
from dragoman.engine.deployment import Deployment
from dragoman.engine.engine import Engine
from dragoman.engine.own_files import EXAMPLES
from dragoman.engine_setup import open_engine

SEEN: list[Any] = []


class Picture(dragoman.Model):
    """Takes pictures of at least 32 x 32, as many detectors do."""

    placement: Placement = "thread"
    inputs: tuple[TensorSpec, ...] = (TensorSpec("x", FP32, (-1, 3, -1, -1)),)
    outputs = (TensorSpec("y", FP32, (-1,)),)

    def infer(self, call: Infer) -> Any:
        x = call.inputs["x"].data
        SEEN.append(x.shape)
        if x.shape[-1] < 32:
            raise RuntimeError("Non concat axis dimensions must match:\nAxis 2 has mismatched dimensions of 19 and 20")
        return x.mean(axis=(1, 2, 3))


class Refuses(Picture):
    """Takes no numbers that are made up."""

    def infer(self, call: Infer) -> Any:
        if call.inputs["x"].data.flat[0] == 1:
            raise InvalidInput("input 'x': expected a photo")
        return call.inputs["x"].data.mean(axis=(1, 2, 3))


class Slow(Picture):
    """Computes for a second."""

    inputs = (TensorSpec("x", FP32, (1,)),)

    def infer(self, call: Infer) -> Any:
        time.sleep(1)
        return call.inputs["x"].data


class Knows(Refuses):
    """Has an example of its own."""

    def example_inputs(self) -> dict[str, Any]:
        return {"x": np.zeros((1, 3, 2, 2))}


class Classifier(Picture):
    """Names its classes."""

    outputs = (TensorSpec("scores", FP64, (-1, 2)),)

    def infer(self, call: Infer) -> Any:
        return np.array([[0.25, 0.75]])

    def class_labels(self) -> dict[str, list[Any]]:
        return {"scores": ["cat", 7]}


@pytest.fixture(autouse=True)
def _clear() -> None:
    SEEN.clear()


def only(engine: Engine) -> Deployment:
    (deployment,) = engine.deployments()
    return deployment


def example(engine: Engine) -> dict[str, Any] | None:
    inputs = only(engine).example
    return None if inputs is None else {name: tensor.data.tolist() for name, tensor in inputs.items()}


@pytest.mark.parametrize("placement", ["thread", "inline", "process"])
async def test_the_first_size_that_runs_is_the_example(placement: Placement, caplog: pytest.LogCaptureFixture) -> None:
    async with open_engine(Picture, placement=placement) as engine:
        deployment = only(engine)
        assert (deployment.ready, deployment.trial_error, deployment.reported_reason) == (True, "", "")
        assert deployment.example is not None
        x = deployment.example["x"]
        assert (x.shape, x.datatype, set(x.data.flat)) == ((1, 3, 32, 32), FP32, {1.0})
        assert engine.description(deployment).example is deployment.example
        if placement != "process":
            assert [(1, 3, n, n) for n in (1, 2, 8, 32)] == SEEN
        (statistics,) = (await engine.call(Request(ReadStatistics(), "Picture"))).answer
        assert (statistics.succeeded, statistics.failed) == (0, 0)
    assert not [each for each in caplog.records if each.levelno > logging.INFO], "failures of a trial are expected"


class Sound(Picture):
    """Takes pieces of 512 samples at 16 kHz, as detectors of speech do."""

    inputs = (TensorSpec("x", FP32, (-1, -1)), TensorSpec("sr", INT64, ()))
    outputs = (TensorSpec("y", FP32, (-1, 1)),)

    def infer(self, call: Infer) -> Any:
        x, rate = call.inputs["x"].data, int(call.inputs["sr"].data)
        if rate != 16_000 or x.shape[-1] != 512:
            raise RuntimeError(f"expected 512 samples at 16 kHz, got {x.shape[-1]} at {rate} Hz")
        return x[:, :1]


async def test_a_sample_rate_is_that_of_speech() -> None:
    async with open_engine(Sound) as engine:
        inputs = only(engine).example
        assert inputs is not None
        assert {name: (t.shape, set(t.data.flat)) for name, t in inputs.items()} == {
            "x": ((1, 512), {1.0}),
            "sr": ((), {16_000}),
        }


async def test_a_model_that_answers_no_example_is_ready_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async with open_engine(Refuses) as engine:
        deployment = only(engine)
        assert deployment.ready
        assert engine.ready()
        reason = "ready, but the trial failed: input 'x': expected a photo"
        (entry,) = (await engine.call(Request(States()))).answer
        assert (entry.state, entry.reason) == ("READY", reason)
        assert engine.description(deployment).answered_no_example
        assert caplog.text.count("trial failed: model=Refuses") == 1
        # It works with real inputs: from now on nothing is reported.
        answer = await engine.infer("Refuses", {"x": np.full((1, 3, 2, 2), 0.5, np.float32)})
        assert answer["y"].tolist() == [0.5]
        (entry,) = (await engine.call(Request(States()))).answer
        assert (entry.state, entry.reason) == ("READY", "")
        assert not engine.description(deployment).answered_no_example
        assert deployment.example is None, "the inputs of users are no examples"


async def test_a_model_cannot_change_an_example() -> None:
    class Writes(Picture):
        inputs = (TensorSpec("x", FP32, (2,)),)

        def infer(self, call: Infer) -> Any:
            call.inputs["x"].data[0] = 5
            return call.inputs["x"].data

    async with open_engine(Writes) as engine:
        assert "read-only" in only(engine).trial_error, "as for the inputs of requests"


async def test_a_failed_request_does_not_clear_a_failed_trial() -> None:
    async with open_engine(Refuses) as engine:
        with pytest.raises(InvalidInput):
            await engine.infer("Refuses", {"x": np.ones((1, 3, 2, 2), np.float32)})
        assert only(engine).trial_error


async def test_reasons_are_in_one_line() -> None:
    class Small(Picture):
        inputs = (TensorSpec("x", FP32, (1, 3, 8, 8)),)

    async with open_engine(Small) as engine:
        assert only(engine).trial_error == (
            "model 'Small' failed: RuntimeError: Non concat axis dimensions must match: Axis 2 has mismatched "
            "dimensions of 19 and 20"
        )


async def test_the_trial_can_be_turned_off(tmp_path: Path) -> None:
    async with open_engine(Picture, trial_s=0) as engine:
        assert (example(engine), only(engine).trial_error, SEEN) == (None, "", [])
    (tmp_path / "model.py").write_text(f"import dragoman\n{CELSIUS}")
    (tmp_path / "dragoman.toml").write_text("[model]\ntrial_s = 0\n")
    async with open_engine(tmp_path, placement="inline") as engine:
        assert example(engine) is None


# --- what is tried, and what is not ----------------------------------------------------------------------------

CELSIUS = """
@dragoman.model
def celsius(fahrenheit: float) -> float:
    if fahrenheit > 1000:
        raise ValueError("too hot")
    return (fahrenheit - 32) / 1.8
"""


async def test_models_without_declared_inputs_are_not_tried() -> None:
    class Anything(dragoman.Model):
        placement = "thread"

        def infer(self, call: Infer) -> Any:
            SEEN.append(call)
            return {}

    async with open_engine(Anything) as engine:
        assert (example(engine), only(engine).trial_error, SEEN) == (None, "", [])


async def test_stateful_models_are_not_tried() -> None:
    class Counter(Picture):
        sequences = SequenceOptions()

    async with open_engine(Counter) as engine:
        assert (example(engine), only(engine).trial_error, SEEN) == (None, "", [])


async def test_guesses_that_fail_are_no_failed_trial() -> None:
    """A function declares the datatype of an array, but not its shape."""

    async def serve(function: Any) -> tuple[Any, str]:
        async with open_engine(function, placement="thread") as engine:
            inputs = only(engine).example
            return inputs and inputs["x"].shape, only(engine).trial_error

    def vector(x: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
        if x.shape != (8,):
            raise ValueError("expected 8 numbers")
        return x

    def seven(x: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
        if x.shape != (7,):
            raise ValueError("expected 7 numbers")
        return x

    assert await serve(vector) == ((8,), "")
    assert await serve(seven) == (None, "")


SIMULATOR = """
import dragoman
import numpy as np

@dragoman.vector_function(inputs={{"x": 2}}, outputs={{"y": 1}}, derivatives=None{point}, placement="{placement}")
def energy(x):
    with open("{log}", "a") as file:
        file.write(f"{{x.tolist()}}\\n")
    if {fails}:
        raise ValueError("no solution")
    return np.array([x.sum()])
"""


@pytest.mark.parametrize(("placement", "evaluations"), [("process", ["[1.0, 1.0]"]), ("thread", []), ("inline", [])])
@pytest.mark.parametrize("fails", [False, True])
async def test_a_simulator_is_evaluated_once_where_it_can_be_stopped(
    tmp_path: Path, placement: str, evaluations: list[str], fails: bool
) -> None:
    (tmp_path / "log").touch()
    text = SIMULATOR.format(point="", placement=placement, log=tmp_path / "log", fails=fails)
    (tmp_path / "model.py").write_text(text)
    async with open_engine(tmp_path / "model.py") as engine:
        assert (tmp_path / "log").read_text().splitlines() == evaluations
        assert bool(only(engine).trial_error) == (fails and placement == "process")
        assert (example(engine) is not None) == (not fails and placement == "process")


async def test_a_simulator_is_tried_at_its_declared_point(tmp_path: Path) -> None:
    text = SIMULATOR.format(point=", at=[[3, 4]]", placement="process", log=tmp_path / "log", fails=False)
    (tmp_path / "model.py").write_text(text.replace('inputs={"x": 2}, outputs={"y": 1}, ', ""))
    async with open_engine(tmp_path / "model.py") as engine:
        assert list((example(engine) or {}).values()) == [[3.0, 4.0]]


async def test_streams_end_with_their_first_chunk() -> None:
    closed: list[bool] = []

    class Endless(dragoman.Model):
        placement = "thread"
        inputs = (TensorSpec("n", INT64, (1,)),)
        outputs = (TensorSpec("y", INT64, (1,)),)

        def infer(self, call: Infer) -> Iterator[Any]:
            try:
                while True:
                    yield {"y": call.inputs["n"].data}
            finally:
                closed.append(True)

    class AsyncEndless(Endless):
        async def infer(self, call: Infer) -> AsyncIterator[Any]:  # type: ignore[override]
            try:
                while True:
                    yield {"y": call.inputs["n"].data}
                    await asyncio.sleep(0)
            finally:
                closed.append(True)

    for kind in (Endless, AsyncEndless):
        async with open_engine(kind) as engine:
            assert example(engine) == {"n": [1]}
    assert closed == [True, True]


async def test_a_text_model_generates_one_token() -> None:
    calls: list[Generate] = []

    class Writer(dragoman.Model):
        placement = "inline"

        async def generate(self, call: Generate) -> AsyncIterator[Generation]:
            calls.append(call)
            yield Generation((Text(text="!", whole="!", generated=1, finish="length"),))

    async with open_engine(Writer) as engine:
        assert (only(engine).ready, only(engine).trial_error, example(engine)) == (True, "", None)
    assert [(call.prompts, call.sampling.max_new_tokens, call.stream) for call in calls] == [(("Hello",), 1, False)]

    class Broken(Writer):
        async def generate(self, call: Generate) -> AsyncIterator[Generation]:
            if call.prompts:
                raise RuntimeError("no kernel for this machine")
            yield Generation(())

    async with open_engine(Broken) as engine:
        assert "no kernel for this machine" in only(engine).trial_error


async def test_a_model_whose_sibling_is_not_ready_is_not_blamed() -> None:
    class Asks(Picture):
        def infer(self, call: Infer) -> Any:
            raise dragoman.errors.NotReady("model 'other' is not ready")

    async with open_engine(Asks) as engine:
        assert (only(engine).trial_error, example(engine)) == ("", None)


# --- limits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["thread", "process"])
async def test_a_slow_model_is_ready_after_the_limit(placement: Placement) -> None:
    begin_s = time.monotonic()
    async with open_engine(Slow, placement=placement, trial_s=0.1) as engine:
        assert only(engine).trial_error == "no answer within 0.1 s"
        answer = await engine.infer("Slow", {"x": np.ones(1, np.float32)})  # once the trial has ended
        assert answer["y"].tolist() == [1]
        assert only(engine).trial_error == ""
    assert time.monotonic() - begin_s < 60


async def test_a_model_on_the_event_loop_is_tried_in_a_thread() -> None:
    class Blocks(Picture):
        placement = "inline"

        def infer(self, call: Infer) -> Any:
            SEEN.append(asyncio.events._get_running_loop())
            return call.inputs["x"].data[:, 0, 0, 0]

    async with open_engine(Blocks) as engine:
        assert example(engine) == {"x": [[[[1.0]]] * 3]}
        await engine.infer("Blocks", {"x": np.ones((1, 3, 1, 1), np.float32)})
    assert SEEN[0] is None
    assert SEEN[1] is not None


class Crashes(Picture):
    """Ends its process on examples, and logs how often."""

    def infer(self, call: Infer) -> Any:
        if call.inputs["x"].data.flat[0] == 1:
            with open(os.environ["CRASHES_LOG"], "a") as file:
                file.write("x")
            os._exit(3)
        return call.inputs["x"].data.mean(axis=(1, 2, 3))


async def test_an_example_that_ends_the_worker_is_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("CRASHES_LOG", str(log))
    async with open_engine(Crashes, placement="process") as engine:
        deployment = only(engine)
        assert "worker" in deployment.trial_error
        while not deployment.ready:  # its process starts again
            await asyncio.sleep(0.05)
        answer = await engine.infer("Crashes", {"x": np.full((1, 3, 1, 1), 2, np.float32)})
        assert answer["y"].tolist() == [2]
    assert log.read_text() == "x"


async def test_a_model_that_calls_load_is_tried_at_its_first_load(tmp_path: Path) -> None:
    for name in ("a", "b"):
        log = tmp_path / f"{name}.log"
        text = CELSIUS.replace("celsius", name).replace(
            ":\n    if", f':\n    with open("{log}", "a") as file:\n        file.write("x")\n    if'
        )
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.py").write_text(f"import dragoman\n{text}")
    async with open_engine(tmp_path, load_on_demand=True, max_loaded_models=1, placement="inline") as engine:
        for _ in range(3):
            for name in ("a", "b"):
                await engine.infer(name, {"fahrenheit": np.array([32.0])})
        a = next(d for d in engine.deployments() if d.spec.name == "a")
        assert a.example is not None
    assert (tmp_path / "a.log").read_text() == "x" * 4  # three calls, and one trial


# --- examples of authors -----------------------------------------------------------------------------------------


async def test_a_model_may_know_an_example() -> None:
    async with open_engine(Knows) as engine:
        inputs = only(engine).example
        assert inputs is not None
        assert (inputs["x"].shape, inputs["x"].datatype) == ((1, 3, 2, 2), FP32)
    async with open_engine(Knows, placement="process") as engine:
        inputs = only(engine).example
        assert inputs is not None
        assert inputs["x"].data.tolist() == np.zeros((1, 3, 2, 2)).tolist()


async def test_an_example_of_the_model_that_does_not_fit_is_an_error() -> None:
    class Wrong(Refuses):
        def example_inputs(self) -> dict[str, Any]:
            return {"x": ["text"]}

    async with open_engine(Wrong) as engine:
        assert "its example: BYTES does not convert to FP32" in only(engine).reason


def request(x: float) -> dict[str, Any]:
    return {"inputs": [{"name": "fahrenheit", "datatype": "FP64", "shape": [1], "data": [x]}]}


def write_celsius(folder: Path, name: str = "model.py") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"import dragoman\n{CELSIUS}")
    return folder / name


@pytest.mark.parametrize("content", [request(50), [request(50), request(9999)]])
async def test_a_file_of_examples_beside_the_model(tmp_path: Path, content: Any) -> None:
    write_celsius(tmp_path / "m")
    (tmp_path / "m" / EXAMPLES).write_text(json.dumps(content))
    for path in (tmp_path / "m", tmp_path / "m" / "model.py", f"{tmp_path / 'm' / 'model.py'}:celsius", tmp_path):
        async with open_engine(str(path), placement="inline") as engine:
            assert example(engine) == {"fahrenheit": [50.0]}


async def test_the_example_of_one_file_among_others(tmp_path: Path) -> None:
    joblib, linear = pytest.importorskip("joblib"), pytest.importorskip("sklearn.linear_model")
    for name in ("one", "two"):
        joblib.dump(linear.LinearRegression().fit([[1, 2], [3, 5]], [1, 2]), tmp_path / f"{name}.joblib")
    body = {"inputs": [{"name": "input", "datatype": "FP64", "shape": [1, 2], "data": [5, 6]}]}
    (tmp_path / "one.examples.json").write_text(json.dumps(body))
    (tmp_path / EXAMPLES).write_text(json.dumps(body))  # of which model?
    async with open_engine(tmp_path, allow_pickle=True) as engine:
        examples = {d.spec.name: d.example["input"].data.tolist() for d in engine.deployments() if d.example}
    assert examples == {"one": [[5.0, 6.0]], "two": [[0.0, 0.0]]}
    (tmp_path / "one.joblib").unlink()
    (tmp_path / "one.examples.json").unlink()
    async with open_engine(tmp_path, allow_pickle=True) as engine:  # the only model there
        assert example(engine) == {"input": [[5.0, 6.0]]}


async def test_examples_of_versions(tmp_path: Path) -> None:
    for version in ("1", "2"):
        write_celsius(tmp_path / "m" / version)
    (tmp_path / "m" / EXAMPLES).write_text(json.dumps(request(50)))
    (tmp_path / "m" / "2" / EXAMPLES).write_text(json.dumps(request(60)))
    async with open_engine(tmp_path, version_policy="all", placement="inline") as engine:
        examples = {d.spec.version: d.example["fahrenheit"].data.tolist() for d in engine.deployments() if d.example}
    assert examples == {"1": [50.0], "2": [60.0]}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[", "examples.json: the file 'examples.json' cannot be read"),
        ("[{}]", "examples.json: request 1: "),
        (json.dumps(request(5000)), "ValueError: too hot"),
        (json.dumps({"inputs": [{"name": "kelvin", "datatype": "FP64", "shape": [1], "data": [1]}]}), "'kelvin'"),
    ],
)
async def test_an_example_that_the_model_does_not_answer_is_a_failed_trial(
    tmp_path: Path, content: str, reason: str
) -> None:
    write_celsius(tmp_path)
    (tmp_path / EXAMPLES).write_text(content)
    async with open_engine(tmp_path, placement="inline") as engine:
        assert only(engine).ready
        assert reason in only(engine).trial_error
        assert example(engine) is None


async def test_a_warm_up_request_is_the_example(tmp_path: Path) -> None:
    write_celsius(tmp_path)
    (tmp_path / "dragoman.toml").write_text('[model]\nwarmup = "warmup.json"\ntrial_s = 0\n')
    (tmp_path / "warmup.json").write_text(json.dumps([request(70), request(80)]))
    async with open_engine(tmp_path, placement="inline") as engine:
        assert example(engine) == {"fahrenheit": [70.0]}


async def test_a_reload_is_tried_again(tmp_path: Path) -> None:
    write_celsius(tmp_path / "m")
    async with open_engine(tmp_path, control_token="t", placement="inline") as engine:
        assert example(engine) == {"fahrenheit": [1.0]}
        (tmp_path / "m" / "model.py").write_text(f"import dragoman\n{CELSIUS.replace('> 1000', '>= 0')}")
        await engine.call(Request(dragoman.core.calls.Load("t"), "m"))
        assert only(engine).ready
        assert "too hot" in only(engine).trial_error
        with pytest.raises(ModelFailed, match="too hot"):
            await engine.infer("m", {"fahrenheit": np.array([1.0])})
        (entry,) = (await engine.call(Request(Index("t")))).answer
        assert entry.reason.startswith("ready, but the trial failed: ")


async def test_classes_of_a_model_are_labels() -> None:
    placements: tuple[Placement, ...] = ("thread", "process")
    for placement in placements:
        async with open_engine(Classifier, placement=placement) as engine:
            (labels,) = engine.description(only(engine)).labels.values()
            assert (labels.names, labels.file) == (("cat", "7"), "")
