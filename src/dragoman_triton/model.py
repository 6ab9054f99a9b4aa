"""A model file of another runtime with the names, datatypes, shapes and batch limit of its `config.pbtxt`."""

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dragoman import plugins
from dragoman.core.calls import Infer, Inference
from dragoman.core.errors import DragomanError, InvalidOutput, ModelFailed
from dragoman.core.metrics import Family
from dragoman.core.model import Model
from dragoman.core.signature import Shape, Signature, TensorSpec
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Parameters, Tensor, with_own_dtype
from dragoman_triton import model_file
from dragoman_triton.sequences import SequenceInputs
from dragoman_triton.tensors import Configuration, ConfiguredTensor

_POSITION = re.compile(r".*__(\d+)")
_FILE = "config.pbtxt"
# Runtimes whose models may keep a state for each row of a batch.
_ROW_STATES = ("torch", "tensorflow")


class ConfiguredModel(Model):
    """The model of a version folder, loaded by the runtime of its backend.

    Inputs and outputs are those of the configuration, which must agree with the file; without any, those of the file.
    """

    merges = 0

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        runtime = str(spec.parameters["backend"])
        options = {n: p["string_value"] for n, p in spec.parameters["config"].get("parameters", {}).items()}
        inner = replace(
            spec,
            runtime=runtime,
            uri=str(model_file(spec)),
            platform="",
            parameters=_runtime_parameters(runtime, options, spec.parameters["config"]),
        )
        self._model = plugins.runtime(runtime).load(inner)
        self._config = Configuration(spec.parameters["config"])
        self._sequences: SequenceInputs | None = None
        self._warmup: Infer | None = None
        self._is_positional = runtime == "torch"
        self.placement = self._model.placement

    def load(self) -> None:
        if inspect.iscoroutinefunction(self._model.load) or not inspect.ismethod(self._model.infer):
            raise ModelFailed(f"models of this kind are not configured by '{_FILE}': describe it in a dragoman.toml")
        self._model.load()
        self.kind, self.description = self._model.kind, self._model.description
        signature = self._model.signature()
        folder, config = Path(str(self.spec.parameters["source"])).parent, self.spec.parameters["config"]
        hidden_inputs: tuple[ConfiguredTensor, ...] = ()
        hidden_outputs: tuple[ConfiguredTensor, ...] = ()
        if "sequence_batching" in config:
            self._sequences = SequenceInputs(config, folder, keeps_rows=self.spec.parameters["backend"] in _ROW_STATES)
            hidden_inputs, hidden_outputs = self._sequences.inputs(), self._sequences.outputs()
        self._inputs, self._input_names = self._match("input", self._config.inputs, hidden_inputs, signature)
        self._outputs, self._output_names = self._match("output", self._config.outputs, hidden_outputs, signature)
        self._order = signature.output_names  # of a runtime that returns a tuple
        self._signature = Signature(
            tuple(t.spec for t in self._inputs.values() if t not in hidden_inputs),
            tuple(t.spec for t in self._outputs.values() if t in self._config.outputs or t not in hidden_outputs),
            open_outputs=not self._outputs and signature.open_outputs,
            batched=self._config.max_batch_size > 0 or (not self._config.inputs and signature.batched),
            outputs_are_hints=not self._config.outputs and signature.outputs_are_hints,
        )
        for name, call in self._config.warmup_calls(folder):
            self._warmup = self._warmup or call
            try:
                self.infer(call)
            except DragomanError as error:
                raise ModelFailed(f"warm-up request '{name}': {error.message}") from error

    def signature(self) -> Signature:
        return self._signature

    def details(self) -> Mapping[str, Any]:
        return self._model.details()

    def example_inputs(self) -> Mapping[str, Any] | None:
        """Return the inputs of the first warm-up request."""
        return None if self._warmup is None else {name: tensor.data for name, tensor in self._warmup.inputs.items()}

    def class_labels(self) -> Mapping[str, Sequence[str]]:
        labels = self._model.class_labels()
        return {ours: labels[theirs] for ours, theirs in self._output_names.items() if theirs in labels}

    def measurements(self) -> Iterable[Family]:
        return self._model.measurements()

    def unavailable(self) -> str:
        return self._model.unavailable()

    def close(self) -> Any:
        return self._model.close()

    def infer(self, call: Infer) -> Inference:
        rows = self._config.rows(call)
        names = call.outputs or self._signature.output_names
        if self._sequences is None:
            return self._compute(call.inputs, names, call.parameters, rows)
        names = (*names, *(name for name in self._sequences.state_outputs if name not in names))
        result = self._sequences.infer(
            call, rows, lambda inputs, count: self._compute(inputs, names, call.parameters, count)
        )
        return Inference(
            {n: result.outputs[n] for n in call.outputs or self._signature.output_names}, result.parameters
        )

    def _compute(
        self, given: Mapping[str, Tensor], wanted: Sequence[str], parameters: Parameters, rows: int
    ) -> Inference:
        """Return the outputs for the inputs of a batch, all by the names of the configuration."""
        inputs = {self._input_names[n]: self._inputs[n].to_model(t) for n, t in given.items()}
        names = tuple(self._output_names[name] for name in wanted)
        result: Any = self._model.infer(Infer(inputs, names, parameters))
        by_name = _outputs_by_name(result, self._order or names)
        outputs: dict[str, Tensor] = {}
        for name, theirs in zip(wanted, names, strict=True):
            if theirs not in by_name:
                raise InvalidOutput(f"output '{name}' is missing: the model returned {', '.join(map(repr, by_name))}")
            outputs[name] = self._outputs[name].to_client(by_name[theirs])
            if self._config.max_batch_size and outputs[name].shape[0] != rows:
                raise InvalidOutput(f"output '{name}': expected {rows} rows, got {outputs[name].shape[0]}")
        return Inference(outputs, result.parameters) if isinstance(result, Inference) else Inference(outputs)

    def _match(
        self,
        side: str,
        configured: Sequence[ConfiguredTensor],
        hidden: Sequence[ConfiguredTensor],
        signature: Signature,
    ) -> tuple[dict[str, ConfiguredTensor], dict[str, str]]:
        """Return the tensors of the configuration and the `hidden` ones by name, and their names in the model.

        Raises ModelFailed if they differ from those of the model.
        """
        theirs = signature.inputs if side == "input" else signature.outputs
        if not configured:
            own = {t.spec.name for t in hidden}
            is_hint = side == "output" and signature.outputs_are_hints
            configured = [ConfiguredTensor.from_spec(t, is_hint=is_hint) for t in theirs if t.name not in own]
        declared = {t.spec.name for t in configured}
        configured = [*configured, *(t for t in hidden if t.spec.name not in declared)]
        names = [tensor.spec.name for tensor in configured]
        is_open = signature.open_inputs if side == "input" else signature.open_outputs
        matched = self._model_names(side, names, [t.name for t in theirs])
        by_name = {t.name: t for t in theirs}
        for tensor, name in zip(configured, matched, strict=True):
            if name in by_name:
                _check_agreement(side, tensor, by_name[name], has_batch_axis=self._config.max_batch_size > 0)
            elif not is_open:
                expected = ", ".join(f"'{t.name}'" for t in theirs) or "none"
                raise ModelFailed(f"'{_FILE}': unexpected {side} '{tensor.spec.name}': the model has {expected}")
        if side == "input":
            missing = [t.name for t in theirs if t.name not in matched and not t.optional]
            if missing:
                raise ModelFailed(f"'{_FILE}': expected {len(theirs)} inputs, got {len(matched)}; missing {missing}")
        return {t.spec.name: t for t in configured}, dict(zip(names, matched, strict=True))

    def _model_names(self, side: str, names: list[str], theirs: list[str]) -> list[str]:
        """Return the names in the model. Those of a TorchScript program may be `NAME__INDEX`, else in its order."""
        if not self._is_positional or (side == "input" and set(names) <= set(theirs)):
            return names
        positions = [int(m[1]) if (m := _POSITION.fullmatch(name)) else -1 for name in names]
        if -1 in positions:
            positions = list(range(len(names)))
        if side == "output" and not theirs:  # a dict of any names
            return names
        for name, position in zip(names, positions, strict=True):
            if position >= len(theirs):
                raise ModelFailed(f"'{_FILE}': {side} '{name}': the model has {len(theirs)} {side}s")
        return [theirs[position] for position in positions]


def _runtime_parameters(runtime: str, options: Mapping[str, str], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of our runtime for those of the configuration. Raises ModelFailed."""
    if runtime != "onnx":
        return dict(options)
    optimization = config.get("optimization", {})
    level = optimization.get("graph", {}).get("level", 0)
    accelerators = optimization.get("execution_accelerators", {})
    providers = [
        *(each["name"] for each in accelerators.get("gpu_execution_accelerator", ())),
        *(each["name"] for each in accelerators.get("cpu_execution_accelerator", ())),
    ]
    given = options.get("providers", "").replace(",", " ").split() or providers
    parameters: dict[str, Any] = {k: v for k, v in options.items() if k != "providers"}
    if given:
        parameters["providers"] = given if "cpu" in given else [*given, "cpu"]  # for operators that a provider lacks
    if level:
        parameters["graph_optimization_level"] = {-1: "basic", 1: "extended", 2: "disabled"}.get(level, "all")
    return parameters


def _check_agreement(side: str, tensor: ConfiguredTensor, theirs: TensorSpec, *, has_batch_axis: bool) -> None:
    """Raise ModelFailed unless the tensor of the file has the configured datatype and shape."""
    name = f"'{_FILE}': {side} '{tensor.spec.name}'"
    if theirs.datatype is not None and theirs.datatype is not tensor.spec.datatype:
        raise ModelFailed(f"{name}: the model expects datatype {theirs.datatype}, got {tensor.spec.datatype}")
    if theirs.shape is None:
        return
    if has_batch_axis and theirs.shape[:1] != (-1,):
        raise ModelFailed(
            f"{name}: the first axis of the model, {list(theirs.shape)}, is not free: expected max_batch_size 0"
        )
    if not _is_compatible(tensor.inner or (), theirs.shape):
        shape = list(theirs.shape[has_batch_axis:])
        raise ModelFailed(f"{name}: the model expects dims {shape}, got {list((tensor.inner or ())[has_batch_axis:])}")


def _is_compatible(configured: Shape, theirs: Shape) -> bool:
    return len(configured) == len(theirs) and all(b == -1 or a == b for a, b in zip(configured, theirs, strict=True))


def _outputs_by_name(result: Any, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the outputs of a runtime by name; a tuple or one array is in the order of `names`."""
    if isinstance(result, Inference):
        result = result.outputs
    if not isinstance(result, Mapping):
        values = result if isinstance(result, tuple) else (result,)
        result = dict(zip(names, values, strict=False))
    return {n: with_own_dtype(v) if isinstance(v, Tensor) else Tensor.of(v) for n, v in result.items()}
