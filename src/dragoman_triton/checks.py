"""Checks of a `config.pbtxt`: Triton does not load models whose configuration fails them."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from dragoman.formats.model_config import ConfigFile
from dragoman_triton.backends import ENSEMBLE, PYTHON, Backend

_MAX_LEVELS = 100


def check_config(file: ConfigFile, backend: Backend, *, is_completed: bool = False) -> None:
    """Raise InvalidInput naming file, line and field for a configuration that Triton does not load.

    is_completed: the code of the model adds datatypes and dims that are missing.
    """
    config = file.message
    if config.max_batch_size < 0:
        raise file.error("max_batch_size", f"expected 0 or more, got {config.max_batch_size}")
    if "/" in config.default_model_filename or config.default_model_filename == "..":
        raise file.error("default_model_filename", "expected the name of a file in the version folder")
    _check_tensors(file, is_declared_by_file=backend.runtime != "torch", is_completed=is_completed)
    for number, group in enumerate(config.instance_group):
        if group.count < 0:
            raise file.error(f"instance_group[{number}].count", f"expected 1 or more, got {group.count}")
    for number, warmup in enumerate(config.model_warmup):
        _check_warmup(file, f"model_warmup[{number}]", warmup)
    if config.HasField("dynamic_batching"):
        _check_schedule(file)
    if config.HasField("sequence_batching"):
        _check_sequences(file, backend)
    if backend.runtime == ENSEMBLE:
        _check_ensemble(file)


def _check_tensors(file: ConfigFile, *, is_declared_by_file: bool, is_completed: bool) -> None:
    config = file.message
    for side, tensors in (("input", config.input), ("output", config.output)):
        if not tensors and not is_declared_by_file:
            raise file.error(side, "expected the tensors of the model, which a TorchScript file does not declare")
        names: set[str] = set()
        for number, tensor in enumerate(tensors):
            path = f"{side}[{number}]"
            if tensor.name in names:
                raise file.error(f"{path}.name", f"expected unique names, got '{tensor.name}' twice")
            names.add(tensor.name)
            _check_tensor(file, path, tensor, is_completed=is_completed)
            if tensor.HasField("reshape"):
                _check_reshape(file, path, tensor, has_batch_axis=config.max_batch_size > 0)


def _check_tensor(file: ConfigFile, path: str, tensor: Any, *, is_completed: bool) -> None:
    if not tensor.name:
        raise file.error(f"{path}.name", "expected the name of the tensor")
    if not (tensor.data_type or is_completed):
        raise file.error(f"{path}.data_type", f"expected the datatype of '{tensor.name}', such as TYPE_FP32")
    if not (tensor.dims or is_completed):
        raise file.error(f"{path}.dims", f"expected the dims of '{tensor.name}', such as [ 16 ]; [ 1 ] for one element")
    if wrong := [n for n in tensor.dims if not _is_dim(n)]:
        raise file.error(f"{path}.dims", f"expected integers from 1, or -1 for any length, got {wrong[0]}")
    if path.startswith("output"):
        _check_inside(file, f"{path}.label_filename", tensor.label_filename)
    if path.startswith("input") and tensor.format and len(tensor.dims) != 3:
        raise file.error(f"{path}.format", f"expected 3 dims for NHWC and NCHW, got {len(tensor.dims)}")


def _check_inside(file: ConfigFile, path: str, name: str) -> None:
    """Raise InvalidInput for a path outside of the model's folder: clients may send configurations."""
    if name.startswith("/") or ".." in name.split("/"):
        raise file.error(path, f"expected a file in the folder of the model, got '{name}'")


def _is_dim(n: int) -> bool:
    return n == -1 or n > 0


def _check_reshape(file: ConfigFile, path: str, tensor: Any, *, has_batch_axis: bool) -> None:
    shape = list(tensor.reshape.shape)
    if not shape and not has_batch_axis:
        raise file.error(f"{path}.reshape", "expected a shape: without max_batch_size it cannot be empty")
    if not all(map(_is_dim, shape)):
        raise file.error(f"{path}.reshape.shape", f"expected integers from 1, or -1 for any length, got {shape}")
    if _sizes_between_free_axes(tensor.dims) != _sizes_between_free_axes(shape):
        raise file.error(
            f"{path}.reshape.shape", f"expected as many elements as dims {list(tensor.dims)} have, got {shape}"
        )


def _sizes_between_free_axes(dims: Sequence[int]) -> list[int]:
    """Return the number of elements before, between and after the free axes, each of which keeps its length."""
    sizes: list[int] = []
    group: list[int] = []
    for n in dims:
        if n == -1:
            sizes.append(math.prod(group))
            group = []
        else:
            group.append(n)
    return [*sizes, math.prod(group)]


def _check_warmup(file: ConfigFile, path: str, warmup: Any) -> None:
    if not warmup.name:
        raise file.error(f"{path}.name", "expected the name of the warm-up request")
    limit = max(1, file.message.max_batch_size)
    if not 1 <= warmup.batch_size <= limit:
        raise file.error(f"{path}.batch_size", f"expected 1 to {limit}, got {warmup.batch_size}")
    for name, tensor in warmup.inputs.items():
        where = f"{path}.inputs"
        if not tensor.data_type or any(n < 1 for n in tensor.dims):
            raise file.error(where, f"'{name}': expected a data_type and dims from 1")
        _check_inside(file, where, tensor.input_data_file)
        if tensor.WhichOneof("input_data_type") is None:
            raise file.error(where, f"'{name}': expected zero_data, random_data or input_data_file")


def _check_schedule(file: ConfigFile) -> None:
    batching = file.message.dynamic_batching
    path = "dynamic_batching.default_priority_level"
    levels, default = batching.priority_levels, batching.default_priority_level
    if levels > _MAX_LEVELS:
        raise file.error("dynamic_batching.priority_levels", f"expected at most {_MAX_LEVELS}, got {levels}")
    if levels and not 1 <= default <= levels:
        raise file.error(path, f"expected 1 to {levels}, the number of priority_levels, got {default}")


# --- sequences -------------------------------------------------------------------------------------------

_TWO_VALUES = ("int32_false_true", "fp32_false_true", "bool_false_true")
_ID_TYPES = ("TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING")


def _check_sequences(file: ConfigFile, backend: Backend) -> None:
    config, batching = file.message, file.message.sequence_batching
    names = {tensor.name for tensor in config.input}
    kinds: set[int] = set()
    for number, table in enumerate(batching.control_input):
        path = f"sequence_batching.control_input[{number}]"
        _check_new_name(file, f"{path}.name", table.name, names)
        if len(table.control) != 1:
            raise file.error(f"{path}.control", f"expected one control of '{table.name}', got {len(table.control)}")
        _check_control(file, f"{path}.control", table.control[0], kinds)
    if batching.state and backend.runtime == PYTHON:
        raise file.error("sequence_batching.state", "not supported by Python models: keep it by its correlation_id()")
    for number, state in enumerate(batching.state):
        path = f"sequence_batching.state[{number}]"
        _check_new_name(file, f"{path}.input_name", state.input_name, names)
        if not state.output_name:
            raise file.error(f"{path}.output_name", "expected the name of the output that is the next state")
        if not state.data_type or not state.dims or not all(map(_is_dim, state.dims)):
            raise file.error(path, f"'{state.input_name}': expected a data_type and dims from 1, or -1 for any length")
        _check_initial_state(file, f"{path}.initial_state", state)


def _check_new_name(file: ConfigFile, path: str, name: str, names: set[str]) -> None:
    if not name:
        raise file.error(path, "expected the name of an input of the model")
    if name in names:
        raise file.error(path, f"expected unique names, got '{name}' twice")
    names.add(name)


def _check_control(file: ConfigFile, path: str, control: Any, kinds: set[int]) -> None:
    if control.kind in kinds:
        raise file.error(f"{path}.kind", f"expected each kind once, got {_enum_name(control, 'kind')} twice")
    kinds.add(control.kind)
    if control.kind == control.CONTROL_SEQUENCE_CORRID:
        kind = _enum_name(control, "data_type")
        if kind not in _ID_TYPES:
            raise file.error(f"{path}.data_type", f"expected one of {', '.join(_ID_TYPES)}, got {kind}")
        return
    fields = [name for name in _TWO_VALUES if len(getattr(control, name))]
    if len(fields) != 1 or len(getattr(control, fields[0])) != 2:
        raise file.error(path, "expected two values, such as int32_false_true: [ 0, 1 ]")


def _enum_name(message: Any, field: str) -> str:
    values = message.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number
    return str(values[getattr(message, field)].name)


def _check_initial_state(file: ConfigFile, path: str, state: Any) -> None:
    if len(state.initial_state) > 1:
        raise file.error(path, f"expected one initial state, got {len(state.initial_state)}")
    for initial in state.initial_state:
        if initial.data_type and initial.data_type != state.data_type:
            raise file.error(f"{path}.data_type", f"expected that of the state '{state.input_name}'")
        if len(initial.dims) != len(state.dims) or any(
            n < 1 or wanted not in (-1, n) for n, wanted in zip(initial.dims, state.dims, strict=True)
        ):
            raise file.error(f"{path}.dims", f"expected the dims {list(state.dims)}, got {list(initial.dims)}")
        if "/" in initial.data_file or initial.data_file == "..":
            raise file.error(f"{path}.data_file", "expected the name of a file in the folder initial_state")
        if initial.WhichOneof("state_data") is None:
            raise file.error(path, "expected zero_data or data_file")


# --- ensembles -------------------------------------------------------------------------------------------


def _check_ensemble(file: ConfigFile) -> None:
    config = file.message
    for name in ("instance_group", "model_warmup", "optimization"):
        if name in {descriptor.name for descriptor, _ in config.ListFields()}:
            raise file.error(name, "not allowed in an ensemble: set it in its steps")
    steps = config.ensemble_scheduling.step
    if not steps:
        raise file.error("ensemble_scheduling", "expected one step or more")
    produced = {tensor.name for tensor in config.input}
    for path, tensor in _step_outputs(file):
        if tensor in produced:
            raise file.error(path, f"expected tensors that nothing else produces, got '{tensor}'")
        produced.add(tensor)
    used = {tensor for step in steps for tensor in step.input_map.values()}
    for side, tensors, known, verb in (
        ("input", config.input, used, "used"),
        ("output", config.output, produced, "produced"),
    ):
        for number, tensor in enumerate(tensors):
            if tensor.name not in known:
                raise file.error(f"{side}[{number}]", f"'{tensor.name}' is not {verb} by any step")
    if missing := used - produced:
        raise file.error("ensemble_scheduling", f"no step and no input produces {', '.join(sorted(missing))}")


def _step_outputs(file: ConfigFile) -> Iterator[tuple[str, str]]:
    """Yield each tensor that a step produces, with the path of its field. Raises InvalidInput for incomplete steps."""
    for number, step in enumerate(file.message.ensemble_scheduling.step):
        path = f"ensemble_scheduling.step[{number}]"
        if not step.model_name:
            raise file.error(f"{path}.model_name", "expected the name of a model")
        if "/" in step.model_name:
            raise file.error(f"{path}.model_name", f"expected the name of a model, got '{step.model_name}'")
        for side in ("input_map", "output_map"):
            if not getattr(step, side):
                raise file.error(f"{path}.{side}", "expected a pair of tensors or more")
        for tensor in step.output_map.values():
            yield f"{path}.output_map", tensor
