"""A server: settings, repository, engine and transports."""

import asyncio
import inspect
import logging
import os
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, Unpack

from dragoman import plugins
from dragoman.assembly import http_addresses, open_hosts
from dragoman.core.audit import log_reload
from dragoman.core.errors import DragomanError, InvalidInput, ModelFailed
from dragoman.engine.counters import METRICS_FOLDER
from dragoman.engine.engine import Engine
from dragoman.engine_setup import make_engine, settings_for, spec_of_object
from dragoman.server_transports import ServerTransports, make_kafka_input, make_worker_port
from dragoman.services import Services
from dragoman.settings import GROUPS, SETTINGS, Settings
from dragoman.settings_arguments import SettingsArguments
from dragoman.system import event_loop, logs
from dragoman.system.event_loop import StopSignals
from dragoman.system.files import TemporaryFolder, remove_abandoned_folders
from dragoman.system.process import explain_temporary_folder
from dragoman.system.service_manager import notify

log = logging.getLogger("dragoman.server")

# Seconds to send the responses of cancelled calls.
_FINAL_RESPONSES_S = 0.5
# Settings that a reload changes.
_LIVE = ("log_level", "explain_batches")


class Server:
    """A server for some models: paths, `module:object`, or Python objects (a Model, its class, a function).

    `with Server("model.onnx", http_port=0) as server:` loads the models, listens, and returns a server whose `http_url`
    and `grpc_url` clients can use. It runs in a thread with an event loop of its own, so that a `Client` may be used in
    the same program, also in a notebook; `start` and `close` do the same without a block. `async with` runs it in the
    running event loop, where `engine` answers calls directly; blocking clients then belong in other threads.

    Keyword arguments are the fields of `Settings`. Raises InvalidInput for an invalid path or setting, OSError if a
    port is in use. A model that cannot be loaded is UNAVAILABLE, and the server is then not ready.
    """

    def __init__(self, *models: Any, settings: Settings | None = None, **changes: Unpack[SettingsArguments]) -> None:
        paths = [str(m) for m in models if isinstance(m, str | Path)]
        self.read_settings: Callable[[], Settings] = lambda: settings or settings_for(paths, changes)  # for `reload`
        self.settings = self.read_settings()
        specs = [spec_of_object(m, self.settings) for m in models if not isinstance(m, str | Path)]
        self.worker_port = make_worker_port(self.settings)
        self.engine = make_engine(paths, specs, self.settings, worker_port=self.worker_port)
        if self.worker_port is not None:
            self.worker_port.use_store(self.engine.store)
        self._services = Services(self.engine, self.settings)
        self._transports = _make_transports(self.engine, self.settings)
        self._kafka = make_kafka_input(self.engine, self.settings)
        self._thread: event_loop.LoopThread | None = None
        self.engine.metric_sources.append(self._transports.metrics)

    @property
    def http_url(self) -> str:
        """URL for HTTP clients, such as `http://127.0.0.1:8080`; "" if no protocol over HTTP is served."""
        return next(iter(self.http_urls), "")

    @property
    def http_urls(self) -> list[str]:
        """URLs of all HTTP addresses, including those of `http_also`."""
        bound = zip(http_addresses(self.settings), self.http_ports, strict=False)
        return [self._url(_client_host(host), port) for (host, _), port in bound]

    @property
    def bound_urls(self) -> list[str]:
        """URLs of all HTTP addresses as they are bound: 0.0.0.0 for every network interface."""
        bound = zip(http_addresses(self.settings), self.http_ports, strict=False)
        return [self._url(_url_host(host), port) for (host, _), port in bound]

    @property
    def bound_grpc_address(self) -> str:
        """Address of gRPC as it is bound, "" if gRPC is off."""
        return f"{_url_host(self.settings.host)}:{self.grpc_port}" if self.grpc_port >= 0 else ""

    @property
    def admin_url(self) -> str:
        """URL of the admin port, "" without one."""
        host = self.settings.admin_host or self.settings.host
        port = self._transports.admin_port
        return self._url(_client_host(host), port) if port >= 0 else ""

    def _url(self, host: str, port: int) -> str:
        return f"{'https' if self.settings.tls_cert else 'http'}://{host}:{port}"

    @property
    def grpc_url(self) -> str:
        """Address for gRPC clients, as `127.0.0.1:8081`; "" if gRPC is off."""
        return f"{_client_host(self.settings.host)}:{self.grpc_port}" if self.grpc_port >= 0 else ""

    @property
    def http_ports(self) -> list[int]:
        """HTTP ports, in the order of the addresses in the settings."""
        return self._transports.http_ports

    @property
    def grpc_port(self) -> int:
        """The gRPC port, -1 without one."""
        return self._transports.grpc_port

    @property
    def http_protocols(self) -> list[str]:
        """Names of the protocols over HTTP."""
        return self._transports.http_protocols

    @property
    def grpc_protocols(self) -> list[str]:
        """Names of the gRPC services."""
        return self._transports.grpc_protocols

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> Self:
        """Serve in a thread of its own until `close` or the end of the program; return once the models are loaded.

        Raises RuntimeError if it runs already.
        """
        if self._thread is not None:
            raise RuntimeError("the server runs already: expected one call of start() for each Server")
        thread = event_loop.LoopThread(self, "dragoman-server")
        thread.start()
        self._thread = thread
        return self

    def close(self) -> None:
        """Stop a server that `start` has started; calls in flight are cancelled."""
        if self._thread is not None:
            self._thread.stop()

    async def __aenter__(self) -> Self:
        await self.listen()
        await self.engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop(0.0)

    def use_sockets(self, sockets: Mapping[str, socket.socket]) -> None:
        """Listen on these sockets, http, grpc and admin, instead of binding the addresses of the settings.

        Clients that connect while models are loaded, or while the server drains, wait for this process or the next.
        The settings must have the addresses of the sockets. Raises InvalidInput with several processes.
        """
        settings = self.settings
        if sockets and settings.processes != 1:
            raise InvalidInput(
                "setting 'processes': expected 1 with sockets of the service manager (LISTEN_FDS), "
                f"got {settings.processes}"
            )
        hosts = {"admin": settings.admin_host or settings.host}
        self._transports.inherited = {
            (hosts.get(name, settings.host), getattr(settings, f"{name}_port")): sock for name, sock in sockets.items()
        }

    async def listen(self) -> None:
        """Open the ports. The server is live, but not ready until `engine.start()` has loaded its models."""
        if not (self.settings.load_at_start or self.settings.allows_control):
            log.warning("nothing will be served: no model is loaded at the start, nor later without --control-token")
        self._warn_if_open()
        try:
            if self.engine.audit is not None:
                self.engine.audit.attach()
            if self.worker_port is not None:
                await self.worker_port.start()
            await self._transports.start()
            await self._services.start(self._transports.assembly)
            if self._kafka is not None:
                await self._kafka.start()
        except BaseException:
            await self.stop(0.0)
            raise

    def _warn_if_open(self) -> None:
        """Warn if other machines need no key, except in SageMaker, whose contract is that."""
        settings = self.settings
        hosts = ", ".join(open_hosts(settings))
        if not hosts or settings.sagemaker or settings.needs_keys:
            return
        if settings.control_open and not settings.control_token:
            log.warning(
                "control_open on a public address: every client of %s may load and unload models, and models can run "
                "code; set --api-keys, --control-token or --host 127.0.0.1",
                hosts,
            )
        elif not settings.tls_client_ca:
            log.warning(
                "no authentication on a public address: every client of %s may use the models; set --api-keys "
                "(`dragoman keys create NAME` makes a key) or --host 127.0.0.1",
                hosts,
            )

    def reload(self) -> None:
        """Reload files, as SIGHUP does: API keys, JSON Web Key Sets, TLS certificates, the log level and the models.

        Keys and certificates that have changed are found within a second without it. Of the settings only `log_level`
        and `explain_batches` take effect; a warning names others that have changed.
        """
        self._transports.reload()
        before = {name: getattr(self.settings, name) for name in _LIVE}
        try:
            self._apply_settings(self.read_settings())
        except DragomanError as error:
            log.error("settings are unchanged: %s", error.message)
            log_reload("settings", "signal", {}, error)
        else:
            after = {name: getattr(self.settings, name) for name in _LIVE}
            log_reload("settings", "signal", {"before": before, "after": after})
        self.engine.sync()

    def _reload_as_service(self) -> None:
        if not self.engine.started:  # the service manager still waits for the start
            self.reload()
            return
        notify("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")
        self.reload()
        notify("READY=1")

    def _apply_settings(self, settings: Settings) -> None:
        """Apply settings that can change while the server runs."""
        before = self.settings
        logs.set_level(settings.log_level, logger_levels(settings))
        for name in SETTINGS:
            if name not in _LIVE and getattr(settings, name) != getattr(before, name):
                log.warning("setting '%s' has changed, which needs a restart", name)
        self.settings = replace(before, **{name: getattr(settings, name) for name in _LIVE})

    async def stop(self, grace_s: float) -> None:
        """Report not ready, finish the calls in flight within `grace_s` seconds, then stop."""
        end_s = time.monotonic() + grace_s
        if self.worker_port is not None:
            self.worker_port.begin_stop()
        self._transports.begin_drain()
        if self._kafka is not None:
            self._kafka.begin_drain()
        closing = asyncio.create_task(self._services.close())  # while new requests are rejected
        try:
            async with asyncio.timeout(grace_s if grace_s > 0 else 0.001):
                await self.engine.drain()
                await self._transports.drain()
        except TimeoutError:
            if grace_s > 0:
                log.warning("calls were still running after %s s and are cancelled", grace_s)
            await self.engine.close()
            end_s = time.monotonic() + (_FINAL_RESPONSES_S if grace_s > 0 else 0.0)
        finally:
            await closing
        await self._transports.stop(max(0.0, end_s - time.monotonic()))
        if self._kafka is not None:
            await self._kafka.close(max(0.0, end_s - time.monotonic()))
        await self.engine.close()
        if self.worker_port is not None:
            await self.worker_port.close()
        if self.engine.audit is not None:
            self.engine.audit.close()

    async def run(self, on_start: Callable[["Server"], Any] | None = None, *, handle_signals: bool = True) -> None:
        """Serve until SIGTERM or SIGINT, then drain and stop. `on_start` is awaited once the ports are open.

        The process has its previous signal handlers again on return. With `handle_signals=False` they stay as they
        are, and cancellation of this coroutine, as by Ctrl-C under `asyncio.run`, drains and stops the server.
        """
        with StopSignals(self._reload_as_service) if handle_signals else nullcontext() as signals:
            await self.listen()
            loading = asyncio.ensure_future(self.engine.start())
            reporting = asyncio.ensure_future(on_start(self)) if on_start is not None else None
            stop = signals.stop if signals else asyncio.Event()
            waiting = asyncio.ensure_future(stop.wait())
            try:
                await asyncio.wait({waiting, loading}, return_when=asyncio.FIRST_COMPLETED)
                if loading.done():
                    await loading
                    await self._transports.begin_accepting()
                    await waiting
                if signals is not None:
                    notify("STOPPING=1")
                    await self._wait_until_unrouted(signals)
            finally:
                if signals is not None:
                    signals.release()  # a further signal ends the process at once
                for task in (loading, reporting, waiting):
                    if task is not None:
                        task.cancel()
                if any(deployment.is_loaded for deployment in self.engine.deployments()):
                    log.info(
                        "stopping: requests in flight have %g s to finish; another signal ends the process now",
                        self.settings.drain_s,
                    )
                await self.stop(self.settings.drain_s)

    async def _wait_until_unrouted(self, signals: StopSignals) -> None:
        """Report not ready and answer requests until load balancers stop routing here, or a second signal."""
        delay_s = self.settings.drain_delay_s
        if delay_s and any(deployment.ready for deployment in self.engine.deployments()):
            self.engine.report_not_ready()
            self._transports.begin_leave()
            log.info("not ready; requests are still answered for %g s; another signal ends this delay", delay_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await signals.hurry.wait()


def serve(*models: Any, handle_signals: bool = True, **settings: Unpack[SettingsArguments]) -> None:
    """Serve models until the process gets SIGTERM or SIGINT: paths, `module:object`, or Python objects.

    Requests in flight are finished first, for at most `drain_s` seconds, so that a program in a container stops
    cleanly. On return the process has its previous signal handlers again. With `handle_signals=False` they stay as they
    are: Ctrl-C then also drains and raises KeyboardInterrupt, and SIGTERM does what the program has set up.

    If the program has set up no logging of its own, the log goes to standard error. Raises RuntimeError inside a
    running event loop, which `Server` is for, and in other threads than the main one unless `handle_signals=False`.
    """
    if plugins.importing():
        raise ModelFailed(
            f"'{plugins.importing()}' is being imported for its model and must not start a server; write "
            '`if __name__ == "__main__":` before dragoman.serve(...)'
        )
    if asyncio._get_running_loop() is not None:
        raise RuntimeError(
            "dragoman.serve starts an event loop, but one is running in this thread; "
            "use `async with dragoman.Server(...)` instead"
        )
    server = Server(*models, **settings)
    if not logging.getLogger().handlers:
        logs.set_up(server.settings.log_format, server.settings.log_level, logger_levels(server.settings))

    async def on_start(server: Server) -> None:
        log.info("listening: %s", " ".join(filter(None, (*server.http_urls, server.grpc_url))))
        while not server.engine.started:
            await server.engine.wait_for_change()
        for deployment in server.engine.deployments():
            name = f"{deployment.spec.name} {deployment.spec.version}".rstrip()
            log.info("model %s: %s %s", name, deployment.reported_state.lower(), deployment.reason)

    run(server, on_start, handle_signals)


def logger_levels(settings: Settings) -> dict[str, int]:
    """Return the levels of loggers that `log_level` does not set."""
    return {"dragoman.batching": logging.DEBUG if settings.explain_batches else logging.NOTSET}


def run(server: Server, on_start: Callable[[Server], Any] | None = None, handle_signals: bool = True) -> None:
    """Run a server in a new event loop: uvloop if it is installed."""
    remove_abandoned_folders()
    with _prometheus_folder(server.settings):
        event_loop.run(server.run(on_start, handle_signals=handle_signals))


@contextmanager
def _prometheus_folder(settings: Settings) -> Iterator[None]:
    """Set the variable of prometheus_client's multiprocess folder, for this process and its workers.

    The library reads it at import. A variable or an import of the program itself is left alone. Without a folder that
    can be written, the server serves without the metrics that models record with the library.
    """
    if not settings.metrics_path or METRICS_FOLDER in os.environ or "prometheus_client" in sys.modules:
        yield
        return
    try:
        temporary = TemporaryFolder("metrics")
    except OSError as error:
        log.warning("no metrics of models that use prometheus_client: %s", explain_temporary_folder(error))
        yield
        return
    with temporary as folder:
        os.environ[METRICS_FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[METRICS_FOLDER]


def _make_transports(engine: Engine, settings: Settings) -> ServerTransports:
    """Return the transports of an engine, in this process or in several."""
    if settings.processes == 1:
        return ServerTransports(engine, settings)
    from dragoman.processes.server_processes import make_transports

    return make_transports(engine, settings)


def _client_host(host: str) -> str:
    """Return the host for clients on this machine, as URLs have it."""
    return _url_host({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host))  # noqa: S104


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _with_settings(function: Callable[..., Any]) -> inspect.Signature:
    """Return a signature with each setting as a keyword, for `help` and completion in notebooks."""
    own = [p for p in inspect.signature(function).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    positional = [p for p in own if p.kind is inspect.Parameter.VAR_POSITIONAL]
    keyword = inspect.Parameter.KEYWORD_ONLY
    settings = [
        inspect.Parameter(name, keyword, default=option.default, annotation=option.type)
        for name, option in SETTINGS.items()
    ]
    return inspect.Signature([*positional, *settings, *(p for p in own if p not in positional)])


def _settings_text() -> str:
    """Return a list of the settings for docstrings: the most used ones with their meaning, the names of the others."""
    lines = ["", "", "Keyword arguments, the most used first; docs/settings.md has the meaning of each:", ""]
    for option in SETTINGS.values():
        if option.common:
            default = f" (default: {option.shown_default})" if option.shown_default else ""
            lines += textwrap.wrap(f"{option.name}: {option.help}{default}", 112, subsequent_indent="    ")
    for group in GROUPS:
        names = ", ".join(option.name for option in SETTINGS.values() if option.group == group and not option.common)
        lines += ["", *textwrap.wrap(f"{group}: {names}", 112, subsequent_indent="    ")]
    return "\n".join(lines)


def _show_settings(function: Any) -> None:
    """Show the settings in the signature and the docstring of a function."""
    function.__signature__ = _with_settings(function)
    function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}{_settings_text()}"


_show_settings(serve)
_show_settings(Server)
