"""Models on a device through the Open Inference Protocol, and CUDA shared memory with Triton's client."""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.speed import serving

_TOKEN = "token-of-the-gpu-kit"
_SHARED = ("--shared-memory", "--control-token", _TOKEN)
_HEADERS = {"authorization": f"Bearer {_TOKEN}"}
_TORCH_MODEL = '''
"""A layer in PyTorch on a device."""
import numpy as np
import torch

import dragoman


class Layer(dragoman.Model):
    inputs = [dragoman.TensorSpec("x", dragoman.FP32, (-1, 64))]
    outputs = [dragoman.TensorSpec("y", dragoman.FP32, (-1, 64))]

    def load(self):
        weight = torch.arange(64 * 64, dtype=torch.float32).reshape(64, 64) / 4096
        self.weight = weight.to("{device}")

    def infer(self, call):
        x = torch.from_numpy(np.array(call.inputs["x"].data)).to("{device}")
        return {{"y": torch.relu(x @ self.weight - 1).cpu().numpy()}}
'''


def _input() -> np.ndarray[Any, Any]:
    return np.random.default_rng(5).normal(size=(8, 64)).astype(np.float32)


def _expected(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    weight = np.arange(64 * 64, dtype=np.float64).reshape(64, 64) / 4096
    return np.maximum(x.astype(np.float64) @ weight - 1, 0)


def onnx(folder: Path, device: str) -> dict[str, Any]:
    """Serve an ONNX graph with the device's execution provider, and compare its values."""
    import onnx as graphs
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    wanted = "CUDAExecutionProvider" if device.startswith("cuda") else "CPUExecutionProvider"
    available = onnxruntime.get_available_providers()
    found: dict[str, Any] = {"providers": available, "onnxruntime": onnxruntime.__version__}
    if wanted not in available:
        return {**found, "not_available": f"{wanted} is not one of the providers of this onnxruntime"}
    weight = (np.arange(64 * 64, dtype=np.float32).reshape(64, 64) / 4096).astype(np.float32)
    edges = (("MatMul", ["x", "w"], "a"), ("Add", ["a", "b"], "c"), ("Relu", ["c"], "y"))
    nodes = [helper.make_node(kind, inputs, [output]) for kind, inputs, output in edges]
    graph = helper.make_graph(
        nodes,
        "layer",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 64])],
        [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(np.array([-1], np.float32), "b")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (folder / "layer").mkdir(parents=True)
    graphs.save(model, folder / "layer" / "model.onnx")
    provider = "cuda" if device.startswith("cuda") else "cpu"
    (folder / "layer" / "dragoman.toml").write_text(f'[model.parameters]\nproviders = ["{provider}"]\n')
    return {**found, **_infer(folder / "layer", "layer", folder / "onnx.log")}


def torch_model(folder: Path, device: str) -> dict[str, Any]:
    """Serve a class with a PyTorch layer on the device, and compare its values."""
    path = _write_torch_model(folder, device)
    return _infer(f"{path}:Layer", "Layer", folder / "torch.log")


def _write_torch_model(folder: Path, device: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "layer.py"
    path.write_text(_TORCH_MODEL.format(device=device))
    return path


def _infer(model: Path | str, name: str, log: Path) -> dict[str, Any]:
    import tritonclient.grpc as client

    x = _input()
    with serving([model], log) as (_, _, port):
        server = client.InferenceServerClient(f"127.0.0.1:{port}")
        source = client.InferInput("x", x.shape, "FP32")
        source.set_data_from_numpy(x)
        y = server.infer(name, [source]).as_numpy("y")
    return _compared(y, x)


def _compared(y: Any, x: np.ndarray[Any, Any]) -> dict[str, Any]:
    expected = _expected(x)
    error = float(np.linalg.norm(y - expected) / np.linalg.norm(expected))
    # TF32, which ONNX Runtime uses for products on a GPU by default, has 10 bits.
    return {"relative_error": error, **({"failed": f"wrong values: error {error:.2g}"} if not error < 2e-3 else {})}


def shared_memory(folder: Path, device: str) -> dict[str, Any]:
    """Infer with input and output in CUDA shared memory, registered by Triton's client."""
    import tritonclient.grpc as client

    if not device.startswith("cuda"):
        return {"not_available": "there is no GPU"}
    import tritonclient.utils.cuda_shared_memory as cuda_memory

    x, path = _input(), _write_torch_model(folder, device)
    with serving([f"{path}:Layer"], folder / "shared.log", *_SHARED) as (_, _, port):
        server = client.InferenceServerClient(f"127.0.0.1:{port}")
        regions = [cuda_memory.create_shared_memory_region(name, x.nbytes, 0) for name in ("in", "out")]
        cuda_memory.set_shared_memory_region(regions[0], [x])
        try:
            for name, region in zip(("in", "out"), regions, strict=True):
                handle = cuda_memory.get_raw_handle(region)
                server.register_cuda_shared_memory(name, handle, 0, x.nbytes, headers=_HEADERS)
        except client.InferenceServerException as error:
            return {"not_available": f"the server rejects it: {error}"}
        status = [each.name for each in server.get_cuda_shared_memory_status(headers=_HEADERS).regions.values()]
        source, target = client.InferInput("x", x.shape, "FP32"), client.InferRequestedOutput("y")
        source.set_shared_memory("in", x.nbytes)
        target.set_shared_memory("out", x.nbytes)
        server.infer("Layer", [source], outputs=[target])
        y = cuda_memory.get_contents_as_numpy(regions[1], np.float32, x.shape)
        server.unregister_cuda_shared_memory(headers=_HEADERS)
        left = len(server.get_cuda_shared_memory_status(headers=_HEADERS).regions)
    return {"registered": sorted(status), "left": left, **_compared(y, x)}
