"""Models on disk that come, change and go while the server runs."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.served import Served, serving, until

TOKEN = {"authorization": "Bearer t"}

MODEL = """
import dragoman

class M(dragoman.Model):
    inputs = (dragoman.TensorSpec("x", dragoman.FP64, (-1,)),)
    outputs = (dragoman.TensorSpec("y", dragoman.FP64, (-1,)),)

    def infer(self, call):
        return {"y": FACTOR * call.inputs["x"].data}

FACTOR = %s
"""

SLOWLY = """
        import pathlib, time
        pathlib.Path(__file__).with_name("begun").touch()
        time.sleep(1)
        return"""


def write(folder: Path, factor: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(MODEL % factor)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "a", 2)
    write(tmp_path / "b", 3)
    return tmp_path


@pytest.fixture(params=["process", "thread"])
def served(folder: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(str(folder), "--control-token", "t", "--placement", request.param) as served:
        yield served


def control(served: Served, model: str, verb: str) -> tuple[int, Any]:
    status, body, _ = served.ask("POST", f"/v2/repository/models/{model}/{verb}", headers=TOKEN)
    return status, body


def states(served: Served) -> dict[str, str]:
    return {e["name"]: e["state"] for e in served.ask("POST", "/v2/repository/index", headers=TOKEN)[1]}


def factor(served: Served, model: str = "a") -> float:
    status, body = served.infer(model, [1.0])
    assert status == 200, body
    found: float = body["outputs"][0]["data"][0]
    return found


def test_a_model_is_replaced_while_requests_run(served: Served, folder: Path) -> None:
    found: list[tuple[int, Any]] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set() or len(found) < 200:
            status, body = served.infer("a", [1.0])
            found.append((status, body["outputs"][0]["data"][0] if status == 200 else body))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: len(found) > 50, "the first requests")
    write(folder / "a", 5)
    assert control(served, "a", "load") == (200, b"")
    asked = len(found)
    until(lambda: len(found) > asked + 50, "further requests")
    done.set()
    for thread in threads:
        thread.join()
    assert len(found) >= 200
    assert [f for f in found if f[0] != 200] == []
    answers = [answer for _, answer in found]
    assert set(answers) == {2.0, 5.0}
    assert answers[asked:].count(2.0) <= len(threads), "after the load was answered, old answers may be under way only"
    assert factor(served, "b") == 3


def test_a_broken_file_keeps_the_old_model_serving(served: Served, folder: Path) -> None:
    for broken in ("def (", "raise ValueError('no')", "", MODEL % "1 / 0"):
        (folder / "a" / "model.py").write_text(broken)
        status, body = control(served, "a", "load")
        assert status == 400
        assert body["error"].startswith("failed to load 'a', ")
        assert served.log().count(body["error"]) == 1
        assert factor(served) == 2
        assert served.status("/v2/health/ready") == 200
        assert states(served) == {"a": "READY", "b": "READY"}
    write(folder / "a", 7)
    assert control(served, "a", "load")[0] == 200
    assert factor(served) == 7


def test_unloading(served: Served) -> None:
    assert control(served, "a", "unload") == (200, b"")
    assert served.infer("a", [1.0]) == (404, {"error": "Request for unknown model: 'a' is not found"})
    assert served.status("/v2/models/a/ready") == 404
    assert served.status("/v2/models/a") == 404
    assert states(served) == {"a": "UNAVAILABLE", "b": "READY"}
    assert control(served, "a", "unload")[0] == 404
    assert served.status("/v2/health/ready") == 200
    assert factor(served, "b") == 3
    until(lambda: len(served.workers()) <= 1, "the end of the model's worker")
    assert control(served, "a", "load")[0] == 200
    assert factor(served) == 2


def test_models_that_come_and_go_on_disk(served: Served, folder: Path) -> None:
    write(folder / "c", 11)
    assert served.infer("c", [1.0])[0] == 404
    assert control(served, "c", "load") == (200, b"")
    assert factor(served, "c") == 11
    (folder / "b" / "model.py").unlink()
    status, body = control(served, "b", "load")
    assert status == 400
    assert "failed to load 'b'" in body["error"]
    assert factor(served, "b") == 3


@pytest.mark.parametrize("name", ["..%2Fa", "%2e%2e", "a%00", "nobody"])
def test_names_that_are_no_models(folder: Path, name: str) -> None:
    with serving(str(folder), "--control-token", "t", "--placement", "thread") as served:
        for verb in ("load", "unload"):
            assert control(served, name, verb)[0] in (400, 404)


def test_calls_in_flight_outlive_the_unloading(tmp_path: Path) -> None:
    slow = MODEL.replace("        return", SLOWLY)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "model.py").write_text(slow % 2)
    write(tmp_path / "b", 3)
    with serving(str(tmp_path), "--control-token", "t") as served:
        answers: list[tuple[int, Any]] = []
        asking = threading.Thread(target=lambda: answers.append(served.infer("a", [1.0])))
        asking.start()
        until((tmp_path / "a" / "begun").exists, "the request")
        assert control(served, "a", "unload")[0] == 200
        assert served.status("/v2/models/a/ready") == 404
        asking.join()
        assert answers[0][0] == 200


def test_control_is_off_by_default(folder: Path) -> None:
    with serving(str(folder), "--placement", "thread") as served:
        for path in ("index", "models/a/load", "models/a/unload"):
            status, body, _ = served.ask("POST", f"/v2/repository/{path}", headers=TOKEN)
            assert (status, body["error"]) == (
                403,
                "model control is off; an operator enables it with --control-token",
            )


def test_control_with_a_wrong_token(folder: Path) -> None:
    with serving(str(folder), "--placement", "thread", "--control-token", "t") as served:
        for headers in ({}, {"authorization": "Bearer guess"}, {"authorization": "Basic t"}):
            for path in ("index", "models/a/load", "models/a/unload"):
                status, body, found = served.ask("POST", f"/v2/repository/{path}", headers=headers)
                assert status == 401
                assert body["error"].startswith("This API is restricted, expecting header")
                assert found["www-authenticate"] == "Bearer"


# --- versions --------------------------------------------------------------------------------------------


@pytest.fixture
def versions(tmp_path: Path) -> Path:
    for version in (1, 2, 10):
        write(tmp_path / "m" / str(version), version)
    return tmp_path / "m"


@pytest.mark.parametrize(
    ("policy", "served_versions"), [("latest", ["10"]), ("all", ["1", "2", "10"]), ("2,1", ["1", "2"])]
)
def test_version_policies(versions: Path, policy: str, served_versions: list[str]) -> None:
    with serving(str(versions), "--version-policy", policy, "--placement", "thread") as served:
        assert served.ask("GET", "/v2/models/m")[1]["versions"] == served_versions
        assert factor(served, "m") == float(served_versions[-1])
        for version in ("1", "2", "10", "3"):
            status, body = served.infer(f"m/versions/{version}", [1.0])
            if version in served_versions:
                assert (status, body["model_version"], body["outputs"][0]["data"]) == (200, version, [float(version)])
            else:
                assert status == 404
                assert f"version '{version}' is not found" in body["error"]


def test_the_default_version(versions: Path) -> None:
    (versions / "dragoman.toml").write_text('[model]\ndefault_version = "2"\nversion_policy = "all"\n')
    with serving(str(versions), "--placement", "thread", "--control-token", "t") as served:
        assert factor(served, "m") == 2
        write(versions / "11", 11)
        assert control(served, "m", "load")[0] == 200
        assert factor(served, "m") == 2
        assert factor(served, "m/versions/11") == 11


def test_a_newer_version_takes_over_by_load(versions: Path) -> None:
    with serving(str(versions), "--control-token", "t", "--placement", "thread") as served:
        write(versions / "11", 11)
        assert factor(served, "m") == 10
        assert control(served, "m", "load")[0] == 200
        assert factor(served, "m") == 11
        assert served.infer("m/versions/10", [1.0])[0] == 404


def test_versions_are_loaded_and_unloaded_one_by_one(versions: Path) -> None:
    with serving(str(versions), "--version-policy", "all", "--control-token", "t", "--placement", "thread") as served:
        path = "/v2/repository/models/m"

        def told() -> dict[str, str]:
            entries = served.ask("POST", "/v2/repository/index", headers=TOKEN)[1]
            return {entry["version"]: entry["state"] for entry in entries}

        for version in ("1", "10"):
            assert served.ask("POST", f"{path}/unload", {"parameters": {"version": version}}, TOKEN)[0] == 200
        assert told() == {"1": "UNAVAILABLE", "2": "READY", "10": "UNAVAILABLE"}
        for version in ("1", "2"):
            write(versions / version, 5)
        assert served.ask("POST", f"{path}/load", {"parameters": {"version": "1"}}, TOKEN)[0] == 200
        assert told() == {"1": "READY", "2": "READY", "10": "UNAVAILABLE"}
        assert served.ask("POST", f"{path}/load", {"parameters": {"version": 1}}, TOKEN)[0] == 200
        assert (factor(served, "m/versions/1"), factor(served, "m")) == (5, 2)
        status, body, _ = served.ask("POST", f"{path}/load", {"parameters": {"version": "7"}}, TOKEN)
        assert (status, body["error"]) == (
            400,
            "failed to load 'm', version '7' is not among those to be served: 1, 2, 10",
        )
        status, body, _ = served.ask("POST", f"{path}/load", {"parameters": {"version": True}}, TOKEN)
        assert (status, body["error"]) == (400, "parameter 'version': expected text, got True")
        assert served.ask("POST", f"{path}/load", {"parameters": {"version": None}}, TOKEN)[0] == 200
        assert told() == {"1": "READY", "2": "READY", "10": "READY"}


def test_a_listed_version_that_is_not_there(versions: Path) -> None:
    served = Served(str(versions), "--version-policy", "1,7")
    try:
        assert served.ended() == 2
        assert "expected versions of 1, 2, 10, got 7" in served.log()
    finally:
        served.reap()
