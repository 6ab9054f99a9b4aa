"""The attack suite, run with one small attack; response times are not asserted."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.attack import __main__ as command  # noqa: E402
from benchmarks.attack import catalogue, measure  # noqa: E402
from benchmarks.attack.attack import SLACK_MIB, AimMissedError, Attack, Target  # noqa: E402
from benchmarks.attack.http import post  # noqa: E402

FAST_PROBES = {"probes": 9, "longest_ms": 1.0, "errors": 0, "error": ""}
WAITS = {"health_http": FAST_PROBES, "health_grpc": FAST_PROBES, "infer": FAST_PROBES}


def broken_json(target: Target) -> str:
    return post(target, "/v2/models/doubled/infer", b'{"inputs": [', compressed=True)


def miss_aim(target: Target) -> str:
    raise AimMissedError("the server accepted the request")


def attack(**fields: object) -> Attack:
    return Attack(**{"name": "a", "about": "something", "run": broken_json, **fields})  # type: ignore[arg-type]


def test_an_attack_is_measured_while_a_client_sends_requests(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "select_attacks", lambda names: [attack(body_bytes=12, health_ms=60_000)])
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    assert command.main([]) == 0
    (result,) = json.loads((tmp_path / "attack.json").read_text())
    assert '400 `{"error":"the request is not an inference request' in result["note"]
    assert min(result["health_http_ms"], result["health_grpc_ms"], result["infer_ms"]) > 0
    assert min(result["memory_before"], result["memory_after"]) > 20
    assert result["memory_peak"] >= result["memory_after"] - 5
    assert "1 of 1 attacks within the aims" in capsys.readouterr().out


def test_an_attack_can_miss_its_own_aim() -> None:
    result = measure.measure(attack(run=miss_aim, health_ms=60_000), idle_s=0.05)
    assert result.missed == ["the server accepted the request"]
    assert "MISSED: the server accepted the request" in command.row(result)


@pytest.mark.parametrize(
    ("measured", "waits", "expected"),
    [
        ({}, {"health_http": FAST_PROBES | {"longest_ms": 251.0}}, []),
        ({"health_http_ms": 251.0}, {}, ["health over HTTP took 251 ms"]),
        ({"health_grpc_ms": 260.0}, {}, ["health over gRPC took 260 ms"]),
        ({"health_http_ms": 250.0, "infer_ms": 9000.0}, {}, []),
        ({}, {"infer": FAST_PROBES | {"errors": 2, "error": "status 503"}}, ["2 errors of infer: status 503"]),
        ({}, {"health_grpc": FAST_PROBES | {"errors": 1, "error": "reset"}}, ["1 errors of health_grpc: reset"]),
        ({"memory_peak": 100.0 + SLACK_MIB + 4}, {}, []),
        ({"memory_peak": 101.0 + SLACK_MIB + 4}, {}, ["memory grew by 69 MiB, limit 68"]),
    ],
)
def test_aims_that_are_missed_are_listed(
    measured: dict[str, float], waits: dict[str, dict[str, Any]], expected: list[str]
) -> None:
    tested = attack(body_bytes=1 << 20)
    values = {"memory_before": 100.0, "memory_peak": 100.0, "memory_limit": tested.memory_limit_mib} | measured
    result = measure.Result(name="a", about="", **values)  # type: ignore[arg-type]
    assert measure.find_missed_aims(tested, result, WAITS | waits) == expected


def test_legal_tensors_larger_than_four_bodies_raise_the_memory_limit() -> None:
    mib = 1 << 20
    assert attack(body_bytes=mib, tensor_bytes=3 * mib).memory_limit_mib == SLACK_MIB + 4
    assert attack(body_bytes=mib, tensor_bytes=12 * mib).memory_limit_mib == SLACK_MIB + 12
    assert attack(tensor_bytes=12 * mib).memory_limit_mib is None


def test_errors_of_inference_can_be_allowed() -> None:
    waits = WAITS | {"infer": FAST_PROBES | {"errors": 2, "error": "status 503"}}
    assert measure.find_missed_aims(attack(infer_may_fail=True), measure.Result(name="a", about=""), waits) == []


def test_a_missed_aim_sets_the_exit_status(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(command, "select_attacks", lambda names: [attack()])
    monkeypatch.setattr(command, "measure", lambda one: measure.Result(name="a", about="", missed=["late"]))
    assert command.main([]) == 1
    assert command.main(["--report-only"]) == 0


def test_attacks_are_selected_by_name_or_prefix() -> None:
    known = catalogue.all_attacks()
    assert known
    assert list(catalogue.select_attacks([])) == list(known.values())
    first = next(iter(known))
    assert known[first] in catalogue.select_attacks([first])
    assert known[first] in catalogue.select_attacks([first[:3]])
    with pytest.raises(ValueError, match="unknown attack 'nothing-like-it'"):
        catalogue.select_attacks(["nothing-like-it"])


def test_the_models_of_every_attack_exist() -> None:
    from benchmarks.attack.server import MODELS

    for item in catalogue.all_attacks().values():
        assert "doubled" in item.models
        assert set(item.models) <= set(MODELS)
        assert "\n" not in item.about
