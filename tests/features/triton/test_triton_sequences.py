"""`sequence_batching` of a `config.pbtxt`: control inputs, implicit state, slots, and Python models with sequences."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import dragoman
from dragoman.core.calls import Infer, ReadStatistics, Request
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.sequences import SequenceStep
from dragoman.core.tensor import Tensor
from dragoman.engine.engine import Engine
from dragoman_triton.sequences import SequenceInputs
from features.triton.repository import write
from features.triton.test_triton_config import loaded, spec_of

TENSORS = 'input { name: "X" data_type: TYPE_INT32 dims: 1 } output { name: "Y" data_type: TYPE_INT32 dims: 1 }\n'
START = 'name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ -1, 2.5 ] }'
ALL_CONTROLS = f"""
control_input [
  {{ {START} }},
  {{ name: "READY" control {{ kind: CONTROL_SEQUENCE_READY int32_false_true: [ 3, 4 ] }} }},
  {{ name: "END" control {{ kind: CONTROL_SEQUENCE_END bool_false_true: [ false, true ] }} }},
  {{ name: "ID" control {{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT32 }} }}
]
"""
KINDS = {"X": "INT32", "START": "FLOAT", "READY": "INT32", "END": "BOOL", "ID": "INT32"}


def write_graph(path: Path, nodes: list[Any], inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
    """Write an ONNX graph; the tensors are names with datatype and dims."""
    sides = [
        [helper.make_tensor_value_info(n, getattr(TensorProto, kind), dims) for n, (kind, dims) in side.items()]
        for side in (inputs, outputs)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    graph = helper.make_graph(nodes, "g", *sides)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)


def write_models(root: Path) -> None:
    batch = ["N", 1]
    nodes = [helper.make_node("Identity", [name], [f"{name}_OUT"]) for name in KINDS]
    write_graph(
        root / "controls" / "1" / "model.onnx",
        nodes,
        {name: (kind, batch) for name, kind in KINDS.items()},
        {f"{name}_OUT": (kind, batch) for name, kind in KINDS.items()},
    )
    outputs = "".join(
        f'output {{ name: "{name}_OUT" data_type: TYPE_{"FP32" if kind == "FLOAT" else kind} dims: 1 }}\n'
        for name, kind in KINDS.items()
    )
    write(
        root / "controls" / "config.pbtxt",
        'backend: "onnxruntime" max_batch_size: 4 input { name: "X" data_type: TYPE_INT32 dims: 1 }\n'
        f"{outputs} sequence_batching {{ oldest {{ max_candidate_sequences: 9 }} {ALL_CONTROLS} }}",
    )
    # The state is the list of all inputs of the sequence, the output their sum.
    axes = helper.make_node("Constant", [], ["axes"], value=helper.make_tensor("a", TensorProto.INT64, [1], [1]))
    nodes = [
        helper.make_node("Concat", ["PAST", "X"], ["ALL"], axis=1),
        axes,
        helper.make_node("ReduceSum", ["ALL", "axes"], ["Y"], keepdims=1),
    ]
    state = ["N", "length"]
    write_graph(
        root / "history" / "1" / "model.onnx",
        nodes,
        {"X": ("INT32", batch), "PAST": ("INT32", state)},
        {"Y": ("INT32", batch), "ALL": ("INT32", ["N", "longer"])},
    )
    write(
        root / "history" / "config.pbtxt",
        f'backend: "onnxruntime" max_batch_size: 4 {TENSORS}\n'
        "sequence_batching { max_sequence_idle_microseconds: 20000000 state {\n"
        'input_name: "PAST" output_name: "ALL" data_type: TYPE_INT32 dims: -1\n'
        'initial_state { data_type: TYPE_INT32 dims: 2 data_file: "start" name: "s" } } }',
    )
    (root / "history" / "initial_state").mkdir()
    (root / "history" / "initial_state" / "start").write_bytes(np.array([100, 1000], np.int32).tobytes())
    write(root / "py" / "config.pbtxt", f'backend: "python" max_batch_size: 4 {TENSORS}{PYTHON_SEQUENCES}')
    write(root / "py" / "1" / "model.py", PYTHON)


PYTHON_SEQUENCES = """
sequence_batching { direct { } control_input {
  name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } } }
"""
PYTHON = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:  # InferenceRequest.exec( in this text makes it run in the server's process
    def initialize(self, args):
        self.totals = {}

    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        id_ = pb_utils.get_input_tensor_by_name(request, "ID").as_numpy()
        if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            self.totals[request.correlation_id()] = 0
        self.totals[request.correlation_id()] += request.inputs()[0].as_numpy()
        total = self.totals[request.correlation_id()].astype(np.int64)
        if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END:
            del self.totals[request.correlation_id()]
        seen = {"id": id_.tolist()[0][0].decode(), "flags": request.flags(), "live": len(self.totals)}
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", total[0])], parameters=seen)
"""


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    write_models(tmp_path)
    async with dragoman.open_engine(tmp_path) as engine:
        yield engine


async def infer(engine: Engine, model: str, x: int, id_: object, flags: str = "", rows: int = 1) -> Any:
    """Send one request of a sequence; return its outputs as lists, and the parameters of the response."""
    parameters: dict[str, Any] = {"sequence_id": id_, **{f"sequence_{flag}": True for flag in flags.split()}}
    call = Infer({"X": Tensor.of(np.full((rows, 1), x, np.int32))}, parameters=parameters)
    answer = (await engine.call(Request(call, model))).answer
    return {name: tensor.data.tolist() for name, tensor in answer.outputs.items()} | dict(answer.parameters)


async def test_control_inputs(engine: Engine) -> None:
    first = await infer(engine, "controls", 1, (1 << 32) - 2, "start")
    assert first == {"X_OUT": [[1]], "START_OUT": [[2.5]], "READY_OUT": [[4]], "END_OUT": [[False]], "ID_OUT": [[-2]]}
    last = await infer(engine, "controls", 2, (1 << 32) - 2, "end")
    assert (last["START_OUT"], last["READY_OUT"], last["END_OUT"]) == ([[-1.0]], [[4]], [[True]])
    with pytest.raises(InvalidInput, match="expected an integer for model 'controls', got text"):
        await infer(engine, "controls", 1, "a", "start")
    with pytest.raises(InvalidInput, match="batch-size 1 due to requirements of sequence batcher"):
        await infer(engine, "controls", 1, 1, "start", rows=2)
    with pytest.raises(InvalidInput, match="batch-size 1 due to requirements of sequence batcher"):
        await infer(engine, "history", 1, 1, "start", rows=2)


async def test_clients_do_not_send_controls_and_states(engine: Engine) -> None:
    for model in ("controls", "history"):
        (deployment,) = [each for each in engine.deployments() if each.spec.name == model]
        signature = deployment.loaded.signature
        assert [tensor.name for tensor in signature.inputs] == ["X"]
        assert "ALL" not in signature.output_names
    call = Infer({"X": Tensor.of(np.ones((1, 1), np.int32)), "READY": Tensor.of(np.ones((1, 1), np.int32))})
    with pytest.raises(InvalidInput, match="READY"):
        await engine.call(Request(call, "controls"))


async def test_implicit_state(engine: Engine) -> None:
    assert (await infer(engine, "history", 1, 5, "start")) == {"Y": [[1101]]}
    assert (await infer(engine, "history", 2, 5)) == {"Y": [[1103]]}
    assert (await infer(engine, "history", 7, 6, "start")) == {"Y": [[1107]]}
    assert (await infer(engine, "history", 3, 5, "end")) == {"Y": [[1106]]}
    assert (await infer(engine, "history", 1, 5, "start end")) == {"Y": [[1101]]}


def test_a_batch_has_the_state_of_each_sequence(tmp_path: Path) -> None:
    write_models(tmp_path)
    model: Any = loaded_of(tmp_path, "history")
    states: list[dict[str, Any]] = [{}, {"ALL": np.array([1, 2], np.int32)}]
    steps = tuple(SequenceStep(n + 1, start=not state, state=state) for n, state in enumerate(states))
    call = Infer({"X": Tensor.of(np.array([[1], [2]], np.int32))}, sequences=steps)
    assert model.infer(call).outputs["Y"].data.tolist() == [[1101], [5]]
    assert [state["ALL"].tolist() for state in states] == [[100, 1000, 1], [1, 2, 2]]
    assert model.spec.max_batch_size == 0  # states with a free axis may have different shapes: one row at a time


def loaded_of(root: Path, name: str) -> Any:
    """Load one model of a repository in this process."""
    (root / name).rename(root / "m")
    return loaded(spec_of(root, (root / "m" / "config.pbtxt").read_text()))


async def test_python_models_see_id_flags_and_controls(engine: Engine) -> None:
    assert await infer(engine, "py", 1, "a", "start") == {"Y": [[1]], "id": "a", "flags": 1, "live": 1}
    assert await infer(engine, "py", 5, "b", "start") == {"Y": [[5]], "id": "b", "flags": 1, "live": 2}
    assert await infer(engine, "py", 2, "a") == {"Y": [[3]], "id": "a", "flags": 0, "live": 2}
    assert await infer(engine, "py", 3, "a", "end") == {"Y": [[6]], "id": "a", "flags": 2, "live": 1}
    with pytest.raises(InvalidInput, match="expected text for model 'py', got an integer"):
        await infer(engine, "py", 1, 1, "start")
    with pytest.raises(InvalidInput, match="batch-size 1 due to requirements of sequence batcher"):
        await infer(engine, "py", 1, "c", "start", rows=2)
    (counted,) = (await engine.call(Request(ReadStatistics(), "py"))).answer
    assert (counted.succeeded, counted.inferences, counted.executions) == (4, 4, 4)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_direct_sequences_keep_their_row(tmp_path: Path) -> None:
    """A program with a sum for each row; rows without a request are marked by READY."""
    torch = pytest.importorskip("torch")

    class Sums(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("sums", torch.zeros(4, 1))

        def forward(self, x: torch.Tensor, ready: torch.Tensor) -> torch.Tensor:  # type: ignore[name-defined]
            rows = x.size(0)
            self.sums[:rows] += x * ready
            return self.sums[:rows].clone()

    (tmp_path / "m" / "1").mkdir(parents=True)
    torch.jit.script(Sums()).save(tmp_path / "m" / "1" / "model.pt")
    ready = 'name: "ready" control { kind: CONTROL_SEQUENCE_READY fp32_false_true: [ 0, 1 ] }'
    tensors = TENSORS.replace("INT32", "FP32").replace('"X"', '"x"')
    config = f'backend: "pytorch" max_batch_size: 4 {tensors} sequence_batching {{ control_input {{ {ready} }} }}'
    model: Any = loaded(spec_of(tmp_path, config))

    def sums(slots: list[int], x: list[float]) -> Any:
        steps = tuple(SequenceStep(slot, slot=slot, state={}) for slot in slots)
        call = Infer({"x": Tensor.of(np.array(x, np.float32)[:, None])}, sequences=steps)
        return model.infer(call).outputs["Y"].data[:, 0].tolist()

    assert sums([3, 1], [10, 1]) == [10.0, 1.0]
    assert sums([1], [2]) == [3.0]
    assert sums([2, 3], [5, 20]) == [5.0, 30.0]
    config = config.replace("sequence_batching {", "sequence_batching { oldest { }")
    (tmp_path / "oldest" / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.pt").rename(tmp_path / "oldest" / "m" / "1" / "model.pt")
    model = loaded(spec_of(tmp_path / "oldest", config))
    assert sums([3, 1], [10, 1]) == [10.0, 1.0]
    assert sums([1], [2]) == [12.0]  # in the first row, whatever its slot


@pytest.mark.parametrize(
    ("batching", "expected"),
    [
        ("direct { }", ("oldest", 4, 1024, 1.0, "any")),
        ("oldest { max_candidate_sequences: 2000 }", ("oldest", 2000, 2000, 1.0, "any")),
        ("max_sequence_idle_microseconds: 5000000", ("oldest", 4, 1024, 5.0, "any")),
        (ALL_CONTROLS, ("oldest", 4, 1024, 1.0, "integer")),
    ],
)
def test_options(tmp_path: Path, batching: str, expected: tuple[Any, ...]) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.onnx").touch()
    spec = spec_of(tmp_path, f'backend: "onnxruntime" max_batch_size: 4 sequence_batching {{ {batching} }}')
    options = spec.sequences
    assert options is not None
    found = (options.strategy, options.max_candidates, options.max_sequences, options.idle_s, options.ids)
    assert (found, spec.max_batch_size) == (expected, 4)


STATE = 'state {\n input_name: "S" output_name: "T" data_type: TYPE_INT8 dims: 2'


@pytest.mark.parametrize(
    ("batching", "line", "message"),
    [
        ('control_input {\n name: "X" control { int32_false_true: [ 0, 1 ] } }', 3, "unique names, got 'X' twice"),
        ('control_input {\n name: "A" }', 2, "expected one control of 'A', got 0"),
        (
            'control_input { name: "A"\n control { int32_false_true: 1 } }',
            3,
            "two values, such as int32_false_true: [ 0, 1 ]",
        ),
        (
            'control_input { name: "A"\n control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32 } }',
            3,
            "expected one of TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32, TYPE_STRING, got TYPE_FP32",
        ),
        (
            f"control_input {{ {START} }}\ncontrol_input {{ {START.replace('START', 'B', 1)} }}",
            3,
            "expected each kind once, got CONTROL_SEQUENCE_START twice",
        ),
        ('state {\n output_name: "T" }', 2, "expected the name of an input of the model"),
        ('state {\n input_name: "S" }', 2, "expected the name of the output that is the next state"),
        ('state {\n input_name: "S" output_name: "T" dims: 0 }', 2, "'S': expected a data_type and dims from 1"),
        (STATE + "\n initial_state { dims: 3 zero_data: true } }", 4, "expected the dims [2], got [3]"),
        (STATE + "\n initial_state { dims: 0 zero_data: true } }", 4, "expected the dims [2], got [0]"),
        (
            STATE + "\n initial_state { dims: 2 zero_data: true }\n initial_state { dims: 2 zero_data: true } }",
            4,
            "expected one initial state, got 2",
        ),
        (
            STATE + "\n initial_state { dims: 2 data_type: TYPE_INT32 zero_data: true } }",
            4,
            "initial_state.data_type': expected that of the state 'S'",
        ),
        ("control_input {\n control { int32_false_true: [ 0, 1 ] } }", 2, "expected the name of an input of the model"),
        (
            'control_input { name: "A"\n control { int32_false_true: [ 0, 1 ] fp32_false_true: [ 0, 1 ] } }',
            3,
            "expected two values",
        ),
        (STATE + "\n initial_state { dims: 2 } }", 4, "expected zero_data or data_file"),
        (STATE + '\n initial_state { dims: 2 data_file: "../x" } }', 4, "expected the name of a file in the folder"),
    ],
)
def test_invalid_configurations(tmp_path: Path, batching: str, line: int, message: str) -> None:
    with pytest.raises(ModelFailed) as error:
        spec_of(tmp_path, f'backend: "onnxruntime" {TENSORS}sequence_batching {{ {batching} }}')
    assert f"m/config.pbtxt:{line}: field 'sequence_batching." in str(error.value)
    assert message in str(error.value)


def test_python_models_have_no_implicit_state(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    with pytest.raises(ModelFailed, match=r"'sequence_batching\.state': not supported by Python models"):
        spec_of(tmp_path, f'backend: "python" {TENSORS}sequence_batching {{ {STATE} }} }}')


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_state_is_not_changed_by_other_sequences(tmp_path: Path) -> None:
    """A program that returns its own memory, which the next call overwrites."""
    torch = pytest.importorskip("torch")

    class Sum(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(1))

        def forward(self, x: torch.Tensor, past: torch.Tensor) -> torch.Tensor:  # type: ignore[name-defined]
            self.last.copy_(x + past)
            return self.last

    (tmp_path / "m" / "1").mkdir(parents=True)
    torch.jit.script(Sum()).save(tmp_path / "m" / "1" / "model.pt")
    state = 'state { input_name: "past" output_name: "Y" data_type: TYPE_FP32 dims: 1 }'
    tensors = TENSORS.replace("INT32", "FP32").replace('"X"', '"x"')
    model: Any = loaded(spec_of(tmp_path, f'backend: "pytorch" {tensors} sequence_batching {{ {state} }}'))
    states: list[dict[str, Any]] = [{}, {}]
    for n, x, total in ((0, 1.0, 1.0), (1, 10.0, 10.0), (0, 2.0, 3.0), (1, 5.0, 15.0)):
        step = SequenceStep(n + 1, slot=1, state=states[n])
        call = Infer({"x": Tensor.of(np.array([x], np.float32))}, sequences=(step,))
        assert model.infer(call).outputs["Y"].data.tolist() == [total]


def test_initial_states_that_cannot_be_read(tmp_path: Path) -> None:
    write_models(tmp_path)
    (tmp_path / "history" / "initial_state" / "start").write_bytes(b"123")
    with pytest.raises(ModelFailed, match="state 'PAST': 'start' cannot be read: "):
        loaded_of(tmp_path, "history")


def test_a_control_that_the_model_lacks(tmp_path: Path) -> None:
    write_models(tmp_path)
    path = tmp_path / "controls" / "config.pbtxt"
    path.write_text(path.read_text().replace('"READY"', '"STEADY"'))
    with pytest.raises(ModelFailed, match="unexpected input 'STEADY': the model has 'X', 'START'"):
        loaded_of(tmp_path, "controls")


def test_integer_ids_in_a_control_of_text() -> None:
    config = {"name": "m", "max_batch_size": 0, "sequence_batching": {"control_input": [
        {"name": "ID", "control": [{"kind": "CONTROL_SEQUENCE_CORRID", "data_type": "TYPE_STRING"}]}]}}  # fmt: skip
    controls = SequenceInputs(config, Path(), keeps_rows=False).controls(SequenceStep(42))
    assert controls["ID"].data.tolist() == [b"42"]
