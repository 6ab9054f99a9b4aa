"""The command `dragoman` and its subcommands."""

import argparse
import importlib
import os
import re
import select
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from dragoman._version import __version__
from dragoman.cli.terminal import printable
from dragoman.core.errors import DragomanError
from dragoman.core.options import suggestion

# Each is a module of this package with `add_arguments(parser)` and `run(arguments)`, imported when it is chosen, and
# perhaps `expand(words)`, which returns the arguments to parse.
_COMMANDS = {
    "serve": "serve models over HTTP and gRPC",
    "init": "create a project with a model, a test and a Containerfile",
    "models": "list the models of a running server",
    "infer": "send an inference request",
    "chat": "chat with a language model",
    "status": "show the models and workers of a running server",
    "worker": "run a model for a server on another machine",
    "doctor": "report what will differ for a folder of MLServer or LMI",
    "graph": "draw and check a graph of models",
    "check": "check that a server conforms to its protocols, or derivatives of a model",
    "bench": "measure latency and throughput of a model",
    "keys": "create, list and delete API keys",
    "completion": "print a completion script for bash, zsh or fish",
}

# Metavariables of arguments that name files or folders.
_FILES = ("PATH", "FILE", "FOLDER", "MODEL", "OUT")


class CommandParser(argparse.ArgumentParser):
    """A parser that suggests the closest option or choice for a misspelled one.

    `file_type` is the type that shtab completes as file names. Positional arguments may stand after options, unless
    the parser `has_commands`.
    """

    file_type: Any = None
    has_commands = False

    def __init__(self, **options: Any) -> None:
        # A command may declare a `--help` of its own.
        super().__init__(allow_abbrev=False, conflict_handler="resolve", **options)

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        action = super().add_argument(*names, **options)
        if self.file_type is not None and action.metavar in _FILES:
            action.complete = self.file_type  # type: ignore[attr-defined]
        return action

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parse = self.parse_known_args if self.has_commands else self.parse_known_intermixed_args
        found, unknown = parse(args, namespace)
        if unknown:
            if any(re.match(r"-([\d.,]|inf|nan)", each) for each in unknown):
                self.error(f"unrecognized arguments: {' '.join(unknown)}; put -- before values that begin with -")
            flag = next((each.partition("=")[0] for each in unknown if each.startswith("--")), "")
            known = re.findall(r"--[a-z][a-z0-9-]*", self.format_help())
            self.error(f"unrecognized arguments: {' '.join(unknown)}{suggestion(flag, known) if flag else ''}")
        return found

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        super().error(message + (suggestion(wrong[1], re.findall(r"[\w-]+", wrong[2])) if wrong else ""))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status.

    0 success, 1 failure, 2 wrong arguments or settings, 130 after Ctrl-C, 141 if the output was closed by its reader.
    """
    try:
        try:
            return _run(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            print(end="", flush=True)
    except BrokenPipeError:
        if not _discard_unread_output():
            raise
        return 141


def _discard_unread_output() -> bool:
    """Redirect standard streams whose reader has closed them to the null device; return whether there are any."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        poll.register(stream.fileno(), 0)  # errors and hang-ups only
    closed = [descriptor for descriptor, _ in poll.poll(0)]
    with open(os.devnull, "wb") as null:
        for descriptor in closed:
            os.dup2(null.fileno(), descriptor)
    return bool(closed)


def _run(words: list[str]) -> int:
    if not words:
        main_parser().print_help(sys.stderr)
        return 2
    if words[0] not in _COMMANDS:
        main_parser().parse_args(words)
    command = _command(words[0])
    parser = CommandParser(prog=f"dragoman {words[0]}", formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_arguments(parser)
    try:
        status: int = command.run(parser.parse_args(getattr(command, "expand", list)(words[1:])))
    except DragomanError as error:
        print(f"dragoman: {printable(error.message)}", file=sys.stderr)
        return 2
    except OSError as error:
        if not error.filename:
            raise
        print(f"dragoman: '{error.filename}' cannot be read: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status


def _command(name: str) -> Any:
    return importlib.import_module(f"dragoman.cli.{name}")


def main_parser(file_type: Any = None) -> CommandParser:
    """Return the parser of `dragoman`, without the arguments of its commands unless `file_type` is given.

    Their modules import NumPy, which `--help` and `--version` must not wait for.
    """
    parser = CommandParser(
        prog="dragoman",
        description="Serve models over Open Inference, UM-Bridge and the OpenAI, TGI and LMI text APIs.",
        epilog="Try: dragoman serve model.onnx",
    )
    parser.add_argument("--version", action="version", version=f"dragoman {__version__}")
    parser.has_commands = True
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, summary in _COMMANDS.items():
        subparser = commands.add_parser(name, help=summary)
        if file_type is not None:
            subparser.file_type = file_type
            _command(name).add_arguments(subparser)
    return parser
