"""`dragoman check` against the reference server of UM-Bridge, and the page of results."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.conformance import PAGE, UMBRIDGE_SERVER
from benchmarks.processes import run_process

from dragoman_check.conformance.clauses import ClauseFailed, Outcome
from dragoman_check.conformance.http import HttpTarget
from dragoman_check.conformance.runner import PROTOCOLS, run_clauses
from dragoman_check.conformance.target import Target
from e2e.server_process import free_ports, wait_until


@pytest.fixture
def reference(tmp_path: Path) -> Iterator[Target]:
    (port,) = free_ports(1)
    target = Target(HttpTarget(f"http://127.0.0.1:{port}"))

    def answers() -> bool:
        try:
            return target.http.get("/Info").status == 200
        except ClauseFailed:
            return False

    with run_process([sys.executable, "-c", UMBRIDGE_SERVER, str(port)], tmp_path / "log"):
        wait_until(answers, "the start of the server")
        yield target


def test_the_reference_server_of_umbridge(reference: Target) -> None:
    """It conforms, but for vectors of ApplyHessian, whose lengths it does not check."""
    results = list(run_clauses(reference, PROTOCOLS))
    umbridge = [result for result in results if result.protocol.name == "umbridge"]
    failed = {result.clause.id: result.reason for result in umbridge if result.outcome is Outcome.FAIL}
    assert set(failed) == {"umbridge-input-type", "umbridge-applyhessian-sens", "umbridge-applyhessian-vec"}
    assert failed["umbridge-applyhessian-sens"].startswith("expected status 400, got ")
    assert sum(result.outcome is Outcome.PASS for result in umbridge) == 24
    others = {result.protocol.name: result.outcome for result in results if result.protocol.name != "umbridge"}
    assert others.pop("open-inference-grpc") is Outcome.NOT_TRIED
    assert others.pop("kserve-v1") is Outcome.NOT_TRIED
    assert others.pop("open-inference-generate") is Outcome.NOT_TRIED
    assert set(others.values()) == {Outcome.NOT_OFFERED}


def test_the_page_of_results_has_every_clause() -> None:
    text = PAGE.read_text()
    missing = [clause.id for protocol in PROTOCOLS for clause in protocol.clauses if f"| `{clause.id}` |" not in text]
    assert missing == [], "run python -m benchmarks.conformance --write"
    outdated = [c.requirement for p in PROTOCOLS for c in p.clauses if c.requirement.replace("|", "\\|") not in text]
    assert outdated == []
