"""The response cache: which requests are answered from it, and that answers are those of the model."""

import asyncio
import gc
import logging
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dragoman
from dragoman import BF16, BYTES, FP32, FP64, ApplyHessian, ApplyJacobian, Gradient, Infer, Inference, errors
from dragoman.core.bytes_tensor import BytesTensor
from dragoman.core.calls import Embed, Embedded, Handle, Handled, Load, Measure, ReadStatistics, Request, SignatureFor
from dragoman.core.signature import Signature
from dragoman.core.tensor import Tensor
from dragoman.engine.engine import Engine
from dragoman.engine_setup import open_engine
from loaded_models import recorded_models
from vector_calls import vector

SIZE = 1 << 20


class Numbering(dragoman.Model):
    """Return the number of the computation; negative inputs raise."""

    placement = "inline"

    def load(self) -> None:
        self.number = 0
        self.own = np.zeros(3)
        self.parameters: dict[str, Any] = {"p": 1}

    def infer(self, call: Infer) -> Any:
        self.number += 1
        x = next(iter(call.inputs.values()))
        if x.datatype is not BYTES and x.data.size and x.data.flat[0] < 0:
            raise errors.InvalidInput(f"negative in computation {self.number}")
        self.own[:] = self.number
        self.parameters["p"] = self.number
        headers = {"x-number": str(self.number), "Ce-Id": "7", "Ce-Requestid": "7"}  # ids of one request are not stored
        return Inference({"number": Tensor(self.own, FP64)}, self.parameters, headers)

    handlers = ("POST /number",)

    def handle(self, call: Handle) -> Any:
        self.number += 1
        return Handled(str(self.number).encode())

    def embed(self, call: Embed) -> Any:
        self.number += 1
        return Embedded(Tensor(np.full((len(call.inputs), 2), self.number, np.float32), FP32), 3)


class Deriving(dragoman.Model):
    """Return the number of the computation as a derivative."""

    placement = "inline"
    inputs = (dragoman.TensorSpec("x", FP64, (1,)),)
    outputs = (dragoman.TensorSpec("y", FP64, (1,)),)

    def load(self) -> None:
        self.number = 0

    def infer(self, call: Infer) -> Any:
        return call.inputs

    def gradient(self, call: Gradient) -> Any:
        self.number += 1
        return np.full(1, float(self.number))

    def apply_jacobian(self, call: ApplyJacobian) -> Any:
        self.number += 1
        return np.full(1, float(self.number))

    def apply_hessian(self, call: ApplyHessian) -> Any:
        self.number += 1
        return np.full(1, float(self.number))


class Gated(dragoman.Model):
    """Wait for a gate; return the number of the computation."""

    placement = "inline"

    def load(self) -> None:
        self.gate = asyncio.Event()
        self.begun = self.cancelled = 0
        self.fails = False

    async def infer(self, call: Infer) -> Any:
        self.begun += 1
        number = self.begun
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.fails:
            raise errors.InvalidInput(f"computation {number}")
        return {"number": np.array([number])}


def infer(x: Any, **fields: Any) -> Infer:
    return Infer({"x": x if isinstance(x, Tensor) else Tensor.of(np.asarray(x))}, **fields)


async def number(engine: Engine, call: Any, model: str = "Numbering", **fields: Any) -> int:
    """Return the number of the computation that answers a call."""
    model = model if isinstance(call, Infer | Embed) else "Deriving"
    answer = (await engine.call(Request(call, model, **fields))).answer
    if isinstance(answer, Embedded):
        return int(answer.vectors.data[0, 0])
    return int((answer.outputs["number"] if isinstance(answer, Inference) else answer).data.flat[0])


async def measured(engine: Engine) -> dict[str, float]:
    families = (await engine.call(Request(Measure()))).answer
    samples = [s for f in families for s in f.flat if s.name.startswith("dragoman_response_cache_")]
    samples = [s for s in samples if s.labels["model"] != "Deriving"]
    return {s.name.removeprefix("dragoman_response_cache_"): s.value for s in samples}


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with open_engine(Numbering, Deriving, response_cache_bytes=SIZE) as engine:
        yield engine


async def test_without_the_setting_nothing_is_stored() -> None:
    async with open_engine(Numbering) as engine:
        assert [await number(engine, infer([1.0])) for _ in range(2)] == [1, 2]
        assert await measured(engine) == {}


@pytest.mark.parametrize("placement", ["inline", "thread"])
async def test_an_equal_request_is_answered_from_the_cache(placement: Any) -> None:
    async with open_engine(Numbering, response_cache_bytes=SIZE, placement=placement) as engine:
        response = await engine.call(Request(infer([1.0]), "Numbering", id="first"))
        again = await engine.call(Request(infer([1.0]), "Numbering", id="second"))
        for each in (response.answer, again.answer):
            assert (each.outputs["number"].data.tolist(), each.parameters) == ([1.0] * 3, {"p": 1})
            assert (each.outputs["number"].datatype, each.metadata) == (FP64, {"x-number": "1"})
        found = await measured(engine)
        assert (found["hits_total"], found["misses_total"], found["evictions_total"]) == (1, 1, 0)
        assert 500 < found["bytes"] < 3000


TEXTS = ["a", "b"]
PAIRS: dict[str, tuple[Any, Any]] = {
    "value": (infer([1.0]), infer([2.0])),
    "sign of zero": (infer([0.0]), infer([-0.0])),
    "NaN": (infer([np.nan]), infer([np.inf])),
    "shape": (infer([[1.0, 2.0]]), infer([[1.0], [2.0]])),
    "empty shapes": (infer(np.zeros((0, 2))), infer(np.zeros((2, 0)))),
    "datatype": (infer(np.zeros(1, np.float32)), infer(np.zeros(1, np.int32))),
    "BF16": (infer(Tensor.of(np.zeros(1), BF16)), infer(np.zeros(1, np.float16))),
    "name": (infer([1.0]), Infer({"y": Tensor.of(np.array([1.0]))})),
    "number of inputs": (infer([1.0]), Infer({name: Tensor.of(np.array([1.0])) for name in "xy"})),
    "order": (Infer({n: Tensor.of(np.zeros(1)) for n in "xy"}), Infer({n: Tensor.of(np.zeros(1)) for n in "yx"})),
    "bytes": (infer(np.array([b"ab", b"c"])), infer(np.array([b"a", b"bc"]))),
    "zero bytes": (infer(Tensor.of([b"a\0", b"b"])), infer(Tensor.of([b"a", b"\0b"]))),
    "text": (infer(BytesTensor.of_texts(TEXTS, [2])), infer(Tensor.of(np.array([b"a", b"b"], object)))),
    "tensor's parameter": (
        infer(Tensor.of(np.zeros(1), parameters={"p": 1})),
        infer(Tensor.of(np.zeros(1), parameters={"p": True})),
    ),
    "parameter": (infer([1.0], parameters={"p": 1}), infer([1.0], parameters={"p": 1.0})),
    "parameter as text": (infer([1.0], parameters={"p": 1}), infer([1.0], parameters={"p": "1"})),
    "parameter's name": (infer([1.0], parameters={"p": 1}), infer([1.0], parameters={"q": 1})),
    "line breaks": (infer([1.0], parameters={"p": "1\n2"}), infer([1.0], parameters={"p": "1", "2": ""})),
    "outputs": (infer([1.0]), infer([1.0], outputs=("number",))),
    "content type": (infer([1.0]), infer([1.0], content_types={"number": "np"})),
    "config": (infer([1.0], config={"a": [1, {"b": 2}]}), infer([1.0], config={"a": [1, {"b": 2.0}]})),
    "nested config": (infer([1.0], config={"a": {"b": 1}}), infer([1.0], config={"a": {}, "b": 1})),
    "type of call": (
        Gradient(positional=(vector(1),), sens=vector(2)),
        ApplyJacobian(positional=(vector(1),), vec=vector(2)),
    ),
    "sens": (
        Gradient(positional=(vector(1),), sens=vector(2)),
        Gradient(positional=(vector(1),), sens=vector(3)),
    ),
    "vectors of a Hessian": (
        ApplyHessian(positional=(vector(1),), sens=vector(2), vec=vector(3)),
        ApplyHessian(positional=(vector(1),), sens=vector(3), vec=vector(2)),
    ),
    "texts": (Embed(("a", "b")), Embed(("a\nb",))),
    "tokens": (Embed(((1, 2),)), Embed(((1,), (2,)))),
    "truncations": (Embed(("a",), 5), Embed(("a",), 5, "left")),
}


@pytest.mark.parametrize("difference", PAIRS)
async def test_requests_that_differ_have_answers_of_their_own(engine: Engine, difference: str) -> None:
    first, second = PAIRS[difference]
    assert [await number(engine, call) for call in (first, second, first, second)] == [1, 2, 1, 2]


async def test_metadata_is_part_of_the_key(engine: Engine) -> None:
    for _ in range(2):
        assert await number(engine, infer([1.0]), metadata={"x-user": "a"}) == 1
        assert await number(engine, infer([1.0]), metadata={"x-user": "b"}) == 2
        assert await number(engine, infer([1.0])) == 3


async def test_a_value_without_an_exact_form_is_computed_each_time(engine: Engine) -> None:
    call = infer([1.0], config={"a": np.zeros(1)})
    assert [await number(engine, call) for _ in range(2)] == [1, 2]
    found = await measured(engine)
    assert found["misses_total"] == 2
    assert found["hits_total"] == 0


async def test_a_strided_array_is_equal_to_its_copy(engine: Engine) -> None:
    wide = np.arange(6.0).reshape(3, 2)
    assert await number(engine, infer(wide[:, 0])) == await number(engine, infer([0.0, 2.0, 4.0])) == 1
    assert await number(engine, infer([0.0, 1.0, 2.0])) == 2


async def test_large_requests(engine: Engine) -> None:
    x = np.zeros(1 << 18)
    assert [await number(engine, infer(x)), await number(engine, infer(x))] == [1, 1]
    x[-1] = 1
    assert await number(engine, infer(x)) == 2


async def test_responses_of_handlers_are_not_stored(engine: Engine) -> None:
    call = Request(Handle(method="POST", path="/number"))
    assert [(await engine.call(call)).answer.content for _ in range(2)] == [b"1", b"2"]


async def test_errors_are_not_stored(engine: Engine) -> None:
    for n in (1, 2):
        with pytest.raises(errors.InvalidInput, match=f"negative in computation {n}"):
            await number(engine, infer([-1.0]))
    assert (await measured(engine))["bytes"] == 0


async def test_no_user_can_change_a_stored_answer(engine: Engine) -> None:
    first = (await engine.call(Request(infer([1.0]), "Numbering"))).answer
    await number(engine, infer([2.0]))  # the model writes to the array and the parameters that it returned
    for answer in (first, (await engine.call(Request(infer([1.0]), "Numbering"))).answer):
        output = answer.outputs["number"]
        assert (output.data.tolist(), answer.parameters) == ([1.0] * 3, {"p": 1})
        with pytest.raises(ValueError, match="read-only"):
            output.data[0] = 7
        for table in (answer.outputs, answer.parameters, answer.metadata):
            table.clear()  # type: ignore[union-attr]
    assert await number(engine, infer([1.0])) == 1


class Identity(dragoman.Model):
    placement = "inline"

    def infer(self, call: Infer) -> Any:
        return call.inputs


async def test_an_input_that_is_the_answer_may_be_changed_later() -> None:
    async with open_engine(Identity, response_cache_bytes=SIZE) as engine:
        x = np.zeros(1000)
        first = await engine.infer("Identity", {"x": x})
        x[:] = 7
        assert not first["x"].any()
        assert not (await engine.infer("Identity", {"x": np.zeros(1000)}))["x"].any()


async def test_the_answer_used_least_recently_is_removed() -> None:
    async with open_engine(Numbering, response_cache_bytes=4000) as engine:
        assert [await number(engine, infer([float(n)])) for n in range(3)] == [1, 2, 3]
        assert await number(engine, infer([0.0])) == 1
        before = await measured(engine)
        assert before["evictions_total"] == 0
        assert await number(engine, infer([3.0])) == 4
        after = await measured(engine)
        assert (after["evictions_total"], after["bytes"]) == (1, before["bytes"])
        assert after["bytes"] <= 4000
        assert [await number(engine, infer([float(n)])) for n in (0, 2, 3)] == [1, 3, 4]
        assert await number(engine, infer([1.0])) == 5


class Sized(dragoman.Model):
    placement = "inline"

    def infer(self, call: Infer) -> Any:
        n = int(call.inputs["n"].data[0])
        return {"y": np.zeros(n) if n >= 0 else [b"x" * -n]}


async def test_an_answer_larger_than_the_cache_is_not_stored() -> None:
    async with open_engine(Sized, response_cache_bytes=100_000) as engine:
        for n, is_stored in ((20_000, False), (1_000, True), (-200_000, False), (-1_000, True)):
            before = (await measured(engine))["bytes"]
            result = await engine.infer("Sized", {"n": [n]})
            assert len(result["y"]) == max(n, 1)
            assert ((await measured(engine))["bytes"] > before) is is_stored
        assert (await measured(engine))["evictions_total"] == 0


# --- equal calls at the same time ----------------------------------------------------------------------------


async def begin(engine: Engine, model: Any, count: int, begun: int, **fields: Any) -> list[asyncio.Task[int]]:
    tasks = [asyncio.ensure_future(number(engine, infer([1.0]), "Gated", **fields)) for _ in range(count)]
    while model.begun < begun:
        await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    return tasks


@pytest.fixture
async def gated() -> AsyncIterator[tuple[Engine, Any]]:
    with recorded_models() as models:
        async with open_engine(Gated, response_cache_bytes=SIZE) as engine:
            yield engine, models["Gated"]


async def test_equal_concurrent_calls_are_computed_once(gated: tuple[Engine, Any]) -> None:
    engine, model = gated
    tasks = await begin(engine, model, 3, 1)
    model.gate.set()
    assert await asyncio.gather(*tasks) == [1, 1, 1]
    assert await number(engine, infer([1.0]), "Gated") == 1
    found = await measured(engine)
    assert (found["hits_total"], found["misses_total"]) == (3, 1)
    (counted,) = (await engine.call(Request(ReadStatistics(), "Gated"))).answer
    assert (counted.succeeded, counted.inferences, counted.executions) == (4, 1, 1)


async def test_an_error_goes_to_all_who_wait_and_is_not_stored(gated: tuple[Engine, Any]) -> None:
    engine, model = gated
    tasks = await begin(engine, model, 2, 1)
    model.fails = True
    model.gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert list(map(str, results)) == ["computation 1"] * 2
    model.fails = False
    assert await number(engine, infer([1.0]), "Gated") == 2


async def test_a_computation_continues_while_a_client_waits(gated: tuple[Engine, Any]) -> None:
    engine, model = gated
    first, second = await begin(engine, model, 2, 1)
    first.cancel()
    await asyncio.wait({first})
    model.gate.set()
    assert await second == 1
    assert (first.cancelled(), model.cancelled) == (True, 0)


async def test_a_computation_ends_when_every_client_has_left(gated: tuple[Engine, Any]) -> None:
    engine, model = gated
    tasks = await begin(engine, model, 2, 1)
    for task in tasks:
        task.cancel()
    (later,) = await begin(engine, model, 1, 2)  # does not join the cancelled computation
    assert model.cancelled == 1
    model.gate.set()
    assert await later == 2
    assert await number(engine, infer([1.0]), "Gated") == 2


async def test_a_client_that_leaves_before_the_computation_begins(gated: tuple[Engine, Any]) -> None:
    engine, model = gated
    call = engine.begin(Request(infer([1.0]), "Gated"))
    assert isinstance(call, Coroutine)
    call.close()
    del call
    await asyncio.sleep(0)
    gc.collect()  # a coroutine that was never awaited is an error
    model.gate.set()
    assert await number(engine, infer([1.0]), "Gated") == model.begun == 1


async def test_each_client_has_its_own_deadline(gated: tuple[Engine, Any]) -> None:
    engine, model = gated
    now_s = time.monotonic()
    short = await begin(engine, model, 1, 1, deadline_s=now_s + 0.2)
    (long,) = await begin(engine, model, 1, 1, deadline_s=now_s + 600)
    with pytest.raises(errors.DeadlineExceeded):
        await short[0]
    model.gate.set()
    assert await long == 1


class Busy(dragoman.Model):
    """One thread: a call with 0 waits for a gate, others for their turn."""

    placement = "thread"

    def load(self) -> None:
        self.begun, self.gate = threading.Event(), threading.Event()

    def infer(self, call: Infer) -> Any:
        if not call.inputs["x"].data[0]:
            self.begun.set()
            assert self.gate.wait(60)
        return call.inputs


async def test_the_deadline_of_the_first_client_does_not_end_a_queued_computation() -> None:
    with recorded_models() as models:
        async with open_engine(Busy, response_cache_bytes=SIZE) as engine:
            first = asyncio.ensure_future(engine.infer("Busy", {"x": [0.0]}))
            await asyncio.to_thread(models["Busy"].begun.wait, 60)
            now_s = time.monotonic()
            short = engine.call(Request(infer([1.0]), "Busy", deadline_s=now_s + 0.1))
            long = engine.call(Request(infer([1.0]), "Busy", deadline_s=now_s + 600))
            tasks = [asyncio.ensure_future(each) for each in (short, long)]
            with pytest.raises(errors.DeadlineExceeded):
                await tasks[0]
            models["Busy"].gate.set()
            assert (await tasks[1]).answer.outputs["x"].data.tolist() == [1.0]
            await first


# --- models that change --------------------------------------------------------------------------------------

MODEL = """
import numpy as np
import dragoman

@dragoman.vector_function(inputs=[1], outputs=[1], placement="thread", gradient=lambda x, sens: 2 * sens)
def model(x):
    return {} * x
"""


async def evaluate(engine: Engine, model: str) -> float:
    call = Infer({}, positional=(vector(1),))
    (output,) = (await engine.call(Request(call, model))).answer.outputs.values()
    return float(output.data[0])


async def test_a_reload_removes_the_answers_of_a_model_and_of_graphs_that_use_it(tmp_path: Path) -> None:
    for name in ("double", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.py").write_text(MODEL.format(2))
    (tmp_path / "squared.graph.toml").write_text(
        "edges = ['d -> s']\n[nodes]\nd = { served = 'double' }\ns = { builtin = 'square' }\n"
    )
    async with open_engine(tmp_path, control_open=True, response_cache_bytes=SIZE, placement="thread") as engine:
        assert engine.ready(), [d.reason for d in engine.deployments()]
        assert [await evaluate(engine, name) for name in ("double", "squared")] == [2, 4]
        (tmp_path / "double" / "model.py").write_text(MODEL.format(3))
        assert [await evaluate(engine, name) for name in ("double", "squared")] == [2, 4]
        await engine.call(Request(Load(""), "double"))
        assert [await evaluate(engine, name) for name in ("double", "squared")] == [3, 9]


WAITING = """
import pathlib
import time

def wait():
    pathlib.Path(__file__).with_name("begun").touch()
    while not pathlib.Path(__file__).with_name("go").exists():
        time.sleep(0.01)
"""


@pytest.mark.parametrize("is_repeated", [True, False])
async def test_an_answer_computed_with_a_model_that_was_replaced_is_not_stored(
    tmp_path: Path, is_repeated: bool
) -> None:
    folder = tmp_path / "double"
    folder.mkdir()
    waits = MODEL.replace("    return {} * x", "    if x[0] == 1:\n        wait()\n    return 2 * x")
    (folder / "model.py").write_text(WAITING + waits)
    (tmp_path / "same.graph.toml").write_text("[nodes]\nd = { served = 'double' }\n")
    async with open_engine(tmp_path, control_open=True, response_cache_bytes=SIZE, placement="thread") as engine:
        first = asyncio.ensure_future(evaluate(engine, "same"))
        while not (folder / "begun").exists():
            await asyncio.sleep(0.01)
        (folder / "model.py").write_text(MODEL.format(3))
        await engine.call(Request(Load(""), "double"))
        later = [asyncio.ensure_future(evaluate(engine, "same"))] if is_repeated else []  # must not share the answer
        await asyncio.sleep(0)
        (folder / "go").touch()
        assert [await first, *await asyncio.gather(*later), await evaluate(engine, "same")] == [2, *[3] * len(later), 3]


class Large(dragoman.Model):
    """Answers that worker processes return in shared memory."""

    placement = "process"

    def infer(self, call: Infer) -> Any:
        return {"y": np.full(100_000, call.inputs["x"].data[0])}


async def test_stored_answers_of_worker_processes_do_not_change() -> None:
    async with open_engine(Large, response_cache_bytes=20_000_000) as engine:
        for _ in range(2):
            answers = [await engine.infer("Large", {"x": [float(n)]}) for n in range(12)]
            for n, answer in enumerate(answers):
                assert (answer["y"] == n).all()
        found = await measured(engine)
        assert (found["hits_total"], found["misses_total"]) == (12, 12)


class Growing(dragoman.Model):
    """Returns as many numbers as it has answered calls, whatever size the config asks for."""

    placement = "inline"

    def load(self) -> None:
        self.count = 0

    def signature_for(self, call: SignatureFor) -> Signature:
        spec = dragoman.TensorSpec
        return Signature((spec("x", FP64, (1,)),), (spec("y", FP64, (call.config.get("n", 1),)),))

    def infer(self, call: Infer) -> Any:
        self.count += 1
        return {"y": np.zeros(self.count)}


async def test_an_answer_of_the_wrong_size_is_not_stored() -> None:
    async with open_engine(Growing, response_cache_bytes=SIZE) as engine:
        call = Request(Infer({}, positional=(vector(1),), config={"n": 2}), "Growing")
        with pytest.raises(errors.InvalidOutput):
            await engine.call(call)
        for _ in range(2):
            (output,) = (await engine.call(call)).answer.outputs.values()
            assert output.shape == (2,)


class Streaming(dragoman.Model):
    placement = "inline"

    async def infer(self, call: Infer) -> AsyncIterator[Any]:
        yield {"y": np.zeros(1)}


async def test_streams_are_not_stored(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    call = Request(infer([1.0]), "Numbering")
    for n in (1, 2):
        (response,) = [response async for response in engine.stream(call)]
        assert response.answer.parameters == {"p": n}
    with caplog.at_level(logging.WARNING, "dragoman.engine"):
        async with open_engine(Streaming, response_cache_bytes=SIZE) as streaming:
            assert await measured(streaming) == {}
    assert [r.getMessage() for r in caplog.records] == [
        "response cache not used, model streams, generates text or is stateful: Streaming"
    ]


COUNTING = """
import itertools
import numpy as np
import dragoman

class Model(dragoman.Model):
    placement = "inline"
    numbers = itertools.count(1)

    def infer(self, call):
        return {"number": np.array([next(self.numbers)])}
"""


async def test_a_response_cache_of_one_model(tmp_path: Path) -> None:
    for name, settings in (("a", f"response_cache_bytes = {SIZE}"), ("b", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.py").write_text(COUNTING)
        (tmp_path / name / "dragoman.toml").write_text(f"[model]\n{settings}\n")
    async with open_engine(tmp_path, placement="inline", control_open=True) as engine:
        assert [await number(engine, infer([1.0]), "a") for _ in range(2)] == [1, 1]
        assert [await number(engine, infer([1.0]), "b") for _ in range(2)] == [1, 2]
        await engine.call(Request(Load(""), "b"))
        assert await number(engine, infer([1.0]), "a") == 1
