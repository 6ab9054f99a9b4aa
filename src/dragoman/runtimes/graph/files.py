"""Read the file of a graph."""

import importlib
import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dragoman.core.errors import InvalidInput
from dragoman.graphs.document import GraphDocument, parse_document
from dragoman.runtimes.graph import GRAPH_FILES, graph_file


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
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidInput(f"invalid YAML: {error}") from error


_READERS: Mapping[str, Callable[[str], Any]] = {
    ".toml": tomllib.loads,
    ".json": json.loads,
    ".yaml": _yaml,
    ".yml": _yaml,
}
