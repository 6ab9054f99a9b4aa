"""Bind calls about vectors: positions become names; counts, lengths and indices are checked."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import structs

from dragoman.core.binding import check_tensor
from dragoman.core.calls import ApplyHessian, ApplyJacobian, Call, DerivativeCall, Gradient, Infer, Inference, Tensors
from dragoman.core.datatypes import FP32, FP64, Array, Datatype
from dragoman.core.documents import parse_json
from dragoman.core.errors import InvalidInput, InvalidOutput, NotSupported
from dragoman.core.signature import Shape, Signature, TensorSpec
from dragoman.core.tensor import Tensor
from dragoman.core.vectors import Ability, Config

_CHUNK = 1 << 20  # performance only: numbers compared at a time, so that the result takes little memory


class VectorSpec(msgspec.Struct, frozen=True):
    """One input or output as a vector of `size` numbers; `shape` and `datatype` are the model's, for one point."""

    name: str
    size: int
    shape: Shape
    datatype: Datatype


class VectorSignature(msgspec.Struct, frozen=True):
    """A model as a vector function: its required inputs and its outputs, in order."""

    inputs: tuple[VectorSpec, ...]
    outputs: tuple[VectorSpec, ...]

    def input(self, name: str) -> VectorSpec:
        return next(spec for spec in self.inputs if spec.name == name)

    def output(self, name: str) -> VectorSpec:
        return next(spec for spec in self.outputs if spec.name == name)


_ABILITIES: Mapping[type[Call[Any]], Ability] = {
    Gradient: "gradient",
    ApplyJacobian: "apply_jacobian",
    ApplyHessian: "apply_hessian",
}


def missing_reason(details: Mapping[str, Any], call: type[Call[Any]]) -> str:
    """Return why a model does not support a call about derivatives, for the end of a message; "" if it is not known."""
    reason = details.get("missing_derivatives", {}).get(_ABILITIES.get(call))
    return f": {reason}" if reason else ""


def vector_signature(signature: Signature) -> VectorSignature | None:
    """Return the vectors of a model; None unless all its tensors are float vectors of known sizes.

    If the first axis counts rows, a vector is one row.
    """
    if signature.open_inputs or signature.open_outputs or signature.unchecked or not signature.outputs:
        return None
    sides = [
        tuple(_vector(spec, signature.batched) for spec in specs if not spec.optional)
        for specs in (signature.inputs, signature.outputs)
    ]
    inputs, outputs = (tuple(spec for spec in side if spec is not None) for side in sides)
    complete = (len(inputs), len(outputs)) == (len(sides[0]), len(sides[1])) and outputs
    return VectorSignature(inputs, outputs) if complete else None


def _vector(spec: TensorSpec, batched: bool) -> VectorSpec | None:
    if spec.shape is None or spec.datatype not in (FP32, FP64):
        return None
    if batched:
        point, shape = spec.shape[1:], (1, *spec.shape[1:])
        is_vector = spec.shape[:1] == (-1,) and len(point) <= 1
    else:
        point = shape = spec.shape
        is_vector = len(point) == 1
    if not is_vector or -1 in point:
        return None
    return VectorSpec(spec.name, math.prod(point), shape, spec.datatype)


# --- a call -----------------------------------------------------------------------------------------------


def bind_evaluation(call: Infer, signature: VectorSignature | None, model: str) -> Infer:
    """Return the call with its positional vectors as named tensors of one point.

    Raises InvalidInput naming the vector, and NotSupported if the model is not a vector function.
    """
    if signature is None:
        raise NotSupported(_not_vectors(model))
    positional: Sequence[Tensor] = call.positional or ()
    inputs: dict[str, Tensor] = {}
    if len(positional) == 1 == len(signature.inputs):  # the usual case, without conversion
        tensor, spec = positional[0], signature.inputs[0]
        if tensor.datatype is spec.datatype and tensor.data.shape == spec.shape == (spec.size,):
            inputs = {spec.name: tensor}
    if not inputs:
        positional = _check_sizes(positional, signature, model)
        inputs = {spec.name: _point(tensor, spec) for tensor, spec in zip(positional, signature.inputs, strict=True)}
    return Infer(inputs, call.outputs, call.parameters, None, None, call.config, call.content_types)


def bind_derivative(call: DerivativeCall, signature: VectorSignature | None, model: str) -> DerivativeCall:
    """Return the call with names for positions; every vector is FP64 with one axis. Raises as `bind_evaluation`."""
    if signature is None:
        raise NotSupported(_not_vectors(model))
    inputs = _named_inputs(call, signature, model)
    output = _find(call.output, signature.outputs, "output (outWrt)")
    match call:
        case Gradient():
            by = _find(call.input, signature.inputs, "input (inWrt)")
            sens = _finite_vector(call.sens, output, "sens", "output")
            return Gradient(inputs=inputs, output=output.name, config=call.config, input=by.name, sens=sens)
        case ApplyJacobian():
            by = _find(call.input, signature.inputs, "input (inWrt)")
            vec = _finite_vector(call.vec, by, "vec", "input")
            return ApplyJacobian(inputs=inputs, output=output.name, config=call.config, input=by.name, vec=vec)
        case ApplyHessian():
            by1 = _find(call.input1, signature.inputs, "input1 (inWrt1)")
            by2 = _find(call.input2, signature.inputs, "input2 (inWrt2)")
            sens = _finite_vector(call.sens, output, "sens", "output")
            vec = _finite_vector(call.vec, by2, "vec", "input")
            names = {"output": output.name, "input1": by1.name, "input2": by2.name}
            return structs.replace(call, inputs=inputs, positional=None, **names, sens=sens, vec=vec)
    raise NotImplementedError(type(call).__name__)


def _named_inputs(call: DerivativeCall, signature: VectorSignature, model: str) -> Tensors:
    if call.positional is not None:
        if len(call.positional) == 1 == len(signature.inputs):  # the usual case
            tensor, spec = call.positional[0], signature.inputs[0]
            if tensor.data.shape == (spec.size,):
                return {spec.name: tensor}
        tensors = _check_sizes(call.positional, signature, model)
        return {spec.name: tensor for spec, tensor in zip(signature.inputs, tensors, strict=True)}
    inputs = call.inputs
    for name in inputs:
        if all(spec.name != name for spec in signature.inputs):
            raise InvalidInput(
                f"unexpected input '{name}' for model '{model}'; expected {_quote_sizes(signature.inputs)}"
            )
    _check_count(list(inputs), signature, model)
    return {spec.name: _vector_of(inputs[spec.name], spec, "input") for spec in signature.inputs}


def _check_count(inputs: Sequence[object], signature: VectorSignature, model: str) -> None:
    if len(inputs) != len(signature.inputs):
        raise InvalidInput(
            f"expected {len(signature.inputs)} input vectors for model '{model}' ({_quote_sizes(signature.inputs)}), "
            f"got {len(inputs)}"
        )


def _check_sizes(inputs: Sequence[Tensor], signature: VectorSignature, model: str) -> Sequence[Tensor]:
    """Return the vectors. Raises InvalidInput unless their number and sizes are those of the model's inputs."""
    _check_count(inputs, signature, model)
    for index, (tensor, spec) in enumerate(zip(inputs, signature.inputs, strict=True)):
        if tensor.data.shape != (spec.size,):
            got = str(tensor.data.size) if tensor.data.ndim == 1 else f"shape {list(tensor.data.shape)}"
            raise InvalidInput(f"input {index} ('{spec.name}'): expected {spec.size} numbers, got {got}")
    return inputs


def _point(tensor: Tensor, spec: VectorSpec) -> Tensor:
    """Return the vector in the datatype and shape of the model, as its only row if it has rows."""
    if tensor.datatype is not spec.datatype:
        try:
            tensor = Tensor.of(tensor.data, spec.datatype)
        except InvalidInput as error:
            raise InvalidInput(f"input '{spec.name}': {error.message}") from error
    if tensor.data.shape == spec.shape:
        return tensor
    return Tensor(tensor.data.reshape(spec.shape), tensor.datatype)


def _find(index: str | int, specs: Sequence[VectorSpec], what: str) -> VectorSpec:
    if isinstance(index, str):
        for spec in specs:
            if spec.name == index:
                return spec
        raise InvalidInput(f"{what}: expected one of {_quote_sizes(specs)}, got '{index}'")
    if not 0 <= index < len(specs):
        span = f"an index from 0 to {len(specs) - 1}" if specs else "none, since the model has none"
        raise InvalidInput(f"{what}: expected {span}, got {index}")
    return specs[index]


def _vector_of(tensor: Tensor, spec: VectorSpec, what: str) -> Tensor:
    """Return an FP64 vector of the size of that input or output; a single row is accepted."""
    data, size, name = tensor.data, spec.size, spec.name
    if tensor.datatype is FP64 and data.shape == (size,):
        return tensor
    if tensor.datatype not in (FP32, FP64):
        raise InvalidInput(f"{what} '{name}': expected datatype FP64, got {tensor.datatype}")
    if data.shape == (1, size):
        data = data.reshape(size)
    if data.shape != (size,):
        got = str(data.size) if data.ndim == 1 else f"shape {list(data.shape)}"
        raise InvalidInput(f"{what} '{name}': expected {size} numbers, got {got}")
    return Tensor(np.asarray(data, np.float64), FP64)


def _finite_vector(tensor: Tensor, spec: VectorSpec, field: str, side: str) -> Tensor:
    """Return `sens` or `vec`. A derivative is linear in both, so NaN or infinity in them has no meaningful result."""
    vector = _vector_of(tensor, spec, f"{field}, for {side}")
    require_finite(vector.data, field)
    return vector


def is_finite(array: Array) -> bool:
    """Return whether no number of a float array is NaN or infinite."""
    flat = array.reshape(-1)
    if flat.size <= _CHUNK:  # half the time of `all()` for few numbers
        return bool(np.count_nonzero(np.isfinite(flat)) == flat.size)
    return all(np.isfinite(flat[start : start + _CHUNK]).all() for start in range(0, flat.size, _CHUNK))


def require_finite(array: Array, where: str) -> None:
    """Raise InvalidInput that names the first NaN or infinity of a float array."""
    if not is_finite(array):
        flat = array.reshape(-1)
        index = int(np.argmin(np.isfinite(flat)))
        raise InvalidInput(f"{where}[{index}]: expected a finite number, got {flat[index]}")


def _quote_sizes(specs: Sequence[VectorSpec]) -> str:
    return ", ".join(f"'{spec.name}' of {spec.size}" for spec in specs) or "none"


def _not_vectors(model: str) -> str:
    return (
        f"model '{model}' does not support Evaluate: not all its tensors are float vectors of known sizes; "
        "for a Python function declare them by @dragoman.vector_function(inputs={...})"
    )


# --- config and results ------------------------------------------------------------------------------------


def config_in(call: Infer) -> Infer:
    """Return the call with its parameter `config`, a JSON object as text, as its config."""
    parameters = dict(call.parameters)
    text = parameters.pop("config")
    try:
        config = parse_json(text) if isinstance(text, str) else text
    except ValueError as error:
        raise InvalidInput(
            f"parameter 'config': expected JSON text of an object, got {text!r:.100}: {error}"
        ) from error
    if not isinstance(config, dict):
        raise InvalidInput(f"parameter 'config': expected JSON text of an object, got {text!r:.100}")
    return structs.replace(call, parameters=parameters, config=config or call.config)


def config_key(config: Config) -> str:
    """Return the same text for equal configs."""
    return json.dumps(config, sort_keys=True, default=repr) if config else ""


def check_answer(
    answer: Inference | Tensor, call: Infer | DerivativeCall, signature: Signature, vectors: VectorSignature
) -> None:
    """Raise InvalidOutput unless a result has the sizes that the model declares for the call's config."""
    if isinstance(answer, Inference):
        for name, tensor in answer.outputs.items():
            spec = signature.output(name)
            try:
                if spec is not None:
                    check_tensor(tensor, spec, "output")
            except InvalidInput as error:
                raise InvalidOutput(error.message) from error
        return
    match call:
        case ApplyJacobian():
            size, what = vectors.output(str(call.output)).size, f"output '{call.output}'"
        case Gradient():
            size, what = vectors.input(str(call.input)).size, f"input '{call.input}'"
        case ApplyHessian():
            size, what = vectors.input(str(call.input1)).size, f"input '{call.input1}'"
        case _:
            return
    if answer.data.shape != (size,):
        verb = type(call).__name__
        raise InvalidOutput(f"{verb}: expected {size} numbers, as {what} has, got {answer.data.size}")
