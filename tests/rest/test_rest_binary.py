"""The binary tensor data extension, rule by rule, and the classification extension."""

import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import dragoman
from dragoman import Infer, Inference
from dragoman.core.calls import Response
from dragoman.protocols.open_inference.rest import OpenInferenceRest
from dragoman.protocols.open_inference.rest_request import parse_infer_request
from dragoman.protocols.wire import HttpRequest, Policy
from rest.rest_server import MODELS, RawResponse, RestServer, binary, blobs, inputs, outputs, serving, tensor

pytestmark = pytest.mark.asyncio(loop_scope="module")
HEADER = "Inference-Header-Content-Length"
ONE = b"\x01\0\0\0"


ARRAYS: dict[str, Any] = {
    "floats": np.array([[0.25, 0.5, 0.25], [np.nan, 2, 1]], np.float32),
    "integers": np.array([-(2**63), 2**63 - 1, 2**63 - 2], np.int64),
    "unsigned": np.array([0, 2**64 - 1, 2**64 - 2], np.uint64),
    "texts": np.array([b"a", b"b"], object),
    "flags": np.array([True, False]),
    "scalar": np.array(1.0),
    "cube": np.arange(12, dtype=np.float32).reshape(2, 3, 2),
    "long": np.broadcast_to(np.int8(1), (1, 1_000_001)),
    "empty": np.zeros((2, 0), np.float32),
}


class Scores(dragoman.Model):
    """Return the array that the parameter names."""

    placement = "inline"

    def infer(self, call: Infer) -> Any:
        which = str(call.parameters["which"])
        if which == "bf16":
            return {"y": dragoman.Tensor.of([1, -2, 3], dragoman.BF16)}
        return {"y": ARRAYS[which], "other": np.array([1], np.int32)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[RestServer]:
    async with serving(*MODELS, Scores) as server:
        yield server


def raw_input(
    name: str = "x", size: Any = 4, shape: Any = (1,), datatype: str = "INT32", **more: Any
) -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": size, **more}}


async def check_rejected(
    server: RestServer, body: bytes, headers: dict[str, str], *words: str, model: str = "Identity"
) -> None:
    response = await server.infer(model, body, headers)
    text = response.error
    assert response.status == 400
    for word in words:
        assert word in text, text


# --- the header ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["abc", "", "1.0", "0x10", "1_0", "5 5", "+5", "\xb2", "9" * 5000])
async def test_a_header_that_is_not_a_number(server: RestServer, value: str) -> None:
    body = json.dumps(inputs(tensor())).encode()
    text = f"Unable to parse {HEADER}, got: {value[:64]}"
    await check_rejected(server, body, {HEADER: value}, text)


@pytest.mark.parametrize("value", ["-1", "-0001", "100000", "99999999999999999999"])
async def test_a_header_out_of_range(server: RestServer, value: str) -> None:
    body = json.dumps(inputs(tensor())).encode()
    text = f"inference header size should be in range (0, {len(body)}), got: {int(value)}"
    await check_rejected(server, body, {HEADER: value}, text)


async def test_a_header_that_cuts_the_json(server: RestServer) -> None:
    body = json.dumps(inputs(tensor())).encode()
    await check_rejected(server, body, {HEADER: str(len(body) - 1)}, "not an inference request")
    assert (await server.infer("Identity", body, {HEADER: f" {len(body)} "})).status == 200


# --- sizes -----------------------------------------------------------------------------------------------------


async def test_extra_bytes(server: RestServer) -> None:
    body, headers = binary(inputs(raw_input()), ONE, b"??")
    await check_rejected(server, body, headers, "unexpected additional input data: 2 bytes")
    body, headers = binary(inputs(tensor()), ONE)
    await check_rejected(server, body, headers, "unexpected additional input data: 4 bytes")


async def test_missing_bytes(server: RestServer) -> None:
    body, headers = binary(inputs(raw_input("mine", 8, [2])), ONE)
    await check_rejected(server, body, headers, "'mine'", "expecting 4 additional bytes")
    body, headers = binary(inputs(raw_input("first"), raw_input("second")), ONE)
    await check_rejected(server, body, headers, "'second'", "expecting 4 additional bytes")
    await check_rejected(
        server, json.dumps(inputs(raw_input("mine"))).encode(), {}, "'mine'", "expecting 4 additional bytes"
    )


async def test_bytes_that_do_not_fill_the_shape(server: RestServer) -> None:
    body, headers = binary(inputs(raw_input("mine", 4, [2])), ONE)
    await check_rejected(server, body, headers, "input 'mine': shape [2] of INT32 needs 8 bytes, got 4")


@pytest.mark.parametrize("size", [-1, 1.5, "4", True])
async def test_invalid_sizes(server: RestServer, size: Any) -> None:
    body, headers = binary(inputs(raw_input("mine", size)), ONE)
    await check_rejected(server, body, headers, "'mine'", "'binary_data_size' expects a number of bytes")


async def test_both_data_and_binary_size(server: RestServer) -> None:
    body, headers = binary(inputs({**raw_input("mine"), "data": [1]}), ONE)
    await check_rejected(server, body, headers, "'mine'", "Input must set only one of the following fields")


async def test_binary_data_is_in_the_order_of_the_inputs(server: RestServer) -> None:
    value = inputs(raw_input("a"), tensor("b", [1], "INT32", [2]), raw_input("c", 0, [0]), raw_input("d"))
    body, headers = binary(value, ONE, b"\x04\0\0\0")
    response = await server.infer("Identity", body, headers)
    assert [(o["name"], o["data"]) for o in outputs(response)] == [("a", [1]), ("b", [2]), ("c", []), ("d", [4])]
    assert "parameters" not in next(outputs(response))
    assert response.headers["content-type"] == "application/json"
    assert HEADER.lower() not in response.headers


# --- outputs -----------------------------------------------------------------------------------------------------

TWO = (tensor("a", [1], "INT32", [1]), tensor("b", [1], "INT32", [2]))


@pytest.mark.parametrize(
    ("every", "a", "b", "binary_ones"),
    [
        (None, None, None, []),
        (True, None, None, ["a", "b"]),
        (False, None, None, []),
        (True, False, None, ["b"]),
        (False, True, None, ["a"]),
        (None, True, False, ["a"]),
        (True, False, False, []),
    ],
)
async def test_which_outputs_are_binary(
    server: RestServer, every: bool | None, a: bool | None, b: bool | None, binary_ones: list[str]
) -> None:
    forms = {n: {} if form is None else {"binary_data": form} for n, form in (("a", a), ("b", b))}
    requested = [{"name": n, "parameters": form} for n, form in forms.items()]
    more = {} if every is None else {"parameters": {"binary_data_output": every}}
    response = await server.infer("Identity", inputs(*TWO, outputs=requested, id="i", **more))
    assert response.status == 200
    if not binary_ones:
        assert response.headers["content-type"] == "application/json"
        assert HEADER.lower() not in response.headers
        assert [o["data"] for o in response.json["outputs"]] == [[1], [2]]
        return
    document, found = blobs(response)
    assert response.headers["content-type"] == "application/octet-stream"
    assert document["id"] == "i"
    for output in document["outputs"]:
        if output["name"] in binary_ones:
            assert output["parameters"] == {"binary_data_size": 4}
            assert "data" not in output
        else:
            assert "parameters" not in output
            assert output["data"]
    assert len(found) == len(binary_ones)


async def test_an_empty_output_is_json(server: RestServer) -> None:
    every = {"parameters": {"binary_data_output": True}}
    response = await server.infer("Identity", inputs(tensor("e", [2, 0], "FP32", []), **every))
    assert response.headers["content-type"] == "application/json"
    assert next(outputs(response)) == {"name": "e", "datatype": "FP32", "shape": [2, 0], "data": []}
    response = await server.infer("Identity", inputs(tensor("e", [0], "BYTES", []), *TWO, **every))
    document, found = blobs(response)
    assert [o.get("data") for o in document["outputs"]] == [[], None, None]
    assert found == [ONE, b"\x02\0\0\0"]


@pytest.mark.parametrize("value", [1, "true", 0.0])
async def test_a_flag_is_true_or_false(server: RestServer, value: Any) -> None:
    for body in (
        inputs(*TWO, parameters={"binary_data_output": value}),
        inputs(*TWO, outputs=[{"name": "a", "parameters": {"binary_data": value}}]),
    ):
        await check_rejected(server, json.dumps(body).encode(), {}, "'binary_data", "expected true or false")


# --- raw binary requests -------------------------------------------------------------------------------------------

RAW = {HEADER: "0"}


async def test_a_raw_request_is_the_one_inputs_bytes(server: RestServer) -> None:
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    document, found = blobs(await server.infer("Picture", rows.tobytes(), RAW))
    assert document["outputs"] == [
        {"name": "y", "datatype": "FP32", "shape": [3, 2], "parameters": {"binary_data_size": 24}}
    ]
    assert found == [rows.tobytes()]


async def test_a_raw_request_for_bytes_has_one_element(server: RestServer) -> None:
    for text in (b"some text \xff", b""):
        document, found = blobs(await server.infer("Phrase", text, RAW))
        assert document["outputs"][0]["shape"] == [1]
        assert found == [len(text).to_bytes(4, "little") + text]


async def test_invalid_raw_requests(server: RestServer) -> None:
    await check_rejected(server, bytes(7), RAW, "input 'x'", "7 bytes do not fill", model="Picture")
    await check_rejected(server, bytes(8), RAW, "1 input", "'INPUT0', 'INPUT1'", model="Adder")
    await check_rejected(server, bytes(8), RAW, "one input", model="Identity")


# --- no copies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spaces", range(4))
async def test_aligned_inputs_are_views_of_the_body(spaces: int) -> None:
    rows = np.arange(10_000, dtype=np.int32)
    headers = json.dumps(inputs(raw_input("x", rows.nbytes, [10_000]))).encode()
    headers += b" " * (-len(headers) % 4 + spaces)
    body = headers + rows.tobytes()
    http = HttpRequest("POST", "", {"model": "m"}, {HEADER.lower(): str(len(headers))}, body)
    request, _, _ = parse_infer_request(http, Policy())
    assert isinstance(request.call, Infer)
    seen = request.call.inputs["x"].data
    assert np.shares_memory(seen, np.frombuffer(body, np.uint8)) == (spaces == 0)
    assert seen.flags.aligned
    assert not seen.flags.writeable
    assert (seen == rows).all()


async def test_outputs_are_sent_without_copy() -> None:
    rows = np.arange(10_000, dtype=np.int32)
    body = json.dumps(inputs(tensor(), parameters={"binary_data_output": True})).encode()
    exchange: Any = OpenInferenceRest(Policy()).infer(HttpRequest("POST", "", {"model": "m"}, {}, body))
    response: Any = Response(Inference({"y": dragoman.Tensor.of(rows)}), "m")
    sent = exchange.format_response(response).body[1]
    assert np.shares_memory(np.frombuffer(sent, np.int32), rows)


async def test_input_arrays_are_read_only() -> None:
    seen: list[bool] = []

    class Looking(dragoman.Model):
        placement = "inline"
        inputs = (dragoman.TensorSpec("x", None, None),)

        def infer(self, call: Infer) -> dict[str, Any]:
            seen.append(call.inputs["x"].data.flags.writeable)
            return {"n": sys.getsizeof(0)}

    class Text(Looking):
        inputs = (dragoman.TensorSpec("x", dragoman.BYTES, (1,)),)

    async with serving(Looking, Text) as server:
        for body in (
            inputs(tensor()),
            inputs(tensor("x", [2, 1], "FP16", [[1], [2]])),
            inputs(tensor("x", [1], "BYTES", ["a"])),
            inputs(tensor("x", [1], "BF16", [1])),
            inputs(tensor("x", [1], "BOOL", [True])),
            inputs(tensor("x", [], "FP64", [1])),
            inputs(tensor("x", [0], "FP64", [])),
        ):
            assert (await server.infer("Looking", body)).status == 200
        assert (await server.infer("Looking", *binary(inputs(raw_input()), ONE))).status == 200
        text = binary(inputs(raw_input("x", 5, [1], "BYTES")), ONE + b"a")
        assert (await server.infer("Looking", *text)).status == 200
        assert (await server.infer("Text", b"text", RAW)).status == 200
    assert seen == [False] * 11  # one is that of the trial


# --- T76: classification -----------------------------------------------------------------------------------------


async def classes(server: RestServer, which: str, count: Any, **more: Any) -> RawResponse:
    requested = [{"name": "y", "parameters": {"classification": count, **more}}]
    return await server.infer("Scores", inputs(tensor(), parameters={"which": which}, outputs=requested))


@pytest.mark.parametrize(
    ("which", "count", "shape", "data"),
    [
        ("floats", 1, [2, 1], ["0.500000:1", "2.000000:1"]),
        ("floats", 2, [2, 2], ["0.500000:1", "0.250000:0", "2.000000:1", "1.000000:2"]),
        ("floats", 99, [2, 3], ["0.500000:1", "0.250000:0", "0.250000:2", "2.000000:1", "1.000000:2", "nan:0"]),
        ("integers", 3, [3], [f"{2**63 - 1}:1", f"{2**63 - 2}:2", f"{-(2**63)}:0"]),
        ("unsigned", 2, [2], [f"{2**64 - 1}:1", f"{2**64 - 2}:2"]),
        ("bf16", 3, [3], ["3.000000:2", "1.000000:0", "-2.000000:1"]),
        ("scalar", 1, [1], ["1.000000:0"]),
        ("cube", 2, [2, 2], ["5.000000:5", "4.000000:4", "11.000000:5", "10.000000:4"]),
        ("empty", 1, [2, 0], []),
    ],
)
async def test_t76_top_classes(server: RestServer, which: str, count: int, shape: list[int], data: list[Any]) -> None:
    response = next(outputs(await classes(server, which, count)))
    assert (response["shape"], response["data"]) == (shape, data)


@pytest.mark.parametrize(("which", "datatype"), [("texts", "BYTES"), ("flags", "BOOL")])
async def test_t76_outputs_without_classes(server: RestServer, which: str, datatype: str) -> None:
    response = await classes(server, which, 1)
    expected = f"class result not available for output due to unsupported type '{datatype}'"
    assert (response.status, response.error) == (400, expected)


async def test_t76_rows_of_too_many_elements(server: RestServer) -> None:
    response = await classes(server, "long", 1)
    assert (response.status, response.error) == (400, "classification output tensor too large")


async def test_t76_classes_in_binary_form(server: RestServer) -> None:
    document, found = blobs(await classes(server, "floats", 1, binary_data=True))
    assert document["outputs"][0]["datatype"] == "BYTES"
    assert found == [b"\x0a\0\0\0000.500000:1\x0a\0\0\0002.000000:1"]


async def test_t76_only_the_requested_output(server: RestServer) -> None:
    requested = [{"name": "y", "parameters": {"classification": 1}}, {"name": "other"}]
    response = await server.infer("Scores", inputs(tensor(), parameters={"which": "integers"}, outputs=requested))
    assert [o["datatype"] for o in outputs(response)] == ["BYTES", "INT32"]


@pytest.mark.parametrize("count", [-1, 1.5, "1", True])
async def test_t76_invalid_counts(server: RestServer, count: Any) -> None:
    response = await classes(server, "floats", count)
    assert response.status == 400
    assert "output 'y': parameter 'classification' expects a number of classes" in response.error


async def test_t76_zero_classes_return_the_output(server: RestServer) -> None:
    assert next(outputs(await classes(server, "integers", 0)))["datatype"] == "INT64"
