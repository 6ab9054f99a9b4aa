"""Several processes that listen on the same ports and behave as one server (`--processes`)."""

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from typing import Any

from dragoman.access.caller_engine import CallerEngine
from dragoman.access.grants import Grant
from dragoman.assembly import Address, access_control, load_protocols, transport_limits
from dragoman.core.metrics import Family
from dragoman.core.record_calls import FindRequests
from dragoman.engine.engine import Engine
from dragoman.processes.model_copies import CopiedModels
from dragoman.processes.server_process import ProcessService, ServerProcess, process_metrics
from dragoman.server_transports import (
    Ports,
    ServerTransports,
    StoredResultCall,
    check_settings,
    configured_ports,
    tls_files,
)
from dragoman.settings import Settings
from dragoman.system.cpus import cores
from dragoman.system.file_watch import FileWatcher
from dragoman.system.sockets import address_error, bound_socket, can_share_ports
from dragoman.transports.application import Application
from dragoman.workers.supervisor import Supervisor

log = logging.getLogger("dragoman.processes")

# How often server processes are asked whether they compute calls while the server drains.
_DRAIN_INTERVAL_S = 0.05
# How often the counts of server processes are taken while no metrics are scraped.
_MEASURE_INTERVAL_S = 2.0
# Keys and subjects of tokens whose limits are counted at the same time.
_MAX_LIMITED = 10_000


def make_transports(engine: Engine, settings: Settings) -> ServerTransports:
    """Return the transports of as many processes as the settings say; a warning says if there are fewer.

    If there is only one, they are those of this process.
    """
    requested, most = settings.processes or cores(), cores()
    if not can_share_ports():
        log.warning("setting 'processes': one process is used, since more need SO_REUSEPORT of Linux")
        return ServerTransports(engine, settings)
    if requested > most:
        log.warning("setting 'processes': %d used, one per core of this machine, instead of %d", most, requested)
    count = min(requested, most)
    return ServerProcesses(engine, settings, count) if count > 1 else ServerTransports(engine, settings)


class ServerProcesses(ServerTransports):
    """`ServerTransports` in several processes. One that exits is restarted; its calls are cancelled."""

    def __init__(self, engine: Engine, settings: Settings, count: int) -> None:
        super().__init__(engine, settings)
        limit = lru_cache(_MAX_LIMITED)(lambda limits: CallerEngine(engine, limits.grant()))
        self._models = CopiedModels(engine)
        shared = self._is_complete, self._measure, self._fetch, limit, self._find_requests
        copies = self._update_copies, self._models.add
        self._services = [ProcessService(engine, *shared, *copies) for _ in range(count)]
        self._application: Application | None = None
        self._bound: list[socket.socket] = []
        self._is_stopping = False
        self._ports = Ports((), ())
        self._following: list[asyncio.Task[None]] = []
        self._files = FileWatcher()
        self._supervisor = Supervisor(
            count,
            lambda number: ServerProcess(self._services[number], settings, self._ports),
            on_exit=self._handle_exit,
            on_restart=lambda _process: self._handle_restart(),
            on_heartbeats=self._handle_heartbeats,
            heartbeat_s=settings.heartbeat_s,
        )

    async def start(self, ports: Ports | None = None) -> None:
        settings, (http, grpc) = self._settings, load_protocols(self._settings)
        self.http_protocols = [t.name for t in http]
        self.grpc_protocols = [t.service for t in grpc]
        self._application = Application(self._engine, http, transport_limits(settings))
        check_settings(settings)  # report invalid files once, not from each process
        self._bind(ports or configured_ports(settings, http, grpc))
        self._watch_for_audit()
        await self._supervisor.start()
        self._following = [asyncio.create_task(self._follow(self._report_readiness))]
        self._following.append(asyncio.create_task(self._measure_regularly()))
        self._following.append(asyncio.create_task(self._follow(self._update_copies)))
        log.info("%d processes listen", len(self._services))

    def _watch_for_audit(self) -> None:
        """Log once what each process reads again by itself: the files of keys and certificates."""
        access, tls = access_control(self._settings), tls_files(self._settings)
        self._files.add(access.files, access.reload)
        if tls is not None:
            self._files.add(tls.files, tls.reload)
        self._files.start()

    def _bind(self, addresses: Ports) -> None:
        """Bind the ports, which are the same for all processes, also if the system chooses them."""
        addresses_to_bind = (*addresses.http, *addresses.grpc, *addresses.admin)
        self._bound = bind_all(addresses_to_bind)
        numbers = [each.getsockname()[1] for each in self._bound]
        bound = [(host, port) for (host, _), port in zip(addresses_to_bind, numbers, strict=True)]
        http, grpc = len(addresses.http), len(addresses.http) + len(addresses.grpc)
        self._ports = Ports(tuple(bound[:http]), tuple(bound[http:grpc]), tuple(bound[grpc:]), len(self._services))
        self.http_ports = numbers[:http]
        self.grpc_port, self.admin_port = (numbers[http:grpc] or [-1])[0], (numbers[grpc:] or [-1])[0]

    def begin_leave(self) -> None:
        for each in self._supervisor.running:
            each.begin_drain(leaves=True)

    def begin_drain(self) -> None:
        for each in self._supervisor.running:
            each.begin_drain()

    async def drain(self) -> None:
        await self._update_copies()
        await self._measure()
        while any(service.in_flight for service in self._services):
            await asyncio.sleep(_DRAIN_INTERVAL_S)
            await self._measure()

    async def stop(self, grace_s: float) -> None:
        await self._files.stop()
        for task in self._following:
            task.cancel()
        await asyncio.gather(*self._following, return_exceptions=True)
        self._is_stopping = True
        running = await self._supervisor.close()
        await asyncio.gather(*(each.stop(grace_s) for each in running))
        for each in self._bound:
            each.close()
        self._bound = []

    def _handle_exit(self, process: ServerProcess) -> None:
        log.error("a server process died (%s) and its connections are lost; restarting it", process.exit_reason)
        process.service.begin_restart()
        self._report_readiness()

    def _handle_restart(self) -> None:
        self._report_readiness()
        updating = asyncio.create_task(self._update_copies())
        self._following.append(updating)
        updating.add_done_callback(self._following.remove)

    def _handle_heartbeats(self, changed: Sequence[ServerProcess]) -> None:
        """Report not ready while a server process is stopped: its connections wait, and it still gets new ones."""
        for each in changed:
            if each.heartbeat.is_hung:
                log.error("server process %d is stopped; its clients wait", each.pid)
        if changed:
            self._report_readiness()

    # --- state of all processes -----------------------------------------------------------------------

    def _is_complete(self) -> bool:
        """Whether every server process runs and responds."""
        supervisor = self._supervisor
        return supervisor.is_complete and not any(each.heartbeat.is_hung for each in supervisor.running)

    async def _fetch(self, call: StoredResultCall, grant: Grant) -> Any:
        """Answer a request to the async result store, which is here for all processes."""
        assert self._application is not None
        return await self._application.stored_result_request(call.http, grant)

    async def _measure(self) -> None:
        """Update the metrics of all processes."""
        await asyncio.gather(*(each.measure() for each in self._supervisor.running))

    async def _find_requests(self, query: FindRequests) -> list[dict[str, Any]]:
        """Return recent requests of all processes, newest first."""
        results = await asyncio.gather(*(each.find_requests(query) for each in self._supervisor.running))
        return sorted(chain.from_iterable(results), key=itemgetter("time"), reverse=True)[: query.count]

    async def _measure_regularly(self) -> None:
        """Take the counts of server processes now and then: those since the last time are lost if one is killed."""
        while True:
            await asyncio.sleep(_MEASURE_INTERVAL_S)
            await self._measure()

    async def _update_copies(self) -> None:
        """Tell all processes which models they may compute; return once none computes another one."""
        if not self._is_stopping:
            table = self._models.table()
            await asyncio.gather(*(each.set_copies(table) for each in self._supervisor.running))

    def metrics(self) -> tuple[Family, ...]:
        """Return the metrics of the server processes; those of requests and connections as of the last scrape."""
        background = () if self._application is None else self._application.counters.key_calls.families()
        return (*process_metrics(self._services), *background)

    def _report_readiness(self) -> None:
        ready = self._engine.ready() and self._is_complete()
        for each in self._supervisor.running:
            each.set_ready(ready)

    async def _follow(self, report: Callable[[], Awaitable[None] | None]) -> None:
        """Report to all processes now and whenever the state of a model may have changed."""
        while True:
            changing = asyncio.ensure_future(self._engine.wait_for_change())
            try:
                await asyncio.sleep(0)  # let it subscribe first, so that no change after the report is missed
                if (reporting := report()) is not None:
                    await reporting
                await changing
            finally:
                changing.cancel()


def bind_all(addresses: Sequence[Address]) -> list[socket.socket]:
    """Return a socket bound to each address, not listening; the system chooses a port for 0.

    The parent keeps them open, so that the ports stay taken while processes restart. Raises OSError, with nothing
    bound, if a port is in use, also by another server with SO_REUSEPORT, which would get some of our clients.
    """
    sockets: list[socket.socket] = []
    try:
        for address in addresses:
            if address[1] and address in addresses[: len(sockets)]:
                raise address_error(OSError(errno.EADDRINUSE, ""), *address)
            bound_socket(*address, shared=False).close()
            sockets.append(bound_socket(*address, shared=True))
    except OSError:
        for each in sockets:
            each.close()
        raise
    return sockets
