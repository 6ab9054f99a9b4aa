"""TensorFlow SavedModels and frozen graphs."""

import importlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

from dragoman.core.calls import Infer
from dragoman.core.datatypes import BYTES, DATATYPES, Array, Datatype
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.model import Model
from dragoman.core.runtime import Runtime
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.tensor import Tensor
from dragoman.runtimes.files import check_operators, model_path

# Datatypes by TensorFlow's names.
_DATATYPES: Mapping[str, Datatype] = {
    **{d.dtype.name: d for d in DATATYPES.values() if d is not BYTES},
    "half": DATATYPES["FP16"],
    "string": BYTES,
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
        check_operators(path, self.spec, lambda: _side_effects_of_folder(path))  # before it is loaded, which may run it
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
        check_operators(path, self.spec, lambda: _side_effects_of_folder(path, with_objects=False))
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
        except Exception as error:  # protobuf has many classes of errors
            raise ModelFailed(f"'{path.name}' cannot be loaded as a frozen graph: {error}") from error
        functions = [node for function in graph.library.function for node in function.node_def]
        check_operators(path, self.spec, lambda: _side_effects((*graph.node, *functions)))
        try:
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


# --- operators that do more than compute ---------------------------------------------------------------------

# Operators that use files, processes or the network, without the prefix Experimental and the number of a version.
_SIDE_EFFECTS = frozenset(
    {
        *("ReadFile", "WriteFile", "MatchingFiles", "MatchingFilesDataset", "FileSystemSetConfiguration"),
        *("Save", "SaveSlices", "Restore", "RestoreSlice", "MergeV2Checkpoints", "DTensorRestore", "DistributedSave"),
        *("SaveDataset", "LoadDataset", "CacheDataset", "SnapshotDataset", "SnapshotDatasetReader"),
        *("SnapshotChunkDataset", "SnapshotNestedDatasetReader", "ListSnapshotChunksDataset", "DatasetToTFRecord"),
        *("TFRecordDataset", "TextLineDataset", "FixedLengthRecordDataset", "CSVDataset", "LMDBDataset", "SqlDataset"),
        *("TFRecordReader", "TextLineReader", "FixedLengthRecordReader", "LMDBReader", "WholeFileReader"),
        *("RecordInput", "InitializeTableFromTextFile", "GenerateVocabRemapping", "LoadAndRemapMatrix", "Skipgram"),
        *("FixedUnigramCandidateSampler", "CreateSummaryFileWriter", "CreateSummaryDbWriter", "DumpTensor"),
        *("CalibrationStatisticsSaver", "DebugIdentity", "DebugNanCount", "DebugNumericSummary"),
        *("DataServiceDataset", "RegisterDataset", "RemoteCall"),
        *("RpcServer", "RpcServerStart", "RpcServerRegister", "RpcClient", "RpcCall"),
        *("PyFunc", "PyFuncStateless", "EagerPyFunc", "XlaCustomCall", "Abort"),
    }
)
_VERSION = re.compile(r"^(?:Experimental)?(.+?)(?:V\d+)?$")
_ASSETS = "saved_model_assets"  # collection of files in SavedModels of version 1
_READS_TABLE = "InitializeTableFromTextFile"


def _base(node: Any) -> str:
    match = _VERSION.match(node.op)
    return match[1] if match else str(node.op)


def _side_effects(nodes: Iterable[Any], trusted: Iterable[Any] = ()) -> set[str]:
    """Return the operators of nodes that do more than compute, except of those that are trusted."""

    def has_effect(node: Any) -> bool:
        is_file = node.op == "PrintV2" and node.attr["output_stream"].s.startswith(b"file")  # no stream of the process
        return is_file or _base(node) in _SIDE_EFFECTS

    trusted_ids = {*map(id, trusted)}  # by identity: names are unique within a function only
    return {node.op for node in nodes if has_effect(node) and id(node) not in trusted_ids}


def _side_effects_of_folder(path: Path, *, with_objects: bool = True) -> set[str]:
    """Return the operators of a SavedModel that do more than compute and that can be run: when it is loaded, or by a
    call. Those that save its variables are called by nothing here. Tables may be read from the assets in its folder.

    with_objects: whether the objects of version 2 are loaded, not the graph that is saved beside them for version 1.
    """
    loader = importlib.import_module("tensorflow.python.saved_model.loader_impl")
    graphs = loader.parse_saved_model(str(path)).meta_graphs
    found = {
        f"asset {file.filename!r}"
        for graph in graphs
        for file in _assets(graph)
        if os.path.isabs(file.filename) or ".." in Path(file.filename).parts
    }
    is_second = len(graphs) == 1 and graphs[0].HasField("object_graph_def")  # as TensorFlow tells the versions apart
    return found.union(*map(_side_effects_of_objects if is_second and with_objects else _side_effects_of_graph, graphs))


def _side_effects_of_objects(graph: Any) -> set[str]:
    """Return the operators of a SavedModel of version 2: objects with functions."""
    library = _library(graph)
    functions = graph.object_graph_def.concrete_functions
    inner = {name for nodes in library.values() for node in nodes for name in _functions_of(node)}
    trusted: list[Any] = []
    for definition in graph.graph_def.library.function:
        name = definition.signature.name
        if name in functions and name not in inner:  # others may pass any path
            files = _bound_assets(graph.object_graph_def, name, [each.name for each in definition.signature.input_arg])
            trusted += [node for node in library[name] if _reads_table(node, files)]
    return _side_effects(_reachable([], functions, {}, library), trusted)


def _bound_assets(objects: Any, function: str, arguments: Sequence[str]) -> set[str]:
    """Return the arguments of a function that are the paths of assets, which are bound when it is loaded."""
    bound = objects.concrete_functions[function].bound_inputs
    last = arguments[len(arguments) - len(bound) :]
    return {name for name, node in zip(last, bound, strict=True) if objects.nodes[node].WhichOneof("kind") == "asset"}


def _side_effects_of_graph(graph: Any) -> set[str]:
    """Return the operators of a SavedModel of version 1: a graph with signatures and collections of nodes."""
    library, nodes = _library(graph), {node.name: node for node in graph.graph_def.node}
    signatures = graph.signature_def.values()
    tensors = [tensor for each in signatures for tensor in (*each.inputs.values(), *each.outputs.values())]
    starts = [name for tensor in tensors for name in (tensor.name, *_coo_names(tensor))]
    found = _side_effects(_reachable(starts, [], nodes, library))
    # When it is loaded, the paths of assets and of the variables are passed to these.
    files = {_node_name(file.tensor_info.name) for file in _assets(graph)}
    variables = {_node_name(graph.saver_def.filename_tensor_name)}
    tables = [node for node in nodes.values() if _reads_table(node, files)]
    restoring = [node for node in nodes.values() if _restores(node, variables)]
    restoring += _restoring_in_function(graph, nodes, library, variables)
    for collection in graph.collection_def.values():
        starts = [*collection.node_list.value, *_names_of_variables(collection.bytes_list.value)]
        found |= _side_effects(_reachable(starts, [], nodes, library), tables)
    return found | _side_effects(_reachable([graph.saver_def.restore_op_name], [], nodes, library), restoring)


def _assets(graph: Any) -> Sequence[Any]:
    """Return the definitions of the files of a SavedModel, from where TensorFlow takes them."""
    if graph.asset_file_def or _ASSETS not in graph.collection_def:
        return [*graph.asset_file_def]
    messages = importlib.import_module("tensorflow.core.protobuf.meta_graph_pb2")
    values = graph.collection_def[_ASSETS].any_list.value
    return [messages.AssetFileDef.FromString(each.value) for each in values]


def _library(graph: Any) -> dict[str, list[Any]]:
    return {function.signature.name: [*function.node_def] for function in graph.graph_def.library.function}


def _reads_table(node: Any, files: Set[str]) -> bool:
    """Return whether a node reads a table from one of these files."""
    return _base(node) == _READS_TABLE and _node_name(node.input[1]) in files


def _restores(node: Any, files: Set[str]) -> bool:
    """Return whether a node reads variables from one of these files."""
    return _base(node) in ("Restore", "RestoreSlice") and _node_name(node.input[0]) in files


def _restoring_in_function(
    graph: Any, nodes: Mapping[str, Any], library: Mapping[str, Sequence[Any]], files: Set[str]
) -> Sequence[Any]:
    """Return the nodes that read variables from one of these files in the function that the node that restores calls:
    version 2 saves them so for version 1."""
    call = nodes.get(_node_name(graph.saver_def.restore_op_name))
    definitions = {function.signature.name: function for function in graph.graph_def.library.function}
    if call is None or (definition := definitions.get(call.attr["f"].func.name)) is None:
        return []
    name = definition.signature.name
    bodies = (nodes.values(), *library.values())
    if sum(name in _functions_of(each) for body in bodies for each in body) > 1:  # others may pass any path
        return []
    arguments = [argument.name for argument in definition.signature.input_arg]
    passed = {name for name, value in zip(arguments, call.input, strict=False) if _node_name(value) in files}
    return [node for node in library[name] if _restores(node, passed)]


def _names_of_variables(values: Iterable[bytes]) -> Iterable[str]:
    """Yield the nodes that variables need, from the messages of a collection; other messages are skipped."""
    variables = importlib.import_module("tensorflow.core.framework.variable_pb2")
    for value in values:
        with suppress(Exception):  # protobuf has many classes of errors
            variable = variables.VariableDef.FromString(value)
            yield from (variable.initializer_name, variable.initial_value_name, variable.snapshot_name)


def _coo_names(tensor: Any) -> Iterable[str]:
    """Return the names of the parts of a sparse tensor."""
    coo = tensor.coo_sparse
    return coo.values_tensor_name, coo.indices_tensor_name, coo.dense_shape_tensor_name


def _reachable(
    starts: Iterable[str], called: Iterable[str], nodes: Mapping[str, Any], library: Mapping[str, Iterable[Any]]
) -> Iterable[Any]:
    """Yield the nodes on which tensors or nodes of a graph depend, and all nodes of the functions that these call."""
    names, functions = [*map(_node_name, starts)], [*called]
    seen: set[str] = set()
    seen_functions: set[str] = set()
    while names or functions:
        if functions:
            name = functions.pop()
            new = () if name in seen_functions else library.get(name, ())
            seen_functions.add(name)
        else:
            name = names.pop()
            new = (nodes[name],) if name in nodes and name not in seen else ()
            seen.add(name)
            names += [_node_name(each) for node in new for each in node.input]
        for node in new:
            yield node
            functions += _functions_of(node)


def _functions_of(node: Any) -> Iterable[str]:
    """Yield the functions that a node calls; an operator may itself be one."""
    yield node.op
    for value in node.attr.values():
        yield value.func.name
        yield from (function.name for function in value.list.func)


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
