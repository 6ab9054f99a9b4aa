"""Vectors in shared memory: the umbridge package's client, and invalid segments."""

import json
import threading
from collections.abc import Iterator
from multiprocessing import shared_memory
from typing import Any

import numpy as np
import pytest
import umbridge

from e2e.server_process import ServerProcess, running_server
from features.simulators.conftest import SIMULATORS

POINT = [[1.0, 2.0], [3.0, 4.0, 5.0]]


@pytest.fixture(scope="module")
def shared() -> Iterator[ServerProcess]:
    with running_server(
        f"{SIMULATORS}:forward", f"{SIMULATORS}:Double", "--umbridge-shared-memory", "--placement", "thread"
    ) as s:
        yield s


def test_every_operation_of_the_client(shared: ServerProcess) -> None:
    model = umbridge.HTTPModel(f"http://{shared.url}", "forward", use_shmem=True)
    assert model.supports_shmem()
    assert model(POINT) == [[1.0, 4.0], [53.0]]
    assert model([[1, 2, 3], [0, 0, 0]], {"n": 3, "scale": 10}) == [[10.0, 40.0, 90.0], [6.0]]
    assert model.gradient(0, 0, POINT, [1.0, 10.0]) == [2.0, 40.0]
    assert model.apply_jacobian(1, 1, POINT, [1.0, 1.0, 1.0]) == [24.0]
    assert model.apply_hessian(0, 0, 0, POINT, [1.0, 1.0], [1.0, 2.0]) == [2.0, 4.0]
    double = umbridge.HTTPModel(f"http://{shared.url}", "Double", use_shmem=True)
    assert double([[0.0, np.inf, -1.0, 2.0]]) == [[0.0, np.inf, -2.0, 4.0]]


def test_shared_memory_is_disabled_by_default(simulators: ServerProcess) -> None:
    assert simulators.request("POST", "/EvaluateShMem", {"name": "forward"})[0] == 404
    model = umbridge.HTTPModel(f"http://{simulators.url}", "forward", use_shmem=True)
    assert not model.supports_shmem()
    assert model(POINT) == [[1.0, 4.0], [53.0]]


GOOD = {"tid": "7", "name": "Double", "shmem_name": "/umbridge", "shmem_num_inputs": 1, "shmem_size_0": 4}


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"name": "x", "shmem_name": 5}, "ModelNotFound", "'x'"),
        ({"shmem_name": "/passwd"}, "InvalidInput", "'shmem_name': expected a name that begins with 'umbridge'"),
        ({"shmem_name": "/umbridge/../../etc/x"}, "InvalidInput", "'shmem_name'"),
        ({"shmem_name": None}, "InvalidInput", "'shmem_name'"),
        ({"tid": "../7"}, "InvalidInput", "'tid': expected letters and digits"),
        ({"tid": None}, "InvalidInput", "'tid'"),
        ({"shmem_num_inputs": -1}, "InvalidInput", "'shmem_num_inputs': expected an integer from 0"),
        ({"shmem_num_inputs": 2}, "InvalidInput", "'shmem_size_1'"),
        ({"shmem_size_0": "4"}, "InvalidInput", "'shmem_size_0'"),
        ({"x": [0] * (1 << 19)}, "InvalidInput", "too many values in JSON"),
        ({"shmem_size_0": 1 << 40}, "InvalidInput", "'shmem_size_0'"),
        ({"shmem_size_0": 5}, "InvalidInput", "expected 40 bytes for 5 numbers, got 32"),
        ({"shmem_size_0": 3}, "InvalidInput", "expected 4 numbers, got 3"),
        ({"tid": "missing"}, "InvalidInput", "cannot be opened: No such file"),
        ({}, "InvalidInput", "out_7"),  # there is no segment for the answer
    ],
)
def test_invalid_segments_are_rejected(shared: ServerProcess, changes: dict[str, Any], kind: str, message: str) -> None:
    segment = shared_memory.SharedMemory("umbridge_in_7_0", create=True, size=32)
    try:
        status, response, _ = shared.request("POST", "/EvaluateShMem", GOOD | changes)
        assert (status, response["error"]["type"]) == (400, kind)
        assert message in response["error"]["message"]
    finally:
        segment.close()
        segment.unlink()


def test_json_of_the_test_route_is_bounded(shared: ServerProcess) -> None:
    for values, message in ((1 << 19, "too many values in JSON"), (10, "umbridge_test_shmem_in_none")):
        status, response, _ = shared.request("POST", "/TestShMem", {"tid": "none", "x": [[]] * values})
        assert (status, response["error"]["type"]) == (400, "InvalidInput")
        assert message in response["error"]["message"]


def test_empty_bodies_are_rejected_and_clients_are_independent(shared: ServerProcess) -> None:
    for body in (b"", b"[]", b"{", b'{"name": "Double"}'):
        status, results, _ = shared.request("POST", "/EvaluateShMem", body)
        assert (status, json.loads(json.dumps(results))["error"]["type"]) == (400, "InvalidInput")
    assert shared.request("POST", "/TestShMem", {"tid": "none"})[0] == 400
    model = umbridge.HTTPModel(f"http://{shared.url}", "Double", use_shmem=True)
    results = []

    def send_request(number: int) -> None:
        results.extend((number, model([[float(number)] * 4])) for _ in range(5))

    threads = [threading.Thread(target=send_request, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 20
    assert all(response == [[2.0 * number] * 4] for number, response in results)
