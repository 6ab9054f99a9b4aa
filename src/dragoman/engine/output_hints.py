"""Correct the outputs that a file declares by those that its model returns.

Exporters declare wrong shapes, such as [1, -1] for an output of three axes; the frameworks warn and serve the result.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace

from dragoman.core.calls import Tensors
from dragoman.core.signature import Shape, Signature, TensorSpec
from dragoman.core.tensor import Tensor

log = logging.getLogger("dragoman.engine")


class OutputHints:
    """The outputs of one model, as declared and as returned so far.

    A declaration that is contradicted is widened: a free axis for another length, the real number of axes with all of
    them free for another rank, any rank if that varies. An undeclared datatype or rank is that of the first response.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._varies: set[tuple[str, str]] = set()  # names of outputs, with "datatype" or "rank"
        self._observed: set[str] = set()  # names of outputs that were returned
        self._logged: set[str] = set()

    def correct(self, signature: Signature, outputs: Tensors) -> Signature:
        """Return the signature with the outputs of a response; the same object if they are as declared."""
        declared = {spec.name: spec for spec in signature.outputs}
        if all(name in declared and self._is_settled(declared[name], t) for name, t in outputs.items()):
            return signature
        corrected = {name: self._correct(name, declared.get(name), t) for name, t in outputs.items()}
        specs = (*(corrected.pop(name, spec) for name, spec in declared.items()), *corrected.values())
        return signature if specs == signature.outputs else replace(signature, outputs=specs)

    def _is_settled(self, spec: TensorSpec, tensor: Tensor) -> bool:
        if spec.name not in self._observed:
            return False
        has_datatype = spec.datatype is tensor.datatype or (spec.name, "datatype") in self._varies
        has_rank = spec.shape is not None or (spec.name, "rank") in self._varies
        return has_datatype and has_rank and spec.fits(tensor.shape)

    def _correct(self, name: str, spec: TensorSpec | None, tensor: Tensor) -> TensorSpec:
        if spec is None:
            self._log(name, "it was not declared", tensor)
            self._observed.add(name)
            return TensorSpec(name, tensor.datatype, (-1,) * len(tensor.shape))
        is_first = name not in self._observed
        self._observed.add(name)
        datatype, shape = spec.datatype, spec.shape
        if (name, "datatype") not in self._varies and datatype is not tensor.datatype:
            if datatype is not None:
                self._log(name, f"declared as {datatype}", tensor)
            datatype = tensor.datatype if is_first or datatype is None else None
            if datatype is None:
                self._varies.add((name, "datatype"))
        if (name, "rank") not in self._varies and not (shape is not None and spec.fits(tensor.shape)):
            if shape is not None:
                self._log(name, f"declared with the shape {list(shape)}", tensor)
            has_one_rank = is_first or shape is None or len(shape) == len(tensor.shape)
            shape = _widen(shape, tensor.shape) if has_one_rank else None
            if shape is None:
                self._varies.add((name, "rank"))
        return replace(spec, datatype=datatype, shape=shape)

    def _log(self, name: str, declared: str, tensor: Tensor) -> None:
        """Log the first contradiction of an output."""
        if name not in self._logged:
            self._logged.add(name)
            log.warning(
                "metadata corrected: model=%s output=%s %s, returned %s%s",
                self._model, name, declared, tensor.datatype, list(tensor.shape),
            )  # fmt: skip


def _widen(declared: Shape | None, returned: Shape) -> Shape:
    """Return a shape that both fit, with the number of axes of the returned one."""
    if declared is None or len(declared) != len(returned):
        return (-1,) * len(returned)
    return tuple(n if n == m else -1 for n, m in zip(declared, returned, strict=True))


def share_rows(inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> bool:
    """Return whether every tensor has the same number of rows, as those of a model whose calls may be merged."""
    counts = {tensor.shape[:1] for tensor in (*inputs.values(), *outputs.values())}
    return len(counts) == 1 and () not in counts
