"""The process of a front end: the transports, around the engine of the parent process."""

import logging
import socket
from collections.abc import Sequence

from dragoman.front_ends.engine_client import EngineClient
from dragoman.server_transports import Ports, ServerTransports
from dragoman.settings import Settings
from dragoman.system import event_loop
from dragoman.workers.channel import receive
from dragoman.workers.frames import FrameKind
from dragoman.workers.worker import set_up_child

log = logging.getLogger("dragoman.front_end")


def main(fd: int, parent: int, memory: Sequence[int] = ()) -> None:
    """Listen where the parent says and forward calls to it, until it stops this process or exits."""
    set_up_child(parent, (fd, *memory))
    event_loop.shorten_switch_interval()
    with socket.socket(fileno=fd) as sock:
        first = receive(sock)
        if first is not None:
            event_loop.run(_serve(sock, (memory[1], memory[0]) if memory else None, *first.value()))


async def _serve(sock: socket.socket, memory: tuple[int, int] | None, settings: Settings, where: Ports) -> None:
    engine = EngineClient(sock, memory)
    front = ServerTransports(engine, settings)
    engine.begin_drain = front.begin_drain
    try:
        await front.start(where)
    except Exception as error:
        log.debug("a front end could not start", exc_info=True)
        engine.send(FrameKind.ERROR, error)
        return
    engine.send(FrameKind.LOADED)
    await front.stop(await engine.stopping)
