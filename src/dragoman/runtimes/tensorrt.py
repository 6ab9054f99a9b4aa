"""TensorRT engines (`.plan`, `.engine`), on an NVIDIA GPU."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dragoman.core.calls import Infer
from dragoman.core.datatypes import BF16, DATATYPES, Array, Datatype
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.model import Model
from dragoman.core.runtime import Runtime
from dragoman.core.signature import Shape, Signature, TensorSpec
from dragoman.core.tensor import Tensor
from dragoman.runtimes.files import check_pickle, model_path

# Datatypes by TensorRT's names.
_DATATYPES: Mapping[str, Datatype] = {
    "BOOL": DATATYPES["BOOL"],
    "HALF": DATATYPES["FP16"],
    "BF16": BF16,
    "FLOAT": DATATYPES["FP32"],
    "INT8": DATATYPES["INT8"],
    "UINT8": DATATYPES["UINT8"],
    "INT32": DATATYPES["INT32"],
    "INT64": DATATYPES["INT64"],
}


class TensorRtModel(Model):
    """A serialized engine with its own names, datatypes and shapes. It runs on the GPU that PyTorch selects.

    An engine can hold plug-ins, which are machine code: it is loaded only if the operator allows such files. PyTorch
    allocates the memory of the GPU. Engines fit one version of TensorRT and one kind of GPU.
    """

    platform = "tensorrt_plan"
    merges = 0

    def load(self) -> None:
        path = model_path(self.spec)
        check_pickle(path, self.spec)
        self._torch = RUNTIME.require("torch")
        if not self._torch.cuda.is_available():
            raise ModelFailed(
                f"'{path.name}' needs an NVIDIA GPU, but none was found: serve the ONNX file of the engine"
            )
        trt = RUNTIME.require("tensorrt")
        self._runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
        self._engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if self._engine is None:
            raise ModelFailed(
                f"'{path.name}' cannot be loaded by TensorRT {trt.__version__}: engines fit the version of TensorRT "
                "and the GPU that they were built for; build it again"
            )
        self._context = self._engine.create_execution_context()
        self._stream = self._torch.cuda.Stream()
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        inputs = [name for name in names if self._engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        self._signature = Signature(
            tuple(self._spec(name) for name in inputs),
            tuple(self._spec(name) for name in names if name not in inputs),
            batched=all(tuple(self._engine.get_tensor_shape(name))[:1] == (-1,) for name in names),
            outputs_are_hints=True,
        )

    def _spec(self, name: str) -> TensorSpec:
        datatype = _DATATYPES.get(self._engine.get_tensor_dtype(name).name)
        if datatype is None:
            raise ModelFailed(f"tensor '{name}' has type {self._engine.get_tensor_dtype(name)}, which no datatype has")
        return TensorSpec(name, datatype, tuple(self._engine.get_tensor_shape(name)))

    def signature(self) -> Signature:
        return self._signature

    def infer(self, call: Infer) -> Mapping[str, Tensor]:
        torch, context = self._torch, self._context
        memory = {}
        with torch.cuda.stream(self._stream):
            for spec in self._signature.inputs:
                tensor = call.inputs[spec.name]
                if not context.set_input_shape(spec.name, tensor.shape):
                    raise InvalidInput(
                        f"input '{spec.name}': shape {list(tensor.shape)} is in no profile of the engine"
                    )
                memory[spec.name] = torch.from_numpy(_bits(tensor.data)).cuda()
            for spec in self._signature.outputs:
                shape = tuple(context.get_tensor_shape(spec.name))
                memory[spec.name] = torch.empty(_size(spec, shape), dtype=torch.uint8, device="cuda")
            for name, buffer in memory.items():
                context.set_tensor_address(name, buffer.data_ptr())
            if not context.execute_async_v3(self._stream.cuda_stream):
                raise ModelFailed("TensorRT could not run the engine")
            results = {spec.name: memory[spec.name].cpu().numpy() for spec in self._signature.outputs}
        return {
            spec.name: _tensor(spec, results[spec.name], tuple(context.get_tensor_shape(spec.name)))
            for spec in self._signature.outputs
        }


def _bits(array: Array) -> Array:
    """Return the bytes of an array, at least one."""
    flat = np.frombuffer(np.ascontiguousarray(array).tobytes() or b"\0", np.uint8)
    return flat.copy()


def _size(spec: TensorSpec, shape: Shape) -> int:
    if -1 in shape:
        raise ModelFailed(f"output '{spec.name}' has a shape that depends on values, which is not supported")
    assert spec.datatype is not None
    return max(1, int(np.prod(shape)) * spec.datatype.size)


def _tensor(spec: TensorSpec, data: Any, shape: Shape) -> Tensor:
    assert spec.datatype is not None
    count = int(np.prod(shape)) * spec.datatype.size
    return Tensor(np.frombuffer(data[:count].tobytes(), spec.datatype.dtype).reshape(shape), spec.datatype)


RUNTIME = Runtime(
    load=TensorRtModel,
    packages=("tensorrt", "torch"),
    extra="tensorrt",
    suffixes=(".plan", ".engine"),
    placement="thread",
)
