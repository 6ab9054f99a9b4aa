"""Every endpoint that takes JSON bounds it before it is parsed, and says so in the shape of its protocol."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import dragoman

from .text_house import House, Speaker, read_answer, speaking

VALUES = 3000
BODY = 200_000
MESSAGE = f"too many values in JSON: expected at most {VALUES} outside of tensor data (max_json_values), got more"


def double(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return x * 2


@dragoman.vector_function(inputs=[2], derivatives=None)
def vector(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 2 * x


class Names(dragoman.Model):
    """Tells the names of its inputs in the order in which they came."""

    placement = "inline"
    inputs = tuple(dragoman.TensorSpec(name, dragoman.INT32, (1,)) for name in "cab")
    outputs = (dragoman.TensorSpec("names", dragoman.BYTES, (3,)),)

    def infer(self, call: dragoman.Infer) -> dragoman.Tensor:
        return dragoman.Tensor.of(np.array([name.encode() for name in call.inputs], dtype=object))


@pytest.fixture
async def house() -> AsyncIterator[House]:
    models = (Speaker, double, vector, Names)
    async with speaking(
        *models, placement="inline", max_json_values=VALUES, control_open=True, max_body_bytes=BODY
    ) as made:
        yield made


def error_of(body: Any) -> str:
    """The message in any protocol's error."""
    for key in ("error", "message", "detail"):
        if isinstance(body, Mapping) and key in body:
            return error_of(body[key])
    return str(body)


V2 = "/v2/models/double"
ENDPOINTS: list[tuple[str, str, int]] = [
    (f"{V2}/infer", '{"inputs":[],"x":%s}', 400),
    ("/v2/models/none/infer", '{"inputs":[],"x":%s}', 400),
    (f"{V2}/infer", '{"inputs":[],"parameters":%s}', 400),
    (f"{V2}/infer", '{"inputs":%s}', 400),
    (f"{V2}/infer_stream", '{"inputs":[],"x":%s}', 400),
    ("/v2/models/Speaker/generate", '{"text_input":"a","x":%s}', 422),
    ("/v2/models/Speaker/generate_stream", '{"text_input":"a","x":%s}', 422),
    ("/v2/repository/index", '{"parameters":%s}', 400),
    ("/v2/repository/models/double/load", '{"parameters":%s}', 400),
    ("/v2/repository/models/double/unload", '{"parameters":%s}', 400),
    ("/v1/completions", '{"model":"Speaker","prompt":%s}', 400),
    ("/v1/chat/completions", '{"model":"Speaker","messages":%s}', 400),
    ("/v1/embeddings", '{"model":"Speaker","input":%s}', 400),
    ("/generate", '{"inputs":"a","x":%s}', 422),
    ("/generate_stream", '{"inputs":"a","x":%s}', 422),
    ("/tokenize", '{"inputs":"a","x":%s}', 422),
    ("/chat_tokenize", '{"messages":%s}', 422),
    ("/invocations", '{"model_name":"Speaker","inputs":%s}', 424),
    ("/predictions/double", '{"inputs":%s}', 424),
    ("/predictions/double", '{"dataframe_records":%s}', 424),
    ("/predictions/double", "%s", 424),
    ("/Evaluate", '{"name":"vector","input":%s}', 400),
    ("/Evaluate", '{"name":"vector","input":[[1,2]],"config":{"a":%s}}', 400),
    ("/InputSizes", '{"name":"vector","config":{"a":%s}}', 400),
]
FILLERS = ("[]", '{"a":{}}', '"a"', "0")


@pytest.mark.parametrize(("path", "body", "status"), ENDPOINTS, ids=lambda value: str(value)[:40])
async def test_too_many_values_are_rejected_before_they_are_parsed(
    house: House, path: str, body: str, status: int
) -> None:
    for filler in FILLERS:
        answer = await house.post(path, (body % f"[{','.join([filler] * (VALUES + 1))}]").encode())
        assert (answer.status, MESSAGE in error_of(answer.json)) == (status, True), (filler, answer.body)


async def test_what_is_within_the_limit_is_answered(house: House) -> None:
    lists = ",".join(["[]"] * 1000)
    tensor = '{"name":"x","shape":[1],"datatype":"FP32","data":[1]}'
    answer = await house.post(f"{V2}/infer", f'{{"inputs":[{tensor}],"x":[{lists}]}}'.encode())
    assert answer.json["outputs"][0]["data"] == [2.0]
    answer = await house.post("/v1/completions", f'{{"prompt":"b a","x":[{lists}],"model":"Speaker"}}'.encode())
    assert answer.json["choices"][0]["text"] == "a b"


async def test_tensor_data_is_not_counted(house: House) -> None:
    data = ",".join(["1"] * 5000)
    answer = await house.post(
        f"{V2}/infer", f'{{"inputs":[{{"name":"x","shape":[5000],"datatype":"FP32","data":[{data}]}}]}}'.encode()
    )
    assert answer.json["outputs"][0]["data"] == [2.0] * 5000
    rows = json.dumps([[float(n), 1.0] for n in range(8000)])
    answer = await house.post("/predictions/double", f'{{"instances":{rows}}}'.encode())
    assert answer.json["predictions"][7999] == [15998.0, 2.0]
    many = ",".join(["0.25"] * 3000)
    answer = await house.post("/Evaluate", f'{{"name":"vector","input":[[{many}]]}}'.encode())
    assert "expected 2 numbers" in error_of(answer.json) or "3000" in error_of(answer.json)


async def test_json_in_the_text_of_tool_calls_counts_together(house: House) -> None:
    arguments = json.dumps([[]] * 600)
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    said: dict[str, Any] = {"role": "assistant", "tool_calls": [call] * 4}
    messages = [{"role": "user", "content": "a"}, said]
    answer = await house.post("/v1/chat/completions", {"model": "Speaker", "messages": messages})
    assert answer.status == 400
    assert "`tool_calls`: too many values in `arguments`" in error_of(answer.json)
    said["tool_calls"] = [call]
    assert (await house.post("/v1/chat/completions", {"model": "Speaker", "messages": messages})).status == 200


async def test_tables_with_too_many_cells_are_rejected() -> None:
    async with speaking(double, placement="inline", max_bytes_elements=100) as house:
        csv = {"content-type": "text/csv"}
        answer = await house.post("/invocations", b"a\n" * 101, csv)
        assert answer.status == 424
        assert "too many cells in text/csv: expected at most 100" in error_of(answer.json)
        rows = b"".join(b"%d,0.5\n" % n for n in range(40_000))
        answer = await house.post("/invocations", rows, csv)
        assert answer.json["predictions"][39_999] == [79_998.0, 1.0]
        answer = await house.post("/invocations", b"x,y\n" + rows, csv)
        assert answer.json["predictions"][39_999] == [79_998.0, 1.0]
        answer = await house.post("/invocations", rows + b"1\n", csv)
        assert "row 40001 has 1 values, the first 2" in error_of(answer.json)


async def test_csv_with_a_cell_that_is_too_long_is_rejected() -> None:
    async with speaking(double, placement="inline") as house:
        for size in (200_000, 300_000):  # read at once, and in portions
            answer = await house.post("/predictions/double", b"1" * size + b"\n2\n", {"content-type": "text/csv"})
            assert answer.status == 424
            assert "the request body is not valid CSV: field larger than field limit" in error_of(answer.json)


async def test_large_forms_and_tables_of_prompts_are_rejected() -> None:
    form, table = ({"content-type": kind} for kind in ("application/x-www-form-urlencoded", "text/csv"))
    too_large = "the form is too large: expected at most 16777216 bytes and 65536 lines or fields"
    async with speaking(Speaker, placement="inline") as house:
        for body, headers, message in (
            (b"inputs=a" + b"&x" * (1 << 16), form, None),
            (b"inputs=a" + b"&x" * ((1 << 16) + 1), form, too_large),
            (b"inputs=a" + b"x" * (16 << 20), form, too_large),
            (b"inputs\n" + b"a\n" * (1 << 16), table, "too many rows in text/csv: expected at most 65536"),
            (b"inputs\n" + b"a\n" * 10, table, None),
        ):
            answer = await house.post("/invocations", body, headers)
            assert answer.status == (200 if message is None else 424)
            assert message is None or message in error_of(answer.json)


async def test_inputs_reach_the_model_in_the_order_of_its_signature(house: House) -> None:
    for order in ("abc", "cba", "bca"):
        given = [{"name": name, "shape": [1], "datatype": "INT32", "data": [1]} for name in order]
        answer = await house.post("/v2/models/Names/infer", {"inputs": given})
        assert answer.json["outputs"][0]["data"] == ["c", "a", "b"]


@pytest.mark.parametrize("chunk", [1000, 33_333, BODY])
async def test_a_chunked_body_may_have_exactly_the_most_bytes(house: House, chunk: int) -> None:
    whole = json.dumps({"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [3]}]}).encode()
    for size, status in ((BODY, 200), (BODY + 1, 413)):
        body = whole + b" " * (size - len(whole))
        head = f"POST {V2}/infer HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        parts = [body[at : at + chunk] for at in range(0, size, chunk)]
        reader, writer = await asyncio.open_connection("127.0.0.1", house.port)
        writer.write(head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n")
        answer = await read_answer(reader)
        writer.close()
        assert answer.status == status
        if status == 200:
            assert answer.json["outputs"][0]["data"] == [6.0]
