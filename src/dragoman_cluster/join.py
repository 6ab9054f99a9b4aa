"""A worker process that joins servers on other machines: it connects, loads the model that it gets, and serves it."""

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

from dragoman.core.errors import InvalidInput, ModelFailed, NotReady
from dragoman.core.spec import LaunchOptions, ModelSpec
from dragoman.workers.executor import Executor
from dragoman.workers.frames import HEADER_BYTES, Frame, FrameKind, FrameParser, encode
from dragoman.workers.shared_blocks import close_files
from dragoman.workers.worker import Turn, announce_loaded, load_model, release_socket, send_all, serve_calls
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
# Until a server whose model was rejected is joined again.
_REJECTED_S = 10.0
_PORT_HINT = "; is this the port that --worker-port names?"

_Connection = tuple[socket.socket, Welcome, tuple[int, ...]]


class Address(NamedTuple):
    """Where a server is joined. ticket: see `Hello`."""

    host: str
    port: int
    ticket: str = ""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """Where and how a worker joins. model: see `Hello`. connect_s: how long to try to connect to a first server.

    rejoin_s: how long to look for a server that is gone, with the model that is loaded, if that server keeps workers.
    plaintext: without TLS also to other machines.
    tls: with TLS also to this machine.
    time_limit_s, drain_s: see `DrainOnSignal`.
    cache: for files of models that the server sends.
    """

    addresses: tuple[Address, ...]
    secret: bytes = field(repr=False)
    model: str = ""
    plaintext: bool = False
    tls: bool = False
    connect_s: float = 60.0
    rejoin_s: float = 0.0
    time_limit_s: float | None = None
    cache: FileCache | None = None
    drain_s: float = 60.0


def parse_address(address: str) -> Address:
    """Return the parts of `HOST:PORT` or `HOST:PORT/TICKET`. Raises InvalidInput."""
    place, _, ticket = address.partition("/")
    host, _, port = place.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidInput(f"--join: expected HOST:PORT, got {address!r}")
    return Address(host.removeprefix("[").removesuffix("]"), int(port), ticket)


def parse_addresses(addresses: Sequence[str]) -> tuple[Address, ...]:
    """Return the addresses of one server or several. Raises InvalidInput."""
    found = tuple(map(parse_address, addresses))
    if len(found) > 1 and any(address.ticket for address in found):
        raise InvalidInput("--join: expected HOST:PORT without a ticket for each of several servers")
    if len({*found}) < len(found):
        raise InvalidInput("--join: expected different servers, got one of them twice")
    return found


def join(options: JoinOptions) -> bool:
    """Join servers and compute their calls until they end; return whether they closed the connections, not lost them.

    Raises JoinError if one does not accept this worker, or none can be reached.
    """
    connections = _connect_to_first(options)
    _set_up_process()
    drain = DrainOnSignal(options.time_limit_s, options.drain_s)
    drain.start()
    return asyncio.run(_JoinedProcess(options, drain).run(connections))


class _JoinedProcess:
    """This process, with the model that it keeps for one server or several.

    Each server has connections of its own, one after the other (`_Membership`). The process loads one model at a time,
    which all connections share: a model that computes one call at a time has one call of one server (`Turn`). It ends
    when no server uses its model any more.
    """

    def __init__(self, options: JoinOptions, drain: DrainOnSignal) -> None:
        self.options, self.drain = options, drain
        self.memberships = [_Membership(self, address) for address in options.addresses]
        self.executor: Executor | None = None
        self.identity: object = None  # of its model, as the server has sent it
        self.turn = Turn() if self.is_shared else None
        self.loading = asyncio.Lock()
        self.has_ended = False
        self.last_connected_s = time.monotonic()

    @property
    def is_shared(self) -> bool:
        return len(self.options.addresses) > 1

    async def run(self, connections: Mapping[Address, "_Connection"]) -> bool:
        """Serve in these and further connections; return whether the last ones were closed, not lost."""
        await asyncio.gather(*(each.run(connections.get(each.address)) for each in self.memberships))
        if self.executor is not None:
            await self.executor.close()
        if refusals := [each.refusal for each in self.memberships if each.refusal is not None]:
            raise refusals[0]
        return not any(each.reason for each in self.memberships)

    def is_connected_to_others(self, membership: "_Membership") -> bool:
        return any(each is not membership and each.is_connected for each in self.memberships)

    def is_used_by_others(self, membership: "_Membership") -> bool:
        """Return whether another server uses the model, in any thread."""
        return any(each is not membership and each.uses_model and each.is_connected for each in self.memberships)

    def end_if_unused(self, membership: "_Membership") -> None:
        """End if no server uses the model any more, now that this one does not."""
        membership.uses_model = False
        if not any(each.uses_model for each in self.memberships):
            self.end(membership)

    def end(self, membership: "_Membership") -> None:
        """End with this membership, whose connection closes by itself."""
        self.has_ended = True
        for each in self.memberships:
            if each is not membership:
                each.disconnect()


class _Membership:
    """A worker in its connections with a server, one after the other.

    | state         | it becomes                                                                                   |
    |---------------|----------------------------------------------------------------------------------------------|
    | connected     | ended: the process ends with FAREWELL, a model that cannot be loaded or is lost, or it       |
    |               | leaves; else disconnected                                                                    |
    | disconnected  | connected: the server, or the next one at its address, has accepted it, within `rejoin_s`    |
    |               | or while another server is there; else ended                                                 |

    Each connection has a channel and jobs of its own, so that no response of one is sent in another.
    uses_model: the server has not unloaded it. reason: how the server was lost. refusal: by a server, if others go on.
    """

    def __init__(self, process: _JoinedProcess, address: Address) -> None:
        self.address = address
        self.uses_model = False
        self.reason = ""
        self.refusal: JoinError | None = None
        self._process = process
        self._link: Link | None = None
        self._rejoin_s = process.options.rejoin_s
        self._was_rejected = False  # a model of the server, because others use another one
        os.register_at_fork(after_in_child=self._release_link)

    def _release_link(self) -> None:
        if self._link is not None and self._link.fileno() >= 0:
            release_socket(self._link)

    @property
    def is_connected(self) -> bool:
        return self._link is not None and not self._link.wait_closed(0)

    def disconnect(self) -> None:
        if self._link is not None:
            self._link.shutdown()

    async def run(self, connection: "_Connection | None") -> None:
        """Serve in this and further connections."""
        try:
            connection = connection or await self._rejoin()
            while connection is not None:
                self.reason = await self._serve(*connection)
                self._process.last_connected_s = time.monotonic()
                connection = None if self._process.has_ended else await self._rejoin()
        except JoinError as error:
            if not self._process.is_shared:
                raise
            log.error("%s; other servers go on", error.message)
            self.refusal = error
        if self._process.executor is not None:
            self._process.end_if_unused(self)

    async def _serve(self, sock: socket.socket, welcome: Welcome, memory: tuple[int, ...]) -> str:
        """Serve in a connection until it ends; return how it was lost, "" if it was closed."""
        process, timeout_s = self._process, welcome.timeout_s
        self._rejoin_s = process.options.rejoin_s if welcome.is_kept else 0.0
        self._was_rejected = False
        link = self._link = Link(sock, timeout_s)
        link.setblocking(False)
        process.drain.add(link)
        if process.has_ended:  # while it was connected
            self.disconnect()
        log.info("joined %s; waiting for a model", self.address)
        monitor, is_served = None, False
        try:
            first = await asyncio.to_thread(_receive_first, link, timeout_s)
            if first is None or first.kind == FrameKind.FAREWELL:
                if first is not None:
                    process.end_if_unused(self)
                return ""
            monitor = ServerMonitor(link, timeout_s, self._rejoin_s, partial(process.is_used_by_others, self))
            monitor.start()
            executor = await self._load(link, first, timeout_s)
            if executor is not None:
                self.uses_model = is_served = True
                await serve_calls(
                    link, executor, memory, has_own_clock=True, on_frame=self._handle_frame, turn=process.turn
                )
                executor.unavailable()
                if executor.is_lost:
                    process.end(self)
        except JoinError as error:
            return error.message
        finally:
            if monitor is not None:
                monitor.stop()
            if not is_served:
                close_files(memory)
            process.drain.remove(link)
            link.close()
        return monitor.reason

    def _handle_frame(self, frame: Frame) -> None:
        if frame.kind == FrameKind.FAREWELL:
            self._process.end_if_unused(self)

    async def _load(self, link: Link, first: Frame, timeout_s: float) -> Executor | None:
        """Return the model that the server has sent: the one that is loaded if it is the same, with equal files.

        None if it cannot be loaded, which ends the process, or if other servers use another one.
        """
        process = self._process
        found = first.value()
        identity = _identity(found) if isinstance(found, ModelSpec) else None
        async with process.loading:
            executor = process.executor
            if executor is not None and identity == process.identity:
                if executor.loaded.sequences is not None and process.is_used_by_others(self):
                    self._reject(link, executor.name, "its model has sequences, which two servers cannot share")
                    return None
                log.info("the model is kept: model=%s", executor.name)
                announce_loaded(link, executor)
                return executor
            if executor is not None and process.is_used_by_others(self):
                reason = "another server uses another model here, or other files or settings of it"
                self._reject(link, executor.name, reason)
                return None
            if executor is not None:
                log.info("the server has another model, or other files or settings of it, which is loaded now")
                await executor.close()
            prepare = partial(_prepare, link, timeout_s, process.options.cache)
            executor = await load_model(link, first, has_own_clock=True, prepare=prepare)
            process.executor, process.identity = executor, identity
            if executor is None:
                process.end(self)
            return executor

    def _reject(self, link: Link, model: str, reason: str) -> None:
        """Let the server know why its model is not loaded here."""
        log.error("the model of %s is not loaded: %s", self.address, reason)
        self._was_rejected = True
        error = NotReady(f"failed to load '{model}', worker on {socket.gethostname()!r}: {reason}")
        send_all(link, encode(FrameKind.ERROR, 0, error, serializer=serialize_message))

    async def _rejoin(self) -> "_Connection | None":
        """Return a new connection; None if there is none in time, or if this worker leaves."""
        process, delay_s = self._process, _REJECTED_S if self._was_rejected else _FIRST_REJOIN_S
        if self._link is not None and self._rejoin_s and not process.drain.is_leaving:
            reason = self.reason or "the server has closed the connection"
            log.warning("%s: %s; looking for it for %g s", self.address, reason, self._rejoin_s)
        while self._is_looking:
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))  # noqa: S311 - so that not all come at once
            delay_s = min(2 * delay_s, _MAX_REJOIN_S)
            loaded = process.executor.name if process.executor else ""
            model = loaded if process.is_shared and loaded else process.options.model
            try:
                return await asyncio.to_thread(
                    _connect, process.options, self.address, 0.0, model=model, loaded=loaded, is_quiet=True
                )
            except JoinError as error:
                if not isinstance(error.__cause__, OSError | NoHandshake):  # it was refused
                    raise
        return None

    @property
    def _is_looking(self) -> bool:
        process = self._process
        if process.drain.is_leaving or process.has_ended or not self._rejoin_s:
            return False
        return process.is_connected_to_others(self) or time.monotonic() < process.last_connected_s + self._rejoin_s


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


def _connect_to_first(options: JoinOptions) -> "dict[Address, _Connection]":
    """Return connections with the servers that can be reached, one at least, within `connect_s`."""
    first, *others = options.addresses
    if not others:
        return {first: _connect(options, first, options.connect_s)}
    end_s, connections, reasons = time.monotonic() + options.connect_s, dict[Address, _Connection](), set[str]()
    while True:
        for address in options.addresses:
            try:
                connections[address] = _connect(options, address, 0.0)
            except JoinError as error:
                if not isinstance(error.__cause__, OSError | NoHandshake):  # it was refused
                    raise
                if error.message not in reasons:  # each one once
                    log.warning("%s", error.message)
                reasons.add(error.message)
        if connections or time.monotonic() > end_s:
            break
        time.sleep(_RETRY_S)
    if not connections:
        raise JoinError(f"cannot connect to {' or '.join(map(str, options.addresses))} within {options.connect_s:g} s")
    return connections


def _connect(
    options: JoinOptions,
    address: Address,
    connect_s: float,
    *,
    model: str | None = None,
    loaded: str = "",
    is_quiet: bool = False,
) -> _Connection:
    """Return a connection after the handshake, and the server's memory files. Retries until the server listens.

    model, loaded: see `Hello`. is_quiet: without a warning about each attempt.
    """
    end_s, reason = time.monotonic() + connect_s, ""
    while True:
        try:
            sock = socket.create_connection((address.host, address.port), timeout=_HANDSHAKE_S)
            break
        except OSError as error:
            left_s = end_s - time.monotonic()
            if left_s < _RETRY_S:
                raise JoinError(f"cannot connect to {address} within {connect_s:g} s: {error}") from error
            if str(error) != reason and not is_quiet:  # each reason once
                reason = str(error)
                log.warning("cannot reach %s (%s); trying again for %.0f s", address, error.strerror or error, left_s)
            time.sleep(_RETRY_S)
    hello = Hello(
        os.urandom(32), address.ticket, options.model if model is None else model, socket.gethostname(), os.getpid(),
        loaded=loaded,
    )  # fmt: skip
    try:
        return _shake_hands(sock, options, hello)
    except OSError as error:
        sock.close()
        raise JoinError(f"handshake with {address} failed: {error}{_PORT_HINT}") from error
    except JoinError as error:
        sock.close()
        hint = _PORT_HINT if isinstance(error, NoHandshake) else ""
        raise JoinError(f"{address} did not accept this worker: {error}{hint}") from error


def _shake_hands(sock: socket.socket, options: JoinOptions, hello: Hello) -> _Connection:
    is_local = sock.getpeername()[0] == sock.getsockname()[0]
    if options.tls or not (options.plaintext or is_local):
        # The proof covers the certificate, so it needs no authority that has signed it.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        sock = context.wrap_socket(sock)
    conversation = Conversation(sock, time.monotonic() + _HANDSHAKE_S, certificate_of(sock))
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
