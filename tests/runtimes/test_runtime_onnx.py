"""ONNX graphs: names, datatypes and shapes of the graph, results of ONNX Runtime."""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from skl2onnx import to_onnx
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression

from dragoman.core.calls import Infer
from dragoman.core.datatypes import BF16, BYTES, FP16, FP32, INT64
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.signature import TensorSpec
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor
from dragoman.runtimes.onnx.graph import without_zip_maps
from dragoman.runtimes.onnx.model import OnnxModel
from dragoman.runtimes.recognise import recognise
from dragoman.system.cpus import cores


def _load(path: Path) -> OnnxModel:
    model = OnnxModel(ModelSpec(name="m", uri=str(path)))
    model.load()
    return model


def _graph(path: Path, kind: int, dims: list[Any] | None, out_dims: list[Any] | None = None) -> OnnxModel:
    """Load a graph of one Identity from `x` to `y`."""
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", kind, dims)],
        [helper.make_tensor_value_info("y", kind, dims if out_dims is None else out_dims)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    return _load(path)


def _infer(model: OnnxModel, tensor: Tensor, *outputs: str) -> dict[str, Any]:
    tensor.data.flags.writeable = False
    result = model.infer(Infer({model.signature().inputs[0].name: tensor}, outputs))
    assert isinstance(result, dict)
    return result


@pytest.mark.skipif(cores() < 2, reason="ONNX Runtime starts no threads on one core")
def test_a_small_graph_starts_no_threads_unless_it_convolves(tmp_path: Path) -> None:
    def threads_of(node: Any, **parameters: Any) -> int:
        graph = helper.make_graph(
            [node],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, 4, 4])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1, 4, 4])],
            [helper.make_tensor("w", TensorProto.FLOAT, [1, 1, 1, 1], [2.0])],
        )
        path = tmp_path / "m.onnx"
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
        model = OnnxModel(ModelSpec(name="m", uri=str(path), parameters=parameters))
        before = len(os.listdir("/proc/self/task"))
        model.load()
        return len(os.listdir("/proc/self/task")) - before

    product, convolution = (helper.make_node(name, ["x", "w"], ["y"]) for name in ("Mul", "Conv"))
    assert threads_of(product) == 0
    assert threads_of(product, intra_op_thread_count=2) == 1
    assert threads_of(convolution) > 0


def test_classifier_of_skl2onnx(tmp_path: Path) -> None:
    x, y = load_iris(return_X_y=True)
    rows = x.astype(np.float32)
    classifier = LogisticRegression().fit(rows, y)
    path = tmp_path / "model.onnx"
    path.write_bytes(to_onnx(classifier, rows[:1], options={"zipmap": False}, target_opset=18).SerializeToString())
    model = _load(path)
    assert model.platform == "onnx_onnxv1"
    assert model.signature().inputs == (TensorSpec("X", FP32, (-1, 4)),)
    assert model.signature().outputs == (
        TensorSpec("label", INT64, (-1,)),
        TensorSpec("probabilities", FP32, (-1, 3)),
    )
    assert (model.signature().batched, model.merges) == (True, 64)
    direct = onnxruntime.InferenceSession(path).run(None, {"X": rows})
    result = _infer(model, Tensor.of(rows))
    np.testing.assert_array_equal(result["label"], direct[0])
    np.testing.assert_array_equal(result["probabilities"], direct[1])
    assert list(_infer(model, Tensor.of(rows), "probabilities")) == ["probabilities"]


@pytest.mark.parametrize("names", [(10, -20, 30), ("setosa", "versicolor", "virginica")])
def test_the_output_of_a_zip_map_is_the_matrix_before_it(tmp_path: Path, names: tuple[Any, ...]) -> None:
    x, y = load_iris(return_X_y=True)
    rows = x.astype(np.float32)
    exported = to_onnx(LogisticRegression(max_iter=1000).fit(rows, np.array(names)[y]), rows[:1], target_opset=18)
    path = tmp_path / "model.onnx"
    path.write_bytes(exported.SerializeToString())
    model = _load(path)
    assert model.signature().outputs == (
        TensorSpec("output_label", INT64 if isinstance(names[0], int) else BYTES, (-1,)),
        TensorSpec("output_probability", FP32, (-1, 3)),
    )
    assert model.signature().batched
    classes = sorted(names)
    assert model.class_labels() == {"output_probability": tuple(map(str, classes))}
    maps = onnxruntime.InferenceSession(path).run(["output_probability"], {"X": rows})[0]
    result = _infer(model, Tensor.of(rows))
    assert result["output_probability"].tolist() == [[row[name] for name in classes] for row in maps]
    dense = without_zip_maps(path)
    assert dense is not None
    onnx.checker.check_model(onnx.load_from_string(dense.content))


def test_the_zip_map_of_a_graph_without_operators_of_onnx_itself(tmp_path: Path) -> None:
    """Its file names no version of the operators that Identity is one of; the weights lie beside it."""
    folder = Path(onnxruntime.__file__).parent / "datasets"
    (tmp_path / "iris.onnx").write_bytes((folder / "logreg_iris.onnx").read_bytes())
    dense = without_zip_maps(tmp_path / "iris.onnx")
    assert dense is not None
    onnx.checker.check_model(onnx.load_from_string(dense.content))
    rows = np.array([[5.1, 3.5], [4.9, 3.0], [6.3, 3.3]], np.float32)
    maps = onnxruntime.InferenceSession(tmp_path / "iris.onnx").run(None, {"float_input": rows})[1]
    assert _infer(_load(tmp_path / "iris.onnx"), Tensor.of(rows))["probabilities"].tolist() == [
        [row[0], row[1], row[2]] for row in maps
    ]


def _other_output(path: Path, kind: str) -> None:
    """Write a graph with an output `z` of another type than a tensor, beside the output `y`."""
    value = {
        "seq": helper.make_tensor_sequence_value_info("z", TensorProto.FLOAT, None),
        "float8": helper.make_tensor_value_info("z", TensorProto.FLOAT8E4M3FN, ["n"]),
        "optional": helper.make_value_info(
            "z", helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, ["n"]))
        ),
    }[kind]
    node = {
        "seq": helper.make_node("SplitToSequence", ["x"], ["z"]),
        "float8": helper.make_node("Cast", ["x"], ["z"], to=TensorProto.FLOAT8E4M3FN),
        "optional": helper.make_node("Optional", ["x"], ["z"]),
    }[kind]
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"]), node], "g", tensors[:1], [tensors[1], value])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9), path)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("seq", "output 'z' is seq(tensor(float)), a sequence, which the protocol cannot carry: expected one tensor"),
        ("float8", "output 'z' is tensor(float8e4m3fn), of a type without a datatype in the protocol: expected one of"),
        ("optional", "output 'z' is optional(tensor(float)), a value that may be missing"),
    ],
)
def test_outputs_that_the_protocol_cannot_carry_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, reason: str
) -> None:
    path = tmp_path / "m.onnx"
    _other_output(path, kind)
    assert [spec.name for spec in _load(path).signature().outputs] == ["y"]
    assert reason in caplog.text
    assert "zipmap" not in caplog.text
    graph = onnx.load(path)
    del graph.graph.output[0]
    onnx.save(graph, path)
    with pytest.raises(ModelFailed, match=re.escape(reason)):
        _load(path)


@pytest.mark.parametrize("kind", [TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2, TensorProto.INT4])
def test_inputs_without_a_datatype_in_the_protocol_are_rejected(tmp_path: Path, kind: int) -> None:
    path = tmp_path / "m.onnx"
    tensors = [helper.make_tensor_value_info("x", kind, ["n"]), helper.make_tensor_value_info("y", 1, ["n"])]
    graph = helper.make_graph([helper.make_node("Cast", ["x"], ["y"], to=1)], "g", tensors[:1], tensors[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    with pytest.raises(ModelFailed, match=r"input 'x' is tensor\(\w+\), of a type without a datatype in the protocol"):
        _load(path)


def test_the_format_of_onnx_runtime(tmp_path: Path) -> None:
    """A graph in `.ort` form is read by the same runtime."""
    _graph(tmp_path / "m.onnx", TensorProto.FLOAT, ["n", 2])
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "m.ort")
    onnxruntime.InferenceSession(tmp_path / "m.onnx", options)
    assert recognise(tmp_path / "m.ort") == "onnx"
    model = _load(tmp_path / "m.ort")
    assert model.signature().inputs == (TensorSpec("x", FP32, (-1, 2)),)
    x = np.arange(4, dtype=np.float32).reshape(2, 2)
    assert _infer(model, Tensor.of(x))["y"].tolist() == x.tolist()


def test_strings_are_bytes(tmp_path: Path) -> None:
    model = _graph(tmp_path / "s.onnx", TensorProto.STRING, ["n", 2])
    assert model.signature().inputs == (TensorSpec("x", BYTES, (-1, 2)),)
    result = _infer(model, Tensor.of([["a", "ü"]]))
    assert Tensor.of(result["y"]).data.tolist() == [[b"a", "ü".encode()]]
    with pytest.raises(InvalidInput, match="UTF-8"):
        _infer(model, Tensor.of(np.array([[b"\xff", b""]], dtype=object)))


def test_half_precision(tmp_path: Path) -> None:
    model = _graph(tmp_path / "h.onnx", TensorProto.FLOAT16, ["n"])
    assert model.signature().inputs[0].datatype is FP16
    np.testing.assert_array_equal(_infer(model, Tensor.of(np.ones(3, np.float16)))["y"], np.ones(3, np.float16))


@pytest.mark.parametrize("rows", [0, 3])
def test_bfloat16_keeps_its_bits(tmp_path: Path, rows: int) -> None:
    model = _graph(tmp_path / "b.onnx", TensorProto.BFLOAT16, ["n", 2])
    assert model.signature().outputs == (TensorSpec("y", BF16, (-1, 2)),)
    numbers = np.arange(2 * rows).reshape(rows, 2).astype(BF16.dtype)
    result = _infer(model, Tensor(numbers, BF16))["y"]
    assert result.dtype == BF16.dtype
    np.testing.assert_array_equal(result, numbers)


def test_batching_needs_a_common_free_axis(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    assert _graph(path, TensorProto.FLOAT, ["n", "k"]).signature().batched
    assert not _graph(path, TensorProto.FLOAT, [2, "k"]).signature().batched
    assert not _graph(path, TensorProto.FLOAT, ["n"], ["k"]).signature().batched
    assert not _graph(path, TensorProto.FLOAT, []).signature().batched


def test_calls_are_merged_by_default_if_the_first_axis_is_declared_to_count_rows(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    merges = {name: _graph(path, TensorProto.FLOAT, [name, 2]).merges for name in ("batch", "Batch_Size", "time", "N")}
    assert merges == {"batch": 64, "Batch_Size": 64, "time": 0, "N": 0}
    assert _graph(path, TensorProto.FLOAT, [None, 2]).merges == 0
    kernel = helper.make_graph(
        [helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0]), helper.make_node("MatMul", ["x", "t"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "batch"])],
    )
    onnx.save(helper.make_model(kernel, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    assert _load(path).merges == 0, "a row has a column for each row"


def test_graphs_that_quantize_all_rows_together_are_not_merged_by_default(tmp_path: Path) -> None:
    """Small rows would become 0 beside large ones."""
    path = tmp_path / "quantized.onnx"
    quantize = helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"])
    graph = helper.make_graph(
        [quantize, helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 2])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    model = _load(path)
    rows = np.array([[1, 2], [1000, 2000]], np.float32)
    assert _infer(model, Tensor.of(rows[:1].copy()))["y"][0] == pytest.approx([1, 2], rel=0.01)
    assert _infer(model, Tensor.of(rows))["y"][0].tolist() == [0, 0]
    assert model.signature().batched
    assert model.merges == 0


def test_a_tensor_without_a_shape_may_have_any(tmp_path: Path) -> None:
    model = _graph(tmp_path / "any.onnx", TensorProto.FLOAT, None)
    assert [spec.shape for spec in (*model.signature().inputs, *model.signature().outputs)] == [None, None]
    for shape in ((), (2,), (1, 3)):
        x = np.ones(shape, np.float32)
        assert np.array_equal(_infer(model, Tensor.of(x))["y"], x)
    scalar = _graph(tmp_path / "scalar.onnx", TensorProto.FLOAT, [])
    assert [spec.shape for spec in (*scalar.signature().inputs, *scalar.signature().outputs)] == [(), ()]


def test_invalid_files_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_text("hello")
    with pytest.raises(ModelFailed, match="cannot be loaded by ONNX Runtime"):
        _load(tmp_path / "model.onnx")


@pytest.mark.filterwarnings("ignore:Specified provider:UserWarning")
def test_a_provider_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime lists a provider of its build even where the provider's libraries are missing."""
    listed = ["CUDAExecutionProvider", *onnxruntime.get_available_providers()]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: listed)
    _graph(tmp_path / "m.onnx", TensorProto.FLOAT, [1])
    spec = ModelSpec(name="m", uri=str(tmp_path / "m.onnx"), parameters={"providers": ["cuda", "cpu"]})
    with pytest.raises(ModelFailed, match="execution provider 'CUDAExecutionProvider' cannot be started"):
        OnnxModel(spec).load()


def test_execution_providers_and_options(tmp_path: Path) -> None:
    _graph(tmp_path / "m.onnx", TensorProto.FLOAT, [1])

    def load(**parameters: Any) -> None:
        OnnxModel(ModelSpec(name="m", uri=str(tmp_path / "m.onnx"), parameters=parameters)).load()

    load(providers=["cpu"], intra_op_thread_count=1, execution_mode=1, graph_optimization_level="basic")
    load(providers=["CPUExecutionProvider"])
    with pytest.raises(
        ModelFailed, match=r"'CUDAExecutionProvider' is not available: expected one of .*; pip install onnxruntime-gpu"
    ):
        load(providers=["cuda", "cpu"])
    with pytest.raises(ModelFailed, match="'NewExecutionProvider' is not available"):
        load(providers=["NewExecutionProvider"])
    for wrong in ("cpu", [], [3]):
        with pytest.raises(ModelFailed, match="parameter 'providers': expected a list of names"):
            load(providers=wrong)
    with pytest.raises(ModelFailed, match="'graph_optimization_level': expected one of disabled, basic"):
        load(graph_optimization_level="most")
    with pytest.raises(ModelFailed, match="'inter_op_thread_count': expected an integer from 0, got -1"):
        load(inter_op_thread_count=-1)
