"""Recognition of model files and folders by suffix, and by first bytes if a suffix is shared."""

import re
import sys
import zipfile
from pathlib import Path

import pytest

from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.spec import ModelSpec
from dragoman.engine.repository import DiskRepository
from dragoman.plugins import runtime
from dragoman.runtimes.files import check_pickle
from dragoman.runtimes.recognise import model_file, recognise

XGBOOST_JSON = b'{"learner":{"attributes":{}}}'
XGBOOST_UBJ = b"{L\x00\x00\x00\x00\x00\x00\x00\x07learner{L"
LIGHTGBM = b"tree\nversion=v4\n"


@pytest.mark.parametrize(
    ("name", "content", "runtime"),
    [
        ("m.joblib", b"", "sklearn"),
        ("m.pkl", b"", "sklearn"),
        ("m.PICKLE", b"", "sklearn"),
        ("m.ubj", XGBOOST_UBJ, "xgboost"),
        ("m.json", XGBOOST_JSON, "xgboost"),
        ("settings.json", b'{"debug": true}', None),
        ("m.model", XGBOOST_UBJ, "xgboost"),
        ("m.model", b"\x0a\x0e", None),
        ("m.bst", XGBOOST_UBJ, "xgboost"),
        ("m.bst", LIGHTGBM, "lightgbm"),
        ("m.txt", LIGHTGBM, "lightgbm"),
        ("requirements.txt", b"treelite\n", None),
        ("m.lgb", LIGHTGBM, "lightgbm"),
        ("m.cbm", b"CBM1", "catboost"),
        ("m.catboost", b"CBM1", "catboost"),
        ("m.onnx", b"", "onnx"),
        ("m.pt2", b"", "torch"),
        ("m.py", b"", "python"),
        ("README.md", b"", None),
        ("m.csv", b"", None),
    ],
)
def test_files(tmp_path: Path, name: str, content: bytes, runtime: str | None) -> None:
    (tmp_path / name).write_bytes(content)
    assert recognise(tmp_path / name) == runtime


def _archive(path: Path, *members: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for member in members:
            archive.writestr(f"m/{member}", "")
    return path


def test_torchscript_is_distinguished_from_weights(tmp_path: Path) -> None:
    assert recognise(_archive(tmp_path / "a.pt", "data.pkl", "constants.pkl", "code/__torch__.py")) == "torch"
    assert recognise(_archive(tmp_path / "b.pth", "data.pkl", "data/0")) is None
    (tmp_path / "c.ts").write_text("export const a = 1")
    assert recognise(tmp_path / "c.ts") is None


def test_folders(tmp_path: Path) -> None:
    assert recognise(tmp_path) is None
    assert recognise(tmp_path / "missing") is None
    (tmp_path / "tf").mkdir()
    (tmp_path / "tf" / "saved_model.pb").touch()
    assert recognise(tmp_path / "tf") == "tensorflow"
    assert model_file(tmp_path) == tmp_path / "tf"
    assert model_file(tmp_path / "tf") == tmp_path / "tf"
    (tmp_path / "model.py").touch()
    assert recognise(tmp_path) == "python"
    assert model_file(tmp_path) == tmp_path
    # An MLflow model may hold its code.
    (tmp_path / "MLmodel").touch()
    assert recognise(tmp_path) == "mlflow"
    assert model_file(tmp_path) == tmp_path


def test_a_pretrained_model_needs_its_configuration_and_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"], "model_type": "bert"}')
    assert recognise(tmp_path) is None
    for name in ("model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"):
        (tmp_path / name).touch()
        assert recognise(tmp_path) == "huggingface"
        assert model_file(tmp_path) == tmp_path
        (tmp_path / name).unlink()
    (tmp_path / "model.safetensors").touch()
    for other in ('{"debug": true}', "[]", "{"):
        (tmp_path / "config.json").write_text(other)
        assert recognise(tmp_path) is None
    # Any other runtime that recognises the folder has priority.
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "model.py").touch()
    assert recognise(tmp_path) == "python"


def test_recognition_of_decoders(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    assert recognise(tmp_path) == "llm"
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "model.onnx").touch()  # the layout of exporters
    assert recognise(tmp_path) is None
    (tmp_path / "model.safetensors").touch()
    assert recognise(tmp_path) == "llm"
    (tmp_path / "tokenizer.json").touch()
    assert recognise(tmp_path) == "llm"
    (tmp_path / "config.json").write_text("{")
    assert recognise(tmp_path) == "llm"
    assert model_file(tmp_path) == tmp_path
    (tmp_path / "config.json").write_text('{"architectures": ["BertForMaskedLM"], "model_type": "bert"}')
    assert recognise(tmp_path) == "huggingface"


def test_files_that_do_not_match_their_suffix_are_rejected(tmp_path: Path) -> None:
    booster = "expected a text file of save_model of LightGBM or a JSON or UBJSON file of save_model of XGBoost"
    for name, reason in (
        ("model.pt", "expected a program of TorchScript or torch.export, not weights"),
        ("model.pth", "expected a program of TorchScript or torch.export"),
        ("model.json", booster),
        ("model.txt", booster),
    ):
        path = tmp_path / name
        path.write_bytes(b"{}")
        for location in (path, tmp_path):
            with pytest.raises(InvalidInput, match=re.escape(f"'{name}' is not a model: {reason}")):
                DiskRepository([str(location)], {}).scan()
        path.unlink()


def test_a_folder_with_one_model(tmp_path: Path) -> None:
    for name in ("README.md", ".hidden.joblib", "model-settings.json", "helpers.py"):
        (tmp_path / name).write_text("{}")
    assert model_file(tmp_path) is None
    (tmp_path / "b.joblib").touch()
    assert model_file(tmp_path) == tmp_path / "b.joblib"
    (tmp_path / "a.onnx").touch()
    with pytest.raises(ModelFailed, match=r"several models: a\.onnx, b\.joblib; .*parameters\.uri"):
        model_file(tmp_path)
    (tmp_path / "model.py").touch()
    assert model_file(tmp_path) == tmp_path  # the runtime of Python files takes the folder


def test_a_decoder_that_was_exported_to_openvino(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "openvino_model.xml").write_text("<net/>")
    assert recognise(tmp_path) == "openvino_genai"
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert recognise(tmp_path) == "llm"


def test_a_pickle_is_rejected_before_its_framework_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.pt2").touch()
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ModelFailed, match="start with --allow-pickle"):
        runtime("torch").load(ModelSpec(name="m", runtime="torch", uri=str(tmp_path / "m.pt2"))).load()


def test_a_pickle_names_all_that_is_missing_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "line.joblib").touch()
    monkeypatch.setattr("dragoman.runtimes.files.is_installed", lambda package: package != "sklearn")
    with pytest.raises(ModelFailed) as raised:
        check_pickle(tmp_path / "line.joblib", ModelSpec(name="line", runtime="sklearn", uri="line.joblib"))
    assert "start with --allow-pickle" in raised.value.message
    assert raised.value.message.endswith("; it also needs sklearn: pip install 'dragoman[sklearn]'")


def test_engines_of_tensorrt(tmp_path: Path) -> None:
    for name in ("m.plan", "m.engine"):
        (tmp_path / name).write_bytes(b"ftrt")
        assert recognise(tmp_path / name) == "tensorrt"
    spec = ModelSpec(name="m", runtime="tensorrt", uri=str(tmp_path / "m.plan"))
    with pytest.raises(ModelFailed, match="can run code when it is loaded: start with --allow-pickle"):
        runtime("tensorrt").load(spec).load()


def test_an_engine_needs_a_gpu(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    (tmp_path / "m.plan").write_bytes(b"ftrt")
    spec = ModelSpec(name="m", runtime="tensorrt", uri=str(tmp_path / "m.plan"), allow_pickle=True)
    with pytest.raises(ModelFailed, match=r"'m\.plan' needs an NVIDIA GPU, but none was found"):
        runtime("tensorrt").load(spec).load()


@pytest.mark.parametrize(
    ("name", "reason"),
    [("m.netdef", "Caffe2 is retired; convert"), ("m.params", "MXNet is retired; convert"), ("m.pmml", "as ONNX")],
)
def test_retired_formats(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(InvalidInput, match=f"{name}: .*{reason}"):
        DiskRepository([str(tmp_path)], {}).scan()


@pytest.mark.parametrize(
    ("files", "runtime_name"),
    [
        ({"m.onnx": b""}, "onnx"),
        ({"model.joblib": b""}, "sklearn"),
        ({"model.pkl": b""}, "sklearn"),
        ({"model.ubj": XGBOOST_UBJ}, "xgboost"),
        ({"model.bst": XGBOOST_UBJ}, "xgboost"),
        ({"m.lgb": LIGHTGBM}, "lightgbm"),
        ({"model.txt": LIGHTGBM}, "lightgbm"),
        ({"model.cbm": b"CBM1"}, "catboost"),
        ({"model.pt2": b""}, "torch"),
        ({"model.savedmodel/saved_model.pb": b""}, "tensorflow"),
        ({"model/MLmodel": b""}, "mlflow"),
        ({"MLmodel": b"", "model.pkl": b""}, "mlflow"),
        ({"model/config.json": b'{"model_type": "bert"}', "model/model.safetensors": b""}, "huggingface"),
        ({"model.xml": b'<?xml version="1.0"?>\n<net name="m" version="11">', "model.bin": b""}, "openvino"),
        ({"model.plan": b"ftrt"}, "tensorrt"),
        ({"model.py": b"def predict(x): ..."}, "python"),
        ({"model.py": b"class TritonPythonModel: ..."}, "triton"),
        ({"graph.toml": b""}, "graph"),
    ],
)
def test_formats_in_folders_of_versions(tmp_path: Path, files: dict[str, bytes], runtime_name: str) -> None:
    """The layout of the repositories of Triton, and of KServe's servers with several models."""
    for name, content in files.items():
        path = tmp_path / "iris" / "2" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (spec,) = DiskRepository([str(tmp_path)], {}).scan()["iris"].state().specs
    assert (spec.version, spec.runtime or recognise(Path(spec.uri))) == ("2", runtime_name)
