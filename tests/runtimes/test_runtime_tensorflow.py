"""Signatures of SavedModels return what TensorFlow returns when it is called directly."""

import importlib
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dragoman.core.calls import Infer
from dragoman.core.datatypes import BF16, BYTES, FP32
from dragoman.core.errors import ModelFailed
from dragoman.core.signature import TensorSpec
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor
from dragoman.runtimes.recognise import recognise, refusal
from dragoman.runtimes.tensorflow import TensorFlowModel

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
tf: Any = None


@pytest.fixture(scope="module", autouse=True)
def _import_tensorflow() -> None:
    """Import it when a test runs: collection in another process of pytest-xdist does not need it."""
    global tf
    tf = pytest.importorskip("tensorflow")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    module = tf.Module()
    module.weights = tf.Variable(np.arange(12, dtype=np.float32).reshape(4, 3))

    def serve(x: Any, text: Any) -> Any:
        return {"y": x @ module.weights, "upper": tf.strings.upper(text)}

    def double(x: Any) -> Any:
        return {"y": x * 2}

    path = tmp_path_factory.mktemp("tf") / "saved_model"
    rows = tf.TensorSpec([None, 4], tf.float32, name="x")
    text = tf.TensorSpec([None], tf.string, name="text")
    module.serve = tf.function(serve, input_signature=[rows, text])
    module.double = tf.function(double, input_signature=[tf.TensorSpec([2], tf.bfloat16, name="x")])
    tf.saved_model.save(module, str(path), signatures={"serving_default": module.serve, "double": module.double})
    return path


def _load(path: Path, **parameters: Any) -> TensorFlowModel:
    model = TensorFlowModel(ModelSpec(name="m", uri=str(path), parameters=parameters))
    model.load()
    return model


def _reject(path: Path, kind: str) -> None:
    """Change a SavedModel so that `tf.saved_model.load` rejects it."""
    messages: Any = importlib.import_module("tensorflow.core.protobuf.saved_model_pb2")
    saved = messages.SavedModel.FromString((path / "saved_model.pb").read_bytes())
    graph = saved.meta_graphs[0]
    if kind == "slots":  # as Keras 2 wrote those of its optimizers
        slot = {"original_variable_node_id": 1, "slot_name": "m", "slot_variable_node_id": 1}
        graph.object_graph_def.nodes[0].slot_variables.add(**slot)
    elif kind == "graphs":
        other = saved.meta_graphs.add()
        other.CopyFrom(graph)
        other.meta_info_def.tags.append("gpu")
        saved.meta_graphs.reverse()
    else:
        graph.ClearField("graph_def")
        graph.ClearField("object_graph_def")
    (path / "saved_model.pb").write_bytes(saved.SerializeToString())


@pytest.mark.parametrize("kind", ["slots", "graphs"])
def test_a_saved_model_that_one_loader_rejects_is_loaded_by_the_other(saved: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model"
    shutil.copytree(saved, path)
    _reject(path, kind)
    with pytest.raises((AttributeError, ValueError, RuntimeError)):
        tf.saved_model.load(str(path))
    model = _load(path)
    specs = [
        {spec.name: spec for spec in (*each.inputs, *each.outputs)}
        for each in (model.signature(), _load(saved).signature())
    ]
    assert specs[0] == specs[1]
    rows = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
    rows.flags.writeable = False
    inputs = {"text": Tensor.of(np.array([b"a", b"\xffb"], dtype=object)), "x": Tensor.of(rows)}
    result, expected = model.infer(Infer(inputs)), _load(saved).infer(Infer(inputs))
    np.testing.assert_array_equal(result["y"], expected["y"])
    assert result["upper"].tolist() == [b"A", b"\xffB"]
    assert list(model.infer(Infer(inputs, ("y",)))) == ["y"]
    assert _load(path, signature_name="double").infer(Infer({"x": Tensor.of([1, 2], BF16)}))["y"].tolist() == [2, 4]
    with pytest.raises(ModelFailed, match="has no signature 'other', but "):
        _load(path, signature_name="other")


def test_a_saved_model_that_both_loaders_reject_has_both_reasons(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(saved, path)
    _reject(path, "empty")
    with pytest.raises(ModelFailed, match=r"'model' cannot be loaded: \w+: .*; as by TensorFlow 1: \w+: "):
        _load(path)


def test_serving_default(saved: Path) -> None:
    model = _load(saved)
    assert model.platform == "tensorflow_savedmodel"
    signature = model.signature()
    assert {spec.name: spec for spec in signature.inputs} == {
        "x": TensorSpec("x", FP32, (-1, 4)),
        "text": TensorSpec("text", BYTES, (-1,)),
    }
    assert {spec.name: spec for spec in signature.outputs} == {
        "y": TensorSpec("y", FP32, (-1, 3)),
        "upper": TensorSpec("upper", BYTES, (-1,)),
    }
    assert signature.batched
    rows = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
    rows.flags.writeable = False
    inputs = {"x": Tensor.of(rows), "text": Tensor.of(np.array([b"a", b"\xffb"], dtype=object))}
    result = model.infer(Infer(inputs))
    assert isinstance(result, dict)
    direct = tf.saved_model.load(str(saved)).signatures["serving_default"](
        x=tf.constant(rows), text=tf.constant([b"a", b"\xffb"])
    )
    np.testing.assert_array_equal(result["y"], direct["y"].numpy())
    assert Tensor.of(result["upper"]).data.tolist() == [b"A", b"\xffB"]
    assert list(model.infer(Infer(inputs, ("y",)))) == ["y"]


def test_another_signature_in_bfloat16(saved: Path) -> None:
    model = _load(saved, signature_name="double")
    assert model.signature().inputs == (TensorSpec("x", BF16, (2,)),)
    assert not model.signature().batched
    result = model.infer(Infer({"x": Tensor.of([1.0, -2.5], BF16)}))
    assert isinstance(result, dict)
    output = Tensor.of(result["y"])
    assert output.datatype is BF16
    assert output.data.tolist() == [2.0, -5.0]


def test_invalid_models_are_rejected(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFailed, match=r"no signature .none., but .*serving_default"):
        _load(saved, signature_name="none")
    with pytest.raises(ModelFailed, match=r"saved_model\.pb"):
        _load(tmp_path)


# --- frozen graphs ---------------------------------------------------------------------------------------


def _frozen(path: Path) -> Path:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, 2], name="x")
        total = tf.reduce_sum(x, axis=1, keepdims=True, name="total")
        tf.multiply(total, 2.0, name="doubled")
        tf.identity(x, name="copy")
    path.write_bytes(graph.as_graph_def().SerializeToString())
    return path


def _load_frozen(path: Path, **parameters: Any) -> TensorFlowModel:
    model = TensorFlowModel(ModelSpec(name="m", uri=str(path), parameters=parameters))
    model.load()
    return model


def test_a_frozen_graph(tmp_path: Path) -> None:
    path = _frozen(tmp_path / "m.pb")
    assert recognise(path) == "tensorflow"
    model = _load_frozen(path)
    assert model.platform == "tensorflow_graphdef"
    assert model.signature().inputs == (TensorSpec("x", FP32, (-1, 2)),)
    assert model.signature().outputs == (TensorSpec("doubled", FP32, (-1, 1)), TensorSpec("copy", FP32, (-1, 2)))
    call = Infer({"x": Tensor.of(np.array([[1, 2], [3, 4]], np.float32))}, ("doubled",))
    assert {name: array.tolist() for name, array in model.infer(call).items()} == {"doubled": [[6.0], [14.0]]}
    inner = _load_frozen(path, outputs=["total"])
    assert {name: array.tolist() for name, array in inner.infer(Infer(call.inputs)).items()} == {
        "total": [[3.0], [7.0]]
    }


def test_faults_of_frozen_graphs(tmp_path: Path) -> None:
    path = _frozen(tmp_path / "m.graphdef")
    with pytest.raises(ModelFailed, match=r"'m\.graphdef' cannot be loaded as a frozen graph: .*nowhere"):
        _load_frozen(path, outputs=["nowhere"])
    with pytest.raises(ModelFailed, match="parameter 'outputs': expected a list of names"):
        _load_frozen(path, outputs="total")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ModelFailed, match="cannot be loaded as a frozen graph"):
        _load_frozen(path)
    for name, content in (("saved_model.pb", b"\x08\x01\x12"), ("net.pb", b"\x0a\x03net"), ("empty.pb", b"")):
        (tmp_path / name).write_bytes(content)
        assert recognise(tmp_path / name) is None, name
    assert "a saved_model.pb is served as its folder" in refusal(tmp_path / "saved_model.pb")
