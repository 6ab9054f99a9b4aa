"""LMI's endpoints for models of arrays: content types of DJL Serving and SageMaker."""

import io
import json
import math
import struct
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn import datasets
from sklearn.linear_model import LogisticRegression

import dragoman
from dragoman.core.calls import Embed, Embedded
from dragoman.core.datatypes import BYTES
from dragoman_text.apis.lmi.binary_arrays import from_ndlist, to_ndlist
from text_server import ReverseModel, TextServer, serve


def double(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return x * 2


def joined(a: NDArray[np.int64], b: NDArray[np.float64]) -> dict[str, Any]:
    return {"sum": a + b, "wide": np.stack([a, b], axis=-1)}


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
    async with serve(double, joined, Upper, placement="inline") as server:
        yield server


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npz(*, compressed: bool = False, **arrays: Any) -> bytes:
    file = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(file, **arrays)
    return file.getvalue()


def npz_bomb(size: int) -> bytes:
    """Return a `.npz` file that declares an array of `size` bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x.npy", npy(np.zeros(1)))
        archive.infolist()[0].file_size = size
    return file.getvalue()


def ndlist(*arrays: tuple[str, Any], version: int = 3, size: int = 0) -> bytes:
    """Encode arrays as DJL does; `size` replaces the sizes of the axes."""

    def text(value: str) -> bytes:
        return len(value.encode()).to_bytes(2, "big") + value.encode()

    parts = [struct.pack(">i", len(arrays))]
    for name, array in arrays:
        order = "<" if array.dtype.byteorder in "=|<" else ">"
        datatype = "BOOLEAN" if array.dtype == bool else array.dtype.name.upper()
        parts += [text("NDAR"), struct.pack(">i", version), b"\1" + text(name) if name else b"\0", text("DENSE")]
        parts += [text(datatype), struct.pack(">i", array.ndim), *((size or n).to_bytes(8, "big") for n in array.shape)]
        parts += [struct.pack(">i", array.ndim), b"\0N" * array.ndim, order.encode()]
        parts += [struct.pack(">i", array.nbytes), array.tobytes()]
    return b"".join(parts)


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
        ("", json.dumps(ROWS), DOUBLED),
        ("text/csv", "1.5,2\n3,4\n", DOUBLED),
        ("text/csv; charset=utf-8", "a,b\n1.5,2\n3,4", DOUBLED),
        ("text/csv", "1.5,\n", {"predictions": [[3.0, None]]}),
        ("application/x-npy", npy(np.array(ROWS)), DOUBLED),
        ("application/x-npy", npy(np.asfortranarray(np.array(ROWS, ">f4"))), DOUBLED),
        ("tensor/npz", npz(x=np.array(ROWS, np.float32)), DOUBLED),
        ("tensor/npz", npz(compressed=True, arr_0=np.array(ROWS, np.float16)), DOUBLED),
        ("tensor/ndlist", ndlist(("x", np.array(ROWS, np.float32))), DOUBLED),
        ("tensor/ndlist", ndlist(("", np.array(ROWS, ">f2"))), DOUBLED),
        ("tensor/ndlist", ndlist(("whatever", np.array(ROWS[0]))), {"predictions": [3.0, 4.0]}),
        ("tensor/ndlist", npz(arr_0=np.array(ROWS, np.float32)), DOUBLED),
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
    assert (await server.post(path, {"instances": [{"a": 1, "b": 10.5}, {"a": 2, "b": 20.5}]})).json == expected
    assert (await server.post(path, b"a,b\n1,10.5\n2,20.5\n", {"content-type": "text/csv"})).json == expected
    for kind, body in (
        ("tensor/npz", npz(**values)),
        ("tensor/ndlist", ndlist(*((name, np.array(values[name])) for name in "ba"))),
        ("tensor/ndlist", ndlist(*(("", np.array(values[name])) for name in "ab"))),
    ):
        response = await server.post(path, body, {"content-type": kind, "accept": "application/json"})
        assert response.json == expected
    table = await server.post(path, values, {"accept": "text/csv"})
    assert (table.headers["content-type"], table.body) == ("text/csv", b"11.5,1.0,10.5\n22.5,2.0,20.5\n")
    arrays = await server.post(path, values, {"accept": "application/x-npy"})
    assert arrays.headers["content-type"] == "tensor/npz"
    assert np.load(io.BytesIO(arrays.body))["wide"].tolist() == expected["predictions"]["wide"]


async def test_content_types_of_responses(server: TextServer) -> None:
    file = await server.post("/predictions/double", ROWS, {"accept": "image/png, application/x-npy;q=0.9"})
    assert file.headers["content-type"] == "application/x-npy"
    assert np.load(io.BytesIO(file.body)).tolist() == DOUBLED["predictions"]
    assert (await server.post("/predictions/double", ROWS, {"accept": "*/*"})).json == DOUBLED
    assert (await server.post("/predictions/double", [1, float("1e39")])).status == 424


async def test_responses_have_the_content_type_of_the_request(server: TextServer) -> None:
    rows = np.array([[1.5, 2.0]], np.float32)
    response = await server.post("/predictions/double", ndlist(("x", rows)), {"content-type": "tensor/ndlist"})
    assert response.headers["content-type"] == "tensor/ndlist"
    assert response.body == (
        b"\0\0\0\1" b"\0\4NDAR" b"\0\0\0\3" b"\1\0\x08output-0" b"\0\5DENSE" b"\0\7FLOAT32"
        b"\0\0\0\2" b"\0\0\0\0\0\0\0\1" b"\0\0\0\0\0\0\0\2" b"\0\0\0\2" b"\0?\0?"
        b"<" b"\0\0\0\x08" b"\0\0\x40\x40" b"\0\0\x80\x40"
    )  # fmt: skip
    for accept in ("*/*", "tensor/npz"):
        file = await server.post("/predictions/double", npz(x=rows), {"content-type": "tensor/npz", "accept": accept})
        assert file.headers["content-type"] == "tensor/npz"
        assert np.load(io.BytesIO(file.body))["output-0"].tolist() == [[3.0, 4.0]]
    texts = await server.post("/predictions/Upper", ["a"], {"accept": "tensor/ndlist"})
    assert (texts.status, "numbers and booleans" in texts.json["message"]) == (400, True)


@pytest.mark.parametrize("dtype", ["?", "u1", "i1", "<u2", ">i2", "<i4", ">u4", "<i8", ">u8", "<f2", ">f4", "<f8"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 1, 2), (2, 0)])
def test_ndlist_roundtrip(dtype: str, shape: tuple[int, ...]) -> None:
    array = (np.arange(math.prod(shape)) % 3).reshape(shape).astype(dtype)
    for data in (ndlist(("ä", array), ("", array)), to_ndlist({"ä": array, "": array})):
        arrays = from_ndlist(data)
        assert [name for name, _ in arrays] == ["ä", ""]
        for _, decoded in arrays:
            assert decoded.dtype == array.dtype.newbyteorder("=")
            assert np.array_equal(decoded, array)


def test_truncated_ndlists_are_rejected() -> None:
    encoded = ndlist(("x", np.zeros((2, 3), "<i4")))
    for size in range(len(encoded)):
        with pytest.raises(dragoman.errors.InvalidInput, match="tensor/ndlist"):
            from_ndlist(encoded[:size])


async def test_texts_and_bytes(server: TextServer) -> None:
    for kind, body in (("text/plain", b"ab"), ("application/octet-stream", b"ab"), ("application/json", b'["ab"]')):
        response = await server.post("/predictions/Upper", body, {"content-type": kind})
        assert response.json == {"predictions": ["AB"]}
    picture = await server.post("/predictions/Upper", b"\xff", {"content-type": "application/octet-stream"})
    assert (picture.status, "not UTF-8" in picture.json["message"]) == (400, True)
    stored = await server.post("/predictions/Upper", ["ab", "c"], {"accept": "application/x-npy"})
    assert np.load(io.BytesIO(stored.body)).tolist() == [b"AB", b"C"]


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
        ("double", "text/csv", b"1,2\n3\n", "row 2 has 1 values, the first 2"),
        ("double", "text/csv", b"\n\n", "there is no row"),
        ("double", "text/csv", b"\xff", "not valid UTF-8"),
        ("double", "text/plain", b"x", "input 'x'"),
        ("double", "application/x-npy", b"x", "not a .npy file"),
        ("double", "application/x-npy", npy(np.zeros(3))[:-1], "needs 24 bytes, got 23"),
        ("double", "application/x-npy", npy(np.array([{}])), "must hold numbers, booleans or strings; got object"),
        ("double", "tensor/npz", b"PK", "not a .npz file"),
        ("double", "tensor/npz", npz_bomb((1 << 28) + 1), "may hold 268435456 bytes together"),
        ("double", "tensor/ndlist", b"x", "expected 4 more bytes at 0, there are 1"),
        ("double", "tensor/ndlist", b"\0\0\0\0", "expected 1 to 1024 arrays, got 0"),
        ("double", "tensor/ndlist", b"\xff" * 9, "expected 1 to 1024 arrays, got -1"),
        ("double", "tensor/ndlist", ndlist(("", np.zeros(2, "<f4")))[:-1], "expected 8 more bytes at"),
        ("double", "tensor/ndlist", ndlist(("", np.zeros(2, "<f4"))) + b"x", "1 bytes are left behind the last of 1"),
        (
            "double",
            "tensor/ndlist",
            ndlist(("", np.zeros(2, "<f4")), version=2),
            "NDAR and version 3; got 'NDAR' and 2",
        ),
        ("double", "tensor/ndlist", ndlist(("", np.zeros(2, "<c8"))), "got 'COMPLEX64'"),
        ("double", "tensor/ndlist", ndlist(("", np.zeros(2, "<f4")), size=1 << 61), "needs 9223372036854775808 bytes"),
        ("double", "tensor/ndlist", ndlist(("", np.zeros(2)), ("", np.zeros(2))), "takes 'x'; got 2 arrays"),
        ("joined", "tensor/ndlist", ndlist(("", np.zeros(2))), "model 'joined' takes 'a', 'b'"),
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
    assert "expected one of Upper, double, joined" in several.json["message"]
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
        for body, kind in (
            (json.dumps({"inputs": rows[::30].tolist()}).encode(), "application/json"),
            ("\n".join(",".join(map(str, row)) for row in rows[::30]).encode(), "text/csv"),
            (npy(rows[::30]), "application/x-npy"),
        ):
            response = await server.post("/invocations", body, {"content-type": kind})
            assert response.json == {"predictions": classifier.predict(rows[::30]).tolist()}
        one = await server.post("/invocations", {"inputs": rows[70].tolist()})  # a row without its axis
        assert one.json == {"predictions": classifier.predict(rows[70:71]).tolist()}
