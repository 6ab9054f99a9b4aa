"""A worker process that joins a server on another machine: it connects, loads the model that it gets, and serves it."""

import asyncio
import contextlib
import faulthandler
import logging
import os
import random
import select
import signal
import socket
import ssl
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.spec import LaunchOptions, ModelSpec
from dragoman.workers.executor import Executor
from dragoman.workers.frames import HEADER_BYTES, Frame, FrameKind, FrameParser, encode
from dragoman.workers.shared_blocks import close_files
from dragoman.workers.worker import announce_loaded, load_model, release_socket, send_all, serve_calls
from dragoman.workers.worker_messages import serialize_message
from dragoman_cluster.drain import DrainOnSignal
from dragoman_cluster.file_cache import DEFAULT_CACHE_BYTES, FileCache, default_folder
from dragoman_cluster.handshake import (
    Conversation,
    Hello,
    JoinError,
    MemoryProof,
    NoHandshake,
    Welcome,
    authenticate_server,
    certificate_of,
)
from dragoman_cluster.link import Link, ServerMonitor

log = logging.getLogger("dragoman.worker")

_HANDSHAKE_S = 20.0
_RETRY_S = 0.5
_MARK_BYTES = 16
# Between attempts to find the server again: a random part, the half at least, of these.
_FIRST_REJOIN_S, _MAX_REJOIN_S = 0.1, 2.0
_PORT_HINT = "; is this the port that --worker-port names?"

_Connection = tuple[socket.socket, Welcome, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """Where and how a worker joins. ticket, model, loaded: see `Hello`. connect_s: how long to try to connect.

    rejoin_s: how long to look for a server that is gone, with the model that is loaded, if that server keeps workers.
    is_quiet: without a warning about each attempt.

    plaintext: without TLS also to other machines.
    tls: with TLS also to this machine.
    time_limit_s, drain_s: see `DrainOnSignal`.
    cache: for files of models that the server sends.
    """

    host: str
    port: int
    secret: bytes = field(repr=False)
    ticket: str = ""
    model: str = ""
    plaintext: bool = False
    tls: bool = False
    connect_s: float = 60.0
    rejoin_s: float = 0.0
    loaded: str = ""
    is_quiet: bool = False
    time_limit_s: float | None = None
    cache: FileCache | None = None
    drain_s: float = 60.0


def parse_address(address: str) -> tuple[str, int, str]:
    """Return host, port and ticket of `HOST:PORT` or `HOST:PORT/TICKET`. Raises InvalidInput."""
    place, _, ticket = address.partition("/")
    host, _, port = place.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidInput(f"--join: expected HOST:PORT, got {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port), ticket


def join(options: JoinOptions) -> bool:
    """Join a server and compute its calls until it ends; return whether it has closed the connection, not been lost.

    Raises JoinError if it does not accept this worker.
    """
    connection = _connect(options)
    _set_up_process()
    drain = DrainOnSignal(options.time_limit_s, options.drain_s)
    drain.start()
    return asyncio.run(_Membership(options, drain).run(connection))


class _Membership:
    """A worker in its connections with the server, one after the other, and the model that it keeps between them.

    | state         | it becomes                                                                                   |
    |---------------|----------------------------------------------------------------------------------------------|
    | connected     | ended: FAREWELL, the model cannot be loaded or is lost, or it leaves; else disconnected      |
    | disconnected  | connected: the server, or the next one at its address, has accepted it, within `rejoin_s`;   |
    |               | else ended                                                                                   |

    Each connection has a channel and jobs of its own, so that no response of one is sent in another.
    """

    def __init__(self, options: JoinOptions, drain: DrainOnSignal) -> None:
        self._options, self._drain = options, drain
        self._link: Link | None = None
        self._executor: Executor | None = None
        self._identity: object = None  # of its model, as the server has sent it
        self._has_ended = False
        self._rejoin_s = 0.0
        os.register_at_fork(after_in_child=self._release_link)

    def _release_link(self) -> None:
        if self._link is not None and self._link.fileno() >= 0:
            release_socket(self._link)

    async def run(self, connection: "_Connection | None") -> bool:
        """Serve in this and further connections; return whether the last one was closed, not lost."""
        reason = ""
        while connection is not None:
            reason = await self._serve(*connection)
            connection = None if self._has_ended else await self._rejoin(reason)
        if self._executor is not None:
            await self._executor.close()
        return not reason

    async def _serve(self, sock: socket.socket, welcome: Welcome, memory: tuple[int, ...]) -> str:
        """Serve in a connection until it ends; return how it was lost, "" if it was closed."""
        options, timeout_s = self._options, welcome.timeout_s
        self._rejoin_s = options.rejoin_s if welcome.is_kept else 0.0
        link = self._link = Link(sock, timeout_s)
        link.setblocking(False)
        self._drain.use(link)
        log.info("joined %s:%d; waiting for a model", options.host, options.port)
        monitor = None
        try:
            first = await asyncio.to_thread(_receive_first, link, timeout_s)
            if first is None or first.kind == FrameKind.FAREWELL:
                self._has_ended = first is not None
                return ""
            monitor = ServerMonitor(link, timeout_s, self._rejoin_s)
            monitor.start()
            executor = await self._load(link, first, timeout_s)
            if executor is None:
                self._has_ended = True
            else:
                await serve_calls(link, executor, memory, has_own_clock=True, on_frame=self._handle_frame)
                executor.unavailable()
                self._has_ended = self._has_ended or executor.is_lost
        except JoinError as error:
            return error.message
        finally:
            if monitor is not None:
                monitor.stop()
            self._drain.use(None)
            link.close()
        return monitor.reason

    def _handle_frame(self, frame: Frame) -> None:
        if frame.kind == FrameKind.FAREWELL:
            self._has_ended = True

    async def _load(self, link: Link, first: Frame, timeout_s: float) -> Executor | None:
        """Return the model that the server has sent: the one that is loaded if it is the same, with equal files."""
        found = first.value()
        identity = _identity(found) if isinstance(found, ModelSpec) else None
        if self._executor is not None and identity == self._identity:
            log.info("the model is kept: model=%s", self._executor.name)
            announce_loaded(link, self._executor)
            return self._executor
        if self._executor is not None:
            log.info("the server has another model, or other files or settings of it, which is loaded now")
            await self._executor.close()
        prepare = partial(_prepare, link, timeout_s, self._options.cache)
        self._executor = await load_model(link, first, has_own_clock=True, prepare=prepare)
        self._identity = identity
        return self._executor

    async def _rejoin(self, reason: str) -> "_Connection | None":
        """Return a new connection; None if there is none within `rejoin_s`, or if this worker leaves."""
        end_s, delay_s = time.monotonic() + self._rejoin_s, _FIRST_REJOIN_S
        options = replace(
            self._options, connect_s=0.0, is_quiet=True, loaded=self._executor.name if self._executor else ""
        )
        if self._rejoin_s and not self._drain.is_leaving:
            log.warning("%s; looking for it for %g s", reason or "the server has closed the connection", self._rejoin_s)
        while not self._drain.is_leaving and time.monotonic() < end_s:
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))  # noqa: S311 - so that not all come at once
            delay_s = min(2 * delay_s, _MAX_REJOIN_S)
            try:
                return await asyncio.to_thread(_connect, options)
            except JoinError as error:
                if not isinstance(error.__cause__, OSError | NoHandshake):  # it was refused
                    raise
        return None


def _identity(spec: ModelSpec) -> object:
    """Return the settings and the hashes of files that must be equal for a model to be the same, without the settings
    that only the server uses.
    """
    launch = None if spec.launch is None else LaunchOptions(files=spec.launch.files)
    return replace(spec, placement="process", replicas=1, launch=launch), spec.contents


def _prepare(link: Link, timeout_s: float, cache: FileCache | None, spec: ModelSpec) -> ModelSpec:
    """Return the spec with paths of this machine, if the server sends the model's files. Raises ModelFailed."""
    if spec.launch is None or not spec.launch.sends_files:
        return spec
    cache = cache or FileCache(default_folder(), DEFAULT_CACHE_BYTES)
    try:
        return cache.localize(spec, partial(_download, link, timeout_s, spec))
    except (ModelFailed, JoinError) as error:
        raise ModelFailed(f"failed to load '{spec.name}', {error.message}") from error


def _download(link: Link, timeout_s: float, spec: ModelSpec, numbers: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """Request files of the model and yield their blocks. Raises ModelFailed, or JoinError if the server is lost."""
    send_all(link, encode(FrameKind.FILES, 0, [*numbers], serializer=serialize_message))
    for number in numbers:
        path, left = spec.contents[number].path, spec.contents[number].size
        while left > 0:
            frame = _receive_first(link, timeout_s)
            if frame is None:
                raise JoinError("the server has closed the connection")
            if frame.kind != FrameKind.FILE or frame.job != number:
                continue  # a ping, for example
            block = frame.value()
            if isinstance(block, str):
                raise ModelFailed(f"its file '{Path(path).name}' {block}")
            left -= len(block)
            yield number, block


def _connect(options: JoinOptions) -> _Connection:
    """Return a connection after the handshake, and the server's memory files. Retries until the server listens."""
    end_s, reason = time.monotonic() + options.connect_s, ""
    address = f"{options.host}:{options.port}"
    while True:
        try:
            sock = socket.create_connection((options.host, options.port), timeout=_HANDSHAKE_S)
            break
        except OSError as error:
            left_s = end_s - time.monotonic()
            if left_s < _RETRY_S:
                raise JoinError(f"cannot connect to {address} within {options.connect_s:g} s: {error}") from error
            if str(error) != reason and not options.is_quiet:  # each reason once
                reason = str(error)
                log.warning("cannot reach %s (%s); trying again for %.0f s", address, error.strerror or error, left_s)
            time.sleep(_RETRY_S)
    try:
        return _shake_hands(sock, options)
    except OSError as error:
        sock.close()
        raise JoinError(f"handshake with {address} failed: {error}{_PORT_HINT}") from error
    except JoinError as error:
        sock.close()
        hint = _PORT_HINT if isinstance(error, NoHandshake) else ""
        raise JoinError(f"{address} did not accept this worker: {error}{hint}") from error


def _shake_hands(sock: socket.socket, options: JoinOptions) -> _Connection:
    is_local = sock.getpeername()[0] == sock.getsockname()[0]
    if options.tls or not (options.plaintext or is_local):
        # The proof covers the certificate, so it needs no authority that has signed it.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        sock = context.wrap_socket(sock)
    conversation = Conversation(sock, time.monotonic() + _HANDSHAKE_S, certificate_of(sock))
    hello = Hello(
        os.urandom(32), options.ticket, options.model, socket.gethostname(), os.getpid(), loaded=options.loaded
    )
    welcome = authenticate_server(conversation, options.secret, hello)
    memory, mark = _open_memory(welcome.memory)
    conversation.send(MemoryProof(mark))
    return sock, welcome, memory


def _open_memory(paths: tuple[str, ...]) -> tuple[tuple[int, ...], bytes]:
    """Return the server's memory files and the mark in the first one; none if they are on another machine."""
    files: list[int] = []
    try:
        files.extend(os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in paths)
        return tuple(files), os.pread(files[0], _MARK_BYTES, 0) if files else b""
    except OSError:
        close_files(files)
        return (), b""


def _receive_first(link: Link, timeout_s: float) -> Frame | None:
    """Return the first frame other than a heartbeat, without the bytes after it; None if the server is lost.

    Raises JoinError if the server is silent.
    """
    while True:
        parser = FrameParser()
        needed = HEADER_BYTES
        frames: list[Frame] = []
        while not frames:
            buffer = parser.buffer()[:needed]
            try:
                count = link.recv_into(buffer)
            except BlockingIOError:
                select.select([link.fileno()], [], [], timeout_s / 10)
                if time.monotonic() - link.received_s > timeout_s:
                    raise JoinError(f"the server has sent nothing for {timeout_s:g} s") from None
                continue
            except OSError as error:
                raise JoinError(f"the connection to the server is lost: {error}") from error
            if not count:
                return None
            needed -= count
            frames = parser.feed(count)
            if not needed and not frames:
                needed = parser.missing
        if frames[0].kind != FrameKind.HEARTBEAT:
            return frames[0]


def _set_up_process() -> None:
    """End at once on Ctrl-C."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, _exit)
    with contextlib.suppress(AttributeError):  # stdout may have been replaced
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _exit(number: int, _frame: object) -> NoReturn:
    os._exit(128 + number)
