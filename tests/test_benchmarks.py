"""The benchmarks run and report every column; their speed is not tested.

The ordinary run has one of them that starts servers; the others are run by ./scripts/test-benchmarks.
"""

import asyncio
import importlib
import io
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dragoman.formats.grpc_messages import ModelInferResponse

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import (  # noqa: E402
    checked_request,
    cluster,
    cluster_hosts,
    codecs,
    fairness,
    generation,
    load,
    operations,
    processes,
    server_processes,
    tables,
    workloads,
)
from benchmarks.workloads import Response, Workload  # noqa: E402

by_command = pytest.mark.skipif(
    "DRAGOMAN_TEST_BENCHMARKS" not in os.environ, reason="slow; run by ./scripts/test-benchmarks"
)
WORKLOADS = {w.name: w for w in workloads.identity()}
RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_a_benchmark_can_be_imported(path: Path) -> None:
    importlib.import_module(f"benchmarks.{path.stem}")


def run(name: str, *flags: str) -> str:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", *flags]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    return process.stdout


def results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]


@by_command
def test_startup_reports_imports_starts_and_memory() -> None:
    output = run("startup")
    result = results("startup")
    assert set(result["servers"]) == {"scikit-learn", "Python function", "Python class, inline"}
    for name, server in result["servers"].items():
        assert name in output
        assert server["ready_s"] > 0
        assert 0 < server["pss_mib"] <= server["rss_mib"]
    assert result["servers"]["Python function"]["processes"] > result["servers"]["Python class, inline"]["processes"]
    assert result["versions"]["dragoman"] in output


def test_identity_measures_every_workload_against_the_echo_server() -> None:
    output = run("identity", "--seconds", "0.1")
    rows = results("identity")["rows"]
    assert {(r["workload"], r["server"]) for r in rows} == {(w, s) for w in WORKLOADS for s in ("dragoman", "echo")}
    assert all(r["responses"] > 0 and r["errors"] == 0 for r in rows)
    own_table, comparison = output.split("## In this run")[1].split("## Share of the echo")
    assert {(r[0], r[2]) for r in rows_of(own_table)[2:]} == {(r["workload"], r["server"]) for r in rows}
    assert all("%" in r[7] for r in rows_of(own_table)[2:] if r[2] == "dragoman")
    assert [r[0] for r in rows_of(comparison)[2:]] == list(WORKLOADS)
    assert all(r[2].endswith("%") for r in rows_of(comparison)[2:])


@by_command
def test_grpc_is_measured_against_echo_servers() -> None:
    if shutil.which("cc") is None:
        pytest.skip("the load generator needs a C compiler")
    run("grpc", "--seconds", "0.2", "--subjects", "echo own,dragoman own")
    result = results("grpc")
    assert {row["server"] for row in result["rows"]} == {"echo aio", "echo own", "dragoman own"}
    assert {row["workload"] for row in result["rows"]} == {"grpc-raw-small", "grpc-raw-large"}
    assert all(row["rate"] > 0 and row["cpu_us"] >= 0 for row in result["rows"])


@by_command
@pytest.mark.alone
def test_the_hot_path_is_measured_by_stage() -> None:
    output = run("hot_path", "--only", "small")
    rows = {r["workload"]: r for r in results("hot_path")["rows"]}
    assert set(rows) == {name for name in WORKLOADS if "small" in name}
    for name, row in rows.items():
        assert name in output
        assert min(row[stage] for stage in ("parse", "engine", "format", "floor")) > 0
        assert row["total"] > row["parse"]


@by_command
def test_batching_is_measured_in_closed_and_open_loops() -> None:
    run("batching", "--only", "adaptive")
    rows = results("batching")["rows"]
    assert [(r["kind"], r["method"]) for r in rows] == [
        ("closed", "adaptive delay 0.5"),
        ("open", "adaptive delay 0.5"),
    ]
    assert all(r["rate"] > 0 and r["errors"] == 0 and r["p50_ms"] >= 1 for r in rows)


@by_command
def test_codecs_are_measured_in_both_directions() -> None:
    output = run("codecs")
    rows = results("codecs")["rows"]
    encodings = {(r["case"], r["encoding"]) for r in rows if r["side"] == "dragoman"}
    assert encodings == {(case, encoding) for case in ("frame", "array", "strings") for encoding in ("JSON", "binary")}
    assert all(r["encode_ms"] > 0 and r["decode_ms"] > 0 for r in rows)
    assert {r[1] for r in rows_of(output)[2:]} >= {"dragoman, JSON", "dragoman, binary"}
    assert ("mlserver is not installed" in output) == all(r["side"] == "dragoman" for r in rows)


@by_command
def test_adapters_are_measured_beside_none() -> None:
    rows = rows_of(run("adapters"))[2:]
    assert [row[:2] for row in rows] == [["4", side] for side in ("none", "same", "own")]
    assert all(float(row[2]) > 0 and float(row[3]) > 0 for row in rows)


@by_command
def test_the_prefix_cache_is_measured() -> None:
    without, cached = rows_of(run("prefixes"))[2:]
    assert without[:3] == ["20", "0", "0.0%"]
    assert float(cached[2].rstrip("%")) > 50


@by_command
def test_umbridge_is_measured_against_the_umbridge_package() -> None:
    output = run("umbridge", "--seconds", "0.2", "--only", "gradient")
    rows = results("umbridge")["rows"]
    servers = ("dragoman", "dragoman, their class", "umbridge")
    assert {(r["workload"], r["server"]) for r in rows} == {("gradient-4", s) for s in servers}
    assert all(r["responses"] > 0 and r["errors"] == 0 for r in rows)
    assert all(float(r[7]) > 0 for r in rows_of(output)[2:] if r[2] != "umbridge")


def test_ratios_of_codecs_compare_within_a_round() -> None:
    def row(side: str, turn: int, ms: float) -> dict[str, Any]:
        times = {"encode_ms": ms, "decode_ms": 2 * ms, "bytes": 1}
        return {"case": "array", "side": side, "encoding": "JSON", "round": turn, **times}

    rows = [row("dragoman", 0, 1.0), row("mlserver", 0, 4.0), row("dragoman", 1, 10.0), row("mlserver", 1, 60.0)]
    ours, theirs = rows_of(codecs.table(rows))[2:]
    assert ours == ["FP32 1000 x 1000", "dragoman, JSON", "1", "5.50", "11.00", "5.0", "5.0", "5.0"]
    assert theirs[5:] == ["", "", ""]
    assert rows_of(codecs.table(rows[::2]))[2][5:] == ["-", "-", "-"]


def test_a_key_with_many_clients_hardly_delays_another() -> None:
    alone, beside = (np.percentile(fairness.first_tokens(n, 40, keys=True), 99) for n in (0, 64))
    assert beside < 1.5 * alone
    # Shares follow measured times, so that one of the calls may wait for a second batch; without keys it is nine.
    assert np.percentile(asyncio.run(fairness.batches(64, 40, keys=True)), 99) <= 2


def test_ratios_of_operations_compare_within_a_round() -> None:
    keys = operations.Configuration("keys", ("--api-keys", "/tmp/keys.toml"), aim="1.03")
    times = {operations.PLAIN: [10.0, 20.0, 40.0], "keys": [11.0, 20.0, 60.0]}
    table = operations.table({"rest-json-small": times}, [operations.Configuration(operations.PLAIN), keys])
    plain, measured = rows_of(table)[2:]
    assert plain == ["W1", "plain", "20.0", "1.000", "1.000 to 1.000", "", ""]
    assert measured == ["W1", "keys", "20.0", "1.100", "1.050 to 1.300", "1.03", "--api-keys keys.toml"]


@by_command
@pytest.mark.parametrize("name", ["rest-binary-small", "grpc-raw-small"])
def test_the_python_load_generator_needs_no_other_program(name: str) -> None:
    output = run("identity", "--only", name, "--generator", "python", "--seconds", "0.1")
    result = results("identity")
    assert result["generators"] == {"http": "python_generator", "grpc": "python_generator"}
    assert "our own in Python" in output
    assert all(r["responses"] > 0 and r["errors"] == 0 for r in result["rows"])


def changed_response(workload: Workload) -> Response:
    """Return a valid response with wrong numbers."""
    if workload.wire == "grpc":
        message = ModelInferResponse(outputs=[{"name": "OUTPUT0", "datatype": "FP32", "shape": [1, 16]}])
        message.raw_output_contents.append(np.zeros(16, np.float32).tobytes())
        return Response({}, message.SerializeToString())
    tensor = {"name": "OUTPUT0", "datatype": "FP32", "shape": [1, 16], "data": [0.0] * 16}
    return Response({}, json.dumps({"outputs": [tensor]}).encode())


@pytest.mark.parametrize("name", ["rest-json-small", "grpc-raw-small", "grpc-typed-small"])
def test_a_response_with_wrong_numbers_is_rejected(name: str) -> None:
    assert not WORKLOADS[name].is_correct(changed_response(WORKLOADS[name]))


def test_unchecked_responses_of_another_size_are_counted() -> None:
    assert load.unexpected_responses(received_bytes=1000, responses=10, response_bytes=100, connections=1) == 0
    assert (
        load.unexpected_responses(received_bytes=1099, responses=10, response_bytes=100, connections=1) == 0
    )  # one more was in flight
    assert load.unexpected_responses(received_bytes=400, responses=10, response_bytes=100, connections=1) == 6
    assert load.unexpected_responses(received_bytes=1201, responses=10, response_bytes=100, connections=1) > 0


class FailingBeside(BaseHTTPRequestHandler):
    """Answers requests for /0, and fails all others."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/0" else 500)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.skipif(shutil.which("cc") is None, reason="the load generator is in C")
def test_errors_beside_the_load_are_not_subtracted_from_its_arrivals(tmp_path: Path) -> None:
    for kind in range(2):
        (tmp_path / f"request{kind}").write_text(f"GET /{kind} HTTP/1.1\r\nhost: localhost\r\n\r\n")
        (tmp_path / f"response{kind}").write_text("ok")
    with ThreadingHTTPServer(("127.0.0.1", 0), FailingBeside) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [load.build_generator("open_load"), server.server_port, 2, 0.2, tmp_path, 200, 10, 1, -1]
        found = json.loads(subprocess.check_output([*map(str, command)], timeout=60))
        server.shutdown()
    assert found["errors"] > 0
    assert found["responses"] == found["arrivals"] > 0
    assert found["lost"] == 0


def test_shares_compare_with_the_echo_server_of_the_same_round() -> None:
    figures = {"p50_ms": 1.0, "p99_ms": 2.0, "cpu_us": 10.0, "responses": 1, "errors": 0}
    rates = {("dragoman", 0): 50.0, ("echo", 0): 100.0, ("dragoman", 1): 10.0, ("echo", 1): 40.0}
    rows = [
        {"workload": "rest-json-small", "connections": 16, "server": server, "round": turn, "rate": rate, **figures}
        for (server, turn), rate in rates.items()
    ]
    ours = rows_of("\n".join(tables.own_table(rows)))[2]
    assert ours[7] == "38 % (25 % - 50 %)"
    others = rows_of("\n".join(tables.peer_table(rows)))
    assert dict(zip(others[0], others[2], strict=True))["triton, C++ backend"] == "39 %"


@by_command
@pytest.mark.skipif(shutil.which("cc") is None, reason="the load generator is in C")
@pytest.mark.parametrize(
    ("name", "flags", "servers"),
    [
        ("http", ("--only", "binary-small", "--subjects", "echo,bare,own"), ("echo", "bare", "own")),
        ("idle", (), ("own",)),
        ("streams", ("--connections", "2"), ("own",)),
    ],
)
def test_http_benchmarks_report_each_server(name: str, flags: tuple[str, ...], servers: tuple[str, ...]) -> None:
    lines = [line.split() for line in run(name, *flags).splitlines()]
    for server in servers:
        (row,) = (line for line in lines if line[:1] == [server])
        assert all(float(cell.rstrip("x").replace(",", "")) > 0 for cell in row[1:4])


@by_command
def test_generation_measures_every_side_and_number_of_clients() -> None:
    pytest.importorskip("transformers")
    output = run("generation", "--peers", "static batch")
    found = results("generation-quick")["tiny-float32"]
    rows, sides = found["rows"], ("dragoman", "dragoman serve", "static batch")
    assert {(row["side"], row["clients"]) for row in rows} == {(side, clients) for side in sides for clients in (1, 4)}
    assert [row["side"] for row in found["starts"]] == list(sides)
    assert all(row["tokens_per_s"] > 0 and row["first_ms"] > 0 and row["agreement"] > 0.99 for row in rows)
    assert all(row["ready_s"] > 0 and row["ready_pss_mib"] > 0 for row in found["starts"])
    assert len(rows_of(output)) == 4 + len(rows) + len(sides)


def test_engines_that_are_not_installed_are_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generation, "installed_engines", lambda: ["openvino-genai"])
    monkeypatch.setattr(generation, "llama_server_program", lambda: None)
    plan = generation.plan_runs(generation.argument_parser().parse_args([]))
    assert plan.peers == (*generation.OPENVINO, *generation.TRANSFORMERS)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "llama.cpp is not installed, and left out: put `llama-server` into PATH",
        "vllm is not installed, and left out: python -m benchmarks.peers install vllm",
    ]
    with pytest.raises(SystemExit, match=r"--peers: expected some of .*, got 'tgi'"):
        generation.plan_runs(generation.argument_parser().parse_args(["--peers", "vllm,tgi"]))


def test_texts_that_differ_by_more_than_rounding_are_an_error(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = generation.make_model(tmp_path, "tiny")
    row = {"side": "dragoman", "dtype": "float32", "clients": 2, "round": 0, "tokens": [[9, 9, 9]] * 2}
    with pytest.raises(ValueError, match=r"expected an agreement of at least 0\.99"):
        generation.check_texts(model, generation.prompt_maker(model), [row])


def test_the_page_on_text_engines_agrees_with_the_results() -> None:
    text = generation.PAGE.read_text()
    assert generation.fill_page(text, json.loads(generation.RESULT.read_text())) == text


def test_an_engine_that_does_not_start_names_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "side_command", lambda *_: [sys.executable, "-c", "pass"])
    failed = pytest.raises(RuntimeError, match=r"'vllm' does not start; see .*generation\.log")
    with failed, generation.running_engine("vllm", ROOT, "float32"):
        pass


def test_cpu_time_and_memory_include_child_processes() -> None:
    child_code = "b = b'x' * (64 << 20)\nwhile time.process_time() < 0.2: pass\nprint(1, flush=True)\ninput()"
    parent = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    command = [sys.executable, "-c", parent, "import time; " + child_code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        process_tree = processes.process_tree(child.pid)
        assert len(process_tree) == 2
        assert processes.cpu_s(process_tree[1]) >= 0.2
        assert processes.peak_mib(process_tree[1]) > 64
        child.communicate(b"\n")
    assert processes.process_tree(child.pid) == [child.pid]
    assert processes.cpu_s(child.pid) == processes.peak_mib(child.pid) == 0


def test_big_tensors_need_less_than_three_times_their_size() -> None:
    run("big_tensors", "--mib", "80", "--wires", "rest,grpc", "--placements", "process")
    rows = results("big_tensors")["rows"]
    assert [(r["wire"], r["placement"]) for r in rows] == [("rest", "process"), ("grpc", "process")]
    assert all(r["idle_mib"] < r["peak_mib"] - 80 for r in rows)
    assert all(r["peak_mib"] - r["idle_mib"] < 3 * 80 for r in rows)


@by_command
def test_the_soak_checks_every_response_and_the_remaining_load() -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "--minutes", "0.05", "--idle", "20"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stdout + process.stderr
    result = results("soak")
    assert result["errors"] == []
    assert all(result["responses"][kind] for kind in ("json_small", "binary", "unary", "stream", "text", "control"))
    assert result["after"]["active"] == 0


@pytest.mark.parametrize(
    ("headers", "received", "body"),
    [
        ({"content-length": "5"}, b"hello and more", b"hello"),
        ({"transfer-encoding": "chunked"}, b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\nmore", b"hello"),
    ],
)
def test_read_body_returns_the_decoded_and_the_raw_body(headers: dict[str, str], received: bytes, body: bytes) -> None:
    parsed, raw = checked_request.read_body(io.BytesIO(received), headers)
    assert parsed == body
    assert received.startswith(raw)
    assert received[len(raw) :].lstrip().endswith(b"more")


@by_command
def test_the_memory_of_mapped_weights_is_measured() -> None:
    rows = rows_of(run("shared_weights", "--only", "NumPy array, mapped"))
    assert [row[0] for row in rows[2:]] == ["NumPy array, mapped"]
    assert [cell.partition(" ")[2] for cell in rows[2][1:]] == ["(1)", "(3)", "(5)"]


def test_the_page_on_clusters_agrees_with_the_results() -> None:
    result = json.loads(cluster.RESULT.read_text())
    text = cluster.PAGE.read_text()
    assert cluster.page_with(text, result) == text
    assert cluster_hosts.chart_of(result["hosts"]) == cluster.PICTURE.read_text()


def test_the_page_on_processes_agrees_with_the_results() -> None:
    result = json.loads(server_processes.RESULT.read_text())
    text = server_processes.PAGE.read_text()
    assert server_processes.page_with(text, result) == text


def test_copies_answer_the_share_of_each_core() -> None:
    def row(subject: str, engine_us: float, others_us: float) -> server_processes.Row:
        return server_processes.Row("rest-json-small", subject, 1, 1.0, 1.0, engine_us, others_us, 0)

    rows = [row(server_processes.ONE, 40.0, 0.0), row(server_processes.COPIES, 0.5, 49.5)]
    assert server_processes.model(rows, 1) == (25_000, 20_000)
    assert server_processes.model(rows, 16) == (400_000, 320_000)


@pytest.mark.parametrize("hosts", [1, 8])
def test_simulated_hosts_reach_the_throughput_of_their_bottleneck(hosts: int) -> None:
    workers = hosts * cluster_hosts.WORKERS_PER_HOST
    server = cluster_hosts.simulate(cluster_hosts.Load("m", 0.001, 1_000, 100e-6), hosts)
    assert server.limit == "server"
    assert 9_900 < server.rate < 10_100
    network = cluster_hosts.simulate(cluster_hosts.Load("m", 0.001, 1_250_000, 100e-6), hosts)
    assert network.limit.startswith("link")
    assert 990 < network.rate < 1_010
    free = cluster_hosts.simulate(cluster_hosts.Load("m", 0.1, 1_000, 0.0), hosts)
    assert free.limit == "workers"
    assert 0.95 * workers / 0.1 < free.rate < 1.05 * workers / 0.1


@by_command
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_joined_workers_are_compared_with_local_ones() -> None:
    output = run("cluster", "--only", "calls,http")
    rows = results("cluster-quick")["calls"]
    assert {cluster.LOCAL, cluster.JOINED, cluster.SERVER} <= {row["subject"] for row in rows}
    assert all(row["rate"] > 0 for row in rows)
    assert all(row["server_us"] > 0 for row in rows if row["subject"] == cluster.SERVER)
    assert f"| {cluster.JOINED} | {cluster.LOCAL} | 600 KB | 8 |" in output
