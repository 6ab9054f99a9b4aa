"""The process of `dragoman serve`: its settings, its server and what it prints."""

import asyncio
import atexit
import errno
import logging
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from dragoman.cli.startup import has_failed, progress, startup_line, startup_table
from dragoman.core.errors import InvalidInput
from dragoman.core.options import forget_secrets, secrets_in_files, suggestion
from dragoman.engine_setup import served_paths, settings_for
from dragoman.formats.grpc_messages import message_class
from dragoman.server import Server, logger_levels, run
from dragoman.settings import Settings, from_environment, parse_settings
from dragoman.system import logs, process
from dragoman.system.service_manager import notify, take_sockets
from dragoman.system.threads import call_in_thread, is_loading
from dragoman.workers.local import GRACE_S
from dragoman.workers.pool import Pool
from dragoman.workers.spare_process import release_spare

log = logging.getLogger("dragoman.server")

Report = Callable[[Server, float], None]  # with the seconds that the start took


def serve(paths: Sequence[str], flags: Mapping[str, Any], table: Report = startup_table) -> int:
    """Serve models until the process is stopped; return the exit status.

    table: prints the models and what to try, once they are loaded, unless the log is JSON.
    """
    status = 1  # if serving raises

    def exit_despite_loads() -> None:
        """End at once if a model is still being loaded: its thread would abort the process while it is torn down."""
        if is_loading():
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    atexit.register(exit_despite_loads)  # before others, so that it runs after them
    status = _serve(paths, flags, table)
    return status


def _serve(paths: Sequence[str], flags: Mapping[str, Any], table: Report) -> int:
    began_s = time.monotonic()
    try:
        server = _make_server(paths, flags)
    except InvalidInput as error:
        raise InvalidInput(_with_nearest_path(error.message, paths)) from error
    failed = False

    async def on_start(server: Server) -> None:
        process.collect_rarely()  # before models are loaded, whose objects must be freed when they are unloaded

        def pools() -> set[Pool]:
            ready = [each for each in server.engine.deployments() if each.state == "READY"]
            return {pool for each in ready if each.placement in ("inline", "thread") for pool in each.pools}

        await asyncio.gather(describe(server), process.collect_regularly(pools, 2 * GRACE_S))

    async def describe(server: Server) -> None:
        nonlocal failed
        await progress(server)
        release_spare()
        report = table if server.settings.log_format == "text" else startup_line
        report(server, time.monotonic() - began_s)
        if has_failed(server):
            failed = True
            os.kill(os.getpid(), signal.SIGTERM)
            return
        notify("READY=1")
        if server.grpc_port >= 0:  # or the first call over gRPC would stop the event loop for 15 ms
            await call_in_thread(message_class, "ModelInferRequest")

    try:
        run(server, on_start)
    except OSError as error:
        print(f"dragoman: {explain_address(error, server.settings)}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    return 1 if failed else 0


def _with_nearest_path(message: str, paths: Sequence[str]) -> str:
    """Return the message with the nearest existing name, if it is the one about a missing path."""
    for path in paths:
        missing = f"'{path}' not found"
        folder, name = os.path.split(path)
        with suppress(OSError):
            if message.startswith(missing) and (hint := suggestion(name, os.listdir(folder or "."))):
                return missing + hint
    return message


def explain_address(error: OSError, settings: Settings) -> str:
    """Return why the server cannot listen, and the flag that changes it."""
    host, _, port = str(error.filename or "").rpartition(":")
    if not port.isdecimal():
        return str(error)
    ports = ("http_port", "grpc_port", "umbridge_port", "admin_port", "worker_port")
    names = [name for name in ports if getattr(settings, name) == int(port)] or ["http_also"]
    flag = "--" + names[0].replace("_", "-")
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use: stop the other server, or choose a port with {flag}"
    if error.errno == errno.EACCES:
        return f"no permission to listen on port {port}: choose a port from 1024 on with {flag}"
    hosts = {"admin_port": "--admin-host", "worker_port": "--worker-host", "http_also": "--http-also"}
    flag = hosts.get(names[0], "--host")
    return f"cannot listen on '{host}', {error.strerror}: choose an address of this machine with {flag}"


def _make_server(arguments: Sequence[str], flags: Mapping[str, Any]) -> Server:
    """Return the server that flags, environment and files describe, and prepare this process for it."""
    try:
        sockets = take_sockets(os.environ)
    except ValueError as error:
        raise InvalidInput(str(error)) from error
    flags = {**flags, **settings_of_sockets(sockets)}
    environment = from_environment(os.environ)
    forget_secrets()  # models in this process, and programs that they start, must not see them

    def read_settings() -> Settings:
        return settings_for(paths, {**environment, **secrets_in_files(os.environ)}, flags)

    with warnings.catch_warnings(record=True) as found:  # to be logged in the format of the settings
        warnings.simplefilter("always", FutureWarning)
        paths = served_paths(arguments, os.environ, parse_settings(environment, flags))
        settings = read_settings()
    if not paths and not settings.can_add_models:
        raise InvalidInput("nothing to serve; required: PATH, a model file, a folder or module:object")
    logs.set_up(settings.log_format, settings.log_level, logger_levels(settings))
    for text in dict.fromkeys(str(warning.message) for warning in found):
        log.warning(text)
    if settings.log_format == "text":  # the table has the reason of each model that cannot be loaded
        logging.getLogger("dragoman.engine").addFilter(lambda record: not hasattr(record, "unloadable"))
    if settings.keep_memory:
        process.keep_freed_memory()
    process.raise_open_files_limit()
    process.shorten_switch_interval()
    server = Server(*paths, settings=settings)
    server.read_settings = read_settings
    server.use_sockets(sockets)
    return server


def settings_of_sockets(sockets: Mapping[str, socket.socket]) -> dict[str, Any]:
    """Return the settings with the addresses of sockets. Raises InvalidInput if those of http and grpc differ."""
    settings: dict[str, Any] = {}
    hosts: dict[str, str] = {}
    for name, sock in sockets.items():
        hosts[name], settings[f"{name}_port"] = sock.getsockname()[:2]
    if "admin" in hosts:
        settings["admin_host"] = hosts.pop("admin")
    if len({*hosts.values()}) > 1:
        raise InvalidInput(f"sockets of the service manager: expected one host for http and grpc, got {hosts}")
    if hosts:
        settings["host"] = next(iter(hosts.values()))
    return settings
