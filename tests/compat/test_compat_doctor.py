"""`dragoman doctor FOLDER` reports differences and unsupported settings of a folder."""

import json
import pickle
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

import joblib
import pytest
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from dragoman.cli import main

FOLDER = Path(__file__).parent / "folder"
MODEL = "from mlserver import MLModel\n\nclass Mine(MLModel):\n    pass\n"


def folder_of(path: Path, settings: dict[str, object], model: dict[str, object], code: str = MODEL) -> str:
    (path / "settings.json").write_text(json.dumps(settings))
    (path / "model-settings.json").write_text(json.dumps({"implementation": "mine.Mine", **model}))
    (path / "mine.py").write_text(code)
    return str(path)


def test_a_folder_in_which_everything_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"http_port": 9000, "parallel_workers": 2, "debug": False, "kafka_enabled": False}
    assert main(["doctor", folder_of(tmp_path, dict(settings), {"name": "m"})]) == 0
    text = capsys.readouterr().out
    assert "settings.json\n  same       http_port\n" in text
    assert "  different  parallel_workers: the number of worker processes of each model" in text
    assert "  unused     debug: " in text
    assert "  different  host: " in text
    assert text.endswith("everything works\n")
    assert "kafka" not in text


def test_unsupported_settings_are_reported_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import mlserver\nfrom mlserver import MLModel, register\nfrom mlserver.rest import RESTServer\n"
        "from mlserver_sklearn import SKLearnModel\n\nclass Mine(SKLearnModel):\n    pass\n"
    )
    folder = folder_of(tmp_path, {"kafka_enabled": True}, {"parameters": {"environment_tarball": "e.tgz"}}, code)
    assert main(["doctor", folder, "--json"]) == 1
    remarks = json.loads(capsys.readouterr().out)
    bad = {(r["place"], r["subject"]): r["effect"] for r in remarks if r["effect"] in ("missing", "rejected")}
    assert bad == {
        ("settings.json", "kafka_enabled"): "rejected",
        ("model-settings.json", "parameters.environment_tarball"): "rejected",
        ("mine.py", "import mlserver.rest"): "missing",
    }
    assert all(r["note"] for r in remarks if r["effect"] != "same")


def test_variables_and_pickles_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLSERVER_TRACING_SERVER", "http://somewhere")
    (tmp_path / "model.joblib").write_bytes(b"")
    folder = folder_of(tmp_path, {}, {"implementation": "mlserver_sklearn.SKLearnModel"})
    assert main(["doctor", folder]) == 1
    text = capsys.readouterr().out
    assert "environment\n  missing    MLSERVER_TRACING_SERVER: traces are not exported" in text
    assert "answers as in MLServer" in text
    assert "start with --allow-pickle" in text


def test_no_code_of_the_folder_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", folder_of(tmp_path, {}, {}, f"{MODEL}\nraise SystemExit('run')\n")]) == 0
    assert main(["doctor", folder_of(tmp_path, {}, {}, "no python (\n")]) == 1
    assert main(["doctor", str(tmp_path / "nowhere")]) == 2
    assert "is not a folder" in capsys.readouterr().err


def report_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["doctor", str(folder)]) in (0, 1)
    return capsys.readouterr().out


def test_missing_packages_are_reported_without_loading(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "boosters_of_mine.py").write_text("class Booster:\n    pass\n")
    (tmp_path / "models").mkdir()
    write = "import pickle, boosters_of_mine as b\nfor n in (2, 3, 4, 5):\n"
    write += " open(f'../models/model{n}.pkl', 'wb').write(pickle.dumps(['x', b.Booster, b.Booster()], n))"
    subprocess.run([sys.executable, "-c", write], cwd=tmp_path / "training", check=True)
    text = report_of(tmp_path / "models", capsys)
    for n in (2, 3, 4, 5):
        assert (
            f"model 'model{n}': 'model{n}.pkl' needs 'boosters_of_mine', which is not installed; pip install " in text
        )


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_missing_packages_are_reported_with_the_extra(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "dragoman.toml").write_text('[model]\nruntime = "vllm"\n')
    text = report_of(tmp_path, capsys)
    assert "model 'm': it needs the package 'vllm', which is not installed; pip install 'dragoman[vllm]'" in text


def test_pickles_of_every_protocol_can_be_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = StandardScaler().fit([[1.0], [2.0]])
    model.noted = {1, 2}, object(), b"bytes"  # which the old protocols name as Python 2 did
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / f"model{protocol}.pkl").write_bytes(pickle.dumps(model, protocol))
    assert report_of(tmp_path, capsys).endswith("everything works\n")


@pytest.mark.parametrize(
    "code", [b"\xef\xbb\xbfimport dragoman\n", b"# coding: latin-1\nNAME = '\xe9'\n"], ids=["bom", "latin-1"]
)
def test_python_files_are_parsed_in_their_encoding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: bytes
) -> None:
    folder = folder_of(tmp_path, {}, {"name": "m"})
    (tmp_path / "mine.py").write_bytes(code + MODEL.encode())
    assert main(["doctor", folder]) == 0
    assert capsys.readouterr().out.endswith("everything works\n")


def test_compiled_modules_beside_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / f"compiled{EXTENSION_SUFFIXES[0]}").write_bytes(b"")
    (tmp_path / "mine" / "model.py").write_text("import compiled\n")
    assert report_of(tmp_path, capsys).endswith("everything works\n")


def test_models_that_can_be_loaded_have_no_remarks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, compress in (("plain", 0), ("packed", 3)):
        joblib.dump(make_pipeline(StandardScaler()).fit([[1.0], [2.0]]), tmp_path / f"{name}.joblib", compress)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "beside.py").write_text("")
    (tmp_path / "mine" / "model.py").write_text(
        "import beside\nimport os.path\nfrom . import x\ntry:\n    import not_there\nexcept ImportError:\n    pass\n"
    )
    text = report_of(tmp_path, capsys)
    assert "plain.joblib\n  different  file: pickle files can run code when loaded: start with --allow-pickle" in text
    assert text.endswith("everything works\n")


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("model-settings.json", "{bad", "models: {}/model-settings.json cannot be read"),
        ("model-settings.json", "[1]", "models: {}/model-settings.json: expected a JSON object, got [1]"),
        ("model-settings.json", '{"max_batch_size": "x"}', "invalid value of 'max_batch_size': 'x'"),
        ("model-settings.json", '{"name": "b"}', "model 'b': no runtime is known for {}"),
        ("model-settings.json", '{"name": "b", "parameters": {"uri": "a.onnx"}}', "there is no file '{}/a.onnx'"),
        (
            "model-settings.json",
            '{"implementation": "mlserver_sklearn.SKLearnModel", "parameters": {"uri": "a.joblib"}}',
            "there is no file '{}/a.joblib'",
        ),
        ("model-settings.json", '{"implementation": "other.Mine"}', "'{}/other.py' has no 'Mine'"),
        ("settings.json", '{"http_port": "x"}', "{}/settings.json: setting 'http_port': expected int, got 'x'"),
        ("settings.json", '{"root_path": "models"', "settings: {}/settings.json cannot be read"),
        ("serving.properties", "option.model_id=foo", "option.model_id: folder 'foo' not found"),
        ("serving.properties", "no value", "expected lines of name=value, got 'no value'"),
        ("dragoman.toml", '[server]\nhttp_port = "x"\n', "settings: {}/dragoman.toml: [server]: setting 'http_port'"),
        ("dragoman.toml", '[server]\nprotocols = "morse"\n', "settings: unknown protocol 'morse'"),
        ("other.txt", "", "models: found no model in '{}'"),
        (
            "model.py",
            "import numpy\nimport not_there.at_all\n",
            "'model.py' needs 'not_there', which is not installed; pip",
        ),
        ("model.pkl", "<html>", "'model.pkl' cannot be read as a pickle: "),
        ("model.pkl", "\x8e" + "\x00" * 7 + "\x40", "'model.pkl' cannot be read as a pickle: MemoryError"),
    ],
)
def test_doctor_reports_the_errors_of_serve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, text: str, message: str
) -> None:
    (tmp_path / "other.py").write_text("class Other:\n    pass\n")
    (tmp_path / file).write_bytes(text.encode("latin-1"))
    assert main(["doctor", str(tmp_path)]) == 1
    assert message.format(tmp_path) in capsys.readouterr().out
    assert not (tmp_path / "__pycache__").exists()
