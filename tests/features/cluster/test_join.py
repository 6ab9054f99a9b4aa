"""Workers that join over TCP: the same results as local ones, mutual proof of a secret, and every kind of loss.

In each loss every call is answered exactly once: right, or with an error that says that its worker was lost.
"""

import asyncio
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dragoman.core.calls import Infer, Request
from dragoman.core.errors import DeadlineExceeded, InvalidInput, ModelFailed, NotReady, WorkerLost
from dragoman.core.spec import LaunchOptions, ModelSpec
from dragoman.core.tensor import Tensor
from dragoman.engine_setup import make_engine
from dragoman.settings import Settings
from dragoman.system.coroutines import complete
from dragoman.workers.pool import Pool
from dragoman.workers.process import ProcessPool
from dragoman_cluster import worker_port
from dragoman_cluster.drain import parse_duration_s, slurm_time_left_s
from dragoman_cluster.handshake import Challenge, Conversation, Hello, JoinError, Proof, Welcome
from dragoman_cluster.worker_port import WorkerPort, WorkerPortOptions
from workers.test_workers_frames import every_tensor
from workers.workers_harness import MODELS, call, first_value, make_request, print_outcomes, spec_of, wait_until

SECRET = "the secret of the tests"
WORKER = f"{sys.executable} -m dragoman worker --rejoin-s 0"
JOIN = f"{WORKER} --join {{address}}"
# Long enough for a busy machine, and for tests that do not wait for it.
LONG_S = 60.0


@asynccontextmanager
async def open_port(timeout_s: float = LONG_S, **options: Any) -> AsyncIterator[WorkerPort]:
    port = WorkerPort(
        WorkerPortOptions(host="127.0.0.1", port=0, secret=SECRET.encode(), timeout_s=timeout_s, **options)
    )
    await port.start()
    try:
        yield port
    finally:
        await port.close()


@asynccontextmanager
async def joined(
    port: WorkerPort, model: str, replicas: int = 1, launcher: str = "command", command: str = JOIN, **options: Any
) -> AsyncIterator[ProcessPool]:
    launch = LaunchOptions(launcher=launcher, command=command, replicas=replicas, min_ready=replicas)
    pool = ProcessPool(spec_of(model, launch=launch, replicas=replicas, worker_port=port, **options), lambda: None)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


def start_worker(address: str, *arguments: str, secret: str = SECRET, code: str = "") -> "subprocess.Popen[bytes]":
    """Start a worker; `code` runs in it first."""
    start = f"{code}\nimport sys; from dragoman.cli import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            start,
            "worker",
            "--join",
            address,
            "--connect-timeout-s",
            "20",
            "--rejoin-s",
            "0",
            *arguments,
        ],
        stderr=subprocess.PIPE,
        env={**os.environ, "DRAGOMAN_WORKER_SECRET": secret},
    )


async def end_of(worker: "subprocess.Popen[bytes]") -> tuple[int, str]:
    """Return the exit code and the output of a worker that ends by itself."""
    try:
        _, output = await asyncio.to_thread(worker.communicate, timeout=60)
        return worker.returncode, output.decode()
    finally:
        worker.kill()


async def pids(pool: Pool, count: int) -> list[int]:
    """Return the process ids of `count` workers."""
    found: set[int] = set()
    while len(found) < count:
        responses = await asyncio.gather(*(call(pool, do="pid") for _ in range(4 * count)))
        found |= {first_value(response) for response in responses}
    return sorted(found)


async def outcomes(pool: Pool, count: int) -> list[int | BaseException]:
    """Return the results of calls from eight clients."""
    numbers = iter(range(count))
    found: list[int | BaseException] = []

    async def client() -> None:
        for n in numbers:
            try:
                response = await call(pool, n)
                assert first_value(response) == n
                found.append(n)
            except (WorkerLost, ModelFailed) as error:
                found.append(error)

    await asyncio.gather(*(client() for _ in range(8)))
    return found


# --- the same as local workers -------------------------------------------------------------------------------


async def test_memory_of_large_tensors_is_kept_for_the_next_ones() -> None:
    """As local workers do. Otherwise page faults take half of the time of a call with 600 KB."""
    code = (
        "import atexit, os, sys; atexit.register(lambda: print(os.environ['MALLOC_TRIM_THRESHOLD_'], file=sys.stderr))"
    )
    worker = start_worker("127.0.0.1:1", "--connect-timeout-s", "0", code=code)
    status, output = await end_of(worker)
    assert (status, output.splitlines()[-1]) == (2, str(1 << 30))


@pytest.mark.parametrize("shares_memory", [True, False])
async def test_tensors_of_every_datatype_are_unchanged(shares_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not shares_memory:
        monkeypatch.setattr(worker_port, "create_arena_files", lambda: None)
    sent = every_tensor()
    large = Tensor.of(np.arange(1_000_000, dtype=np.float64))
    async with open_port() as port, joined(port, "Echo") as pool:
        (replica,) = pool.supervisor.running
        assert (replica.channel.arena is not None) == shares_memory
        response: Any = await complete(pool.call(Request(Infer({**sent, "large": large}))))
    assert (response.outputs["large"].data == large.data).all()
    for name, tensor in sent.items():
        received = response.outputs[name]
        assert (received.datatype, received.data.dtype) == (tensor.datatype, tensor.data.dtype), name
        assert np.array_equal(received.data, tensor.data), name


@pytest.mark.parametrize("model", ["Count", "AsyncCount"])
async def test_streams_and_their_cancellation(model: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    async with open_port() as port, joined(port, model) as pool:
        chunks = [first_value(chunk) async for chunk in pool.stream(make_request(50))]
        assert chunks == list(range(50))
        stream = pool.stream(make_request(10**6, trace=trace))
        assert first_value(await anext(stream)) == 0
        await stream.aclose()
        await wait_until(Path(f"{trace}.closed").exists)
        assert [first_value(chunk) async for chunk in pool.stream(make_request(2))] == [0, 1]


async def test_deadlines_do_not_depend_on_the_clock_of_the_worker(tmp_path: Path) -> None:
    """The worker's clock is an hour ahead: a deadline by the server's clock would have passed long ago."""
    code = "import time; real = time.monotonic; time.monotonic = lambda: real() + 3600"
    async with open_port() as port:
        worker = start_worker(port.address, code=code)
        async with joined(port, "SecondsLeft", launcher="join") as pool:
            response = await call(pool, 5, time.monotonic() + LONG_S)
            assert 0 < response.outputs["left_s"].data[0] <= LONG_S
            with pytest.raises(DeadlineExceeded) as late:
                await call(pool, 5, time.monotonic() - 1)
            print_outcomes("clock an hour ahead", [response, late.value])
        assert (await end_of(worker))[0] == 0


async def test_errors_of_a_model_are_the_same(tmp_path: Path) -> None:
    async with open_port() as port, joined(port, "Actions") as pool:
        with pytest.raises(InvalidInput, match="input 'x' is bad"):
            await call(pool, do="input")
        with pytest.raises(ModelFailed, match="seven is not allowed"):
            await call(pool, do="value")


# --- encryption and identity -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    files = str(folder / "cert.pem"), str(folder / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=dragoman", "-out", files[0], "-keyout", files[1]],
        check=True, capture_output=True,
    )  # fmt: skip
    return files


async def test_tls_with_a_certificate_of_no_authority(certificate: tuple[str, str], monkeypatch: Any) -> None:
    monkeypatch.setattr(worker_port, "create_arena_files", lambda: None)  # so that arrays are encrypted, too
    cert, key = certificate
    large = Tensor.of(np.arange(2_000_000, dtype=np.float64))
    async with open_port(tls_cert=cert, tls_key=key) as port:
        worker = start_worker(port.address, "--tls")
        async with joined(port, "Echo", launcher="join") as pool:
            for n in range(20):
                assert first_value(await call(pool, n)) == n
            responses = await asyncio.gather(*(pool.call(Request(Infer({"x": large}))) for _ in range(3)))
            assert all((response.outputs["x"].data == large.data).all() for response in responses)
            (replica,) = pool.supervisor.running
            link: Any = replica.channel._sock
            assert isinstance(link._sock, ssl.SSLSocket)
        assert (await end_of(worker))[0] == 0


async def test_the_lowest_version_of_tls(certificate: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
    cert, key = certificate
    async with open_port(tls_cert=cert, tls_key=key, tls_min_version="1.3") as port:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises((ssl.SSLError, OSError)):
            await asyncio.open_connection("127.0.0.1", port.port, ssl=context)
        await wait_until(lambda: "worker not accepted" in caplog.text)
        context.maximum_version = ssl.TLSVersion.TLSv1_3
        _, writer = await asyncio.open_connection("127.0.0.1", port.port, ssl=context)
        assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"secret": "another secret, not theirs"}, "the secrets of worker and server differ"),
        ({"code": "import dragoman._version as v; v.__version__ = '0.0.9'"}, "the worker runs Dragoman 0.0.9 on"),
        ({"code": "import platform; platform.python_version_tuple = lambda: ('3', '9', '1')"}, "on Python 3.9; "),
        ({"arguments": ["--tls"]}, "the worker uses TLS, but the server has no certificate"),
    ],
    ids=["secret", "version of Dragoman", "version of Python", "TLS"],
)
async def test_both_sides_say_why_a_worker_is_not_accepted(
    options: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    """So does the model that waits for it."""
    async with open_port() as port:
        launch = LaunchOptions(launcher="join")
        pool = ProcessPool(spec_of("Actions", launch=launch, worker_port=port), lambda: None)
        starting = asyncio.create_task(pool.start())
        flags = options.pop("arguments", ())
        code, output = await end_of(start_worker(port.address, *flags, **options))
        assert code == 2
        assert "Traceback" not in output
        await wait_until(lambda: "worker not accepted" in caplog.text)
        assert "; the last worker was not accepted: 127.0.0.1: " in pool.waiting
        assert not starting.done()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await pool.close()
    assert message in caplog.text
    assert message in output or "TLS" in message
    assert SECRET not in caplog.text + output


async def test_a_worker_does_not_trust_a_server_without_the_secret() -> None:
    """It would unpickle what such a server sends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        worker = start_worker(f"127.0.0.1:{listener.getsockname()[1]}")
        sock, _ = await asyncio.to_thread(listener.accept)
        with sock:
            server = Conversation(sock, time.monotonic() + LONG_S, b"")
            await asyncio.to_thread(server.receive, Hello)
            server.send(Challenge(bytes(32), bytes(32)))
            with pytest.raises(JoinError, match="the secrets of worker and server differ"):
                await asyncio.to_thread(server.receive, Proof)
    code, output = await end_of(worker)
    assert code == 2
    assert "did not accept this worker: the secrets of worker and server differ" in output


async def test_a_server_does_not_accept_a_worker_without_the_secret(caplog: pytest.LogCaptureFixture) -> None:
    """It takes no notice of the server's proof, and repeats it as its own."""
    async with open_port() as port:
        with socket.create_connection(("127.0.0.1", port.port)) as sock:
            worker = Conversation(sock, time.monotonic() + LONG_S, b"")
            worker.send(Hello(bytes(32)))
            challenge = await asyncio.to_thread(worker.receive, Challenge)
            worker.send(Proof(challenge.proof))
            with pytest.raises(JoinError, match="the secrets of worker and server differ"):
                await asyncio.to_thread(worker.receive, Welcome)
        await wait_until(lambda: "worker not accepted: address=127.0.0.1" in caplog.text)


async def test_a_proxy_with_another_certificate_is_found(
    certificate: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A proxy that decrypts and forwards the handshake cannot use the proofs: they cover the certificate."""
    cert, key = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    other = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj",
         "/CN=dragoman", "-out", other[0], "-keyout", other[1]], check=True, capture_output=True,
    )  # fmt: skip
    context.load_cert_chain(*other)
    outwards = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    outwards.check_hostname, outwards.verify_mode = False, ssl.CERT_NONE
    async with open_port(tls_cert=cert, tls_key=key) as port, proxy(port.port, context, outwards) as (address, *_):
        code, output = await end_of(start_worker(address, "--tls"))
    assert code == 2
    assert "the secrets of worker and server differ" in output


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"", b"\0\0\0\5hello", b"\xff" * 100, b"\x16\3\1junk"])
async def test_other_clients_are_rejected(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with open_port() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        writer.write(data)
        with suppress(OSError):  # it may have been rejected already
            writer.write_eof()
            assert await reader.read() == b""
        writer.close()
        await wait_until(lambda: "worker not accepted: address=127.0.0.1" in caplog.text)


def test_addresses_that_other_machines_reach_need_tls() -> None:
    with pytest.raises(InvalidInput, match=r"setting 'worker_port': address 0.0.0.0 is reachable .* expected TLS"):
        WorkerPortOptions(host="0.0.0.0", port=0, secret=b"s")
    WorkerPortOptions(host="0.0.0.0", port=0, secret=b"s", allow_plaintext=True)


# --- losses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("idempotent", [False, True])
async def test_a_killed_worker_fails_only_the_call_that_it_computes(
    idempotent: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    count, begun = 200, tmp_path / "begun"
    async with open_port() as port, joined(port, "Actions", 2, idempotent=idempotent) as pool:
        held = asyncio.create_task(call(pool, do="hold", begun=begun, go=tmp_path / "go", then="pid"))
        await wait_until(begun.exists)
        (busy,) = [r for r in pool.supervisor.running if r.held]
        running = asyncio.create_task(outcomes_of_pids(pool, count))
        await asyncio.sleep(0.05)
        os.kill(int(busy.description.split()[2]), signal.SIGKILL)
        (tmp_path / "go").touch()  # for the one that computes it again
        results = [*await running, *await asyncio.gather(held, return_exceptions=True)]
        counts = print_outcomes(f"worker killed, idempotent = {idempotent}", results)
        assert counts == ({"right": count + 1} if idempotent else {"right": count, "WorkerLost": 1})
        assert idempotent or "the worker was lost (its connection was closed" in str(results[-1])
        assert f"{busy.description} is lost (its connection was closed" in caplog.text
        assert busy.description.endswith(f" on {socket.gethostname()!r}")
        assert len(await pids(pool, 2)) == 2  # another one has taken its place


@pytest.mark.parametrize("min_ready", [1, 0])
async def test_queued_and_new_calls_without_any_worker(min_ready: int, tmp_path: Path) -> None:
    """Both get the same error after `wait_s`, until there is a worker again; with `min_ready` 0 both wait for one."""
    async with open_port() as port:
        launch = LaunchOptions(launcher="join", min_ready=min_ready, wait_s=0.5)
        pool = ProcessPool(spec_of("Actions", launch=launch, worker_port=port, idempotent=True), lambda: None)
        starting, worker = asyncio.create_task(pool.start()), start_worker(port.address)
        await starting
        begun = tmp_path / "begun"
        computed = asyncio.create_task(call(pool, do="hold", begun=begun, go=tmp_path / "go", then="pid"))
        await wait_until(begun.exists)
        queued = asyncio.create_task(call(pool, do="pid"))
        worker.kill()
        (tmp_path / "go").touch()
        await wait_until(lambda: not pool.supervisor.running)
        soon = asyncio.create_task(call(pool, do="pid"))
        if min_ready:
            for each in (computed, queued, soon):
                with pytest.raises(NotReady, match=r"^model .m. is not ready: UNAVAILABLE"):
                    await each
            with pytest.raises(NotReady, match=r"^model .m. is not ready: UNAVAILABLE"):
                await call(pool, do="pid")
        else:
            await asyncio.sleep(1)
            assert not any(each.done() for each in (computed, queued, soon))
        second = start_worker(port.address)
        await wait_until(lambda: bool(pool.supervisor.running))
        answers = [await call(pool, do="pid"), *([] if min_ready else await asyncio.gather(computed, queued, soon))]
        assert {first_value(answer) for answer in answers} == {second.pid}
        await pool.close()
    worker.communicate()
    second.communicate()


async def outcomes_of_pids(pool: Pool, count: int) -> list[int]:
    return [first_value(response) for response in await asyncio.gather(*(call(pool, do="pid") for _ in range(count)))]


async def test_a_call_that_ends_its_workers_is_not_repeated_for_ever(tmp_path: Path) -> None:
    async with open_port() as port, joined(port, "Actions", idempotent=True) as pool:
        with pytest.raises(WorkerLost):
            await call(pool, do="kill")
        await wait_until(lambda: pool.ready)
        assert first_value(await call(pool, do="pid")) > 0
        assert [f.samples[0].value for f in pool.measurements() if f.name == "dragoman_worker_restarts_total"] == [3]


@pytest.mark.parametrize("idempotent", [False, True])
async def test_a_frozen_worker_is_found(idempotent: bool) -> None:
    """Its kernel still acknowledges data; only its heartbeats are missing."""
    count = 100
    async with open_port(3.0) as port, joined(port, "Actions", 2, idempotent=idempotent) as pool:
        frozen = (await pids(pool, 2))[0]
        os.kill(frozen, signal.SIGSTOP)
        try:
            calls = asyncio.gather(*(call(pool, do="pid") for _ in range(count)), return_exceptions=True)
            results = await asyncio.wait_for(calls, LONG_S)
        finally:
            with suppress(ProcessLookupError):
                os.kill(frozen, signal.SIGKILL)
        counts = print_outcomes(f"worker frozen, idempotent = {idempotent}", results)
        assert counts == ({"right": count} if idempotent else {"right": count - 1, "WorkerLost": 1})
        lost = [result for result in results if isinstance(result, BaseException)]
        assert idempotent or "no heartbeat for 3 s" in str(lost[0])
        assert len(await pids(pool, 2)) == 2


@asynccontextmanager
async def proxy(
    port: int, context: ssl.SSLContext | None = None, outwards: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[str, asyncio.Event, asyncio.Event]]:
    """A proxy: its address, an event after which it forwards nothing and closes nothing, and one that it sets whenever
    it has forwarded something to the worker."""
    frozen, heard = asyncio.Event(), asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()
    writers: list[asyncio.StreamWriter] = []

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, forwarded: asyncio.Event) -> None:
        while data := await reader.read(1 << 16):
            if frozen.is_set():
                await asyncio.Event().wait()
            writer.write(data)
            await writer.drain()
            forwarded.set()
        if not frozen.is_set():
            writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        their_reader, their_writer = await asyncio.open_connection("127.0.0.1", port, ssl=outwards)
        writers.extend((writer, their_writer))
        tasks.add(asyncio.create_task(forward(reader, their_writer, asyncio.Event())))
        tasks.add(asyncio.create_task(forward(their_reader, writer, heard)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", frozen, heard
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:
            writer.close()


@pytest.mark.parametrize("busy", [False, True])
async def test_a_silent_link_is_found_by_both_sides(busy: bool, tmp_path: Path) -> None:
    """A proxy stops forwarding: no side sees an end. The worker ends itself, also while it computes."""
    async with open_port(3.0) as port, proxy(port.port) as (address, frozen, heard):
        worker = start_worker(address)
        async with joined(port, "Actions", launcher="join") as pool:
            assert first_value(await call(pool, do="pid")) == worker.pid
            do = {"do": "hold", "begun": tmp_path / "begun", "go": tmp_path / "go"} if busy else {"do": "pid"}
            if busy:
                held = asyncio.create_task(call(pool, **do))
                await wait_until((tmp_path / "begun").exists)
                heard.clear()
                await heard.wait()  # a heartbeat, which the busy worker does not read
                frozen.set()
            else:
                frozen.set()
                held = asyncio.create_task(call(pool, **do))
            with pytest.raises(WorkerLost, match=r"no heartbeat for 3 s"):
                await held
            assert not pool.ready
            assert pool.unavailable == f"waiting for workers that join {port.address}: 0 of 1 are loaded"
            code, output = await end_of(worker)
            assert code == 1
            assert "the server has sent nothing for 3 s; this worker ends" in output
            again = start_worker(port.address)
            response = await call(pool, do="pid")
            assert first_value(response) == again.pid
        assert (await end_of(again))[0] == 0
    print_outcomes(f"silent link, worker {'busy' if busy else 'idle'}", [held.exception(), response])


async def test_a_call_beyond_its_grace_period_ends_a_joined_worker(tmp_path: Path) -> None:
    async with open_port() as port, joined(port, "Actions", cancel_grace_s=0.1) as pool:
        first = first_value(await call(pool, do="pid"))
        task = asyncio.create_task(call(pool, do="hold", begun=tmp_path / "begun", go=tmp_path / "go"))
        await wait_until((tmp_path / "begun").exists)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert first_value(await call(pool, do="pid")) != first
        await wait_until(lambda: not Path(f"/proc/{first}").exists())


# --- workers that leave -----------------------------------------------------------------------------------------


async def test_a_worker_completes_its_calls_on_sigterm_and_leaves(tmp_path: Path) -> None:
    """Without a lost call, also while the main thread computes one that does not let it run handlers of signals."""
    begun, go = tmp_path / "begun", tmp_path / "go"
    async with open_port() as port:
        workers = [start_worker(port.address), start_worker(port.address)]
        async with joined(port, "Actions", 2, launcher="join") as pool:
            held = asyncio.create_task(call(pool, do="hold", begun=begun, go=go, then="pid"))
            await wait_until(begun.exists)
            (busy,) = [r for r in pool.supervisor.running if r.held]
            (leaving,) = [worker for worker in workers if str(worker.pid) in busy.description]
            (other,) = [worker for worker in workers if worker is not leaving]
            running = asyncio.create_task(outcomes_of_pids(pool, 200))
            leaving.terminate()
            await wait_until(lambda: busy.unavailable)
            assert busy.unavailable == "its worker leaves: SIGTERM"
            answered = await running
            assert set(answered) == {other.pid}
            leaving.terminate()  # once more, as SLURM sends it at the end
            go.touch()
            assert first_value(await held) == leaving.pid
            print_outcomes("SIGTERM", [held.exception(), *answered])
            assert (await end_of(leaving))[0] == 0
            assert states(pool) == {"loaded": 1, "waiting": 1}
            assert not pool.supervisor.last_crash
            third = start_worker(port.address)
            assert await pids(pool, 2) == sorted([other.pid, third.pid])
        for worker in (other, third):
            assert (await end_of(worker))[0] == 0


async def test_a_worker_leaves_before_its_time_limit(tmp_path: Path) -> None:
    """Its stream goes on, as do concurrent calls, and the next worker gets the calls that come meanwhile."""
    begun, go = tmp_path / "begun", tmp_path / "go"
    limit = f"{JOIN} --time-limit-s 4 --drain-s 60"
    async with open_port() as port, joined(port, "AsyncActions", command=limit) as pool:
        (first,) = await pids(pool, 1)
        held = asyncio.create_task(call(pool, do="hold", begun=begun, go=go, then="pid"))
        await wait_until(lambda: pool.unavailable == "its worker leaves: its time limit is reached in 2 s")
        queued = asyncio.create_task(outcomes_of_pids(pool, 20))
        await asyncio.sleep(0.1)
        assert not queued.done()
        go.touch()
        assert first_value(await held) == first
        assert first not in await queued
        print_outcomes("time limit", [held.exception(), *await queued])
        assert [f.samples[0].value for f in pool.measurements() if f.name == "dragoman_worker_restarts_total"] == [1]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, None), ({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "bad"}, None), ({"SLURM_JOB_ID": "x;y"}, None)],
)
def test_time_limits_that_are_not_known(environment: dict[str, str], expected: None) -> None:
    assert slurm_time_left_s(environment) is expected


def test_the_end_of_a_job_in_its_environment() -> None:
    left_s = slurm_time_left_s({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(time.time()) + 100)})
    assert left_s is not None
    assert 90 < left_s <= 100


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5:00", 300.0), ("1:00:01", 3601.0), ("2-03:00:00", 183600.0), ("UNLIMITED", None), ("", None), ("-5:00", None)],
)
def test_durations_of_slurm(text: str, seconds: float | None) -> None:
    assert parse_duration_s(text) == seconds


# --- waiting for workers -----------------------------------------------------------------------------------------


async def test_a_model_is_ready_with_its_first_workers() -> None:
    async with open_port() as port:
        launch = LaunchOptions(launcher="join", replicas=3, min_ready=2)
        pool = ProcessPool(spec_of("Actions", launch=launch, replicas=3, worker_port=port), lambda: None)
        starting = asyncio.create_task(pool.start())
        workers = [start_worker(port.address)]
        await asyncio.sleep(0.5)
        assert not starting.done()
        assert pool.waiting == f"waiting for workers that join {port.address}: 0 of 3 are loaded"
        workers.append(start_worker(port.address, "--model", "m"))
        other = start_worker(port.address, "--model", "another model")
        await starting
        assert pool.ready
        assert states(pool) == {"loaded": 2, "waiting": 1}
        workers.append(start_worker(port.address))
        assert await pids(pool, 3) == sorted(worker.pid for worker in workers)
        assert states(pool) == {"loaded": 3, "waiting": 0}
        workers[0].kill()
        workers[1].kill()
        await wait_until(lambda: not pool.ready)
        await pool.close()
        assert (await end_of(workers[2]))[0] == 0
        assert other.poll() is None
    assert (await end_of(other))[0] == 0
    for worker in workers[:2]:
        worker.communicate()


def states(pool: Pool) -> dict[str, float]:
    counts = pool.states()
    return {"loaded": sum(counts.values()) - counts["waiting"], "waiting": counts["waiting"]}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "setting 'placement.command' is missing"),
        ("worker --join {adress}", "expected a command line with {address}"),
        ("/no/such/program {address}", "cannot run '/no/such/program'"),
        ("false {address}", "its command 'false' ended with exit code 1 before its worker joined"),
    ],
)
async def test_wrong_commands(command: str, message: str) -> None:
    async with open_port() as port:
        with pytest.raises(Exception, match=message.replace("{", r"\{")):
            async with joined(port, "Echo", command=command):
                pass


async def test_a_new_launcher_does_not_report_the_failure_of_an_earlier_one() -> None:
    launch = LaunchOptions(launcher="command", command="false {address}")
    async with open_port() as port:
        pool = ProcessPool(spec_of("Echo", launch=launch, worker_port=port), lambda: None)
        with pytest.raises(NotReady):
            await pool.start()
        assert "its command 'false' ended with exit code 1" in pool.waiting
        new = ProcessPool(spec_of("Echo", launch=replace(launch, command="true"), worker_port=port), lambda: None)
        assert new.waiting.startswith("waiting for workers that 'true' starts to join ")
        assert "'false'" not in new.waiting


async def test_the_reason_of_the_last_failed_start_stays_while_a_start_is_repeated(tmp_path: Path) -> None:
    """Until a start succeeds: the command fails once, then it waits until `go` exists."""
    script, tried, go = (tmp_path / name for name in ("start.sh", "tried", "go"))
    script.write_text(
        f"if test ! -e {tried}; then touch {tried}; exit 3; fi\nwhile test ! -e {go}; do sleep 0.1; done\nexec $1\n"
    )
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "dragoman.toml").write_text(
        f'[model]\nruntime = "{MODELS}:Echo"\n[model.placement]\nlauncher = "command"\n'
        f"command = \"sh {script} '{JOIN}'\"\n"
    )
    async with open_port() as port, make_engine([str(tmp_path / "m")], [], Settings(), worker_port=port) as engine:
        (deployment,) = engine.deployments()
        failure = "failed to load 'm', its command 'sh' ended with exit code 3 before its worker joined"
        assert (deployment.state, deployment.reported_reason) == ("UNAVAILABLE", failure)
        await wait_until(lambda: deployment.state == "LOADING")
        waiting = f"waiting for workers that 'sh' starts to join {port.address}: 0 of 1 are loaded"
        await wait_until(lambda: deployment.reported_reason == f"{waiting}; the last attempt failed: {failure}")
        go.touch()
        await wait_until(lambda: deployment.ready)
        assert deployment.reported_reason == ""


async def test_the_reason_why_a_lost_worker_cannot_be_replaced_is_reported(tmp_path: Path) -> None:
    repaired = tmp_path / "repaired"
    parameters = {"loaded": str(tmp_path / "loaded"), "repaired": str(repaired)}
    async with open_port() as port, joined(port, "LoadsOnce", parameters=parameters) as pool:
        os.kill((await pids(pool, 1))[0], signal.SIGKILL)
        failure = "the last start failed: RuntimeError: the weights are gone"
        await wait_until(lambda: failure in pool.waiting)
        assert not pool.ready
        repaired.touch()
        await wait_until(lambda: pool.ready)
        assert pool.waiting == ""


async def test_control_characters_of_an_address_are_not_printed() -> None:
    code, output = await end_of(start_worker("a\x1b[31mb:1", "--connect-timeout-s", "0.1"))
    assert code == 2
    assert "[31mb:1 within 0.1 s" in output
    assert "\x1b" not in output


async def test_an_unknown_launcher() -> None:
    async with open_port() as port:
        with pytest.raises(
            ModelFailed, match=r"^unknown launcher 'slrum': expected one of .*; did you mean 'slurm'\?$"
        ):
            ProcessPool(spec_of("Echo", launch=LaunchOptions(launcher="slrum"), worker_port=port), lambda: None)


async def test_a_launcher_needs_a_port() -> None:
    launch = LaunchOptions(launcher="join")
    with pytest.raises(ModelFailed, match=r"launcher 'join' needs a port .* --worker-port"):
        ProcessPool(spec_of("Echo", launch=launch), lambda: None)


async def test_a_launcher_has_no_own_working_directory() -> None:
    launch = LaunchOptions(launcher="join")
    async with open_port() as port:
        with pytest.raises(ModelFailed, match="working_directory 'own': expected 'shared' with launcher 'join'"):
            ProcessPool(spec_of("Echo", launch=launch, worker_port=port, working_directory="own"), lambda: None)


async def test_the_command_of_a_cancelled_start_is_ended(tmp_path: Path) -> None:
    launch = LaunchOptions(launcher="command", command=f"sh -c 'echo $$ > {tmp_path}/pid; sleep 600'")
    async with open_port() as port:
        pool = ProcessPool(spec_of("Echo", launch=launch, worker_port=port), lambda: None)
        starting = asyncio.create_task(pool.start())
        await wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await pool.close()
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


# --- the model's files on other machines -------------------------------------------------------------------------


FOLDER_MODEL = """
import numpy as np
import dragoman

class Scale(dragoman.Model):
    def predict(self, x: np.ndarray) -> np.ndarray:
        return x * float(open(__file__.replace("model.py", "factor")).read())
"""
# A worker on another machine sees another folder under the same path: it opens files of `copy` in its place.
OTHER_FILES = """
import builtins, io, os, pathlib
real_open, real_stat = io.open, os.stat
def moved(path):
    return str(path).replace({here!r}, {copy!r}) if isinstance(path, (str, pathlib.Path)) else path
io.open = lambda path, *a, **k: real_open(moved(path), *a, **k)
os.stat = lambda path, *a, **k: real_stat(moved(path), *a, **k)
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("", ""),
        ("factor content", "its file 'factor' has other content on worker host"),
        ("factor size", "its file 'factor' has 3 bytes instead of 1 on worker host"),
        ("factor missing", "its file 'factor' does not exist on worker host"),
        ("large content", "its file 'weights' has other content on worker host"),
    ],
)
async def test_a_worker_with_other_files_is_refused(change: str, message: str, tmp_path: Path) -> None:
    here, copy = tmp_path / "here", tmp_path / "copy"
    for folder in (here, copy):
        folder.mkdir()
        (folder / "model.py").write_text(FOLDER_MODEL)
        (folder / "factor").write_text("2")
        with (folder / "weights").open("wb") as file:  # sparse, and larger than what is hashed in full
            file.truncate(80 << 20)
    (copy / "cache").write_text("of the worker")
    match change.split():
        case ["factor", "content"]:
            (copy / "factor").write_text("3")
            os.utime(copy / "factor", ns=(0, (here / "factor").stat().st_mtime_ns))
        case ["factor", "size"]:
            (copy / "factor").write_text("2.5")
        case ["factor", "missing"]:
            (copy / "factor").unlink()
        case ["large", "content"]:
            with (copy / "weights").open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"1")
    spec = ModelSpec(
        name="m",
        runtime="python",
        uri=str(here),
        placement="process",
        replicas=1,
        launch=LaunchOptions(launcher="join"),
    )
    async with open_port() as port:
        pool = ProcessPool(replace(spec, worker_port=port), lambda: None)
        worker = start_worker(port.address, code=OTHER_FILES.format(here=str(here), copy=str(copy)))
        try:
            if message:
                with pytest.raises(ModelFailed, match=message):
                    await pool.start()
            else:
                await pool.start()
                response: Any = await complete(pool.call(Request(Infer({"x": Tensor.of(np.array([4.0]))}))))
                assert first_value(response) == 8
        finally:
            await pool.close()
        _, output = await end_of(worker)
    assert message in output


async def test_an_elastic_pool_of_joined_workers_with_tls(certificate: tuple[str, str]) -> None:
    """Streams and calls start a worker that joins with TLS; none ends during a stream, and all end when idle."""
    cert, key = certificate
    launch = LaunchOptions(
        launcher="command", command=f"{JOIN} --tls", replicas=2, min_replicas=0, min_ready=0, idle_s=0.1
    )
    async with open_port(tls_cert=cert, tls_key=key) as port:
        pool = ProcessPool(spec_of("Count", launch=launch, replicas=2, worker_port=port), lambda: None)
        await pool.start()
        await wait_until(lambda: not pool.supervisor.running)
        stream = pool.stream(make_request(40))  # more chunks than a worker sends ahead
        found = [first_value(await anext(stream))]
        (worker,) = pool.supervisor.running
        await asyncio.sleep(0.5)  # longer than `idle_s`
        assert pool.supervisor.running == [worker]
        found += [first_value(chunk) async for chunk in stream]
        assert found == list(range(40))
        await wait_until(lambda: not pool.supervisor.running)
        await pool.close()


def test_strangers_of_one_address_leave_places_for_others() -> None:
    clients = worker_port._Clients()
    sockets = [socket.socket() for _ in range(300)]
    for each in sockets:
        clients.add(each, "strangers")
    assert [each.fileno() for each in sockets[:45]].count(-1) == 300 - 256  # the oldest were dropped
    for number in range(12):
        assert clients.next() == (sockets[44 + number], "strangers")
    assert clients.next() is None
    worker = socket.socket()
    clients.add(worker, "worker")
    assert clients.next() == (worker, "worker")
    assert clients.next() is None
    clients.end("strangers")
    assert clients.next() == (sockets[56], "strangers")
    for each in (*sockets, worker):
        each.close()
