"""Binds calls about vectors: positions become names; counts, lengths and indices are checked against the sizes."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import structs

from dragoman.core.binding import check_tensor
from dragoman.core.calls import ApplyHessian, ApplyJacobian, DerivativeCall, Gradient, Infer, Inference, Tensors
from dragoman.core.datatypes import FP32, FP64, Array, Datatype
from dragoman.core.errors import InvalidInput, InvalidOutput, NotSupported
from dragoman.core.signature import Shape, Signature, TensorSpec
from dragoman.core.tensor import Tensor
from dragoman.core.vectors import Config

_CHUNK = 1 << 20  # performance only: numbers compared at a time, so that the result takes little memory


@dataclass(frozen=True, slots=True)
class VectorSpec:
    """One input or output as a vector: `size` numbers, and the shape and datatype that the model has for one point."""

    name: str
    size: int
    shape: Shape
    datatype: Datatype


@dataclass(frozen=True, slots=True)
class VectorSignature:
    """A model as a function of vectors: the inputs that a call must have and the outputs that it gives, in order."""

    inputs: tuple[VectorSpec, ...]
    outputs: tuple[VectorSpec, ...]

    def input(self, name: str) -> VectorSpec:
        return next(spec for spec in self.inputs if spec.name == name)

    def output(self, name: str) -> VectorSpec:
        return next(spec for spec in self.outputs if spec.name == name)


def vector_signature(signature: Signature) -> VectorSignature | None:
    """The model as a function of vectors; None where not all its tensors are float vectors of known sizes.

    Where the first axis counts rows, a vector is one row.
    """
    if signature.open_inputs or signature.open_outputs or signature.unchecked or not signature.outputs:
        return None
    sides = [
        tuple(_vector(spec, signature.batched) for spec in specs if not spec.optional)
        for specs in (signature.inputs, signature.outputs)
    ]
    inputs, outputs = (tuple(spec for spec in side if spec is not None) for side in sides)
    whole = (len(inputs), len(outputs)) == (len(sides[0]), len(sides[1])) and outputs
    return VectorSignature(inputs, outputs) if whole else None


def _vector(spec: TensorSpec, batched: bool) -> VectorSpec | None:
    if spec.shape is None or spec.datatype not in (FP32, FP64):
        return None
    if batched:
        point, shape = spec.shape[1:], (1, *spec.shape[1:])
        known = spec.shape[:1] == (-1,) and len(point) <= 1
    else:
        point = shape = spec.shape
        known = len(point) == 1
    if not known or -1 in point:
        return None
    return VectorSpec(spec.name, math.prod(point), shape, spec.datatype)


# --- a call -----------------------------------------------------------------------------------------------


def bind_evaluation(call: Infer, known: VectorSignature | None, model: str) -> Infer:
    """The call with its positional vectors as named tensors of one point, or InvalidInput saying which does not fit.

    Raises NotSupported where the model is no function of vectors.
    """
    if known is None:
        raise NotSupported(_not_vectors(model))
    given: Sequence[Tensor] = call.positional or ()
    inputs: dict[str, Tensor] = {}
    if len(given) == 1 == len(known.inputs):  # as most are, and plainly what the model takes
        tensor, spec = given[0], known.inputs[0]
        if tensor.datatype is spec.datatype and tensor.data.shape == spec.shape == (spec.size,):
            inputs = {spec.name: tensor}
    if not inputs:
        given = _fitting(given, known, model)
        inputs = {spec.name: _point(tensor, spec) for tensor, spec in zip(given, known.inputs, strict=True)}
    return Infer(inputs, call.outputs, call.parameters, None, None, call.config, call.content_types)


def bind_derivative(call: DerivativeCall, known: VectorSignature | None, model: str) -> DerivativeCall:
    """The call with names for positions, every vector FP64 and of one axis; or InvalidInput, NotSupported as above."""
    if known is None:
        raise NotSupported(_not_vectors(model))
    inputs = _named_inputs(call, known, model)
    output = _named(call.output, known.outputs, "output (outWrt)")
    match call:
        case Gradient():
            by = _named(call.input, known.inputs, "input (inWrt)")
            sens = _finite_vector(call.sens, output, "sens", "output")
            return Gradient(inputs=inputs, output=output.name, config=call.config, input=by.name, sens=sens)
        case ApplyJacobian():
            by = _named(call.input, known.inputs, "input (inWrt)")
            vec = _finite_vector(call.vec, by, "vec", "input")
            return ApplyJacobian(inputs=inputs, output=output.name, config=call.config, input=by.name, vec=vec)
        case ApplyHessian():
            by1 = _named(call.input1, known.inputs, "input1 (inWrt1)")
            by2 = _named(call.input2, known.inputs, "input2 (inWrt2)")
            sens = _finite_vector(call.sens, output, "sens", "output")
            vec = _finite_vector(call.vec, by2, "vec", "input")
            names = {"output": output.name, "input1": by1.name, "input2": by2.name}
            return structs.replace(call, inputs=inputs, positional=None, **names, sens=sens, vec=vec)
    raise NotImplementedError(type(call).__name__)


def _named_inputs(call: DerivativeCall, known: VectorSignature, model: str) -> Tensors:
    if call.positional is not None:
        if len(call.positional) == 1 == len(known.inputs):  # as most are
            tensor, spec = call.positional[0], known.inputs[0]
            if tensor.data.shape == (spec.size,):
                return {spec.name: tensor}
        fitting = _fitting(call.positional, known, model)
        return {spec.name: tensor for spec, tensor in zip(known.inputs, fitting, strict=True)}
    given = call.inputs
    for name in given:
        if all(spec.name != name for spec in known.inputs):
            raise InvalidInput(f"unexpected input '{name}' for model '{model}'; expected {_listed(known.inputs)}")
    _check_count(list(given), known, model)
    return {spec.name: _vector_of(given[spec.name], spec, "input") for spec in known.inputs}


def _check_count(given: Sequence[object], known: VectorSignature, model: str) -> None:
    if len(given) != len(known.inputs):
        raise InvalidInput(
            f"expected {len(known.inputs)} input vectors for model '{model}' ({_listed(known.inputs)}), "
            f"got {len(given)}"
        )


def _fitting(given: Sequence[Tensor], known: VectorSignature, model: str) -> Sequence[Tensor]:
    """The positional vectors, if they are as many and as long as the model's inputs."""
    _check_count(given, known, model)
    for place, (tensor, spec) in enumerate(zip(given, known.inputs, strict=True)):
        if tensor.data.shape != (spec.size,):
            got = str(tensor.data.size) if tensor.data.ndim == 1 else f"shape {list(tensor.data.shape)}"
            raise InvalidInput(f"input {place} ('{spec.name}'): expected {spec.size} numbers, got {got}")
    return given


def _point(tensor: Tensor, spec: VectorSpec) -> Tensor:
    """The vector in the model's own datatype and shape, as its only row where it has rows."""
    if tensor.datatype is not spec.datatype:
        try:
            tensor = Tensor.of(tensor.data, spec.datatype)
        except InvalidInput as error:
            raise InvalidInput(f"input '{spec.name}': {error.message}") from error
    if tensor.data.shape == spec.shape:
        return tensor
    return Tensor(tensor.data.reshape(spec.shape), tensor.datatype)


def _named(index: str | int, wanted: Sequence[VectorSpec], what: str) -> VectorSpec:
    if isinstance(index, str):
        for spec in wanted:
            if spec.name == index:
                return spec
        raise InvalidInput(f"{what}: expected one of {_listed(wanted)}, got '{index}'")
    if not 0 <= index < len(wanted):
        span = f"an index from 0 to {len(wanted) - 1}" if wanted else "none, since the model has none"
        raise InvalidInput(f"{what}: expected {span}, got {index}")
    return wanted[index]


def _vector_of(tensor: Tensor, spec: VectorSpec, what: str) -> Tensor:
    """As many numbers as that input or output has, as one FP64 vector; one row of them will do."""
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


def require_finite(array: Array, where: str) -> None:
    """Raise InvalidInput that names the first NaN or infinity of a float array."""
    flat = array.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        finite = np.isfinite(flat[start : start + _CHUNK])
        if not finite.all():
            index = start + int(np.argmin(finite))
            raise InvalidInput(f"{where}[{index}]: expected a finite number, got {flat[index]}")


def _listed(specs: Sequence[VectorSpec]) -> str:
    return ", ".join(f"'{spec.name}' of {spec.size}" for spec in specs) or "none"


def _not_vectors(model: str) -> str:
    return f"model '{model}' does not support Evaluate: not all its tensors are float vectors of known sizes"


# --- its config, and its answer ---------------------------------------------------------------------------


def config_in(call: Infer) -> Infer:
    """The call with its parameter `config`, JSON text of an object, as its config."""
    parameters = dict(call.parameters)
    text = parameters.pop("config")
    try:
        found = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError) as error:
        raise InvalidInput(
            f"parameter 'config': expected JSON text of an object, got {text!r:.100}: {error}"
        ) from error
    if not isinstance(found, dict):
        raise InvalidInput(f"parameter 'config': expected JSON text of an object, got {text!r:.100}")
    return structs.replace(call, parameters=parameters, config=found or call.config)


def config_key(config: Config) -> str:
    """The same text for the same config."""
    return json.dumps(config, sort_keys=True, default=repr) if config else ""


def check_answer(
    answer: Inference | Tensor, call: Infer | DerivativeCall, signature: Signature, known: VectorSignature
) -> None:
    """InvalidOutput where an answer has not the sizes that the model told for the call's config."""
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
            size, what = known.output(str(call.output)).size, f"output '{call.output}'"
        case Gradient():
            size, what = known.input(str(call.input)).size, f"input '{call.input}'"
        case ApplyHessian():
            size, what = known.input(str(call.input1)).size, f"input '{call.input1}'"
        case _:
            return
    if answer.data.shape != (size,):
        verb = type(call).__name__
        raise InvalidOutput(f"{verb}: expected {size} numbers, as {what} has, got {answer.data.size}")
