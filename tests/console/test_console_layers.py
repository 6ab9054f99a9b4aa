"""The layers of ONNX models: what is read of a file, its limits, hostile files, and the route."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from access.access_models import KeyFile, bearer
from access.conftest import keys as keys
from dragoman.runtimes.onnx import layers
from dragoman.runtimes.onnx.layers import read_layers
from rest.rest_server import serving

onnx = pytest.importorskip("onnx")
helper = onnx.helper
SECRET = 0.123456789


def write(path: Path, nodes: list[Any], weights: list[Any] | None = None) -> Path:
    """Write a model from X [n, 3] to Y."""
    info = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 3]) for name in ("X", "Y")]
    graph = helper.make_graph(nodes, "main", info[:1], info[1:], weights or [])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], producer_name="tests", ir_version=8)
    onnx.save(model, path)
    return path


def branch(name: str, op: str) -> Any:
    out = helper.make_tensor_value_info(f"{name}_out", onnx.TensorProto.FLOAT, ["n", 3])
    return helper.make_graph([helper.make_node(op, ["h"], [f"{name}_out"])], name, [], [out])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    scale = onnx.numpy_helper.from_array(np.full((3,), SECRET, np.float32), "scale")
    yes = onnx.numpy_helper.from_array(np.array(True), "yes")
    nodes = [
        helper.make_node("Mul", ["X", "scale"], ["h"], name="first"),
        helper.make_node("Clip", ["h"], ["clipped"]),
        helper.make_node("Transpose", ["clipped"], ["turned"], perm=[1, 0]),
        helper.make_node("LeakyRelu", ["turned"], ["unused"], alpha=0.25),
        helper.make_node("Constant", [], ["c"], value_floats=[SECRET] * 3),
        helper.make_node("If", ["yes"], ["Y"], then_branch=branch("then", "Relu"), else_branch=branch("else", "Neg")),
    ]
    return write(tmp_path / "model.onnx", nodes, [scale, yes])


def test_nodes_attributes_shapes_and_nested_graphs(path: Path) -> None:
    found = read_layers(path)
    assert (found["producer"], found["opsets"], found["is_complete"]) == ("tests", {"": 17}, True)
    assert [node["op"] for node in found["nodes"]] == ["Mul", "Clip", "Transpose", "LeakyRelu", "Constant", "If"]
    assert found["nodes"][0]["inputs"] == ["X", "scale"]
    assert found["nodes"][2]["attributes"] == {"perm": [1, 0]}
    assert found["nodes"][3]["attributes"] == {"alpha": 0.25}
    assert found["nodes"][5]["attributes"]["then_branch"] == {"graph": "then", "operators": {"Relu": 1}}
    assert found["tensors"]["X"] == ("FP32", ["n", 3])
    assert found["weights"]["scale"] == ("FP32", [3])
    assert (found["inputs"], found["outputs"]) == (["X"], ["Y"])


def test_values_of_weights_are_not_shown(path: Path) -> None:
    found = read_layers(path)
    assert "0.1234" not in json.dumps(found)
    assert found["nodes"][4]["attributes"] == {"value_floats": "3 values"}


def test_a_large_graph_ends_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["X", *(f"h{i}" for i in range(99)), "Y"]
    nodes = [helper.make_node("Relu", [names[i]], [names[i + 1]]) for i in range(100)]
    path = write(tmp_path / "deep.onnx", nodes)
    assert len(read_layers(path)["nodes"]) == 100
    for limit, value in (("_MAX_NODES", 40), ("_MAX_FIELDS", 300), ("_MAX_TEXTS", 400)):
        with monkeypatch.context() as patch:
            patch.setattr(layers, limit, value)
            found = read_layers(path)
            assert found["is_complete"] is False, limit
            assert 20 < len(found["nodes"]) < 100, limit


def test_deep_nesting_ends_at_the_limit(tmp_path: Path) -> None:
    inner = branch("b", "Relu")
    for i in range(30):
        out = helper.make_tensor_value_info(f"o{i}", onnx.TensorProto.FLOAT, ["n", 3])
        node = helper.make_node("If", ["yes"], [f"o{i}"], then_branch=inner, else_branch=branch("e", "Neg"))
        inner = helper.make_graph([node], "b", [], [out])
    path = write(tmp_path / "nested.onnx", [helper.make_node("If", ["X"], ["Y"], then_branch=inner)])
    with pytest.raises(ValueError, match="ONNX"):  # of which nothing could be read
        read_layers(path)


def test_damaged_files_are_rejected_or_read_in_part(path: Path) -> None:
    """Whatever a file holds, it raises ValueError or yields JSON."""
    draw, whole = random.Random(7), path.read_bytes()
    for _ in range(1500):
        data = bytearray(whole)
        for _ in range(draw.randrange(1, 6)):
            data[draw.randrange(len(data))] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        path.write_bytes(data[: draw.randrange(len(data))] if draw.random() < 0.3 else data)
        try:
            found = read_layers(path)
        except ValueError:
            continue
        json.dumps(found, allow_nan=False)
    path.write_bytes(b"\xff" * 100_000)
    with pytest.raises(ValueError, match="number"):
        read_layers(path)


async def test_the_route_needs_the_role_and_the_model(keys: KeyFile, path: Path) -> None:
    keys.add("caller", ["infer"])
    keys.add("reader", ["read"])
    keys.add("other", ["read"], ["another"])
    async with serving(str(path), api_keys=str(keys.path)) as server:
        url = "/console/models/model/layers"
        assert (await server.request("GET", url)).status == 401
        for name in ("caller", "other"):
            assert (await server.request("GET", url, None, bearer(keys.keys[name]))).status == 403
        found = await server.request("GET", url, None, bearer(keys.keys["reader"]))
        assert [node["op"] for node in found.json["nodes"]][-1] == "If"
        missing = await server.request("GET", "/console/models/none/layers", None, bearer(keys.keys["reader"]))
        assert missing.status == 404
        path.write_bytes(b"now something else")
        changed = await server.request("GET", url, None, bearer(keys.keys["reader"]))
        assert (changed.status, str(path) in changed.body.decode()) == (404, False)
