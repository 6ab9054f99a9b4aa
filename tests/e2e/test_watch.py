"""`--watch`: a running server follows the files of its models, without a failed request."""

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from e2e.server_process import ServerProcess, running_server, wait_until

MODEL = """
import numpy as np
import dragoman

class Model(dragoman.Model):
    batched = True
    inputs = (dragoman.TensorSpec("x", dragoman.FP64, (-1,)),)

    def infer(self, call):
        return {{"value": np.full(len(call.inputs["x"].data), float({value!r}))}}
"""


def write(path: Path, value: object) -> None:
    """Replace a file by renaming a new one, as editors and rsync do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(MODEL.format(value=value))
    new.replace(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("watched")
    write(folder / "models" / "m" / "1" / "model.py", 1)
    write(folder / "single" / "alone.py", 1)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    settings = ("--watch", "--watch-quiet-s", "0.2", "--control-open", "--placement", "thread")
    with running_server(str(folder / "models"), f"{folder}/single/alone.py:Model", *settings) as process:
        yield process


def value(server: ServerProcess, model: str) -> Any:
    status, body = server.infer(model, [1.0])
    return body["outputs"][0]["data"][0] if status == 200 else status


def wait_for_value(server: ServerProcess, model: str, expected: float) -> None:
    wait_until(lambda: value(server, model) == expected, f"{model} = {expected}")


def reason(server: ServerProcess, model: str) -> tuple[str, str]:
    entries = server.request("POST", "/v2/repository/index", {})[1]
    return next((e["state"], e["reason"]) for e in entries if e["name"] == model)


@contextmanager
def requests_without_pause(server: ServerProcess, model: str) -> Iterator[set[Any]]:
    """Send requests one after the other; yield the set of the values and failing statuses."""
    stop, values = threading.Event(), set()

    def send() -> None:
        while not stop.is_set():
            values.add(value(server, model))

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield values
    finally:
        stop.set()
        thread.join()


def test_a_version_is_replaced_and_a_newer_one_added_without_a_failed_request(
    server: ServerProcess, folder: Path
) -> None:
    with requests_without_pause(server, "m") as values:
        wait_until(lambda: values == {1.0}, "the first response")
        write(folder / "models" / "m" / "1" / "model.py", 1.5)
        wait_until(lambda: 1.5 in values, "the changed version")
        write(folder / "models" / "m" / "2" / "model.py", 2)
        wait_until(lambda: 2.0 in values, "the newer version")
        shutil.rmtree(folder / "models" / "m" / "2")
        wait_for_value(server, "m", 1.5)
    assert values == {1.0, 1.5, 2.0}


def test_a_new_model_is_loaded_and_unloaded_when_it_is_removed(server: ServerProcess, folder: Path) -> None:
    write(folder / "models" / "new" / "model.py", 3)
    wait_for_value(server, "new", 3.0)
    shutil.rmtree(folder / "models" / "new")
    wait_for_value(server, "new", 404)
    assert server.status("/v2/health/ready") == 200


def test_a_failed_update_keeps_the_old_model_and_tells_the_reason(server: ServerProcess, folder: Path) -> None:
    write(folder / "models" / "bad" / "model.py", 1)
    wait_for_value(server, "bad", 1.0)
    (folder / "models" / "bad" / "model.py").write_text("raise ValueError('half a file')")
    wait_until(lambda: "half a file" in reason(server, "bad")[1], "the reason in the index")
    assert reason(server, "bad")[0] == "READY"
    assert reason(server, "bad")[1].startswith("update failed: failed to load 'bad', ")
    assert "failed to load 'bad', " in server.log()
    assert value(server, "bad") == 1.0
    assert server.status("/v2/health/ready") == 200
    write(folder / "models" / "bad" / "model.py", 2)
    wait_for_value(server, "bad", 2.0)
    assert reason(server, "bad") == ("READY", "")


def test_a_served_file_is_replaced_by_renaming(server: ServerProcess, folder: Path) -> None:
    for expected in (2.0, 3.0):  # the second time, the first file no longer exists
        write(folder / "single" / "alone.py", expected)
        wait_for_value(server, "Model", expected)


def test_a_link_to_a_folder_is_swapped(server: ServerProcess, folder: Path) -> None:
    for revision in (1, 2):
        write(folder / f"revision{revision}" / "model.py", revision)
    (folder / "models" / "linked").symlink_to(folder / "revision1")
    wait_for_value(server, "linked", 1.0)
    os.symlink(folder / "revision2", folder / "models" / ".linked")
    (folder / "models" / ".linked").replace(folder / "models" / "linked")
    wait_for_value(server, "linked", 2.0)


def test_sighup_updates_the_models_and_the_settings_of_the_log(tmp_path: Path) -> None:
    write(tmp_path / "m" / "model.py", 1)
    (tmp_path / "dragoman.toml").write_text("[server]\nlog_level = 'error'\n")
    options = ("--placement", "thread", "--control-open", "--max-batch-size", "4")
    with running_server(str(tmp_path), *options) as server:
        wait_for_value(server, "m", 1.0)
        assert "batch dispatched" not in server.log()
        text = "[server]\nlog_level = 'info'\nexplain_batches = true\nmax_queue = 3\n"
        (tmp_path / "dragoman.toml").write_text(text)
        write(tmp_path / "m" / "model.py", 2)
        write(tmp_path / "new" / "model.py", 3)
        server.popen.send_signal(signal.SIGHUP)
        wait_for_value(server, "m", 2.0)
        wait_for_value(server, "new", 3.0)
        server.wait_for_log("model 'm': changed on disk")  # at level info
        server.wait_for_log("batch dispatched: model=m")
        server.wait_for_log("setting 'max_queue' has changed, which needs a restart")
        assert server.log().count("which needs a restart") == 1
        (tmp_path / "dragoman.toml").write_text("[server]\nlog_level = 'loud'\n")
        shutil.rmtree(tmp_path / "new")
        server.popen.send_signal(signal.SIGHUP)
        server.wait_for_log("settings are unchanged: ")
        assert "expected one of debug, info, warning, error, got 'loud'" in server.log()


def test_flags_override_the_log_level_that_sighup_reads(tmp_path: Path) -> None:
    write(tmp_path / "m" / "model.py", 1)
    with running_server(str(tmp_path), "--placement", "thread", "--log-level", "error") as server:
        (tmp_path / "dragoman.toml").write_text("[server]\nlog_level = 'info'\n")
        write(tmp_path / "m" / "model.py", 2)
        server.popen.send_signal(signal.SIGHUP)
        wait_for_value(server, "m", 2.0)
        assert "changed on disk" not in server.log()
