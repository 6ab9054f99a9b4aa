"""OpenVINO GenAI behind the text APIs, if it and its exporter are installed."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .engine_tests import EngineServer, EngineTests, OwnEngine, running_server, train_model

pytest.importorskip("openvino_genai", reason="OpenVINO GenAI is not installed")
pytest.importorskip("optimum.intel", reason="optimum-intel, which exports the model, is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", name="server")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    root = tmp_path_factory.mktemp("openvino")
    folder = train_model(root / "learnt")
    exported = root / "served" / "story"
    command = ["optimum-cli", "export", "openvino", "--task", "text-generation-with-past", "--weight-format", "fp32"]
    program = str(Path(sys.executable).with_name(command[0]))
    subprocess.run([program, *command[1:], "--model", str(folder), str(exported)], check=True, capture_output=True)
    (exported / "dragoman.toml").write_text('[model]\nparameters = { dtype = "float32" }\n')
    own = OwnEngine(folder)
    with running_server(root / "served", own) as found:
        yield found
    own.close()


class TestOpenVino(EngineTests):
    def is_busy(self, engine: Any) -> bool:
        return bool(engine.engine.pipeline.has_non_finished_requests())

    @pytest.mark.parametrize(
        ("parameters", "named"),
        [
            ({"logit_bias": {"5": 2}}, "logit_bias"),
            ({"allowed_token_ids": [5]}, "allowed_token_ids"),
            ({"bad_sequences": ["the"]}, "bad_words"),
            ({"top_n_tokens": 2}, "top_logprobs"),
            ({"decoder_input_details": True}, "prompt_logprobs"),
            ({"guided_regex": "[a-("}, "grammar"),
        ],
    )
    def test_unsupported_parameters_are_rejected(
        self, server: EngineServer, parameters: dict[str, Any], named: str
    ) -> None:
        status, response = server.post("/invocations", {"inputs": "The", "parameters": parameters})
        assert status == 424
        assert named in response["error"]
