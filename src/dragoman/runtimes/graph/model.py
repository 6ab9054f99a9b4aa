"""Graphs in files, served as models: `runtime: graph`."""

from pathlib import Path
from typing import Any

from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.sibling_models import SiblingModels
from dragoman.core.spec import ModelSpec, Placement
from dragoman.core.vectors import VectorFunction
from dragoman.graphs.builtin_base import parse_numbers
from dragoman.graphs.document import Document
from dragoman.graphs.function import CONCURRENCY, GraphFunction
from dragoman.graphs.wiring import Node, wire
from dragoman.runtimes.graph.files import array, read_graph
from dragoman.runtimes.graph.nodes import Place, load_node
from dragoman.runtimes.waiting_model import WaitingModel


class GraphModel(WaitingModel):
    """A graph in a file, or in a folder with `graph.toml`. Its parameter `concurrency` says how many calls it works on
    at a time (16), each in a thread.

    It runs in the server's process where it asks other models there, or where it only waits for servers; else, where
    some node is Python code, in one of its own.
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


def load_graph(document: Document, path: Path, siblings: SiblingModels | None = None) -> GraphFunction:
    """The function of a graph, with all its nodes loaded. Raises a DragomanError that names node and port."""
    folder = path if path.is_dir() else path.parent
    nodes: list[Node] = []
    try:
        nodes.extend(load_node(text, Place(folder, siblings)) for text in document.nodes)
        bound = {
            end: parse_numbers(array(folder, value, f"bind: '{'.'.join(end)}'"), f"bind: '{'.'.join(end)}'").reshape(-1)
            for end, value in document.bound.items()
        }
        wiring = wire(nodes, document.edges, document.inputs, document.outputs, bound, document.sizes)
        return GraphFunction(wiring, name=document.name, threads=document.threads)
    except BaseException:
        for node in nodes:
            node.function.close()
        raise


def _placement(document: Document) -> Placement:
    kinds = {node.kind for node in document.nodes}
    return "process" if kinds & {"fn", "model"} and "served" not in kinds else "inline"


def _concurrency(spec: ModelSpec) -> int:
    for key in spec.parameters:
        if key != "concurrency":
            raise ModelFailed(f"there is no parameter '{key}' of a graph; there is concurrency")
    found = spec.parameters.get("concurrency", CONCURRENCY)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ModelFailed(f"parameter 'concurrency': expected a whole number from 1, got {found!r}")
    return found
