"""The runtime of graphs of models, described in files."""

from pathlib import Path

from dragoman.core.model import Model
from dragoman.core.runtime import Runtime
from dragoman.core.spec import ModelSpec, Placement

# The files that hold graphs; another name and a dot may stand before these.
GRAPH_FILES = ("graph.toml", "graph.json", "graph.yaml", "graph.yml")


def _load(spec: ModelSpec) -> Model:
    from dragoman.runtimes.graph.model import GraphModel

    return GraphModel(spec)


def _is_graph_file(path: Path) -> bool:
    return path.name.endswith(GRAPH_FILES) and path.name.partition("graph")[0][-1:] in ("", ".")


def graph_file(path: Path) -> Path | None:
    """Return the file of a graph: `graph.toml`, `NAME.graph.toml`, or the one that makes a folder a graph."""
    if path.is_dir():
        return next((path / name for name in GRAPH_FILES if (path / name).is_file()), None)
    return path if _is_graph_file(path) else None


def _own_name(path: Path) -> str:
    from dragoman.runtimes.graph.model import graph_name

    return graph_name(path)


def _placement(spec: ModelSpec) -> Placement:
    from dragoman.runtimes.graph.model import placement_for

    return placement_for(spec)


RUNTIME = Runtime(
    load=_load,
    shared_suffixes=(".toml", ".json", ".yaml", ".yml"),
    is_model_file=_is_graph_file,
    folder_files=GRAPH_FILES,
    priority=20,
    own_name=_own_name,
    placement=_placement,
)
