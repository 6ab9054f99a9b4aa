"""The tensors of a `config.pbtxt`: signature, batch limit, reshaping, and data of warm-up requests."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dragoman.core import error_texts
from dragoman.core.calls import Infer
from dragoman.core.datatypes import BYTES, Datatype, datatype
from dragoman.core.errors import InvalidInput, InvalidOutput, ModelFailed
from dragoman.core.signature import Shape, Signature, TensorSpec
from dragoman.core.tensor import Tensor, object_array
from dragoman.formats.policy import Policy
from dragoman.formats.raw import tensor_from_raw


def datatype_of(data_type: str) -> Datatype:
    """Return the datatype of `TYPE_FP32` or `TYPE_STRING`."""
    return BYTES if data_type == "TYPE_STRING" else datatype(data_type.removeprefix("TYPE_"))


@dataclass(frozen=True, slots=True)
class ConfiguredTensor:
    """An input or output of a configuration. inner: its shape in the model, with the batch axis, if it has one.

    is_hint: the output is not configured, and the file that declares it may be wrong.
    """

    spec: TensorSpec
    inner: Shape | None
    is_hint: bool = False

    @classmethod
    def parse(cls, table: Mapping[str, Any], *, has_batch_axis: bool) -> "ConfiguredTensor":
        batch = (-1,) if has_batch_axis else ()
        shape = (*batch, *table["dims"])
        inner = (*batch, *table["reshape"]["shape"]) if "reshape" in table else shape
        spec = TensorSpec(table["name"], datatype_of(table["data_type"]), shape, optional=bool(table.get("optional")))
        return cls(spec, inner)

    @classmethod
    def from_spec(cls, spec: TensorSpec, *, is_hint: bool) -> "ConfiguredTensor":
        """Return a tensor of the model itself, which has any datatype and shape that the model declares."""
        return cls(spec, spec.shape, is_hint)

    def to_model(self, tensor: Tensor) -> Tensor:
        """Return an input in the shape that the model expects."""
        return tensor if self.inner == self.spec.shape else _reshape(tensor, self.spec.shape or (), self.inner or ())

    def convert(self, tensor: Tensor, rows: int) -> Tensor:
        """Return an output with the configured datatype and batch axis, where that changes no value.

        Triton sends any datatype and shape, so Python models return INT64 for INT32, or one row without batch axis.
        """
        array, target = tensor.data, self.spec.datatype
        if (
            target is not None
            and target is not tensor.datatype
            and {target.kind, tensor.datatype.kind} <= {"int", "uint"}
        ):
            limits = np.iinfo(target.dtype)
            if not array.size or (limits.min <= int(array.min()) and int(array.max()) <= limits.max):
                tensor = Tensor(array.astype(target.dtype), target)
        if rows == 1 and self.inner and self.inner[0] == -1 and TensorSpec("", None, self.inner[1:]).fits(tensor.shape):
            return Tensor(tensor.data[np.newaxis], tensor.datatype)
        return tensor

    def to_client(self, tensor: Tensor) -> Tensor:
        """Return an output in the configured shape. Raises InvalidOutput if datatype or shape differ."""
        if self.is_hint:
            return tensor
        name, expected = self.spec.name, self.spec.datatype
        if expected is not None and tensor.datatype is not expected:
            raise InvalidOutput(f"output '{name}': expected datatype {expected}, got {tensor.datatype}")
        if not TensorSpec(name, expected, self.inner).fits(tensor.shape):
            raise InvalidOutput(f"output '{name}': expected shape {list(self.inner or ())}, got {list(tensor.shape)}")
        return tensor if self.inner == self.spec.shape else _reshape(tensor, self.inner or (), self.spec.shape or ())


def _reshape(tensor: Tensor, source: Shape, target: Shape) -> Tensor:
    """Return a tensor of shape `source` in the shape `target`, whose free axes have the same lengths in order."""
    free = iter([n for n, wanted in zip(tensor.shape, source, strict=True) if wanted == -1])
    shape = tuple(next(free) if n == -1 else n for n in target)
    return Tensor(tensor.data.reshape(shape), tensor.datatype, tensor.parameters)


class Configuration:
    """The parts of a `config.pbtxt` that are applied at run time."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.name = str(config["name"])
        self.max_batch_size = int(config["max_batch_size"])
        batched = self.max_batch_size > 0
        self.inputs = tuple(ConfiguredTensor.parse(t, has_batch_axis=batched) for t in config["input"])
        self.outputs = tuple(ConfiguredTensor.parse(t, has_batch_axis=batched) for t in config["output"])
        self.is_decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled"))
        self.warmups: Sequence[Mapping[str, Any]] = config.get("model_warmup", ())

    def signature(self, optional_outputs: Collection[str] = ()) -> Signature:
        """Return the configured tensors. `optional_outputs` may be missing from a response, as in Triton."""
        outputs = tuple(replace(t.spec, optional=t.spec.name in optional_outputs) for t in self.outputs)
        is_open = bool(optional_outputs)  # a response has all outputs that the model returned
        inputs = tuple(t.spec for t in self.inputs)
        return Signature(inputs, outputs, open_outputs=is_open, batched=self.max_batch_size > 0)

    def requested_outputs(self, call: Infer) -> tuple[str, ...]:
        """Return the names of the outputs that a call requests. Raises InvalidInput for unknown ones."""
        names = tuple(t.spec.name for t in self.outputs)
        for name in call.outputs:
            if name not in names:
                known = ", ".join(map(repr, names))
                raise InvalidInput(f"unexpected inference output '{name}' for model '{self.name}'; expected {known}")
        return call.outputs or names

    def rows(self, call: Infer) -> int:
        """Return the number of rows of a call, 1 without batch axis. Raises InvalidInput if there are too many."""
        if not self.max_batch_size or not call.inputs:
            return 1
        rows = int(next(iter(call.inputs.values())).shape[0])
        if rows > self.max_batch_size:
            raise InvalidInput(error_texts.too_many_rows(self.name, self.max_batch_size))
        return rows

    def warmup_calls(self, folder: Path) -> Iterator[tuple[str, Infer]]:
        """Yield name and call of each warm-up request, as often as configured. Raises ModelFailed."""
        for warmup in self.warmups:
            batch = (int(warmup["batch_size"]),) if self.max_batch_size else ()
            inputs = {n: _warmup_tensor(n, t, batch, folder / "warmup") for n, t in warmup["inputs"].items()}
            for _ in range(max(1, int(warmup.get("count", 0)))):
                yield str(warmup["name"]), Infer(inputs)


def _warmup_tensor(name: str, table: Mapping[str, Any], batch: Shape, folder: Path) -> Tensor:
    """Return an input of a warm-up request: every row of the batch has the same data."""
    kind, dims = datatype_of(table["data_type"]), tuple(table["dims"])
    if "input_data_file" in table:
        file = folder / str(table["input_data_file"])
        try:
            row = tensor_from_raw(f"input '{name}'", kind, dims, file.read_bytes(), Policy()).data
        except (OSError, InvalidInput) as error:
            raise ModelFailed(f"warm-up input '{name}': '{file.name}' cannot be read: {error}") from error
    elif kind is BYTES:
        row = object_array([b""] * math.prod(dims), dims)
    elif table.get("random_data") and kind.kind == "float":
        row = np.random.default_rng(0).random(dims).astype(kind.dtype)
    elif table.get("random_data"):
        row = np.random.default_rng(0).integers(0, 2, dims).astype(kind.dtype)
    else:
        row = np.zeros(dims, kind.dtype)
    data = np.broadcast_to(row, (*batch, *dims)).copy()
    return Tensor(data, kind)
