"""`dragoman doctor FOLDER` tells what will differ, and whether all will work."""

import json
from pathlib import Path

import pytest

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
    assert "  different  parallel_workers: each model gets that many workers of its own" in text
    assert "  unused     debug: " in text
    assert "  different  host: " in text
    assert text.endswith("everything works\n")
    assert "kafka" not in text


def test_what_does_not_work_is_told_and_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import mlserver\nfrom mlserver import MLModel, register\nfrom mlserver.rest import RESTServer\n"
        "from mlserver_sklearn import SKLearnModel\n\nclass Mine(SKLearnModel):\n    pass\n"
    )
    folder = folder_of(tmp_path, {"kafka_enabled": True}, {"parameters": {"environment_tarball": "e.tgz"}}, code)
    assert main(["doctor", folder, "--json"]) == 1
    remarks = json.loads(capsys.readouterr().out)
    bad = {(r["place"], r["subject"]): r["effect"] for r in remarks if r["effect"] in ("missing", "refused")}
    assert bad == {
        ("settings.json", "kafka_enabled"): "refused",
        ("model-settings.json", "parameters.environment_tarball"): "refused",
        ("mine.py", "import mlserver.rest"): "missing",
        ("mine.py", "import mlserver_sklearn"): "missing",
    }
    assert all(r["told"] for r in remarks if r["effect"] != "same")


def test_variables_and_pickles_are_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLSERVER_TRACING_SERVER", "http://somewhere")
    (tmp_path / "model.joblib").write_bytes(b"")
    folder = folder_of(tmp_path, {}, {"implementation": "mlserver_sklearn.SKLearnModel"})
    assert main(["doctor", folder]) == 1
    text = capsys.readouterr().out
    assert "environment\n  missing    MLSERVER_TRACING_SERVER: no traces are sent" in text
    assert "runs on Dragoman's runtime sklearn" in text
    assert "start with --allow-pickle" in text


def test_no_code_of_the_folder_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", folder_of(tmp_path, {}, {}, f"{MODEL}\nraise SystemExit('run')\n")]) == 0
    assert main(["doctor", folder_of(tmp_path, {}, {}, "no python (\n")]) == 1
    assert main(["doctor", str(tmp_path / "nowhere")]) == 2
    assert "is no folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("model-settings.json", "{bad", "models: {}/model-settings.json cannot be read"),
        ("model-settings.json", "[1]", "models: {}/model-settings.json: expected a JSON object, got [1]"),
        ("model-settings.json", '{"max_batch_size": "x"}', "'max_batch_size' has the wrong kind of value: 'x'"),
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
        ("serving.properties", "option.model_id=foo", "option.model_id: there is no folder 'foo'"),
        ("serving.properties", "no value", "expected lines of name=value, got 'no value'"),
        ("dragoman.toml", '[server]\nhttp_port = "x"\n', "settings: {}/dragoman.toml: [server]: setting 'http_port'"),
        ("dragoman.toml", '[server]\nprotocols = "morse"\n', "settings: there is no protocol 'morse'"),
        ("other.txt", "", "models: found no model in '{}'"),
    ],
)
def test_what_serve_refuses_the_doctor_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, text: str, told: str
) -> None:
    (tmp_path / "other.py").write_text("class Other:\n    pass\n")
    (tmp_path / file).write_text(text)
    assert main(["doctor", str(tmp_path)]) == 1
    assert told.format(tmp_path) in capsys.readouterr().out
    assert not (tmp_path / "__pycache__").exists()
