"""Pitfalls of the protocol over REST, by their numbers: request, status and message."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import dragoman
from rest.rest_server import Gate, RestServer, binary, inputs, outputs, request, serving, tensor

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[RestServer]:
    async with serving() as server:
        yield server


async def check_rejected(server: RestServer, body: Any, *words: str, model: str = "Identity") -> str:
    """Return the message of a request that gets 400 and check that it contains each of the words."""
    response = await server.infer(model, body)
    text = response.error
    assert response.status == 400, text
    for word in words:
        assert word in text, text
    return text


async def data_of(server: RestServer, body: Any) -> Any:
    return next(outputs(await server.infer("Identity", body)))["data"]


# --- the specifications against each other ------------------------------------------------------------------


async def test_t1_health_has_an_empty_body(server: RestServer) -> None:
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/Identity/ready"):
        response = await server.request("GET", path)
        assert (response.status, response.body) == (200, b"")


async def test_t1_health_with_a_json_body() -> None:
    async with serving(health_json=True) as server:
        assert (await server.request("GET", "/v2/health/live")).json == {"live": True}
        assert (await server.request("GET", "/v2/health/ready")).json == {"ready": True}
        assert (await server.request("GET", "/v2/models/Adder/ready")).json == {"name": "Adder", "ready": True}


async def test_t1_not_ready_is_a_4xx() -> None:
    class Broken(dragoman.Model):
        placement = "inline"

        def load(self) -> None:
            raise ValueError("no weights")

        def infer(self, call: dragoman.Infer) -> Any: ...

    async with serving(Broken) as server:
        for path in ("/v2/health/ready", "/v2/models/Broken/ready"):
            response = await server.request("GET", path)
            assert (response.status, response.body) == (400, b"")
        assert (await server.request("GET", "/v2/health/live")).status == 200
        response = await server.infer("Broken", inputs(tensor()))
        assert response.status == 503
        assert response.error.startswith("model 'Broken' is not ready: UNAVAILABLE; the reason is in the log")


async def test_t5_control_has_a_version_parameter() -> None:
    async with serving(control_token="t") as server:
        token = {"Authorization": "Bearer t"}
        load, unload = "/v2/repository/models/Adder/load", "/v2/repository/models/Adder/unload"
        response = await server.request("POST", load, {"parameters": {"version": "77"}}, token)
        assert response.status == 400
        assert "version '77'" in response.error
        assert (await server.request("POST", unload, {"parameters": {"version": "77"}}, token)).status == 200
        assert (await server.infer("Adder", both())).status == 200
        body = {"parameters": {"unload_dependents": True}}
        response = await server.request("POST", unload, body, token)
        assert (response.status, response.body) == (200, b"")
        assert (await server.infer("Adder", both())).status == 404


async def test_t6_the_example_in_the_specification_has_a_wrong_length(server: RestServer) -> None:
    await check_rejected(server, inputs(tensor("input1", [3], "BOOL", [True])), "'input1'", "needs 3 elements, got 1")


async def test_several_slashes_at_the_start_of_a_path(server: RestServer) -> None:
    for path in ("//v2", "///v2/models/Identity", "//v2/health/live/"):
        assert (await server.request("GET", path)).status == 200
    for method, path in (("GET", "//metrics"), ("POST", "//v2/repository/index")):  # a proxy may block such paths
        assert (await server.request(method, path[1:], b"" if method == "POST" else None)).status in (200, 403)
        assert (await server.request(method, path, b"" if method == "POST" else None)).status == 404


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v3", 404),
        ("GET", "/v2/nope", 404),
        ("GET", "//v3", 404),
        ("GET", "//v2//health/live", 404),
        ("GET", "/v2//health/live", 404),
        ("GET", "/v2/health", 404),
        ("GET", "/v2/health/live/x", 404),
        ("GET", "/v2/models//ready", 404),
        ("GET", "/v2/models/Identity/versions", 404),
        ("GET", "/v2/models/Identity/versions//ready", 404),
        ("GET", "/v2/models/Identity/versions/1", 404),
        ("GET", "/v2/models/Identity/versions/abc/ready", 404),
        ("GET", "/v2/models/Identity/nope", 404),
        ("GET", "/v2/models/nope", 404),
        ("GET", "/v2/models/..%2f..", 404),
        ("GET", "/v2/models/%00", 404),
        ("GET", "/v2/models/%ff%fe", 404),
        ("GET", "/v2/models/%zz", 404),
        ("GET", "/V2/health/live", 404),
        ("GET", "/v2/repository", 404),
        ("POST", "/v2/repository/models/a/b/load", 404),
        ("POST", "/v2/models/Identity", 405),
        ("GET", "/v2/models/Identity/infer", 405),
        ("DELETE", "/v2", 405),
        ("PUT", "/v2/health/live", 405),
    ],
)
async def test_t7_unknown_paths_have_the_same_error_format(
    server: RestServer, method: str, path: str, status: int
) -> None:
    response = await server.request(method, path, b"" if method in ("POST", "PUT") else None)
    assert response.status == status
    assert response.error


# --- the envelope --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body", ["{", "nonsense", '{"inputs": [}', '{"inputs":[]} x', "[]", '"text"', "1", "true", "\x00", "{'inputs': []}"]
)
async def test_t8_malformed_json(server: RestServer, body: str) -> None:
    await check_rejected(server, body, "not an inference request")


@pytest.mark.parametrize("field", ["name", "shape", "datatype"])
async def test_t9_a_missing_field_of_an_input(server: RestServer, field: str) -> None:
    value = tensor()
    del value[field]
    await check_rejected(server, inputs(tensor("first"), value), "inputs[1]", f"'{field}'")


async def test_t9_missing_data_and_missing_inputs(server: RestServer) -> None:
    value = tensor("mine")
    del value["data"]
    await check_rejected(server, inputs(value), "'mine'", "expected 'data'")
    await check_rejected(server, {}, "'inputs'")


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"name": 5}, "inputs[0].name"),
        ({"shape": "3"}, "inputs[0].shape"),
        ({"shape": None}, "inputs[0].shape"),
        ({"datatype": 7}, "inputs[0].datatype"),
        ({"parameters": []}, "inputs[0].parameters"),
        ({"parameters": "p"}, "inputs[0].parameters"),
    ],
)
async def test_t9_a_field_of_the_wrong_type(server: RestServer, change: dict[str, Any], where: str) -> None:
    await check_rejected(server, inputs({**tensor(), **change}), where, "expected", "got")


@pytest.mark.parametrize("body", ["", "null", " ", "\n"])
async def test_t10_an_empty_body_or_null(server: RestServer, body: str) -> None:
    await check_rejected(server, body)


@pytest.mark.parametrize("id_", ["42", "", 'ü \\ " \u2028 😀', "a" * 5000])
async def test_t11_the_id_comes_back_exactly(server: RestServer, id_: str) -> None:
    assert (await server.infer("Identity", inputs(tensor(), id=id_))).json["id"] == id_


async def test_t11_no_id_no_key(server: RestServer) -> None:
    assert "id" not in (await server.infer("Identity", inputs(tensor()))).json
    assert "id" not in (await server.infer("Identity", inputs(tensor(), id=None))).json


@pytest.mark.parametrize("id_", [1, 1.5, True, [], {}])
async def test_t12_the_id_is_text(server: RestServer, id_: Any) -> None:
    await check_rejected(server, inputs(tensor(), id=id_), "id", "expected 'str")


async def test_t13_keys_of_the_response_in_order_without_empty_ones(server: RestServer) -> None:
    response = await server.infer("Identity", inputs(tensor(parameters={"p": 1}), id="7", parameters={"q": 1}))
    assert response.headers["content-type"] == "application/json"
    assert list(response.json) == ["id", "model_name", "outputs"]
    assert [list(o) for o in response.json["outputs"]] == [["name", "datatype", "shape", "parameters", "data"]]
    plain = await server.infer("Identity", inputs(tensor()))
    assert [list(o) for o in plain.json["outputs"]] == [["name", "datatype", "shape", "data"]]


async def test_t13_parameters_precede_outputs_in_the_response() -> None:
    class Telling(dragoman.Model):
        placement = "inline"

        def infer(self, call: dragoman.Infer) -> dragoman.Inference:
            return dragoman.Inference(call.inputs, {"took_s": 0.5})

    async with serving(Telling) as server:
        assert list((await server.infer("Telling", inputs(tensor(), id="i"))).json) == [
            "id",
            "model_name",
            "parameters",
            "outputs",
        ]


async def test_t14_the_version_is_a_string_or_missing(server: RestServer, tmp_path: Path) -> None:
    assert "model_version" not in (await server.infer("Identity", inputs(tensor()))).json
    folder = tmp_path / "echo" / "3"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(
        "import dragoman\n\nclass Echo(dragoman.Model):\n    placement = 'inline'\n"
        "    def infer(self, call):\n        return dict(call.inputs)\n"
    )
    async with serving(tmp_path, placement="inline") as versioned:
        for path in ("/v2/models/echo", "/v2/models/echo/versions/3"):
            assert (await versioned.request("POST", f"{path}/infer", inputs(tensor()))).json["model_version"] == "3"
            assert (await versioned.request("GET", path)).json["versions"] == ["3"]
        response = await versioned.request("POST", "/v2/models/echo/versions/4/infer", inputs(tensor()))
        assert response.status == 404
        assert response.error.startswith("Request for unknown model: 'echo' version 4 is not found")


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "application/octet-stream", "x", ""])
async def test_t15_any_content_type_is_accepted_for_json(server: RestServer, kind: str) -> None:
    response = await server.infer("Identity", inputs(tensor()), {"Content-Type": kind})
    assert response.status == 200


async def test_t15_bytes_need_their_header(server: RestServer) -> None:
    body, _ = binary(inputs({**tensor(), "parameters": {"binary_data_size": 4}}), b"\x01\0\0\0")
    response = await server.infer("Identity", body, {"Content-Type": "application/octet-stream"})
    assert response.status == 400
    assert "needs the header Inference-Header-Content-Length" in response.error


async def test_t16_a_byte_order_mark_is_ignored(server: RestServer) -> None:
    assert (await server.infer("Identity", b"\xef\xbb\xbf" + json.dumps(inputs(tensor())).encode())).status == 200


@pytest.mark.parametrize("text", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\\ud800", b"\\udc00\\ud800"])
async def test_t17_invalid_unicode(server: RestServer, text: bytes) -> None:
    body = json.dumps(inputs(tensor(), id="@")).encode().replace(b"@", text)
    await check_rejected(server, body)


async def test_t18_the_last_duplicate_key_wins(server: RestServer) -> None:
    one, two = json.dumps([tensor("one")]), json.dumps([tensor("two")])
    response = await server.infer("Identity", f'{{"inputs": {one}, "inputs": {two}}}')
    assert [o["name"] for o in outputs(response)] == ["two"]


async def test_t19_unknown_keys_are_ignored(server: RestServer) -> None:
    body = inputs(tensor(extra={"a": [1]}), more=[[{}]], outputs=[{"name": "x", "what": None}])
    assert (await server.infer("Identity", body)).status == 200


@pytest.mark.parametrize("value", [{}, [], {"a": 1}, [1]])
@pytest.mark.parametrize("where", ["request", "input", "output"])
async def test_t20_parameters_of_other_types(server: RestServer, value: Any, where: str) -> None:
    parameters = {"parameters": {"p": value}}
    body = {
        "request": inputs(tensor(), **parameters),
        "input": inputs(tensor(parameters={"p": value})),
        "output": inputs(tensor(), outputs=[{"name": "x", **parameters}]),
    }[where]
    await check_rejected(server, body, "parameters")


async def test_t20_null_parameters_are_ignored(server: RestServer) -> None:
    # The clients of MLServer write every parameter that their types know: "headers": null.
    body = inputs(
        tensor(parameters={"p": None, "q": 1}),
        parameters={"p": None},
        outputs=[{"name": "x", "parameters": {"p": None}}],
    )
    response = await server.infer("Identity", body)
    assert next(outputs(response))["parameters"] == {"q": 1}
    assert "parameters" not in response.json


async def test_t20_parameters_of_each_type_reach_the_model(server: RestServer) -> None:
    value = {"s": "text", "b": True, "i": 7, "f": 0.5, "big": 2**63 - 1, "n": -(2**63)}
    response = await server.infer("Identity", inputs(tensor(parameters=value)))
    assert next(outputs(response))["parameters"] == value


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 10**400])
async def test_t20_integers_beyond_64_bits_are_rejected(server: RestServer, value: int) -> None:
    await check_rejected(server, inputs(tensor(parameters={"big": value})), "'big'")
    await check_rejected(server, inputs(tensor(), parameters={"big": value}), "'big'")
    await check_rejected(server, inputs(tensor(), outputs=[{"name": "x", "parameters": {"big": value}}]), "'big'")


async def test_t21_literal_nan_is_invalid_json(server: RestServer) -> None:
    for word in ("NaN", "Infinity", "-Infinity"):
        await check_rejected(server, f'{{"inputs":[{{"name":"x","shape":[1],"datatype":"FP32","data":[{word}]}}]}}')


@pytest.mark.parametrize("depth", [65, 1000, 100_000, 1_000_000])
async def test_t22_deep_nesting(server: RestServer, depth: int) -> None:
    bomb = "[" * depth + "]" * depth
    await check_rejected(server, bomb, "nests too deep")
    await check_rejected(server, '{"inputs": [], "x": ' + '{"a":' * depth + "1" + "}" * depth + "}", "nests too deep")
    await check_rejected(server, f'{{"inputs":[{{"name":"x","shape":[1],"datatype":"FP32","data":{bomb}}}]}}', "deep")
    await check_rejected(server, "[" * depth)
    assert (await server.request("GET", "/v2/health/live")).status == 200


async def test_t22_brackets_in_strings_do_not_nest(server: RestServer) -> None:
    for text in ("[" * 500, '"[{' * 100, '\\"[' * 100, "\\" * 101 + "[" * 100):
        assert await data_of(server, inputs(tensor("x", [1], "BYTES", [text]))) == [text]


async def test_t22_the_limit_is_configurable() -> None:
    async with serving(max_json_depth=4) as server:
        assert (await server.infer("Identity", inputs(tensor(data=[1])))).status == 200
        await check_rejected(server, inputs(tensor("x", [1, 1], "INT32", [[1]])), "limit is 4")


# --- tensors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "data", "got"), [([1, 2], [1], 1), ([2], [1, 2, 3], 3), ([], [], 0), ([0], [1], 1), ([], [1, 2], 2)]
)
async def test_t23_count_differs_from_shape(server: RestServer, shape: list[int], data: list[int], got: int) -> None:
    count = 2 if 2 in shape else 0 if 0 in shape else 1
    text = await check_rejected(server, inputs(tensor("mine", shape, "INT32", data)))
    assert text == f"input 'mine': shape {shape} needs {count} elements, got {got}"


@pytest.mark.parametrize(("datatype", "values"), [("INT32", [1, 2, 3, 4]), ("BYTES", ["a", "b", "c", "d"])])
async def test_t24_nested_data_equals_flat_data(server: RestServer, datatype: str, values: list[Any]) -> None:
    for data in (values, [values[:2], values[2:]]):
        assert await data_of(server, inputs(tensor("x", [2, 2], datatype, data))) == values


@pytest.mark.parametrize(
    ("shape", "data"),
    [
        ([2, 2], [[1, 2, 3, 4]]),
        ([4], [[1, 2], [3, 4]]),
        ([2, 2], [[[1, 2], [3, 4]]]),
        ([1, 2, 2], [[1, 2], [3, 4]]),
        ([2, 0], [[], [], []]),
        ([2, 0, 3], [[]]),
        ([], [[1]]),
    ],
)
async def test_t24_nesting_that_does_not_match_the_shape(server: RestServer, shape: list[int], data: list[Any]) -> None:
    await check_rejected(server, inputs(tensor("mine", shape, "INT32", data)), "'mine'", "nests")


@pytest.mark.parametrize("datatype", ["INT32", "FP32", "BYTES", "BOOL"])
async def test_t25_ragged_data(server: RestServer, datatype: str) -> None:
    one: Any = {"INT32": 1, "FP32": 1.5, "BYTES": "a", "BOOL": True}[datatype]
    await check_rejected(server, inputs(tensor("mine", [2, 2], datatype, [[one], [one] * 3])), "'mine'", "ragged")
    await check_rejected(server, inputs(tensor("mine", [2, 2], datatype, [[one, one], one])), "'mine'")


@pytest.mark.parametrize("data", [1, 1.5, "a", True, {}, {"a": 1}, None])
async def test_t26_data_is_an_array(server: RestServer, data: Any) -> None:
    await check_rejected(server, inputs(tensor("mine", [1], "INT32", data)), "'mine'", "expected 'data' to be an array")


INTEGERS = {"INT8": (-(2**7), 2**7), "INT16": (-(2**15), 2**15), "INT32": (-(2**31), 2**31), "INT64": (-(2**63), 2**63)}
UNSIGNED = {"UINT8": (0, 2**8), "UINT16": (0, 2**16), "UINT32": (0, 2**32), "UINT64": (0, 2**64)}


@pytest.mark.parametrize(("datatype", "low", "end"), [(k, *v) for k, v in (INTEGERS | UNSIGNED).items()])
async def test_t27_integers_out_of_range(server: RestServer, datatype: str, low: int, end: int) -> None:
    for bad in (low - 1, end, 10**30, -(10**30)):
        body = inputs(tensor("mine", [2], datatype, [1, bad]))
        await check_rejected(server, body, f"input 'mine': {bad} does not fit into {datatype}")
    assert await data_of(server, inputs(tensor("x", [2], datatype, [low, end - 1]))) == [low, end - 1]


@pytest.mark.parametrize(
    ("datatype", "bad"),
    [("FP16", 70000), ("FP32", 1e39), ("BF16", -3.4e38 * 1.2), ("FP64", "1e400"), ("FP64", 10**400)],
)
async def test_t27_floats_out_of_range(server: RestServer, datatype: str, bad: Any) -> None:
    body = json.dumps(inputs(tensor("mine", [1], datatype, ["@"]))).replace('"@"', str(bad))
    await check_rejected(server, body, "'mine'")


@pytest.mark.parametrize(
    ("datatype", "value"),
    [
        ("INT32", 1.5),
        ("INT32", "1"),
        ("INT32", True),
        ("INT32", None),
        ("UINT8", False),
        ("INT64", 2.0**60),
        ("FP32", "1"),
        ("FP32", True),
        ("FP32", {}),
        ("BOOL", 1),
        ("BOOL", 0.0),
        ("BOOL", "false"),
        ("BOOL", None),
        ("BYTES", 1),
        ("BYTES", None),
        ("BYTES", True),
    ],
)
async def test_t28_nothing_is_coerced(server: RestServer, datatype: str, value: Any) -> None:
    await check_rejected(server, inputs(tensor("mine", [1], datatype, [value])), "'mine'", "expected", "got")


async def test_t28_integral_floats_are_integers(server: RestServer) -> None:
    assert await data_of(server, inputs(tensor("x", [2, 2], "INT32", [[1.0, 2], [-3e0, 4e2]]))) == [1, 2, -3, 400]
    assert await data_of(server, inputs(tensor("x", [2], "FP32", [1, 2]))) == [1.0, 2.0]


async def test_t29_integers_beyond_2_53_are_exact(server: RestServer) -> None:
    values = [2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63)]
    assert await data_of(server, inputs(tensor("x", [4], "INT64", values))) == values
    assert await data_of(server, inputs(tensor("x", [1], "UINT64", [2**64 - 1]))) == [2**64 - 1]


async def test_t30_null_is_nan(server: RestServer) -> None:
    for datatype in ("FP16", "BF16", "FP32", "FP64"):
        assert await data_of(server, inputs(tensor("x", [2], datatype, [None, 1.5]))) == [None, 1.5]
    for datatype in ("INT32", "BOOL", "BYTES"):
        await check_rejected(server, inputs(tensor("x", [1], datatype, [None])))


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
async def test_t31_fp16_and_bf16_in_json(server: RestServer, datatype: str) -> None:
    assert await data_of(server, inputs(tensor("x", [3], datatype, [0.5, -2, 1e-5])))


async def test_t32_floats_have_shortest_repr(server: RestServer) -> None:
    response = await server.infer("Identity", inputs(tensor("x", [2], "FP32", [0.1, 16777216])))
    assert b'"data":[0.1,16777216.0]' in response.body


async def test_t35_a_scalar_is_one_element(server: RestServer) -> None:
    response = next(outputs(await server.infer("Identity", inputs(tensor("x", [], "INT32", [5])))))
    assert (response["shape"], response["data"]) == ([], [5])


@pytest.mark.parametrize(
    ("shape", "data"), [([2, 0], []), ([2, 0], [[], []]), ([0, 2], []), ([0], []), ([2, 0, 3], [[], []])]
)
@pytest.mark.parametrize("datatype", ["FP32", "BYTES", "BOOL", "BF16"])
async def test_t35b_no_elements(server: RestServer, shape: list[int], data: list[Any], datatype: str) -> None:
    response = next(outputs(await server.infer("Identity", inputs(tensor("x", shape, datatype, data)))))
    assert (response["shape"], response["data"]) == (shape, [])


@pytest.mark.parametrize("n", [-1, -(2**63), 2**63, 2**64])
async def test_t35c_negative_and_huge_dims(server: RestServer, n: int) -> None:
    await check_rejected(server, inputs(tensor("mine", [n], "INT32", [1])), "'mine'", "from 0 to 2^63-1")


@pytest.mark.parametrize("n", [1.0, 1.5, "1", True, None, [1]])
async def test_t35d_dims_are_integers(server: RestServer, n: Any) -> None:
    await check_rejected(server, inputs(tensor("mine", [n], "INT32", [1])), "inputs[0].shape")


@pytest.mark.parametrize(
    "shape", [[2**62, 4], [2**32, 2**32], [2**40], [2**63 - 1] * 32, [0, 2**62, 4], [2**62, 2**62, 0]]
)
async def test_t36_overflowing_shapes(server: RestServer, shape: list[int]) -> None:
    for data in ([1], []):
        await check_rejected(server, inputs(tensor("mine", shape, "FP64", data)), "'mine'")
    body, headers = binary(inputs({**tensor("mine", shape, "FP64"), "parameters": {"binary_data_size": 8}}), bytes(8))
    body = body.replace(b', "data": [1]', b"")
    headers = {"Inference-Header-Content-Length": str(len(body) - 8)}
    response = await server.infer("Identity", body, headers)
    assert response.status == 400
    assert "'mine'" in response.error
    assert (await server.infer("Identity", inputs(tensor()))).status == 200


async def test_t36_rank_is_bounded(server: RestServer) -> None:
    await check_rejected(server, inputs(tensor("mine", [1] * 33, "INT32", [1])), "'mine'", "at most 32 axes, got 33")
    assert await data_of(server, inputs(tensor("x", [1] * 32, "INT32", [1]))) == [1]
    deep: Any = 1
    for _ in range(32):
        deep = [deep]
    assert await data_of(server, inputs(tensor("x", [1] * 32, "INT32", deep))) == [1]


async def test_t37_requests_are_checked_against_free_axes_in_metadata(server: RestServer) -> None:
    expected = (await server.request("GET", "/v2/models/Adder")).json
    assert expected == {
        "name": "Adder",
        "platform": "python_function",
        "inputs": [{"name": n, "datatype": "INT32", "shape": [-1, 2]} for n in ("INPUT0", "INPUT1")],
        "outputs": [{"name": n, "datatype": "INT32", "shape": [-1, 2]} for n in ("SUM", "DIFF")],
    }
    bad = inputs(tensor("INPUT0", [1, 3], "INT32", [1, 2, 3]), tensor("INPUT1", [1, 2], "INT32", [1, 2]))
    await check_rejected(server, bad, "'INPUT0'", "expected shape [-1, 2], got [1, 3]", model="Adder")
    flat = inputs(tensor("INPUT0", [2], "INT32", [1, 2]), tensor("INPUT1", [1, 2], "INT32", [1, 2]))
    await check_rejected(server, flat, "expected shape [-1, 2], got [2]", model="Adder")


async def test_t38_batches_are_bounded() -> None:
    class Rows(dragoman.Model):
        placement = "inline"
        batched = True
        inputs = (dragoman.TensorSpec("x", dragoman.FP32, (-1,)),)
        outputs = (dragoman.TensorSpec("x", dragoman.FP32, (-1,)),)

        def infer(self, call: dragoman.Infer) -> Any:
            return call.inputs["x"]

    async with serving(Rows, max_batch_size=8) as server:
        assert (await server.infer("Rows", inputs(tensor("x", [8], "FP32", [0] * 8)))).status == 200
        body = inputs(tensor("x", [9], "FP32", [0] * 9))
        await check_rejected(server, body, "inference request batch-size must be <= 8", model="Rows")


async def test_t39_a_vector_stays_a_vector(server: RestServer) -> None:
    assert next(outputs(await server.infer("Identity", inputs(tensor("x", [2], "INT32", [1, 2])))))["shape"] == [2]


async def test_t40_bytes_are_text_in_json(server: RestServer) -> None:
    await check_rejected(server, inputs(tensor("mine", [2], "BYTES", [1, 2])), "'mine'", "expected 'str', got 'int'")


async def test_t41_bytes_that_are_not_utf_8(server: RestServer) -> None:
    value = {"name": "x", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 5}}
    body, headers = binary(inputs(value), b"\x01\0\0\0\xff")
    response = await server.infer("Identity", body, headers)
    assert response.status == 400
    assert "output 'x'" in response.error
    assert "ask for binary output" in response.error


@pytest.mark.parametrize("raw", [b"\x01", b"\x05\0\0\0ab", b"\xff\xff\xff\xffab", b"\x01\0\0\0a\x00\x00"])
async def test_t42_truncated_bytes(server: RestServer, raw: bytes) -> None:
    value = {"name": "mine", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": len(raw)}}
    response = await server.infer("Identity", *binary(inputs(value), raw))
    assert response.status == 400
    assert "'mine'" in response.error
    assert "BYTES element" in response.error


@pytest.mark.parametrize("byte", [b"\x02", b"\xff"])
async def test_t43_a_bool_is_0_or_1(server: RestServer, byte: bytes) -> None:
    value = {"name": "mine", "shape": [2], "datatype": "BOOL", "parameters": {"binary_data_size": 2}}
    response = await server.infer("Identity", *binary(inputs(value), b"\x01" + byte))
    assert response.status == 400
    assert "input 'mine': expected BOOL bytes of 0 or 1" in response.error


@pytest.mark.parametrize("name", ["fp32", "Int32", "FLOAT", "", "STRING", "FP32 "])
async def test_t44_datatypes_are_exact(server: RestServer, name: str) -> None:
    await check_rejected(server, inputs(tensor("mine", [1], name)), "'mine'", f"'{name}'", "FP32")


# --- names and subsets ---------------------------------------------------------------------------------------


def both(**more: Any) -> dict[str, Any]:
    return inputs(tensor("INPUT0", [1, 2], "INT32", [5, 6]), tensor("INPUT1", [1, 2], "INT32", [1, 2]), **more)


@pytest.mark.parametrize(
    ("expected_value", "given"),
    [(["DIFF"], ["DIFF"]), (["SUM"], ["SUM"]), (["DIFF", "SUM"], ["SUM", "DIFF"]), ([], ["SUM", "DIFF"])],
)
async def test_t45_only_the_requested_outputs(server: RestServer, expected_value: list[str], given: list[str]) -> None:
    response = await server.infer("Adder", both(outputs=[{"name": n} for n in expected_value]))
    assert [o["name"] for o in outputs(response)] == given


async def test_t46_an_unknown_output(server: RestServer) -> None:
    body = both(outputs=[{"name": "NOPE"}])
    await check_rejected(server, body, "unexpected inference output 'NOPE' for model 'Adder'", "'SUM'", model="Adder")


async def test_t47_the_same_output_twice(server: RestServer) -> None:
    body = both(outputs=[{"name": "SUM"}, {"name": "SUM"}])
    await check_rejected(server, body, "output 'SUM' already exists in request", model="Adder")


async def test_t48_null_outputs_are_all(server: RestServer) -> None:
    assert [o["name"] for o in outputs(await server.infer("Adder", both(outputs=None)))] == ["SUM", "DIFF"]


async def test_t49_the_same_input_twice(server: RestServer) -> None:
    await check_rejected(server, inputs(tensor("mine"), tensor("mine")), "input 'mine' already exists in request")


async def test_t50_unknown_and_missing_inputs(server: RestServer) -> None:
    text = "unexpected inference input 'INPUT2' for model 'Adder'"
    await check_rejected(server, inputs(*both()["inputs"], tensor("INPUT2")), text, model="Adder")
    text = "expected 2 inputs but got 1 inputs for model 'Adder'"
    await check_rejected(server, inputs(both()["inputs"][0]), text, "'INPUT1'", model="Adder")


async def test_t51_no_inputs(server: RestServer) -> None:
    await check_rejected(server, inputs(), "expected 2 inputs but got 0 inputs for model 'Adder'", model="Adder")


async def test_t52_a_datatype_other_than_in_the_metadata(server: RestServer) -> None:
    body = inputs(tensor("INPUT0", [1, 2], "FP32", [5, 6]), both()["inputs"][1])
    await check_rejected(server, body, "input 'INPUT0': expected datatype INT32, got FP32", model="Adder")


# --- status codes and paths ----------------------------------------------------------------------------------


async def test_t53_an_unknown_model(server: RestServer) -> None:
    response = await server.infer("nope", inputs(tensor()))
    assert response.status == 404
    assert response.error.startswith("Request for unknown model: 'nope' is not found")


async def test_t54_ready_of_an_unknown_model(server: RestServer) -> None:
    response = await server.request("GET", "/v2/models/nope/ready")
    assert response.status == 404
    assert response.error


async def test_t55_an_unknown_version(server: RestServer) -> None:
    for method, rest in (("GET", ""), ("GET", "/ready"), ("POST", "/infer")):
        response = await server.request(
            method, f"/v2/models/Adder/versions/abc{rest}", both() if method == "POST" else None
        )
        assert response.status == 404
        assert "version abc" in response.error


async def test_t56_the_wrong_method_and_options(server: RestServer) -> None:
    response = await server.request("GET", "/v2/models/Adder/infer")
    assert (response.status, response.headers["allow"]) == (405, "OPTIONS, POST")
    assert "POST" in response.error
    response = await server.request("POST", "/v2/health/live", b"")
    assert (response.status, response.headers["allow"]) == (405, "GET, HEAD, OPTIONS")
    response = await server.request("OPTIONS", "/v2/models/Adder/infer")
    assert (response.status, response.headers["allow"], response.body) == (204, "OPTIONS, POST", b"")
    assert (await server.request("OPTIONS", "/v2/nope")).status == 404
    response = await server.request("OPTIONS", "*")
    assert (response.status, response.headers["allow"]) == (204, "DELETE, GET, HEAD, OPTIONS, POST, PUT")
    assert (await server.request("GET", "*")).status == 404


@pytest.mark.parametrize("path", ["/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/Adder"])
async def test_t57_head(server: RestServer, path: str) -> None:
    response = await server.request("HEAD", path)
    expected = await server.request("GET", path)
    assert response.status == expected.status == 200
    assert response.headers["content-length"] == expected.headers["content-length"] == str(len(expected.body))


@pytest.mark.parametrize("path", ["/v2", "/v2/health/live", "/v2/models/Adder", "/v2/models/Adder/ready", "/v2/models"])
async def test_t58_a_trailing_slash(server: RestServer, path: str) -> None:
    assert (await server.request("GET", path + "/")).body == (await server.request("GET", path)).body
    assert (await server.request("GET", path + "/?a=b")).status == 200


async def test_t59_a_full_queue() -> None:
    async with serving(Gate, max_queue=1) as server:
        gate = server.model("Gate")
        first = asyncio.ensure_future(server.infer("Gate", inputs(tensor())))
        await gate.begun.wait()
        response = await server.infer("Gate", inputs(tensor()))
        assert (response.status, response.headers["retry-after"]) == (503, "1")
        assert response.error.startswith("Exceeds maximum queue size")
        gate.open.set()
        assert (await first).status == 200
        assert (await server.infer("Gate", inputs(tensor()))).status == 200


async def test_the_parameter_timeout_counts_microseconds() -> None:
    async with serving(Gate) as server:
        response = await server.infer("Gate", inputs(tensor(), parameters={"timeout": 20_000}))
        assert response.status == 504
        expected = "Request timeout expired; the parameter 'timeout' of the request is 20000 microseconds"
        assert response.error == expected
        assert server.model("Gate").cancelled.is_set()
        server.model("Gate").open.set()
        for fine in (0, 30, 10_000_000, (1 << 64) - 1):  # some clients send 30, and mean seconds
            assert (await server.infer("Gate", inputs(tensor(), parameters={"timeout": fine}))).status == 200
        for bad in (-1, 1.5, "soon", True, 1 << 64):
            await check_rejected(server, inputs(tensor(), parameters={"timeout": bad}), "'timeout'", model="Gate")


async def test_the_default_timeout_applies_without_one_in_the_request() -> None:
    async with serving(Gate, timeout_s=0.02) as server:
        assert (await server.infer("Gate", inputs(tensor()))).status == 504


@pytest.mark.parametrize("name", ["br", "zstd", "gzip, br", "compress", "gzip, gzip, gzip"])
async def test_t60_an_unknown_encoding(server: RestServer, name: str) -> None:
    response = await server.infer("Identity", inputs(tensor()), {"Content-Encoding": name})
    assert (response.status, response.headers["accept-encoding"]) == (415, "gzip, deflate")
    assert "not supported" in response.error


async def test_t61_a_body_that_is_too_large() -> None:
    async with serving(max_body_bytes=1000) as server:
        response = await server.infer("Identity", b" " * 1001)
        assert response.status == 413
        assert response.error == "the body is larger than the limit of 1000 bytes"
        assert (await server.infer("Identity", json.dumps(inputs(tensor())).ljust(1000))).status == 200


async def test_t62_a_model_that_raises(server: RestServer, caplog: pytest.LogCaptureFixture) -> None:
    response = await server.infer("Faulty", inputs(tensor(), parameters={"raise": "value"}, id="request 7"))
    assert response.status == 500
    assert response.error == "model 'Faulty' failed: ValueError: that was too much"
    assert "request 7" in caplog.text
    assert "Traceback" in caplog.text


async def test_t62_an_error_message_with_a_lone_surrogate(server: RestServer) -> None:
    response = await server.infer("Faulty", inputs(tensor(), parameters={"raise": "surrogate"}))
    assert (response.status, response.error) == (500, "model 'Faulty' failed: ValueError: half a character: ?")


async def test_t62_a_model_that_raises_a_caller_error(server: RestServer) -> None:
    body = inputs(tensor(), parameters={"raise": "not supported"})
    assert await check_rejected(server, body, model="Faulty") == "not today"


async def test_t62_internal_errors_hide_details(server: RestServer, caplog: pytest.LogCaptureFixture) -> None:
    response = await server.infer("Faulty", inputs(tensor(), parameters={"raise": "parameter"}))
    assert response.status == 500
    assert response.error.startswith("internal error; the log has more under request id ")
    assert response.error.split()[-1] in caplog.text
    assert "object" not in response.error


@pytest.mark.parametrize("name", ["..%2Fx", "%2e%2e", ".hidden", "a%00b", "a%2fb", "-x", "x" * 257])
async def test_t63_invalid_names(tmp_path: Path, name: str) -> None:
    async with serving(control_token="t") as server:
        for verb in ("load", "unload"):
            path = f"/v2/repository/models/{name}/{verb}"
            response = await server.request("POST", path, b"", {"Authorization": "Bearer t"})
            assert response.status == 400
            is_path = verb == "load" and name in ("..%2Fx", "%2e%2e", "a%2fb")
            expected = "name must not contain path traversal characters" if is_path else "is not allowed"
            assert expected in response.error


# --- model control ---------------------------------------------------------------------------------------------

CONTROL = ("/v2/repository/index", "/v2/repository/models/Adder/load", "/v2/repository/models/Adder/unload")
# What `RepositoryIndexRequest().model_dump()` of MLServer sends: null is as if it were not there.
NULLS = {"ready": None, "parameters": None}


@pytest.mark.parametrize(
    ("verb", "body", "text"),
    [
        ("load", {"parameters": {"confg": "{}"}}, "unrecognized parameter 'confg'"),
        ("load", {"parameters": {"confg": "{}"}}, "did you mean 'config'?"),
        ("load", {"parameters": {"unload_dependents": True}}, "unrecognized parameter 'unload_dependents'"),
        ("unload", {"parameters": {"verson": "1"}}, "unrecognized parameter 'verson': expected 'version' or"),
        ("unload", {"parameters": {"config": "{}"}}, "unrecognized parameter 'config'"),
        ("load", {"config": "{}"}, "unknown field 'config'"),
        ("unload", {"version": "1"}, "unknown field 'version'"),
    ],
)
async def test_unknown_parameters_of_control_requests(verb: str, body: Any, text: str) -> None:
    """They may be misspelt: a load would not change the model as it should, an unload would end all versions."""
    async with serving(control_token="t") as server:
        token = {"Authorization": "Bearer t"}
        response = await server.request("POST", f"/v2/repository/models/Adder/{verb}", body, token)
        assert response.status == 400
        assert text in response.error
        assert (await server.infer("Adder", both())).status == 200


async def test_control_is_off_by_default(server: RestServer) -> None:
    for path in CONTROL:
        response = await server.request("POST", path, b"", {"Authorization": "Bearer "})
        assert response.status == 403
        assert "--control-token" in response.error
    assert (await server.request("GET", "/v2/models/Adder/ready")).status == 200


@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer wrong", "Bearer secre", "Basic secret", "secret", "Bearer \xe4"]
)
async def test_control_with_a_wrong_token(given: str) -> None:
    async with serving(control_token="secret") as server:
        for path in CONTROL:
            response = await server.request("POST", path, b"", {"Authorization": given} if given else {})
            assert (response.status, response.headers["www-authenticate"]) == (401, "Bearer")
            assert response.error.startswith("This API is restricted, expecting header")
        assert (await server.request("GET", "/v2/models/Adder/ready")).status == 200


async def test_control_with_the_right_token() -> None:
    right = {"Authorization": "bearer secret"}
    async with serving(control_token="secret") as server:
        index = await server.request("POST", CONTROL[0], b"", right)
        assert index.status == 200
        assert {"name": "Adder", "version": "", "state": "READY", "reason": ""} in index.json
        assert (await server.request("POST", CONTROL[2], {}, right)).status == 200
        assert (await server.infer("Adder", both())).status == 404
        states = {
            e["name"]: e["state"] for e in (await server.request("POST", CONTROL[0], {"ready": False}, right)).json
        }
        assert states["Adder"] == "UNAVAILABLE"
        assert states == {e["name"]: e["state"] for e in (await server.request("POST", CONTROL[0], NULLS, right)).json}
        ready = (await server.request("POST", CONTROL[0], {"ready": True}, right)).json
        assert {e["state"] for e in ready} == {"READY"}
        assert (await server.request("POST", CONTROL[1], b"null", right)).status == 200
        assert (await server.infer("Adder", both())).status == 200
        response = await server.request("POST", "/v2/repository/models/nope/load", b"", right)
        assert response.status == 404
        assert response.error.startswith("failed to load 'nope', failed to poll from model repository")
        dependents = {"parameters": {"unload_dependents": 1}}
        refused = await server.request("POST", CONTROL[2], dependents, right)
        assert "'unload_dependents': expected true or false, got 1" in refused.error
        assert (await server.infer("Adder", both())).status == 200
        assert (await server.request("POST", "/v2/repository/models/nope/unload", b"", right)).status == 200


@pytest.mark.parametrize("body", ["{", "[]", '{"ready": "yes"}', '{"parameters": {"a": {}}}', "[" * 100000])
async def test_control_with_an_invalid_body(body: str) -> None:
    async with serving(control_token="t") as server:
        for path in CONTROL:
            response = await server.request("POST", path, body, {"Authorization": "Bearer t"})
            assert response.status == 400
            assert response.error


@pytest.mark.parametrize("key", ["config", "file:1/model.onnx"])
async def test_load_parameters_with_files_are_rejected(key: str) -> None:
    async with serving(control_token="t") as server:
        body = {"parameters": {key: "{}"}}
        response = await server.request("POST", CONTROL[1], body, {"Authorization": "Bearer t"})
        assert response.status == 403
        assert response.error.startswith(f"failed to load 'Adder', parameter '{key}'")


class Batched(dragoman.Model):
    placement = "inline"
    inputs = outputs = (dragoman.TensorSpec("x", dragoman.INT32, (-1, 2)),)
    batched = True

    async def infer(self, call: dragoman.Infer) -> Any:
        return dict(call.inputs)


async def test_a_configuration_is_overridden_until_the_next_load() -> None:
    async with serving(Batched, allow_config_override=True, control_open=True) as server:
        path, config = "/v2/repository/models/Batched/load", "/v2/models/Batched/config"
        batching = '{"max_batch_size": "16", "dynamic_batching": {"max_queue_delay_microseconds": "2000"}}'
        assert (await server.request("POST", path, {"parameters": {"config": batching}})).status == 200
        shown = (await server.request("GET", config)).json
        assert shown["max_batch_size"] == 16
        assert shown["dynamic_batching"]["max_queue_delay_microseconds"] == 2000
        for bad, words in (
            ('{"max_batch_size": -1}', "max_batch_size"),
            ('{"backend": "python"}', "got backend"),
            ('{"name": "Other"}', "got name"),
            ('{"max_batch_size"}', "failed to poll from model repository"),
            (3, "expected a JSON string, got 3"),
            ("[]", "expected a JSON object, got '[]'"),
            ('{"instance_group": [{"count": -5}]}', "expected from 1 to 64 instances in all, got the counts -5"),
            ('{"instance_group": [{"count": 60}, {"count": 5}]}', "in all, got the counts 60, 5"),
            ('{"sequence_batching": {"oldest": {"max_candidate_sequences": -1}}}', "expected at least 0, got -1"),
        ):
            refused = await server.request("POST", path, {"parameters": {"config": bad}})
            assert refused.error.startswith("failed to load 'Batched'")
            assert words in refused.error
        assert (await server.request("GET", config)).json["max_batch_size"] == 16
        long_name = await server.request("POST", path, {"parameters": {"file:" + "A" * 256: "", "config": "{}"}})
        assert (long_name.status, "failed to poll from model repository" in long_name.error) == (500, True)
        assert (await server.request("POST", path)).status == 200
        assert (await server.request("GET", config)).json["max_batch_size"] == 0


def untyped(x, y=None):  # type: ignore[no-untyped-def]
    return x


async def test_metadata_names_inputs_of_unknown_datatype() -> None:
    async with serving(untyped) as server:
        metadata = (await server.request("GET", "/v2/models/untyped")).json
        assert (metadata["inputs"], metadata["details"]["untyped_inputs"]) == ([], ["x", "y"])
        response = await server.infer("untyped", inputs(tensor("z")))
        assert (response.status, "unexpected inference input 'z'" in response.error) == (400, True)


# --- names in paths --------------------------------------------------------------------------------------------


async def test_names_are_percent_decoded_once(server: RestServer) -> None:
    assert (await server.request("GET", "/v2/models/%41dder/ready")).status == 200
    assert (await server.request("GET", "/v2/models/%2541dder/ready")).status == 404
    assert (await server.request("GET", "/%762/health/live")).status == 404


@pytest.mark.parametrize("name", ["Adder%2Fready", "%2FAdder", "Adder%2F..%2FAdder", "Adder%3F"])
async def test_an_encoded_slash_is_part_of_the_name(server: RestServer, name: str) -> None:
    response = await server.request("GET", f"/v2/models/{name}")
    assert response.status == 404
    assert response.error.startswith("Request for unknown model: ")


async def test_a_query_is_ignored(server: RestServer) -> None:
    assert (await server.request("GET", "/v2/health/live?probe=1&x=%ff")).status == 200


async def test_shared_memory_is_rejected_by_name(server: RestServer) -> None:
    value = tensor("mine", parameters={"shared_memory_region": "r", "shared_memory_byte_size": 4})
    del value["data"]
    await check_rejected(server, inputs(value), "'mine'", "shared memory is disabled")


async def test_reserved_and_invalid_parameters(server: RestServer) -> None:
    for name in ("triton_x", "triton_enable_empty_final_response"):
        body = inputs(tensor(), parameters={name: True})
        await check_rejected(server, body, "'triton_' are reserved for Triton usage", f"'{name}")
    await check_rejected(server, inputs(tensor(), parameters={"headers": "x"}), "parameter 'headers' is reserved")
    assert (await server.infer("Identity", inputs(tensor(), parameters={"headers": None}))).status == 200
    for priority in ("x", -1, True, 1.5):
        await check_rejected(server, inputs(tensor(), parameters={"priority": priority}), "Unable to parse 'priority'")
    assert (await server.infer("Identity", inputs(tensor(), parameters={"priority": 2}))).status == 200


async def test_health_has_a_body_for_clients_that_parse_it(server: RestServer) -> None:
    for headers in ({"User-Agent": "python-httpx/0.28"}, {"Accept": "application/json"}):
        assert (await server.request("GET", "/v2/health/live", None, headers)).json == {"live": True}
        assert (await server.request("GET", "/v2/health/ready", None, headers)).json == {"ready": True}
    assert (await server.request("GET", "/v2/health/live", None, {"Accept": "*/*"})).body == b""


async def test_raw_bytes_need_one_element() -> None:
    class Many(dragoman.Model):
        placement = "inline"
        inputs = (dragoman.TensorSpec("t", dragoman.BYTES, (-1,)),)

        def infer(self, call: dragoman.Infer) -> Any:
            return dict(call.inputs)

    async with serving(Many) as server:
        response = await server.infer("Many", b"abc", {"Inference-Header-Content-Length": "0"})
        assert (response.status, response.error) == (
            400, "For BYTE datatype raw input 't', the model must have input shape [1], got [-1]",
        )  # fmt: skip


async def test_two_requests_on_one_connection_do_not_mix(server: RestServer) -> None:
    bodies = [request("POST", "/v2/models/Identity/infer", inputs(tensor(data=[i]), id=str(i))) for i in range(20)]
    responses = await server.send(b"".join(bodies), responses=20)
    assert [(a.json["id"], a.json["outputs"][0]["data"]) for a in responses] == [(str(i), [i]) for i in range(20)]
