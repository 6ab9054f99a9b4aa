"""The complete message of each error in a request, and similar requests that are valid."""

import json
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from rest.rest_server import Identity, Picture, RestServer, binary, inputs, outputs, serving, tensor

pytestmark = pytest.mark.asyncio(loop_scope="module")

HEADER = "Inference-Header-Content-Length"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[RestServer]:
    async with serving(Identity, Picture) as server:
        yield server


async def message(server: RestServer, *tensors: dict[str, Any], status: int = 400, **more: Any) -> str:
    response = await server.infer("Identity", inputs(*tensors, **more))
    assert response.status == status, response.body
    return response.error


X = "input 'x'"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"shape": [2], "data": 3}, f"{X}: expected 'data' to be an array"),
        ({"shape": [2], "data": None}, f"{X}: expected 'data' to be an array"),
        ({"shape": [4], "data": [[1, 2], [3, 4]]}, f"{X}: 'data' nests 2 deep, expected 1 by its shape"),
        (
            {"shape": [1], "data": json.loads("[" * 50 + "1" + "]" * 50)},
            f"{X}: 'data' nests deeper than 32, expected 1 by its shape",
        ),
        (
            {"shape": [2, 2, 1], "data": [[1, 2], [3, 4]]},
            f"{X}: 'data' nests 2 deep, expected 1 or 3 by its shape",
        ),
        (
            {"shape": [2, 2], "data": [[1, 2], [3, 4], [5, 6]]},
            f"{X}: 'data' nests as [3, 2], expected its shape [2, 2]",
        ),
        ({"shape": [2, 2], "data": [1, 2, 3]}, f"{X}: shape [2, 2] needs 4 elements, got 3"),
        ({"shape": [-1], "data": [1]}, f"{X}: expected a shape of integers from 0 to 2^63-1, got [-1]"),
        ({"shape": [1 << 63], "data": [1]}, f"{X}: expected a shape of integers from 0 to 2^63-1, got [{1 << 63}]"),
        ({"shape": [1] * 33, "data": [1]}, f"{X}: expected at most 32 axes, got 33"),
        (
            {"shape": [0, 1 << 62, 4], "data": []},
            f"{X}: shape [0, 4611686018427387904, 4] is too large",
        ),
        (
            {"shape": [1], "data": [1], "datatype": "FP31"},
            f"{X}: unknown datatype 'FP31': expected one of BOOL, UINT8, UINT16, UINT32, UINT64, INT8, INT16, "
            "INT32, INT64, FP16, BF16, FP32, FP64, BYTES",
        ),
        ({"shape": [1]}, f"{X}: expected 'data', or 'binary_data_size' in 'parameters'"),
        (
            {"shape": [1], "data": [1], "parameters": {"binary_data_size": 4}},
            f"{X}: Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
            "'shared_memory_region' in 'parameters'",
        ),
        (
            {"shape": [1], "parameters": {"binary_data_size": -1}},
            f"{X}: 'binary_data_size' expects a number of bytes, got -1",
        ),
        (
            {"shape": [1], "parameters": {"binary_data_size": True}},
            f"{X}: 'binary_data_size' expects a number of bytes, got True",
        ),
        (
            {"shape": [1], "parameters": {"binary_data_size": 4}},
            f"{X}: expecting 4 additional bytes of binary data",
        ),
        (
            {"shape": [1], "parameters": {"shared_memory_region": "r"}},
            f"{X}: Client shared memory is disabled. Start the server with '--shared-memory' to enable.",
        ),
    ],
)
async def test_an_invalid_input_is_named(server: RestServer, given: dict[str, Any], expected: str) -> None:
    body = {"name": "x", "datatype": "INT32", **given}
    response = await server.infer("Identity", {"inputs": [tensor("good", [1], "INT32", [1]), body]})
    assert response.status in (400, 501)
    assert response.error == expected


async def test_a_duplicate_input_is_named(server: RestServer) -> None:
    twice = tensor("x", [1], "INT32", [1])
    assert await message(server, twice, twice) == "input 'x' already exists in request"


async def test_valid_requests_next_to_invalid_ones_are_accepted(server: RestServer) -> None:
    for shape, data in (([2, 2], [1, 2, 3, 4]), ([2, 2], [[1, 2], [3, 4]]), ([0, 3], []), ([], [5]), ([1] * 32, [7])):
        response = await server.infer("Identity", inputs(tensor("x", shape, "INT32", data)))
        (found,) = outputs(response)
        flat = data if not data or not isinstance(data[0], list) else [n for row in data for n in row]
        assert (found["shape"], found["data"]) == (shape, flat)


def text(*elements: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


def described(shape: list[int], datatype: str, size: int, name: str = "x") -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": size}}


@pytest.mark.parametrize(
    ("shape", "datatype", "blob", "expected"),
    [
        ([2], "BYTES", text(b"ab") + b"\1\0", f"{X}: incomplete length of BYTES element 1"),
        ([2], "BYTES", text(b"ab"), f"{X}: the shape needs 2 BYTES elements, got 1"),
        ([1], "BYTES", text(b"ab", b"c"), f"{X}: the shape needs 1 BYTES elements, got 2"),
        ([1], "BYTES", text(b"ab", b"c", b"d"), f"{X}: the shape needs 1 BYTES elements, got 2 or more"),
        ([1], "BYTES", b"\5\0\0\0abc", f"{X}: BYTES element 0 needs 5 bytes, 3 are left"),
        ([0], "BYTES", text(b""), f"{X}: the shape needs 0 BYTES elements, got 1"),
    ],
)
async def test_elements_of_bytes_are_counted(
    server: RestServer, shape: list[int], datatype: str, blob: bytes, expected: str
) -> None:
    body, headers = binary({"inputs": [described(shape, datatype, len(blob))]}, blob)
    response = await server.infer("Identity", body, headers)
    assert (response.status, response.error) == (400, expected)


async def test_binary_data_is_consumed_exactly(server: RestServer) -> None:
    numbers = struct.pack("<3i", 1, 2, 3)
    body, headers = binary({"inputs": [described([2], "INT32", 8), described([1], "INT32", 4, "y")]}, numbers)
    assert [(o["name"], o["data"]) for o in outputs(await server.infer("Identity", body, headers))] == [
        ("x", [1, 2]),
        ("y", [3]),
    ]
    body, headers = binary({"inputs": [described([2], "INT32", 8)]}, numbers)
    response = await server.infer("Identity", body, headers)
    assert (response.status, response.error) == (
        400,
        "unexpected additional input data: 4 bytes are left after all inputs",
    )
    body, headers = binary({"inputs": [described([2], "INT32", 8), described([2], "INT32", 8, "y")]}, numbers)
    response = await server.infer("Identity", body, headers)
    assert (response.status, response.error) == (400, "input 'y': expecting 4 additional bytes of binary data")


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        ("x", f"Unable to parse {HEADER}, got: x"),
        ("+1", f"Unable to parse {HEADER}, got: +1"),
        ("9" * 99, f"Unable to parse {HEADER}, got: {'9' * 64}"),
        ("3", "inference header size should be in range (0, 2), got: 3"),
    ],
)
async def test_a_header_that_gives_no_length_is_rejected(server: RestServer, length: str, expected: str) -> None:
    response = await server.infer("Identity", b"{}", {HEADER: length})
    assert (response.status, response.error) == (400, expected)


async def test_a_shape_has_fewer_elements_than_the_limit() -> None:
    async with serving(Identity, max_elements=4) as server:
        assert (await server.infer("Identity", inputs(tensor("x", [2, 2], "INT32", [1, 2, 3, 4])))).status == 200
        found = await message(server, tensor("x", [5], "INT32", [1, 2, 3, 4, 5]))
        assert found == f"{X}: shape [5] has more elements than the limit, 4"


PNG = b"\x89PNG\r\n\x1a\n" + b"[" * 1000
GIF = b"GIF89a\xff" + b"[" * 1000


@pytest.mark.parametrize(("body", "byte"), [(PNG, "0x89 at offset 0"), (GIF, "0xff at offset 6")])
@pytest.mark.parametrize("path", ["/v2/models/Identity/infer", "/v1/models/Identity:predict", "/v2/repository/index"])
async def test_a_picture_is_not_json(server: RestServer, path: str, body: bytes, byte: str) -> None:
    """The parser would tell of a character, or the scan before it of brackets."""
    response = await server.request("POST", path, body)
    assert response.status == 400
    assert f"expected text in UTF-8, got the byte {byte}" in response.body.decode()
    assert (b"'dragoman infer' sends pictures" in response.body) is (path != "/v2/repository/index")
