"""vLLM behind the text APIs, if it is installed, in an environment of its own, `pip install 'dragoman[vllm]'`."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dragoman.core.errors import WorkerLost
from dragoman.engine_setup import open_engine

from .engine_tests import NEW, PROMPTS, EngineServer, EngineTests, OwnEngine, running_server, train_model
from .test_vllm_restarts import request, text

pytest.importorskip("vllm", reason="vLLM is not installed; it needs an environment of its own", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", name="server")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    root = tmp_path_factory.mktemp("vllm")
    folder = train_model(root / "story")
    adapter(folder / "adapters" / "pirate")
    (folder / "dragoman.toml").write_text(
        '[model]\nruntime = "vllm"\nplacement = "thread"\n[model.parameters]\ndtype = "float32"\ncache_memory = 1\n'
        "arguments = { enforce_eager = true }\n"
    )
    own = OwnEngine(folder)
    with running_server(root, own) as found:
        yield found
    own.close()


def adapter(folder: Path) -> None:
    """Save a random LoRA adapter as PEFT does."""
    import torch
    from safetensors.torch import save_file

    draw, found = torch.Generator().manual_seed(1), {}
    for layer in range(2):
        for name, out in (("q_proj", 64), ("v_proj", 32)):
            before = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            found[f"{before}.lora_A.weight"] = torch.randn(4, 64, generator=draw) * 0.3
            found[f"{before}.lora_B.weight"] = torch.randn(out, 4, generator=draw) * 0.3
    folder.mkdir(parents=True)
    save_file(found, str(folder / "adapter_model.safetensors"))
    response = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(response))


class TestVllm(EngineTests):
    def is_busy(self, engine: Any) -> bool:
        return bool(engine.engine.engine.output_processor.has_unfinished_requests())

    def test_top_tokens_match_our_own_engine(self, server: EngineServer) -> None:
        expected = server.own.text(PROMPTS[0], top_logprobs=3, prompt_logprobs=0)
        response = server.lmi(PROMPTS[0], top_n_tokens=3, decoder_input_details=True, details=True)
        for token, beside in zip(expected.tokens, response["details"]["top_tokens"], strict=True):
            assert [each["id"] for each in beside] == [each.id for each in token.top]
            assert [each["log_prob"] for each in beside] == pytest.approx([e.logprob for e in token.top], abs=1e-4)
        assert [each["log_prob"] for each in response["details"]["prefill"]][1:] == pytest.approx(
            server.own.prefill(PROMPTS[0])[1:], abs=1e-4
        )

    def test_biases_and_forbidden_words(self, server: EngineServer) -> None:
        first = server.own.text("The").tokens[0]
        for ours, theirs in (
            ({"logit_bias": {first.id: -5.0}}, {"logit_bias": {str(first.id): -5.0}}),
            ({"logit_bias": {300: 50.0}}, {"logit_bias": {"300": 50.0}}),
            ({"allowed_token_ids": (300, 301)}, {"allowed_token_ids": [300, 301]}),
        ):
            expected = server.own.text("The", **ours)
            response = server.lmi("The", details=True, **theirs)
            assert [token["id"] for token in response["details"]["tokens"]] == [token.id for token in expected.tokens]

    def test_what_a_text_must_be(self, server: EngineServer) -> None:
        body = {"model": "story", "messages": [{"role": "user", "content": "Say yes or no."}], "max_tokens": 60}
        response = server.post_ok("/v1/chat/completions", {**body, "structured_outputs": {"choice": ["yes", "no"]}})
        assert response["choices"][0]["message"]["content"] in ("yes", "no")
        schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["one", "two"]}}}
        response = server.post_ok("/v1/chat/completions", {**body, "response_format": schema})
        assert json.loads(response["choices"][0]["message"]["content"]) in ("one", "two")
        status, response = server.post("/v1/chat/completions", {**body, "structured_outputs": {"regex": "[a-("}})
        assert status == 400, response
        assert server.lmi("The")["generated_text"] == server.own.text("The", max_new_tokens=NEW).whole

    def test_an_adapter_for_those_who_ask(self, server: EngineServer) -> None:
        expected = server.own.text("A class", adapter="pirate")
        body = {"inputs": "A class", "adapters": "pirate", "parameters": {"max_new_tokens": NEW, "details": True}}
        plain = {"inputs": "A class", "parameters": body["parameters"]}
        requests = [("/invocations", each) for each in (body, plain)]
        (_, adapted), (_, base) = server.post_together(requests)
        assert [token["id"] for token in adapted["details"]["tokens"]] == [token.id for token in expected.tokens]
        assert base["generated_text"] == server.own.text("A class").whole != expected.whole

    def test_the_best_of_several(self, server: EngineServer) -> None:
        sampled = {"best_of": 3, "do_sample": True, "seed": 5, "details": True}
        response = server.lmi("The", **sampled)["details"]
        found = [response["tokens"], *(each["tokens"] for each in response["best_of_sequences"])]
        means = [sum(token["log_prob"] for token in tokens) / len(tokens) for tokens in found]
        assert len(means) == 3
        assert means == sorted(means, reverse=True)


def engine_core() -> Any:
    """The process in which vLLM computes, a child of the worker process."""
    import psutil

    (found,) = [each for each in psutil.Process().children(recursive=True) if "EngineCore" in " ".join(each.cmdline())]
    return found


async def test_a_killed_engine_is_started_again(tmp_path: Path) -> None:
    """In a supervised worker process: its call fails, and the next one is answered by another engine."""
    folder = train_model(tmp_path / "story")
    (folder / "dragoman.toml").write_text(
        '[model]\nruntime = "vllm"\nheartbeat_s = 1\n[model.parameters]\ndtype = "float32"\ncache_memory = 1\n'
        "arguments = { enforce_eager = true }\n"
    )
    own = OwnEngine(folder)
    expected = (await asyncio.to_thread(own.text, "The", max_new_tokens=8, ignore_eos=True)).whole
    await asyncio.to_thread(own.close)
    async with open_engine(str(folder)) as engine:
        assert await text(engine.stream(request("The"))) == expected
        running = engine.stream(request("The", 400))
        await anext(running)
        engine_core().kill()
        with pytest.raises(WorkerLost):
            await text(running)
        assert await text(engine.stream(request("The"))) == expected
