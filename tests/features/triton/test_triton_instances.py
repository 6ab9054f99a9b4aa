"""Instances whose thread ends: their calls are answered, the model is not ready, and its worker is started again."""

import json
from collections.abc import Iterator

import pytest

from e2e.server_process import ServerProcess, running_server, wait_until
from features.triton.repository import NUMBER_HEAD, NUMBER_TENSORS, write

SOURCE = """
import asyncio

DOUBLE, STOP, CANCEL, BACKGROUND = 21, 101, 102, 103  # numbers that no trial tries


async def exit_later():
    await asyncio.sleep(0)
    raise SystemExit(3)


class TritonPythonModel:
    async def execute(self, requests):
        loop, n = asyncio.get_running_loop(), number(requests[0])
        if n == STOP:
            loop.stop()
            await asyncio.sleep(60)
        if n == CANCEL:
            for task in asyncio.all_tasks():
                task.cancel()
            await asyncio.sleep(60)
        if n == BACKGROUND:
            self.task = loop.create_task(exit_later())
            await asyncio.sleep(60)
        return [response(2 * number(request)) for request in requests]
"""
CONFIG = 'backend: "python"' + NUMBER_TENSORS


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("models")
    own = NUMBER_HEAD.replace("# request.exec(", "")  # which would make it run in the server's process
    write(folder / "own/config.pbtxt", CONFIG)
    write(folder / "own/1/model.py", own + SOURCE)
    write(folder / "shared/config.pbtxt", CONFIG)
    write(folder / "shared/1/model.py", NUMBER_HEAD + SOURCE)
    write(folder / "two/config.pbtxt", CONFIG + "instance_group { count: 2 kind: KIND_CPU }\n")
    write(folder / "two/1/model.py", NUMBER_HEAD + SOURCE)
    with running_server(str(folder), "--control-open") as server:
        yield server


def infer(process: ServerProcess, model: str, number: int) -> int | str:
    """Return the response of a model or its error."""
    tensor = {"name": "IN", "datatype": "INT32", "shape": [1], "data": [number]}
    status, body, _ = process.request("POST", f"/v2/models/{model}/infer", {"inputs": [tensor]})
    assert (status == 200) is ("error" not in body), body
    found: int | str = body["outputs"][0]["data"][0] if status == 200 else body["error"]
    return found


def is_ready(process: ServerProcess, model: str) -> bool:
    return process.status(f"/v2/models/{model}/ready") == 200


@pytest.mark.parametrize("number", [101, 103], ids=["stopped", "exited"])
def test_a_worker_process_whose_instance_has_ended_is_started_again(process: ServerProcess, number: int) -> None:
    before = set(process.workers())
    assert isinstance(infer(process, "own", number), str)
    wait_until(lambda: set(process.workers()) - before, "a new worker process")
    wait_until(lambda: is_ready(process, "own"), "readiness")
    assert infer(process, "own", 21) == 42


@pytest.mark.parametrize("number", [101, 103], ids=["stopped", "exited"])
def test_a_model_whose_instance_has_ended_is_not_ready_until_it_is_loaded(process: ServerProcess, number: int) -> None:
    assert isinstance(infer(process, "shared", number), str)
    text = "model 'shared': the thread of its instance 'shared_0_0' has ended: "
    assert text in str(infer(process, "shared", 21))
    wait_until(lambda: not is_ready(process, "shared"), "the end of readiness")
    assert process.status("/v2/health/ready") == 400
    index = process.request("POST", "/v2/repository/index", {})[1]
    assert {each["name"]: each["state"] for each in index}["shared"] == "UNAVAILABLE"
    assert process.request("POST", "/v2/repository/models/shared/load", {})[0] == 200
    assert infer(process, "shared", 21) == 42
    wait_until(lambda: process.status("/v2/health/ready") == 200, "readiness")


@pytest.mark.parametrize("model", ["own", "shared", "two"])
def test_a_model_that_cancels_all_tasks_goes_on(process: ServerProcess, model: str) -> None:
    assert "CancelledError" in str(infer(process, model, 102))
    assert infer(process, model, 21) == 42
    assert is_ready(process, model)


def test_other_instances_answer_if_one_has_ended(process: ServerProcess) -> None:
    assert isinstance(infer(process, "two", 101), str)
    assert [infer(process, "two", 21) for _ in range(20)] == [42] * 20
    assert is_ready(process, "two")
    assert isinstance(infer(process, "two", 101), str)
    wait_until(lambda: not is_ready(process, "two"), "the end of readiness")
    assert "has ended" in str(infer(process, "two", 21))
    assert process.request("POST", "/v2/repository/models/two/load", json.dumps({}).encode())[0] == 200
    assert infer(process, "two", 21) == 42
