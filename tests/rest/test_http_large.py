"""Large bodies: parsed and formatted in threads, in chunks, within a common memory limit."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from rest.rest_server import RestServer, binary, blobs, inputs, outputs, read_response, request, serving, tensor

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("on_uvloop")]
INFER = "/v2/models/Identity/infer"
LIVE = request("GET", "/v2/health/live")
N = 300_000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[RestServer]:
    async with serving() as server:
        yield server


@pytest.mark.parametrize(("datatype", "text"), [("INT64", "1.0"), ("INT64", "9007199254740993"), ("FP64", "0.1")])
async def test_long_lists_of_numbers(server: RestServer, datatype: str, text: str) -> None:
    body = (
        f'{{"inputs": [{{"name": "x", "shape": [{N}], "datatype": "{datatype}", "data": [{",".join([text] * N)}]}}]}}'
    )
    (output,) = outputs(await server.infer("Identity", body))
    value = float(text) if "." in text else int(text)
    assert output["data"] == [value] * N


async def test_the_index_of_an_invalid_number_in_a_long_list(server: RestServer) -> None:
    data: list[Any] = [1] * N
    data[N - 2] = "x"
    response = await server.infer("Identity", inputs(tensor(shape=[N], data=data)))
    assert response.status == 400
    assert f"[{N - 2}]" in response.error


@pytest.mark.parametrize(
    ("data", "status"),
    [
        ("[1.0, 9007199254740993]", 200),
        ("[9007199254740994.0, 1]", 400),
        ("[1.5]", 400),
        ("[1.0, 9223372036854775808]", 400),
        ("[[1.0], [2, 3]]", 400),
    ],
)
async def test_integers_written_as_floats_stay_exact(server: RestServer, data: str, status: int) -> None:
    count = data.count(",") + 1
    body = f'{{"inputs": [{{"name": "x", "shape": [{count}], "datatype": "INT64", "data": {data}}}]}}'
    response = await server.infer("Identity", body)
    assert response.status == status
    if status == 200:
        assert response.json["outputs"][0]["data"] == [1, 9007199254740993]


async def test_repeated_binary_requests_with_other_ids_and_values(server: RestServer) -> None:
    for number in range(12):
        data = np.full(5000, number, np.float32).tobytes()
        one = {"name": "x", "shape": [5000], "datatype": "FP32", "parameters": {"binary_data_size": len(data)}}
        request_sent = {"id": "x" * number, "inputs": [one], "parameters": {"binary_data_output": True}}
        response = await server.infer("Identity", *binary(request_sent, data))
        document, parts = blobs(response)
        assert document.get("id", "") == "x" * number
        assert parts == [data]


async def test_other_requests_are_served_while_a_large_one_is_parsed(server: RestServer) -> None:
    one = {"name": "x", "shape": [1_000_000], "datatype": "BYTES", "parameters": {"binary_data_size": 4_000_000}}
    body, headers = binary({"inputs": [one], "parameters": {"binary_data_output": True}}, bytes(4_000_000))
    large = asyncio.ensure_future(server.infer("Identity", body, headers))
    responses = 0
    while not large.done():
        assert (await server.send(LIVE)).status == 200
        responses += 1
    assert blobs(await large)[1] == [bytes(4_000_000)]
    assert responses > 10


async def test_max_bytes_elements() -> None:
    async with serving(max_bytes_elements=2) as server:
        for data, status in ((["a", "b"], 200), (["a", "b", "c"], 400)):
            one = tensor(datatype="BYTES", shape=[len(data)], data=data)
            assert (await server.infer("Identity", inputs(one))).status == status


async def test_top_classes_of_many(server: RestServer) -> None:
    values = np.random.default_rng(1).integers(0, 50, (2, 5000)).astype(np.float32)
    one = {"name": "x", "shape": [2, 5000], "datatype": "FP32", "parameters": {"binary_data_size": 40_000}}
    requested = {"name": "x", "parameters": {"classification": 200}}
    body, headers = binary({"inputs": [one], "outputs": [requested]}, values.tobytes())
    (output,) = outputs(await server.infer("Identity", body, headers))
    expected = np.argsort(-values, axis=-1, kind="stable")[:, :200]
    assert [int(t.split(":")[1]) for t in output["data"]] == expected.ravel().tolist()


async def test_too_many_classes(server: RestServer) -> None:
    request_sent = inputs(tensor(), outputs=[{"name": "x", "parameters": {"classification": 1001}}])
    assert "at most 1000" in (await server.infer("Identity", request_sent)).error


@pytest.mark.parametrize("timeout", ["1" + "0" * 400, str(1 << 64)])
async def test_a_timeout_beyond_the_range_of_the_clock(server: RestServer, timeout: str) -> None:
    response = await server.infer("Identity", f'{{"parameters": {{"timeout": {timeout}}}, "inputs": []}}')
    assert "'timeout'" in response.error or "int" in response.error


async def test_max_bodies_bytes() -> None:
    half = request("POST", INFER, b"x" * 400_000)[:300_000]
    async with serving(max_bodies_bytes=500_000) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(half)
        await asyncio.sleep(0.1)
        response = await server.request("POST", INFER, b"x" * 400_000)
        assert (response.status, response.headers["retry-after"]) == (503, "1")
        assert (await server.infer("Identity", inputs(tensor()))).status == 200
        writer.write(b"x" * 200_000)
        assert (await read_response(reader)).status == 400
        writer.close()
        for _ in itertools.repeat(None, 3):  # what was counted has been given back
            assert (await server.request("POST", INFER, b"x" * 400_000)).status == 400
