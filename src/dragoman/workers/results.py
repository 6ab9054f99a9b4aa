"""Check the results of model methods, convert them to responses, and copy arrays that the model may reuse."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from dragoman.core.binding import check_tensor
from dragoman.core.calls import (
    ApplyHessian,
    ApplyJacobian,
    Call,
    Embed,
    Embedded,
    Generate,
    Gradient,
    Infer,
    Inference,
)
from dragoman.core.datatypes import FP64, Array, widens
from dragoman.core.errors import InvalidInput, InvalidOutput
from dragoman.core.scoring import Score, Scored
from dragoman.core.signature import OPEN, Signature, TensorSpec
from dragoman.core.sizes import INLINE
from dragoman.core.tensor import NONE, Parameters, Tensor, with_own_dtype
from dragoman.core.text import Generation


def inference(result: Any, call: Infer, signature: Signature) -> Inference:
    """Return the response with the requested outputs, in the model's order.

    `result` may be an `Inference`, a mapping of names, a tuple in the order of the signature, or one array.
    Raises InvalidOutput that names the output, the expected and the actual value.
    """
    sole = signature.sole  # a fast path for models with one output
    if sole is not None and (not call.outputs or call.outputs == signature.output_names) and not call.content_types:
        one = result.get(sole.name) if type(result) is dict and len(result) == 1 else result
        if type(one) is Tensor:
            data, datatype = one.data, one.datatype
            if datatype is sole.datatype and data.dtype is datatype.dtype and sole.fits(data.shape):
                return Inference({sole.name: one})
        if type(one) is np.ndarray:
            return Inference({sole.name: _check_output(sole.name, one, sole, signature)})
    encodes_outputs = not signature.unchecked  # otherwise the model itself has encoded them
    if signature.unchecked:
        signature = OPEN
    rest: tuple[Parameters, Mapping[str, str], bool] = (NONE, {}, False)
    if isinstance(result, Inference):
        rest = (result.parameters, result.metadata, result.is_last)
    outputs = _named_outputs(result, signature)
    requested = call.outputs or (
        _returned_outputs(outputs, signature) if signature.outputs_are_hints else signature.default_outputs
    )
    all_requested = signature.open_outputs and not call.outputs
    tensors = {
        n: _check_output(n, v, signature.output(n), signature)
        for n, v in outputs.items()
        if all_requested or n in requested
    }
    for name in requested:
        if name not in tensors:
            spec = signature.output(name)
            if spec is None or not (spec.optional and signature.open_outputs):
                raise _missing_output(name, outputs, signature)
    response = Inference(tensors, *rest)
    if call.content_types and encodes_outputs:
        from dragoman.codecs.decode import encode_outputs_as  # few calls need codecs

        return encode_outputs_as(response, call.content_types)
    return response


def _returned_outputs(outputs: Mapping[str, Any], signature: Signature) -> Collection[str]:
    """Return the names of the outputs that a call gets if it requests none and the declared ones are hints.

    These are all that the model returned, but those that are computed on request.
    """
    returned = frozenset(n for n in outputs if (spec := signature.output(n)) is None or not spec.optional)
    return returned or signature.default_outputs


def _named_outputs(result: Any, signature: Signature) -> Mapping[str, Any]:
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
    """Return the vector in `result`, an array, a list or a scalar. Raises InvalidOutput if its length is wrong.

    Gradient and ApplyHessian have the length of the (first) input, ApplyJacobian that of the output.
    """
    call_type = type(call).__name__
    try:
        vector = np.asarray(result.data if isinstance(result, Tensor) else result, np.float64).reshape(-1)
    except (TypeError, ValueError) as error:
        raise InvalidOutput(
            f"{call_type}: expected a vector of numbers, got {type(result).__name__}: {error}"
        ) from error
    if isinstance(call, ApplyJacobian):
        side, name = "output", str(call.output)
        spec = signature.output(name)
    else:
        side, name = "input", str(call.input if isinstance(call, Gradient) else call.input1)
        spec = signature.input(name)
    size = spec.shape[-1] if spec is not None and spec.shape else -1
    if size not in (-1, len(vector)):
        raise InvalidOutput(f"{call_type}: expected {size} numbers, as {side} '{name}' has, got {len(vector)}")
    return Tensor(vector, FP64)


def generation(result: Any, call: Generate, signature: Signature) -> Generation:
    """Return a chunk or the whole of a generation. Raises InvalidOutput if it does not match the prompts."""
    if not isinstance(result, Generation):
        raise InvalidOutput(f"Generate: expected a Generation, got {type(result).__name__}")
    count = len(call.prompts)
    known = range(count)
    for text in result.texts:
        if text.prompt not in known:
            raise InvalidOutput(f"Generate: expected completions of prompts 0 to {count - 1}, got prompt {text.prompt}")
    if not call.stream and (prompt_count := len({text.prompt for text in result.texts})) < count:
        raise InvalidOutput(f"Generate: expected completions of {count} prompts, got {prompt_count}")
    return result


def embeddings(result: Any, call: Embed, signature: Signature) -> Embedded:
    """Return the embeddings. Raises InvalidOutput unless there is one vector for each input."""
    if not isinstance(result, Embedded):
        raise InvalidOutput(f"Embed: expected Embedded, got {type(result).__name__}")
    shape = result.vectors.shape
    if len(shape) != 2 or shape[0] != len(call.inputs):
        raise InvalidOutput(f"Embed: expected vectors of shape [{len(call.inputs)}, dimension], got {list(shape)}")
    return result


def scores(result: Any, call: Score, signature: Signature) -> Scored:
    """Return the scores. Raises InvalidOutput unless there is one for each pair."""
    if not isinstance(result, Scored):
        raise InvalidOutput(f"Score: expected Scored, got {type(result).__name__}")
    if len(result.scores) != len(call.pairs):
        raise InvalidOutput(f"Score: expected {len(call.pairs)} scores, got {len(result.scores)}")
    return result


def return_unchanged(result: Any, call: Any, signature: Signature) -> Any:
    """Return the result of a method whose result is the response."""
    return result


def _positional(values: tuple[Any, ...], signature: Signature) -> Iterable[tuple[str, Any]]:
    names = signature.output_names
    if names and len(values) > len(names):
        raise InvalidOutput(f"expected {len(names)} outputs, got {len(values)}")
    return zip(names or (f"output-{i}" for i in range(len(values))), values, strict=False)


def _check_output(name: Any, value: Any, spec: TensorSpec | None, signature: Signature) -> Tensor:
    if spec is None and not _is_name(name):
        raise InvalidOutput(f"expected non-empty strings as names of outputs, got {name!r}")
    datatype = spec.datatype if spec is not None else None
    try:
        if spec is not None and signature.outputs_are_hints:
            return _as_returned(value, spec)
        # A BytesTensor always has the right dtype.
        if type(value) is Tensor and value.data.dtype is not value.datatype.dtype:
            value = with_own_dtype(value)
        if isinstance(value, Tensor) and datatype in (None, value.datatype):
            tensor = value
        elif isinstance(value, Tensor):
            tensor = Tensor.of(value.data, datatype, value.parameters)
        else:
            tensor = Tensor.of(value, datatype)
        if spec is not None:
            check_tensor(tensor, spec, "output")
    except InvalidInput as error:
        text = error.message
        raise InvalidOutput(text if text.startswith("output '") else f"output '{name}': {text}") from error
    return tensor


def _as_returned(value: Any, spec: TensorSpec) -> Tensor:
    """Return the tensor of an output whose spec is a hint: in the declared datatype only if that loses nothing."""
    if isinstance(value, Tensor):  # a BytesTensor always has the right dtype
        tensor = with_own_dtype(value) if type(value) is Tensor else value
    else:
        tensor = Tensor.of(value)
    if spec.datatype is not None and widens(tensor.datatype, spec.datatype):
        return Tensor.of(tensor.data, spec.datatype, tensor.parameters)
    return tensor


def _is_name(name: Any) -> bool:
    try:
        return isinstance(name, str) and bool(name.encode())
    except UnicodeEncodeError:
        return False


def _missing_output(name: str, outputs: Mapping[str, Any], signature: Signature) -> InvalidInput | InvalidOutput:
    """Return the error for a requested output that the model did not return."""
    returned = ", ".join(map(repr, outputs)) or "none"
    if signature.output(name) is None:  # the model declares no outputs, so the request could not be checked before
        return InvalidInput(f"unexpected inference output '{name}': expected one of {returned}")
    return InvalidOutput(f"output '{name}' is missing: the model returned {returned}")


# --- copies ----------------------------------------------------------------------------------------------


def copy_outputs(response: Any, call: Call[Any]) -> Any:
    """Return the response with a copy of each array that a later call could change.

    Tensors of the call, and large arrays that are part of one or lie in immutable memory (`bytes`), are not copied.
    """
    if type(response) is not Inference:
        if isinstance(response, Tensor):
            return Tensor(response.data.copy(), response.datatype, response.parameters)
        return response
    inputs = call.inputs.values() if type(call) is Infer else ()
    outputs: Any = response.outputs  # a dict of this module, which the model does not have
    for name, tensor in outputs.items():
        if tensor not in inputs and type(tensor) is Tensor:  # the model does not have the array of a BytesTensor
            data = tensor.data
            if data.nbytes <= INLINE or not _is_safe(data, inputs):
                outputs[name] = Tensor(data.copy(), tensor.datatype, tensor.parameters)
    return response


def _is_safe(data: Array, inputs: Collection[Tensor]) -> bool:
    """Return whether the model cannot write to an array: it lies in `bytes`, or is part of an input of the call."""
    owner = _owner(data)
    return type(owner) is bytes or any(_owner(tensor.data) is owner for tensor in inputs if type(tensor) is Tensor)


def _owner(data: Array) -> Any:
    owner: Any = data
    while (base := getattr(owner, "base", None)) is not None:
        owner = base
    return owner
