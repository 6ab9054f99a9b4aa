"""PyTorch programs: TorchScript archives and programs of torch.export."""

import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dragoman.core.calls import ApplyHessian, ApplyJacobian, DerivativeCall, Gradient, Infer
from dragoman.core.datatypes import BF16, BYTES, DATATYPES, FP32, Array, Datatype
from dragoman.core.errors import InvalidInput, InvalidOutput, ModelFailed
from dragoman.core.model import Model, Result
from dragoman.core.runtime import Runtime
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor
from dragoman.core.vector_binding import vector_signature
from dragoman.runtimes.files import check_pickle, model_path

# Datatypes by PyTorch's names.
_DATATYPES: Mapping[str, Datatype] = {
    "torch.bool": DATATYPES["BOOL"],
    "torch.float16": DATATYPES["FP16"],
    "torch.bfloat16": BF16,
    "torch.float32": DATATYPES["FP32"],
    "torch.float64": DATATYPES["FP64"],
    **{f"torch.int{bits}": DATATYPES[f"INT{bits}"] for bits in (8, 16, 32, 64)},
    **{f"torch.uint{bits}": DATATYPES[f"UINT{bits}"] for bits in (8, 16, 32, 64)},
}


class TorchModel(Model):
    """A program of torch.jit (.pt, .pth, .ts) or of torch.export (.pt2), on the CPU.

    Inputs have the names of forward's arguments. An output that is a tensor or a tuple is `output-0`,
    `output-1`, ...; one that is a dict has its keys. TorchScript declares neither datatypes nor shapes, nor
    whether rows are independent: calls are merged only if the operator sets `max_batch_size`.
    """

    merges = 0

    def load(self) -> None:
        path = model_path(self.spec)
        if path.suffix == ".pt2":
            # torch.export.load falls back to plain pickle for constants and sample inputs.
            check_pickle(path, self.spec)
        self._torch = RUNTIME.require("torch")
        if path.suffix == ".pt2":
            self.platform = "pytorch_export"
            program = _load_export(self._torch, path)
            self._module = program.module()
            self._signature, self._positional = _export_signature(program, path)
        else:
            self.platform = "pytorch_torchscript"
            self._module = _load_script(self._torch, path)
            self._signature = _script_signature(self._module, path, self.spec)
            self._positional = 0
        self._offer_derivatives()

    def signature(self) -> Signature:
        return self._signature

    def infer(self, call: Infer) -> Result:
        known = [spec.name for spec in self._signature.inputs]
        inputs = {name: self._to_torch(name, tensor) for name, tensor in call.inputs.items()}
        # Inputs renamed by the operator are in the order of the program.
        if not inputs.keys() <= set(known):
            inputs = dict(zip(known, inputs.values(), strict=False))
        with self._torch.inference_mode():
            return self._result(self._run(inputs))

    def _run(self, inputs: dict[str, Any]) -> Any:
        arguments = [inputs.pop(spec.name) for spec in self._signature.inputs[: self._positional]]
        return self._module(*arguments, **inputs)

    # --- derivatives -----------------------------------------------------------------------------------------

    def _offer_derivatives(self) -> None:
        """Add derivatives if all tensors are float vectors of known lengths, by the file or by the operator."""
        signature = replace(
            self._signature,
            inputs=self.spec.inputs or self._signature.inputs,
            outputs=self.spec.outputs or self._signature.outputs,
        )
        self._vector_signature = vector_signature(signature)
        if self._vector_signature is None or len(signature.inputs) != len(self._signature.inputs):
            return
        shapes = [spec.shape for spec in self._vector_signature.inputs]
        dtypes = [
            self._torch.float32 if spec.datatype is FP32 else self._torch.float64
            for spec in self._vector_signature.inputs
        ]
        from dragoman.derivatives.torch import ModuleDerivatives  # it imports torch

        self._derivatives: Any = ModuleDerivatives(
            self._forward, shapes, dtypes, scripted=self.platform == "pytorch_torchscript"
        )
        for name in ("gradient", "apply_jacobian", "apply_hessian"):
            setattr(self, name, getattr(self, f"_{name}"))

    def details(self) -> Mapping[str, Any]:
        if "gradient" not in vars(self):
            return {}
        single = (
            any(spec.datatype is FP32 for spec in self._vector_signature.inputs) if self._vector_signature else False
        )
        source = "torch (float32)" if single else "torch"
        return {"derivatives": dict.fromkeys(("gradient", "apply_jacobian", "apply_hessian"), source)}

    def _forward(self, *tensors: Any) -> tuple[Any, ...]:
        """Return the outputs for the inputs, both in order."""
        names = [spec.name for spec in self._signature.inputs]
        result = self._run(dict(zip(names, tensors, strict=True)))
        if isinstance(result, dict) and self._vector_signature:
            return tuple(result[spec.name] for spec in self._vector_signature.outputs)
        return (result,) if isinstance(result, self._torch.Tensor) else tuple(result)

    def _gradient(self, call: Gradient) -> Any:
        return self._derivatives.gradient(*self._indices_and_inputs(call, call.input), call.sens.data)

    def _apply_jacobian(self, call: ApplyJacobian) -> Any:
        return self._derivatives.apply_jacobian(*self._indices_and_inputs(call, call.input), call.vec.data)

    def _apply_hessian(self, call: ApplyHessian) -> Any:
        return self._derivatives.apply_hessian(
            *self._indices_and_inputs(call, call.input1, call.input2), call.sens.data, call.vec.data
        )

    def _indices_and_inputs(self, call: DerivativeCall, *inputs: str | int) -> tuple[Any, ...]:
        """Return the index of the output, the indices of inputs, and the input vectors."""
        assert self._vector_signature is not None
        names, outputs = (
            [s.name for s in self._vector_signature.inputs],
            [s.name for s in self._vector_signature.outputs],
        )
        vectors = [call.inputs[name].data for name in names]
        return (outputs.index(str(call.output)), *(names.index(str(name)) for name in inputs), vectors)

    def _to_torch(self, name: str, tensor: Tensor) -> Any:
        if tensor.datatype is BYTES:
            raise InvalidInput(f"input '{name}': PyTorch has no strings; expected numbers, got BYTES")
        array = tensor.data.view(np.uint16) if tensor.datatype is BF16 else tensor.data
        # PyTorch shares the memory of the array and has no read-only tensors.
        if not array.flags.writeable or any(stride < 0 for stride in array.strides):
            array = array.copy()
        shared = self._torch.from_numpy(array)
        return shared.view(self._torch.bfloat16) if tensor.datatype is BF16 else shared

    def _result(self, result: Any) -> Result:
        match result:
            case self._torch.Tensor():
                return (self._to_numpy(result),)
            case dict():
                return {str(name): self._to_numpy(value) for name, value in result.items()}
            case tuple() | list():
                return tuple(self._to_numpy(value) for value in result)
        raise InvalidOutput(f"expected a tensor, or a tuple or dict of tensors, got {type(result).__name__}")

    def _to_numpy(self, value: Any) -> Array:
        if not isinstance(value, self._torch.Tensor):
            raise InvalidOutput(f"expected a tensor, got {type(value).__name__} inside the output")
        value = value.detach().cpu()
        if value.dtype == self._torch.bfloat16:
            array: Array = value.view(self._torch.uint16).numpy().view(BF16.dtype)
        else:
            array = value.resolve_conj().resolve_neg().numpy()
        return array


# --- TorchScript -----------------------------------------------------------------------------------------


def _load_script(torch: Any, path: Path) -> Any:
    if not _is_torchscript(path):
        raise ModelFailed(
            f"'{path.name}' is not a TorchScript archive; if it holds a state_dict or a pickled module, save the "
            "network with torch.export.save(torch.export.export(...), 'model.pt2') or "
            "torch.jit.script(network).save(...), or build it in a model.py that loads the weights"
        )
    with warnings.catch_warnings():
        # The deprecation concerns the author of the file.
        warnings.filterwarnings("ignore", message="`torch.jit.load` is deprecated", category=DeprecationWarning)
        return torch.jit.load(path, map_location="cpu").eval()


def _is_torchscript(path: Path) -> bool:
    """Return whether a file is a TorchScript archive, which holds code and constants, not pickled weights."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        # The first folder of every name is the archive's own name.
        names = {name.partition("/")[2] for name in archive.namelist()}
    return "constants.pkl" in names and any(name.startswith("code/") for name in names)


def _script_signature(module: Any, path: Path, spec: ModelSpec) -> Signature:
    schema = module.forward.schema
    inputs = []
    for argument in schema.arguments[1:]:  # the first one is the module itself
        optional = argument.has_default_value()
        if str(argument.type) in ("Tensor", "Optional[Tensor]"):
            inputs.append(TensorSpec(argument.name, optional=optional))
        elif not optional:
            raise ModelFailed(
                f"'{path.name}': argument '{argument.name}' of forward is {argument.type}; expected a tensor"
            )
    outputs = _script_outputs(schema.returns[0].type)
    return Signature(
        tuple(inputs), outputs, open_outputs=not outputs, batched=spec.max_batch_size > 1, outputs_are_hints=True
    )


def _script_outputs(kind: Any) -> tuple[TensorSpec, ...]:
    """Return the outputs by position; none if the program returns a dict, whose keys are unknown."""
    if kind.kind() == "TensorType":
        return (TensorSpec("output-0"),)
    if kind.kind() == "TupleType":
        return tuple(TensorSpec(f"output-{i}") for i, _ in enumerate(kind.elements()))
    return ()


# --- torch.export ----------------------------------------------------------------------------------------


def _load_export(torch: Any, path: Path) -> Any:
    try:
        return torch.export.load(path)
    except Exception as error:  # torch.export documents no class of error
        raise ModelFailed(f"'{path.name}' cannot be loaded by torch.export.load: {error}") from error


def _export_signature(program: Any, path: Path) -> tuple[Signature, int]:
    """Return the signature and the number of positional inputs; the others are keyword arguments."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    positional, keywords = program.call_spec.in_spec.children()
    leaves = [*positional.children(), *keywords.children()]
    inputs = program.graph_signature.user_inputs
    if any(not leaf.is_leaf() for leaf in leaves) or any(not hasattr(values.get(n), "dtype") for n in inputs):
        raise ModelFailed(f"'{path.name}': expected one tensor for every argument of the exported program")
    outputs = _output_names(program.call_spec.out_spec, path)
    named = [*zip(_input_names(inputs, positional, keywords), inputs, strict=True)]
    named_out = [*zip(outputs, program.graph_signature.user_outputs, strict=True)]
    rows = {_rows(values.get(node)) for _, node in (*named, *named_out)}
    signature = Signature(
        inputs=tuple(_tensor_spec(name, values[node]) for name, node in named),
        outputs=tuple(_tensor_spec(name, values.get(node)) for name, node in named_out),
        batched=len(rows) == 1 and "" not in rows,
        outputs_are_hints=True,
    )
    return signature, len(positional.children())


def _input_names(inputs: tuple[str, ...], positional: Any, keywords: Any) -> list[str]:
    count = len(positional.children())
    return [*inputs[:count], *(keywords.context or ())]


def _output_names(out_spec: Any, path: Path) -> list[str]:
    leaves = out_spec.children()
    if out_spec.is_leaf():
        return ["output-0"]
    if any(not leaf.is_leaf() for leaf in leaves):
        raise ModelFailed(f"'{path.name}': the exported program gives nested outputs; expected a tuple or dict")
    return [str(k) for k in out_spec.context] if out_spec.type is dict else [f"output-{i}" for i in range(len(leaves))]


def _tensor_spec(name: str, value: Any) -> TensorSpec:
    if not hasattr(value, "dtype"):
        return TensorSpec(name)
    shape = tuple(n if isinstance(n, int) else -1 for n in value.shape)
    return TensorSpec(name, _DATATYPES.get(str(value.dtype)), shape)


def _rows(value: Any) -> str:
    """Return the symbol of a tensor's first axis; "" if it is fixed or missing."""
    shape = getattr(value, "shape", ())
    return str(shape[0]) if shape and not isinstance(shape[0], int) else ""


RUNTIME = Runtime(
    load=TorchModel,
    packages=("torch",),
    extra="torch",
    suffixes=(".pt2",),
    shared_suffixes=(".pt", ".pth", ".ts"),
    is_model_file=_is_torchscript,
    expected=(
        "a program of TorchScript or torch.export, not weights or a module that torch.save has pickled; write one by "
        "torch.jit.script(module).save(file) or torch.export.save(program, 'model.pt2')"
    ),
    placement="thread",
)
