"""`dragoman graph FILE`: print a graph of models as a Mermaid diagram and check it."""

import argparse
import asyncio
import json
import os
from pathlib import Path
from typing import Any

from dragoman import plugins
from dragoman.core.errors import InvalidInput
from dragoman.core.spec import SiblingModels
from dragoman.engine_setup import open_engine
from dragoman.settings import from_environment
from dragoman_simulators.graph_runtime.model import load_graph, read_graph
from dragoman_simulators.graphs.description import describe, draw_mermaid
from dragoman_simulators.graphs.function import GraphFunction
from dragoman_simulators.graphs.graph import vector_function

_EPILOG = """\
FILE is a graph.toml, any.graph.toml (or .json, .yaml), a folder with one, or file.py:object or module:object of a
graph built in Python. Its nodes are loaded and their sizes checked: UM-Bridge servers that it names must be running,
and models that it names by `served` must be given by --with.

The output is a Mermaid file (dragoman graph FILE > graph.mmd). GitHub and GitLab draw it in a block ```mermaid of a
Markdown page, and so does https://mermaid.live. Comments at its end explain the letters in the nodes.

examples:
  dragoman graph plant.graph.toml > plant.mmd
  dragoman graph graphs.py:pipeline --with models/ --json

Exit status: 0 success, 2 if the graph is invalid; the message names the node and the port.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Check a graph of models and print it as a Mermaid diagram."
    parser.epilog = _EPILOG
    parser.add_argument("file", metavar="FILE", help="the graph")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a Mermaid diagram")
    parser.add_argument(
        "--with", metavar="PATH", nargs="+", dest="models", default=[], help="models that nodes name by `served`"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    return (
        asyncio.run(_show_with_models(arguments)) if arguments.models else _show(_load(arguments.file, None), arguments)
    )


async def _show_with_models(arguments: argparse.Namespace) -> int:
    """Show the graph with the models that it uses loaded in this process, as a server does."""
    settings: Any = from_environment(os.environ)
    async with open_engine(*arguments.models, **settings) as engine:
        graph = await asyncio.to_thread(_load, arguments.file, engine.siblings("graph"))
        return await asyncio.to_thread(_show, graph, arguments)


def _show(graph: GraphFunction, arguments: argparse.Namespace) -> int:
    try:
        if arguments.json:
            name = graph.name or Path(arguments.file).resolve().name
            print(json.dumps({"name": name, **describe(graph)}, indent=2))
        else:
            print(draw_mermaid(graph))
    finally:
        graph.close()
    return 0


def _load(place: str, siblings: SiblingModels | None) -> GraphFunction:
    path = Path(place)
    if not path.exists() and ":" in place:
        function = vector_function(plugins.resolve(place))
        if not isinstance(function, GraphFunction):
            raise InvalidInput(f"'{place}' is {type(function).__name__}, expected a graph")
        return function
    if not path.exists():
        raise InvalidInput(f"'{place}' not found: expected a graph file, a folder with one, or file.py:object")
    return load_graph(read_graph(path), path, siblings)
