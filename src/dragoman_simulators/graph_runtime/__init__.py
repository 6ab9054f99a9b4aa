"""The runtime of graphs of models, described in files."""

from pathlib import Path

from dragoman.core.runtime import Runtime, lazy_function

# The files that hold graphs; another name and a dot may stand before these.
GRAPH_FILES = ("graph.toml", "graph.json", "graph.yaml", "graph.yml")


def _is_graph_file(path: Path) -> bool:
    return path.name.endswith(GRAPH_FILES) and path.name.partition("graph")[0][-1:] in ("", ".")


def graph_file(path: Path) -> Path | None:
    """Return the file of a graph: `graph.toml`, `NAME.graph.toml`, or the one that makes a folder a graph."""
    if path.is_dir():
        return next((path / name for name in GRAPH_FILES if (path / name).is_file()), None)
    return path if _is_graph_file(path) else None


RUNTIME = Runtime(
    load=lazy_function("dragoman_simulators.graph_runtime.model:GraphModel"),
    shared_suffixes=(".toml", ".json", ".yaml", ".yml"),
    is_model_file=_is_graph_file,
    folder_files=GRAPH_FILES,
    priority=20,
    own_name=lazy_function("dragoman_simulators.graph_runtime.model:graph_name"),
    placement=lazy_function("dragoman_simulators.graph_runtime.model:placement_for"),
)
