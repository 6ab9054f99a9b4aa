"""Requests that are merged into a batch do not affect each other."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from e2e.server_process import MODELS, ServerProcess, running_server

NAMES = ("alice", "bob", "carol", "dave")
ROWS = f"{MODELS / 'batched.py'}:Rows"
OTHER = f"{MODELS / 'batched.py'}:Other"


@pytest.fixture(scope="module", params=["process", "thread"])
def process(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    flags = ("--placement", request.param, "--max-batch-size", "8", "--max-batch-wait-s", "0.005")
    with running_server(ROWS, OTHER, *flags) as process:
        yield process


@pytest.fixture(scope="module")
def callers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(24) as threads:
        yield threads


def infer(process: ServerProcess, rows: Any, model: str = "Rows", **further: Any) -> tuple[int, Any]:
    array = np.array(rows, float)
    tensor = {"name": "x", "datatype": "FP64", "shape": list(array.shape), "data": array.tolist()}
    status, body, _ = process.request("POST", f"/v2/models/{model}/infer", {"inputs": [tensor], **further})
    return status, body


def infer_grpc(client: Any, rows: Any) -> tuple[list[float], list[int]]:
    array = np.array(rows, float)
    tensor = triton.InferInput("x", list(array.shape), "FP64")
    tensor.set_data_from_numpy(array)
    result = client.infer("Rows", [tensor])
    return result.as_numpy("y").ravel().tolist(), result.as_numpy("together").tolist()


def output(body: Any, name: str) -> Any:
    return next(o["data"] for o in body["outputs"] if o["name"] == name)


def test_clients_get_their_own_rows_of_a_batch(process: ServerProcess, callers: ThreadPoolExecutor) -> None:
    def one(number: int) -> list[int]:
        rows = [[number + i / 8] for i in range(1 + number % 3)]
        expected = [2 * row[0] for row in rows]
        if number % 4 == 0:
            values, together = infer_grpc(client, rows)
            assert values == expected
            return together
        status, body = infer(process, rows, id=str(number))
        assert status == 200, body
        assert output(body, "y") == expected
        assert body["id"] == str(number)
        found: list[int] = output(body, "together")
        return found

    client = triton.InferenceServerClient(process.grpc_url)
    sizes = [size for together in callers.map(one, range(300)) for size in together]
    client.close()
    assert max(sizes) > 1, "calls were merged"
    assert max(sizes) <= 8


def test_parameters_stay_with_their_request(process: ServerProcess, callers: ThreadPoolExecutor) -> None:
    def one(number: int) -> None:
        sent = {"user": NAMES[number % 4], "flag": bool(number % 8 < 4)}
        status, body = infer(process, [[number]], parameters=sent)
        assert status == 200
        assert body["parameters"] == sent
        assert output(body, "y") == [2 * number]

    list(callers.map(one, range(160)))


def test_equal_numbers_of_different_types_are_different_parameters(
    process: ServerProcess, callers: ThreadPoolExecutor
) -> None:
    def one(number: int) -> None:
        value = (True, 1, 1.0, "1")[number % 4]
        _, body = infer(process, [[number]], parameters={"p": value})
        assert repr(body["parameters"]["p"]) == repr(value)

    list(callers.map(one, range(80)))


def test_a_failing_request_does_not_fail_its_batch(process: ServerProcess, callers: ThreadPoolExecutor) -> None:
    def one(number: int) -> None:
        bad = number % 5 == 3
        status, body = infer(process, [[-number if bad else number]])
        if bad:
            assert status == 500
            assert body["error"] == "model 'Rows' failed: ValueError: no negative numbers, please"
        else:
            assert (status, output(body, "y")) == (200, [2 * number])

    list(callers.map(one, range(100)))


def test_shapes_outputs_and_datatypes_are_not_mixed(process: ServerProcess, callers: ThreadPoolExecutor) -> None:
    def one(number: int) -> None:
        columns = 1 + number % 3
        outputs = ([], ["y"], ["together"], ["together", "y"])[number % 4]
        further: dict[str, Any] = {"outputs": [{"name": name} for name in outputs]} if outputs else {}
        if number % 7 == 0:
            further["parameters"] = {"binary_data_output": False}
        status, body = infer(process, [[number] * columns], **further)
        assert status == 200
        assert {o["name"] for o in body["outputs"]} == set(outputs or ["y", "together"])
        if not outputs or "y" in outputs:
            assert output(body, "y") == [2 * number] * columns

    list(callers.map(one, range(120)))


def test_the_same_request_to_two_models(process: ServerProcess, callers: ThreadPoolExecutor) -> None:
    def one(number: int) -> None:
        model, factor = (("Rows", 2), ("Other", 3))[number % 2]
        _, body = infer(process, [[5.0]], model)
        assert body["model_name"] == model
        assert output(body, "y") == [5.0 * factor]

    list(callers.map(one, range(60)))


def test_a_short_deadline_applies_to_its_request_only(process: ServerProcess, callers: ThreadPoolExecutor) -> None:
    def one(number: int) -> int:
        hurried = number % 4 == 0
        # This deadline passes before the model responds; the others have an hour.
        status, body = infer(process, [[number]], parameters={"timeout": 2_000 if hurried else 3_600_000_000})
        if not hurried:
            assert (status, output(body, "y")) == (200, [2 * number])
        else:
            shown = "the parameter 'timeout' of the request is 2000 microseconds"
            assert (status, body) == (504, {"error": f"Request timeout expired; {shown}"})
        return status

    list(callers.map(one, range(80)))


def test_a_batch_beyond_the_limit(process: ServerProcess) -> None:
    assert infer(process, [[1.0]] * 8)[0] == 200
    status, body = infer(process, [[1.0]] * 9)
    assert status == 400
    assert body["error"].startswith("inference request batch-size must be <= 8")


def test_the_model_sees_the_same_axes_without_batching() -> None:
    with running_server(ROWS, "--placement", "thread") as process:
        status, body = infer(process, [[1.0, 2.0]] * 9)
        assert status == 200
        assert output(body, "together") == [9] * 9


def test_request_headers_reach_neither_model_nor_log() -> None:
    secret = "s3cr3t-" + "x" * 20
    headers = {"authorization": f"Bearer {secret}", "cookie": f"session={secret}", "x-user": secret}
    tensor = {"name": "x", "datatype": "FP64", "shape": [1, 1], "data": [1.0]}
    with running_server(ROWS, "--placement", "thread", "--log-level", "debug", "--control-token", "t") as process:
        status, body, found = process.request("POST", "/v2/models/Rows/infer", {"inputs": [tensor]}, headers)
        assert status == 200
        assert secret not in json.dumps(body) + json.dumps(found)
        assert process.request("POST", "/v2/repository/index", headers=headers)[0] == 401
        assert secret not in process.log()


def test_a_server_without_a_model_is_not_ready() -> None:
    with running_server(ROWS, "--placement", "thread", "--control-token", "t") as process:
        path = "/v2/repository/models/Rows/"
        token = {"authorization": "Bearer t"}
        assert process.request("POST", path + "unload", headers=token)[0] == 200
        assert process.status("/v2/health/ready") == 400
        assert process.request("POST", path + "load", headers=token)[0] == 200
        assert process.status("/v2/health/ready") == 200
