"""The front ends of a server: processes that listen on the same ports and ask one engine, kept alive."""

import asyncio
import logging
import socket
import sys
from dataclasses import replace
from typing import Any

from dragoman.core.errors import InvalidInput
from dragoman.core.metrics import Family
from dragoman.engine.call_handler import CallHandler
from dragoman.front import Front, Ports, Shelved, limits, ports_of, tables, tls_context
from dragoman.front_ends.desk import Desk, families
from dragoman.front_ends.front_end import FrontEnd
from dragoman.front_ends.ports import held
from dragoman.settings import Settings
from dragoman.workers.cores import cores
from dragoman.workers.heartbeat import BEATS
from dragoman.workers.place import Place

log = logging.getLogger("dragoman.front_end")


def front_of(engine: CallHandler, settings: Settings) -> Front:
    """What clients see of an engine: as many processes as the settings say, or this one where that is enough."""
    count = settings.front_ends or cores()
    if count == 1:
        return Front(engine, settings)
    if sys.platform != "linux":
        raise InvalidInput(
            f"setting 'front_ends': only Linux spreads connections over processes; expected 1, got {count}"
        )
    return FrontEnds(engine, settings, count)


class FrontEnds(Front):
    """The same as `Front`, in several processes. One that dies is started again; what it was asked is cancelled."""

    def __init__(self, engine: CallHandler, settings: Settings, count: int) -> None:
        super().__init__(engine, settings)
        self._desks = [Desk(engine, self._complete, self._measured, self._shelved) for _ in range(count)]
        self._shelf: Any = None
        self.alive: list[FrontEnd] = []
        self._held: list[socket.socket] = []
        self._where = Ports((), ())
        self._owned: list[asyncio.Task[None]] = []

    async def start(self, where: Ports | None = None) -> None:
        settings, (http, grpc) = self._settings, tables(self._settings)
        self.http_protocols = [t.name for t in http]
        self.grpc_protocols = [t.service for t in grpc]
        self._shelf = self.application(http, limits(settings))  # what is wrong with the settings is said here, once
        tls_context(settings)
        self._hold(where or ports_of(settings, http, grpc))
        made = [self._made(desk) for desk in self._desks]
        faults = await asyncio.gather(*map(self._started, made), return_exceptions=True)
        for fault in filter(None, faults):
            raise fault
        self._owned = [asyncio.create_task(self._place(each.desk).keep(each)) for each in made]
        self._owned.append(asyncio.create_task(self._keep_told()))
        if settings.heartbeat_s:
            self._owned.append(asyncio.create_task(self._watch_heartbeats(settings.heartbeat_s / BEATS)))
        log.info("%d front ends listen", len(made))

    async def _started(self, front_end: FrontEnd) -> None:
        await front_end.start()
        self.alive.append(front_end)  # at once: where the start is given up, `stop` ends those that are there

    def _hold(self, where: Ports) -> None:
        """Take the ports: each is the same for all processes, whoever chose it."""
        self._held = held((*where.http, *where.grpc))
        ports = [each.getsockname()[1] for each in self._held]
        bound = [(host, port) for (host, _), port in zip((*where.http, *where.grpc), ports, strict=True)]
        count = len(where.http)
        self._where = Ports(tuple(bound[:count]), tuple(bound[count:]), shared=True)
        self.http_ports, self.grpc_port = ports[:count], (ports[count:] or [-1])[0]

    def _made(self, desk: Desk) -> FrontEnd:
        # Tokens are looked at where the models are.
        return FrontEnd(desk, replace(self._settings, control_token=""), self._where)

    def _place(self, desk: Desk) -> Place[FrontEnd]:
        return Place(lambda: self._made(desk), self._lost, self._gained, lambda: None)

    def begin_drain(self) -> None:
        for each in self.alive:
            each.begin_drain()

    async def stop(self, grace_s: float) -> None:
        owned, self._owned = self._owned, []
        for task in owned:
            task.cancel()
        await asyncio.gather(*owned, return_exceptions=True)
        await asyncio.gather(*(each.stop(grace_s) for each in self.alive))
        self.alive = []
        for each in self._held:
            each.close()
        self._held = []

    # --- processes come and go -------------------------------------------------------------------------------

    def _lost(self, front_end: FrontEnd) -> None:
        log.error("a front end died (%s); its connections are lost, and it is started again", front_end.end)
        front_end.desk.restarts += 1
        self.alive.remove(front_end)
        self._tell()

    def _gained(self, front_end: FrontEnd) -> None:
        self.alive.append(front_end)
        self._tell()

    # --- what they tell ----------------------------------------------------------------------------------------

    def _complete(self) -> bool:
        """Whether every front end is there and can answer."""
        return len(self.alive) == len(self._desks) and not any(each.heartbeat.is_hung for each in self.alive)

    async def _watch_heartbeats(self, interval_s: float) -> None:
        """Tell the others where one is stopped: its connections wait, and new ones still come to it."""
        while True:
            await asyncio.sleep(interval_s)
            complete = self._complete()
            for each in self.alive:
                hung = each.heartbeat.is_hung
                each.heartbeat.beat(busy=True)  # it computes nothing, so it is never silent for long
                if each.heartbeat.is_hung and not hung:
                    log.error("front end %d is stopped; its clients wait", each.pid)
            if complete != self._complete():
                self._tell()

    async def _shelved(self, call: Shelved) -> Any:
        """Answers that are fetched later are kept here, since a client may come back to any of the processes."""
        return await self._shelf.shelved(call.http)

    def _measured(self) -> tuple[Family, ...]:
        return families(self._desks)

    def _tell(self) -> None:
        ready = self._engine.ready() and self._complete()
        for each in self.alive:
            each.be(ready)

    async def _keep_told(self) -> None:
        """Tell all front ends whenever the server's readiness may have changed."""
        while True:
            changing = asyncio.ensure_future(self._engine.changed())
            try:
                await asyncio.sleep(0)  # now it listens, so that no change after the next line is missed
                self._tell()
                await changing
            finally:
                changing.cancel()
