"""ONNX graphs, run by ONNX Runtime."""

import ctypes
import logging
import math
import mmap
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dragoman.codecs.elements import strings
from dragoman.core.calls import Infer
from dragoman.core.datatypes import BF16, BYTES, DATATYPES, Array, Datatype
from dragoman.core.errors import ModelFailed
from dragoman.core.kinds import TASKS, named_outputs
from dragoman.core.model import Model
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.sizes import SHARED
from dragoman.core.tensor import Tensor
from dragoman.runtimes.class_names import names_in_metadata
from dragoman.runtimes.files import model_path
from dragoman.runtimes.onnx import RUNTIME
from dragoman.runtimes.onnx.graph import class_names, shaped_names, without_zip_maps
from dragoman.system.cpus import thread_limit

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
# Where ONNX Runtime looks for weights beside a graph that is not read from a file.
_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
_WARNING, _FATAL = 2, 4  # severities of ONNX Runtime's log
# Numbers, in TensorProto.DataType, of the element types whose arrays `run` does not take.
_ONNX_TYPES: Mapping[Datatype, int] = {BF16: 16}


class OnnxModel(Model):
    """A graph with its own names, datatypes and shapes; its strings are BYTES in UTF-8.

    `parameters.providers` names execution providers of ONNX Runtime (`cpu`, `cuda`, `openvino`, ..., or their full
    names); the CPU by default. The output of a ZipMap, a classifier's list of maps, is the tensor that ZipMap converts,
    [rows, classes], with the classes as labels. Any other output that is not a tensor is left out with a warning; a
    graph without other outputs is rejected.
    """

    platform = "onnx_onnxv1"

    def load(self) -> None:
        ort = RUNTIME.require("onnxruntime")
        path = model_path(self.spec)
        providers = _providers(ort, self.spec.parameters)
        options = _session_options(ort, self.spec.parameters, path)
        labels: Mapping[str, Sequence[str]] = {}
        try:
            self._session = ort.InferenceSession(path, options, providers=providers)
            if _has_maps(self._session) and path.suffix == ".onnx" and (graph := without_zip_maps(path)) is not None:
                options.add_session_config_entry(_WEIGHTS_FOLDER, str(path.parent.resolve()))
                self._session = ort.InferenceSession(graph.content, options, providers=providers)
                labels = graph.labels
        except Exception as error:  # ONNX Runtime's errors share no class of their own.
            raise ModelFailed(f"'{path.name}' cannot be loaded by ONNX Runtime: {error}") from error
        # ONNX Runtime falls back to the CPU, with a line in its log, if a provider cannot be started.
        for name in providers:
            if name not in self._session.get_providers():
                raise ModelFailed(f"execution provider '{name}' cannot be started: is its device available?")
        self._values = ort.OrtValue
        self._signature = _signature(self._session, path)
        metadata = self._session.get_modelmeta()
        custom = dict(metadata.custom_metadata_map)
        texts = (metadata.description, metadata.graph_description, custom.get("description", ""))
        self.description = next((text for text in texts if text and not _OF_TOOLS.match(text)), "")
        self.kind = TASKS.get(custom.get("task", ""), "")
        if metadata.producer_name in _TABULAR_PRODUCERS and self._signature.output_names == _REGRESSION:
            self.kind = "regressor"
        is_detector = self.kind in ("detector", "segmentation")
        self._labels = labels or named_outputs(
            names_in_metadata(custom), self._signature.outputs, is_detector=is_detector
        )
        if not self._labels and path.suffix == ".onnx" and len(self._signature.outputs) <= _MAX_CLASSIFIER_OUTPUTS:
            self._labels = _classifier_labels(class_names(path), self._signature.outputs)
        if not _declares_rows(self._session, path):
            self.merges = 0
        self._has_bits = any(s.datatype in _ONNX_TYPES for s in (*self._signature.inputs, *self._signature.outputs))

    def signature(self) -> Signature:
        return self._signature

    def class_labels(self) -> Mapping[str, Sequence[str]]:
        return self._labels

    def infer(self, call: Infer) -> Mapping[str, Array]:
        names = list(call.outputs) or [s.name for s in self._signature.outputs]
        if self._has_bits:
            return self._infer_values(call, names)
        feed = {name: _to_onnx(name, tensor) for name, tensor in call.inputs.items()}
        return dict(zip(names, self._session.run(names, feed), strict=True))

    def _infer_values(self, call: Infer, names: list[str]) -> Mapping[str, Array]:
        """Infer through ONNX Runtime's own values, because `run` takes only arrays with dtypes of NumPy."""
        feed = {name: self._value(name, tensor) for name, tensor in call.inputs.items()}
        values = self._session.run_with_ort_values(names, feed)
        return {name: _from_onnx(value) for name, value in zip(names, values, strict=True)}

    def _value(self, name: str, tensor: Tensor) -> Any:
        if (view := tensor.datatype.wire_view) is not None:
            bits = np.ascontiguousarray(tensor.data).view(view)
            return self._values.ortvalue_from_numpy_with_onnx_type(bits, _ONNX_TYPES[tensor.datatype])
        return self._values.ortvalue_from_numpy(_to_onnx(name, tensor))


def _classifier_labels(names: Sequence[str], outputs: Sequence[TensorSpec]) -> Mapping[str, Sequence[str]]:
    """Return the names by the scores of a classifier, [rows, classes] of floats."""
    scores = [spec for spec in outputs if spec.datatype is not None and spec.datatype.kind == "float"]
    free = [spec for spec in scores if spec.shape is not None and len(spec.shape) == 2 and spec.shape[1] == -1]
    return named_outputs(names, scores) or ({free[0].name: names} if names and len(scores) == len(free) == 1 else {})


_MAX_CLASSIFIER_OUTPUTS = 2  # label and scores
_PROVIDERS: Mapping[str, str] = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
# Names of a first axis that counts independent rows, and tools that convert models of tables.
_ROW_NAMES = ("batch", "batch_size", "batchsize", "rows", "num_rows", "samples", "n_samples", "num_samples")
_TABULAR_PRODUCERS = ("skl2onnx", "OnnxMLTools", "hummingbird")
_REGRESSION = ("variable",)  # the output of the first of them for a regressor
# Descriptions that tools write, of themselves.
_OF_TOOLS = re.compile(r"converted from|graph combining|onnxmltools|exported by", re.IGNORECASE)
# Start of the names of operators that quantize by the least and the largest value of a whole tensor.
_DYNAMIC_QUANTIZATION = b"DynamicQuantize"
# The packages of ONNX Runtime that contain a provider.
_PACKAGES = {
    "CUDAExecutionProvider": "onnxruntime-gpu",
    "TensorrtExecutionProvider": "onnxruntime-gpu",
    "OpenVINOExecutionProvider": "onnxruntime-openvino",
}


def _providers(ort: Any, parameters: Mapping[str, Any]) -> list[str]:
    """Return the execution providers in the parameters. Raises ModelFailed if one is not available."""
    given = parameters.get("providers", ("cpu",))
    if not isinstance(given, list | tuple) or not given or not all(isinstance(name, str) for name in given):
        raise ModelFailed(f"parameter 'providers': expected a list of names, got {given!r}")
    names: list[str] = [_PROVIDERS.get(name.lower(), name) for name in given]
    available = ort.get_available_providers()
    for name in names:
        if name not in available:
            package = f"; pip install {_PACKAGES[name]} instead of onnxruntime" if name in _PACKAGES else ""
            raise ModelFailed(
                f"execution provider '{name}' is not available: expected one of {', '.join(available)}{package}"
            )
    return names


# A graph of at most this size without convolutions computes in one thread: ONNX Runtime does not split such small
# products and trees, and a pool of threads for each session, which spin for work, takes 9 tenths of the time in which a
# folder of 1,000 such models is loaded (W9).
_ONE_THREAD_BYTES = SHARED
_CONVOLUTION = b"Conv"


def _computes_little(path: Path) -> bool:
    try:
        return path.stat().st_size <= _ONE_THREAD_BYTES and _CONVOLUTION not in path.read_bytes()
    except OSError:  # loading it says why
        return False


def _session_options(ort: Any, parameters: Mapping[str, Any], path: Path) -> Any:
    """Return the options of a session in the parameters, by Triton's names of them. Raises ModelFailed."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = thread_limit() or 0  # 0: by the affinity
    if _computes_little(path):
        options.intra_op_num_threads = 1
        options.enable_cpu_mem_arena = False
    # Errors are raised, and warnings about wrong shapes repeat what the engine logs: nothing else writes to our stderr.
    options.log_severity_level = _WARNING if log.isEnabledFor(logging.DEBUG) else _FATAL
    level, levels = parameters.get("graph_optimization_level"), ort.GraphOptimizationLevel
    if level is not None:
        known = {"disabled": levels.ORT_DISABLE_ALL, "basic": levels.ORT_ENABLE_BASIC}
        known |= {"extended": levels.ORT_ENABLE_EXTENDED, "all": levels.ORT_ENABLE_ALL}
        if level not in known:
            raise ModelFailed(f"parameter 'graph_optimization_level': expected one of {', '.join(known)}, got {level}")
        options.graph_optimization_level = known[level]
    for name, attribute in (
        ("intra_op_thread_count", "intra_op_num_threads"),
        ("inter_op_thread_count", "inter_op_num_threads"),
    ):
        if name in parameters:
            setattr(options, attribute, _integer(parameters, name))
    if "execution_mode" in parameters and _integer(parameters, "execution_mode"):
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    return options


def _integer(parameters: Mapping[str, Any], name: str) -> int:
    value = str(parameters[name])
    if not value.isdecimal():
        raise ModelFailed(f"parameter '{name}': expected an integer from 0, got {value}")
    return int(value)


def _to_onnx(name: str, tensor: Tensor) -> Array:
    return strings(tensor, name) if tensor.datatype is BYTES else tensor.data


def _from_onnx(value: Any) -> Array:
    datatype = _datatype(value.data_type())
    if datatype is None or datatype.wire_view is None:
        array: Array = value.numpy()
        return array
    shape = tuple(value.shape())
    # The value owns its memory: the copy is taken while `value` lives.
    size = datatype.size * math.prod(shape)
    return np.frombuffer(ctypes.string_at(value.data_ptr(), size) if size else b"", datatype.dtype).reshape(shape)


def _signature(session: Any, path: Path) -> Signature:
    file = path.name
    inputs = [(node, _datatype(node.type)) for node in session.get_inputs()]
    for node, datatype in inputs:
        if datatype is None:
            raise ModelFailed(f"'{file}': input '{node.name}' is {_explain_type(node.type)}")
    outputs = [node for node in session.get_outputs() if _datatype(node.type) is not None]
    omitted = [
        f"output '{node.name}' is {_explain_type(node.type)}"
        for node in session.get_outputs()
        if _datatype(node.type) is None
    ]
    if omitted and not outputs:
        raise ModelFailed(f"'{file}': {'; '.join(omitted)}")
    if omitted:
        log.warning("'%s': left out: %s", file, "; ".join(omitted))
    nodes = [node for node, _ in inputs]
    has_shapes = path.suffix != ".onnx" or all(node.shape for node in (*nodes, *outputs))
    shaped = None if has_shapes else shaped_names(path)
    return Signature(
        inputs=tuple(_spec(node, shaped) for node in nodes),
        outputs=tuple(_spec(node, shaped) for node in outputs),
        batched=_share_rows([*nodes, *outputs]),
        outputs_are_hints=True,
    )


def _has_maps(session: Any) -> bool:
    return any(node.type.startswith("seq(map(") for node in session.get_outputs())


def _explain_type(onnx_type: str) -> str:
    """Return the type of a value that cannot be served, the reason, and what to do about it."""
    kind = onnx_type.partition("(")[0]
    reason = {
        "seq": "a sequence, which the protocol cannot carry: expected one tensor; join its elements in the graph, by "
        "ConcatFromSequence",
        "map": "a map, which the protocol cannot carry: expected a tensor of its values",
        "optional": "a value that may be missing, which the protocol cannot carry: expected a tensor",
        "sparse_tensor": "sparse, which the protocol cannot carry: expected a dense tensor",
        "tensor": "of a type without a datatype in the protocol: expected one of "
        f"{', '.join(_DATATYPES)}; convert it in the graph, by Cast",
    }.get(kind, "no tensor")
    if onnx_type.startswith("seq(map("):
        reason = (
            "a list of maps, which the protocol cannot carry: expected a tensor; export a classifier with zipmap=False"
        )
    return f"{onnx_type}, {reason}"


def _datatype(onnx_type: str) -> Datatype | None:
    return _DATATYPES.get(onnx_type.removeprefix("tensor(").removesuffix(")"))


def _spec(node: Any, shaped: Collection[str] | None) -> TensorSpec:
    """Return the spec of a tensor; `shaped` are the names of those that have a shape, None for all of them."""
    if not node.shape and shaped is not None and node.name not in shaped:
        return TensorSpec(node.name, _datatype(node.type))
    shape = tuple(n if isinstance(n, int) and n >= 0 else -1 for n in node.shape)
    return TensorSpec(node.name, _datatype(node.type), shape)


def _declares_rows(session: Any, path: Path) -> bool:
    """Return whether the graph says that its first axis counts rows: by its name, or by a converter of tabular models.

    Others may have time or nodes of a graph there; these are merged only if the operator sets `max_batch_size`. So are
    graphs that compare rows with each other, as their shapes show ([batch, batch]), or that quantize them together.
    """
    nodes = (*session.get_inputs(), *session.get_outputs())
    if any(isinstance(axis, str) and axis in node.shape[1:] for node in nodes for axis in node.shape[:1]):
        return False
    if session.get_modelmeta().producer_name not in _TABULAR_PRODUCERS:
        first_axes = (str(node.shape[0] if node.shape else "").lower() for node in session.get_inputs())
        if any(axis not in _ROW_NAMES for axis in first_axes):
            return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        return mapped.find(_DYNAMIC_QUANTIZATION) < 0


def _share_rows(nodes: Iterable[Any]) -> bool:
    """Return whether the first axis of every tensor is dynamic and the same: of one name, or all unnamed."""
    first = {node.shape[0] if node.shape else 0 for node in nodes}
    return len(first) == 1 and not isinstance(first.pop(), int)
