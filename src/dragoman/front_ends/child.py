"""What a front end runs: the transports of one process, around the engine of the one that started it."""

import logging
import socket
from collections.abc import Sequence

from dragoman.front import Front, Ports
from dragoman.front_ends.remote import RemoteEngine
from dragoman.settings import Settings
from dragoman.system import event_loop
from dragoman.workers.channel import receive
from dragoman.workers.child import begin
from dragoman.workers.frames import Kind

log = logging.getLogger("dragoman.front_end")


def main(fd: int, parent: int, memory: Sequence[int] = ()) -> None:
    """Listen where the parent says, and ask it whatever clients ask, until it says to stop or is gone."""
    begin(parent, (fd, *memory))
    event_loop.shorten_switch_interval()
    with socket.socket(fileno=fd) as sock:
        first = receive(sock)
        if first is not None:
            event_loop.run(_serve(sock, (memory[1], memory[0]) if memory else None, *first.value()))


async def _serve(sock: socket.socket, memory: tuple[int, int] | None, settings: Settings, where: Ports) -> None:
    engine = RemoteEngine(sock, memory)
    front = Front(engine, settings)
    engine.begin_drain = front.begin_drain
    try:
        await front.start(where)
    except Exception as fault:
        log.debug("a front end could not start", exc_info=True)
        engine.tell(Kind.ERROR, fault)
        return
    engine.tell(Kind.LOADED)
    await front.stop(await engine.stopping)
