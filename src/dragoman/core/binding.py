"""Binds a call to a signature, as Python binds arguments: here alone names, datatypes and shapes are checked."""

from dataclasses import replace

from dragoman.core.calls import Infer
from dragoman.core.errors import InvalidInput
from dragoman.core.signature import Shape, Signature, TensorSpec
from dragoman.core.tensor import Tensor


def bind(call: Infer, signature: Signature, model: str) -> Infer:
    """The call with its inputs in the signature's order, or InvalidInput saying which tensor does not fit.

    Each message names the tensor, what was expected and what came.
    """
    _check_names(call, signature, model)
    for spec in signature.inputs:
        tensor = call.inputs.get(spec.name)
        if tensor is not None:
            check_tensor(tensor, spec, "input")
    if signature.batched:
        _check_rows(call)
    _check_outputs(call, signature, model)
    return _in_order(call, signature)


def check_tensor(tensor: Tensor, spec: TensorSpec, what: str) -> None:
    """InvalidInput unless the tensor has the datatype and shape of its spec; `what` is "input" or "output"."""
    if spec.datatype is not None and tensor.datatype is not spec.datatype and tensor.datatype not in spec.accepts:
        raise InvalidInput(f"{what} '{spec.name}': expected datatype {spec.datatype}, got {tensor.datatype}")
    if spec.shape is not None and not _fits(tensor.data.shape, spec.shape):
        raise InvalidInput(f"{what} '{spec.name}': expected shape {list(spec.shape)}, got {list(tensor.data.shape)}")


def _fits(shape: Shape, wanted: Shape) -> bool:
    return len(shape) == len(wanted) and all(w in (-1, n) for n, w in zip(shape, wanted, strict=True))


def _check_names(call: Infer, signature: Signature, model: str) -> None:
    known = {spec.name for spec in signature.inputs}
    if not signature.open_inputs:
        for name in call.inputs:
            if name not in known:
                raise InvalidInput(
                    f"unexpected inference input '{name}' for model '{model}'; expected {_listed(signature.inputs)}"
                )
    missing = [s for s in signature.inputs if not s.optional and s.name not in call.inputs]
    if missing:
        raise InvalidInput(
            f"expected {len(signature.inputs)} inputs but got {len(call.inputs)} inputs for model '{model}'; "
            f"missing {_listed(tuple(missing))}"
        )


def _check_rows(call: Infer) -> None:
    rows: dict[str, int] = {}
    for name, tensor in call.inputs.items():
        if not tensor.data.shape:
            raise InvalidInput(f"input '{name}': expected a batch axis, got shape []")
        rows[name] = tensor.data.shape[0]
    if len(set(rows.values())) > 1:
        raise InvalidInput(f"inputs of one batch need the same number of rows, got {rows}")


def _check_outputs(call: Infer, signature: Signature, model: str) -> None:
    seen: set[str] = set()
    for name in call.outputs:
        if name in seen:
            raise InvalidInput(f"output '{name}' already exists in request")
        seen.add(name)
        if not signature.open_outputs and signature.output(name) is None:
            raise InvalidInput(
                f"unexpected inference output '{name}' for model '{model}'; expected " + _listed(signature.outputs)
            )


def _in_order(call: Infer, signature: Signature) -> Infer:
    order = [s.name for s in signature.inputs if s.name in call.inputs]
    order += [name for name in call.inputs if signature.input(name) is None]
    if order == list(call.inputs):
        return call
    return replace(call, inputs={name: call.inputs[name] for name in order})


def _listed(specs: tuple[TensorSpec, ...]) -> str:
    return ", ".join(f"'{s.name}'" for s in specs) or "none"
