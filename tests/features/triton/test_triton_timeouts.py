"""The request parameter `timeout` of models that Triton serves, whose meaning depends on their configuration."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from tritonclient.http import aio

import dragoman
from dragoman.core.calls import Infer, Request
from dragoman.core.errors import DragomanError, Overloaded
from dragoman.core.tensor import Tensor
from dragoman.engine.engine import Engine
from features.triton.repository import NUMBER_HEAD, NUMBER_TENSORS, write, write_add_sub

# Waits for a file if IN is 0.
GATED = """
class TritonPythonModel:
    def initialize(self, args):
        self.folder = args["model_repository"]

    def execute(self, requests):
        for request in requests:
            if number(request) == 0:
                open(f"{self.folder}/begun", "w").close()
                while not os.path.exists(f"{self.folder}/go"):
                    time.sleep(0.005)
        return [response(number(request)) for request in requests]
"""
# Calls `allowed` with the timeout of the request; answers the text of the error, or "".
CALLING = """
class TritonPythonModel:
    async def execute(self, requests):
        call = pb_utils.InferenceRequest(
            model_name="allowed", requested_output_names=["OUT"],
            inputs=[pb_utils.Tensor("IN", np.array([1], np.int32))], timeout=requests[0].timeout(),
        )
        answer = await call.async_exec()
        text = answer.error().message() if answer.has_error() else ""
        return [pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", np.array([text], object))])]
"""
ENSEMBLE = """
platform: "ensemble"
ensemble_scheduling { step [
  { model_name: "allowed" model_version: -1 input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" } }
] }
"""


def queue(policy: str) -> str:
    return f"dynamic_batching {{ default_queue_policy {{ {policy} }} }}"


ALLOW, MINUTE, SHORT = "allow_timeout_override: true ", "default_timeout_microseconds: 60000000 ", 30
CONFIGS = {
    "plain": "",
    "queue": "dynamic_batching { }",
    "no_default": queue(ALLOW),
    "not_allowed": queue(MINUTE),
    "allowed": queue(ALLOW + MINUTE),
    "delayed": queue(ALLOW + MINUTE + "timeout_action: DELAY"),
    "shorter": f"""dynamic_batching {{ priority_levels: 2 default_priority_level: 1
      priority_queue_policy {{ key: 2 value {{ {ALLOW} default_timeout_microseconds: 50000 }} }} }}""",
    "direct": "sequence_batching { max_sequence_idle_microseconds: 60000000 direct { } }",
    "oldest": "sequence_batching { max_sequence_idle_microseconds: 60000000 oldest { max_candidate_sequences: 1 } }",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def repository(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Engine, Path]]:
    folder = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        write(folder / name / "config.pbtxt", f'backend: "python" {NUMBER_TENSORS}{config}')
        write(folder / name / "1" / "model.py", NUMBER_HEAD + GATED)
    write(folder / "ensemble" / "config.pbtxt", ENSEMBLE + NUMBER_TENSORS)
    text = 'output { name: "TEXT" data_type: TYPE_STRING dims: 1 }'
    write(folder / "calling" / "config.pbtxt", 'backend: "python" ' + NUMBER_TENSORS.splitlines()[1] + text)
    write(folder / "calling" / "1" / "model.py", NUMBER_HEAD + CALLING)
    async with dragoman.open_engine(folder, trial_s=0) as engine:
        yield engine, folder


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def infer(engine: Engine, model: str, n: int, **parameters: Any) -> Any:
    call = Infer({"IN": Tensor.of(np.array([n], np.int32))}, parameters=parameters)
    (tensor,) = (await engine.call(Request(call, model))).answer.outputs.values()
    return tensor.data[0]


class Held:
    """The execution of a model waits meanwhile."""

    def __init__(self, engine: Engine, folder: Path, model: str, **parameters: Any) -> None:
        self.engine, self.folder, self.model, self.parameters = engine, folder / model, model, parameters

    async def __aenter__(self) -> "Held":
        self.first = asyncio.create_task(infer(self.engine, self.model, 0, **self.parameters))
        async with asyncio.timeout(60):
            while not (self.folder / "begun").exists():
                await asyncio.sleep(0.005)
        return self

    async def release(self, *others: Awaitable[Any]) -> list[Any]:
        (self.folder / "go").touch()
        async with asyncio.timeout(60):
            return await asyncio.gather(self.first, *others)

    async def __aexit__(self, *_: object) -> None:
        await self.release()
        for name in ("begun", "go"):
            (self.folder / name).unlink()


@pytest.mark.parametrize("model", ["plain", "queue", "no_default", "not_allowed", "delayed"])
async def test_a_timeout_that_the_queue_does_not_allow_has_no_effect(
    repository: tuple[Engine, Path], model: str
) -> None:
    async with Held(*repository, model, timeout=SHORT) as held:
        waiting = asyncio.create_task(infer(repository[0], model, 1, timeout=SHORT))
        await asyncio.sleep(0.05)
        assert await held.release(waiting) == [0, 1]


async def test_time_in_the_queue_of_a_model_is_no_time_of_computing(repository: tuple[Engine, Path]) -> None:
    engine = repository[0]
    async with Held(*repository, "queue") as held:
        request = Request(Infer({"IN": Tensor.of(np.array([1], np.int32))}), "queue")
        waiting = asyncio.create_task(engine.call(request))
        while engine.registry.find("queue").in_flight < 2:
            await asyncio.sleep(0.005)
        released_s = time.monotonic()
        await held.release(waiting)
    times = request.times
    assert times.arrived_s < released_s <= times.started_s <= times.computed_s


@pytest.mark.parametrize(("model", "timeout"), [("allowed", SHORT), ("shorter", 60_000_000), ("shorter", 0)])
async def test_a_request_that_waits_longer_than_its_timeout(
    repository: tuple[Engine, Path], model: str, timeout: int
) -> None:
    async with Held(*repository, model) as held:
        with pytest.raises(Overloaded, match="Request timeout expired"):
            await infer(repository[0], model, 1, timeout=timeout, priority=2)
        assert not held.first.done()
        (held.folder / "go").touch()
        assert await infer(repository[0], model, 2) == 2


async def test_steps_of_an_ensemble_have_the_timeout(repository: tuple[Engine, Path]) -> None:
    async with Held(*repository, "allowed"):
        with pytest.raises(DragomanError, match="Request timeout expired"):
            await infer(repository[0], "ensemble", 1, timeout=SHORT)


async def test_calls_of_a_model_may_have_a_timeout(repository: tuple[Engine, Path]) -> None:
    async with Held(*repository, "allowed") as held:
        assert b"Request timeout expired" in await infer(repository[0], "calling", 0, timeout=SHORT)
        called = asyncio.create_task(infer(repository[0], "calling", 0))
        await asyncio.sleep(0.05)
        assert await held.release(called) == [0, b""]


@pytest.mark.parametrize("model", ["direct", "oldest"])
async def test_a_sequence_that_waits_for_a_slot_longer_than_its_timeout(
    repository: tuple[Engine, Path], model: str
) -> None:
    engine = repository[0]
    whole = {"sequence_start": True, "sequence_end": True}
    async with Held(*repository, model, sequence_id=1, sequence_start=True, timeout=SHORT) as held:
        with pytest.raises(Overloaded, match="timeout of the corresponding sequence has been expired"):
            await infer(engine, model, 1, sequence_id=2, sequence_start=True, timeout=SHORT)
        with pytest.raises(DragomanError, match="must specify the START flag"):
            await infer(engine, model, 2, sequence_id=2)
        waiting = asyncio.create_task(infer(engine, model, 3, sequence_id=3, **whole))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        (held.folder / "go").touch()
        assert await infer(engine, model, 4, sequence_id=1, sequence_end=True, timeout=SHORT) == 4
        assert await held.release(waiting) == [0, 3]


@pytest.mark.parametrize("model", ["plain", "allowed", "direct"])
@pytest.mark.parametrize("timeout", [-1, 1.5, "soon", True, 1 << 64])
async def test_an_invalid_timeout(repository: tuple[Engine, Path], model: str, timeout: Any) -> None:
    with pytest.raises(DragomanError, match=r"'timeout': expected a number of microseconds below 2\^64"):
        await infer(repository[0], model, 1, timeout=timeout, sequence_id=9, sequence_start=True, sequence_end=True)


async def test_clients_that_send_a_timeout_with_every_request(tmp_path: Path) -> None:
    write_add_sub(tmp_path / "queued" / "1" / "model.onnx")
    write(tmp_path / "queued" / "config.pbtxt", f'platform: "onnxruntime_onnx" max_batch_size: 4 {queue(ALLOW)}')
    write_add_sub(tmp_path / "own.onnx")
    async with dragoman.Server(str(tmp_path), http_port=0, grpc_port=-1) as server:
        client = aio.InferenceServerClient(server.http_url.removeprefix("http://"))
        x = np.arange(4, dtype=np.int32)[np.newaxis]
        inputs = [aio.InferInput(name, [1, 4], "INT32").set_data_from_numpy(x) for name in ("INPUT0", "INPUT1")]
        for model in ("queued", "own"):
            result = await client.infer(model, inputs, timeout=30)
            assert result.as_numpy("OUTPUT0").tolist() == [[0, 2, 4, 6]]
        await client.close()
