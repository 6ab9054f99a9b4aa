"""The process of `dragoman serve`: its settings, its server and what it prints."""

import asyncio
import errno
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dragoman.cli.startup import has_failed, progress, startup_line, startup_table
from dragoman.compat.files import environment_paths
from dragoman.core.errors import InvalidInput
from dragoman.core.options import forget_secrets
from dragoman.server import Server, logger_levels, run, settings_for
from dragoman.settings import Settings, from_environment, parse_settings, sagemaker_paths
from dragoman.system import logs, process


def serve(paths: Sequence[str], flags: Mapping[str, Any]) -> int:
    """Serve models until the process is stopped; return the exit status."""
    began_s = time.monotonic()
    server = _make_server(paths, flags)
    failed = False

    async def on_start(server: Server) -> None:
        nonlocal failed
        await progress(server)
        report = startup_table if server.settings.log_format == "text" else startup_line
        report(server, time.monotonic() - began_s)
        if has_failed(server):
            failed = True
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        run(server, on_start)
    except OSError as error:
        hint = " (--http-port and --grpc-port choose others)" if error.errno in (None, errno.EADDRINUSE) else ""
        print(f"dragoman: {error}{hint}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    return 1 if failed else 0


def _make_server(arguments: Sequence[str], flags: Mapping[str, Any]) -> Server:
    """Return the server that flags, environment and files describe, and prepare this process for it."""
    environment = from_environment(os.environ)
    forget_secrets()  # models in this process, and programs that they start, must not see them
    is_sagemaker = parse_settings(environment, flags).sagemaker
    paths = arguments or (sagemaker_paths(os.environ) if is_sagemaker else environment_paths(os.environ))

    def read_settings() -> Settings:
        return settings_for(paths, environment, flags)

    settings = read_settings()
    if not paths and not settings.can_add_models:
        raise InvalidInput("there is nothing to serve; required: PATH, a model file, a folder or module:object")
    logs.set_up(settings.log_format, settings.log_level, logger_levels(settings))
    if settings.log_format == "text":  # the table has the reason of each model that cannot be loaded
        logging.getLogger("dragoman.engine").addFilter(lambda record: not hasattr(record, "unloadable"))
    if settings.keep_memory:
        process.keep_freed_memory()
    process.raise_open_files_limit()
    process.shorten_switch_interval()
    server = Server(*paths, settings=settings)
    server.read_settings = read_settings
    return server
