"""Tensors of a configuration as values: shapes, datatypes, warm-up requests, control inputs and implicit states."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dragoman.core.bytes_tensor import BytesTensor
from dragoman.core.calls import Infer, Inference
from dragoman.core.datatypes import BYTES, FP32, INT32, INT64, UINT8
from dragoman.core.errors import InvalidInput, InvalidOutput, ModelFailed
from dragoman.core.sequences import SequenceStep
from dragoman.core.tensor import Tensor
from dragoman_triton.sequences import SequenceInputs
from dragoman_triton.tensors import Configuration, ConfiguredTensor, datatype_of


def table(name: str = "x", kind: str = "TYPE_FP32", dims: Any = (4,), **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": kind, "dims": list(dims), **more}


def configuration(max_batch_size: int = 4, **more: Any) -> Configuration:
    tensors = {"input": [table()], "output": [table("y"), table("z")]}
    return Configuration({"name": "m", "max_batch_size": max_batch_size, **tensors, **more})


def ints(*values: Any, kind: Any = np.int64) -> Tensor:
    return Tensor.of(np.array(values, kind))


# --- inputs and outputs ----------------------------------------------------------------------------------------------


def test_datatypes_of_a_configuration() -> None:
    names = ("TYPE_STRING", "TYPE_FP32", "TYPE_UINT8", "TYPE_INT64")
    assert [datatype_of(name) for name in names] == [BYTES, FP32, UINT8, INT64]


def test_a_tensor_has_the_batch_axis_and_the_shape_in_the_model() -> None:
    plain = ConfiguredTensor.parse(table(dims=(2, -1)), has_batch_axis=False)
    assert (plain.spec.shape, plain.inner, plain.spec.datatype, plain.spec.optional) == ((2, -1), (2, -1), FP32, False)
    reshaped = ConfiguredTensor.parse(
        table(dims=(2, -1, 3), reshape={"shape": [-1, 6]}, optional=True), has_batch_axis=True
    )
    assert (reshaped.spec.shape, reshaped.inner, reshaped.spec.optional) == ((-1, 2, -1, 3), (-1, -1, 6), True)
    given = Tensor.of(np.arange(60, dtype=np.float32).reshape(2, 2, 5, 3))
    inside = reshaped.to_model(given)
    assert (inside.shape, inside.data.ravel().tolist()) == ((2, 5, 6), list(range(60)))
    outside = reshaped.to_client(inside)
    assert (outside.shape, outside.data.ravel().tolist()) == ((2, 2, 5, 3), list(range(60)))
    same = Tensor.of(np.zeros((2, 7), np.float32))
    assert plain.to_model(same) is same
    assert plain.to_client(same) is same


def test_outputs_that_differ_are_named() -> None:
    tensor = ConfiguredTensor.parse(table("y", dims=(2,)), has_batch_axis=True)
    with pytest.raises(InvalidOutput, match="output 'y': expected datatype FP32, got INT64"):
        tensor.to_client(ints([1, 2]))
    with pytest.raises(InvalidOutput, match=r"output 'y': expected shape \[-1, 2\], got \[1, 3\]"):
        tensor.to_client(Tensor.of(np.zeros((1, 3), np.float32)))
    hint = ConfiguredTensor.from_spec(tensor.spec, is_hint=True)
    wrong = ints([1, 2, 3])
    assert hint.to_client(wrong) is wrong
    with pytest.raises(InvalidOutput):
        ConfiguredTensor.from_spec(tensor.spec, is_hint=False).to_client(wrong)


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("TYPE_INT32", ints([1, -(2**31)]), INT32),
        ("TYPE_INT32", ints([1, 2**31 - 1]), INT32),
        ("TYPE_INT32", ints([1, 2**31]), INT64),
        ("TYPE_INT32", ints([1, -(2**31) - 1]), INT64),
        ("TYPE_UINT8", ints([0, 255]), UINT8),
        ("TYPE_UINT8", ints([0, 256]), INT64),
        ("TYPE_UINT8", ints([0, -1]), INT64),
        ("TYPE_UINT8", Tensor.of(np.zeros((1, 0), np.int64)), UINT8),
        ("TYPE_FP32", ints([1, 2]), INT64),
        ("TYPE_INT64", Tensor.of(np.array([[1.0, 2.0]], np.float32)), FP32),
    ],
)
def test_integers_that_fit_get_the_configured_datatype(kind: str, given: Tensor, expected: Any) -> None:
    found = ConfiguredTensor.parse(table(kind=kind, dims=(-1,)), has_batch_axis=True).convert(given, 1)
    assert (found.datatype, found.shape) == (expected, given.shape)
    np.testing.assert_array_equal(found.data, given.data)


def test_one_row_may_lack_its_batch_axis() -> None:
    tensor = ConfiguredTensor.parse(table(kind="TYPE_INT64", dims=(2,)), has_batch_axis=True)
    assert tensor.convert(ints(1, 2), 1).shape == (1, 2)
    assert tensor.convert(ints(1, 2), 2).shape == (2,)
    assert tensor.convert(ints([1, 2]), 1).shape == (1, 2)
    assert tensor.convert(ints(1, 2, 3), 1).shape == (3,)
    unbatched = ConfiguredTensor.parse(table(kind="TYPE_INT64", dims=(2,)), has_batch_axis=False)
    assert unbatched.convert(ints(1, 2), 1).shape == (2,)


def test_rows_and_requested_outputs_of_a_call() -> None:
    found = configuration(4)
    call = Infer({"x": Tensor.of(np.zeros((4, 4), np.float32))})
    assert (found.rows(call), found.rows(Infer({})), configuration(0).rows(call)) == (4, 1, 1)
    with pytest.raises(InvalidInput, match="batch-size must be <= 4 for 'm'"):
        found.rows(Infer({"x": Tensor.of(np.zeros((5, 4), np.float32))}))
    assert found.requested_outputs(call) == ("y", "z")
    assert found.requested_outputs(Infer({}, ("z",))) == ("z",)
    with pytest.raises(InvalidInput, match="unexpected inference output 'w' for model 'm'; expected 'y', 'z'"):
        found.requested_outputs(Infer({}, ("y", "w")))


def test_the_signature_of_a_configuration() -> None:
    signature = configuration(4).signature()
    assert [(spec.name, spec.shape) for spec in signature.inputs] == [("x", (-1, 4))]
    assert [(spec.name, spec.optional) for spec in signature.outputs] == [("y", False), ("z", False)]
    assert (signature.batched, signature.open_outputs) == (True, False)
    signature = configuration(0).signature(("z",))
    assert [(spec.name, spec.optional) for spec in signature.outputs] == [("y", False), ("z", True)]
    assert (signature.batched, signature.open_outputs, signature.inputs[0].shape) == (False, True, (4,))
    assert not configuration().is_decoupled
    assert configuration(model_transaction_policy={"decoupled": True}).is_decoupled


def test_warm_up_requests(tmp_path: Path) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "data").write_bytes(np.array([3, 5], np.int32).tobytes())
    given: dict[str, Any] = {
        "zero": {"data_type": "TYPE_FP32", "dims": [3], "zero_data": True},
        "float": {"data_type": "TYPE_FP32", "dims": [50], "random_data": True},
        "int": {"data_type": "TYPE_INT64", "dims": [50], "random_data": True},
        "text": {"data_type": "TYPE_STRING", "dims": [2, 1], "random_data": True},
        "file": {"data_type": "TYPE_INT32", "dims": [2], "input_data_file": "data"},
    }
    warmup = {"name": "w", "batch_size": 2, "inputs": given, "count": 3}
    calls = list(configuration(4, model_warmup=[warmup]).warmup_calls(tmp_path))
    assert [name for name, _ in calls] == ["w"] * 3
    inputs = calls[0][1].inputs
    assert {name: (each.shape, str(each.datatype)) for name, each in inputs.items()} == {
        "zero": ((2, 3), "FP32"),
        "float": ((2, 50), "FP32"),
        "int": ((2, 50), "INT64"),
        "text": ((2, 2, 1), "BYTES"),
        "file": ((2, 2), "INT32"),
    }
    assert inputs["zero"].data.tolist() == [[0.0] * 3] * 2
    assert inputs["file"].data.tolist() == [[3, 5], [3, 5]]
    assert inputs["text"].data.ravel().tolist() == [b""] * 4
    assert set(inputs["int"].data.ravel().tolist()) == {0, 1}
    numbers = inputs["float"].data
    assert (numbers.min() >= 0, numbers.max() <= 1, len(set(numbers[0].tolist())) > 40) == (True, True, True)
    assert (numbers[0] == numbers[1]).all()
    for count in (0, 1):
        (single,) = configuration(0, model_warmup=[{**warmup, "count": count}]).warmup_calls(tmp_path)
        assert single[1].inputs["zero"].shape == (3,)
    (tmp_path / "warmup" / "data").write_bytes(b"short")
    with pytest.raises(ModelFailed, match="warm-up input 'file': 'data' cannot be read"):
        list(configuration(4, model_warmup=[warmup]).warmup_calls(tmp_path))


# --- sequences -------------------------------------------------------------------------------------------------------


def control(kind: str, **values: Any) -> dict[str, Any]:
    return {"name": kind, "control": [{"kind": f"CONTROL_SEQUENCE_{kind}", **values}]}


CONTROLS = [
    control("START", fp32_false_true=[-1, 2.5]),
    control("END", bool_false_true=[False, True]),
    control("READY", int32_false_true=[3, 4]),
    control("CORRID", data_type="TYPE_INT32"),
]
STATE = {"input_name": "in", "output_name": "out", "data_type": "TYPE_INT64", "dims": [2]}


def sequence_inputs(
    max_batch_size: int = 4, *, keeps_rows: bool = False, folder: Path = Path(), **batching: Any
) -> SequenceInputs:
    config = {"name": "m", "max_batch_size": max_batch_size, "sequence_batching": batching}
    return SequenceInputs(config, folder, keeps_rows=keeps_rows)


def test_control_inputs_of_a_request() -> None:
    found = sequence_inputs(0, control_input=CONTROLS)
    assert [(t.spec.name, t.spec.shape, str(t.spec.datatype)) for t in found.inputs()] == [
        ("START", (1,), "FP32"),
        ("END", (1,), "BOOL"),
        ("READY", (1,), "INT32"),
        ("CORRID", (1,), "INT32"),
    ]
    for step, expected in (
        (SequenceStep(7, start=True), ([2.5], [False], [4], [7])),
        (SequenceStep(8, end=True), ([-1.0], [True], [4], [8])),
    ):
        assert tuple(tensor.data.tolist() for tensor in found.controls(step).values()) == expected
    batched = sequence_inputs(4, control_input=CONTROLS)
    assert [t.spec.shape for t in batched.inputs()] == [(-1, 1)] * 4
    assert batched.controls(SequenceStep(7))["START"].data.tolist() == [[-1.0]]


@pytest.mark.parametrize(
    ("kind", "id_", "expected"),
    [
        ("TYPE_INT32", 2**31, -(2**31)),
        ("TYPE_INT32", 2**31 - 1, 2**31 - 1),
        ("TYPE_UINT32", 2**32 + 5, 5),
        ("TYPE_UINT64", 2**64 - 1, 2**64 - 1),
        ("TYPE_INT64", 2**64 - 1, -1),
        ("TYPE_STRING", 42, b"42"),
        ("TYPE_STRING", "é", "é".encode()),
    ],
)
def test_ids_have_the_bits_of_their_datatype(kind: str, id_: int | str, expected: Any) -> None:
    found = sequence_inputs(0, control_input=[control("CORRID", data_type=kind)])
    assert found.controls(SequenceStep(id_))["CORRID"].data.tolist() == [expected]
    found.check_id("a" if kind == "TYPE_STRING" else 1)
    with pytest.raises(InvalidInput, match="'sequence_id': expected"):
        found.check_id(1 if kind == "TYPE_STRING" else "a")


def test_the_kind_and_the_datatype_of_a_control_have_defaults() -> None:
    start = {"name": "S", "control": [{"int32_false_true": [0, 1]}]}
    found = sequence_inputs(0, control_input=[start, control("CORRID")])
    assert found.controls(SequenceStep(5, start=True))["S"].data.tolist() == [1]
    assert str(found.controls(SequenceStep(5))["CORRID"].datatype) == "UINT64"


class Adding:
    """A model that adds its input, or one, to its state, and keeps the inputs that it gets."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, Any], int]] = []

    def __call__(self, inputs: Mapping[str, Tensor], count: int) -> Inference:
        self.seen.append(({name: tensor.data.tolist() for name, tensor in inputs.items()}, count))
        state = inputs["in"].data + (inputs["x"].data if "x" in inputs else 1)
        return Inference({"out": Tensor(state, INT64), "y": Tensor(state * 10, INT64)}, {"p": 1})


def test_the_state_of_a_step_is_the_output_of_the_one_before() -> None:
    found = sequence_inputs(0, state=[STATE])
    assert found.state_outputs == ("out",)
    assert [(t.spec.name, t.spec.shape) for t in (*found.inputs(), *found.outputs())] == [("in", (2,)), ("out", (2,))]
    state: dict[str, Any] = {}
    model = Adding()
    for expected in ([10, 10], [20, 20], [30, 30]):
        result = found.infer(Infer({}, sequences=(SequenceStep(1, state=state),)), 1, model)
        assert (result.outputs["y"].data.tolist(), result.parameters) == (expected, {"p": 1})
    assert state["out"].tolist() == [3, 3]
    batched = sequence_inputs(4, state=[STATE])
    assert [t.spec.shape for t in (*batched.inputs(), *batched.outputs())] == [(-1, 2), (-1, 2)]


def test_rows_of_a_batch_have_the_states_of_their_sequences() -> None:
    found, model = sequence_inputs(4, state=[STATE], control_input=CONTROLS[:1]), Adding()
    steps = tuple(SequenceStep(n, start=n == 1, slot=3 - n, state={"out": np.array([n, n])}) for n in (1, 2))
    result = found.infer(Infer({"x": ints([5, 6], [7, 8])}, sequences=steps), 2, model)
    assert model.seen == [({"x": [[5, 6], [7, 8]], "START": [[2.5], [-1.0]], "in": [[1, 1], [2, 2]]}, 2)]
    assert result.outputs["y"].data.tolist() == [[60, 70], [90, 100]]
    assert [step.state["out"].tolist() for step in steps if step.state] == [[6, 7], [9, 10]]
    with pytest.raises(InvalidInput, match="must specify batch-size 1"):
        found.infer(Infer({"x": ints([5, 6])}, sequences=steps), 1, model)


def test_a_sequence_keeps_the_row_of_its_slot() -> None:
    model = Adding()
    found = sequence_inputs(4, keeps_rows=True, direct={}, state=[STATE], control_input=[CONTROLS[0], CONTROLS[2]])
    steps = tuple(SequenceStep(n, start=True, slot=n, state={}) for n in (3, 1))
    result = found.infer(Infer({"x": ints([5, 6], [7, 8])}, sequences=steps), 2, model)
    inputs, count = model.seen[0]
    assert count == 3
    assert inputs == {
        "x": [[7, 8], [0, 0], [5, 6]],
        "START": [[2.5], [-1.0], [2.5]],
        "READY": [[4], [3], [4]],
        "in": [[0, 0]] * 3,
    }
    assert result.outputs["y"].data.tolist() == [[50, 60], [70, 80]]
    assert [step.state["out"].tolist() for step in steps if step.state] == [[5, 6], [7, 8]]
    oldest = sequence_inputs(4, keeps_rows=True, oldest={}, state=[STATE])
    oldest.infer(Infer({"x": ints([5, 6])}, sequences=(SequenceStep(3, slot=3, state={}),)), 1, model)
    assert model.seen[1][1] == 1


def test_rows_without_a_request_have_empty_text() -> None:
    seen: list[Any] = []

    def compute(inputs: Mapping[str, Tensor], count: int) -> Inference:
        seen.append({name: tensor.data.tolist() for name, tensor in inputs.items()})
        return Inference({"y": Tensor(np.arange(count).reshape(count, 1), INT64)})

    found = sequence_inputs(4, keeps_rows=True, control_input=[control("CORRID", data_type="TYPE_STRING")])
    words = BytesTensor.of_any_texts(["a", "b"], (1, 2), {})
    result = found.infer(Infer({"x": words}, sequences=(SequenceStep("s", slot=2),)), 1, compute)
    assert seen == [{"x": [[b"", b""], [b"a", b"b"]], "CORRID": [[b""], [b"s"]]}]
    assert result.outputs["y"].data.tolist() == [[1]]


def test_a_warm_up_request_is_a_sequence_for_each_row() -> None:
    model = Adding()
    found = sequence_inputs(4, keeps_rows=True, state=[STATE], control_input=CONTROLS[:3])
    found.infer(Infer({"x": ints([5, 6], [7, 8])}), 2, model)
    expected = {"START": [[2.5]] * 2, "END": [[True]] * 2, "READY": [[4]] * 2, "in": [[0, 0]] * 2}
    assert model.seen == [({"x": [[5, 6], [7, 8]], **expected}, 2)]


def test_initial_states(tmp_path: Path) -> None:
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "data").write_bytes(np.array([3, 5], np.int64).tobytes())
    text = {**STATE, "data_type": "TYPE_STRING", "dims": [-1]}
    for state, expected in (
        (STATE, [0, 0]),
        ({**STATE, "dims": [-1, 2]}, [[0, 0]]),
        ({**STATE, "dims": [-1], "initial_state": [{"dims": [3], "zero_data": True}]}, [0, 0, 0]),
        ({**STATE, "initial_state": [{"dims": [2], "data_file": "data"}]}, [3, 5]),
        (text, [b""]),
        ({**text, "initial_state": [{"dims": [2], "zero_data": True}]}, [b"", b""]),
    ):
        seen: list[Any] = []

        def compute(inputs: Mapping[str, Tensor], _count: int, seen: list[Any] = seen) -> Inference:
            seen.append(inputs["in"].data.tolist())
            return Inference({"out": inputs["in"]})

        found = sequence_inputs(0, folder=tmp_path, state=[state])
        found.infer(Infer({}, sequences=(SequenceStep(1, start=True, state={}),)), 1, compute)
        assert seen == [expected]
    with pytest.raises(ModelFailed, match="state 'in': 'other' cannot be read"):
        sequence_inputs(0, folder=tmp_path, state=[{**STATE, "initial_state": [{"dims": [2], "data_file": "other"}]}])
