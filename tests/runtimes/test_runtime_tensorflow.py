"""Signatures of SavedModels return what TensorFlow returns when it is called directly."""

import os
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
from dragoman.runtimes.tensorflow import TensorFlowModel

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
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
