"""A worker process that joins a server on another machine: it connects, loads the model that it gets, and serves it."""

import asyncio
import contextlib
import faulthandler
import logging
import os
import select
import signal
import socket
import ssl
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.spec import ModelSpec
from dragoman.workers.frames import HEADER_BYTES, Frame, FrameKind, FrameParser, encode
from dragoman.workers.shared_blocks import close_files
from dragoman.workers.worker import release_socket, send_all, serve_model
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
_PORT_HINT = "; is this the port that --worker-port names?"


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """Where and how a worker joins. ticket, model: see `Hello`. connect_s: how long to try to connect.

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
    sock, welcome, memory = _connect(options)
    link = Link(sock, welcome.timeout_s)
    link.setblocking(False)
    _set_up_process()
    DrainOnSignal(link, options.time_limit_s, options.drain_s).start()
    log.info("joined %s:%d; waiting for a model", options.host, options.port)
    first = _receive_first(link, welcome.timeout_s)
    if first is None:
        link.close()
        return True
    os.register_at_fork(after_in_child=partial(release_socket, link))
    monitor = ServerMonitor(link, welcome.timeout_s)
    monitor.start()
    try:
        prepare = partial(_prepare, link, welcome.timeout_s, options.cache)
        asyncio.run(serve_model(link, first, memory, has_own_clock=True, prepare=prepare))
    finally:
        monitor.stop()
        link.close()
    return not monitor.reason


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


def _connect(options: JoinOptions) -> tuple[socket.socket, Welcome, tuple[int, ...]]:
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
            if str(error) != reason:  # each reason once
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


def _shake_hands(sock: socket.socket, options: JoinOptions) -> tuple[socket.socket, Welcome, tuple[int, ...]]:
    is_local = sock.getpeername()[0] == sock.getsockname()[0]
    if options.tls or not (options.plaintext or is_local):
        # The proof covers the certificate, so it needs no authority that has signed it.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        sock = context.wrap_socket(sock)
    conversation = Conversation(sock, time.monotonic() + _HANDSHAKE_S, certificate_of(sock))
    hello = Hello(os.urandom(32), options.ticket, options.model, socket.gethostname(), os.getpid())
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
