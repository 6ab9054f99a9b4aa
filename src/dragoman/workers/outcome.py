"""Results of model methods, checked and converted to responses."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dragoman.core.binding import check_tensor
from dragoman.core.calls import ApplyHessian, ApplyJacobian, Embed, Embedded, Generate, Gradient, Infer, Inference
from dragoman.core.datatypes import FP64
from dragoman.core.errors import InvalidInput, InvalidOutput
from dragoman.core.signature import OPEN, Signature
from dragoman.core.tensor import NONE, Parameters, Tensor, with_own_dtype
from dragoman.core.text import Generation


def inference(result: Any, call: Infer, signature: Signature) -> Inference:
    """The answer in `result`, with the outputs that the call wants, in the model's order.

    `result` may be an `Inference`, a mapping of names, a tuple in the order of the signature, or one array.
    Raises InvalidOutput naming the output, what was expected and what came.
    """
    sole = signature.sole  # what most models give, in few steps
    if sole is not None and (not call.outputs or call.outputs == signature.output_names) and not call.content_types:
        one = result.get(sole.name) if type(result) is dict and len(result) == 1 else result
        if type(one) is Tensor:
            data, datatype = one.data, one.datatype
            if datatype is sole.datatype and data.dtype is datatype.dtype and sole.fits(data.shape):
                return Inference({sole.name: one})
        if type(one) is np.ndarray:
            return Inference({sole.name: _checked(sole.name, one, signature)})
    if signature.unchecked:
        signature = OPEN
    parameters: Parameters = NONE
    metadata: Mapping[str, str] = {}
    if isinstance(result, Inference):
        parameters, metadata = result.parameters, result.metadata
    named = _named(result, signature)
    wanted = call.outputs or signature.default_outputs
    every = signature.open_outputs and not call.outputs
    tensors = {name: _checked(name, value, signature) for name, value in named.items() if every or name in wanted}
    for name in wanted:
        if name not in tensors:
            raise _missing(name, named, signature)
    answer = Inference(tensors, parameters, metadata)
    if call.content_types:
        from dragoman.codecs.decode import encode_requested  # few calls need codecs

        return encode_requested(answer, call.content_types)
    return answer


def _named(result: Any, signature: Signature) -> Mapping[str, Any]:
    match result:
        case Tensor() | np.ndarray():
            return {signature.output_names[0] if signature.outputs else "output-0": result}
        case Inference():
            return result.outputs
        case Mapping():
            return result
        case tuple():
            return dict(_positional(result, signature))
        case None:
            raise InvalidOutput("expected outputs, got None")
    return dict(_positional((result,), signature))


def derivative(result: Any, call: Gradient | ApplyJacobian | ApplyHessian, signature: Signature) -> Tensor:
    """The vector in `result`, an array, a list or a scalar. Raises InvalidOutput where it is not that long.

    Gradient and ApplyHessian give as many numbers as the (first) input has, ApplyJacobian as many as the output.
    """
    verb = type(call).__name__
    try:
        vector = np.asarray(result.data if isinstance(result, Tensor) else result, np.float64).reshape(-1)
    except (TypeError, ValueError) as fault:
        raise InvalidOutput(f"{verb}: expected a vector of numbers, got {type(result).__name__}: {fault}") from fault
    if isinstance(call, ApplyJacobian):
        side, name = "output", str(call.output)
        spec = signature.output(name)
    else:
        side, name = "input", str(call.input if isinstance(call, Gradient) else call.input1)
        spec = signature.input(name)
    wanted = spec.shape[-1] if spec is not None and spec.shape else -1
    if wanted not in (-1, len(vector)):
        raise InvalidOutput(f"{verb}: expected {wanted} numbers, as {side} '{name}' has, got {len(vector)}")
    return Tensor(vector, FP64)


def generation(result: Any, call: Generate, signature: Signature) -> Generation:
    """The piece of text, or the whole, in `result`. Raises InvalidOutput where it is none, or not for these prompts."""
    if not isinstance(result, Generation):
        raise InvalidOutput(f"Generate: expected a Generation, got {type(result).__name__}")
    told = {text.prompt for text in result.texts}
    strange = told - set(range(len(call.prompts)))
    if strange:
        raise InvalidOutput(f"Generate: there are {len(call.prompts)} prompts, but it told of prompt {min(strange)}")
    if not call.stream and len(told) < len(call.prompts):
        raise InvalidOutput(f"Generate: {len(call.prompts)} prompts were to be continued, and {len(told)} were")
    return result


def embedded(result: Any, call: Embed, signature: Signature) -> Embedded:
    """The vectors in `result`, one for each input. Raises InvalidOutput where they are not that."""
    if not isinstance(result, Embedded):
        raise InvalidOutput(f"Embed: expected Embedded, got {type(result).__name__}")
    shape = result.vectors.shape
    if len(shape) != 2 or shape[0] != len(call.inputs):
        raise InvalidOutput(f"Embed: expected vectors of shape [{len(call.inputs)}, dimension], got {list(shape)}")
    return result


def as_it_is(result: Any, call: Any, signature: Signature) -> Any:
    """Return the result of a method whose result is the response."""
    return result


def _positional(values: tuple[Any, ...], signature: Signature) -> Iterable[tuple[str, Any]]:
    names = signature.output_names
    if names and len(values) > len(names):
        raise InvalidOutput(f"expected {len(names)} outputs, got {len(values)}")
    return zip(names or (f"output-{i}" for i in range(len(values))), values, strict=False)


def _checked(name: Any, value: Any, signature: Signature) -> Tensor:
    spec = signature.output(name)
    if spec is None and not _is_name(name):
        raise InvalidOutput(f"expected names of outputs that are text and not empty, got {name!r}")
    wanted = spec.datatype if spec is not None else None
    try:
        if type(value) is Tensor:  # a BytesTensor cannot be wrong
            value = with_own_dtype(value)
        if isinstance(value, Tensor) and wanted in (None, value.datatype):
            tensor = value
        elif isinstance(value, Tensor):
            tensor = Tensor.of(value.data, wanted, value.parameters)
        else:
            tensor = Tensor.of(value, wanted)
        if spec is not None:
            check_tensor(tensor, spec, "output")
    except InvalidInput as fault:
        text = fault.message
        raise InvalidOutput(text if text.startswith("output '") else f"output '{name}': {text}") from fault
    return tensor


def _is_name(name: Any) -> bool:
    try:
        return isinstance(name, str) and bool(name.encode())
    except UnicodeEncodeError:
        return False


def _missing(name: str, named: Mapping[str, Any], signature: Signature) -> InvalidInput | InvalidOutput:
    """Whose fault it is that an output is not there."""
    there = ", ".join(map(repr, named)) or "none"
    if signature.output(name) is None:  # the model does not tell its outputs, so only now it shows
        return InvalidInput(f"unexpected inference output '{name}'; the model gives {there}")
    return InvalidOutput(f"output '{name}' is missing; the model gave {there}")
