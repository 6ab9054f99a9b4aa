"""Graphs in files, served as models: `runtime: graph`."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from dragoman import plugins
from dragoman.core.documents import parse, parse_json, parse_toml
from dragoman.core.errors import DragomanError, InvalidInput, ModelFailed
from dragoman.core.spec import ModelSpec, Placement, SiblingModels
from dragoman.core.vectors import Config, Vector, VectorFunction
from dragoman_simulators.derivatives.decorator import LazyVectorFunction, build_vector_function
from dragoman_simulators.derivatives.selection import METHODS
from dragoman_simulators.derivatives.user_function import FunctionOptions
from dragoman_simulators.graph_runtime import GRAPH_FILES, graph_file
from dragoman_simulators.graph_runtime.siblings import SiblingFunction
from dragoman_simulators.graphs.builtin import built_in
from dragoman_simulators.graphs.builtin_affine import parse_numbers
from dragoman_simulators.graphs.document import GraphDocument, NodeEntry, parse_document
from dragoman_simulators.graphs.function import CONCURRENCY, GraphFunction
from dragoman_simulators.graphs.graph import make_node
from dragoman_simulators.graphs.wiring import Node, wire
from dragoman_simulators.simulator_model import VectorModel, WaitingModel
from dragoman_simulators.vector_model import is_vector_function

# Options of a Python function in a graph file; the same as of `@vector_function`.
_FUNCTION_OPTIONS = ("inputs", "outputs", "at", "derivatives", "vectorised")


@dataclass(frozen=True, slots=True)
class NodeContext:
    """The folder of a graph file, and the other models of the server, if there is one."""

    folder: Path
    siblings: SiblingModels | None = None


def load_node(entry: NodeEntry, context: NodeContext) -> Node:
    """Load a node. Raises a DragomanError that names it."""
    try:
        function = _LOADERS[entry.kind](entry, context)
    except DragomanError as error:
        raise type(error)(f"node '{entry.name}': {error.message}") from error
    return make_node(
        entry.name,
        function,
        config=entry.config,
        passes=entry.passes,
        linear=entry.linear,
        concurrency=entry.concurrency,
        cache=entry.cache,
        label=entry.label,
    )


def _python(entry: NodeEntry, context: NodeContext) -> VectorFunction:
    """Load `file.py:name` relative to the graph file, or `module:name`."""
    path = _source(entry)
    if ":" not in path:
        raise InvalidInput(f"{entry.kind}: expected 'file.py:name' or 'module:name', got '{path}'")
    file, _, name = path.rpartition(":")
    target = plugins.resolve(f"{context.folder / file}:{name}" if file.endswith(".py") else path)
    options = dict(_options(entry, _FUNCTION_OPTIONS))
    if options.get("derivatives", "auto") not in METHODS:
        if options["derivatives"] != "none":
            known = ", ".join((*METHODS, "none"))
            raise InvalidInput(f"derivatives: expected one of {known}, got {options['derivatives']!r}")
        options["derivatives"] = None
    if not is_vector_function(target) and callable(target) and not isinstance(target, type):
        return LazyVectorFunction(target, FunctionOptions(**options)).build()
    if options and isinstance(lazy := getattr(target, "__vector_function__", None), LazyVectorFunction):
        return LazyVectorFunction(lazy.function, replace(lazy.options, **options)).build()
    if options:
        raise InvalidInput(f"'{path}' declares its own abilities: expected no options, got {', '.join(options)}")
    if is_vector_function(target):
        return build_vector_function(target)
    model = plugins.runtime("python").load(ModelSpec(name=entry.name, runtime="python", target=target))
    if not isinstance(model, VectorModel):
        raise InvalidInput(f"'{path}' is not a vector function; serve it as a model and refer to it with `served`")
    return model.function


def _remote(entry: NodeEntry, context: NodeContext) -> VectorFunction:
    """Connect to a UM-Bridge server, or to several with the same model; options are those of the runtime `umbridge`."""
    parameters = {"urls": entry.source, **entry.options}
    spec = ModelSpec(name=entry.name, runtime="umbridge", parameters=parameters)
    model = plugins.runtime("umbridge").load(spec)
    assert isinstance(model, VectorModel)
    function: Any = model.function
    try:
        function.connect()
    except BaseException:
        function.close()
        raise
    return cast("VectorFunction", function)


def _built_in(entry: NodeEntry, context: NodeContext) -> VectorFunction:
    return built_in(_source(entry), {k: read_array(context.folder, v, k) for k, v in entry.options.items()})


def _linear(entry: NodeEntry, context: NodeContext) -> VectorFunction:
    options = {"matrix": entry.source, **_options(entry, ("shift",))}
    return built_in("linear", {k: read_array(context.folder, v, k) for k, v in options.items()})


def _use_sibling(entry: NodeEntry, context: NodeContext) -> VectorFunction:
    """Use another model of the same server."""
    _options(entry, ())
    if context.siblings is None:
        raise InvalidInput(
            f"served: '{_source(entry)}' is available only in the server's process; run the graph there, or draw it "
            "with its models (dragoman graph FILE --with PATH)"
        )
    return SiblingFunction(_source(entry), context.siblings)


_LOADERS: Mapping[str, Callable[[NodeEntry, NodeContext], VectorFunction]] = {
    "fn": _python,
    "model": _python,
    "umbridge": _remote,
    "builtin": _built_in,
    "linear": _linear,
    "served": _use_sibling,
}


def _source(entry: NodeEntry) -> str:
    if not isinstance(entry.source, str) or not entry.source:
        raise InvalidInput(f"{entry.kind}: expected a string, got {entry.source!r}")
    return entry.source


def _options(entry: NodeEntry, known: tuple[str, ...]) -> Config:
    for option in entry.options:
        if option not in known:
            raise InvalidInput(
                f"unknown option '{option}' of a '{entry.kind}' node: expected {', '.join(known) or 'none'}"
            )
    return entry.options


def read_graph(path: Path) -> GraphDocument:
    """Read the graph in a file, or in a folder with a `graph.toml`. Raises InvalidInput naming the file and the
    error."""
    file = graph_file(path)
    if file is None:
        raise InvalidInput(f"'{path}' is not a graph: expected a file {', '.join(GRAPH_FILES)}, or a folder with one")
    try:
        return parse_document(_READERS[file.suffix](file.read_text()))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{file} cannot be read: {error}") from error
    except InvalidInput as error:
        raise InvalidInput(f"{file.name}: {error.message}") from error


def graph_name(path: Path) -> str:
    """Return the name of a graph: its own, else `beam` for `beam.graph.toml` and the folder's for `graph.toml`."""
    file = graph_file(path) or path
    default = file.stem.removesuffix(".graph") if file.stem != "graph" else file.resolve().parent.name
    try:
        return read_graph(path).name or default
    except InvalidInput:
        return default  # loading it reports the error


def read_array(folder: Path, value: Any, where: str) -> Any:
    """Return a value of a graph file: numbers, or the contents of the `.npy` file that it names."""
    if not isinstance(value, str):
        return value
    path = folder / value
    if path.suffix != ".npy":
        raise InvalidInput(f"{where}: expected numbers or the name of a .npy file, got '{value}'")
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{where}: '{path}' cannot be read: {error}") from error


def _yaml(text: str) -> Any:
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError as error:
        raise InvalidInput("YAML needs the package 'pyyaml' (pip install pyyaml); TOML and JSON need none") from error
    try:
        return parse(lambda: yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise InvalidInput(f"invalid YAML: {error}") from error


_READERS: Mapping[str, Callable[[str], Any]] = {
    ".toml": parse_toml,
    ".json": parse_json,
    ".yaml": _yaml,
    ".yml": _yaml,
}


class GraphModel(WaitingModel):
    """A graph in a file, or in a folder with `graph.toml`.

    The parameter `concurrency` (16) is the number of calls at a time, each in a thread. A graph with Python nodes runs
    in a process of its own, unless it calls other models of the server.
    """

    platform = "dragoman_graph"

    def __init__(self, spec: ModelSpec) -> None:
        self._path = Path(spec.uri)
        self._document = read_graph(self._path)
        super().__init__(spec, VectorFunction(), _concurrency(spec), _placement(self._document))

    def load(self) -> Any:
        self.function = load_graph(self._document, self._path, self.spec.siblings)
        super().load()


def placement_for(spec: ModelSpec) -> Placement:
    """Return where the graph of a spec runs, without loading its nodes; "process" if its file cannot be read."""
    try:
        return _placement(read_graph(Path(spec.uri)))
    except InvalidInput:
        return "process"


def load_graph(document: GraphDocument, path: Path, siblings: SiblingModels | None = None) -> GraphFunction:
    """Load all nodes of a graph. Raises a DragomanError that names node and port."""
    folder = path if path.is_dir() else path.parent
    nodes: list[Node] = []
    try:
        nodes.extend(load_node(entry, NodeContext(folder, siblings)) for entry in document.nodes)
        bound = {end: _parse_bound(folder, ".".join(end), value) for end, value in document.bound.items()}
        wiring = wire(nodes, document.edges, document.inputs, document.outputs, bound, document.sizes)
        return GraphFunction(wiring, name=document.name, threads=document.threads)
    except BaseException:
        for node in nodes:
            node.function.close()
        raise


def _parse_bound(folder: Path, port: str, value: Any) -> Vector:
    where = f"bind: '{port}'"
    return parse_numbers(read_array(folder, value, where), where).reshape(-1)


def _placement(document: GraphDocument) -> Placement:
    kinds = {node.kind for node in document.nodes}
    return "process" if kinds & {"fn", "model"} and "served" not in kinds else "inline"


def _concurrency(spec: ModelSpec) -> int:
    for key in spec.parameters:
        if key != "concurrency":
            raise ModelFailed(f"unknown parameter '{key}' of a graph: expected concurrency")
    value = spec.parameters.get("concurrency", CONCURRENCY)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelFailed(f"parameter 'concurrency': expected an integer from 1, got {value!r}")
    return value
