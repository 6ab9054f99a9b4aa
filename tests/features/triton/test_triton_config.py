"""`config.pbtxt`: errors name file, line and field; the model file must agree; what is not honoured is logged."""

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import dragoman
from dragoman.core.calls import Describe, Infer, Request, States
from dragoman.core.errors import DragomanError, InvalidInput, InvalidOutput, ModelFailed
from dragoman.core.model import Model
from dragoman.core.schedule import ScheduleOptions
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor
from dragoman.engine.repository import DiskRepository
from dragoman.plugins import runtime
from dragoman_triton import pb_utils
from features.triton.repository import ADD_SUB, write, write_add_sub

ONNX = 'platform: "onnxruntime_onnx"\nmax_batch_size: 8\n'


def spec_of(folder: Path, config: str) -> ModelSpec:
    """Return the spec of the model in `folder`. Raises ModelFailed with the error that the server reports."""
    write(folder / "m" / "config.pbtxt", config)
    (folder / "m" / "1").mkdir(parents=True, exist_ok=True)
    state = DiskRepository([str(folder)], {}).scan()["m"].state()
    if state.error:
        raise ModelFailed(state.error)
    (spec,) = state.specs
    return spec


def load(folder: Path, config: str, kind: int = TensorProto.INT32) -> Any:
    write_add_sub(folder / "m" / "1" / "model.onnx", kind)
    return loaded(spec_of(folder, config))


def loaded(spec: ModelSpec) -> Model:
    assert spec.runtime == "triton"
    model = runtime("triton").load(spec)
    model.load()
    return model


def call(*arrays: Any) -> Infer:
    return Infer({f"INPUT{i}": Tensor.of(array) for i, array in enumerate(arrays)})


@pytest.mark.parametrize(
    ("config", "line", "message"),
    [
        ('name: "other"\n', 1, "field 'name': unexpected directory name 'm' for model 'other'"),
        ("max_batch_size: -1\n", 2, "field 'max_batch_size': expected 0 or more, got -1"),
        ("\n\ninput { name: 3 }\n", "4:15", "Expected string but found: '3'"),
        ('input { name: "a" data_type: TYPE_FLOAT dims: 1 }', "2:30", "has no value named TYPE_FLOAT"),
        ('input { name: "a" \n dims: 1 }', 2, "field 'input[0].data_type': expected the datatype of 'a'"),
        ('input { name: "a" data_type: TYPE_INT8 }', 2, "field 'input[0].dims': expected the dims of 'a'"),
        ('input [ {\n name: "a" data_type: TYPE_INT8\n dims: [ 0 ] } ]', 4, "from 1, or -1 for any length, got 0"),
        ("output { data_type: TYPE_INT8 dims: 1 }", 2, "field 'output[0].name': expected the name of the tensor"),
        (
            'input { name: "a" data_type: TYPE_INT8 dims: 1 }\ninput {\n name: "a" data_type: TYPE_INT8 dims: 1 }',
            4,
            "field 'input[1].name': expected unique names, got 'a' twice",
        ),
        (
            'input { name: "a" data_type: TYPE_INT8 dims: [ 2, 3 ]\n reshape { shape: [ 5 ] } }',
            3,
            "field 'input[0].reshape.shape': expected as many elements as dims [2, 3] have, got [5]",
        ),
        (
            'input { name: "a" data_type: TYPE_INT8 dims: 1 reshape { } }',
            2,
            "without max_batch_size it cannot be empty",
        ),
        ('input { name: "a" data_type: TYPE_INT8 dims: 1 format: FORMAT_NCHW }', 2, "expected 3 dims"),
        ('input { name: "a" data_type: TYPE_INT8 dims: 1 is_shape_tensor: true }', 2, "only TensorRT"),
        ('input { name: "a" data_type: TYPE_INT8 dims: 1\n reshape { shape: [ 0 ] } }', 3, "any length, got [0]"),
        ('model_warmup { name: "w" batch_size: 0 }', 2, "expected 1 to 1, got 0"),
        ('max_batch_size: 4\nmodel_warmup { name: "w" batch_size: 5 }', 3, "expected 1 to 4, got 5"),
        *(
            (f'model_warmup {{ name: "w" batch_size: 1\n inputs {{ key: "I" value {{ {given} }} }} }}', 3, message)
            for given, message in (
                ("dims: 1 zero_data: true", "'I': expected a data_type and dims from 1"),
                ("data_type: TYPE_INT8 dims: 0 zero_data: true", "'I': expected a data_type and dims from 1"),
                ("data_type: TYPE_INT8 dims: 1", "'I': expected zero_data, random_data or input_data_file"),
            )
        ),
        ("dynamic_batching { priority_levels: 3 }", 2, "expected 1 to 3, the number of priority_levels, got 0"),
        ('default_model_filename: ".."', 2, "expected the name of a file in the version folder"),
        ("instance_group { count: -2 }", 2, "field 'instance_group[0].count': expected 1 or more, got -2"),
        ("model_warmup { batch_size: 1 }", 2, "field 'model_warmup[0].name'"),
        ('model_warmup { name: "w" batch_size: 5 }', 2, "field 'model_warmup[0].batch_size': expected 1 to 1, got 5"),
        ('default_model_filename: "../x.onnx"', 2, "expected the name of a file in the version folder"),
        ('model_operations { op_library_filename: "a.so" }', 2, "libraries of operators are not loaded"),
        (
            "dynamic_batching { priority_levels: 3\n default_priority_level: 4 }",
            3,
            "default_priority_level': expected 1 to 3, the number of priority_levels, got 4",
        ),
        ("dynamic_batching { priority_levels: 101 }", 2, "expected at most 100, got 101"),
        ("batch_input { kind: BATCH_ELEMENT_COUNT }", 2, "field 'batch_input'"),
        *(
            (
                f'output {{ name: "O" data_type: TYPE_FP32 dims: 1 label_filename: "{path}" }}',
                2,
                f"label_filename': expected a file in the folder of the model, got '{path}'",
            )
            for path in ("/etc/passwd", "../labels.txt", "a/../../b")
        ),
        (
            'model_warmup { name: "w" batch_size: 1 inputs { key: "I" value '
            '{ data_type: TYPE_FP32 dims: 1 input_data_file: "../../x" } } }',
            2,
            "expected a file in the folder of the model, got '../../x'",
        ),
    ],
)
def test_faults_name_file_line_and_field(tmp_path: Path, config: str, line: int | str, message: str) -> None:
    with pytest.raises(ModelFailed) as error:
        spec_of(tmp_path, f'platform: "onnxruntime_onnx"\n{config}' if line != 1 else config)
    assert f"m/config.pbtxt:{line}: " in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('platform: "caffe2_netdef"', "Caffe2 is retired upstream and no longer part of Triton: convert"),
        (
            'platform: "mxnet_mxnet"',
            "MXNet is retired upstream and no longer part of Triton: convert the model to ONNX",
        ),
        ('backend: "tensorrtllm"', "TensorRT-LLM is not supported"),
        ('backend: "mine"', "field 'backend': expected one of onnxruntime, pytorch, tensorflow, openvino"),
        ('backend: "pytorch"', "field 'input': expected the tensors of the model"),
        ("", "or a version folder with a file such as model.onnx or model.py"),
    ],
)
def test_backends_that_are_not_supported(tmp_path: Path, config: str, message: str) -> None:
    with pytest.raises(ModelFailed) as error:
        spec_of(tmp_path, config)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('model_name: "a"', 'model_name: "../a"'), "step[0].model_name': expected the name of a model, got '../a'"),
        (('step [ { model_name: "a"', "step [ {"), "ensemble_scheduling.step[0].model_name': expected the name"),
        (('value: "OUT" } } ]', 'value: "IN" } } ]'), "expected tensors that nothing else produces, got 'IN'"),
        (('value: "IN"', 'value: "else"'), "field 'input[0]': 'IN' is not used by any step"),
        (('name: "OUT"', 'name: "none"'), "field 'output[0]': 'none' is not produced by any step"),
        (('"ensemble"', '"ensemble" instance_group { }'), "field 'instance_group': not allowed in an ensemble"),
        (('input_map { key: "x" value: "IN" }', ""), "step[0].input_map': expected a pair of tensors or more"),
        (
            (
                'input_map { key: "x" value: "IN" }',
                'input_map { key: "x" value: "IN" } input_map { key: "z" value: "w" }',
            ),
            "field 'ensemble_scheduling': no step and no input produces w",
        ),
        (
            (
                'step [ { model_name: "a" model_version: -1\n'
                'input_map { key: "x" value: "IN" } output_map { key: "y" value: "OUT" } } ]',
                "",
            ),
            "field 'ensemble_scheduling': expected one step or more",
        ),
        (('"ensemble"', '"ensemble" optimization { }'), "field 'optimization': not allowed in an ensemble"),
        (('output_map { key: "y" value: "OUT" }', ""), "step[0].output_map': expected a pair of tensors or more"),
    ],
)
def test_faults_of_ensembles(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    config = (
        'platform: "ensemble" input { name: "IN" data_type: TYPE_INT8 dims: 1 }\n'
        'output { name: "OUT" data_type: TYPE_INT8 dims: 1 }\n'
        'ensemble_scheduling { step [ { model_name: "a" model_version: -1\n'
        'input_map { key: "x" value: "IN" } output_map { key: "y" value: "OUT" } } ] }'
    )
    spec_of(tmp_path, config)
    with pytest.raises(ModelFailed) as error:
        spec_of(tmp_path / "bad", config.replace(*change))
    assert message in str(error.value)


def test_fields_that_are_not_honoured_are_named_in_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "m" / "1" / "model.onnx", "")
    config = ONNX + (
        'foo: 3\ninstance_group { kind: KIND_GPU bar { x: "}" } gpus: [ 0 ] }\nbaz: "a" "b"\n'
        'parameters { key: "p" value { string_value: "v" } }\n'
        "dynamic_batching { priority_levels: 2 default_priority_level: 1 }\n"
    )
    with caplog.at_level(logging.WARNING, "dragoman.compat"):
        spec = spec_of(tmp_path, config)
        DiskRepository([str(tmp_path)], {}).scan()["m"].state()  # the same file again
    (record,) = caplog.records
    for name in ("foo", "bar", "baz", "instance_group.kind", "instance_group.gpus", "parameters.p"):
        assert f"'{name}' (" in record.getMessage(), name
    assert (spec.max_batch_size, spec.replicas) == (8, 1)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("", {"max_batch_size": 0, "replicas": 1}),
        ("max_batch_size: 4", {"max_batch_size": 4}),  # Triton adds dynamic batching to ONNX models
        ("max_batch_size: 4 dynamic_batching { max_queue_delay_microseconds: 500 }", {"max_batch_wait_s": 0.0005}),
        ("instance_group [ { count: 2 }, { kind: KIND_CPU } ]", {"replicas": 3}),
        (
            "max_batch_size: 4 dynamic_batching { priority_levels: 4 default_priority_level: 3 default_queue_policy {\n"
            "timeout_action: DELAY default_timeout_microseconds: 250000 max_queue_size: 7 }\n"
            "priority_queue_policy { key: 2 value { max_queue_size: 3 allow_timeout_override: true } }\n"
            "priority_queue_policy { key: 9 value { } } }",
            {
                "schedule": ScheduleOptions(
                    priority_levels=4,
                    default_priority=3,
                    max_queue_size=7,
                    timeout_s=0.25,
                    timeout_action="delay",
                    levels={
                        "2": {
                            "max_queue_size": 3,
                            "timeout_s": 0.0,
                            "timeout_action": "reject",
                            "allow_timeout_override": True,
                        }
                    },
                )
            },
        ),
        ("max_batch_size: 4 dynamic_batching { }", {"schedule": None}),
        ("response_cache { enable: true }", {"response_cache_bytes": 16 << 20}),
    ],
)
def test_settings(tmp_path: Path, config: str, expected: dict[str, Any]) -> None:
    write(tmp_path / "m" / "1" / "model.onnx", "")
    spec = spec_of(tmp_path, f'backend: "onnxruntime"\n{config}')
    assert {name: getattr(spec, name) for name in expected} == expected


def test_latest_versions(tmp_path: Path) -> None:
    for version in ("1", "2", "10", "011", "x"):
        write(tmp_path / "m" / version / "model.onnx", "")
    write(tmp_path / "m" / "config.pbtxt", 'backend: "onnxruntime" version_policy { latest { num_versions: 2 } }')
    state = DiskRepository([str(tmp_path)], {}).scan()["m"].state()
    assert [spec.version for spec in state.specs] == ["2", "10"]


# --- the model file and its configuration ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("TYPE_INT32", "TYPE_FP32"), "input 'INPUT0': the model expects datatype INT32, got FP32"),
        (("[ 4 ]", "[ 5 ]"), "input 'INPUT0': the model expects dims [4], got [5]"),
        (("[ 4 ]", "[ 4, 1 ]"), "input 'INPUT0': the model expects dims [4], got [4, 1]"),
        (('"INPUT0"', '"X"'), "unexpected input 'X': the model has 'INPUT0', 'INPUT1'"),
        (('{ name: "INPUT0" data_type: TYPE_INT32 dims: [ 4 ] },', ""), "expected 2 inputs, got 1; missing ['INPUT0']"),
        (('"OUTPUT1"', '"Y"'), "unexpected output 'Y': the model has 'OUTPUT0', 'OUTPUT1'"),
        (("max_batch_size: 8", "max_batch_size: 0"), "the model expects dims [-1, 4], got [4]"),
    ],
)
def test_the_file_must_agree(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    with pytest.raises(ModelFailed) as error:
        load(tmp_path, (ONNX + ADD_SUB).replace(*change))
    assert message in str(error.value)


def test_a_fixed_first_axis_is_no_batch(tmp_path: Path) -> None:
    config = ONNX + ADD_SUB
    write_add_sub(tmp_path / "m" / "1" / "model.onnx")
    model = tmp_path / "m" / "1" / "model.onnx"
    model.write_bytes(model.read_bytes().replace(b"\x0a\x03\x12\x01N", b"\x0a\x03\x08\x80\x01"))
    with pytest.raises(ModelFailed, match="is not free: expected max_batch_size 0"):
        loaded(spec_of(tmp_path, config))


def test_an_output_needs_the_rows_of_the_request(tmp_path: Path) -> None:
    shape = ["N", 4]
    names = (
        helper.make_tensor_value_info("X", TensorProto.INT32, shape),
        helper.make_tensor_value_info("Y", TensorProto.INT32, ["M", 4]),
    )
    node = helper.make_node("Concat", ["X", "X"], ["Y"], axis=0)
    graph = helper.make_graph([node], "g", [names[0]], [names[1]])
    (tmp_path / "m" / "1").mkdir(parents=True)
    opset = [helper.make_opsetid("", 13)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), tmp_path / "m" / "1" / "model.onnx")
    model: Any = loaded(spec_of(tmp_path, ONNX))
    with pytest.raises(InvalidOutput, match="output 'Y': expected 2 rows, got 4"):
        model.infer(Infer({"X": Tensor.of(np.ones((2, 4), np.int32))}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("TYPE_INT32", "TYPE_INT64"), "step 'simple': inconsistent data type of tensor 'IN': INT64 and INT32"),
        (("dims: 4", "dims: 5"), "step 'simple': inconsistent shape of tensor 'IN': [-1, 5] and [-1, 4]"),
        (('input_map { key: "INPUT1" value: "IN" }', ""), "step 'simple': its input 'INPUT1' is not in input_map"),
        (('key: "INPUT1"', 'key: "OTHER"'), "step 'simple': it has no input 'OTHER'"),
        (('key: "OUTPUT0"', 'key: "OTHER"'), "step 'simple': it has no output 'OTHER'"),
        (('model_name: "simple"', 'model_name: "none"'), "step 'none': model not found"),
    ],
)
async def test_an_ensemble_must_agree_with_its_steps(
    tmp_path: Path, change: tuple[str, str], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_add_sub(tmp_path / "simple" / "1" / "model.onnx")
    write(tmp_path / "simple" / "config.pbtxt", ONNX + ADD_SUB)
    (tmp_path / "e" / "1").mkdir(parents=True)
    write(tmp_path / "e" / "config.pbtxt", ENSEMBLE.replace(*change))
    async with dragoman.open_engine(tmp_path) as engine:
        with suppress(DragomanError):
            await engine.call(Request(Describe(), "e"))
        (entry,) = [e for e in (await engine.call(Request(States()))).answer if e.name == "e"]
    assert (entry.state, message in entry.reason) == ("UNAVAILABLE", True), entry.reason


ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input { name: "IN" data_type: TYPE_INT32 dims: 4 }
output { name: "OUT" data_type: TYPE_INT32 dims: -1 }
ensemble_scheduling { step {
  model_name: "simple" model_version: -1
  input_map { key: "INPUT0" value: "IN" } input_map { key: "INPUT1" value: "IN" }
  output_map { key: "OUTPUT0" value: "OUT" }
} }
"""


def test_names_and_shapes_are_those_of_the_configuration(tmp_path: Path) -> None:
    config = (ONNX + ADD_SUB).replace("dims: [ 4 ]", "dims: [ 2, 2 ] reshape { shape: [ 4 ] }")
    model = load(tmp_path, config)
    assert [(t.name, t.shape) for t in model.signature().inputs] == [("INPUT0", (-1, 2, 2)), ("INPUT1", (-1, 2, 2))]
    a = np.arange(12, dtype=np.int32).reshape(3, 2, 2)
    outputs = model.infer(call(a, a)).outputs
    np.testing.assert_array_equal(outputs["OUTPUT0"].data, 2 * a, strict=True)


def test_without_tensors_those_of_the_file_are_used(tmp_path: Path) -> None:
    model = load(tmp_path, "")
    assert [(t.name, t.shape) for t in model.signature().outputs] == [("OUTPUT0", (-1, 4)), ("OUTPUT1", (-1, 4))]
    a = np.ones((2, 4), np.int32)
    assert model.infer(call(a, a)).outputs["OUTPUT0"].data.tolist() == [[2] * 4] * 2


@pytest.mark.parametrize("given", ["zero_data: true", "random_data: true", 'input_data_file: "data"'])
def test_warm_up(tmp_path: Path, given: str) -> None:
    (tmp_path / "m" / "warmup").mkdir(parents=True)
    (tmp_path / "m" / "warmup" / "data").write_bytes(np.arange(4, dtype=np.int32).tobytes())
    each = f"value {{ data_type: TYPE_INT32 dims: 4 {given} }}"
    config = ONNX + ADD_SUB + 'model_warmup { name: "w" batch_size: 2 count: 3 '
    config += f'inputs {{ key: "INPUT0" {each} }} inputs {{ key: "INPUT1" {each} }} }}'
    load(tmp_path, config)
    (tmp_path / "m" / "warmup" / "data").write_bytes(b"short")
    with pytest.raises(ModelFailed, match="warm-up"):
        load(tmp_path, config.replace(given, 'input_data_file: "data"'))


def test_onnx_settings_of_triton(tmp_path: Path) -> None:
    parameter = 'parameters {{ key: "{}" value {{ string_value: "{}" }} }}\n'
    good = parameter.format("intra_op_thread_count", 1) + parameter.format("execution_mode", 1)
    load(tmp_path, ONNX + ADD_SUB + good + "optimization { graph { level: 1 } }\n")
    with pytest.raises(ModelFailed, match="'intra_op_thread_count': expected an integer from 0, got many"):
        load(tmp_path, ONNX + ADD_SUB + parameter.format("intra_op_thread_count", "many"))
    accelerator = 'optimization { execution_accelerators { gpu_execution_accelerator { name: "tensorrt" } } }'
    for config in (accelerator, parameter.format("providers", "TensorrtExecutionProvider")):
        with pytest.raises(ModelFailed, match="'TensorrtExecutionProvider' is not available: expected one of"):
            load(tmp_path, ONNX + ADD_SUB + config)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, ONNX + ADD_SUB + 'default_model_filename: "net.onnx"')
    with pytest.raises(ModelFailed, match=r"'1/net\.onnx' not found"):
        runtime("triton").load(spec)
    write_add_sub(tmp_path / "m" / "1" / "net.onnx")
    loaded(spec)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_torchscript_names_by_position(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class SumAndDifference(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[name-defined]
            return a + b, a - b

    (tmp_path / "m" / "1").mkdir(parents=True)
    torch.jit.trace(SumAndDifference(), (torch.ones(2, 4), torch.ones(2, 4))).save(tmp_path / "m" / "1" / "model.pt")
    a, b = np.full((2, 4), 5, np.float32), np.full((2, 4), 2, np.float32)
    config = ADD_SUB.replace("INT32", "FP32").replace("PUT0", "PUT__0").replace("PUT1", "PUT__1")
    config = f'platform: "pytorch_libtorch" max_batch_size: 4\n{config}'
    config = config.replace("OUTPUT__0", "X__1").replace("OUTPUT__1", "OUTPUT__0").replace("X__1", "OUTPUT__1")
    model: Any = loaded(spec_of(tmp_path, config))
    outputs = model.infer(Infer({"INPUT__1": Tensor.of(b), "INPUT__0": Tensor.of(a)})).outputs
    assert outputs["OUTPUT__0"].data.tolist() == [[7.0] * 4] * 2
    assert outputs["OUTPUT__1"].data.tolist() == [[3.0] * 4] * 2
    wrong: Any = loaded(
        spec_of(tmp_path, config.replace('"OUTPUT__1" data_type: TYPE_FP32', '"OUTPUT__1" data_type: TYPE_FP64'))
    )
    with pytest.raises(DragomanError, match="output 'OUTPUT__1': expected datatype FP64, got FP32"):
        wrong.infer(Infer({"INPUT__1": Tensor.of(b), "INPUT__0": Tensor.of(a)}))
    wide: Any = loaded(spec_of(tmp_path, config.replace("FP32 dims: [ 4 ] }\n]", "FP32 dims: [ 5 ] }\n]")))
    with pytest.raises(InvalidOutput, match=r"output 'OUTPUT__0': expected shape \[-1, 5\], got \[2, 4\]"):
        wide.infer(Infer({"INPUT__1": Tensor.of(b), "INPUT__0": Tensor.of(a)}))
    with pytest.raises(InvalidInput, match="batch-size must be <= 4 for 'm'"):
        model.infer(Infer({"INPUT__1": Tensor.of(np.ones((5, 4), np.float32))}))


def test_the_files_of_a_version_choose_the_backend_anew(tmp_path: Path) -> None:
    write(tmp_path / "m" / "1" / "model.onnx", "")
    assert spec_of(tmp_path, "").parameters["backend"] == "onnx"
    changed = (tmp_path / "m" / "config.pbtxt").stat()
    (tmp_path / "m" / "1" / "model.onnx").rename(tmp_path / "m" / "1" / "model.py")
    os.utime(tmp_path / "m" / "config.pbtxt", ns=(changed.st_atime_ns, changed.st_mtime_ns))
    (spec,) = DiskRepository([str(tmp_path)], {}).scan()["m"].state().specs
    assert spec.parameters["backend"] == "python"


@pytest.mark.parametrize("given", [False, True])
def test_a_given_transaction_policy_is_not_changed(given: bool) -> None:
    config = pb_utils.ModelConfig({"name": "m", "model_transaction_policy": {"decoupled": given}})
    config.set_model_transaction_policy({"decoupled": given})
    with pytest.raises(
        ValueError, match=f"^trying to change decoupled .* model 'm', which is already set to '{given}'"
    ):
        config.set_model_transaction_policy({"decoupled": not given})
