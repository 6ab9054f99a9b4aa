"""TensorFlow SavedModels and frozen graphs."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dragoman.core.calls import Infer
from dragoman.core.datatypes import BF16, BYTES, DATATYPES, Array, Datatype
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.model import Model
from dragoman.core.runtime import Runtime
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.tensor import Tensor
from dragoman.runtimes.files import model_path

# Datatypes by TensorFlow's names.
_DATATYPES: Mapping[str, Datatype] = {
    "bool": DATATYPES["BOOL"],
    "half": DATATYPES["FP16"],
    "float16": DATATYPES["FP16"],
    "bfloat16": BF16,
    "float32": DATATYPES["FP32"],
    "float64": DATATYPES["FP64"],
    "string": BYTES,
    **{f"int{bits}": DATATYPES[f"INT{bits}"] for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": DATATYPES[f"UINT{bits}"] for bits in (8, 16, 32, 64)},
}


class TensorFlowModel(Model):
    """One signature of a SavedModel: `parameters.signature_name`, `serving_default` by default.

    A SavedModel that `tf.saved_model.load` rejects is loaded as by TensorFlow 1, into a session: one that Keras 2 wrote
    with the slots of its optimizer, or one with several graphs, for example.

    Or a frozen graph (GraphDef), whose inputs are its placeholders and whose outputs are the nodes that no other node
    uses; `parameters.outputs` names others.
    """

    platform = "tensorflow_savedmodel"
    merges = 0
    _run: Callable[[Mapping[str, Tensor]], Mapping[str, Array]]

    def load(self) -> None:
        path = model_path(self.spec)
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        if path.is_file():
            self._load_graph(path)
            return
        if not (path / "saved_model.pb").is_file():
            raise ModelFailed(f"'{path.name}' is no SavedModel; expected a folder that holds saved_model.pb")
        self._tensorflow = RUNTIME.require("tensorflow")
        name = str(self.spec.parameters.get("signature_name", "serving_default"))
        try:
            # The functions hold their variables only weakly: the loaded object has to live as long as the model.
            self._loaded = self._tensorflow.saved_model.load(str(path))
        except Exception as error:  # TensorFlow has many classes of errors
            self._load_session(path, name, error)
            return
        self._use_function(_find_signature(self._loaded.signatures, name, path))

    def _use_function(self, function: Any) -> None:
        inputs = function.structured_input_signature[1]
        self._run = lambda feed: {
            name: value.numpy() for name, value in function(**self._to_tensorflow(feed, inputs)).items()
        }
        self._signature = _signature(inputs, function.structured_outputs)

    def _load_session(self, path: Path, name: str, reason: Exception) -> None:
        """Load a SavedModel into a session. Raises ModelFailed with the `reason` why the other loader rejects it."""
        v1, graph = self._tensorflow.compat.v1, self._tensorflow.Graph()
        session = v1.Session(graph=graph)
        try:
            with graph.as_default():
                signatures = v1.saved_model.load(session, _tags(path), str(path)).signature_def
            signature = _find_signature(signatures, name, path)
            inputs, outputs = (
                {n: graph.get_tensor_by_name(t.name) for n, t in side.items()} for side in _sides(signature)
            )
            run = session.make_callable([*outputs.values()], [*inputs.values()])
        except ModelFailed:
            raise
        except Exception as error:
            raise ModelFailed(
                f"'{path.name}' cannot be loaded: {_describe(reason)}; as by TensorFlow 1: {_describe(error)}"
            ) from error
        self._run = lambda feed: dict(zip(outputs, run(*(feed[name].data for name in inputs)), strict=True))
        self._signature = _signature(inputs, outputs)

    def _load_graph(self, path: Path) -> None:
        self.platform = "tensorflow_graphdef"
        self._tensorflow = tensorflow = RUNTIME.require("tensorflow")
        graph = tensorflow.compat.v1.GraphDef()
        try:
            graph.ParseFromString(path.read_bytes())
            inputs, outputs = _graph_ends(graph.node)
            outputs = [*_names(self.spec.parameters.get("outputs"), "outputs")] or outputs
            wrapped = tensorflow.compat.v1.wrap_function(
                lambda: tensorflow.graph_util.import_graph_def(graph, name=""), []
            )
            tensors = {name: wrapped.graph.get_tensor_by_name(_tensor_name(name)) for name in (*inputs, *outputs)}
            pruned = wrapped.prune([tensors[name] for name in inputs], {name: tensors[name] for name in outputs})
        except Exception as error:  # TensorFlow and protobuf have many classes of errors
            raise ModelFailed(f"'{path.name}' cannot be loaded as a frozen graph: {error}") from error

        def run(feed: Mapping[str, Tensor]) -> Mapping[str, Array]:
            converted = self._to_tensorflow(feed, tensors)
            return {name: value.numpy() for name, value in pruned(*(converted[name] for name in inputs)).items()}

        self._run = run
        self._signature = _signature(
            {name: tensors[name] for name in inputs}, {name: tensors[name] for name in outputs}
        )

    def signature(self) -> Signature:
        return self._signature

    def infer(self, call: Infer) -> Mapping[str, Array]:
        results = self._run(call.inputs)
        return {name: results[name] for name in call.outputs or results}

    def _to_tensorflow(self, tensors: Mapping[str, Tensor], inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs as tensors of TensorFlow."""
        converted = {}
        for name, tensor in tensors.items():
            try:
                converted[name] = self._tensorflow.constant(tensor.data, dtype=inputs[name].dtype)
            except (TypeError, ValueError) as error:
                raise InvalidInput(
                    f"input '{name}': TensorFlow takes no such {tensor.datatype} here: {error}"
                ) from error
        return converted


def _find_signature(signatures: Mapping[str, Any], name: str, path: Path) -> Any:
    if name not in signatures:
        known = ", ".join(each for each in signatures if not each.startswith("__saved_model")) or "none"
        raise ModelFailed(
            f"'{path.name}' has no signature '{name}', but {known}; name one as parameters.signature_name"
        )
    return signatures[name]


def _tags(path: Path) -> Sequence[str]:
    """Return the tags of the graph to serve: the one with the fewest of those with the tag `serve`, else the first."""
    messages = RUNTIME.require("tensorflow.core.protobuf.saved_model_pb2")
    saved = messages.SavedModel.FromString((path / "saved_model.pb").read_bytes())
    tags = [list(graph.meta_info_def.tags) for graph in saved.meta_graphs]
    return min((each for each in tags if "serve" in each), key=len, default=tags[0])


def _sides(signature: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return inputs and outputs of a signature. Raises ModelFailed if one is not a plain tensor."""
    for name, tensor in (*signature.inputs.items(), *signature.outputs.items()):
        if not tensor.name:
            raise ModelFailed(f"'{name}' is {tensor.WhichOneof('encoding')}, expected a dense tensor")
    return signature.inputs, signature.outputs


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _signature(inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Signature:
    shapes = [spec.shape for spec in (*inputs.values(), *outputs.values())]
    return Signature(
        inputs=tuple(_spec(name, spec) for name, spec in inputs.items()),
        outputs=tuple(_spec(name, spec) for name, spec in outputs.items()),
        batched=all(shape.rank is not None and shape.rank > 0 and shape[0] is None for shape in shapes),
        outputs_are_hints=True,
    )


def _spec(name: str, spec: Any) -> TensorSpec:
    shape = None if spec.shape.rank is None else tuple(-1 if n is None else int(n) for n in spec.shape)
    return TensorSpec(name, _DATATYPES.get(spec.dtype.name), shape)


# --- frozen graphs -----------------------------------------------------------------------------------------


def _graph_ends(nodes: Iterable[Any]) -> tuple[list[str], list[str]]:
    """Return the names of the placeholders, and those of the nodes that no other node uses."""
    graph_nodes = list(nodes)
    used = {_node_name(name) for node in graph_nodes for name in node.input}
    inputs = [node.name for node in graph_nodes if node.op == "Placeholder"]
    passive = ("Placeholder", "NoOp", "Const", "Assert")
    return inputs, [node.name for node in graph_nodes if node.name not in used and node.op not in passive]


def _node_name(name: str) -> str:
    """Return the node of the input of another one: `node`, `node:1`, or `^node` for a control dependency."""
    return name.removeprefix("^").partition(":")[0]


def _tensor_name(name: str) -> str:
    return name if ":" in name else f"{name}:0"


def _names(given: Any, parameter: str) -> Sequence[str]:
    if given is not None and not (isinstance(given, list | tuple) and all(isinstance(name, str) for name in given)):
        raise ModelFailed(f"parameter '{parameter}': expected a list of names, got {given!r}")
    return given or ()


def _is_graph(path: Path) -> bool:
    """Return whether a file begins like a GraphDef: field 1 is a message whose field 1 is the name of a node."""
    with path.open("rb") as file:
        start = file.read(12)
    length = next((i for i, byte in enumerate(start[1:6], 1) if byte < 0x80), 0)  # the end of a varint
    return start[:1] == b"\n" and length > 0 and start[length + 1 : length + 2] == b"\n"


RUNTIME = Runtime(
    load=TensorFlowModel,
    packages=("tensorflow",),
    extra="tensorflow",
    folder_files=("saved_model.pb",),
    shared_suffixes=(".pb", ".graphdef"),
    is_model_file=_is_graph,
    expected="a frozen graph of TensorFlow (GraphDef); a saved_model.pb is served as its folder",
    priority=30,
    placement="thread",
)
