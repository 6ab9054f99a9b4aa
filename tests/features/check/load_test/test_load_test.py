"""`dragoman bench`: counts and latencies of servers of known delay, errors, comparison."""

import asyncio
import itertools
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from dragoman.cli import main
from dragoman_check.cli.bench import PROTOCOL_NAMES
from dragoman_check.conformance.http import HttpTarget
from dragoman_check.conformance.target import Target
from dragoman_check.load_test import jobs
from dragoman_check.load_test.compare import compare_runs
from dragoman_check.load_test.connections import TimedExchange
from dragoman_check.load_test.loops import LoadLevel, arrival_times, run_load
from dragoman_check.load_test.measurements import Measurement, Recorder, percentiles
from e2e.server_process import ServerProcess
from features.check.load_test.conftest import TOKENS, SlowServer

QUICK = ("--seconds", "0.2", "--warmup-s", "0")


def run_quickly(slow: SlowServer, load: LoadLevel, protocol: str = "rest") -> Measurement:
    target = Target(HttpTarget(slow.url))
    job = jobs.make_job(target, protocol, jobs.Options("slow", rows=3))
    slow.bodies.clear()
    return asyncio.run(run_load(job, load))


# --- latencies and counts ----------------------------------------------------------------------------------------


def test_a_closed_loop_measures_at_least_the_delay(slow: SlowServer) -> None:
    found = run_quickly(slow, LoadLevel(concurrency=1, seconds=0.2, warmup_s=0))
    assert found.sent == found.completed == len(slow.bodies) > 0
    assert found.errors == {}
    assert found.latency_ms["p50"] >= 10
    assert found.rate <= 100
    assert found.latency_ms == found.service_ms


@pytest.mark.parametrize(
    ("service_s", "clients", "batch", "expected"),
    [
        (1.5, 1, 1, 1 / 1.5),  # longer than the warm-up, and two thirds of the measured time
        (5.0, 1, 1, 1 / 5),  # longer than the warm-up and the measured time
        (0.3, 4, 1, 1 / 0.3),  # one after the other
        (0.7, 4, 4, 4 / 0.7),  # all at a time
    ],
)
def test_a_closed_loop_has_the_rate_of_a_slow_server(
    service_s: float, clients: int, batch: int, expected: float
) -> None:
    recorder = Recorder(2.0, 2.0, warmup_s=2.0)
    for i in range(100):
        end_s = service_s * (i // batch + 1)
        sent_s = max(0.0, end_s - service_s * clients / batch)
        if sent_s < recorder.end_s:
            recorder.add(TimedExchange(sent_s, end_s), sent_s, [])
    assert recorder.measurement("rest", LoadLevel(clients)).rate == pytest.approx(expected)


def test_a_pause_at_the_end_lowers_the_rate() -> None:
    recorder = Recorder(1.0, 10.0, warmup_s=1.0)
    for i in range(1, 60):
        recorder.add(TimedExchange(0.1 * i - 0.1, 0.1 * i), 0.1 * i - 0.1, [])
    recorder.add(TimedExchange(5.9, 40.0), 5.9, [])
    assert recorder.measurement("rest", LoadLevel()).rate == pytest.approx(4.9, rel=0.03)


def test_a_closed_loop_measures_the_rate_of_the_server(slow: SlowServer) -> None:
    slow.delay_s = 0.1
    found = run_quickly(slow, LoadLevel(concurrency=8, seconds=0.6, warmup_s=0.3))
    assert 0 < found.rate < 15  # 10 if nothing delays it
    assert found.client_cpu < 0.9


def test_a_closed_loop_has_as_many_requests_as_clients(slow: SlowServer) -> None:
    found = run_quickly(slow, LoadLevel(concurrency=3, seconds=0.2, warmup_s=0))
    assert found.sent == len(slow.bodies)
    assert 1 < slow.most_waiting <= 3


def test_an_open_loop_counts_the_time_in_the_queue(slow: SlowServer) -> None:
    load = LoadLevel(rate=200, arrival="constant", seconds=0.25, warmup_s=0, connections=1)
    due_s = list(arrival_times(load))
    found = run_quickly(slow, load)
    assert found.sent == found.completed == len(slow.bodies) == len(due_s) == 50
    # The response to the last request follows those to all others, each of which takes 10 ms.
    assert found.latency_ms["max"] >= 1000 * (len(due_s) * 0.01 - due_s[-1])
    assert found.service_ms["p50"] >= 10
    assert found.rate <= 100


def test_an_open_loop_sends_whether_responses_come_or_not(slow: SlowServer) -> None:
    slow.delay_s = 0.05
    load = LoadLevel(rate=100, arrival="constant", seconds=0.2, warmup_s=0)
    found = run_quickly(slow, load)
    assert found.sent == len(list(arrival_times(load))) == 20
    assert slow.most_waiting > 1  # on connections of their own, not one after the other


def test_the_warm_up_is_not_measured(slow: SlowServer) -> None:
    found = run_quickly(slow, LoadLevel(rate=100, arrival="constant", seconds=0.1, warmup_s=0.1))
    assert len(slow.bodies) == 20
    assert 9 <= found.sent <= 11


def test_streams_have_times_of_tokens(slow: SlowServer) -> None:
    found = run_quickly(slow, LoadLevel(concurrency=1, seconds=0.2, warmup_s=0), "tgi")
    assert found.errors == {}
    assert found.first_token_ms["p50"] >= 10
    assert found.latency_ms["p50"] >= 10 * TOKENS
    assert found.tokens_per_s == found.chunks_per_s == pytest.approx(TOKENS * found.rate)
    assert found.between_tokens_ms["max"] > 0


def test_tokens_of_openai_are_those_of_usage(slow: SlowServer, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_quickly(slow, LoadLevel(concurrency=1, seconds=0.2, warmup_s=0), "openai-completions")
    assert found.errors == {}
    assert found.tokens_per_s == pytest.approx(2 * TOKENS * found.rate)
    assert (found.between_tokens_ms, found.between_chunks_ms != {}) == ({}, True)
    command = ["bench", slow.url, "slow", *QUICK, "--protocol", "openai-completions", "--concurrency", "1"]
    assert main(command) == 0
    assert {"first token p50", "between chunks p50", "tokens/s"} <= titles(capsys)
    slow.usage = None
    assert main(command) == 0
    assert {"first chunk p50", "between chunks p50", "chunks/s"} <= titles(capsys)


def titles(capsys: pytest.CaptureFixture[str]) -> set[str]:
    return set(re.split(r" {2,}", capsys.readouterr().out.splitlines()[0]))


def test_arrival_times_have_the_rate() -> None:
    constant = list(arrival_times(LoadLevel(rate=10, arrival="constant", seconds=1, warmup_s=0)))
    assert constant == pytest.approx([0.1 * i for i in range(10)])
    poisson = list(arrival_times(LoadLevel(rate=1000, seconds=10, warmup_s=0, seed=3)))
    gaps = [b - a for a, b in itertools.pairwise(poisson)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1e-3, rel=0.05)
    assert sum(g * g for g in gaps) / len(gaps) == pytest.approx(2 * mean**2, rel=0.1)  # an exponential distribution
    assert poisson == list(arrival_times(LoadLevel(rate=1000, seconds=10, warmup_s=0, seed=3)))


def test_percentiles_are_values_by_rank() -> None:
    found = percentiles([0.001 * i for i in range(1, 101)])
    assert found == pytest.approx(
        {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p99.9": 100.0, "max": 100.0, "mean": 50.5}
    )
    assert percentiles([]) == {}


def test_a_text_server_with_one_model_has_no_names_in_paths(slow: SlowServer) -> None:
    slow.missing = {"/models/slow/generate_stream"}
    found = run_quickly(slow, LoadLevel(concurrency=1, seconds=0.05, warmup_s=0), "tgi")
    assert (found.errors, found.completed > 0) == ({}, True)


# --- errors ------------------------------------------------------------------------------------------------------


def test_errors_are_counted_by_kind(slow: SlowServer) -> None:
    slow.failing = True
    found = run_quickly(slow, LoadLevel(rate=50, arrival="constant", seconds=0.2, warmup_s=0))
    assert found.sent == found.completed + sum(found.errors.values()) == 10
    assert found.errors == {"HTTP status 503": 5}


def test_a_closed_connection_is_an_error_and_is_opened_again(slow: SlowServer) -> None:
    target = Target(HttpTarget(slow.url))
    job = jobs.make_job(target, "rest", jobs.Options("slow"))
    slow.closing = True
    found = asyncio.run(run_load(job, LoadLevel(concurrency=1, seconds=0.5, warmup_s=0)))
    assert found.completed == 0
    assert list(found.errors) == ["connection: ConnectionResetError"]
    assert found.sent == len(slow.bodies) > 1


def test_a_missing_response_is_an_error(slow: SlowServer) -> None:
    slow.delay_s = 0.3
    found = run_quickly(slow, LoadLevel(concurrency=1, seconds=0.1, warmup_s=0, timeout_s=0.05))
    assert list(found.errors) == ["no response within 0.05 s"]


def test_an_error_within_a_stream_is_an_error(slow: SlowServer) -> None:
    job = jobs.make_job(Target(HttpTarget(slow.url)), "tgi", jobs.Options("slow"))
    slow.failing = True
    found = asyncio.run(run_load(job, LoadLevel(concurrency=1, seconds=0.1, warmup_s=0)))
    assert list(found.errors) == ["error within the stream"]


# --- requests ----------------------------------------------------------------------------------------------------


def test_the_request_follows_from_the_signature(slow: SlowServer) -> None:
    run_quickly(slow, LoadLevel(seconds=0.05, warmup_s=0))
    expected = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [3, 2], "data": [0.5] * 6}]}
    assert json.loads(slow.bodies[0]) == expected


def test_the_request_of_a_file_is_sent_as_it_is(slow: SlowServer, tmp_path: Path) -> None:
    body = b'{"inputs": [ {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}'
    (tmp_path / "request.json").write_bytes(body)
    assert main(["bench", slow.url, "slow", *QUICK, "--input", str(tmp_path / "request.json")]) == 0
    assert set(slow.bodies) == {body}


@pytest.mark.parametrize("protocol", jobs.PROTOCOLS)
def test_every_protocol_is_measured(protocol: str, server: ServerProcess, tmp_path: Path) -> None:
    model = {"umbridge": "curve"}.get(protocol, "affine" if protocol in ("rest", "rest-binary", "grpc") else "reverse")
    file = tmp_path / "run.json"
    url = f"http://127.0.0.1:{server.http_port}"
    options = ("--grpc", f"127.0.0.1:{server.grpc_port}", "--concurrency", "2", "--json", str(file))
    assert main(["bench", url, model, "--protocol", protocol, *QUICK, *options]) == 0
    (found,) = json.loads(file.read_text())["measurements"]
    assert found["errors"] == {}
    assert found["completed"] == found["sent"] > 0
    assert found["received_bytes"] >= 8 * found["completed"]
    is_stream = protocol not in ("rest", "rest-binary", "grpc", "umbridge")
    assert bool(found["first_token_ms"]) is is_stream
    assert (found["tokens_per_s"] > 0) is is_stream


# --- the command -------------------------------------------------------------------------------------------------


def test_the_command_prints_a_row_for_each_load(slow: SlowServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", slow.url, "slow", *QUICK, "--concurrency", "1,2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:13] for line in lines[:3]] == ["load         ", "concurrency 1", "concurrency 2"]
    assert "responses are too few for p99.9" in "\n".join(lines)
    assert "\x1b" not in "\n".join(lines)


def test_a_busy_client_is_reported(
    slow: SlowServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "process_time", time.perf_counter)  # a client that never idles
    assert main(["bench", slow.url, "slow", *QUICK, "--concurrency", "1"]) == 0
    assert "concurrency 1: the client used 100 % of a CPU core and limits the measurement" in capsys.readouterr().out


def test_an_idle_client_is_not_reported(slow: SlowServer, capsys: pytest.CaptureFixture[str]) -> None:
    slow.delay_s = 0.1
    assert main(["bench", slow.url, "slow", "--seconds", "0.3", "--warmup-s", "0", "--concurrency", "1"]) == 0
    assert "limits the measurement" not in capsys.readouterr().out


def test_a_measured_time_without_requests_is_reported(slow: SlowServer, capsys: pytest.CaptureFixture[str]) -> None:
    slow.delay_s = 0.6
    options = ("--warmup-s", "0.4", "--seconds", "0.05", "--concurrency", "1")
    assert main(["bench", slow.url, "slow", *options]) == 2
    assert "no request began in the measured time; give more --seconds" in capsys.readouterr().out


def test_failed_requests_fail_the_command(slow: SlowServer, capsys: pytest.CaptureFixture[str]) -> None:
    slow.failing = True
    assert main(["bench", slow.url, "slow", *QUICK, "--concurrency", "1"]) == 1
    assert "requests failed: HTTP status 503" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["http://127.0.0.1:1"], "expected the address of a server and a model"),
        (["http://127.0.0.1:1", "m"], "no HTTP server answers at http://127.0.0.1:1"),
        (["http://127.0.0.1:1", "m", "--concurrency", "0"], "--concurrency: expected positive numbers, got '0'"),
        (["http://127.0.0.1:1", "m", "--rate", "x"], "--rate: expected numbers separated by commas, got 'x'"),
        (
            ["http://127.0.0.1:1", "m", "--rate", "1", "--concurrency", "1"],
            "expected --rate or --concurrency, got both",
        ),
        (["http://127.0.0.1:1", "m", "--seconds", "nan"], "--seconds: expected seconds from 1e-06 to 1e+06, got nan"),
        (["http://127.0.0.1:1", "m", "--warmup-s", "inf"], "--warmup-s: expected seconds from 0 to 1e+06, got inf"),
        (["http://127.0.0.1:1", "m", "--timeout-s", "nan"], "--timeout-s: expected seconds above 0, got nan"),
        (["https://127.0.0.1:1", "m", "--ca", "/nope"], "--ca: '/nope' cannot be read: No such file or directory"),
        (["https://127.0.0.1:1", "m", "--ca", __file__], f"--ca: expected certificates (PEM) in '{__file__}'"),
        (["http://127.0.0.1:1", "m", "--key-file", "/nope"], "--key-file: '/nope' cannot be read"),
        (["http://127.0.0.1:1", "m", "--repeat", "0"], "--repeat: expected at least 1, got 0"),
        (["--compare", "/nonexistent", "/nonexistent"], "--compare: '/nonexistent' cannot be read"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_server_that_does_not_keep_up_is_reported(slow: SlowServer, capsys: pytest.CaptureFixture[str]) -> None:
    slow.delay_s = 0.02
    assert main(["bench", slow.url, "slow", *QUICK, "--rate", "100", "--arrival", "constant"]) == 0
    assert "of 20 requests waited when the last one was sent" in capsys.readouterr().out


def test_an_unknown_model_is_named(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", f"http://127.0.0.1:{server.http_port}", "nope"]) == 2
    assert capsys.readouterr().err.startswith("dragoman: model 'nope' not found; expected affine,")


def test_a_model_that_loads_is_named(slow: SlowServer, capsys: pytest.CaptureFixture[str]) -> None:
    slow.metadata = {"error": "model 'slow' is not ready: LOADING"}
    assert main(["bench", slow.url, "slow", *QUICK]) == 2
    assert capsys.readouterr().err == "dragoman: model 'slow' is loading; try again when it is ready\n"


def test_finished_loads_are_reported_after_an_interruption(
    slow: SlowServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted(job: jobs.RequestJob, load: LoadLevel, show: Any) -> Measurement:
        if load.concurrency == 2:
            raise KeyboardInterrupt
        return await run_load(job, load, show)

    monkeypatch.setattr("dragoman_check.cli.load_test.run_load", interrupted)
    file = tmp_path / "run.json"
    assert main(["bench", slow.url, "slow", *QUICK, "--concurrency", "1,2", "--json", str(file)]) == 130
    assert [m["label"] for m in json.loads(file.read_text())["measurements"]] == ["concurrency 1"]
    assert "stopped after 1 of 2 loads" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["bench", *QUICK], ["check", "--only", "rest-server-live"]])
def test_a_key_comes_from_a_file(command: list[str], slow: SlowServer, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    names = ["slow", "--concurrency", "1"] if command[0] == "bench" else []
    assert main([command[0], slow.url, *names, *command[1:], "--key-file", str(tmp_path / "key")]) == 0
    assert slow.authorization == "Bearer secret"


def test_repeated_runs_show_their_spread(slow: SlowServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    words = ("--concurrency", "1,2", "--repeat", "3", "--json", str(file))
    assert main(["bench", slow.url, "slow", *QUICK, *words]) == 0
    found = json.loads(file.read_text())["measurements"]
    assert [(m["label"], m["run"]) for m in found] == [(f"concurrency {n}", run) for run in (1, 2, 3) for n in (1, 2)]
    lines = capsys.readouterr().out.splitlines()
    rows = lines[lines.index("") + 2 :][:2]
    for i, row in enumerate(rows):
        rates = sorted(m["rate"] for m in found[i::2])
        cells = re.split(r"  +", row)
        assert cells[:4] == [
            f"concurrency {i + 1}", "3", f"{rates[1]:.4g}", f"{rates[0]:.4g} to {rates[2]:.4g}",
        ]  # fmt: skip
    assert sum("too few" in line for line in lines) == 2


def test_the_command_knows_the_protocols() -> None:
    assert PROTOCOL_NAMES == jobs.PROTOCOLS


# --- comparison -----------------------------------------------------------------------------------------


def run_of(label: str, *p50: float, protocol: str = "rest") -> dict[str, Any]:
    """Return a run with these medians of the parts of one load."""
    parts = [{"rate": 1000 / each, "p50": each, "p99": 2 * each} for each in p50]
    mean = sum(p50) / len(p50)
    latency = {"p50": mean, "p90": 1.5 * mean, "p99": 2 * mean}
    load = {"concurrency": 1, "rate": 0}
    measurement = {
        "protocol": protocol, "label": label, "rate": 1000 / mean, "latency_ms": latency, "slices": parts, "load": load,
    }  # fmt: skip
    return {"measurements": [measurement]}


@pytest.mark.parametrize(
    ("second", "verdict"),
    [
        ((2.0, 2.1), "worse"),
        ((0.5, 0.6), "better"),
        ((1.1, 3.0), "within the spread"),
        ((1.0, 1.2), "within the spread"),
    ],
)
def test_a_difference_counts_beyond_the_spread(second: tuple[float, ...], verdict: str) -> None:
    found = compare_runs(run_of("c", 1.0, 1.2), run_of("c", *second))
    assert {each.name: each.verdict for each in found} == dict.fromkeys(("rate", "p50", "p99"), verdict)


@pytest.mark.parametrize(("second", "verdict"), [((2.0, 3.0), "worse"), ((1.15, 9.0), "within the spread")])
def test_repeated_runs_are_compared_by_their_values(second: tuple[float, ...], verdict: str) -> None:
    """Check that the parts of single runs, which are further apart, do not count then, and values are medians."""
    runs = [[run_of("c", 0.1 * p50, 1.9 * p50)["measurements"][0] for p50 in each] for each in ((1, 1.2), second)]
    found = compare_runs({"measurements": runs[0]}, {"measurements": runs[1]})
    assert {each.name: each.verdict for each in found} == dict.fromkeys(("rate", "p50", "p99"), verdict)
    (p50,) = (each for each in found if each.name == "p50")
    assert p50.first == pytest.approx(1.1)
    assert p50.first_range == pytest.approx((1.0, 1.2))
    assert p50.second == pytest.approx(sum(second) / 2)


@pytest.mark.parametrize(("second", "status"), [(2.0, 1), (1.0, 0), (0.5, 0)])
def test_the_command_compares_two_runs(
    second: float, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    files[0].write_text(json.dumps(run_of("concurrency 1", 1.0, 1.1)))
    files[1].write_text(json.dumps(run_of("concurrency 1", second, second + 0.1)))
    assert main(["bench", "--compare", *map(str, files)]) == status
    text = capsys.readouterr().out
    assert "rest concurrency 1" in text
    assert ("worse" in text, "better" in text) == (second > 1, second < 1)


def test_runs_of_other_loads_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    files[0].write_text(json.dumps(run_of("concurrency 1", 1.0)))
    files[1].write_text(json.dumps(run_of("concurrency 1", 1.0, protocol="grpc")))
    assert main(["bench", "--compare", *map(str, files)]) == 2
    assert "no load in common: rest concurrency 1; grpc concurrency 1" in capsys.readouterr().err
    files[1].write_text("{}")
    assert main(["bench", "--compare", *map(str, files)]) == 2
    assert "expected files that dragoman bench --json wrote" in capsys.readouterr().err
