"""OpenVINO IR: an `.xml` file with the `.bin` file of its weights beside it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dragoman.core.calls import Infer
from dragoman.core.datatypes import BF16, DATATYPES, Array, Datatype
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.model import Model
from dragoman.core.runtime import Runtime
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor
from dragoman.runtimes.files import model_path

# Datatypes by OpenVINO's names of element types.
_DATATYPES: Mapping[str, Datatype] = {
    "boolean": DATATYPES["BOOL"],
    "f16": DATATYPES["FP16"],
    "bf16": BF16,
    "f32": DATATYPES["FP32"],
    "f64": DATATYPES["FP64"],
    **{f"i{bits}": DATATYPES[f"INT{bits}"] for bits in (8, 16, 32, 64)},
    **{f"u{bits}": DATATYPES[f"UINT{bits}"] for bits in (8, 16, 32, 64)},
}
_NAMES: Mapping[Datatype, str] = {datatype: name for name, datatype in _DATATYPES.items()}
# The root element of an IR file, which comes after an optional XML declaration.
_START, _ROOT = 512, b"<net "


class OpenVinoModel(Model):
    """A compiled network with its own names, datatypes and shapes.

    Parameters: `device` (`CPU`), and `config`, a table of properties of OpenVINO. By default CPUs compute FP32 networks
    in FP32, not in a narrower type.
    """

    platform = "openvino_ir"
    merges = 0

    def load(self) -> None:
        openvino = RUNTIME.require("openvino")
        path = model_path(self.spec)
        device = str(self.spec.parameters.get("device", "CPU"))
        config = self.spec.parameters.get("config", {})
        if not isinstance(config, Mapping):
            raise ModelFailed(f"parameter 'config': expected a table of OpenVINO properties, got {config!r}")
        core = openvino.Core()
        if device.partition(".")[0].partition(":")[0] not in (*_devices(core), "AUTO", "HETERO", "MULTI"):
            raise ModelFailed(f"parameter 'device': expected one of {', '.join(_devices(core))}, got '{device}'")
        try:
            network = core.read_model(str(path))
            # The default precision of some CPUs is bfloat16, which would change values silently.
            self._network = core.compile_model(network, device, {"INFERENCE_PRECISION_HINT": "f32", **config})
        except RuntimeError as error:
            raise ModelFailed(f"'{path.name}' cannot be loaded by OpenVINO: {error}") from error
        self._requests = self._network.create_infer_request()
        self._openvino = openvino
        inputs, outputs = self._network.inputs, self._network.outputs
        self._inputs = {_name(port, f"input-{i}"): port for i, port in enumerate(inputs)}
        self._outputs = {_name(port, f"output-{i}"): port for i, port in enumerate(outputs)}
        if len(self._inputs) < len(inputs) or len(self._outputs) < len(outputs):
            raise ModelFailed(f"'{path.name}': expected inputs and outputs of different names")
        self._signature = Signature(
            tuple(_spec(name, port) for name, port in self._inputs.items()),
            tuple(_spec(name, port) for name, port in self._outputs.items()),
            batched=_share_rows([*inputs, *outputs]),
            outputs_are_hints=True,
        )

    def signature(self) -> Signature:
        return self._signature

    def infer(self, call: Infer) -> Mapping[str, Array | Tensor]:
        feed = {self._inputs[name]: self._to_openvino(name, tensor) for name, tensor in call.inputs.items()}
        try:
            results = self._requests.infer(feed)
        except RuntimeError as error:
            raise InvalidInput(f"OpenVINO rejected the inputs: {error}") from error
        return {name: self._from_openvino(name, results) for name in call.outputs or self._outputs}

    def _to_openvino(self, name: str, tensor: Tensor) -> Any:
        if (view := tensor.datatype.wire_view) is not None:
            element_type = getattr(self._openvino.Type, _NAMES[tensor.datatype])
            return self._openvino.Tensor(tensor.data.view(view), list(tensor.shape), element_type)
        return self._openvino.Tensor(_contiguous(tensor.data))

    def _from_openvino(self, name: str, results: Any) -> Array | Tensor:
        array: Array = results[self._outputs[name]]
        spec = self._signature.output(name)
        if spec is not None and spec.datatype is not None and spec.datatype.wire_view is not None:
            return Tensor(array.view(spec.datatype.dtype), spec.datatype)
        return array


def _contiguous(array: Array) -> Array:
    """Return an array that OpenVINO may share: in row-major order, and writeable."""
    return array if array.flags.c_contiguous and array.flags.writeable else array.copy()


def _devices(core: Any) -> list[str]:
    return list(core.available_devices)


def _name(port: Any, default: str) -> str:
    """Return the name of an input or output; a port may have several, as of ONNX and of the graph."""
    return min(port.names, default=default)


def _spec(name: str, port: Any) -> TensorSpec:
    shape = port.partial_shape
    dims = None if shape.rank.is_dynamic else tuple(n.get_length() if n.is_static else -1 for n in shape)
    datatype = _DATATYPES.get(port.element_type.get_type_name())
    if datatype is None:
        raise ModelFailed(f"tensor '{name}' has type {port.element_type.get_type_name()}, which is not supported")
    return TensorSpec(name, datatype, dims)


def _share_rows(ports: list[Any]) -> bool:
    """Return whether the first axis of every tensor is free."""
    shapes = [port.partial_shape for port in ports]
    return all(shape.rank.is_static and len(shape) > 0 and shape[0].is_dynamic for shape in shapes)


def _is_network(path: Path) -> bool:
    """Return whether an XML file is a network with weights, not one of the many other kinds of XML."""
    with path.open("rb") as file:
        return _ROOT in file.read(_START) and path.with_suffix(".bin").is_file()


def _check(spec: ModelSpec) -> None:
    path = model_path(spec)
    if path.suffix == ".xml" and not path.with_suffix(".bin").is_file():
        raise ModelFailed(f"'{path.with_suffix('.bin').name}' not found: expected the weights beside '{path.name}'")


RUNTIME = Runtime(
    load=OpenVinoModel,
    packages=("openvino",),
    extra="openvino",
    shared_suffixes=(".xml",),
    is_model_file=_is_network,
    expected="an OpenVINO network: <net ...> in an .xml file, with its weights in the .bin file of the same name",
    placement="thread",
    check=_check,
)
