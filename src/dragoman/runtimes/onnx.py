"""ONNX graphs, run by ONNX Runtime."""

import ctypes
import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dragoman.codecs.elements import strings
from dragoman.core.calls import Infer
from dragoman.core.datatypes import BF16, BYTES, DATATYPES, Array, Datatype
from dragoman.core.errors import ModelFailed
from dragoman.core.model import Model
from dragoman.core.runtime import Runtime
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.tensor import Tensor
from dragoman.runtimes.files import model_path

log = logging.getLogger("dragoman.model")

# Datatypes by ONNX's names of element types. https://onnx.ai/onnx/repo-docs/IR.html, "Tensor Element Types"
_DATATYPES: Mapping[str, Datatype] = {
    "bool": DATATYPES["BOOL"],
    "float16": DATATYPES["FP16"],
    "bfloat16": BF16,
    "float": DATATYPES["FP32"],
    "double": DATATYPES["FP64"],
    "string": BYTES,
    **{f"int{bits}": DATATYPES[f"INT{bits}"] for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": DATATYPES[f"UINT{bits}"] for bits in (8, 16, 32, 64)},
}
_ONNX_BFLOAT16 = 16  # TensorProto.DataType.BFLOAT16


class OnnxModel(Model):
    """A graph with its own names, datatypes and shapes; its strings are BYTES in UTF-8.

    `parameters.providers` names execution providers of ONNX Runtime; the CPU by default. An output that is not a tensor
    (a classifier's list of maps) is omitted with a warning; a graph without other outputs is rejected.
    """

    platform = "onnx_onnxv1"

    def load(self) -> None:
        ort = RUNTIME.require("onnxruntime")
        path = model_path(self.spec)
        providers = list(self.spec.parameters.get("providers", ("CPUExecutionProvider",)))
        try:
            self._session = ort.InferenceSession(path, providers=providers)
        except Exception as error:  # ONNX Runtime's errors share no class of their own.
            raise ModelFailed(f"'{path.name}' cannot be loaded by ONNX Runtime: {error}") from error
        self._values = ort.OrtValue
        self._signature = _signature(self._session, path.name)
        self._has_bf16 = any(s.datatype is BF16 for s in (*self._signature.inputs, *self._signature.outputs))

    def signature(self) -> Signature:
        return self._signature

    def infer(self, call: Infer) -> Mapping[str, Array]:
        names = list(call.outputs) or [s.name for s in self._signature.outputs]
        if self._has_bf16:
            return self._infer_bf16(call, names)
        feed = {name: _to_onnx(name, tensor) for name, tensor in call.inputs.items()}
        return dict(zip(names, self._session.run(names, feed), strict=True))

    def _infer_bf16(self, call: Infer, names: list[str]) -> Mapping[str, Array]:
        """Infer through ONNX Runtime's own values, because `run` accepts no bfloat16 array."""
        feed = {name: self._value(name, tensor) for name, tensor in call.inputs.items()}
        values = self._session.run_with_ort_values(names, feed)
        return {name: _from_onnx(value) for name, value in zip(names, values, strict=True)}

    def _value(self, name: str, tensor: Tensor) -> Any:
        if tensor.datatype is BF16:
            bits = np.ascontiguousarray(tensor.data).view(np.uint16)
            return self._values.ortvalue_from_numpy_with_onnx_type(bits, _ONNX_BFLOAT16)
        return self._values.ortvalue_from_numpy(_to_onnx(name, tensor))


def _to_onnx(name: str, tensor: Tensor) -> Array:
    return strings(tensor, name) if tensor.datatype is BYTES else tensor.data


def _from_onnx(value: Any) -> Array:
    if value.data_type() != "tensor(bfloat16)":
        array: Array = value.numpy()
        return array
    shape = tuple(value.shape())
    # The value owns its memory: the copy is taken while `value` lives.
    bits = ctypes.string_at(value.data_ptr(), 2 * math.prod(shape)) if math.prod(shape) else b""
    return np.frombuffer(bits, dtype=BF16.dtype).reshape(shape)


def _signature(session: Any, file: str) -> Signature:
    inputs = [(node, _datatype(node.type)) for node in session.get_inputs()]
    for node, datatype in inputs:
        if datatype is None:
            raise ModelFailed(f"'{file}': input '{node.name}' is {node.type}; only tensors can be served")
    outputs = [node for node in session.get_outputs() if _datatype(node.type) is not None]
    omitted = [f"'{node.name}' ({node.type})" for node in session.get_outputs() if _datatype(node.type) is None]
    if omitted:
        advice = "outputs that are no tensors cannot be served; export a classifier with zipmap=False"
        if not outputs:
            raise ModelFailed(f"'{file}': {', '.join(omitted)}: {advice}")
        log.warning("'%s': left out %s: %s", file, ", ".join(omitted), advice)
    nodes = [node for node, _ in inputs]
    return Signature(
        inputs=tuple(_spec(node) for node in nodes),
        outputs=tuple(_spec(node) for node in outputs),
        batched=_share_rows([*nodes, *outputs]),
    )


def _datatype(onnx_type: str) -> Datatype | None:
    return _DATATYPES.get(onnx_type.removeprefix("tensor(").removesuffix(")"))


def _spec(node: Any) -> TensorSpec:
    shape = tuple(n if isinstance(n, int) and n >= 0 else -1 for n in node.shape)
    return TensorSpec(node.name, _datatype(node.type), shape)


def _share_rows(nodes: Iterable[Any]) -> bool:
    """Return whether the first axis of every tensor is dynamic and the same: of one name, or all unnamed."""
    first = {node.shape[0] if node.shape else 0 for node in nodes}
    return len(first) == 1 and not isinstance(first.pop(), int)


RUNTIME = Runtime(load=OnnxModel, packages=("onnxruntime",), extra="onnx", suffixes=(".onnx",), placement="thread")
