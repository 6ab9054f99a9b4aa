"""`dragoman serve PATH...`: flags become settings, and the server runs until it is told to stop."""

import argparse
import asyncio
import errno
import os
import sys
import time
from typing import Any

from dragoman.cli.table import progress, startup_line, startup_table
from dragoman.core.errors import InvalidInput
from dragoman.core.secrets import forget_secrets
from dragoman.server import Server, run, settings_for
from dragoman.settings import FIELDS, choices, from_environment, kind, merged, sagemaker_paths
from dragoman.system import allocator as memory
from dragoman.system import logs, open_files

_EPILOG = """\
what PATH may be:
  model.onnx              a model file; the runtime follows from the file, the name too
  models/                 a folder of models: each sub-folder or file is one model
  resnet/                 one model; sub-folders named by integers are its versions
  package.module:object   a dragoman.Model class or a function; file.py:object likewise

settings:
  Each flag is also an environment variable (--http-port is DRAGOMAN_HTTP_PORT) and a key in the [server] table of a
  dragoman.toml in the folder that is served. A flag goes before the environment, which goes before the file.

examples:
  dragoman serve model.onnx
  dragoman serve models/ --allow-pickle --http-port 9000
  dragoman serve my_module:predict --placement process --replicas 2

then:
  curl http://127.0.0.1:8080/v2/models
"""


def add_to(commands: Any) -> None:
    """Add the subcommand to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="serve models over HTTP and gRPC",
        usage="dragoman serve [options] [PATH ...]",
        description="Serve models over HTTP and gRPC.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="*", metavar="PATH", help="a model file, a folder, or module:object")
    groups: dict[str, Any] = {}
    for name, field in FIELDS.items():
        title = field.metadata["group"]
        group = groups.setdefault(title, parser.add_argument_group(title))
        _add_flag(group, name, field.metadata["help"], field.default)
    parser.set_defaults(run=_run)


def _add_flag(group: Any, name: str, line: str, default: Any) -> None:
    flag = "--" + name.replace("_", "-")
    if kind(name) is bool:
        group.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, default=None, help=line)
        return
    words = tuple(filter(None, choices(name)))
    shown = "" if default == "" else f" (default {default})"
    group.add_argument(
        flag,
        dest=name,
        default=None,
        choices=words or None,
        metavar=None if words else name.rpartition("_")[2].upper(),
        help=(line + shown).replace("%", "%%"),
    )


def _run(given: argparse.Namespace) -> int:
    began_s = time.monotonic()
    server = _server(given)
    failed = False

    async def started(server: Server) -> None:
        nonlocal failed
        await progress(server)
        models = server.engine.deployments()
        if models and all(
            d.state == "UNAVAILABLE" and not d.retries for d in models
        ):  # one that somebody has unloaded meanwhile is no failure
            failed = True
            os.kill(os.getpid(), 15)
        tell = startup_table if server.settings.log_format == "text" else startup_line
        tell(server, time.monotonic() - began_s)

    try:
        run(server, started)
    except OSError as fault:
        hint = " (--http-port and --grpc-port choose others)" if fault.errno in (None, errno.EADDRINUSE) else ""
        print(f"dragoman: {fault}{hint}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    return 1 if failed else 0


def _server(given: argparse.Namespace) -> Server:
    """The server that the flags and the environment ask for; the process is made ready for it."""
    if any(":" in path and not path.rpartition(":")[0].endswith(".py") for path in given.paths):
        sys.path.append(os.getcwd())  # `module:object` finds modules of the folder one is in, after all installed ones
    flags = {name: getattr(given, name) for name in FIELDS if getattr(given, name) is not None}
    environment = from_environment(os.environ)
    forget_secrets()  # they are not for models in this process, nor for what those start
    paths = given.paths or (sagemaker_paths(os.environ) if merged(environment, flags).sagemaker else [])
    settings = settings_for(paths, environment, flags)
    if not paths and not settings.may_grow:
        raise InvalidInput("there is nothing to serve; required: PATH, a model file, a folder or module:object")
    logs.set_up(settings.log_format, settings.log_level)
    if settings.keep_memory:
        memory.keep()
    open_files.allow()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what its C core prints beside the log, we tell in words
    return Server(*paths, settings=settings)
