"""`dragoman graph FILE`: draws a graph of models and tells what it can do, or what is wrong with it."""

import argparse
import asyncio
import os
from pathlib import Path
from typing import Any

from dragoman import plugins
from dragoman.core.errors import InvalidInput
from dragoman.core.peers import Peers
from dragoman.graphs.draw_svg import svg
from dragoman.graphs.draw_text import text
from dragoman.graphs.function import GraphFunction
from dragoman.graphs.picture import picture, summary
from dragoman.server import open_engine
from dragoman.settings import from_environment

_EPILOG = """\
FILE is a graph.toml, any.graph.toml (or .json, .yaml), a folder with one, or file.py:object or module:object of a
graph built in Python. Its nodes are loaded and their sizes checked: UM-Bridge servers that it names have to be there,
and models that it names by `served` are told with --with.

The exit status is 2 where the graph makes no sense, and the fault is told with its node and port.
"""


def add_to(commands: Any) -> None:
    """Add the subcommand to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "graph",
        help="draw a graph of models, and check it",
        description="Draw a graph of models, and check it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="the graph")
    parser.add_argument("--svg", metavar="OUT", help="write the drawing to a file as SVG as well")
    parser.add_argument(
        "--with", metavar="PATH", nargs="+", dest="models", default=[], help="models that nodes name by `served`"
    )
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    return asyncio.run(_beside(given)) if given.models else _show(_loaded(given.file, None), given)


async def _beside(given: argparse.Namespace) -> int:
    """With the models that it asks loaded in this process, as a server would."""
    async with open_engine(*given.models, **from_environment(os.environ)) as engine:
        graph = await asyncio.to_thread(_loaded, given.file, engine.peers("graph"))
        return await asyncio.to_thread(_show, graph, given)


def _show(graph: GraphFunction, given: argparse.Namespace) -> int:
    try:
        shown = picture(graph)
        print(text(shown))
        print()
        print("\n".join(summary(graph)))
        if given.svg:
            try:
                Path(given.svg).write_text(svg(shown, graph.name or given.file), encoding="utf-8")
            except OSError as fault:
                raise InvalidInput(f"'{given.svg}' cannot be written: {fault}") from fault
    finally:
        graph.close()
    return 0


def _loaded(place: str, peers: Peers | None) -> GraphFunction:
    path = Path(place)
    if not path.exists() and ":" in place:
        found = plugins.resolve("dragoman.graphs.graph:vector_function")(plugins.resolve(place))
        if not isinstance(found, GraphFunction):
            raise InvalidInput(f"'{place}' is {type(found).__name__}, no graph")
        return found
    if not path.exists():
        raise InvalidInput(f"'{place}' is not there; expected a graph's file, a folder with one, or file.py:object")
    read, load = (plugins.resolve(f"dragoman.runtimes.{n}") for n in ("graph_files:read_graph", "graph:load_graph"))
    made: GraphFunction = load(read(path), path, peers)
    return made
