"""The port that workers on other machines join: handshakes, workers that wait for a model, and joined workers."""

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import secrets
import socket
import ssl
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

import msgspec

from dragoman.core.errors import InvalidInput
from dragoman.core.foreign_code import is_interruption
from dragoman.core.state_store import StateStore, StateTable
from dragoman.settings import Settings
from dragoman.system.sockets import listening_socket
from dragoman.workers.shared_blocks import close_files, create_arena_files
from dragoman.workers.supervisor import MAX_MISSED
from dragoman_cluster.handshake import (
    Conversation,
    Hello,
    JoinError,
    MemoryProof,
    Welcome,
    authenticate_worker,
    is_tls,
    read_secret,
    set_timeout,
)
from dragoman_cluster.link import Link, heartbeat_interval_s

log = logging.getLogger("dragoman.worker")

_HANDSHAKE_S = 10.0
_FIRST_BYTE_S = 1.0  # a worker begins at once
# Handshakes that run at the same time, in all and of one address; further clients wait, and beyond a number the oldest
# of the address that has most of them is dropped.
_CONCURRENT_HANDSHAKES = 16
_CONCURRENT_OF_ADDRESS = 12
_MAX_WAITING = 256
_BACKLOG = 128
# How long a worker that has kept a model waits for that model to be loaded, before others get it.
_RESERVED_S = 10.0
# How long the jobs of an earlier server are expected, before their workers are refused.
_UNCLAIMED_S = 120.0
# Warnings about clients that are not accepted, in a minute.
_MAX_WARNINGS = 5
_WARNINGS_S = 60.0
_TLS_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


class _Clients:
    """Clients that wait for a handshake, by address. Each address has its turn, and strangers of one hold no more than
    its share, so that they do not keep workers of others waiting.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[socket.socket]] = {}
        self._running: Counter[str] = Counter()

    def add(self, client: socket.socket, address: str) -> None:
        """Let a client wait."""
        self._waiting.setdefault(address, deque()).append(client)
        if sum(map(len, self._waiting.values())) > _MAX_WAITING:
            max(self._waiting.values(), key=len).popleft().close()

    def next(self) -> tuple[socket.socket, str] | None:
        """Return a client and its address, whose handshake begins; None if none may begin now."""
        if self._running.total() >= _CONCURRENT_HANDSHAKES:
            return None
        for address, clients in [*self._waiting.items()]:
            if self._running[address] < _CONCURRENT_OF_ADDRESS:
                del self._waiting[address]  # to the end of the others
                client = clients.popleft()
                if clients:
                    self._waiting[address] = clients
                self._running[address] += 1
                return client, address
        return None

    def end(self, address: str) -> None:
        """Note that a handshake has ended."""
        self._running[address] -= 1
        self._running += Counter()  # without addresses of none

    def close(self) -> None:
        for clients in self._waiting.values():
            for client in clients:
                client.close()
        self._waiting.clear()


class JoinedWorker:
    """A worker process that has joined this server, as a `WorkerProcess`.

    link, memory: its connection, and the files of the memory that both map, or None on different machines.
    is_job_kept: whether what has started it stays when the server stops.
    port: knows whether the server stops, after which workers look for the next one.
    end_starter: ends the job or command that has started it, within some seconds, and returns how that ended; None if
    the server has not started it.
    """

    has_own_clock = True
    pid = 0
    was_killed_by_system = False

    def __init__(
        self, link: Link, hello: Hello, memory: tuple[int, int] | None, timeout_s: float, port: "WorkerPort"
    ) -> None:
        self._port = port
        self.socket = link
        self.memory = memory
        self.model = hello.model
        self.loaded = hello.loaded
        self.ticket = hello.ticket
        self.joined_s = time.monotonic()
        self.host = hello.host[:64]
        self.closed = asyncio.Event()
        self.exited = asyncio.Event()
        self.exit_reason = "its connection was closed"
        self.end_starter: Callable[[float], Awaitable[str]] | None = None
        self.is_job_kept = False
        self._link = link
        self._timeout_s = timeout_s
        self._where = f"worker process {hello.pid} on {self.host!r}"

    @property
    def needs_farewell(self) -> bool:
        is_for_next_server = self.end_starter is None or self.is_job_kept
        return not (self._port.keeps_workers and is_for_next_server)

    @property
    def description(self) -> str:
        return self._where

    def suits(self, model: str) -> bool:
        """Return whether it may serve a model: with another one loaded, only some time after it has joined."""
        is_free = self.loaded in ("", model) or time.monotonic() - self.joined_s >= _RESERVED_S
        return self.model in ("", model) and is_free

    def is_stopped(self) -> bool:
        """Return whether heartbeats are missing."""
        return time.monotonic() - self._link.received_s > 3 * heartbeat_interval_s(self._timeout_s)

    def kill(self) -> None:
        """Disconnect it; it ends itself then, whatever it computes."""
        self.exit_reason = "disconnected"
        self.closed.set()

    async def wait(self, grace_s: Callable[[], float], cleanup: Callable[[], None]) -> None:
        """Wait until the connection is closed or silent; see `WorkerProcess`."""
        try:
            await self._wait_until_lost()
        finally:
            self._link.shutdown()  # the channel closes it
            try:
                await self._end_starter(grace_s())
            finally:
                cleanup()
                self.closed.set()
                self.exited.set()

    async def _end_starter(self, grace_s: float) -> None:
        """End the job or command that has started it, by code of a launcher."""
        if self.end_starter is None or (self._port.keeps_workers and self.is_job_kept):
            return
        try:
            self.exit_reason += f"; {await self.end_starter(grace_s)}"
        except BaseException as error:
            if is_interruption(error):
                raise
            log.exception("the job of a worker could not be ended: worker=%s", self.description)

    async def _wait_until_lost(self) -> None:
        """Return if the connection is closed, or too many heartbeats are missed: counted, in case this process was
        stopped.
        """
        missed, seen_s = 0, self._link.received_s
        while missed < MAX_MISSED:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timeout_s / MAX_MISSED):
                    await self.closed.wait()
                    return
            missed = missed + 1 if self._link.received_s == seen_s else 0
            seen_s = self._link.received_s
        self.exit_reason = f"no heartbeat for {self._timeout_s:g} s"


@dataclass(frozen=True, kw_only=True)
class WorkerPortOptions:
    """Options of a `WorkerPort`. allow_plaintext: without TLS also for workers on other machines.

    timeout_s: a connection is lost after this time without received data. tls_min_version: `1.2` or `1.3`.
    """

    host: str
    port: int
    secret: bytes = field(repr=False)
    tls_cert: str = ""
    tls_key: str = ""
    tls_min_version: str = "1.2"
    allow_plaintext: bool = False
    timeout_s: float = 15.0

    def __post_init__(self) -> None:
        if not (self.tls_cert or self.allow_plaintext or is_loopback(self.host)):
            raise InvalidInput(
                f"setting 'worker_port': address {self.host} is reachable from other machines: expected TLS "
                "(--tls-cert and --tls-key), or --worker-plaintext in a network that you trust"
            )


class KeptJob(msgspec.Struct, frozen=True):
    """A job that runs the worker of a ticket, in the state store. launcher: what calls it a job, as `SLURM job`.

    job: its id, from which the launcher of the next server knows it.
    """

    model: str
    launcher: str
    job: str


class WorkerPort:
    """Listens for workers and gives each that has proved the secret to a model that waits for one."""

    def __init__(self, options: WorkerPortOptions) -> None:
        self._options = options
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._threads = concurrent.futures.ThreadPoolExecutor(_CONCURRENT_HANDSHAKES, "dragoman-join")
        self._expected: dict[str, asyncio.Future[JoinedWorker]] = {}
        self._requests: deque[tuple[str, asyncio.Future[JoinedWorker]]] = deque()
        self._idle: list[JoinedWorker] = []
        self._links: weakref.WeakSet[Link] = weakref.WeakSet()
        self._clients = _Clients()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._warned: deque[float] = deque(maxlen=_MAX_WARNINGS)  # when
        self._stopped = threading.Event()
        self.keeps_workers = False  # the server stops, and its workers are for the next one
        self.start_failures: dict[str, str] = {}  # why the last worker of a model could not be started
        self._jobs: StateTable | None = None
        self.has_store = False  # though it may not be writable now
        self._kept: dict[str, KeptJob] = {}  # by ticket: of an earlier server, and not adopted yet
        self._noted: set[str] = set()  # tickets of jobs that the next server will know
        self._returned: dict[str, JoinedWorker] = {}  # by ticket: workers of kept jobs
        self.last_rejection = ""  # address and reason of the last worker that was not accepted since one was

    @property
    def port(self) -> int:
        """The port, -1 while it is closed."""
        return -1 if self._socket is None else int(self._socket.getsockname()[1])

    @property
    def address(self) -> str:
        """Where workers join: `HOST:PORT`, with the name of this machine if it listens on every interface."""
        host = self._options.host
        host = socket.gethostname() if host in ("0.0.0.0", "::") else host  # noqa: S104
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @property
    def secret(self) -> str:
        return self._options.secret.decode()

    async def start(self) -> None:
        """Open the port. Raises OSError."""
        self._socket = listening_socket(self._options.host, self._options.port, backlog=_BACKLOG)
        self._socket.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())
        threading.Thread(target=self._send_heartbeats, name="dragoman-heartbeats", daemon=True).start()
        if self._kept:
            asyncio.get_running_loop().call_later(_UNCLAIMED_S, self._release_unclaimed)

    def begin_stop(self) -> None:
        """Let workers whose connections are closed from now on look for the next server at this address."""
        self.keeps_workers = True

    async def close(self) -> None:
        """Close the port and the connections of idle workers."""
        self._stopped.set()
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait({self._accepting})
        self._clients.close()
        if self._socket is not None:
            self._socket.close()
        for worker in [*self._idle, *self._returned.values()]:
            self._drop(worker)
        self._threads.shutdown(wait=False)

    def _send_heartbeats(self) -> None:
        """Send heartbeats on every connection; in a thread, because the event loop may be busy."""
        while not self._stopped.wait(heartbeat_interval_s(self._options.timeout_s)):
            for link in [*self._links]:
                with contextlib.suppress(OSError):  # the event loop sees it too
                    link.send_heartbeat()

    # --- models that wait for workers ------------------------------------------------------------------------

    async def take(self, model: str) -> JoinedWorker:
        """Return a worker that has joined, or will, for this model or for any."""
        able = [worker for worker in self._idle if worker.suits(model)]
        if able:
            worker = max(able, key=lambda each: each.loaded == model)
            self._idle.remove(worker)
            asyncio.get_running_loop().remove_reader(worker.socket.fileno())
            return worker
        future: asyncio.Future[JoinedWorker] = asyncio.get_running_loop().create_future()
        request = (model, future)
        self._requests.append(request)
        try:
            return await future
        finally:
            with contextlib.suppress(ValueError):
                self._requests.remove(request)

    def expect(self, ticket: str = "") -> tuple[str, asyncio.Future[JoinedWorker]]:
        """Return a ticket for a worker, a new one by default, and the future that has it once it has joined."""
        ticket = ticket or secrets.token_hex(8)
        future = self._expected[ticket] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _future: self._expected.pop(ticket, None))
        return ticket, future

    def use_store(self, store: StateStore) -> None:
        """Keep the jobs of workers in a store, and expect those that an earlier server has started."""
        self._jobs, self.has_store = store.table("jobs"), store.is_configured
        self._kept = {ticket: job for (_, ticket), job in self._jobs.read(KeptJob).items()}
        self._jobs = self._jobs if store.is_writable else None

    def _release_unclaimed(self) -> None:
        """Let jobs of an earlier server end that no model has adopted: their workers are refused from now on."""
        for ticket, kept in [*self._kept.items()]:
            log.warning("%s %s of model '%s' is not needed any more", kept.launcher, kept.job, kept.model)
            del self._kept[ticket]
            self.forget_job(ticket)
            if (worker := self._returned.pop(ticket, None)) is not None:
                self._drop(worker)

    def note_job(self, ticket: str, job: KeptJob) -> None:
        """Let the next server adopt a job."""
        if self._jobs is not None:
            self._jobs.put(ticket, job)
            self._noted.add(ticket)

    def forget_job(self, ticket: str) -> None:
        """Forget a job that has ended."""
        self._noted.discard(ticket)
        if self._jobs is not None:
            self._jobs.delete(ticket)

    def adopt(self, model: str, launcher: str) -> tuple[str, str, asyncio.Future[JoinedWorker]] | None:
        """Return the ticket and the id of a job that an earlier server has started for a model, and the future that
        has its worker once it has joined again; None if there is none.
        """
        for ticket, kept in self._kept.items():
            if (kept.model, kept.launcher) == (model, launcher):
                _, future = self.expect(ticket)
                del self._kept[ticket]
                self._noted.add(ticket)
                if (worker := self._returned.pop(ticket, None)) is not None:
                    future.set_result(worker)
                return ticket, kept.job, future
        return None

    def _assign(self, worker: JoinedWorker) -> None:
        """Give a new worker to the model that waits for it, or keep it idle."""
        self._links.add(worker.socket)
        if worker.ticket:
            future = self._expected.get(worker.ticket)
            if future is None and worker.ticket in self._kept:
                self._returned[worker.ticket] = worker
            elif future is None:  # the model was unloaded meanwhile
                self._drop(worker)
            else:
                future.set_result(worker)
            return
        if not self._offer(worker):
            loop = asyncio.get_running_loop()
            self._idle.append(worker)
            loop.add_reader(worker.socket.fileno(), self._drop, worker)  # it sends nothing but EOF
            if worker.loaded:
                loop.call_later(_RESERVED_S, self._offer_idle, worker)

    def _offer(self, worker: JoinedWorker) -> bool:
        """Give a worker to a model that waits for one; return whether there is such a model."""
        for model, future in self._requests:
            if worker.suits(model) and not future.done():
                future.set_result(worker)
                return True
        return False

    def _offer_idle(self, worker: JoinedWorker) -> None:
        """Offer a worker that is still idle to the models for which it would load another one."""
        if worker in self._idle and self._offer(worker):
            self._idle.remove(worker)
            asyncio.get_running_loop().remove_reader(worker.socket.fileno())

    def _drop(self, worker: JoinedWorker) -> None:
        if worker in self._idle:
            self._idle.remove(worker)
            asyncio.get_running_loop().remove_reader(worker.socket.fileno())
        worker.socket.close()
        close_files(worker.memory or ())

    # --- handshakes --------------------------------------------------------------------------------------------

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        assert self._socket is not None
        while True:
            try:
                client, address = await loop.sock_accept(self._socket)
            except OSError as error:  # too many open files
                log.error("cannot accept a worker: %s", error)
                await asyncio.sleep(1.0)
                continue
            self._clients.add(client, address[0])
            self._begin_handshakes()

    def _begin_handshakes(self) -> None:
        while (found := self._clients.next()) is not None:
            task = asyncio.create_task(self._join(*found))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _join(self, sock: socket.socket, host: str) -> None:
        """Run the handshake with a client, and assign it if it is a worker."""
        try:
            worker = await asyncio.get_running_loop().run_in_executor(self._threads, self._shake_hands, sock, host)
        except (OSError, JoinError) as error:
            sock.close()
            self._warn(host, error)
            return
        finally:
            self._clients.end(host)
            self._begin_handshakes()
        self.last_rejection = ""
        log.info("%s has joined", worker.description)
        self._assign(worker)

    def _warn(self, host: str, error: Exception) -> None:
        """Keep the reason why a client was not accepted, and log some of them."""
        self.last_rejection = f"the last worker was not accepted: {host}: {str(error)[:200]!a}"
        now_s = time.monotonic()
        if len(self._warned) < _MAX_WARNINGS or now_s - self._warned[0] > _WARNINGS_S:
            self._warned.append(now_s)
            more = "; further ones of this minute are not logged" if len(self._warned) == _MAX_WARNINGS else ""
            log.warning("worker not accepted: address=%s reason=%s%s", host, error, more)

    def _shake_hands(self, sock: socket.socket, host: str) -> JoinedWorker:
        """Run the handshake, in a thread. Raises OSError or JoinError."""
        options = self._options
        deadline_s = time.monotonic() + _HANDSHAKE_S
        certificate = b""
        if is_tls(sock, time.monotonic() + _FIRST_BYTE_S):
            sock, certificate = self._start_tls(sock, deadline_s)
        conversation = Conversation(sock, deadline_s, certificate)
        try:
            hello = authenticate_worker(conversation, options.secret)
            if not (certificate or options.allow_plaintext or is_loopback(host)):
                raise self._rejection_error(conversation, "the connection is not encrypted: expected TLS")
            if hello.ticket and hello.ticket not in self._expected and hello.ticket not in self._kept:
                raise self._rejection_error(conversation, "the server does not expect this worker any more")
            is_kept = not hello.ticket or hello.ticket in self._noted or hello.ticket in self._kept
            memory = self._share_memory(sock, conversation, is_kept=is_kept)
        except BaseException:
            sock.close()
            raise
        return JoinedWorker(Link(sock, options.timeout_s), hello, memory, options.timeout_s, self)

    def _start_tls(self, sock: socket.socket, deadline_s: float) -> tuple[ssl.SSLSocket, bytes]:
        """Return the encrypted connection and the server's certificate."""
        options = self._options
        if not options.tls_cert:
            raise JoinError("the worker uses TLS, but the server has no certificate (--tls-cert)")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = _TLS_VERSIONS[options.tls_min_version]
        context.load_cert_chain(options.tls_cert, options.tls_key or None)
        set_timeout(sock, deadline_s)
        pem = Path(options.tls_cert).read_text(encoding="ascii", errors="replace")
        first = pem[pem.index(_BEGIN) : pem.index(_END) + len(_END)]
        return context.wrap_socket(sock, server_side=True), ssl.PEM_cert_to_DER_cert(first)

    def _rejection_error(self, conversation: Conversation, reason: str) -> JoinError:
        conversation.send(Welcome(0.0, error=reason))
        return JoinError(reason)

    def _share_memory(
        self, sock: socket.socket, conversation: Conversation, *, is_kept: bool
    ) -> tuple[int, int] | None:
        """Welcome a worker; return memory files if it has mapped them, which only one on this machine can."""
        is_local = sock.getpeername()[0] == sock.getsockname()[0]
        files = create_arena_files() if is_local else None
        mark = secrets.token_bytes(16)
        try:
            if files is not None:
                os.pwrite(files[0], mark, 0)
            paths = tuple(f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in files or ())
            conversation.send(Welcome(self._options.timeout_s, paths, is_kept=is_kept))
            if conversation.receive(MemoryProof).mark == mark and files is not None:
                return files
        except BaseException:
            close_files(files or ())
            raise
        close_files(files or ())
        return None


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    try:
        return host == "localhost" or ip_address(host.partition("%")[0]).is_loopback
    except ValueError:  # a host name
        return False


def make_worker_port(settings: Settings) -> WorkerPort:
    """Return the port that the settings of a server describe. Raises InvalidInput."""
    if settings.worker_secret_file and settings.worker_secret:
        raise InvalidInput("a secret is given twice: expected only one of 'worker_secret' and 'worker_secret_file'")
    return WorkerPort(
        WorkerPortOptions(
            host=settings.worker_host or settings.host,
            port=settings.worker_port,
            secret=read_secret(settings.worker_secret_file, settings.worker_secret),
            tls_cert=settings.tls_cert,
            tls_key=settings.tls_key,
            tls_min_version=settings.tls_min_version,
            allow_plaintext=settings.worker_plaintext,
            timeout_s=settings.worker_timeout_s,
        )
    )
