"""The command `dragoman`: its subcommands and how a mistake is told."""

import argparse
import sys
from collections.abc import Sequence

from dragoman._version import __version__
from dragoman.cli import check, doctor, graph, serve
from dragoman.core.errors import DragomanError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; gives the exit status: 0 done, 1 could not be done, 2 asked for wrongly."""
    parser = argparse.ArgumentParser(
        prog="dragoman",
        description="One model server for every inference protocol.",
        epilog="Try: dragoman serve model.onnx",
    )
    parser.add_argument("--version", action="version", version=f"dragoman {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    serve.add_to(commands)
    doctor.add_to(commands)
    graph.add_to(commands)
    check.add_to(commands)
    given = parser.parse_args(arguments)
    try:
        status: int = given.run(given)
    except DragomanError as fault:
        print(f"dragoman: {fault.message}", file=sys.stderr)
        return 2
    except PermissionError as fault:
        print(f"dragoman: '{fault.filename}' cannot be read: {fault.strerror}", file=sys.stderr)
        return 2
    return status
