"""Bind a call to a signature, like Python binds arguments: the only place that checks names, datatypes and shapes."""

import math

import numpy as np
from msgspec import structs

from dragoman.core import error_texts
from dragoman.core.bytes_tensor import flatten
from dragoman.core.calls import Infer
from dragoman.core.datatypes import BOOL, BYTES, Array, Datatype
from dragoman.core.errors import InvalidInput
from dragoman.core.signature import OPEN, Shape, Signature, TensorSpec
from dragoman.core.tensor import Tensor, object_array


def bind(call: Infer, signature: Signature, model: str) -> Infer:
    """Return the call with its inputs checked and in the signature's order.

    Raises InvalidInput that names the tensor, what was expected and what was sent.
    """
    if call.raw is not None:
        call = structs.replace(call, inputs=_from_raw(call.raw, signature, model), raw=None)
    if signature.unchecked:
        signature = OPEN
    if signature.decodes and (signature.content_type or "content_type" in call.parameters):
        _check_outputs(call, signature, model)
        return call
    inputs = call.inputs
    if inputs.keys() != signature.input_name_set:
        _check_names(call, signature, model)
    for spec in signature.inputs:
        tensor = inputs.get(spec.name)
        if tensor is not None:
            if tensor.parameters and _is_column(tensor, spec):
                tensor = flatten(tensor)
                call = structs.replace(call, inputs={**call.inputs, spec.name: tensor})
            check_tensor(tensor, spec, "input")
    if signature.batched:
        _check_rows(call)
    if call.outputs and call.outputs != signature.output_names:
        _check_outputs(call, signature, model)
    return _sort_inputs(call, signature) if len(inputs) > 1 else call


def check_tensor(tensor: Tensor, spec: TensorSpec, what: str) -> None:
    """Raise InvalidInput unless a tensor has the datatype and shape of its spec; `what` is "input" or "output"."""
    if spec.datatype is not None and tensor.datatype is not spec.datatype and tensor.datatype not in spec.accepts:
        raise InvalidInput(f"{what} '{spec.name}': expected datatype {spec.datatype}, got {tensor.datatype}")
    # An attribute is faster than the property; a BytesTensor has no array yet.
    if not spec.fits(tensor.data.shape if type(tensor) is Tensor else tensor.shape):
        raise InvalidInput(f"{what} '{spec.name}': expected shape {list(spec.shape or ())}, got {list(tensor.shape)}")


def _check_names(call: Infer, signature: Signature, model: str) -> None:
    if not signature.open_inputs:
        for name in call.inputs:
            if signature.input(name) is None:
                raise InvalidInput(
                    f"unexpected inference input '{name}' for model '{model}'; expected "
                    + _quote_names(signature.inputs)
                )
    missing = [s for s in signature.inputs if s.name not in call.inputs and not s.optional]
    if missing:
        counts = sum(not s.optional for s in signature.inputs), len(signature.inputs)
        raise InvalidInput(error_texts.missing_inputs(model, counts, [*call.inputs], [s.name for s in missing]))


def _is_column(tensor: Tensor, spec: TensorSpec) -> bool:
    """Return whether an input is [N, 1] with a content type and the model takes [N]: codecs treat both alike."""
    return (
        "content_type" in tensor.parameters
        and spec.shape is not None
        and len(spec.shape) == 1
        and tensor.shape[1:] == (1,)
    )


def _check_rows(call: Infer) -> None:
    rows: dict[str, int] = {}
    for name, tensor in call.inputs.items():
        if not tensor.shape:
            raise InvalidInput(f"input '{name}': expected a batch axis, got shape []")
        rows[name] = tensor.shape[0]
    if len(set(rows.values())) > 1:
        raise InvalidInput(f"inputs of one batch need the same number of rows, got {rows}")


def _check_outputs(call: Infer, signature: Signature, model: str) -> None:
    names: set[str] = set()
    for name in call.outputs:
        if name in names:
            raise InvalidInput(f"output '{name}' already exists in request")
        names.add(name)
        if not signature.open_outputs and signature.output(name) is None:
            raise InvalidInput(
                f"unexpected inference output '{name}' for model '{model}'; expected " + _quote_names(signature.outputs)
            )


def _sort_inputs(call: Infer, signature: Signature) -> Infer:
    order = [s.name for s in signature.inputs if s.name in call.inputs]
    order += [name for name in call.inputs if signature.input(name) is None]
    if order == list(call.inputs):
        return call
    return structs.replace(call, inputs={name: call.inputs[name] for name in order})


def _quote_names(specs: tuple[TensorSpec, ...]) -> str:
    return ", ".join(f"'{s.name}'" for s in specs) or "none"


def _from_raw(raw: bytes, signature: Signature, model: str) -> dict[str, Tensor]:
    """Return the single input of a raw request. OIP, binary extension: at most one free axis besides the batch."""
    if signature.open_inputs:
        raise InvalidInput(f"a raw binary request needs a model of one input; model '{model}' has any inputs")
    if len(signature.inputs) != 1:
        names = _quote_names(signature.inputs)
        raise InvalidInput(f"{error_texts.raw_input_count(model, len(signature.inputs))}: {names}")
    spec = signature.inputs[0]
    if spec.datatype is None or spec.shape is None:
        raise InvalidInput(f"a raw binary request needs the datatype and shape of input '{spec.name}' to be known")
    if spec.datatype is BYTES:
        dims = spec.shape[1:] if signature.batched else spec.shape
        if any(n != 1 for n in dims):  # OIP, binary extension: the bytes are the only element
            raise InvalidInput(error_texts.raw_bytes_shape(spec.name, spec.shape))
        array = object_array([raw], (1,) * len(spec.shape))
        array.flags.writeable = False
    else:
        array = _shape_raw(raw, spec, spec.datatype, spec.shape)
    return {spec.name: Tensor(array, spec.datatype)}


def _shape_raw(raw: bytes, spec: TensorSpec, datatype: Datatype, shape: Shape) -> Array:
    if shape.count(-1) > 1:  # the first free axis is the batch, of one row
        shape = (1, *shape[1:]) if shape[0] == -1 else shape
    if shape.count(-1) > 1:
        raise InvalidInput(error_texts.raw_free_axes(spec.name, shape))
    size = math.prod(n for n in shape if n != -1) * datatype.size
    is_filled = len(raw) % size == 0 if -1 in shape and size else len(raw) == size
    if not is_filled:
        raise InvalidInput(f"input '{spec.name}': {len(raw)} bytes do not fill shape {list(shape)} of {datatype}")
    flat = np.frombuffer(raw, np.uint8 if datatype is BOOL else datatype.dtype)
    if datatype is BOOL:
        if flat.size and flat.max() > 1:
            raise InvalidInput(f"input '{spec.name}': expected BOOL bytes of 0 or 1, got {flat.max()}")
        flat = flat.view(np.bool_)
    return flat.reshape(shape)
