"""`Client.map`: order, read-ahead, retries, errors of single points, cancellation, and the journal."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dragoman
from client.client_servers import LoopThread, url_of
from dragoman import FP64, Infer, TensorSpec, errors
from dragoman.client.errors import ServerUnreachable
from dragoman.client.mapping import ProgressLine
from e2e.server_process import wait_until

N = 40


class Recorder(dragoman.Model):
    """Return x, its double and the number of calls so far; `plan` is called first and may raise."""

    placement = "inline"
    inputs = (TensorSpec("x", FP64, (-1,)),)

    def load(self) -> None:
        self.calls: list[bytes] = []
        self.plan: Callable[[float], None] = lambda _: None
        self.hold: asyncio.Event | None = None
        self.running = self.most_running = 0
        self.cancelled = threading.Event()

    async def infer(self, call: Infer) -> Mapping[str, Any]:
        x = call.inputs["x"].data
        self.calls.append(x.tobytes())
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if self.hold is not None and x[0]:
                await self.hold.wait()
            self.plan(float(x[0]))
            with np.errstate(invalid="ignore"):  # signalling NaN
                y = x * 2
            return {"y": y, "x": x, "call": np.array([len(self.calls)])}
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.running -= 1


@dragoman.vector_function(inputs={"x": 2}, derivatives="complex step")
def square(x: Any, *, scale: float = 1.0) -> Any:
    return scale * (x[0] ** 2 + 3 * x[1])


@pytest.fixture(scope="module")
def shared() -> Recorder:
    return Recorder(dragoman.ModelSpec(name="Recorder", trial_s=0))


@pytest.fixture(scope="module")
def recorder_server(loop_thread: LoopThread, shared: Recorder) -> Iterator[dragoman.Server]:
    with loop_thread.serving(shared, square) as server:
        yield server


@pytest.fixture
def recorder(shared: Recorder) -> Recorder:
    shared.load()
    return shared


@pytest.fixture
def map_client(loop_thread: LoopThread, recorder_server: dragoman.Server, kind: tuple[str, Any]) -> Iterator[Any]:
    wire, client_kind = kind
    with loop_thread.client(client_kind, url_of(recorder_server, wire)) as client:
        yield client


@pytest.fixture
def blocking(recorder_server: dragoman.Server) -> Iterator[dragoman.Client]:
    with dragoman.Client(recorder_server.http_url) as client:
        yield client


def points(count: int) -> list[dict[str, Any]]:
    return [{"x": np.array([float(i), 0.5])} for i in range(count)]


def fail_at(*values: float, error: str = "InvalidInput") -> Callable[[float], None]:
    def plan(x: float) -> None:
        if x in values:
            raise getattr(errors, error)(f"not {x}")

    return plan


# --- results -----------------------------------------------------------------------------------------------------


def test_each_point_has_its_result(map_client: Any, recorder: Recorder) -> None:
    found = list(map_client.map("Recorder", points(N), concurrency=4))
    assert sorted(p.index for p in found) == list(range(N))
    assert all(p.result["y"].tolist() == [2.0 * p.index, 1.0] for p in found)
    assert all(p.inputs["x"][0] == p.index and p.error is None for p in found)
    assert len(recorder.calls) == N
    assert recorder.most_running <= 4


def test_results_in_the_order_of_the_points(map_client: Any, recorder: Recorder) -> None:
    found = list(map_client.map("Recorder", points(N), concurrency=8, ordered=True))
    assert [p.index for p in found] == list(range(N))
    assert [p.result["y"][0] for p in found] == [2.0 * i for i in range(N)]


def test_points_are_read_no_further_than_the_window(map_client: Any, recorder: Recorder) -> None:
    read = 0

    def endless() -> Iterator[Any]:
        nonlocal read
        while True:
            read += 1
            yield {"x": np.array([float(read)])}

    results = map_client.map("Recorder", endless(), concurrency=2, window=5)
    assert read == 0
    for taken in range(1, 20):
        next(results)
        assert read <= taken + 4
    results.close()


def test_errors_of_single_points(map_client: Any, recorder: Recorder) -> None:
    recorder.plan = fail_at(3.0, 7.0)
    found = sorted(map_client.map("Recorder", points(10)), key=lambda p: p.index)
    assert [p.index for p in found if p.error] == [3, 7]
    assert found[4].result["y"][0] == 8
    with pytest.raises(errors.InvalidInput, match=r"not 3\.0"):
        _ = found[3].result


def test_points_that_cannot_be_sent_fail_alone(blocking: dragoman.Client, recorder: Recorder) -> None:
    mixed: list[Any] = [[1.0], [[1.0, 2.0], [3.0]], [2.0]]
    found = list(blocking.map("Recorder", mixed, ordered=True))
    assert [type(p.error) for p in found] == [type(None), errors.InvalidInput, type(None)]
    assert found[2].result["y"].tolist() == [4]


def test_derivatives_and_configs(map_client: Any) -> None:
    calls = [{"x": np.array([float(i), 0.0]), "sens": np.ones(1)} for i in range(5)]
    parameters = {"derivative": "gradient", "config": '{"scale": 2.0}'}
    found = list(map_client.map("square", calls, parameters=parameters, ordered=True))
    assert [p.result["gradient"].tolist() for p in found] == [[4.0 * i, 6.0] for i in range(5)]


def test_an_async_iterable_of_points(recorder_server: dragoman.Server, loop_thread: LoopThread) -> None:
    async def source() -> AsyncIterator[Any]:
        for point in points(6):
            await asyncio.sleep(0)
            yield point

    async def run() -> list[int]:
        async with dragoman.AsyncClient(recorder_server.http_url) as client:
            return sorted([p.index async for p in client.map("Recorder", source(), concurrency=2)])

    assert loop_thread.run(run()) == list(range(6))


def test_an_error_of_the_points_ends_the_run(map_client: Any) -> None:
    def source() -> Iterator[Any]:
        yield points(1)[0]
        raise ZeroDivisionError("in the points")

    with pytest.raises(ZeroDivisionError):
        # Not the Recorder, which might get the call that is given up during the next test.
        list(map_client.map("square", source()))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"concurrency": 0}, "concurrency: expected 1 or more"), ({"window": 3}, "window: expected at least")],
)
def test_invalid_options(blocking: dragoman.Client, options: Any, message: str) -> None:
    with pytest.raises(errors.InvalidInput, match=message):
        blocking.map("Recorder", [], **options)


# --- cancellation and retries --------------------------------------------------------------------------------------


def test_leaving_the_iterator_cancels_the_calls(map_client: Any, recorder: Recorder, loop_thread: LoopThread) -> None:
    recorder.hold = loop_thread.call(asyncio.Event)
    results = map_client.map("Recorder", points(20), concurrency=4)
    assert next(results).index == 0
    wait_until(lambda: recorder.running == 4, "four calls that wait")
    results.close()
    assert recorder.cancelled.wait(60)
    wait_until(lambda: recorder.running == 0, "the end of all calls")
    assert len(recorder.calls) == 5


@pytest.mark.parametrize("error", ["NotReady", "Overloaded", "RateLimited"])
def test_points_are_sent_again_after_retry_after(blocking: dragoman.Client, recorder: Recorder, error: str) -> None:
    failures = iter([1.0])

    def plan(x: float) -> None:
        if x == next(failures, None):
            raise getattr(errors, error)("later")

    recorder.plan = plan
    assert [p.error for p in blocking.map("Recorder", points(2)[1:])] == [None]
    assert len(recorder.calls) == 2


def test_the_number_of_retries_can_be_limited(blocking: dragoman.Client, recorder: Recorder) -> None:
    recorder.plan = fail_at(1.0, error="NotReady")
    (point,) = blocking.map("Recorder", points(2)[1:], retries=0)
    assert isinstance(point.error, errors.NotReady)
    assert len(recorder.calls) == 1


def test_nothing_listens(loop_thread: LoopThread, kind: tuple[str, Any]) -> None:
    wire, client_kind = kind
    url = "grpc://127.0.0.1:9" if wire == "grpc" else "http://127.0.0.1:9"
    with loop_thread.client(client_kind, url) as client:
        results = client.map("m", points(100), concurrency=2, timeout_s=0.3)
        found = []
        with pytest.raises(ServerUnreachable, match="cannot reach"):
            for point in results:
                found.append(point)  # noqa: PERF402 - it raises
    assert 2 <= len(found) <= 10  # a point whose last attempt meets its deadline does not end the run
    assert isinstance(found[-1].error, (ServerUnreachable, errors.DeadlineExceeded))


class Breaking:
    """A proxy on TCP that breaks the connection of its first request after the server has received it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.broken = 0

    async def __aenter__(self) -> "Breaking":
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            while data := await reader.read(1 << 16):
                back.write(data)
                answer = await there.read(1 << 16)
                if not self.broken:
                    self.broken += 1
                    break
                writer.write(answer)
        finally:
            writer.close()
            back.close()


@pytest.mark.parametrize("idempotent", [False, True])
def test_lost_connections_are_retried_only_if_idempotent(
    recorder: Recorder, recorder_server: dragoman.Server, loop_thread: LoopThread, idempotent: bool
) -> None:
    async def run() -> list[Any]:
        port = int(recorder_server.http_url.rpartition(":")[2])
        async with Breaking(port) as proxy, dragoman.AsyncClient(proxy.url) as client:
            sent = [{"x": dragoman.Tensor.of(point["x"])} for point in points(3)]  # needs no metadata
            results = client.map("Recorder", sent, concurrency=1, idempotent=idempotent, ordered=True)
            return [point async for point in results]

    found = loop_thread.run(run())
    assert [isinstance(p.error, ConnectionError) for p in found] == [not idempotent, False, False]
    assert len(recorder.calls) == 3 + idempotent


# --- journal -----------------------------------------------------------------------------------------------------

EXACT = np.array([0.1, -0.0, np.inf, -np.inf, np.nan, 5e-324, np.nextafter(1, 2)])
EXACT_BITS = np.append(EXACT, np.array([0x7FF8_0000_DEAD_BEEF, 0xFFF0_0000_0000_0001], np.uint64).view(np.float64))


def test_a_second_run_computes_nothing_again(map_client: Any, recorder: Recorder, tmp_path: Path) -> None:
    calls = [*points(10), {"x": EXACT_BITS}]
    first = list(map_client.map("Recorder", calls, journal=tmp_path / "run", ordered=True))
    assert len(recorder.calls) == 11
    second = list(map_client.map("Recorder", calls, journal=tmp_path / "run", ordered=True))
    assert len(recorder.calls) == 11
    assert [p.is_from_journal for p in (*first, *second)] == [False] * 11 + [True] * 11
    for one, other in zip(first, second, strict=True):
        for name in ("x", "y", "call"):
            assert one.result[name].tobytes() == other.result[name].tobytes()
            assert one.result[name].dtype == other.result[name].dtype
    assert second[-1].result["x"].tobytes() == EXACT_BITS.tobytes()


def test_points_that_differ_in_one_bit_are_different(
    blocking: dragoman.Client, recorder: Recorder, tmp_path: Path
) -> None:
    list(blocking.map("Recorder", [[0.0], [np.nan]], journal=tmp_path / "run"))
    found = list(blocking.map("Recorder", [[-0.0], EXACT_BITS[-2:-1], [0.0]], journal=tmp_path / "run", ordered=True))
    assert [p.is_from_journal for p in found] == [False, False, True]


def test_equal_points_are_computed_each(blocking: dragoman.Client, recorder: Recorder, tmp_path: Path) -> None:
    calls = points(1) * 5
    first = list(blocking.map("Recorder", calls, journal=tmp_path / "run"))
    assert sorted(p.result["call"][0] for p in first) == [1, 2, 3, 4, 5]
    second = list(blocking.map("Recorder", calls + calls[:1], journal=tmp_path / "run"))
    assert sorted(p.result["call"][0] for p in second) == [1, 2, 3, 4, 5, 6]
    assert sum(p.is_from_journal for p in second) == 5


def test_failed_points_are_computed_again(blocking: dragoman.Client, recorder: Recorder, tmp_path: Path) -> None:
    recorder.plan = fail_at(3.0)
    list(blocking.map("Recorder", points(5), journal=tmp_path / "run"))
    recorder.load()
    found = list(blocking.map("Recorder", points(5), journal=tmp_path / "run", ordered=True))
    assert [p.is_from_journal for p in found] == [True, True, True, False, True]
    assert found[3].result["y"][0] == 6


@pytest.mark.parametrize(
    ("model", "options", "field"),
    [
        ("square", {}, "model"),
        ("Recorder", {"parameters": {"config": "{}"}}, "parameters"),
        ("Recorder", {"outputs": ["y"]}, "outputs"),
    ],
)
def test_the_journal_of_another_run_is_rejected(
    blocking: dragoman.Client, recorder: Recorder, tmp_path: Path, model: str, options: Any, field: str
) -> None:
    list(blocking.map("Recorder", points(2), journal=tmp_path / "run"))
    before = (tmp_path / "run").read_bytes()
    with pytest.raises(errors.InvalidInput, match=f"belongs to another run: {field}: expected"):
        list(blocking.map(model, points(2), journal=tmp_path / "run", **options))
    assert (tmp_path / "run").read_bytes() == before


def test_another_file_is_not_overwritten(blocking: dragoman.Client, tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("1,2\n3,4\n")
    with pytest.raises(errors.InvalidInput, match="is not a journal of Client"):
        list(blocking.map("Recorder", points(1), journal=tmp_path / "data.csv"))
    assert (tmp_path / "data.csv").read_text() == "1,2\n3,4\n"


def test_two_runs_cannot_share_a_journal(blocking: dragoman.Client, recorder: Recorder, tmp_path: Path) -> None:
    with closing(blocking.map("Recorder", points(100), journal=tmp_path / "run", concurrency=1)) as results:
        next(results)
        with pytest.raises(errors.InvalidInput, match="in use by another process"):
            next(blocking.map("Recorder", points(1), journal=tmp_path / "run"))


def test_every_truncated_end_is_tolerated(blocking: dragoman.Client, recorder: Recorder, tmp_path: Path) -> None:
    path = tmp_path / "run"
    list(blocking.map("Recorder", points(2), journal=path, ordered=True, concurrency=1, window=1))
    whole = path.read_bytes()
    header, first, _ = whole.splitlines(keepends=True)
    for size in (0, 5, len(header) - 1, len(header), len(header) + 3, len(header + first), len(whole) - 1):
        path.write_bytes(whole[:size])
        found = list(blocking.map("Recorder", points(2), journal=path, ordered=True))
        assert [p.is_from_journal for p in found] == [size >= len(header + first), False]
        assert len(path.read_bytes().splitlines()) == 3
    path.write_bytes(whole + b"\0" * 5000)  # as after a crash of the machine
    assert all(p.is_from_journal for p in blocking.map("Recorder", points(2), journal=path))
    assert path.read_bytes() == whole


@pytest.mark.parametrize("at", [-40, 60])
def test_a_damaged_journal_is_rejected(blocking: dragoman.Client, recorder: Recorder, tmp_path: Path, at: int) -> None:
    path = tmp_path / "run"
    list(blocking.map("Recorder", points(3), journal=path, concurrency=1, window=1))
    header, first, *rest = path.read_bytes().splitlines(keepends=True)
    changed = bytearray(first)
    changed[at] ^= 1
    path.write_bytes(b"".join([header, bytes(changed), *rest]))
    with pytest.raises(errors.InvalidInput, match=f"is damaged at byte {len(header)}, before other records"):
        list(blocking.map("Recorder", points(3), journal=path))


def test_a_full_disk_ends_the_run_and_keeps_the_journal(
    blocking: dragoman.Client, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "run", os.write
    list(blocking.map("Recorder", points(2), journal=path))
    before = path.read_bytes()

    def full(descriptor: int, data: Any) -> int:
        if len(data) > 20 and bytes(data[:9]).strip().isalnum():
            return write(descriptor, data[:20])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            list(blocking.map("Recorder", points(9), journal=path, concurrency=1))
    assert path.read_bytes() == before
    assert len(list(blocking.map("Recorder", points(9), journal=path))) == 9


SCRIPT = """
import sys, dragoman
client = dragoman.Client(sys.argv[1])
for point in client.map("Recorder", ([float(i)] for i in range(300)), journal=sys.argv[2], concurrency=4):
    print(point.index, flush=True)
"""


def test_a_killed_run_continues_from_its_journal(
    blocking: dragoman.Client, recorder: Recorder, recorder_server: dragoman.Server, tmp_path: Path
) -> None:
    journal = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, recorder_server.http_url, str(journal)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    with process.stdout as lines:
        returned = [int(lines.readline()) for _ in range(60)]
        process.send_signal(signal.SIGKILL)
        returned += [int(line) for line in lines.readlines() if line.endswith(b"\n")]
    assert process.wait() == -signal.SIGKILL
    wait_until(lambda: recorder.running == 0, "the end of the calls of the killed process")
    before = len(recorder.calls)
    finished = len(journal.read_bytes().splitlines()) - 1
    found = list(blocking.map("Recorder", [[float(i)] for i in range(300)], journal=journal, ordered=True))
    assert [p.result["y"][0] for p in found] == [2.0 * i for i in range(300)]
    stored = {p.index for p in found if p.is_from_journal}
    assert set(returned) <= stored
    assert finished - 1 <= len(stored) <= finished  # the last record may be truncated
    late = len(recorder.calls) - before - (300 - len(stored))
    assert 0 <= late <= 4  # calls that the killed process had sent, and that had not begun yet
    repeated = {i for i in range(300) if recorder.calls.count(np.array([float(i)]).tobytes()) > 1}
    assert len(repeated) <= 4
    assert not repeated & stored


# --- progress ----------------------------------------------------------------------------------------------------


def test_progress_is_shown_only_on_a_terminal(
    blocking: dragoman.Client, recorder: Recorder, capfd: pytest.CaptureFixture[str]
) -> None:
    recorder.plan = fail_at(3.0)
    list(blocking.map("Recorder", points(5)))
    assert capfd.readouterr() == ("", "")
    list(blocking.map("Recorder", points(5), progress=True))
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("\rRecorder: 1 of 5 points")
    assert "\rRecorder: 5 of 5 points (1 failed)" in err
    assert err.endswith("\n")


def test_the_text_of_the_progress_line() -> None:
    line = ProgressLine("m", 1000, sys.stderr)
    line._done, line._stored = 300, 100
    assert line.text(10.0) == "m: 300 of 1,000 points (100 from the journal), 20/s, 35 s left"
    assert line.text(1000.0) == "m: 300 of 1,000 points (100 from the journal), 0.2/s, 58 min left"
    assert ProgressLine("m", None, sys.stderr).text(1.0) == "m: 0 points"
