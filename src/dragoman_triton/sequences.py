"""Sequence batching of a `config.pbtxt`: control inputs, and implicit state that is fed back to the model."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dragoman.core import error_texts
from dragoman.core.calls import Infer, Inference
from dragoman.core.datatypes import BOOL, BYTES, DATATYPES, Array, Datatype
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.sequences import SequenceStep, check_id_type
from dragoman.core.signature import Shape, TensorSpec
from dragoman.core.tensor import Tensor, object_array
from dragoman.formats.policy import Policy
from dragoman.formats.raw import tensor_from_raw
from dragoman_triton.tensors import ConfiguredTensor, datatype_of

_FLAGS: Mapping[str, Callable[[SequenceStep], bool]] = {
    "CONTROL_SEQUENCE_START": lambda step: step.start,
    "CONTROL_SEQUENCE_END": lambda step: step.end,
    "CONTROL_SEQUENCE_READY": lambda step: True,
}
_CORRELATION_ID = "CONTROL_SEQUENCE_CORRID"
_FLAG_DATATYPES = {
    "int32_false_true": DATATYPES["INT32"],
    "fp32_false_true": DATATYPES["FP32"],
    "bool_false_true": BOOL,
}


@dataclass(frozen=True, slots=True)
class _Control:
    """A control input. value: its element for a request. padding: its element for a row without a request."""

    datatype: Datatype
    value: Callable[[SequenceStep], Any]
    padding: Any


@dataclass(frozen=True, slots=True)
class _ImplicitState:
    """An output that is an input of the next step of the sequence. initial: the input of the first step."""

    input: str
    output: str
    dims: Shape
    initial: Tensor


class SequenceInputs:
    """The inputs of a stateful model that clients do not send.

    folder: the folder of the model, whose `initial_state` has files of states. Raises ModelFailed if one cannot be
    read. keeps_rows: each sequence has the row of its slot in every batch, for models that have a state for each row.
    """

    def __init__(self, config: Mapping[str, Any], folder: Path, *, keeps_rows: bool) -> None:
        batching = config["sequence_batching"]
        self._model = str(config["name"])
        self._is_batched = int(config["max_batch_size"]) > 0
        self._keeps_rows = keeps_rows and self._is_batched and "oldest" not in batching
        controls = [
            (str(table["name"]), control) for table in batching.get("control_input", ()) for control in table["control"]
        ]
        self._controls = {name: _control(control) for name, control in controls}
        self._id_datatypes = [
            self._controls[name].datatype for name, control in controls if control.get("kind") == _CORRELATION_ID
        ]
        self._states = [_state(table, folder) for table in batching.get("state", ())]
        self.state_outputs = tuple(state.output for state in self._states)

    def inputs(self) -> tuple[ConfiguredTensor, ...]:
        """Return the control inputs and the states as inputs of the model."""
        specs = [TensorSpec(name, c.datatype, self._shape((1,))) for name, c in self._controls.items()]
        specs += [TensorSpec(s.input, s.initial.datatype, self._shape(s.dims)) for s in self._states]
        return tuple(ConfiguredTensor(spec, spec.shape) for spec in specs)

    def outputs(self) -> tuple[ConfiguredTensor, ...]:
        """Return the states as outputs of the model."""
        specs = [TensorSpec(s.output, s.initial.datatype, self._shape(s.dims)) for s in self._states]
        return tuple(ConfiguredTensor(spec, spec.shape) for spec in specs)

    def _shape(self, dims: Shape) -> Shape:
        return (-1, *dims) if self._is_batched else dims

    def check_id(self, id_: object) -> None:
        """Raise InvalidInput unless the control input for the id of a sequence, if there is one, takes this id."""
        for datatype in self._id_datatypes:
            check_id_type(id_, self._model, "text" if datatype is BYTES else "integer")

    def controls(self, step: SequenceStep) -> dict[str, Tensor]:
        """Return the control inputs of one request."""
        return self._control_inputs((step,), (0,), 1)

    def infer(self, call: Infer, rows: int, compute: Callable[[Mapping[str, Tensor], int], Inference]) -> Inference:
        """Return the outputs of a call with a row for each sequence, whose states are those of the model from then on.

        compute: returns all outputs, also the states, for the inputs of a number of rows.
        """
        steps = call.sequences
        if not steps:  # of a warm-up request
            steps = tuple(SequenceStep(0, start=True, end=True, slot=n + 1, state={}) for n in range(rows))
        if len(steps) != rows:
            raise InvalidInput(error_texts.too_many_rows_of_sequence(self._model))
        row_indices = [max(step.slot, 1) - 1 for step in steps] if self._keeps_rows else list(range(rows))
        count = max(row_indices) + 1
        inputs = {name: _place_rows(tensor, row_indices, count) for name, tensor in call.inputs.items()}
        inputs |= self._control_inputs(steps, row_indices, count) | self._state_inputs(steps, row_indices, count)
        result = compute(inputs, count)
        self._store(steps, row_indices, result.outputs)
        if count == rows and not self._keeps_rows:
            return result
        outputs = {name: Tensor(t.data[row_indices], t.datatype) for name, t in result.outputs.items()}
        return Inference(outputs, result.parameters)

    def _control_inputs(
        self, steps: Sequence[SequenceStep], row_indices: Sequence[int], count: int
    ) -> dict[str, Tensor]:
        inputs = {}
        for name, control in self._controls.items():
            values = [control.padding] * count
            for row, step in zip(row_indices, steps, strict=True):
                values[row] = control.value(step)
            shape, kind = ((count, 1) if self._is_batched else (1,)), control.datatype
            data = object_array(values, shape) if kind is BYTES else np.array(values, kind.dtype).reshape(shape)
            inputs[name] = Tensor(data, kind)
        return inputs

    def _state_inputs(self, steps: Sequence[SequenceStep], row_indices: Sequence[int], count: int) -> dict[str, Tensor]:
        inputs = {}
        for state in self._states:
            values = [_current(state, step) for step in steps]
            data = np.stack(values) if self._is_batched else values[0]
            inputs[state.input] = _place_rows(Tensor(data, state.initial.datatype), row_indices, count)
        return inputs

    def _store(self, steps: Sequence[SequenceStep], row_indices: Sequence[int], outputs: Mapping[str, Tensor]) -> None:
        for state in self._states:
            data = outputs[state.output].data
            for row, step in zip(row_indices, steps, strict=True):
                if step.state is not None:
                    step.state[state.output] = (data[row] if self._is_batched else data).copy()


def _current(state: _ImplicitState, step: SequenceStep) -> Array:
    value: Array = (step.state or {}).get(state.output, state.initial.data)
    return value


def _place_rows(tensor: Tensor, rows: Sequence[int], count: int) -> Tensor:
    """Return a tensor with its rows at `rows`; the others are zeros, or empty."""
    if list(rows) == list(range(count)):
        return tensor
    shape = (count, *tensor.shape[1:])
    empty = (
        object_array([b""] * math.prod(shape), shape)
        if tensor.datatype is BYTES
        else np.zeros(shape, tensor.data.dtype)
    )
    empty[list(rows)] = tensor.data
    return Tensor(empty, tensor.datatype)


def _control(table: Mapping[str, Any]) -> _Control:
    kind = str(table.get("kind", "CONTROL_SEQUENCE_START"))
    if kind == _CORRELATION_ID:
        datatype = datatype_of(table.get("data_type", "TYPE_UINT64"))
        return _Control(
            datatype, lambda step: _correlation_id(step.correlation_id, datatype), b"" if datatype is BYTES else 0
        )
    field = next(field for field in _FLAG_DATATYPES if table.get(field))
    false, true = table[field]
    return _Control(_FLAG_DATATYPES[field], lambda step: true if _FLAGS[kind](step) else false, false)


def _correlation_id(id_: int | str, datatype: Datatype) -> Any:
    """Return the id of a sequence; integers are reduced to the bits of the datatype, as in Triton."""
    if datatype is BYTES or isinstance(id_, str):
        return str(id_).encode()
    bits = 8 * datatype.size
    number = id_ % (1 << bits)
    return number - (1 << bits) if datatype.kind == "int" and number >> (bits - 1) else number


def _state(table: Mapping[str, Any], folder: Path) -> _ImplicitState:
    """Return a state; without `initial_state`, and for free axes, it starts with zeros of length 1."""
    kind, name, dims = datatype_of(table["data_type"]), str(table["input_name"]), tuple(table["dims"])
    shape: Shape = tuple(1 if n == -1 else n for n in dims)
    initial: Mapping[str, Any] = next(iter(table.get("initial_state", ())), {})
    shape = tuple(initial.get("dims", ())) or shape
    if "data_file" in initial:
        file = folder / "initial_state" / str(initial["data_file"])
        try:
            tensor = tensor_from_raw(f"state '{name}'", kind, shape, file.read_bytes(), Policy())
        except (OSError, InvalidInput) as error:
            raise ModelFailed(f"state '{name}': '{file.name}' cannot be read: {error}") from error
    else:
        zeros = object_array([b""] * math.prod(shape), shape) if kind is BYTES else np.zeros(shape, kind.dtype)
        tensor = Tensor(zeros, kind)
    return _ImplicitState(name, str(table["output_name"]), dims, tensor)
