"""OpenVINO GenAI behind the text APIs, where it is installed with what exports a folder to it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .engine_house import EngineTests, Own, Served, make, served

pytest.importorskip("openvino_genai", reason="OpenVINO GenAI is not installed")
pytest.importorskip("optimum.intel", reason="optimum-intel, which exports the model, is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", name="served")
def _served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    place = tmp_path_factory.mktemp("openvino")
    folder = make(place / "learnt")
    exported = place / "served" / "story"
    command = ["optimum-cli", "export", "openvino", "--task", "text-generation-with-past", "--weight-format", "fp32"]
    program = str(Path(sys.executable).with_name(command[0]))
    subprocess.run([program, *command[1:], "--model", str(folder), str(exported)], check=True, capture_output=True)
    (exported / "dragoman.toml").write_text('[model]\nparameters = { dtype = "float32" }\n')
    own = Own(folder)
    with served(place / "served", own) as found:
        yield found
    own.close()


class TestOpenVino(EngineTests):
    def works(self, engine: Any) -> bool:
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
    def test_what_it_does_not_have(self, served: Served, parameters: dict[str, Any], named: str) -> None:
        status, answer = served.post("/invocations", {"inputs": "The", "parameters": parameters})
        assert status == 424
        assert named in answer["error"]
