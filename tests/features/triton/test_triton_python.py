"""Python backend: calls of decoupled models, loading of others, requests that are executed again, `is_ready`."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

import dragoman
from dragoman.core.calls import Describe, Infer, Ready, Request, States
from dragoman.core.errors import DragomanError, InvalidInput, InvalidOutput, ModelFailed, Overloaded
from dragoman.core.tensor import Tensor
from dragoman.engine.engine import Engine
from dragoman_triton import pb_utils
from features.triton.repository import NUMBER_HEAD, NUMBER_TENSORS, write

FINAL = "pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL"
MODELS = {
    # Sends 1, 2, ... until IN, or until it is cancelled if IN is negative.
    "count": f"""
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.send, args=(request,), daemon=True).start()

    def send(self, request):
        sender, n = request.get_response_sender(), 0
        while n != number(request) and not sender.is_cancelled():
            n += 1
            sender.send(response(n))
            time.sleep(0.001)
        sender.send(flags={FINAL})
""",
    "caller": """
class TritonPythonModel:
    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        n, result = number(request), []
        thread = threading.Thread(target=lambda: result.append(self.sum(n)))
        thread.start()
        thread.join()
        return response(result[0])

    def sum(self, n):
        tensor = pb_utils.Tensor("IN", np.array([n], np.int32))
        responses = pb_utils.InferenceRequest(model_name=b"count", inputs=[tensor]).exec(decoupled=True)
        total = 0
        for each in responses:
            if each.has_error():
                return total + 1000 * each.error().code()
            tensors = each.output_tensors()
            if not tensors:
                return total  # the empty response is the last one
            total += int(tensors[0].as_numpy()[0])
            if n < 0 and total > 5:
                responses.cancel()
        raise AssertionError("no empty response")
""",
    "control": """
class TritonPythonModel:
    def initialize(self, args):
        self.before = pb_utils.is_model_ready("none")

    def execute(self, requests):
        pb_utils.unload_model("count")
        states = [self.before, pb_utils.is_model_ready("count")]
        pb_utils.load_model("count")
        states += [pb_utils.is_model_ready("count"), pb_utils.is_model_ready("count", "7")]
        pb_utils.unload_model("nowhere")
        for change in (lambda: pb_utils.load_model("nowhere"), lambda: pb_utils.load_model("count", config="[]"),
                       lambda: pb_utils.load_model("control")):
            try:
                change()
            except pb_utils.TritonModelException:
                states.append(True)
        return [response(int("".join(str(int(each)) for each in states))) for _ in requests]
""",
    # Loads a model by its configuration and files, calls it with IN and unloads it.
    "sending": """
class TritonPythonModel:
    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        tensor = {"data_type": "TYPE_INT32", "dims": [1]}
        config = {"backend": "python", "input": [{"name": "IN", **tensor}], "output": [{"name": "OUT", **tensor}]}
        for given, path in (("", "1/model.py"), (json.dumps(config), "../model.py")):
            try:
                pb_utils.load_model("sent", config=given, files={f"file:{path}": SOURCE})
            except pb_utils.TritonModelException as error:
                assert "file" in str(error)
            else:
                raise AssertionError(path)
        pb_utils.load_model("sent", config=json.dumps(config), files={"file:3/model.py": SOURCE})
        inputs = [pb_utils.Tensor("IN", np.array([number(request)], np.int32))]
        answer = pb_utils.InferenceRequest(model_name="sent", inputs=inputs, requested_output_names=["OUT"]).exec()
        assert not answer.has_error(), answer.error().message()
        pb_utils.unload_model("sent")
        assert not pb_utils.is_model_ready("sent")
        return response(int(answer.output_tensors()[0].as_numpy()[0]))


SOURCE = b'''
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", 7 * each)]) for each in inputs]
'''
""",
    # Executes each request as often as IN says; answers how often it has, and the state of its sequence.
    "again": """
class TritonPythonModel:
    def initialize(self, args):
        self.counts = {}

    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            self.counts[request.correlation_id()] = 0
        self.counts[request.correlation_id()] += 1
        n = number(request)
        if self.counts[request.correlation_id()] < n or n < 0:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return response(0) if n < 0 else None
        return response(self.counts[request.correlation_id()])
""",
    "again_streaming": f"""
class TritonPythonModel:
    def initialize(self, args):
        self.left = None

    def execute(self, requests):
        for request in requests:
            self.left = number(request) - 1 if self.left is None else self.left - 1
            sender = request.get_response_sender()
            if self.left:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            sender.send(response(self.left), flags=0 if self.left else {FINAL})
""",
    "once": """
class TritonPythonModel:
    def execute(self, requests):
        requests[0].set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
""",
    "sleeper": """
class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.3)
        return [response(1) for _ in requests]
""",
    # Answers how many requests were executed before; the first one waits for a file.
    "ordered": """
class TritonPythonModel:
    def initialize(self, args):
        self.folder, self.count = args["model_repository"], 0

    def execute(self, requests):
        if not self.count:
            open(f"{self.folder}/started", "w").close()
            while not os.path.exists(f"{self.folder}/go"):
                time.sleep(0.005)
        self.count += 1
        return [response(self.count - 1) for _ in requests]
""",
    # Calls `sleeper`, with or without the trace of the request; answers the code of the error.
    "patient": """
class TritonPythonModel:
    async def execute(self, requests):
        trace = requests[0].trace() if number(requests[0]) else None
        call = pb_utils.InferenceRequest(model_name="sleeper", inputs=requests[0].inputs(), trace=trace)
        answer = await call.async_exec()
        with open(os.path.join(os.path.dirname(__file__), "code"), "w") as file:
            file.write(str(answer.error().code() if answer.has_error() else -1))
        return [response(0)]
""",
    # Exits if IN is negative.
    "exiting": """
class TritonPythonModel:
    async def execute(self, requests):
        if number(requests[0]) < 0:
            raise SystemExit("stop")
        return [response(len(requests[0].inputs())) for _ in requests]
""",
    # Answers how many requests it has got together.
    "together": """
class TritonPythonModel:
    def execute(self, requests):
        return [response([len(requests)]) for _ in requests]
""",
    "too_early": """
class TritonPythonModel:
    def initialize(self, args):
        pb_utils.InferenceRequest(model_name="count", inputs=[]).exec()

    def execute(self, requests):
        pass
""",
    "moody": """
class TritonPythonModel:
    state = False

    def execute(self, requests):
        self.state = True
        return [response(1)]

    async def is_ready(self):
        if self.state is None:
            raise RuntimeError("cannot say")
        return self.state
""",
}
MODELS |= {f"moody_{n}": MODELS["moody"].replace("False", state) for n, state in ((1, "True"), (2, "3"), (3, "None"))}
ITERATIVE = "sequence_batching { iterative_sequence: true }"
DECOUPLED = "model_transaction_policy { decoupled: true }"
NUMBERED = """
sequence_batching { iterative_sequence: true control_input {
  name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } } }
"""
TOGETHER = """
max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 60000000 }
input { name: "IN2" data_type: TYPE_INT32 dims: 1 optional: true }
"""
OPTIONS = {
    "together": TOGETHER,
    "exiting": NUMBERED,
    "count": DECOUPLED,
    "again": ITERATIVE,
    "again_streaming": DECOUPLED + ITERATIVE,
    "once": DECOUPLED,
}


@pytest.fixture
async def engine(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    """An engine with the models that the test names."""
    for name in request.param:
        write(tmp_path / name / "config.pbtxt", f'backend: "python" {NUMBER_TENSORS}{OPTIONS.get(name, "")}')
        write(tmp_path / name / "1" / "model.py", NUMBER_HEAD + MODELS[name])
    async with dragoman.open_engine(tmp_path, trial_s=0) as engine:
        yield engine


def models(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("engine", [names], indirect=True, ids=[names[0]])


def request(model: str, n: int, priority: int = 0) -> Request[Any]:
    parameters: dict[str, Any] = {"priority": priority} if priority else {}
    return Request(Infer({"IN": Tensor.of(np.array([n], np.int32))}, parameters=parameters), model)


async def infer(engine: Engine, model: str, n: int, priority: int = 0) -> int:
    return int((await engine.call(request(model, n, priority))).answer.outputs["OUT"].data[0])


@models("caller", "count")
async def test_a_decoupled_model_is_called_from_a_thread(engine: Engine) -> None:
    assert await infer(engine, "caller", 4) == 10
    assert await infer(engine, "caller", 0) == 0
    assert await infer(engine, "caller", -1) > 7000  # cancelled: the code CANCELLED of the last response is 7


@models("sending")
async def test_a_model_loads_another_with_a_configuration_and_files(engine: Engine) -> None:
    assert await infer(engine, "sending", 6) == 42


@models("control", "count")
async def test_models_load_and_unload_others(engine: Engine) -> None:
    assert await infer(engine, "control", 0) == 10111  # not ready, unloaded, loaded; no version 7; three errors
    responses = [r async for r in engine.stream(request("count", 2))]
    assert [int(r.answer.outputs["OUT"].data[0]) for r in responses] == [1, 2]


@models("again", "again_streaming", "once")
async def test_requests_are_executed_again(engine: Engine) -> None:
    assert [await infer(engine, "again", n) for n in (1, 3, 2)] == [1, 3, 2]
    responses = [r async for r in engine.stream(request("again_streaming", 3))]
    assert [int(r.answer.outputs["OUT"].data[0]) for r in responses] == [2, 1, 0]
    with pytest.raises(InvalidOutput, match="Expected a None object in the execute function return list"):
        await infer(engine, "again", -1)
    with pytest.raises(ModelFailed, match="only with iterative_sequence: true"):
        async for _ in engine.stream(request("once", 1)):
            pass


@models("again")
@pytest.mark.parametrize("name", ["sequence_start", "sequence_end"])
async def test_flags_of_sequences_are_booleans_for_models_without_sequences(engine: Engine, name: str) -> None:
    parameters: dict[str, Any] = {"sequence_id": 5, name: "false"}
    call = Infer({"IN": Tensor.of(np.array([1], np.int32))}, parameters=parameters)
    with pytest.raises(InvalidInput, match=f"parameter '{name}': expected true or false, got 'false'"):
        await engine.call(Request(call, "again"))


@models("together")
async def test_other_inputs_end_the_wait_of_a_batch(engine: Engine) -> None:
    async def count(rows: int, *names: str) -> int:
        call = Infer({name: Tensor.of(np.zeros((rows, 1), np.int32)) for name in names})
        return int((await engine.call(Request(call, "together"))).answer.outputs["OUT"].data[0, 0])

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        first = tasks.create_task(count(1, "IN"))
        second = tasks.create_task(count(1, "IN", "IN2"))
        assert await first == 1
        third = tasks.create_task(count(7, "IN", "IN2"))  # the batch is full
    assert (second.result(), third.result()) == (2, 2)


@models("patient", "sleeper")
async def test_calls_have_the_deadline_of_the_request(engine: Engine, tmp_path: Path) -> None:
    code = tmp_path / "patient" / "1" / "code"
    for has_trace in (0, 1):
        with pytest.raises(DragomanError):
            await engine.call(structs.replace(request("patient", has_trace), deadline_s=time.monotonic() + 0.05))
        async with asyncio.timeout(60):
            while not (code.exists() and code.read_text()):
                await asyncio.sleep(0.005)
        assert code.read_text() == "1"  # INTERNAL, not the -1 of a call without a deadline
        code.unlink()


@models("exiting")
async def test_an_instance_survives_errors(engine: Engine) -> None:
    async with asyncio.timeout(60):
        with pytest.raises(ModelFailed, match="SystemExit: stop"):
            await infer(engine, "exiting", -1)
        call = Infer({"IN": Tensor.of(np.array([1], np.int32))}, parameters={"sequence_id": "abc"})
        with pytest.raises(InvalidInput, match="'sequence_id': expected an integer for model 'exiting', got text"):
            await engine.call(Request(call, "exiting"))
        assert await infer(engine, "exiting", 1) == 2


QUEUE = """
dynamic_batching { priority_levels: 3 default_priority_level: 2
  default_queue_policy { max_queue_size: 3 default_timeout_microseconds: 500000 timeout_action: ACTION }
  priority_queue_policy {
    key: 3 value { max_queue_size: 2 default_timeout_microseconds: 500000 timeout_action: ACTION } } }
"""


@pytest.mark.parametrize("action", ["REJECT", "DELAY"])
async def test_priorities_and_limits_of_the_queue(tmp_path: Path, action: str) -> None:
    folder = tmp_path / "ordered"
    write(folder / "config.pbtxt", f'backend: "python" {NUMBER_TENSORS}{QUEUE.replace("ACTION", action)}')
    write(folder / "1" / "model.py", NUMBER_HEAD + MODELS["ordered"])
    async with dragoman.open_engine(tmp_path, trial_s=0) as engine:

        async def send(*priorities: int) -> list[asyncio.Task[int]]:
            tasks = [asyncio.create_task(infer(engine, "ordered", 1, priority)) for priority in priorities]
            for _ in range(20):
                await asyncio.sleep(0)
            return tasks

        sent = await send(1)
        async with asyncio.timeout(60):
            while not (folder / "started").exists():
                await asyncio.sleep(0.005)
        sent += await send(3, 1, 3, 0)
        with pytest.raises(Overloaded, match="Exceeds maximum queue size"):
            await infer(engine, "ordered", 1, 3)
        if action == "REJECT":
            for task in sent[1:]:
                with pytest.raises(Overloaded, match="Request timeout expired"):
                    await task
            sent = sent[:1]
        else:
            await asyncio.sleep(0.8)  # until all have waited too long
            sent += await send(1)
        (folder / "go").touch()
        order = await asyncio.gather(*sent)
    assert order == ([0] if action == "REJECT" else [0, 4, 2, 5, 3, 1])


@models("too_early", "count")
async def test_other_models_are_not_called_by_initialize(engine: Engine) -> None:
    with pytest.raises(DragomanError):
        await engine.call(Request(Describe(), "too_early"))
    (entry,) = [e for e in (await engine.call(Request(States()))).answer if e.name == "too_early"]
    assert "BLS is only supported during the 'execute' function." in entry.reason


@models("moody", "moody_1", "moody_2", "moody_3")
async def test_is_ready(engine: Engine) -> None:
    async def is_ready(model: str) -> bool:
        return bool((await engine.call(Request(Ready(), model))).answer)

    reasons = {each.spec.name: each.reported_reason for each in engine.deployments()}
    assert (reasons["moody"], reasons["moody_1"]) == ("is_ready() returned False", "")
    assert reasons["moody_2"] == "is_ready(): expected True or False"
    assert reasons["moody_3"] == "is_ready() raised RuntimeError"
    assert [await is_ready(name) for name in ("moody", "moody_1", "moody_2")] == [False, True, False]
    await infer(engine, "moody", 1)
    async with asyncio.timeout(60):
        while not await is_ready("moody"):  # asked about once a second
            await asyncio.sleep(0.02)


def test_elements_that_are_no_text_are_sent_as_their_text() -> None:
    elements = np.empty(7, object)
    elements[:] = [1, 2.5, True, None, b"\xff", "é", bytearray(b"z")]
    tensor = pb_utils.Tensor("t", elements)
    assert tensor.as_numpy().tolist() == [b"1", b"2.5", b"True", b"None", b"\xff", "é".encode(), b"z"]


COMPLETING = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "IN", "data_type": "TYPE_INT32", "dims": [1]})
        if COMPLETE:
            config.add_output({"name": "OUT", "data_type": "TYPE_INT32", "dims": [1]})
        return config

    def execute(self, requests):
        return [response(number(request)) for request in requests]
"""


@pytest.mark.parametrize("complete", [True, False])
async def test_datatypes_and_dims_are_completed(tmp_path: Path, complete: bool) -> None:
    tensors = 'input { name: "IN" data_type: TYPE_INT32 } output { name: "OUT" dims: 1 }'
    write(tmp_path / "m" / "config.pbtxt", f'backend: "python" {tensors}')
    write(tmp_path / "m" / "1" / "model.py", NUMBER_HEAD + COMPLETING.replace("COMPLETE", str(complete)))
    async with dragoman.open_engine(tmp_path, trial_s=0) as engine:
        (entry,) = (await engine.call(Request(States()))).answer
        if complete:
            assert await infer(engine, "m", 7) == 7
        else:
            assert "'OUT' of 'config.pbtxt': expected a data_type and dims" in entry.reason
