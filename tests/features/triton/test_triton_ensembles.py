"""Ensembles with decoupled steps: the steps after them run for each response."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dragoman
from dragoman.core.calls import Describe, Infer, Request, States
from dragoman.core.errors import InvalidInput, NotSupported
from dragoman.core.spec import COMPLETED_CONFIG
from dragoman.core.tensor import Tensor
from dragoman.engine.engine import Engine
from features.triton.repository import ADD_SUB, NUMBER_HEAD, NUMBER_TENSORS, write, write_add_sub

MODELS = {
    # Sends 1, 2, ..., IN; if IN is negative -IN numbers, then none until it is cancelled.
    "count": """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.send, args=(request,), daemon=True).start()

    def send(self, request):
        sender, n = request.get_response_sender(), 0
        if number(request) == 99:
            error = pb_utils.TritonError("no 99", pb_utils.TritonError.INVALID_ARG)
            sender.send(pb_utils.InferenceResponse(error=error), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            return
        while n != abs(number(request)):
            n += 1
            sender.send(response(n))
        while number(request) < 0 and not sender.is_cancelled():
            time.sleep(0.001)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        if number(request) < 0:
            with open(CANCELLED, "w") as file:
                file.write(str(n))
""",
    # Two instances: the answer to 1 comes after that to 2.
    "double": """
two = threading.Event()


class TritonPythonModel:
    def execute(self, requests):
        return [self.respond(number(request)) for request in requests]

    def respond(self, n):
        if n == 2:
            two.set()
        if n == 1:
            two.wait(0.5)
        if n == 13:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("no 13", pb_utils.TritonError.INVALID_ARG))
        return response(2 * n)
""",
}


def step(model: str, source: str, target: str) -> str:
    return (
        f'step {{ model_name: "{model}" model_version: -1 input_map {{ key: "IN" value: "{source}" }} '
        f'output_map {{ key: "OUT" value: "{target}" }} }}\n'
    )


ENSEMBLES = {
    "doubled": step("double", "n", "OUT") + step("count", "IN", "n"),
    "plain_first": step("double", "IN", "n") + step("count", "n", "OUT"),
    "nested": step("count", "IN", "n") + step("count", "n", "m") + step("double", "m", "OUT"),
    "limited": "max_inflight_requests: 1\n" + step("count", "IN", "n") + step("double", "n", "OUT"),
}
TWO_INPUTS = 'input [ { name: "IN" data_type: TYPE_INT32 dims: 1 }, { name: "IN2" data_type: TYPE_INT32 dims: 1 } ]\n'
MIXED = {
    "joined": (
        NUMBER_TENSORS,
        step("count", "IN", "n") + step("pair", "n", "OUT").replace(
            "output_map", 'input_map { key: "IN2" value: "IN" } output_map'
        ),
        "step of model 'pair' receives inputs originated from different decoupled models",
    ),
    "outputs": (
        NUMBER_TENSORS + 'output { name: "OUT2" data_type: TYPE_INT32 dims: 1 }',
        step("count", "IN", "OUT") + step("double", "IN", "OUT2"),
        "the outputs receive tensors originated from different decoupled models",
    ),
}  # fmt: skip


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    policy = "model_transaction_policy { decoupled: true }\n"
    for name, source in MODELS.items():
        options = policy if name == "count" else "instance_group { count: 2 }\n"
        write(tmp_path / name / "config.pbtxt", f'backend: "python"\n{options}{NUMBER_TENSORS}')
        write(
            tmp_path / name / "1" / "model.py",
            NUMBER_HEAD + source.replace("CANCELLED", repr(str(tmp_path / "cancelled"))),
        )
    write(tmp_path / "pair" / "config.pbtxt", f'backend: "python"\n{TWO_INPUTS}{NUMBER_TENSORS.splitlines()[2]}')
    write(tmp_path / "pair" / "1" / "model.py", NUMBER_HEAD + MODELS["double"])
    for name, steps in ENSEMBLES.items():
        write_ensemble(tmp_path, name, NUMBER_TENSORS, steps)
    for name, (tensors, steps, _) in MIXED.items():
        write_ensemble(tmp_path, name, tensors, steps)
    async with dragoman.open_engine(tmp_path, trial_s=0) as engine:  # a trial with 1 would wait for 2
        yield engine


def write_ensemble(root: Path, name: str, tensors: str, steps: str) -> None:
    (root / name / "1").mkdir(parents=True)
    write(root / name / "config.pbtxt", f'platform: "ensemble"\n{tensors}ensemble_scheduling {{\n{steps}}}\n')


def request(model: str, n: int) -> Request[Any]:
    return Request(Infer({"IN": Tensor.of(np.array([n], np.int32))}), model)


async def stream(engine: Engine, model: str, n: int) -> list[int]:
    async with aclosing(engine.stream(request(model, n))) as responses:
        return [int(each.answer.outputs["OUT"].data[0]) async for each in responses]


async def test_steps_run_for_each_response_in_order(engine: Engine) -> None:
    assert await stream(engine, "doubled", 5) == [2, 4, 6, 8, 10]
    assert await stream(engine, "doubled", 0) == []
    assert await stream(engine, "plain_first", 2) == [1, 2, 3, 4]
    assert await stream(engine, "nested", 3) == [2, 2, 4, 2, 4, 6]
    details = (await engine.call(Request(Describe(), "doubled"))).answer.details
    assert details[COMPLETED_CONFIG]["model_transaction_policy"] == {"decoupled": True}


async def test_responses_in_flight_are_limited(engine: Engine) -> None:
    started = asyncio.get_running_loop().time()
    assert await stream(engine, "limited", 2) == [2, 4]
    assert asyncio.get_running_loop().time() - started >= 0.5  # the answer to 1 waits for 2, which is not computed


async def test_an_error_of_a_step_ends_the_stream(engine: Engine) -> None:
    async with aclosing(engine.stream(request("doubled", 20))) as responses:
        for n in range(1, 13):
            assert (await anext(responses)).answer.outputs["OUT"].data.tolist() == [2 * n]
        with pytest.raises(InvalidInput, match=r"^in ensemble 'doubled', no 13$"):
            await anext(responses)
    with pytest.raises(InvalidInput, match=r"^in ensemble 'doubled', no 99$"):
        await stream(engine, "doubled", 99)
    assert await stream(engine, "doubled", 2) == [2, 4]


@pytest.mark.parametrize("is_waiting", [False, True])
async def test_closing_the_stream_cancels_the_decoupled_step(engine: Engine, tmp_path: Path, is_waiting: bool) -> None:
    async with aclosing(engine.stream(request("doubled", -2))) as responses:
        assert (await anext(responses)).answer.outputs["OUT"].data.tolist() == [2]
        if is_waiting:
            assert (await anext(responses)).answer.outputs["OUT"].data.tolist() == [4]
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(responses), 0.05)
    async with asyncio.timeout(60):
        while not (tmp_path / "cancelled").exists():
            await asyncio.sleep(0.01)


async def test_a_single_response_needs_no_stream(engine: Engine) -> None:
    assert (await engine.call(request("doubled", 1))).answer.outputs["OUT"].data.tolist() == [2]
    with pytest.raises(NotSupported):
        await engine.call(request("doubled", 3))


@pytest.mark.parametrize("name", MIXED)
async def test_tensors_of_different_responses_are_rejected(engine: Engine, name: str) -> None:
    states = {each.name: each for each in (await engine.call(Request(States()))).answer}
    assert states[name].state == "UNAVAILABLE"
    assert MIXED[name][2] in states[name].reason


BOTH = """
input [ { name: "IN" data_type: TYPE_INT32 dims: 1 optional: true },
        { name: "IN2" data_type: TYPE_INT32 dims: 1 optional: true } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: 1 }, { name: "OUT2" data_type: TYPE_INT32 dims: 1 } ]
"""
# Answers each input that a request has.
GIVEN = """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([self.rename(each) for each in request.inputs()]) for request in requests]

    def rename(self, tensor):
        return pb_utils.Tensor(tensor.name().replace("IN", "OUT"), tensor.as_numpy())
"""


def both(inputs: tuple[str, str], outputs: tuple[str, str]) -> str:
    maps = [("input", key, name) for key, name in zip(("IN", "IN2"), inputs, strict=True)]
    maps += [("output", key, name) for key, name in zip(("OUT", "OUT2"), outputs, strict=True)]
    text = " ".join(f'{side}_map {{ key: "{key}" value: "{name}" }}' for side, key, name in maps)
    return f'step {{ model_name: "given" model_version: -1 {text} }}\n'


async def test_steps_may_leave_out_outputs(tmp_path: Path) -> None:
    write(tmp_path / "given" / "config.pbtxt", f'backend: "python"\n{BOTH}')
    write(tmp_path / "given" / "1" / "model.py", NUMBER_HEAD + GIVEN)
    write_ensemble(tmp_path, "twice", BOTH, both(("IN", "IN2"), ("n", "m")) + both(("n", "m"), ("OUT", "OUT2")))
    inputs = {"IN": Tensor.of(np.array([5], np.int32))}
    async with dragoman.open_engine(tmp_path) as engine:
        for outputs in (), ("OUT",), ("OUT2", "OUT"):
            answer = (await engine.call(Request(Infer(inputs, outputs), "twice"))).answer
            assert {name: tensor.data.tolist() for name, tensor in answer.outputs.items()} == {"OUT": [5]}
            assert answer.parameters == {}
        with pytest.raises(InvalidInput, match="unexpected inference output 'NO' for model 'twice'"):
            await engine.call(Request(Infer(inputs, ("NO",)), "twice"))
        place = {"sequence_id": 7, "sequence_start": True}
        answer = (await engine.call(Request(Infer(inputs, parameters=place), "twice"))).answer
        assert answer.parameters == {**place, "sequence_end": False}
        with pytest.raises(InvalidInput, match="parameter 'sequence_end': expected true or false, got 'false'"):
            await engine.call(Request(Infer(inputs, parameters={**place, "sequence_end": "false"}), "twice"))


PLUS_ONE = """
class TritonPythonModel:
    def execute(self, requests):
        arrays = [request.inputs()[0].as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array + 1)]) for array in arrays]
"""
FOUR = NUMBER_TENSORS.replace("dims: 1", "dims: 4")


def twice(source: str, target: str) -> str:
    inputs = f'input_map {{ key: "INPUT0" value: "{source}" }} input_map {{ key: "INPUT1" value: "{source}" }}'
    return (
        f'step {{ model_name: "simple" model_version: -1 {inputs} output_map {{ key: "OUTPUT0" value: "{target}" }} }}'
    )


async def test_steps_with_a_batch_axis_in_an_ensemble_without(tmp_path: Path) -> None:
    write_add_sub(tmp_path / "simple" / "1" / "model.onnx")
    write(tmp_path / "simple" / "config.pbtxt", f'platform: "onnxruntime_onnx"\nmax_batch_size: 8\n{ADD_SUB}')
    write(tmp_path / "flat" / "config.pbtxt", f'backend: "python"\n{FOUR}')
    write(tmp_path / "flat" / "1" / "model.py", NUMBER_HEAD + PLUS_ONE)
    write_ensemble(tmp_path, "last", FOUR, step("flat", "IN", "n") + twice("n", "OUT"))
    write_ensemble(tmp_path, "first", FOUR, twice("IN", "n") + twice("n", "m") + step("flat", "m", "OUT"))
    write_ensemble(tmp_path, "rows", "max_batch_size: 8\n" + FOUR, twice("IN", "n") + step("flat", "n", "OUT"))
    given = Infer({"IN": Tensor.of(np.array([1, 2, 3, 4], np.int32))})
    async with dragoman.open_engine(tmp_path) as engine:
        for name, expected in ("last", [4, 6, 8, 10]), ("first", [5, 9, 13, 17]):
            output = (await engine.call(Request(given, name))).answer.outputs["OUT"]
            assert output.data.tolist() == expected
        states = (await engine.call(Request(States()))).answer
    (reason,) = [each.reason for each in states if each.name == "rows"]
    assert "step 'flat': inconsistent shape of tensor 'n': [-1, 4] and [4]" in reason


class Fails(dragoman.Model):
    placement = "inline"
    inputs = (dragoman.TensorSpec("IN", dragoman.INT32, (1,)),)
    outputs = (dragoman.TensorSpec("OUT", dragoman.INT32, (1,)),)

    async def infer(self, call: Infer) -> Any:
        await Waits.begun.wait()
        raise InvalidInput("no number")


class Waits(Fails):
    begun = asyncio.Event()
    is_cancelled = False

    async def infer(self, call: Infer) -> Any:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(50):  # what it does at its end comes before the error
                await asyncio.sleep(0)
            Waits.is_cancelled = True


async def test_a_step_that_fails_cancels_those_that_still_run(tmp_path: Path) -> None:
    Waits.begun, Waits.is_cancelled = asyncio.Event(), False
    steps = step("Fails", "IN", "a") + step("Waits", "IN", "OUT")
    tensors = (
        'input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }\n'
        'output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }\n'
        'output { name: "a" data_type: TYPE_INT32 dims: [ 1 ] }\n'
    )
    write(tmp_path / "both" / "config.pbtxt", f'platform: "ensemble"\n{tensors}ensemble_scheduling {{ {steps} }}\n')
    (tmp_path / "both" / "1").mkdir()
    async with dragoman.open_engine(tmp_path, Fails, Waits, trial_s=0) as engine:
        with pytest.raises(InvalidInput, match="in ensemble 'both', no number"):
            await asyncio.wait_for(engine.infer("both", {"IN": np.array([1], np.int32)}), 60)
        assert Waits.is_cancelled
