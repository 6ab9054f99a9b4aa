"""JSON limits of every endpoint: rejected before parsing, with an error in the format of its protocol."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import dragoman
from text_server import ReverseModel, TextServer, read_response, serve

VALUES = 3000
BODY = 200_000
MESSAGE = f"too many values in JSON: expected at most {VALUES} (max_json_values), got more"


def double(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return x * 2


@dragoman.vector_function(inputs=[2], derivatives=None)
def vector(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 2 * x


class Names(dragoman.Model):
    """Return the names of its inputs in the order received."""

    placement = "inline"
    inputs = tuple(dragoman.TensorSpec(name, dragoman.INT32, (1,)) for name in "cab")
    outputs = (dragoman.TensorSpec("names", dragoman.BYTES, (3,)),)

    def infer(self, call: dragoman.Infer) -> dragoman.Tensor:
        return dragoman.Tensor.of(np.array([name.encode() for name in call.inputs], dtype=object))


@pytest.fixture
async def server() -> AsyncIterator[TextServer]:
    models = (ReverseModel, double, vector, Names)
    async with serve(
        *models, placement="inline", max_json_values=VALUES, control_open=True, max_body_bytes=BODY
    ) as server:
        yield server


def error_message(body: Any) -> str:
    """Return the message of an error body of any protocol."""
    for key in ("error", "message", "detail"):
        if isinstance(body, Mapping) and key in body:
            return error_message(body[key])
    return str(body)


V2 = "/v2/models/double"
ENDPOINTS: list[tuple[str, str, int]] = [
    ("/v2/models/ReverseModel/generate", '{"text_input":"a","x":%s}', 422),
    ("/v2/models/ReverseModel/generate_stream", '{"text_input":"a","x":%s}', 422),
    ("/v2/repository/index", '{"parameters":%s}', 400),
    ("/v2/repository/models/double/load", '{"parameters":%s}', 400),
    ("/v2/repository/models/double/unload", '{"parameters":%s}', 400),
    ("/v1/completions", '{"model":"ReverseModel","prompt":%s}', 400),
    ("/v1/chat/completions", '{"model":"ReverseModel","messages":%s}', 400),
    ("/v1/embeddings", '{"model":"ReverseModel","input":%s}', 400),
    ("/generate", '{"inputs":"a","x":%s}', 422),
    ("/generate_stream", '{"inputs":"a","x":%s}', 422),
    ("/tokenize", '{"inputs":"a","x":%s}', 422),
    ("/chat_tokenize", '{"messages":%s}', 422),
    ("/invocations", '{"model_name":"ReverseModel","inputs":%s}', 424),
    ("/Evaluate", '{"name":"vector","input":[[1,2]],"config":{"a":%s}}', 400),
    ("/InputSizes", '{"name":"vector","config":{"a":%s}}', 400),
]
# Elements of arrays do not count, as they may be numbers of tensors.
DOCUMENTS: list[tuple[str, str, int]] = [
    ("/predictions/double", '{"inputs":%s}', 424),
    ("/predictions/double", '{"dataframe_records":%s}', 424),
    ("/predictions/double", "%s", 424),
    ("/v1/models/double:predict", '{"instances":%s}', 400),
]
LISTS = ("[]", '{"a":{}}')
FILLERS = (*LISTS, '"a"', "0")


@pytest.mark.parametrize(("path", "body", "status"), [*ENDPOINTS, *DOCUMENTS], ids=lambda value: str(value)[:40])
async def test_too_many_values_are_rejected_before_they_are_parsed(
    server: TextServer, path: str, body: str, status: int
) -> None:
    for filler in LISTS if (path, body, status) in DOCUMENTS else FILLERS:
        response = await server.post(path, (body % f"[{','.join([filler] * (VALUES + 1))}]").encode())
        assert (response.status, MESSAGE in error_message(response.json)) == (status, True), (filler, response.body)


async def test_requests_within_the_limit_are_accepted(server: TextServer) -> None:
    lists = ",".join(["[]"] * 1000)
    tensor = '{"name":"x","shape":[1],"datatype":"FP32","data":[1]}'
    response = await server.post(f"{V2}/infer", f'{{"inputs":[{tensor}],"x":[{lists}]}}'.encode())
    assert response.json["outputs"][0]["data"] == [2.0]
    response = await server.post("/v1/completions", f'{{"prompt":"b a","x":[{lists}],"model":"ReverseModel"}}'.encode())
    assert response.json["choices"][0]["text"] == "a b"


async def test_tensor_data_is_not_counted(server: TextServer) -> None:
    data = ",".join(["1"] * 5000)
    response = await server.post(
        f"{V2}/infer", f'{{"inputs":[{{"name":"x","shape":[5000],"datatype":"FP32","data":[{data}]}}]}}'.encode()
    )
    assert response.json["outputs"][0]["data"] == [2.0] * 5000
    rows = json.dumps([[float(n), 1.0] for n in range(2000)])
    response = await server.post("/predictions/double", f'{{"instances":{rows}}}'.encode())
    assert response.json["predictions"][1999] == [3998.0, 2.0]
    many = ",".join(["0.25"] * 3000)
    response = await server.post("/Evaluate", f'{{"name":"vector","input":[[{many}]]}}'.encode())
    assert "expected 2 numbers" in error_message(response.json) or "3000" in error_message(response.json)


async def test_values_in_tool_call_arguments_are_counted_together(server: TextServer) -> None:
    arguments = json.dumps([[]] * 600)
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    message: dict[str, Any] = {"role": "assistant", "tool_calls": [call] * 4}
    messages = [{"role": "user", "content": "a"}, message]
    response = await server.post("/v1/chat/completions", {"model": "ReverseModel", "messages": messages})
    assert response.status == 400
    assert "`tool_calls`: too many values in `arguments`" in error_message(response.json)
    message["tool_calls"] = [call]
    assert (await server.post("/v1/chat/completions", {"model": "ReverseModel", "messages": messages})).status == 200


async def test_large_forms_and_tables_of_prompts_are_rejected() -> None:
    form, table = ({"content-type": kind} for kind in ("application/x-www-form-urlencoded", "text/csv"))
    too_large = "the form is too large: expected at most 16777216 bytes and 65536 lines or fields"
    async with serve(ReverseModel, placement="inline") as server:
        for body, headers, message in (
            (b"inputs=a" + b"&x" * (1 << 16), form, None),
            (b"inputs=a" + b"&x" * ((1 << 16) + 1), form, too_large),
            (b"inputs=a" + b"x" * (16 << 20), form, too_large),
            (b"inputs\n" + b"a\n" * (1 << 16), table, "too many rows in text/csv: expected at most 65536"),
            (b"inputs\n" + b"a\n" * 10, table, None),
        ):
            response = await server.post("/invocations", body, headers)
            assert response.status == (200 if message is None else 424)
            assert message is None or message in error_message(response.json)


async def test_inputs_reach_the_model_in_the_order_of_its_signature(server: TextServer) -> None:
    for order in ("abc", "cba", "bca"):
        inputs = [{"name": name, "shape": [1], "datatype": "INT32", "data": [1]} for name in order]
        response = await server.post("/v2/models/Names/infer", {"inputs": inputs})
        assert response.json["outputs"][0]["data"] == ["c", "a", "b"]


@pytest.mark.parametrize("chunk", [1000, 33_333, BODY])
async def test_a_chunked_body_of_max_body_bytes_is_accepted(server: TextServer, chunk: int) -> None:
    document = json.dumps({"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [3]}]}).encode()
    for size, status in ((BODY, 200), (BODY + 1, 413)):
        body = document + b" " * (size - len(document))
        headers = f"POST {V2}/infer HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        chunks = [body[at : at + chunk] for at in range(0, size, chunk)]
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(headers + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in chunks) + b"0\r\n\r\n")
        response = await read_response(reader)
        writer.close()
        assert response.status == status
        if status == 200:
            assert response.json["outputs"][0]["data"] == [6.0]
