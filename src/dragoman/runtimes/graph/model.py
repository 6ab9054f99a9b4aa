"""Graphs in files, served as models: `runtime: graph`."""

from pathlib import Path
from typing import Any

from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.sibling_models import SiblingModels
from dragoman.core.spec import ModelSpec, Placement
from dragoman.core.vectors import Vector, VectorFunction
from dragoman.graphs.builtin_base import parse_numbers
from dragoman.graphs.document import GraphDocument
from dragoman.graphs.function import CONCURRENCY, GraphFunction
from dragoman.graphs.wiring import Node, wire
from dragoman.runtimes.graph.files import read_array, read_graph
from dragoman.runtimes.graph.nodes import NodeContext, load_node
from dragoman.runtimes.vector_model import WaitingModel


class GraphModel(WaitingModel):
    """A graph in a file, or in a folder with `graph.toml`.

    The parameter `concurrency` (16) is the number of calls at a time, each in a thread. A graph with Python nodes runs
    in a process of its own, unless it calls other models of the server.
    """

    platform = "graph"

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
