"""OpenVINO networks: names, datatypes, shapes and results; an IR file needs its weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dragoman.core.calls import Infer
from dragoman.core.datatypes import BF16, FP16, FP32, INT64, Datatype
from dragoman.core.errors import ModelFailed
from dragoman.core.signature import TensorSpec
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor
from dragoman.plugins import runtime
from dragoman.runtimes.files import preflight_check
from dragoman.runtimes.openvino import OpenVinoModel
from dragoman.runtimes.recognise import recognise, refusal

openvino = pytest.importorskip("openvino")
ops = openvino.opset13


def write(path: Path, kind: str = "f32", shape: Any = (-1, 3), matrix: Any = None) -> Path:
    """Write a network whose output `y` is its input `x`, multiplied by a matrix if there is one."""
    x = ops.parameter(openvino.PartialShape(list(shape)), getattr(openvino.Type, kind), name="x")
    x.output(0).set_names({"x"})
    y = ops.add(x, x) if matrix is None else ops.matmul(x, ops.constant(matrix), False, False)
    y.output(0).set_names({"y"})
    openvino.save_model(openvino.Model([y], [x], "m"), path, compress_to_fp16=False)
    return path


def load(path: Path, **parameters: Any) -> OpenVinoModel:
    model = OpenVinoModel(ModelSpec(name="m", uri=str(path), parameters=parameters))
    model.load()
    return model


def test_a_network(tmp_path: Path) -> None:
    matrix = np.random.default_rng(1).random((3, 2)).astype(np.float32)
    path = write(tmp_path / "m.xml", matrix=matrix)
    assert recognise(path) == "openvino"
    model = load(path)
    assert model.platform == "openvino_ir"
    signature = model.signature()
    assert signature.inputs == (TensorSpec("x", FP32, (-1, 3)),)
    assert signature.outputs == (TensorSpec("y", FP32, (-1, 2)),)
    assert signature.batched
    for rows in (4, 1, 0):
        x = np.random.default_rng(rows).random((rows, 3)).astype(np.float32)
        x.flags.writeable = False
        y = model.infer(Infer({"x": Tensor.of(x)}))["y"]
        assert isinstance(y, np.ndarray)
        np.testing.assert_allclose(y, x @ matrix, rtol=1e-6)  # in FP32, not in bfloat16


@pytest.mark.parametrize(("kind", "datatype"), [("f16", FP16), ("i64", INT64), ("bf16", BF16)])
def test_datatypes(tmp_path: Path, kind: str, datatype: Datatype) -> None:
    model = load(write(tmp_path / "m.xml", kind, (2,)))
    assert model.signature().inputs == (TensorSpec("x", datatype, (2,)),)
    assert not model.signature().batched
    x = Tensor(np.array([1.0, 2.5] if datatype is not INT64 else [1, 2]).astype(datatype.dtype), datatype)
    y = model.infer(Infer({"x": x}))["y"]
    data = y.data if isinstance(y, Tensor) else y
    assert data.dtype == datatype.dtype
    assert data.astype(float).tolist() == (2 * x.data.astype(float)).tolist()


def test_strings(tmp_path: Path) -> None:
    x = ops.parameter([-1], openvino.Type.string, name="x")
    x.output(0).set_names({"x"})
    result = ops.result(x)
    result.output(0).set_names({"y"})
    openvino.save_model(openvino.Model([result], [x], "m"), tmp_path / "m.xml")
    with pytest.raises(ModelFailed, match="has type string, which is not supported"):
        load(tmp_path / "m.xml")


def test_faults(tmp_path: Path) -> None:
    path = write(tmp_path / "m.xml")
    with pytest.raises(ModelFailed, match=r"parameter 'device': expected one of CPU.*, got 'NPU9'"):
        load(path, device="NPU9")
    with pytest.raises(ModelFailed, match="parameter 'config': expected a table"):
        load(path, config=3)
    path.with_suffix(".bin").unlink()
    assert recognise(path) is None
    assert "its weights in the .bin file of the same name" in refusal(path)
    with pytest.raises(ModelFailed, match=r"'m\.bin' not found: expected the weights beside 'm\.xml'"):
        preflight_check(ModelSpec(name="m", runtime="openvino", uri=str(path)))
    (tmp_path / "pom.xml").write_text("<project/>")
    assert recognise(tmp_path / "pom.xml") is None
    (tmp_path / "bad.xml").write_text('<?xml version="1.0"?>\n<net name="m" version="11"><layers>')
    (tmp_path / "bad.bin").write_bytes(b"")
    assert recognise(tmp_path / "bad.xml") == "openvino"
    with pytest.raises(ModelFailed, match=r"'bad\.xml' cannot be loaded by OpenVINO"):
        load(tmp_path / "bad.xml")
    assert runtime("openvino").extra == "openvino"
