"""Our settings for a model-settings.json and for variables, as values."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from dragoman.core.errors import InvalidInput
from dragoman.core.spec import ModelSpec
from dragoman_mlserver.files import (
    DIALECT,
    MODEL_FILES,
    environment_paths,
    environment_table,
    file_of,
    known_implementation,
    model_table,
    server_table,
    unsupported_reason,
    variables,
)
from dragoman_mlserver.library import check
from dragoman_mlserver.model import install


def table(folder: Path, given: dict[str, Any], *files: str) -> dict[str, Any]:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return model_table(given, folder / "model-settings.json")


# --- implementations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "library", "files"),
    [
        ("mlserver_sklearn.SKLearnModel", "sklearn", ("model.joblib", "model.pickle", "model.pkl")),
        ("mlserver_sklearn.sklearn.SKLearnModel", "sklearn", ("model.joblib",)),
        ("mlserver_xgboost.XGBoostModel", "xgboost", ("model.bst", "model.json", "model.ubj")),
        ("mlserver_lightgbm.LightGBMModel", "lightgbm", ("model.bst",)),
        ("mlserver_catboost.CatboostModel", "catboost", ("model.cbm", "model.bin")),
        ("mlserver_mlflow.MLflowRuntime", "mlflow", ()),
    ],
)
def test_runtimes_of_mlserver(tmp_path: Path, named: str, library: str, files: tuple[str, ...]) -> None:
    known = known_implementation(named)
    assert known is not None
    assert known.has_class
    given = {"name": "m", "implementation": named, "parameters": {"uri": "./a", "version": "v2"}}
    found = table(tmp_path, given)
    assert (found["runtime"], found["uri"], found["version"]) == ("mlserver", "./a", "v2")
    assert found["parameters"]["library"] == library
    assert found["parameters"]["model_settings"] == given
    assert found["parameters"]["source"] == str(tmp_path / "model-settings.json")
    assert found["parameters"]["server_name"] == "mlserver"
    for name in reversed(files):  # an earlier name comes first
        assert table(tmp_path, given, f"a/{name}")["uri"] == f"a/{name}"


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("mlserver_sklearn", "sklearn"),
        ("mlserver_xgboost", "xgboost"),
        ("mlserver_lightgbm", "lightgbm"),
        ("mlserver_catboost", "catboost"),
        ("mlserver_mlflow", "runtime"),
        ("mlserver_mlflow", "codecs"),
        ("mlserver_huggingface", "runtime"),
        ("mlserver_huggingface", "codecs"),
    ],
)
def test_packages_of_runtimes_are_one_module(name: str, module: str) -> None:
    install()
    runtimes = importlib.import_module("mlserver.runtimes")
    assert importlib.import_module(name) is runtimes
    assert importlib.import_module(f"{name}.{module}") is runtimes
    with pytest.raises(ImportError):
        importlib.import_module(f"{name}.other")


MODULES = {
    **{f"codecs.{name}": "codecs.adapted" for name in ("base64", "datetime", "numpy", "pandas", "string")},
    **{f"grpc.{name}": "grpc" for name in ("converters", "dataplane_pb2", "dataplane_pb2_grpc")},
    "codecs.lists": "codecs.json",
    "handlers.custom": "handlers",
    "metrics.context": "metrics",
    "version": "",
    "types.dataplane": "types",
    "types.model_repository": "types",
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_that_are_parts_of_others(name: str) -> None:
    install()
    whole = f"dragoman_mlserver.mlserver.{MODULES[name]}".removesuffix(".")
    assert importlib.import_module(f"mlserver.{name}") is importlib.import_module(whole)


def test_a_library_whose_files_have_any_name(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    for named, library in (
        ("mlserver_huggingface.HuggingFaceRuntime", "huggingface"),
        ("mlserver_mlflow.MLflowRuntime", "mlflow"),
    ):
        settings = {"name": "m", "implementation": named}
        parameters = {"library": library, "model_settings": settings}
        check(ModelSpec(name="m", runtime="mlserver", uri=str(tmp_path), parameters=parameters))


def test_tasks_of_transformers(tmp_path: Path) -> None:
    def found(**extra: Any) -> dict[str, Any]:
        parameters = {"uri": "./a", "version": "1", "format": None, "extra": extra}
        return table(tmp_path, {"implementation": "mlserver_huggingface.HuggingFaceRuntime", "parameters": parameters})

    ours = found(task="ner", device=-1)
    assert (ours["runtime"], ours["uri"], ours["version"]) == ("huggingface", "./a", "1")
    assert ours["parameters"] == {"task": "ner", "device": -1}
    theirs = found(task="text-generation")
    assert (theirs["runtime"], theirs["uri"], theirs["parameters"]["library"]) == ("mlserver", "./a", "huggingface")
    assert found(task="text-generation", pretrained_model="./b")["uri"] == "./b"
    for task in ("", "text-classification", "sentiment-analysis", "token-classification", "question-answering",
                 "image-classification", "feature-extraction"):  # fmt: skip
        assert found(task=task)["runtime"] == "huggingface"


def test_classes_of_users(tmp_path: Path) -> None:
    assert table(tmp_path, {"implementation": "mine.Model"})["uri"] == "mine:Model"
    assert file_of("mine.Model", tmp_path) is None
    assert (
        table(tmp_path, {"implementation": "a.b.Model"}, "a/b/__init__.py")["uri"]
        == f"{tmp_path}/a/b/__init__.py:Model"
    )
    found = table(tmp_path, {"implementation": "a.b.Model"}, "a/b.py")
    assert (found["uri"], found["runtime"]) == (f"{tmp_path}/a/b.py:Model", "mlserver")
    assert found["parameters"]["model_settings"]["implementation"] == "a.b.Model"
    for named, message in (
        ("Model", "'implementation': expected module.Class, got 'Model'"),
        (5, "'implementation': expected text, got 5"),
        ("tempo.Model", "implementation 'tempo.Model': Tempo is retired"),
        ("mlserver_alibi-explain.Model", "explainers are not supported"),
    ):
        with pytest.raises(InvalidInput) as error:
            table(tmp_path, {"implementation": named})
        assert error.value.message.startswith(f"{tmp_path}/model-settings.json: ")
        assert message in error.value.message
    for package in ("mlserver_alibi_explain", "mlserver_alibi_detect", "tempo", "mlserver_mllib"):
        assert unsupported_reason(f"{package}.any.Class")
    assert unsupported_reason("mine.Model") == ""


def test_tensors_and_parameters_of_a_model_without_an_implementation(tmp_path: Path) -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1], "parameters": {"content_type": "np", "other": 1}}
    plain = {"name": "y", "datatype": "FP32", "shape": [1], "parameters": None}
    found = table(
        tmp_path,
        {"inputs": [tensor, 5], "outputs": [plain], "parameters": {"uri": "a", "extra": {"b": 1, "c": None}, "d": 2}},
    )
    described = {"name": "x", "datatype": "FP32", "shape": [1], "content_type": "np"}
    assert found == {
        "uri": "a",
        "inputs": [described, 5],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [1]}],
        "parameters": {"b": 1, "d": 2},
    }


# --- fields ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"name": "m", "platform": "p"}, {"name": "m", "platform": "p"}),
        ({"max_batch_size": 8, "max_batch_time": "0.5"}, {"max_batch_size": 8, "max_batch_wait_s": 0.5}),
        ({"max_batch_size": "8"}, {"max_batch_size": 8}),
        ({"max_batch_size": 0}, {"max_batch_size": 1}),
        ({"max_batch_size": ""}, {}),
        ({"max_batch_size": None}, {}),
        ({"parallel_workers": 3}, {"replicas": 3}),
        ({"parallel_workers": "0"}, {"placement": "thread"}),
        ({"parameters": {"version": 2}}, {"version": "2"}),
        ({"cache_enabled": True}, {}),
    ],
)
def test_fields_of_a_model(tmp_path: Path, given: dict[str, Any], expected: dict[str, Any]) -> None:
    found = table(tmp_path, {"implementation": "mine.Model", **given})
    assert {name: value for name, value in found.items() if name not in ("runtime", "uri", "parameters")} == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"inputs": {}}, "'inputs': expected a list, got {}"),
        ({"outputs": "x"}, "'outputs': expected a list, got 'x'"),
        ({"versions": 1}, "'versions': expected a list, got 1"),
        ({"parameters": []}, "'parameters': expected an object, got []"),
        ({"parameters": {"extra": 1}}, "'extra': expected an object, got 1"),
        ({"parameters": {"uri": 1}}, "'uri': expected text, got 1"),
        ({"parameters": {"version": []}}, "'version': expected text, got []"),
        ({"max_batch_size": "many"}, "invalid value of 'max_batch_size': 'many'"),
        ({"max_batch_time": []}, "invalid value of 'max_batch_time': []"),
        ({"parallel_workers": "x"}, "invalid value of 'parallel_workers': 'x'"),
        ({"parameters": {"environment_path": "e"}}, "'parameters.environment_path' is not supported"),
    ],
)
def test_invalid_fields_are_named(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as error:
        table(tmp_path, {"implementation": "mine.Model", **given})
    assert error.value.message.startswith(f"{tmp_path}/model-settings.json: {message}")


def test_fields_of_the_server_in_folders_above(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b" / "c" / "d"
    given = {"implementation": "mine.Model", "cache_enabled": True}

    def found() -> tuple[Any, Any]:
        value = model_table(given, folder / "model-settings.json")
        return value["parameters"]["server_name"], value.get("response_cache_bytes")

    folder.mkdir(parents=True)
    settings = json.dumps({"server_name": "ours", "cache_enabled": "true"})
    (tmp_path / "settings.json").write_text(settings)  # four folders above
    assert found() == ("mlserver", None)
    (tmp_path / "a" / "settings.json").write_text(settings)
    assert found() == ("ours", 16 << 20)
    (folder / "settings.json").write_text('{"server_name": "near", "cache_enabled": false}')
    assert found() == ("near", None)


# --- variables -------------------------------------------------------------------------------------------------------

DOTENV = """
# MLSERVER_HTTP_PORT=1
export MLSERVER_HTTP_PORT = "8000"
MLSERVER_HOST='::'
MLSERVER_MODEL_NAME=file
MLSERVER_MODEL_IMPLEMENTATION=mine.Model
MLSERVER_MODEL_PARAMETERS={"uri": "p", "version": "1"}
MLSERVER_MODEL_URI=u
MLSERVER_MODEL_INPUTS=[]
OTHER=1
MLSERVER_DEBUG
"""


def test_variables_of_a_file_and_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text(DOTENV)
    monkeypatch.setenv("MLSERVER_HOST", "127.0.0.2")
    monkeypatch.setenv("OTHER_HOST", "x")
    found = variables(tmp_path)
    assert found == {
        "MLSERVER_HTTP_PORT": "8000",
        "MLSERVER_HOST": "127.0.0.2",
        "MLSERVER_MODEL_NAME": "file",
        "MLSERVER_MODEL_IMPLEMENTATION": "mine.Model",
        "MLSERVER_MODEL_PARAMETERS": '{"uri": "p", "version": "1"}',
        "MLSERVER_MODEL_URI": "u",
        "MLSERVER_MODEL_INPUTS": "[]",
    }
    assert server_table(None, tmp_path) == {"http_port": "8000", "host": "127.0.0.2"}
    assert server_table({"http_port": 1}, tmp_path)["http_port"] == 1
    ours = environment_table(tmp_path)
    assert ours is not None
    assert (ours["name"], ours["uri"], ours["version"]) == ("file", "mine:Model", "1")
    assert ours["parameters"]["model_settings"]["parameters"] == {"uri": "p", "version": "1"}
    given = table(tmp_path, {"name": "own", "parameters": {"uri": "q"}})
    assert (given["name"], given["version"]) == ("own", "1")
    assert given["parameters"]["model_settings"]["parameters"] == {"uri": "q", "version": "1"}
    (tmp_path / "model-settings.json").write_text("{}")
    assert environment_table(tmp_path) is None  # the file describes the model
    monkeypatch.setenv("MLSERVER_MODEL_PARAMETERS", "{")
    with pytest.raises(InvalidInput, match=r"environment variable MLSERVER_MODEL_PARAMETERS: expected JSON, got '.': "):
        table(tmp_path, {})


def test_no_variables_describe_no_model(tmp_path: Path) -> None:
    assert environment_table(tmp_path) is None
    (tmp_path / ".env").write_bytes(b"MLSERVER_HOST=\xff\n")
    for read in (environment_table, variables, lambda folder: server_table(None, folder)):
        with pytest.raises(InvalidInput, match=r"\.env cannot be read: 'utf-8' codec"):
            read(tmp_path)


def test_paths_in_variables(tmp_path: Path) -> None:
    file = tmp_path / "model.joblib"
    file.touch()
    for given, expected in (
        ({}, []),
        ({"MLSERVER_MODELS_DIR": "m"}, ["m"]),
        ({"MLSERVER_MODELS_DIR": "m", "MLSERVER_MODEL_URI": "u"}, ["u"]),
        ({"MLSERVER_MODEL_URI": str(file)}, [str(file)]),
        ({"MLSERVER_MODEL_URI": str(file), "MLSERVER_MODEL_IMPLEMENTATION": "a.B"}, [str(tmp_path)]),
        ({"MLSERVER_MODEL_URI": "u", "MLSERVER_MODEL_IMPLEMENTATION": "a.B"}, ["u"]),
    ):
        assert environment_paths(given) == expected


def test_files_of_a_folder(tmp_path: Path) -> None:
    assert MODEL_FILES.model_table(tmp_path) is None
    for text, message in (("{", "cannot be read: "), ("[1]", ": expected a JSON object, got [1]")):
        for name, read in (
            ("model-settings.json", MODEL_FILES.model_table),
            ("settings.json", MODEL_FILES.server_table),
        ):
            (tmp_path / name).write_text(text)
            with pytest.raises(InvalidInput) as error:
                read(tmp_path)
            assert error.value.message.startswith(f"{tmp_path / name}")
            assert message in error.value.message
            (tmp_path / name).unlink()
    (tmp_path / "model-settings.json").write_text('{"implementation": "mine.Model"}')
    found = MODEL_FILES.model_table(tmp_path)
    assert found is not None
    assert found["uri"] == "mine:Model"
    location, settings = MODEL_FILES.server_table(tmp_path)
    assert location == str(tmp_path / "settings.json")
    assert settings == {"responses_as": "mlserver", "grpc_output_contents": "as-request", "forward_headers": "*"}


def test_what_clients_of_mlserver_read() -> None:
    assert DIALECT.unknown is not None
    assert DIALECT.unknown("m", "", ()) == "Model m not found"
    assert DIALECT.unknown("m", "2", ()) == "Model m with version 2 not found"
    assert DIALECT.unknown_to_load is not None
    assert DIALECT.unknown_to_load("m") == "Model m not found"
    assert (DIALECT.timeout, DIALECT.unloads_unknown) == ("none", False)
    assert DIALECT.handlers_first
    assert DIALECT.bare_streams
    assert DIALECT.length_shapes
