"""`dragoman serve PATH...`: serve models until the process is stopped."""

import argparse
import os
import sys
from typing import Any

from dragoman.core.options import Option
from dragoman.settings import GROUPS, SETTINGS

_EPILOG = """\
PATH:
  model.onnx              a model file; runtime and name follow from the file
  models/                 a folder of models: each subfolder or file is one model
  resnet/                 one model; subfolders named by integers are its versions
  package.module:object   a dragoman.Model class or a function; also file.py:object

settings:
  Each flag is also an environment variable (--http-port is DRAGOMAN_HTTP_PORT) and a key in the [server] table of a
  dragoman.toml in a folder given as PATH. A flag overrides the variable, which overrides the file.

examples:
  dragoman serve model.onnx
  dragoman serve models/ --allow-pickle --http-port 9000
  dragoman serve my_module:predict --placement process --replicas 2

try:
  curl http://127.0.0.1:8080/v2/models
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command: paths, and a flag for each setting."""
    parser.usage = "dragoman serve [options] [PATH ...]"
    parser.description = "Serve models over HTTP and gRPC."
    parser.epilog = _EPILOG
    parser.add_argument("paths", nargs="*", metavar="PATH", help="a model file, a folder, or module:object")
    groups: dict[str, Any] = {title: parser.add_argument_group(title) for title in GROUPS}
    for option in SETTINGS.values():
        if not option.secret:
            _add_flag(groups[option.group], option)


def _add_flag(group: Any, option: Option) -> None:
    flag = "--" + option.name.replace("_", "-")
    shown = f" (default: {option.shown_default})" if option.shown_default else ""
    common: Any = {"dest": option.name, "default": None, "help": (option.help + shown).replace("%", "%%")}
    words = tuple(filter(None, option.choices))
    if option.type is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
    elif words:
        group.add_argument(flag, choices=words, **common)
    else:
        group.add_argument(flag, metavar=option.name.rpartition("_")[2].upper(), **common)


def run(arguments: argparse.Namespace) -> int:
    """Serve until the process is stopped; return the exit status."""
    from dragoman.cli.serving import serve

    if any(":" in path and not path.rpartition(":")[0].endswith(".py") for path in arguments.paths):
        sys.path.append(os.getcwd())  # so that `module:object` finds modules of the working directory, after all others
    flags = {name: value for name, value in vars(arguments).items() if name in SETTINGS and value is not None}
    return serve(arguments.paths, flags)
