"""Every field of settings.json and model-settings.json, and every variable, is supported, reported or rejected."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dragoman
from dragoman.core.calls import Infer, Request
from dragoman.core.errors import InvalidInput
from dragoman.core.remarks import Field
from dragoman.core.tensor import Tensor
from dragoman.engine.model_files import model_settings
from dragoman.engine_setup import settings_for
from dragoman.plugins import built_in_runtimes
from dragoman_mlserver.fields import MODEL, PARAMETERS, SERVER, remarks_on
from dragoman_mlserver.files import (
    RUNTIMES,
    UNSUPPORTED,
    environment_paths,
    model_table,
    server_table,
    unsupported_reason,
)

# As the documentation of MLServer 1.7 lists them.
SERVER_FIELDS = """
debug parallel_workers parallel_workers_timeout environments_dir model_repository_implementation
model_repository_root model_repository_implementation_args load_models_at_startup server_name server_version
extensions host http_port root_path grpc_port grpc_max_message_length cors_settings metrics_endpoint
metrics_port metrics_rest_server_prefix metrics_dir use_structured_logging logging_settings kafka_enabled
kafka_servers kafka_topic_input kafka_topic_output tracing_server cache_enabled cache_size gzip_enabled
"""
MODEL_FIELDS = """
name platform versions inputs outputs implementation parallel_workers warm_workers max_batch_size max_batch_time
cache_enabled parameters
"""
PARAMETER_FIELDS = """
uri version environment_path environment_tarball inference_pool_gid autogenerate_inference_pool_gid format
content_type extra
"""


def test_the_tables_have_every_field() -> None:
    assert sorted(SERVER) == sorted(SERVER_FIELDS.split())
    assert sorted(MODEL) == sorted(MODEL_FIELDS.split())
    assert sorted(PARAMETERS) == sorted(PARAMETER_FIELDS.split())
    for table in (SERVER, MODEL, PARAMETERS):
        assert all(field.note for field in table.values() if field.effect != "same")
    assert {known.runtime for known in RUNTIMES.values()} <= set(built_in_runtimes())


EFFECTS = {
    "same": """
        http_port grpc_port server_name gzip_enabled use_structured_logging metrics_endpoint root_path cors_settings
        load_models_at_startup kafka_topic_input kafka_topic_output name implementation platform max_batch_time
        parameters versions uri version content_type extra
    """,
    "different": """
        host grpc_max_message_length parallel_workers metrics_port metrics_rest_server_prefix cache_enabled inputs
        outputs max_batch_size
    """,
    "unused": """
        debug parallel_workers_timeout server_version extensions environments_dir metrics_dir logging_settings
        cache_size model_repository_implementation_args warm_workers format inference_pool_gid
        autogenerate_inference_pool_gid
    """,
    "missing": "tracing_server kafka_enabled kafka_servers",
    "rejected": "model_repository_root model_repository_implementation environment_path environment_tarball",
}
# Where it is not null.
DEFAULTS: dict[str, Any] = {
    "debug": True,
    "parallel_workers_timeout": 5,
    "extensions": [],
    "cache_size": 100,
    "model_repository_root": ".",
    "model_repository_implementation_args": {},
    "kafka_enabled": False,
    "kafka_servers": "localhost:9092",
    "warm_workers": False,
    "autogenerate_inference_pool_gid": False,
}


@pytest.mark.parametrize("table", [SERVER, MODEL, PARAMETERS], ids=["server", "model", "parameters"])
def test_the_effect_of_every_field(table: dict[str, Field]) -> None:
    effects = {name: effect for effect, names in EFFECTS.items() for name in names.split()}
    found = list(remarks_on(dict.fromkeys(table, "other"), table, "file", "prefix."))
    expected = {f"prefix.{name}": effects[name] for name in table if effects[name] not in ("same", "different")}
    assert {r.subject: r.effect for r in found if r.effect not in ("same", "different")} == expected
    assert {r.location for r in found} == {"file"}
    assert all(isinstance(r.note, str) for r in found)
    for value in (lambda name: DEFAULTS.get(name), lambda name: str(DEFAULTS.get(name, "none"))):
        kept = list(remarks_on({name: value(name) for name in table}, table, "file"))
        assert {r.effect for r in kept} <= {"same", "different"}
    unknown = list(remarks_on({"mine": 1}, table, "file"))
    assert [(r.subject, r.effect) for r in unknown] == [("mine", "same" if table is PARAMETERS else "unused")]


def test_what_is_said_about_every_field() -> None:
    """The tables as kept: effect, note, our setting, and the default for which nothing is said."""
    found = []
    for file, table in (("settings.json", SERVER), ("model-settings.json", MODEL), ("parameters", PARAMETERS)):
        for name, field in table.items():
            setting = f" -> {field.setting}" if field.setting else ""
            default = f" unless {json.dumps(field.default)}" if field.default is not None else ""
            found.append(f"{file} {name} {field.effect}: {field.note}{setting}{default}".rstrip())
    found += [f"implementation {name}: {unsupported_reason(f'{name}.any.Class')}" for name in UNSUPPORTED]
    assert found == (Path(__file__).parent / "fields.txt").read_text().splitlines()


@pytest.mark.parametrize(
    ("given", "expected_value"),
    [
        (
            {
                "cors_settings": {
                    "allow_methods": ["GET", "PUT"],
                    "allow_headers": ["a", "b"],
                    "expose_headers": ["c"],
                    "allow_origin_regex": "https://.*",
                    "max_age": "5",
                }
            },
            {
                "cors_origins": "",
                "cors_origin_regex": "https://.*",
                "cors_credentials": False,
                "cors_methods": "GET,PUT",
                "cors_headers": "a,b",
                "cors_expose": "c",
                "cors_max_age_s": 5,
            },
        ),
        ({"host": "0.0.0.0", "http_port": 1, "grpc_port": 2}, {"host": "0.0.0.0", "http_port": 1, "grpc_port": 2}),
        ({"server_name": "s", "gzip_enabled": False}, {"server_name": "s", "compress_responses": False}),
        ({"parallel_workers": 3}, {"replicas": 3}),
        ({"parallel_workers": 0}, {"placement": "thread"}),
        ({"grpc_max_message_length": 7}, {"max_body_bytes": 7}),
        ({"grpc_max_message_length": -1}, {"max_body_bytes": (1 << 31) - 1}),
        ({"use_structured_logging": True}, {"log_format": "json"}),
        ({"root_path": "/a", "load_models_at_startup": False}, {"root_path": "/a", "load_at_start": False}),
        ({"metrics_endpoint": "/m"}, {"metrics_path": "/m"}),
        ({"metrics_endpoint": None}, {"metrics_path": ""}),
        (
            {"cors_settings": {"allow_origins": ["https://a.org", "https://b.org"], "allow_credentials": True}},
            {
                "cors_origins": "https://a.org,https://b.org",
                "cors_origin_regex": "",
                "cors_credentials": True,
                "cors_methods": "GET",
                "cors_headers": "",
                "cors_expose": "",
                "cors_max_age_s": 600,
            },
        ),
        ({"kafka_enabled": False, "tracing_server": None, "metrics_port": 8082}, {}),
        (None, {}),
    ],
)
def test_settings_of_the_server(given: dict[str, Any] | None, expected_value: dict[str, Any], tmp_path: Path) -> None:
    assert server_table(given, tmp_path) == expected_value
    if given is not None:
        (tmp_path / "settings.json").write_text(json.dumps(given))
    settings = settings_for([str(tmp_path)])
    assert {name: getattr(settings, name) for name in expected_value} == expected_value
    assert expected_value.get("host", "127.0.0.1") == settings.host


CLIENTS = {"responses_as": "mlserver", "grpc_output_contents": "as-request"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ('{"name": "m"}', {**CLIENTS, "forward_headers": "*"}),
        ('{"name": "m", "max_batch_size": 1}', {**CLIENTS, "forward_headers": "*"}),
        ('{"name": "m", "max_batch_size": 8}', CLIENTS),
        ("{", {**CLIENTS, "forward_headers": "*"}),
    ],
)
def test_what_clients_of_mlserver_rely_on_is_the_default_of_its_folders(
    fields: str, expected: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model-settings.json").write_text(fields)
    assert server_table(None, tmp_path) == expected
    assert settings_for([str(tmp_path)], {"responses_as": "", "forward_headers": "x-a"}).forward_headers == "x-a"


@pytest.mark.parametrize("value", [True, "true", "True", "TRUE", 1, "1", False, "false", 0, "0", "", "2", "yes"])
def test_values_of_switches(value: Any, tmp_path: Path) -> None:
    """As pydantic reads them from JSON and from variables."""
    is_set = value in (True, "true", "True", "TRUE", "1")
    expected = {"log_format": "json" if is_set else "text"}
    assert server_table({"use_structured_logging": value}, tmp_path) == expected


def test_the_name_of_the_server_is_in_a_folder_above(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    (tmp_path / "settings.json").write_text('{"server_name": "ours"}')
    value = {"name": "m", "implementation": "mine.Model"}
    assert model_table(value, folder / "model-settings.json")["parameters"]["server_name"] == "ours"


COUNTING = """
from mlserver import MLModel
from mlserver.codecs import decode_args

class Counting(MLModel):
    calls = 0

    @decode_args
    async def predict(self, words: list[str]) -> list[str]:
        Counting.calls += 1
        return [f"{words[0]} {Counting.calls}"]
"""


@pytest.mark.parametrize(
    ("server", "model", "is_cached"),
    [(True, True, True), (True, False, False), (False, True, False), (None, True, False), ("variable", True, True)],
)
async def test_responses_are_cached_if_the_server_and_the_model_say_so(
    server: Any, model: bool, is_cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "counting.py").write_text(COUNTING)
    settings = {"name": "m", "implementation": "counting.Counting", "cache_enabled": model, "parallel_workers": 0}
    (folder / "model-settings.json").write_text(json.dumps(settings))
    if server == "variable":
        monkeypatch.setenv("MLSERVER_CACHE_ENABLED", "true")
    elif server is not None:
        (tmp_path / "settings.json").write_text(json.dumps({"cache_enabled": server}))
    found = []
    async with dragoman.open_engine(str(tmp_path)) as engine:
        for word in "aba":
            call = Infer({"words": Tensor.of(np.array([word], object))})
            (output,) = (await engine.call(Request(call, "m"))).answer.outputs.values()
            found += output.data.ravel().tolist()
    assert found == [b"a 1", b"b 2", b"a 1" if is_cached else b"a 3"]


@pytest.mark.parametrize("name", [n for n, f in SERVER.items() if f.effect == "rejected"])
def test_unsupported_fields_are_rejected_with_an_alternative(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=rf"settings.json: '{name}' is not supported: .{{20,}}"):
        server_table({name: "x"}, tmp_path)


IGNORED = [n for n, f in SERVER.items() if f.effect in ("missing", "unused") and not f.default]


@pytest.mark.parametrize("name", [*IGNORED, "max_workers"])
def test_ignored_fields_are_logged(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert server_table({name: "x"}, tmp_path) == {}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"'{name}' is ignored: " in record.getMessage()


def test_cors_in_variables(tmp_path: Path) -> None:
    found = server_table({"cors_settings": '{"allow_origins": ["a"]}'}, tmp_path)
    assert (found["cors_origins"], found["cors_methods"]) == ("a", "GET")
    lists = ("allow_origins", "allow_methods", "allow_headers", "expose_headers")
    for given in ("{", "[1]", "5", 5, [1], {"max_age": "x"}, *({name: "https://a.org"} for name in lists)):
        with pytest.raises(InvalidInput, match=r"settings.json: invalid value of 'cors_settings': "):
            server_table({"cors_settings": given}, tmp_path)


def test_variables_are_used_where_the_file_has_no_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLSERVER_HTTP_PORT", "1234")
    monkeypatch.setenv("MLSERVER_GRPC_PORT", "1235")
    (tmp_path / ".env").write_text("# theirs\nMLSERVER_SERVER_NAME='named'\nexport MLSERVER_GRPC_PORT=1\nOTHER=1\n")
    assert server_table({"http_port": 5}, tmp_path) == {"http_port": 5, "grpc_port": "1235", "server_name": "named"}
    (tmp_path / "settings.json").write_text('{"http_port": 5}')
    assert settings_for([str(tmp_path)], {"http_port": 6}).http_port == 6
    assert settings_for([str(tmp_path)]).grpc_port == 1235


def test_the_path_in_variables(tmp_path: Path) -> None:
    file = tmp_path / "model.joblib"
    file.touch()
    folder, implementation = str(tmp_path), {"MLSERVER_MODEL_IMPLEMENTATION": "mlserver_sklearn.SKLearnModel"}
    assert environment_paths({}) == []
    assert environment_paths({"MLSERVER_MODELS_DIR": folder}) == [folder]
    assert environment_paths({"MLSERVER_MODELS_DIR": "/else", "MLSERVER_MODEL_URI": folder, **implementation}) == [
        folder
    ]
    assert environment_paths({"MLSERVER_MODEL_URI": str(file), **implementation}) == [folder]
    assert environment_paths({"MLSERVER_MODEL_URI": str(file)}) == [str(file)]


def test_settings_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLSERVER_MODEL_MAX_BATCH_SIZE", "7")
    monkeypatch.setenv("MLSERVER_MODEL_URI", "./elsewhere")
    monkeypatch.setenv("MLSERVER_MODEL_EXTRA", '{"method": "predict"}')
    value: dict[str, Any] = {
        "name": "m",
        "implementation": "mlserver_xgboost.XGBoostModel",
        "max_batch_time": 0.25,
        "parallel_workers": 2,
        "warm_workers": True,
        "parameters": {"uri": "./model.ubj", "version": "v1", "format": "ubj"},
    }
    assert model_table(value, tmp_path / "model-settings.json") == {
        "name": "m",
        "version": "v1",
        "runtime": "mlserver",
        "uri": "./model.ubj",
        "max_batch_size": 7,
        "max_batch_wait_s": 0.25,
        "replicas": 2,
        "parameters": {
            "library": "xgboost",
            "source": str(tmp_path / "model-settings.json"),
            "server_name": "mlserver",
            "model_settings": {
                **value,
                "max_batch_size": "7",
                "parameters": {**value["parameters"], "extra": {"method": "predict"}},
            },
        },
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"implementation": "mlserver_alibi_explain.AlibiExplainRuntime"}, "explainers are not supported"),
        ({"implementation": "mlserver_alibi_detect.AlibiDetectRuntime"}, "drift detectors are not supported"),
        ({"implementation": "mlserver_mllib.MLlibModel"}, "convert the model to ONNX"),
        ({"implementation": "mlserver-mllib.MLlibModel"}, "convert the model to ONNX"),
        ({"implementation": "tempo.mlserver.InferenceRuntime"}, "Tempo is retired"),
        ({"implementation": "Mine"}, "expected module.Class, got 'Mine'"),
        ({"parameters": {"environment_tarball": "e.tar.gz"}}, "install the packages in Dragoman's environment"),
        ({"max_batch_size": "many"}, "invalid value of 'max_batch_size': 'many'"),
        ({"parallel_workers": "many"}, "invalid value of 'parallel_workers': 'many'"),
    ],
)
def test_unsupported_models_are_rejected_with_an_alternative(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match=message):
        model_table(given, tmp_path / "model-settings.json")


@pytest.mark.parametrize(("named", "files"), [(n, k.files) for n, k in RUNTIMES.items()])
def test_files_of_mlserver_runtimes_are_found(named: str, files: tuple[str, ...], tmp_path: Path) -> None:
    for file in files:
        (tmp_path / file).write_bytes(b"")
    found = model_table({"implementation": named, "parameters": {"uri": "."}}, tmp_path / "model-settings.json")
    assert found["uri"] == (files[0] if files else ".")


def test_settings_that_nest_deep(tmp_path: Path) -> None:
    (tmp_path / "model-settings.json").write_text('{"a":' * 100_000)
    with pytest.raises(InvalidInput, match=r"model.settings\.json"):
        model_settings(tmp_path)
