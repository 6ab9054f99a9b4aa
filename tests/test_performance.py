"""The performance suite: it runs, ratios compare within a round, and the page agrees with the results."""

import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import page, plots, subjects, turns, workloads  # noqa: E402
from benchmarks.aims import AIMS, Maximum, MinRatio  # noqa: E402
from benchmarks.peers import PEERS  # noqa: E402
from benchmarks.processes import RESULTS  # noqa: E402
from benchmarks.suite import SUITE  # noqa: E402


@pytest.mark.skipif("DRAGOMAN_TEST_BENCHMARKS" not in os.environ, reason="slow; run by ./scripts/test-benchmarks")
@pytest.mark.skipif(shutil.which("cc") is None and shutil.which("wrk") is None, reason="no load generator")
def test_the_suite_runs_and_its_page_shows_the_results(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "w1", "w4", "w7", "--quick", "--peers", "", "--seconds", "0.2"]
    process = subprocess.run([*command, "--into", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    results = page.load_results(tmp_path)
    assert set(results) == {"w1", "w4", "w7"}
    assert {row["server"] for row in results["w4"]["rows"]} == {"dragoman", "echo grpc.aio"}
    assert all(row["rate"] > 0 for name in ("w1", "w4") for row in results[name]["rows"])
    assert all(row["ready_s"] > 0 and row["pss_mib"] > 0 for row in results["w7"]["rows"])
    target = tmp_path / "performance.md"
    target.write_text("before\n<!-- from results: w1 -->\nold\n<!-- end -->\nafter\n")
    page.main(["--results", str(tmp_path), "--page", str(target)])
    text = target.read_text()
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert page.table(results["w1"]) in process.stdout
    assert page.table(results["w1"]) in text
    for picture in (tmp_path / "performance").iterdir():
        assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")
    assert {p.stem for p in (tmp_path / "performance").iterdir()} == set(results)


def test_the_documentation_page_agrees_with_the_results() -> None:
    results = page.load_results(RESULTS)
    for path in (page.PAGE, page.SUMMARY):
        text = path.read_text()
        assert page.fill(text, results) == text
    pictures = {path.stem: path.read_text() for path in page.PAGE.with_suffix("").glob("*.svg")}
    assert pictures == page.pictures(results)


def test_the_pages_show_how_to_install_every_server_of_a_table() -> None:
    named = {
        row["server"].partition(",")[0] for result in page.load_results(RESULTS).values() for row in result["rows"]
    }
    for text in (page.PAGE.read_text(), (ROOT / "benchmarks" / "README.md").read_text()):
        installed = re.findall(r"-m benchmarks\.peers install ([\w -]+?) *#", text)
        assert named & set(PEERS) <= set(" ".join(installed).split())


def test_ratios_compare_within_a_round() -> None:
    rates = {("dragoman", 0): 50.0, ("echo", 0): 100.0, ("dragoman", 1): 10.0, ("echo", 1): 40.0, ("mlserver", 1): 5.0}
    rows: list[dict[str, Any]] = [
        {"workload": "w", "connections": 16, "server": server, "round": turn, "rate": rate}
        | {"p50_ms": 1.0, "p99_ms": 2.0, "cpu_us": 1e6 / rate}
        for (server, turn), rate in rates.items()
    ]
    our_server = next(row for row in turns.summary(rows) if row["server"] == "dragoman")
    assert our_server["ratios"] == our_server["cpu_ratios"] == {"echo": 0.375, "mlserver": 2.0}
    assert our_server["rate"] == 30


def test_aims_are_about_workloads_of_the_suite() -> None:
    checked = {w.name for w in workloads.identity()} | {
        row["workload"] for result in page.load_results(RESULTS).values() for row in result["rows"]
    }
    for aim in AIMS:
        assert aim.bench in SUITE
        assert aim.workload in checked


@pytest.mark.parametrize(
    ("busy", "rate", "cpu", "verdict"),
    [
        (0.0, 0.7, 0.4, "yes"),
        (0.0, 0.4, 0.7, "no"),
        (1.5, 0.4, 0.7, "yes, other load"),
        (1.5, 0.7, 0.4, "no, other load"),
    ],
)
def test_cpu_time_decides_if_other_processes_were_busy(busy: float, rate: float, cpu: float, verdict: str) -> None:
    row = {"workload": "rest-json-small", "connections": 16, "server": "dragoman"}
    row |= {"ratios": {"echo": rate}, "cpu_ratios": {"echo": cpu}}
    table = page.targets({"w1": {"rows": [row], "others_busy_cores": busy}})
    cells = [cell.strip() for cell in table.splitlines()[2].split("|")[1:-1]]
    assert cells == [
        "W1",
        "rest-json-small, 16 connections",
        "at least 0.65 times echo",
        f"{rate:.2f}",
        f"{cpu:.2f}",
        verdict,
    ]
    assert table.count("not measured") == len(AIMS) - 1


def test_a_maximum_is_met_by_smaller_values() -> None:
    aim = Maximum("w7", "startup", "ready_s", "s", 1.0)
    assert aim.is_met(0.9)
    assert not aim.is_met(1.1)
    assert MinRatio("w1", "w", "echo", 0.5).is_met(0.5)


@pytest.mark.parametrize("name", ["rest-json-small", "rest-binary-small", "grpc-raw-small"])
def test_with_id_adds_only_an_id_to_the_request(name: str) -> None:
    (workload,) = (w for w in workloads.identity() if w.name == name)
    with_id = subjects.with_id(workload)
    assert len(workload.body) < len(with_id.body) < len(workload.body) + 12
    if name == "rest-binary-small":
        size = int(with_id.headers["inference-header-content-length"])
        assert json.loads(with_id.body[:size])["id"] == "1"
        assert with_id.body[size:] == workload.body[-64:]


def test_plain_servers_get_only_json_requests() -> None:
    requests = {w.name: subjects.plain_json(w) for w in workloads.identity()}
    assert {name for name, request in requests.items() if request} == {"rest-json-small", "rest-json-large"}
    request = requests["rest-json-small"]
    assert request is not None
    numbers = json.loads(request.body)["input"]
    assert request.is_correct(workloads.Response({}, json.dumps({"output": numbers}).encode()))
    assert not request.is_correct(workloads.Response({}, json.dumps({"output": [[0.0] * 16]}).encode()))


def test_bars_are_proportional_to_their_values() -> None:
    bars = [plots.Bar("<one>", 4.0, "4", "own"), plots.Bar("two", 1.0, "1", "peer")]
    svg = plots.chart("a & b", "", [plots.Group("g", bars)])
    ElementTree.fromstring(svg)
    long, short = (float(w) for w in re.findall(r'width="([\d.]+)" height="18"', svg))
    assert long == pytest.approx(4 * short, rel=0.01)
