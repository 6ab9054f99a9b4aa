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
from msgspec.structs import replace
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from dragoman.cli import main
from dragoman.core.remarks import PICKLE_NOTE
from dragoman_mlserver.survey import survey

FOLDER = Path(__file__).parent / "folder"
NOTHING_MISSING = "nothing missing was found; models not loaded: "
MODEL = "from mlserver import MLModel\n\nclass Mine(MLModel):\n    pass\n"


def folder_of(path: Path, settings: dict[str, object], model: dict[str, object], code: str = MODEL) -> str:
    (path / "settings.json").write_text(json.dumps(settings))
    (path / "model-settings.json").write_text(json.dumps({"implementation": "mine.Mine", **model}))
    (path / "mine.py").write_text(code)
    return str(path)


def test_a_folder_in_which_everything_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"http_port": 9000, "parallel_workers": 2, "debug": False, "kafka_enabled": False}
    assert main(["doctor", "--dry-run", folder_of(tmp_path, dict(settings), {"name": "m"})]) == 0
    text = capsys.readouterr().out
    assert "settings.json\n  same       http_port\n" in text
    assert "  different  parallel_workers: the number of worker processes of each model" in text
    assert "  unused     debug: " in text
    assert "  different  host: " in text
    assert text.splitlines()[-1].startswith(NOTHING_MISSING)
    assert "kafka" not in text


def test_unsupported_settings_are_reported_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import mlserver\nfrom mlserver import MLModel, register\nfrom mlserver.rest import RESTServer\n"
        "from mlserver_sklearn import SKLearnModel\n\nclass Mine(SKLearnModel):\n    pass\n"
    )
    folder = folder_of(tmp_path, {"kafka_enabled": True}, {"parameters": {"environment_tarball": "e.tgz"}}, code)
    assert main(["doctor", "--dry-run", folder, "--json"]) == 1
    remarks = json.loads(capsys.readouterr().out)
    bad = {(r["location"], r["subject"]): r["effect"] for r in remarks if r["effect"] in ("missing", "rejected")}
    assert bad == {
        ("settings.json", "kafka_enabled"): "missing",
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
    assert main(["doctor", "--dry-run", folder]) == 1
    text = capsys.readouterr().out
    assert "environment\n  missing    MLSERVER_TRACING_SERVER: traces are exported with --tracing-endpoint" in text
    assert "answers as in MLServer" in text
    assert "start with --allow-pickle" in text


CODE = """import mlserver, mlserver_other.x, mlserver.rest, mlserver.codecs.numpy
from mlserver_sklearn import SKLearnModel
from mlserver.handlers import custom_handler
from mlserver import register
from mlserver.metrics import log
from mlserver.codecs import register
from .mlserver_gone import x
print(x.headers)
"""
SURVEYED: dict[str, object] = {
    ".env": 'MLSERVER_DEBUG=0\nMLSERVER_MODEL_URI=y\nMLSERVER_MODEL_PARAMETERS={"format": "z"}\n',
    "settings.json": {"http_port": 1, "kafka_enabled": True},
    "a/model-settings.json": {
        "implementation": "mlserver_sklearn.SKLearnModel",
        "parameters": {"uri": "weights.pkl"},
    },
    "a/weights.pkl": "",
    "b/model-settings.json": {"implementation": "mlserver_mlflow.MLflowRuntime", "warm_workers": True},
    "c/model-settings.json": {"implementation": "elsewhere.Mine", "parameters": {"uri": "m.pkl"}},
    "c/m.pkl": "",
    "d/model-settings.json": {"parameters": {"uri": "m.bin"}},
    "d/m.bin": "",
    "d/model.pkl": "",  # which is not loaded
    "e/model-settings.json": {"implementation": "mlserver_alibi_explain.AlibiExplainRuntime"},
    "f/model-settings.json": [1],
    "g/model-settings.json": {"parameters": [1]},
    "h/model-settings.json": {"implementation": "mine.Mine"},
    "h/mine.py": "class Mine: ...\n",
    "i/model-settings.json": {"parameters": {}},
    "i/model.pickle": "",
    "j/bad.py": "no (\n",
    "j/code.py": CODE,
}
REMARKS = """
environment MLSERVER_DEBUG unused: errors are logged with traceback, which is never sent to clients; see --log-level
environment MLSERVER_MODEL_PARAMETERS same
environment MLSERVER_MODEL_URI same
environment MLSERVER_MODEL_FORMAT unused: the format is recognized from the file
settings.json http_port same
settings.json kafka_enabled missing: files beside models cannot connect the server to a broker: start it with \
--kafka-servers HOST:PORT
settings.json host different: the default is 127.0.0.1 instead of 0.0.0.0
a/model-settings.json implementation same
a/model-settings.json parameters same
a/model-settings.json parameters.uri same
a/model-settings.json implementation same: answers as in MLServer
a/model-settings.json parameters.uri different: PICKLE
b/model-settings.json implementation same
b/model-settings.json warm_workers unused: worker processes are always warm
b/model-settings.json implementation same: answers as in MLServer; start with --allow-pickle if you trust its files
c/model-settings.json implementation same
c/model-settings.json parameters same
c/model-settings.json parameters.uri same
c/model-settings.json implementation different: 'elsewhere.Mine' is not in a file beside its settings: it must be \
importable by the server
d/model-settings.json parameters same
d/model-settings.json parameters.uri same
e/model-settings.json implementation same
e/model-settings.json implementation rejected: explainers are not supported: wrap the explainer in a subclass of \
mlserver.MLModel
h/model-settings.json implementation same
i/model-settings.json parameters same
i/model-settings.json parameters.uri different: PICKLE
j/bad.py code missing: cannot be parsed: '(' was never closed (<unknown>, line 1)
j/code.py import mlserver_other.x missing: the package 'mlserver_other' is not included: derive the class from \
mlserver.MLModel
j/code.py import mlserver.rest missing: this module is not included: install the package mlserver if it is needed
j/code.py custom_handler different: health checks take precedence over its path; invalid arguments are a 400 instead \
of a 422
j/code.py metrics different: exported at /metrics on the HTTP port if the package prometheus-client is installed
j/code.py metrics different: exported at /metrics on the HTTP port if the package prometheus-client is installed
j/code.py parameters.headers different: the model gets the request headers that --forward-headers names, never \
credentials; headers that it sets in a response are sent over HTTP
"""


def test_all_remarks_on_a_folder(tmp_path: Path) -> None:
    for name, content in SURVEYED.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    found = [f"{r.location} {r.subject} {r.effect}" + (f": {r.note}" if r.note else "") for r in survey(tmp_path)]
    assert found == REMARKS.replace("PICKLE", PICKLE_NOTE).split("\n")[1:-1]
    of_code = [replace(r, location="code.py") for r in survey(tmp_path) if r.location == "j/code.py"]
    assert survey(tmp_path / "j" / "code.py") == of_code
    (tmp_path / "h" / "settings.json").write_text('{"host": "0.0.0.0"}')
    assert [r.subject for r in survey(tmp_path / "h") if r.location == "settings.json"] == ["host"]
    hosts = [(r.location, r.effect) for r in survey(tmp_path / "i") if r.subject == "host"]
    assert hosts == [(".", "different")]
    assert survey(tmp_path / "h" / "none") == []


DERIVED = "from mlserver_sklearn import SKLearnModel\n\nclass Mine(SKLearnModel):\n    pass\n"


def test_a_missing_model_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = f"no model file in '{tmp_path}': expected 'model.joblib', 'model.pickle', 'model.pkl', or the path of"
    folder = folder_of(tmp_path, {}, {"name": "m", "implementation": "mlserver_sklearn.SKLearnModel"})
    assert main(["doctor", "--dry-run", folder]) == 1
    assert f"model 'm': {expected} the file as 'uri'" in capsys.readouterr().out
    folder = folder_of(tmp_path, {}, {"name": "m", "parameters": {"uri": "."}}, DERIVED)
    assert main(["doctor", folder]) == 1
    text = capsys.readouterr().out
    assert expected in text
    assert "not installed" not in text


def test_a_dry_run_runs_no_code_of_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--dry-run", folder_of(tmp_path, {}, {}, f"{MODEL}\nraise SystemExit('run')\n")]) == 0
    assert main(["doctor", "--dry-run", folder_of(tmp_path, {}, {}, "no python (\n")]) == 1
    assert main(["doctor", "--dry-run", str(tmp_path / "nowhere")]) == 2
    assert "is not a folder" in capsys.readouterr().err


def report_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["doctor", "--dry-run", str(folder)]) in (0, 1)
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
    assert report_of(tmp_path, capsys).splitlines()[-1].startswith(NOTHING_MISSING)


@pytest.mark.parametrize(
    "code", [b"\xef\xbb\xbfimport dragoman\n", b"# coding: latin-1\nNAME = '\xe9'\n"], ids=["bom", "latin-1"]
)
def test_python_files_are_parsed_in_their_encoding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: bytes
) -> None:
    folder = folder_of(tmp_path, {}, {"name": "m"})
    (tmp_path / "mine.py").write_bytes(code + MODEL.encode())
    assert main(["doctor", "--dry-run", folder]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(NOTHING_MISSING)


def test_compiled_modules_beside_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / f"compiled{EXTENSION_SUFFIXES[0]}").write_bytes(b"")
    (tmp_path / "mine" / "model.py").write_text("import compiled\n")
    assert report_of(tmp_path, capsys).splitlines()[-1].startswith(NOTHING_MISSING)


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
    assert text.splitlines()[-1].startswith(NOTHING_MISSING)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("model-settings.json", "{bad", "models: {}/model-settings.json cannot be read"),
        ("model-settings.json", "[1]", "models: {}/model-settings.json: expected a JSON object, got [1]"),
        ("model-settings.json", '{"max_batch_size": "x"}', "invalid value of 'max_batch_size': 'x'"),
        ("model-settings.json", '{"parameters": ["a"]}', "'parameters': expected an object, got ['a']"),
        ("model-settings.json", '{"parameters": {"uri": 5}}', "{}/model-settings.json: 'uri': expected text, got 5"),
        ("model-settings.json", '{"versions": "v1"}', "'versions': expected a list, got 'v1'"),
        ("model-settings.json", '{"name": "b"}', "is not served: the folder holds no model"),
        ("model-settings.json", '{"name": "b", "parameters": {"uri": "a.onnx"}}', "file '{}/a.onnx' not found"),
        (
            "model-settings.json",
            '{"implementation": "mlserver_sklearn.SKLearnModel", "parameters": {"uri": "a.joblib"}}',
            "file '{}/a.joblib' not found",
        ),
        ("model-settings.json", '{"implementation": "other.Mine"}', "'{}/other.py' has no 'Mine'"),
        ("settings.json", '{"http_port": "x"}', "{}/settings.json: setting 'http_port': expected an integer, got 'x'"),
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
    assert main(["doctor", "--dry-run", str(tmp_path)]) == 1
    assert message.format(tmp_path) in capsys.readouterr().out
    assert not (tmp_path / "__pycache__").exists()


# --- loading ---------------------------------------------------------------------------------------------

ROWS = """from mlserver import MLModel
from mlserver.types import InferenceResponse, ResponseOutput


class Mine(MLModel):
    async def predict(self, payload):
        if payload.inputs[0].data[0] < 0:
            raise ValueError("below zero")
        output = ResponseOutput(name="y", shape=[1], datatype="FP32", data=[payload.inputs[0].data[0] * 2])
        return InferenceResponse(model_name=self.name, outputs=[output])
"""


def request(value: float) -> dict[str, object]:
    return {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [value]}]}


def test_models_are_loaded_and_answer_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path, {"host": "127.0.0.1"}, {"name": "m"}, ROWS)
    (tmp_path / "requests.txt").write_text(json.dumps([request(1), request(2)]))
    assert main(["doctor", folder, "--request", f"m={tmp_path / 'requests.txt'}"]) == 0
    text = capsys.readouterr().out
    assert "  same       model 'm': loaded, and answered the requests in requests.txt\n" in text
    assert text.endswith("everything loads; differences: 1, see above\n")
    (tmp_path / "requests.txt").write_text(json.dumps([request(1), request(-2)]))
    assert main(["doctor", folder, "--request", f"m={tmp_path / 'requests.txt'}"]) == 1
    text = capsys.readouterr().out
    assert "  missing    model 'm', requests.txt, request 2: model 'm' failed: ValueError: below zero\n" in text
    assert text.endswith("not everything works: 1 missing or rejected, see above\n")
    (tmp_path / "requests.txt").write_text("{")
    assert main(["doctor", folder, "--request", f"m={tmp_path / 'requests.txt'}"]) == 1
    assert "model 'm', requests.txt: " in capsys.readouterr().out
    for wrong, message in (("other=x", "expected a model of m, got 'other'"), ("m", "expected MODEL=FILE, got 'm'")):
        assert main(["doctor", folder, "--request", wrong]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("from mlserver.codecs import NotThere\n", "ImportError: cannot import name 'NotThere'"),
        ("import os\nos._exit(3)\n", "the process ended without a result"),
        ("raise SystemExit('run')\n", "run"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: str, message: str
) -> None:
    folder = folder_of(tmp_path, {"parallel_workers": 0}, {"name": "m"}, f"{code}{MODEL}")
    assert main(["doctor", folder]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "model 'm', loading: " in line]
    assert line.startswith("  rejected")
    assert message in line


def test_pickles_are_loaded_only_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    joblib.dump(StandardScaler().fit([[1.0], [2.0]]), tmp_path / "m.joblib")
    assert main(["doctor", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "  untried    model 'm': " in text
    assert text.splitlines()[-1].startswith("nothing missing was found; models not loaded: 1")
    assert main(["doctor", str(tmp_path), "--allow-pickle"]) == 0
    assert "  same       model 'm': loaded\n" in capsys.readouterr().out


def test_a_folder_of_triton(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").write_text("import triton_python_backend_utils\n")
    config = 'backend: "python"\ninstance_group { passive: true }\nfoo: 1\n'
    (tmp_path / "m" / "config.pbtxt").write_text(config)
    assert main(["doctor", str(tmp_path), "--dry-run"]) == 1
    text = capsys.readouterr().out
    assert "m/config.pbtxt:2\n  missing    instance_group.passive: " in text
    assert "m/config.pbtxt:3\n  unused     foo: unknown field" in text
    assert main(["doctor", str(tmp_path)]) == 1
    assert "'model.py' has no class TritonPythonModel with a method execute" in capsys.readouterr().out
    (tmp_path / "m" / "1" / "model.py").write_text("class TritonPythonModel:\n    def execute(self, requests): ...\n")
    (tmp_path / "m" / "config.pbtxt").write_text('backend: "python"\n')
    assert main(["doctor", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("everything works\n")
    (tmp_path / "m" / "config.pbtxt").write_text("max_batch_size: -1\nbackend: 'python'\n")
    assert main(["doctor", str(tmp_path), "--dry-run"]) == 1
    assert "config.pbtxt:1: field 'max_batch_size': expected 0 or more, got -1" in capsys.readouterr().out
