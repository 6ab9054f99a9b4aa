"""Start of a server: invalid settings, models that fail to load, and slow ones."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import joblib
import pytest
from sklearn.linear_model import LinearRegression

from e2e.forked_process import run_command
from e2e.server_process import MODELS, ServerProcess, running_server, wait_until

TROUBLE = MODELS / "trouble.py"
TWICE = f"{TROUBLE}:Twice"
Start = Callable[..., ServerProcess]


# --- the command -----------------------------------------------------------------------------------------


def test_help() -> None:
    done = run_command("--help")
    assert done.returncode == 0
    assert "serve" in done.stdout
    assert run_command("--version").stdout.startswith("dragoman ")


@pytest.mark.parametrize(
    "arguments", [("--help",), ("--version",), ("serve", "--help"), ("serve", "--help=all"), ("serv",)], ids=" ".join
)
def test_help_imports_neither_numpy_nor_the_engine(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "dragoman", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "dragoman.cli" in imported
    assert not imported & {"numpy", "asyncio", "msgspec", "dragoman.engine", "dragoman.server", "dragoman.transports"}


@pytest.fixture(scope="module")
def completion_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    script = tmp_path_factory.mktemp("completion") / "dragoman.bash"
    script.write_text(run_command("completion", "bash").stdout)
    return script


COMMANDS = (
    "audit batch serve init models infer chat bench demo digests doctor graph check completion keys status top worker"
)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("dragoman ser", "serve"),
        ("dragoman ", COMMANDS),
        ("dragoman serve --http-p", "--http-port"),
        ("dragoman serve --no-keep-m", "--no-keep-memory"),
        ("dragoman serve --http-port 8000 --log-format ", "text json"),
        ("dragoman serve net", "net.onnx"),
        ("dragoman serve other.onnx net", "net.onnx"),
        ("dragoman serve --tls-cert net", "net.onnx"),
        ("dragoman chat --sys", "--system"),
        ("dragoman check deriv", "derivatives"),
        ("dragoman check derivatives --js", "--json"),
        ("dragoman completion z", "zsh"),
        ("dragoman nonsense", ""),
    ],
)
def test_completion_in_bash(completion_script: Path, tmp_path: Path, line: str, expected: str) -> None:
    (tmp_path / "net.onnx").touch()
    # `complete -p` prints the installed function; `-o bashdefault` falls back to file names, as compgen -f does.
    program = """
        source "$1"
        [[ "$(complete -p dragoman)" =~ "-o bashdefault -F "([^ ]+) ]]
        COMP_WORDS=("${@:2}") COMP_CWORD=$(($# - 2))
        "${BASH_REMATCH[1]}" dragoman "${!#}" "${@: -2:1}"
        [ ${#COMPREPLY[@]} -gt 0 ] || mapfile -t COMPREPLY < <(compgen -f -- "${!#}")
        echo "${COMPREPLY[@]}"
    """
    words = line.split(" ")
    command = ["bash", "-c", program, "bash", str(completion_script), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert (sorted(done.stdout.split()), done.stderr) == (sorted(expected.split()), "")


@pytest.mark.parametrize(("shell", "first"), [("zsh", "#compdef dragoman"), ("fish", "# AUTOMATICALLY GENERATED")])
def test_completion_for_other_shells(shell: str, first: str) -> None:
    done = run_command("completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(first)
    assert "http-port" in done.stdout


def test_completion_without_shtab(tmp_path: Path) -> None:
    (tmp_path / "shtab.py").write_text("raise ImportError")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "dragoman", "completion", "bash"]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "dragoman: shell completion needs shtab: pip install 'dragoman[completion]'\n"


def test_the_installed_command() -> None:
    command = Path(sys.executable).parent / "dragoman"
    done = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == run_command("--version").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "required: PATH"),
        ((TWICE, "--http-port", "x"), "setting 'http_port': expected an integer, got 'x'"),
        ((TWICE, "--http-port", "99999"), "setting 'http_port': expected 0 to 65535, got 99999"),
        ((TWICE, "--grpc-port", "65536"), "setting 'grpc_port': expected -1 to 65535, got 65536"),
        ((TWICE, "--http-also", "127.0.0.1:99999"), "setting 'http_also'"),
        ((TWICE, "--replicas", "0"), "setting 'replicas': expected at least 1, got 0"),
        ((TWICE, "--drain-s", "nan"), "setting 'drain_s': expected at least 0, got nan"),
        ((TWICE, "--log-level", "loud"), "invalid choice: 'loud'"),
        ((TWICE, "--placement", "moon"), "invalid choice: 'moon'"),
        ((TWICE, "--protocols", "morse"), "unknown protocol 'morse'"),
        ((TWICE, "--tls-cert", "nowhere.pem"), "with key 'nowhere.pem': 'nowhere.pem' does not exist"),
        ((TWICE, TWICE), "two models are called 'Twice'"),
        ((TWICE, "--nonsense"), "unrecognized arguments: --nonsense"),
        ((TWICE, "--http-p", "1"), "unrecognized arguments: --http-p 1; did you mean '--http-port'?"),
        ((TWICE, "--log-level", "warn"), "did you mean 'warning'?"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_command_line_errors_have_no_traceback(arguments: tuple[str, ...], message: str) -> None:
    done = run_command("serve", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout


def test_nothing_to_serve(tmp_path: Path) -> None:
    done = run_command("serve", str(tmp_path))
    assert done.returncode == 2
    assert f"found no model in '{tmp_path}'" in done.stderr


# Root may read everything, so the command runs as somebody else once all that it imports is there.
AS_NOBODY = """
import contextlib, io, os, sys, tempfile
from dragoman.cli import main
with tempfile.TemporaryDirectory() as empty, contextlib.redirect_stdout(io.StringIO()):
    with contextlib.redirect_stderr(io.StringIO()):
        main([sys.argv[1], empty])
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", ["serve", "doctor"])
@pytest.mark.parametrize(("mode", "below"), [(0o000, ""), (0o444, ""), (0o111, ""), (0o000, "inside")])
def test_a_folder_that_cannot_be_read_is_one_line(command: str, mode: int, below: str) -> None:
    with tempfile.TemporaryDirectory() as name:  # the folders of pytest are its user's alone
        folder = Path(name) / "models"
        (folder / "inside").mkdir(parents=True)
        (folder / "model.onnx").touch()
        Path(name).chmod(0o755)
        folder.chmod(mode)
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, command, str(folder / below)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        folder.chmod(0o755)
    assert "cannot be read: Permission denied" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 1
    if command == "serve":
        assert done.returncode == 2


def test_errors_in_files_and_environment(tmp_path: Path) -> None:
    done = run_command("serve", TWICE, environment={"DRAGOMAN_REPLICAS": "two"})
    assert done.returncode == 2
    assert done.stderr == "dragoman: setting 'replicas': expected an integer, got 'two'\n"
    done = run_command("serve", TWICE, environment={"DRAGOMAN_HTTP_PROT": "1"})
    assert done.returncode == 2
    expected = "unknown environment variable 'DRAGOMAN_HTTP_PROT'; did you mean 'DRAGOMAN_HTTP_PORT'?"
    assert done.stderr == f"dragoman: {expected}\n"
    (tmp_path / "model.py").write_text("")
    for text, message in (
        (
            "[server]\nhttp_prot = 1",
            f"{tmp_path}/dragoman.toml: [server]: unknown setting 'http_prot'; did you mean 'http_port'?",
        ),
        ("[server]\nallow_pickle = true", "use --allow-pickle or DRAGOMAN_ALLOW_PICKLE"),
        ("server = 1", f"{tmp_path}/dragoman.toml: expected a table [server], got 1"),
        ("[model]\nreplicas = 0", "setting 'replicas': expected at least 1, got 0"),
        ("[model]\nplacement = 'moon'", "setting 'placement': expected one of inline, thread, process"),
        ("[model", "cannot be read"),
    ):
        (tmp_path / "dragoman.toml").write_text(text)
        done = run_command("serve", str(tmp_path))
        assert done.returncode == 2, done.stderr
        assert message in done.stderr
        assert "Traceback" not in done.stderr


def test_port_0_prints_the_chosen_port() -> None:
    process = ServerProcess("--http-port", "0", "--grpc-port", "0", TWICE)
    try:
        process.wait_for_log("Ctrl-C stops")
        line = next(line for line in process.log().splitlines() if "  HTTP  http://127.0.0.1:" in line)
        process.http_port = int(line.split()[1].rpartition(":")[2])
        assert process.status("/v2/health/ready") == 200
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("flags", "there", "missing"),
    [(("--protocols", "oip_grpc"), "  gRPC  ", "  HTTP  "), (("--grpc-port", "-1"), "  HTTP  ", "  gRPC  ")],
)
def test_a_single_protocol(start: Start, flags: tuple[str, ...], there: str, missing: str) -> None:
    process = start(TWICE, *flags).wait_for_log("Ctrl-C stops")
    assert there in process.log()
    assert missing not in process.log()
    process.terminate()
    assert process.wait_for_exit() == 0
    assert "Traceback" not in process.log()


# --- models that fail, and slow ones ---------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["process", "thread"])
def test_other_models_are_served_if_one_cannot_be_loaded(start: Start, placement: str) -> None:
    process = start(TWICE, f"{TROUBLE}:Unloadable", "--placement", placement, "--control-token", "t")
    process.wait_until_live().wait_for_log("Ctrl-C stops")
    why = "failed to load 'Unloadable', RuntimeError: the weights are gone"
    table = process.log()
    assert f"Unloadable: {why}" in table
    row = next(line for line in table.splitlines() if line.startswith("  Unloadable "))
    assert row.split()[-1] == "unavailable"
    assert process.status("/v2/health/ready") == 400
    assert process.status("/v2/models/Twice/ready") == 200
    assert process.status("/v2/models/Unloadable/ready") == 400
    assert process.infer("Twice", [2.0])[1]["outputs"][0]["data"] == [4.0]
    status, body = process.infer("Unloadable", [2.0])
    assert status == 503
    assert "UNAVAILABLE; the reason is in the log" in body["error"]
    assert "gone" not in body["error"]
    _, index, _ = process.request("POST", "/v2/repository/index", headers={"authorization": "Bearer t"})
    assert {(e["name"], e["state"], e["reason"]) for e in index} == {
        ("Twice", "READY", ""),
        ("Unloadable", "UNAVAILABLE", why),
    }


def test_a_process_that_exits_during_load(start: Start) -> None:
    process = start(f"{TROUBLE}:ExitsInLoad", TWICE)
    process.wait_until_live().wait_for_log("Ctrl-C stops")
    assert "the worker process died (exit code 3) while it loaded" in process.log()
    assert process.infer("Twice", [2.0])[0] == 200


def test_pickles_are_rejected_unless_allowed(tmp_path: Path, start: Start) -> None:
    joblib.dump(LinearRegression().fit([[0.0], [1.0]], [0.0, 2.0]), tmp_path / "line.joblib")
    rejected = start(str(tmp_path / "line.joblib"))
    assert rejected.wait_for_exit() == 1
    assert "--allow-pickle" in rejected.log()
    with running_server(str(tmp_path / "line.joblib"), "--allow-pickle") as process:
        tensor = {"name": "input", "datatype": "FP64", "shape": [1, 1], "data": [3.0]}
        _, body, _ = process.request("POST", "/v2/models/line/infer", {"inputs": [tensor]})
        assert body["outputs"][0]["data"] == pytest.approx([6.0])


@pytest.mark.parametrize("placement", ["process", "thread"])
def test_a_slow_load_is_live_and_not_ready(tmp_path: Path, start: Start, placement: str) -> None:
    gate = tmp_path / "gate"
    process = start(TWICE, f"{TROUBLE}:SlowToLoad", "--placement", placement, environment={"TEST_GATE": str(gate)})
    process.wait_until_live().wait_for_status("/v2/models/Twice/ready", 200)
    assert process.status("/v2/health/ready") == 400
    assert process.status("/v2/models/SlowToLoad/ready") == 400
    assert process.infer("Twice", [2.0])[0] == 200
    assert process.infer("SlowToLoad", [2.0])[0] == 503
    if placement == "process":  # a line each 3 s, with the step that its process has sent
        process.wait_for_log("still loading SlowToLoad (loading")
    gate.touch()
    process.wait_until_ready()
    assert process.infer("SlowToLoad", [2.0])[1]["outputs"][0]["data"] == [4.0]
    process.wait_for_log("Ctrl-C stops")


# --- logs ------------------------------------------------------------------------------------------------


def test_json_logs(start: Start) -> None:
    names = [f"{TROUBLE}:{name}" for name in ("Twice", "Raises", "Unloadable", "Exits")]
    process = start(*names, "--log-format", "json", "--drain-s", "1")
    process.wait_for_log("started, not ready")
    assert process.infer("Raises", [1.0])[0] == 500
    assert process.infer("Exits", [-1.0])[0] == 500
    process.wait_for_log("died")
    process.terminate()
    assert process.wait_for_exit() == 0
    lines = [json.loads(line) for line in process.log().splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    by_message = {line["message"]: line for line in lines}
    assert any("cannot do 1" in line.get("traceback", "") for line in lines)
    assert any("the weights are gone" in message for message in by_message)
    started_server = next(line for line in lines if "http" in line)
    assert started_server["http"] == f"http://{process.url}"
    assert started_server["models"] == {
        "Twice": "READY",
        "Raises": "READY",
        "Unloadable": "UNAVAILABLE",
        "Exits": "READY",
    }


def test_the_level_of_the_log() -> None:
    with running_server(f"{TROUBLE}:Twice", "--log-level", "error", "--log-format", "json") as process:
        process.terminate()
        assert process.wait_for_exit() == 0
        assert process.log() == ""


# --- settings --------------------------------------------------------------------------------------------


def named(process: ServerProcess) -> str:
    name: str = process.request("GET", "/v2")[1]["name"]
    return name


def test_precedence_of_flags_environment_and_file(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "model.py").write_text(TROUBLE.read_text().partition("class Raises")[0])
    (folder / "dragoman.toml").write_text('[server]\nserver_name = "file"\nhealth_json = true\n')
    environment = {"DRAGOMAN_SERVER_NAME": "environment"}
    with running_server(str(folder)) as process:
        assert named(process) == "file"
        assert process.request("GET", "/v2/health/ready")[1] == {"ready": True}
    with running_server(str(folder), environment=environment) as process:
        assert named(process) == "environment"
    with running_server(str(folder), "--server-name", "flag", "--no-health-json", environment=environment) as process:
        assert named(process) == "flag"
        assert process.request("GET", "/v2/health/ready")[1] == b""


def test_model_settings_and_settings_json(tmp_path: Path) -> None:
    folder = tmp_path / "any"
    folder.mkdir()
    (folder / "models.py").write_text(TROUBLE.read_text())
    settings = {
        "name": "doubler",
        "implementation": "models.Twice",
        "platform": "arithmetic",
        "max_batch_size": 4,
        "parameters": {"version": "v7"},
    }
    (folder / "model-settings.json").write_text(json.dumps(settings))
    (tmp_path / "settings.json").write_text(json.dumps({"server_name": "json", "debug": True}))
    with running_server(str(tmp_path)) as process:
        assert named(process) == "json"
        _, metadata, _ = process.request("GET", "/v2/models/doubler")
        assert (metadata["platform"], metadata["versions"]) == ("arithmetic", ["v7"])
        _, body = process.infer("doubler", [2.0])
        assert (body["model_version"], body["outputs"][0]["data"]) == ("v7", [4.0])
        assert process.status("/v2/models/doubler/versions/v7/ready") == 200
        assert process.status("/v2/models/doubler/versions/v8/ready") == 404


# --- secrets -------------------------------------------------------------------------------------------------


ENVIRONMENTS = """
import os, subprocess, sys
import numpy as np

def environments(x: np.ndarray) -> list[str]:
    command = [sys.executable, "-c", "import os; print(dict(os.environ))"]
    return [str(dict(os.environ)), subprocess.run(command, capture_output=True, text=True).stdout]
"""


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize("placement", ["process", "thread"])
def test_models_do_not_see_keys_and_tokens(tmp_path: Path, placement: str, processes: str) -> None:
    flags = ("--placement", placement, "--processes", processes)
    (tmp_path / "seen.py").write_text(ENVIRONMENTS)
    secrets = {"DRAGOMAN_CONTROL_TOKEN": "sesame", "DRAGOMAN_API_KEY": "sesame-of-twenty-characters"}
    collector = {"OTEL_EXPORTER_OTLP_HEADERS": "api-key=tulip", "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "api-key=tulip"}
    environment = {**secrets, **collector, "DRAGOMAN_MAX_QUEUE": "7"}
    with running_server(f"{tmp_path}/seen.py:environments", *flags, environment=environment) as process:
        inputs = [{"name": "x", "shape": [1], "datatype": "FP64", "data": [1.0]}]
        key = {"authorization": f"Bearer {secrets['DRAGOMAN_API_KEY']}"}
        if (placement, processes) == ("thread", "2"):  # copies of the model answer
            copies = re.compile(rb"dragoman_server_process_models\S+ 1\n")
            wait_until(lambda: len(copies.findall(process.request("GET", "/metrics", None, key)[1])) == 2, "copies")
        status, body, _ = process.request("POST", "/v2/models/environments/infer", {"inputs": inputs}, key)
        assert status == 200, body
        assert process.request("POST", "/v2/models/environments/infer", {"inputs": inputs})[0] == 401
        for seen in body["outputs"][0]["data"]:
            assert "DRAGOMAN_MAX_QUEUE" in seen
            assert "sesame" not in seen
            assert "tulip" not in seen
        for pid in process.workers():
            environ = Path(f"/proc/{pid}/environ").read_bytes()
            assert b"sesame" not in environ
            assert b"tulip" not in environ
        assert process.request("POST", "/v2/repository/index", {})[0] == 401
        assert process.request("POST", "/v2/repository/index", {}, {"authorization": "Bearer sesame"})[0] == 200


def test_files_that_are_not_served_are_in_the_table_and_in_the_log(tmp_path: Path) -> None:
    (tmp_path / "models" / "twice").mkdir(parents=True)
    (tmp_path / "models" / "twice" / "model.py").write_text(
        "import dragoman\n\n\n@dragoman.model\ndef double(x: float) -> float:\n    return 2 * x\n"
    )
    (tmp_path / "models" / "net.ggml").write_bytes(b"GGUF")
    with running_server(str(tmp_path / "models")) as process:
        process.wait_for_log("ready in")
        assert "not served: file=models/net.ggml reason=GGML is not supported" in process.log()
        rows = [line.split() for line in process.log().splitlines()]
        assert ["models/net.ggml", "-", "-", "-", "skipped"] in rows
        assert "  models/net.ggml: GGML is not supported" in process.log()


PROCESS = """
import gc
import pathlib
import sys

import dragoman
import numpy as np


class Cycle:
    freed = 0

    def __init__(self):
        self.itself = self

    def __del__(self):
        Cycle.freed += 1


class Process(dragoman.Model):
    placement = "inline"
    inputs = (dragoman.TensorSpec("x", dragoman.FP64, (-1,)),)
    outputs = (dragoman.TensorSpec("y", dragoman.INT64, (-1,)),)

    def __init__(self):
        self.itself = self

    def __del__(self):
        pathlib.Path(__file__).with_name("freed").touch()

    def infer(self, call):
        is_frozen = gc.get_freeze_count() > 10_000
        is_late = "google.protobuf.json_format" not in sys.modules
        Cycle()
        return np.array([gc.isenabled(), is_frozen, gc.get_threshold()[0], is_late, Cycle.freed > 0], np.int64)
"""


def test_modules_are_not_collected_and_imported_late(tmp_path: Path) -> None:
    """The garbage collector is on again once the server has started, leaves modules out, and runs when idle too."""
    (tmp_path / "process.py").write_text(PROCESS)
    own_interpreter = {"PYTHONHASHSEED": "0"}  # rather than a fork, which has modules that others need
    with running_server(f"{tmp_path / 'process.py'}:Process", "--control-open", environment=own_interpreter) as process:

        def infer() -> list[int]:
            status, body = process.infer("Process", [0.0])
            assert status == 200
            return list(body["outputs"][0]["data"])

        assert infer()[:4] == [1, 1, 20_000, 1]
        wait_until(lambda: infer()[4], "garbage of few calls is collected", within_s=60)
        (tmp_path / "freed").unlink(missing_ok=True)  # by an instance of before the start
        assert process.request("POST", "/v2/repository/models/Process/unload", {})[0] == 200
        wait_until((tmp_path / "freed").exists, "an unloaded model is collected", within_s=60)
