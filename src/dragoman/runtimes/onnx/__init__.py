"""The runtime of ONNX graphs, run by ONNX Runtime."""

from dragoman.core.runtime import Runtime, lazy_function

RUNTIME = Runtime(
    load=lazy_function("dragoman.runtimes.onnx.model:OnnxModel"),
    packages=("onnxruntime",),
    extra="onnx",
    suffixes=(".onnx", ".ort"),
    placement="thread",
)
