"""LMI's endpoints for models of arrays: content types of DJL Serving and SageMaker."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import joblib
import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn import datasets
from sklearn.linear_model import LogisticRegression

import dragoman
from dragoman.core.calls import Embed, Embedded
from dragoman.core.datatypes import BYTES
from text_server import ReverseModel, TextServer, serve


def double(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return x * 2


def joined(a: NDArray[np.int64], b: NDArray[np.float64]) -> dict[str, Any]:
    return {"sum": a + b, "wide": np.stack([a, b], axis=-1)}


def squares(x: Annotated[NDArray[np.int64], dragoman.Shape(-1, 2, 2)]) -> NDArray[np.int64]:
    return x


class Flowers(dragoman.Model):
    """Has names of columns."""

    placement = "inline"

    def signature(self) -> dragoman.Signature:
        spec = dragoman.TensorSpec("x", dragoman.FP64, (-1, 2), columns=("length", "width"))
        return dragoman.Signature((spec,), (dragoman.TensorSpec("y", dragoman.FP64, (-1,)),))

    def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        return {"y": np.asarray(call.inputs["x"].data) @ [10.0, 1.0]}


class Upper(dragoman.Model):
    """Convert texts to upper case."""

    placement = "inline"

    def signature(self) -> dragoman.Signature:
        spec = dragoman.TensorSpec("text", BYTES, (-1,))
        return dragoman.Signature((spec,), (spec,))

    def infer(self, call: dragoman.Infer) -> dragoman.Inference:
        texts = call.inputs["text"].data
        return dragoman.Inference({"text": dragoman.Tensor.of(np.array([t.upper() for t in texts], dtype=object))})


@pytest.fixture
async def server() -> AsyncIterator[TextServer]:
    async with serve(double, joined, Upper, Flowers, squares, placement="inline") as server:
        yield server


ROWS = [[1.5, 2.0], [3.0, 4.0]]
DOUBLED = {"predictions": [[3.0, 4.0], [6.0, 8.0]]}


@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        ("application/json", json.dumps({"inputs": ROWS}), DOUBLED),
        ("application/json", json.dumps({"instances": ROWS}), DOUBLED),
        ("application/json", json.dumps({"data": ROWS}), DOUBLED),
        ("application/json", json.dumps(ROWS), DOUBLED),
        ("application/json", json.dumps({"x": ROWS}), DOUBLED),
        ("application/json", json.dumps({"inputs": {"x": ROWS}, "parameters": {"a": 1}}), DOUBLED),
        (
            "application/json",
            json.dumps({"instances": [{"x": [1, 2]}, {"x": [3, 4]}]}),
            {"predictions": [[2, 4], [6, 8]]},
        ),
        ("application/json", json.dumps([{"x": [1, 2]}, {"x": [3, 4]}]), {"predictions": [[2, 4], [6, 8]]}),
        ("", json.dumps(ROWS), DOUBLED),
    ],
)
async def test_content_types_of_requests(server: TextServer, kind: str, body: Any, expected: Any) -> None:
    data = body if isinstance(body, bytes) else body.encode()
    headers = {"accept": "application/json", **({"content-type": kind} if kind else {})}
    for path in ("/predictions/double", "/invocations?model_name=double", "/models/double/invoke"):
        response = await server.post(path, data, headers)
        assert (response.status, response.json) == (200, expected)


async def test_several_inputs_and_outputs(server: TextServer) -> None:
    expected = {"predictions": {"sum": [11.5, 22.5], "wide": [[1.0, 10.5], [2.0, 20.5]]}}
    values: dict[str, Any] = {"a": [1, 2], "b": [10.5, 20.5]}
    path = "/predictions/joined"
    assert (await server.post(path, {"inputs": values})).json == expected
    assert (await server.post(path, values)).json == expected
    rows = [{"a": 1, "b": 10.5}, {"a": 2, "b": 20.5}]
    assert (await server.post(path, {"instances": rows})).json == expected
    assert (await server.post(path, rows)).json == expected


async def test_responses_are_json(server: TextServer) -> None:
    for accept in ("*/*", "application/json, text/csv", "tensor/npz"):
        assert (await server.post("/predictions/double", ROWS, {"accept": accept})).json == DOUBLED
    response = await server.post("/predictions/double", [1, float("1e39")])
    assert (response.status, "1e+39 does not fit" in str(response.json)) == (424, True)


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("double", b"1.5,2\n3,4\n", DOUBLED),
        ("double", b"\xef\xbb\xbf1.5,2\r\n3,4", DOUBLED),
        ("double", b"left,right\n1.5,2\n3,4\n", DOUBLED),
        ("double", b"x\n1.5\n3\n", {"predictions": [3.0, 6.0]}),
        ("joined", b"1,10.5\n2,20.5\n", {"predictions": {"sum": [11.5, 22.5], "wide": [[1.0, 10.5], [2.0, 20.5]]}}),
        ("joined", b"b,a\n10.5,1\n", {"predictions": {"sum": [11.5], "wide": [[1.0, 10.5]]}}),
        ("Flowers", b"1,2\n", {"predictions": [12.0]}),
        ("Flowers", b"width,length\n2,1\n", {"predictions": [12.0]}),
        ("Flowers", b"4;5\n", {"predictions": [45.0]}),
        ("squares", b"1,2,3,4\n5,6,7,8\n", {"predictions": [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]}),
        ("Upper", b'"a,b"\nc d\n', {"predictions": ["A,B", "C D"]}),
    ],
)
async def test_csv(server: TextServer, path: str, body: bytes, expected: Any) -> None:
    for start in ("/predictions/{}", "/invocations?model_name={}"):
        response = await server.post(start.format(path), body, {"content-type": "text/csv; charset=utf-8"})
        assert (response.status, response.json) == (200, expected)


async def test_responses_in_csv(server: TextServer) -> None:
    csv = {"content-type": "text/csv", "accept": "text/csv"}
    for path, body, expected in (
        ("double", b"1.5,2\n0.1,4\n", b"3.0,4.0\n0.2,8.0\n"),
        ("joined", b"1,10.5\n2,20.5\n", b"11.5,1.0,10.5\n22.5,2.0,20.5\n"),
        ("Upper", b'"a,b"\nc d\n', b'"A,B"\nC D\n'),
        ("double", b"nan,inf\n", b"nan,inf\n"),
    ):
        response = await server.post(f"/predictions/{path}", body, csv)
        assert (response.status, response.body) == (200, expected)
        assert response.headers["content-type"] == "text/csv"
    response = await server.post("/predictions/double", ROWS, {"accept": "text/csv, */*"})
    assert response.body == b"3.0,4.0\n6.0,8.0\n"


async def test_texts_and_bytes(server: TextServer) -> None:
    for kind, body in (("text/plain", b"ab"), ("application/octet-stream", b"ab"), ("application/json", b'["ab"]')):
        response = await server.post("/predictions/Upper", body, {"content-type": kind})
        assert response.json == {"predictions": ["AB"]}
    ending = await server.post("/predictions/Upper", b"a\0", {"content-type": "application/octet-stream"})
    assert json.loads(ending.body)["predictions"] == ["A\0"]
    picture = await server.post("/predictions/Upper", b"\xff", {"content-type": "application/octet-stream"})
    assert (picture.status, "not UTF-8" in picture.json["message"]) == (400, True)


@pytest.mark.parametrize(
    ("path", "kind", "body", "message"),
    [
        ("double", "application/json", b"", "the request body is empty"),
        ("double", "application/json", b"[1", "not valid JSON"),
        ("double", "application/json", b"[" * 99 + b"]" * 99, "nests too deep"),
        ("double", "application/json", b'{"y": 1}', "expected an object with 'inputs', or with 'x'; got"),
        ("double", "application/json", b'{"inputs": [[1], [2, 3]]}', "input 'x': "),
        ("double", "application/json", b'["a"]', "input 'x'"),
        ("double", "application/json", b'{"inputs": {"y": 1}}', "'y'"),
        ("double", "application/json", b'{"inputs": [1], "parameters": {"a": {}}}', "parameter 'a' must be"),
        ("double", "application/json", b'{"instances": [{"x": 1}, {"z": 1}]}', "all have the same names"),
        (
            "double",
            "application/json",
            b'{"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]}',
            "Open Inference tensors are accepted at /v2/models/double/infer",
        ),
        ("joined", "application/json", b"[1]", "model 'joined' takes 'a', 'b'; expected 'inputs' to be an object"),
        ("joined", "application/json", b'{"a": [1.5], "b": [1]}', "input 'a': 1.5 does not fit into INT64"),
        ("double", "text/plain", b"x", "input 'x'"),
        ("double", "text/csv", b"1,2\n3,x\n", "the table, line 2, column 2: expected FP32, got 'x'"),
        ("double", "text/csv", b"1,2\n3\n", "the table, line 2: expected 2 columns as in line 1, got 1"),
        ("double", "text/csv", b"\xff", "not valid UTF-8"),
        ("double", "text/csv", b"\n", "the table has no rows"),
        ("double", "text/csv", b",\n" * (1 << 19), "too many cells in text/csv"),
        ("joined", "text/csv", b"a,b\n1,2\n1.5,2\n", "the table, line 3, column 'a': expected INT64, got 1.5"),
        ("joined", "text/csv", b"a,b\n1,2\n,2\n", "the table, line 3, column 'a': no value; expected INT64"),
        ("joined", "text/csv", b"a\n1\n", "expected the columns 'a', 'b': the table has no 'b'"),
        ("joined", "text/csv", b"a,b,c\n1,2,3\n", "expected the columns 'a', 'b': the model has no 'c'"),
        ("joined", "text/csv", b"1,2,3\n", "expected the columns 'a', 'b', got 3 without names"),
        ("Flowers", "text/csv", b"width,size\n1,2\n", "the table has no 'length'; the model has no 'size'"),
        ("Flowers", "text/csv", b"1,2,3\n", "input 'x'"),
        ("double", "", b"\xff\xd8\xff", "not valid JSON: expected text in UTF-8, got the byte 0xff at offset 0"),
        *(
            ("double", kind, b"\xff\xd8", f"content type '{kind}' is not supported for arrays: expected")
            for kind in ("image/jpeg", "audio/wav", "video/mp4", "multipart/form-data")
        ),
        ("double", "tensor/ndlist", b"x", "binary tensors are accepted at /v2/models/double/infer"),
        ("double", "application/octet-stream", b"x", "'x'"),
    ],
)
async def test_invalid_arrays_are_rejected(server: TextServer, path: str, kind: str, body: bytes, message: str) -> None:
    response = await server.post(f"/predictions/{path}", body, {"content-type": kind})
    result = response.json
    assert response.status in (400, 424)
    assert result["code"] == response.status
    assert message in result.get("error", result.get("message"))


class Vectors(dragoman.Model):
    """Embed each text as its length and 1."""

    placement = "inline"

    def embed(self, call: Embed) -> Embedded:
        if "long" in call.inputs:
            raise dragoman.errors.InvalidInput("input 0 has 99 tokens; the model takes 1 to 9")
        vectors = [[float(len(text)), 1.0] for text in call.inputs]
        return Embedded(dragoman.Tensor.of(np.array(vectors, np.float32)), len(vectors))

    def infer(self, call: dragoman.Infer) -> dragoman.Inference:
        return dragoman.Inference(dict(call.inputs))


async def test_embeddings() -> None:
    async with serve(Vectors) as server:
        for kind in ("", "application/json", "application/x-www-form-urlencoded"):
            one = await server.post("/invocations", {"inputs": "abc"}, {"content-type": kind} if kind else {})
            assert (one.status, one.headers["content-type"], one.json) == (200, "application/json", [3.0, 1.0])
        several = await server.post("/predictions/Vectors", {"inputs": ["abc", "é"], "parameters": {"x": 1}})
        assert (several.json, several.headers["x-ignored-parameters"]) == ([[3.0, 1.0], [1.0, 1.0]], "parameters")
        for body, message in (
            ({"inputs": ""}, "none empty"),
            ({"inputs": ["a"] * 2049}, "at most 2048 strings"),
            ({"inputs": "long"}, "the model takes 1 to 9"),
            (b"{", "not valid JSON"),
        ):
            response = await server.post("/invocations", body)
            assert (response.status, response.json["code"], response.json["type"]) == (400, 400, "TranslateException")
            assert message in response.json["message"]
        assert (await server.post("/invocations", {"inputs": [[1.0]]})).json == {"predictions": [[1.0]]}


async def test_model_selection_without_a_name(server: TextServer) -> None:
    several = await server.post("/invocations", ROWS)
    assert several.status == 400
    assert "expected one of Flowers, Upper, double, joined, squares" in several.json["message"]
    async with serve(double, placement="inline") as only:
        assert (await only.post("/invocations", ROWS)).json == DOUBLED
    async with serve(double, ReverseModel, placement="inline") as both:
        assert (await both.post("/invocations", {"inputs": "a b"})).json == {"generated_text": "b a"}
    async with serve(double, ReverseModel, placement="inline", default_model="double") as chosen:
        assert (await chosen.post("/invocations", ROWS)).json == DOUBLED


async def test_a_scikit_learn_classifier(tmp_path: Path) -> None:
    rows, kinds = datasets.load_iris(return_X_y=True)
    classifier = LogisticRegression(max_iter=300).fit(rows, kinds)
    joblib.dump(classifier, tmp_path / "iris.joblib")
    async with serve(str(tmp_path / "iris.joblib"), allow_pickle=True, placement="inline") as server:
        for body, kind in ((json.dumps({"inputs": rows[::30].tolist()}).encode(), "application/json"),):
            response = await server.post("/invocations", body, {"content-type": kind})
            assert response.json == {"predictions": classifier.predict(rows[::30]).tolist()}
        one = await server.post("/invocations", {"inputs": rows[70].tolist()})  # a row without its axis
        assert one.json == {"predictions": classifier.predict(rows[70:71]).tolist()}
