"""Folders of LMI: serving.properties and the environment variables of its containers."""

import json
from pathlib import Path
from typing import Any

import pytest

import dragoman
from dragoman import hooks
from dragoman.core.errors import InvalidInput
from dragoman.engine.model_files import model_settings, server_tables
from dragoman.engine.repository import DiskRepository
from dragoman.engine_setup import settings_for


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that looks like one of a text model."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


def spec(folder: Path) -> Any:
    (source,) = DiskRepository([str(folder)], {}).scan().values()
    (found,) = source.specs()
    return found


def test_properties_become_settings(folder: Path) -> None:
    (folder / "serving.properties").write_text(
        "# of an older server\nengine=Python\noption.model_id=.\noption.dtype=bf16\noption.rolling_batch = auto\n"
        "option.max_rolling_batch_size: 64\noption.max_model_len=512\noption.output_formatter=sse\n"
        "option.tgi_compat=true\noption.predict_timeout=90\njob_queue_size=7\nunknown=1\n"
    )
    assert model_settings(folder) == {
        "uri": str(folder.resolve()),
        "parameters": {"dtype": "bfloat16", "max_batch": 64, "max_context": 512},
        "protocols": {"lmi": {"output_formatter": "sse", "tgi_compat": True, "rolling_batch": "auto"}},
        "timeout_s": 90.0,
        "max_queue": 7,
    }
    assert spec(folder).uri == str(folder.resolve())


def test_the_file_takes_precedence_over_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTION_TGI_COMPAT", "true")
    monkeypatch.setenv("OPTION_MAX_MODEL_LEN", "100")
    found = spec(folder)
    assert found.protocols == {"lmi": {"tgi_compat": True}}
    assert found.parameters == {"max_context": 100}
    (folder / "serving.properties").write_text("option.tgi_compat=false")
    found = spec(folder)
    assert found.protocols == {"lmi": {"tgi_compat": False}}
    assert found.parameters == {"max_context": 100}


def test_the_environment_names_the_model(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("HF_MODEL_ID", str(folder))
    assert spec(elsewhere).uri == str(folder)


def test_variables_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVING_INFERENCE_ADDRESS", "http://0.0.0.0:8085")
    monkeypatch.setenv("SERVING_MAX_REQUEST_SIZE", "1000")
    monkeypatch.setenv("SERVING_SOMETHING_ELSE", "1")
    found = {k: v for _, table in server_tables(tmp_path) for k, v in table.items()}
    assert found == {"host": "0.0.0.0", "http_port": 8085, "max_body_bytes": 1000}
    monkeypatch.setenv("SERVING_JOB_QUEUE_SIZE", "many")
    with pytest.raises(InvalidInput, match="invalid value of environment variable SERVING_JOB_QUEUE_SIZE: 'many'"):
        server_tables(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("option.model_id=meta/llama", "folder 'meta/llama' not found; models are not downloaded"),
        ("option.model_id=s3://bucket/x", "models are not downloaded"),
        ("option.max_model_len=long", "invalid value of 'option.max_model_len': 'long'"),
        ("option.tgi_compat=perhaps", "invalid value of 'option.tgi_compat'"),
        ("just words", "expected lines of name=value"),
    ],
)
def test_invalid_values_are_rejected(folder: Path, text: str, message: str) -> None:
    (folder / "serving.properties").write_text(text)
    with pytest.raises(InvalidInput, match=message):
        model_settings(folder)


def test_ignored_properties_are_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "serving.properties").write_text("option.tensor_parallel_degree=4\noption.quantize=awq")
    model_settings(folder)
    assert "'option.tensor_parallel_degree' is ignored: a model runs on one device" in caplog.text
    assert "'option.quantize' is ignored" in caplog.text


async def test_ignored_properties_are_logged_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "serving.properties").write_text("option.quantize=awq")
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    async with dragoman.open_engine(str(folder)) as engine:
        (deployment,) = engine.deployments()
        assert deployment.state == "UNAVAILABLE"
    assert caplog.text.count("'option.quantize' is ignored") == 1


def test_the_doctor_reports_properties(folder: Path) -> None:
    (folder / "serving.properties").write_text("option.dtype=bf16\noption.quantize=awq\nengine=Python")
    every = [remark for survey in hooks.all_of("surveys").values() for remark in survey(folder)]
    found = {remark.subject: remark.effect for remark in every if remark.location == "serving.properties"}
    assert found == {"option.dtype": "same", "option.quantize": "missing", "engine": "unused"}
    assert "settings.json" not in {remark.location for remark in every}  # there is none


def test_environment_of_sagemaker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = settings_for([str(tmp_path)], {"sagemaker": True})
    assert (result.host, result.http_port, result.grpc_port) == ("0.0.0.0", 8080, -1)
    monkeypatch.setenv("SAGEMAKER_BIND_TO_PORT", "9001")
    assert settings_for([str(tmp_path)], {"sagemaker": True}).http_port == 9001
    assert settings_for([str(tmp_path)], {"sagemaker": True}, {"http_port": 5}).http_port == 5


@pytest.mark.parametrize(
    ("value", "installed", "runtime"), [("vllm", True, "vllm"), ("vllm", False, "llm"), ("auto", True, "llm")]
)
def test_vllm_is_used_if_it_is_installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, value: str, installed: bool, runtime: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed and name == "vllm" else None)
    (folder / "serving.properties").write_text(f"option.rolling_batch={value}\noption.max_rolling_batch_size=4")
    (folder / "tokenizer.json").write_text("{}")
    found = spec(folder)
    assert (found.runtime, found.parameters, found.protocols) == (
        runtime,
        {"max_batch": 4},
        {"lmi": {"rolling_batch": value}},
    )
