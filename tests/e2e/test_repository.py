"""Models on disk that are added, changed and removed while the server runs."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.server_process import ServerProcess, running_server, wait_until

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
def process(folder: Path, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    with running_server(str(folder), "--control-token", "t", "--placement", request.param) as process:
        yield process


def control(process: ServerProcess, model: str, verb: str) -> tuple[int, Any]:
    status, body, _ = process.request("POST", f"/v2/repository/models/{model}/{verb}", headers=TOKEN)
    return status, body


def states(process: ServerProcess) -> dict[str, str]:
    return {e["name"]: e["state"] for e in process.request("POST", "/v2/repository/index", headers=TOKEN)[1]}


def factor(process: ServerProcess, model: str = "a") -> float:
    status, body = process.infer(model, [1.0])
    assert status == 200, body
    found: float = body["outputs"][0]["data"][0]
    return found


def test_a_model_is_replaced_while_requests_run(process: ServerProcess, folder: Path) -> None:
    found: list[tuple[int, Any]] = []
    done = threading.Event()

    def send_request() -> None:
        while not done.is_set() or len(found) < 200:
            status, body = process.infer("a", [1.0])
            found.append((status, body["outputs"][0]["data"][0] if status == 200 else body))

    threads = [threading.Thread(target=send_request) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(found) > 50, "the first requests")
    write(folder / "a", 5)
    assert control(process, "a", "load") == (200, b"")
    requests_before = len(found)
    wait_until(lambda: len(found) > requests_before + 50, "further requests")
    done.set()
    for thread in threads:
        thread.join()
    assert len(found) >= 200
    assert [f for f in found if f[0] != 200] == []
    responses = [response for _, response in found]
    assert set(responses) == {2.0, 5.0}
    assert responses[requests_before:].count(2.0) <= len(threads), (
        "after the response to the load, only requests in flight may get old values"
    )
    assert factor(process, "b") == 3


def test_a_broken_file_keeps_the_old_model_serving(process: ServerProcess, folder: Path) -> None:
    for broken in ("def (", "raise ValueError('no')", "", MODEL % "1 / 0"):
        (folder / "a" / "model.py").write_text(broken)
        status, body = control(process, "a", "load")
        assert status == 400
        assert body["error"].startswith("failed to load 'a', ")
        lines = [line for line in process.log().splitlines() if body["error"] in line and "dragoman.audit" not in line]
        assert len(lines) == 1
        assert factor(process) == 2
        assert process.status("/v2/health/ready") == 200
        assert states(process) == {"a": "READY", "b": "READY"}
    write(folder / "a", 7)
    assert control(process, "a", "load")[0] == 200
    assert factor(process) == 7


def test_unloading(process: ServerProcess) -> None:
    assert control(process, "a", "unload") == (200, b"")
    assert process.infer("a", [1.0]) == (404, {"error": "Request for unknown model: 'a' is not found"})
    assert process.status("/v2/models/a/ready") == 404
    assert process.status("/v2/models/a") == 404
    assert states(process) == {"a": "UNAVAILABLE", "b": "READY"}
    assert control(process, "a", "unload") == (200, b"")  # as for every model that is not loaded
    assert process.status("/v2/health/ready") == 200
    assert factor(process, "b") == 3
    wait_until(lambda: len(process.workers()) <= 1, "the end of the model's worker")
    assert control(process, "a", "load")[0] == 200
    assert factor(process) == 2


def test_models_added_and_removed_on_disk(process: ServerProcess, folder: Path) -> None:
    write(folder / "c", 11)
    assert process.infer("c", [1.0])[0] == 404
    assert control(process, "c", "load") == (200, b"")
    assert factor(process, "c") == 11
    (folder / "b" / "model.py").unlink()
    status, body = control(process, "b", "load")
    assert status == 404
    assert "failed to load 'b'" in body["error"]
    assert factor(process, "b") == 3


@pytest.mark.parametrize("name", ["..%2Fa", "%2e%2e", "a%00", "missing"])
def test_invalid_model_names(folder: Path, name: str) -> None:
    with running_server(str(folder), "--control-token", "t", "--placement", "thread") as process:
        assert control(process, name, "load")[0] in (400, 404)
        # As Triton, the server reports success for a model that it does not have.
        assert control(process, name, "unload")[0] in ((200,) if name == "missing" else (400, 404))


def test_calls_in_flight_complete_after_unloading(tmp_path: Path) -> None:
    slow = MODEL.replace("        return", SLOWLY)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "model.py").write_text(slow % 2)
    write(tmp_path / "b", 3)
    with running_server(str(tmp_path), "--control-token", "t", "--trial-s", "0") as process:
        responses: list[tuple[int, Any]] = []
        asking = threading.Thread(target=lambda: responses.append(process.infer("a", [1.0])))
        asking.start()
        wait_until((tmp_path / "a" / "begun").exists, "the request")
        assert control(process, "a", "unload")[0] == 200
        assert process.status("/v2/models/a/ready") == 404
        asking.join()
        assert responses[0][0] == 200


def test_control_is_off_by_default(folder: Path) -> None:
    with running_server(str(folder), "--placement", "thread") as process:
        for path in ("index", "models/a/load", "models/a/unload"):
            status, body, _ = process.request("POST", f"/v2/repository/{path}", headers=TOKEN)
            assert (status, body["error"]) == (
                403,
                "model control is off; an operator enables it with --control-token",
            )


def test_control_with_a_wrong_token(folder: Path) -> None:
    with running_server(str(folder), "--placement", "thread", "--control-token", "t") as process:
        for headers in ({}, {"authorization": "Bearer guess"}, {"authorization": "Basic t"}):
            for path in ("index", "models/a/load", "models/a/unload"):
                status, body, found = process.request("POST", f"/v2/repository/{path}", headers=headers)
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
    with running_server(str(versions), "--version-policy", policy, "--placement", "thread") as process:
        assert process.request("GET", "/v2/models/m")[1]["versions"] == served_versions
        assert factor(process, "m") == float(served_versions[-1])
        for version in ("1", "2", "10", "3"):
            status, body = process.infer(f"m/versions/{version}", [1.0])
            if version in served_versions:
                assert (status, body["model_version"], body["outputs"][0]["data"]) == (200, version, [float(version)])
            else:
                assert status == 404
                assert f"version {version} is not found" in body["error"]


def test_the_default_version(versions: Path) -> None:
    (versions / "dragoman.toml").write_text('[model]\ndefault_version = "2"\nversion_policy = "all"\n')
    with running_server(str(versions), "--placement", "thread", "--control-token", "t") as process:
        assert factor(process, "m") == 2
        write(versions / "11", 11)
        assert control(process, "m", "load")[0] == 200
        assert factor(process, "m") == 2
        assert factor(process, "m/versions/11") == 11


def test_a_newer_version_takes_over_by_load(versions: Path) -> None:
    with running_server(str(versions), "--control-token", "t", "--placement", "thread") as process:
        write(versions / "11", 11)
        assert factor(process, "m") == 10
        assert control(process, "m", "load")[0] == 200
        assert factor(process, "m") == 11
        assert process.infer("m/versions/10", [1.0])[0] == 404


def test_versions_are_loaded_and_unloaded_one_by_one(versions: Path) -> None:
    with running_server(
        str(versions), "--version-policy", "all", "--control-token", "t", "--placement", "thread"
    ) as process:
        path = "/v2/repository/models/m"

        def version_states() -> dict[str, str]:
            entries = process.request("POST", "/v2/repository/index", headers=TOKEN)[1]
            return {entry["version"]: entry["state"] for entry in entries}

        for version in ("1", "10"):
            assert process.request("POST", f"{path}/unload", {"parameters": {"version": version}}, TOKEN)[0] == 200
        assert version_states() == {"1": "UNAVAILABLE", "2": "READY", "10": "UNAVAILABLE"}
        for version in ("1", "2"):
            write(versions / version, 5)
        assert process.request("POST", f"{path}/load", {"parameters": {"version": "1"}}, TOKEN)[0] == 200
        assert version_states() == {"1": "READY", "2": "READY", "10": "UNAVAILABLE"}
        assert process.request("POST", f"{path}/load", {"parameters": {"version": 1}}, TOKEN)[0] == 200
        assert (factor(process, "m/versions/1"), factor(process, "m")) == (5, 2)
        status, body, _ = process.request("POST", f"{path}/load", {"parameters": {"version": "7"}}, TOKEN)
        assert (status, body["error"]) == (
            400,
            "failed to load 'm', version '7' is not among those to be served: 1, 2, 10",
        )
        status, body, _ = process.request("POST", f"{path}/load", {"parameters": {"version": True}}, TOKEN)
        assert (status, body["error"]) == (400, "parameter 'version': expected text, got True")
        assert process.request("POST", f"{path}/load", {"parameters": {"version": None}}, TOKEN)[0] == 200
        assert version_states() == {"1": "READY", "2": "READY", "10": "READY"}


def test_a_listed_version_that_is_not_there(versions: Path) -> None:
    process = ServerProcess(str(versions), "--version-policy", "1,7")
    try:
        assert process.wait_for_exit() == 2
        assert "expected versions of 1, 2, 10, got 7" in process.log()
    finally:
        process.kill()
