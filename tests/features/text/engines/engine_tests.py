"""What every engine behind the text APIs must keep, requests of a real server: the same texts as our own engine."""

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dragoman
from dragoman.core.calls import Generate
from dragoman.core.spec import ModelSpec
from dragoman.core.text import Generation, Sampling, Text
from loaded_models import recorded_models

PROMPTS = (
    "A class definition",
    "The",
    "Grüße, 世界",
    "x = [1, 2, 3]",
    "How do I say hello in French?",
    "import os\n\n",
)
NEW = 12


def train_model(folder: Path) -> Path:
    """Train a tiny Llama for a few steps, with heads of a width that every engine has kernels for."""
    import torch

    import text_models

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        text_models.training().train(folder, "llama", replace(text_models.training().TINY, heads=2), 60)
    finally:
        torch.set_num_threads(before)
    return folder


class OwnEngine:
    """Our own engine on the same folder, as the reference."""

    def __init__(self, folder: Path) -> None:
        from dragoman_text.runtimes.llm.model import LanguageModel

        self._model = LanguageModel(ModelSpec(name="own", uri=str(folder), parameters={"dtype": "float32"}))
        self._model.load()

    def text(self, prompt: str, **sampling: Any) -> Text:
        return asyncio.run(self._whole(prompt, sampling)).texts[0]

    def prefill(self, prompt: str) -> list[float | None]:
        """Return the log-probabilities of the prompt's tokens."""
        (info,) = asyncio.run(self._whole(prompt, {"prompt_logprobs": 0})).prompts
        return [token.logprob for token in info.prefill]

    async def _whole(self, prompt: str, sampling: Mapping[str, Any]) -> Generation:
        call = Generate(prompts=(prompt,), sampling=Sampling(**{"max_new_tokens": NEW, **sampling}))
        chunks: list[Generation] = [chunk async for chunk in self._model.generate(call)]
        (whole,) = chunks
        return whole

    def logprobs(self, prompt: str) -> Any:
        """Return the log-probabilities of the next token by transformers."""
        import torch
        import transformers

        tokens = self._model.text_engine.intake.vocabulary.encode(prompt)[1]
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(self._model.spec.uri, dtype=torch.float32)
        with torch.no_grad():
            return model.eval()(torch.tensor([tokens])).logits[0, -1].double().log_softmax(-1).numpy()

    def close(self) -> None:
        asyncio.run(self._model.close())


@dataclass(frozen=True)
class EngineServer:
    """A server in a thread with the model `story` on the engine under test, and our own engine."""

    server: dragoman.Server
    own: OwnEngine
    model: Any

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.http_ports[0]}"

    @property
    def engine(self) -> Any:
        """The `TextEngine` under test."""
        return self.model.text_engine

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        import urllib.error
        import urllib.request

        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                content = response.read()
                return response.status, content if path.endswith("_stream") else json.loads(content)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def post_ok(self, path: str, body: Any) -> Any:
        status, response = self.post(path, body)
        assert status == 200, response
        return response

    def lmi(self, prompt: str, **parameters: Any) -> Any:
        return self.post_ok("/invocations", {"inputs": prompt, "parameters": {"max_new_tokens": NEW, **parameters}})

    def post_together(self, requests: list[tuple[str, Any]]) -> list[tuple[int, Any]]:
        with ThreadPoolExecutor(len(requests)) as threads:
            return list(threads.map(lambda each: self.post(*each), requests))


@contextmanager
def running_server(root: Path, own: OwnEngine) -> Iterator[EngineServer]:
    """Run a server of a folder with one model."""
    server = dragoman.Server(str(root), http_port=0, grpc_port=-1)
    ready, done, loop = threading.Event(), asyncio.Event(), asyncio.new_event_loop()

    errors: list[BaseException] = []
    loaded: list[Any] = []

    async def serve() -> None:
        try:
            with recorded_models() as models:
                await server.__aenter__()
            loaded.extend(models.values())
            ready.set()
            await done.wait()
            await server.__aexit__()
        except BaseException as error:
            errors.append(error)
            ready.set()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(600)
        if errors:
            raise errors[0]
        yield EngineServer(server, own, loaded[0])
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()


def _tokens(response: Any) -> tuple[list[int], list[float]]:
    tokens = response["details"]["tokens"]
    return [token["id"] for token in tokens], [token["log_prob"] for token in tokens]


class EngineTests:
    """Derive from it in a test module, with a fixture `server` of its own."""

    def test_concurrent_requests_match_our_own_engine(self, server: EngineServer) -> None:
        requests = [
            ("/invocations", {"inputs": prompt, "parameters": {"max_new_tokens": NEW, "details": True}})
            for prompt in (*PROMPTS, *PROMPTS[:2])
        ]
        for (_, body), (status, response) in zip(requests, server.post_together(requests), strict=True):
            assert status == 200, response
            wanted = server.own.text(str(body["inputs"]))
            tokens, logprobs = _tokens(response)
            assert tokens == [token.id for token in wanted.tokens]
            assert logprobs == pytest.approx([token.logprob for token in wanted.tokens], abs=1e-4)
            assert response["generated_text"] == wanted.whole
            assert response["details"]["finish_reason"] == wanted.finish

    def test_every_api_gives_the_same_text(self, server: EngineServer) -> None:
        prompt, few = PROMPTS[0], {"max_new_tokens": NEW}
        text = server.own.text(prompt).whole
        assert server.lmi(prompt)["generated_text"] == text
        assert server.post_ok("/generate", {"inputs": prompt, "parameters": few})["generated_text"] == text
        assert server.post_ok("/", {"inputs": prompt, "parameters": few})[0]["generated_text"] == text
        done = server.post_ok(
            "/v1/completions", {"model": "story", "prompt": prompt, "max_tokens": NEW, "temperature": 0}
        )
        assert done["choices"][0]["text"] == text
        response = server.post_ok(
            "/v2/models/story/generate", {"text_input": prompt, "parameters": {"max_tokens": NEW}}
        )
        assert response["text_output"] == text
        both = server.post_ok("/invocations", {"inputs": [prompt, "The"], "parameters": few})
        assert both[0]["generated_text"] == prompt + text

    def test_streams_give_the_same_text(self, server: EngineServer) -> None:
        import openai

        whole = server.own.text(PROMPTS[2]).whole
        body = {"inputs": PROMPTS[2], "parameters": {"max_new_tokens": NEW}}
        events = [json.loads(line[5:]) for line in server.post_ok("/generate_stream", body).splitlines() if line]
        assert len(events) == len(server.own.text(PROMPTS[2]).tokens)
        assert events[-1]["generated_text"] == whole
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
            stream = client.completions.create(
                model="story", prompt=PROMPTS[2], max_tokens=NEW, temperature=0, stream=True
            )
            assert "".join(chunk.choices[0].text for chunk in stream) == whole
            chat = client.chat.completions.create(
                model="story", messages=[{"role": "user", "content": "Hello"}], max_tokens=4, n=2
            )
            assert [choice.index for choice in chat.choices] == [0, 1]

    def test_stop_strings_end_a_completion(self, server: EngineServer) -> None:
        whole = server.own.text(PROMPTS[0]).whole
        stop = whole[len(whole) // 2 :][:3]
        wanted = server.own.text(PROMPTS[0], stop=(stop,))
        response = server.lmi(PROMPTS[0], stop_sequences=[stop], details=True)
        assert response["generated_text"] == wanted.whole
        assert response["details"]["finish_reason"] == "stop_sequence"

    @pytest.mark.parametrize(
        "parameters",
        [
            {"repetition_penalty": 1.7},
            {"repetition_penalty": 0.6},
            {"presence_penalty": 1.5},
            {"presence_penalty": -1.5},
            {"frequency_penalty": 0.9},
            {"frequency_penalty": -0.9},
            {"repetition_penalty": 1.2, "presence_penalty": 0.7, "frequency_penalty": 0.4},
        ],
        ids=str,
    )
    def test_penalties_change_the_same_tokens(self, server: EngineServer, parameters: dict[str, float]) -> None:
        for prompt in PROMPTS[:4]:
            wanted = server.own.text(prompt, **parameters)
            tokens, logprobs = _tokens(server.lmi(prompt, details=True, **parameters))
            assert tokens == [token.id for token in wanted.tokens]
            assert logprobs == pytest.approx([token.logprob for token in wanted.tokens], abs=1e-4)

    def test_end_conditions(self, server: EngineServer) -> None:
        first = server.own.text("The").tokens[3].id
        for parameters in (
            {"stop_token_ids": [first]},
            {"stop_token_ids": [first], "min_length": 8},
            {"ignore_eos_token": True, "max_new_tokens": 40},
            {"stop_token_ids": [first], "ignore_eos_token": True, "max_new_tokens": 40},
        ):
            names = {"ignore_eos_token": "ignore_eos", "min_length": "min_new_tokens"}
            sampling: dict[str, Any] = {names.get(name, name): value for name, value in parameters.items()}
            if "stop_token_ids" in sampling:
                sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
            wanted = server.own.text("The", **sampling)
            response = server.lmi("The", details=True, **parameters)
            assert _tokens(response)[0] == [token.id for token in wanted.tokens], parameters
            assert response["details"]["finish_reason"] == wanted.finish

    def test_a_seed_gives_the_same_tokens_in_a_batch(self, server: EngineServer) -> None:
        sampled = {"do_sample": True, "temperature": 0.9, "seed": 11, "max_new_tokens": NEW, "details": True}
        requests = ("/generate", {"inputs": "The", "parameters": sampled})
        alone = server.post_ok(*requests)
        assert alone["details"]["seed"] == 11
        others = [
            ("/generate", {"inputs": prompt, "parameters": {**sampled, "seed": number}})
            for number, prompt in enumerate([*PROMPTS, "one more"])
        ]
        together = server.post_together([requests, *others])
        assert [token["id"] for token in together[0][1]["details"]["tokens"]] == [
            token["id"] for token in alone["details"]["tokens"]
        ]

    @pytest.mark.parametrize("sampling", [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.4}, {"min_p": 0.2}], ids=str)
    def test_sampled_tokens_follow_the_distribution(self, server: EngineServer, sampling: dict[str, Any]) -> None:
        expected = _distribution(server.own, "The", sampling)
        count = 400
        seen: dict[int, int] = {}
        for batch in range(count // 50):
            requests = [
                ("/invocations", {"inputs": "The", "parameters": _draw_token(sampling, 1000 * batch + number)})
                for number in range(50)
            ]
            for status, response in server.post_together(requests):
                assert status == 200, response
                token = response["details"]["tokens"][0]["id"]
                seen[token] = seen.get(token, 0) + 1
        assert set(seen) <= set(expected), "a token with probability 0"
        often = {token: share for token, share in expected.items() if share * count >= 5}
        rest = 1 - sum(often.values())
        cells = [(seen.get(token, 0), share * count) for token, share in often.items()]
        if rest * count >= 5:
            cells.append((count - sum(number for number, _ in cells), rest * count))
        chi = sum((number - wanted) ** 2 / wanted for number, wanted in cells)
        assert chi < len(cells) + 5 * np.sqrt(2 * len(cells)), (chi, cells)

    def test_an_invalid_request_does_not_affect_others(self, server: EngineServer) -> None:
        good = [
            ("/invocations", {"inputs": f"The {word}", "parameters": {"max_new_tokens": NEW, "details": True}})
            for word in ("class", "function", "list", "value", "name", "return", "object")
        ]
        alone = [server.post_ok(*each) for each in good]
        for wrong, named in (
            ({"temperature": -1}, "temperature"),
            ({"num_beams": 3}, "num_beams"),
            ({"typical_p": 0.5, "do_sample": True}, "typical_p"),
        ):
            bad = ("/invocations", {"inputs": "The", "parameters": wrong})
            status, response = (found := server.post_together([bad, *good]))[0]
            assert status == 424
            assert named in json.dumps(response)
            assert [response["generated_text"] for _, response in found[1:]] == [
                each["generated_text"] for each in alone
            ]

    def test_a_prompt_longer_than_the_context_is_rejected(self, server: EngineServer) -> None:
        status, response = server.post("/generate", {"inputs": "word " * 2000})
        assert status == 422
        assert "context" in json.dumps(response)

    def test_disconnecting_cancels_the_work(self, server: EngineServer) -> None:
        async def disconnect(number: int) -> None:
            port = server.server.http_ports[0]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            parameters = {"max_new_tokens": 400, "stop": [], "seed": number, "do_sample": True}
            body = json.dumps({"inputs": PROMPTS[0], "parameters": parameters}).encode()
            head = f"POST /generate_stream HTTP/1.1\r\nhost: t\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await asyncio.wait_for(reader.readuntil(b"data:"), 120)
            writer.close()

        async def all_disconnect() -> None:
            await asyncio.gather(*map(disconnect, range(16)))
            async with asyncio.timeout(60):
                while server.engine.active or self.is_busy(server.engine):
                    await asyncio.sleep(0.01)

        asyncio.run(all_disconnect())
        assert server.lmi(PROMPTS[0])["generated_text"] == server.own.text(PROMPTS[0]).whole

    def is_busy(self, engine: Any) -> bool:
        """Return whether the engine under test still computes."""
        raise NotImplementedError


def _draw_token(sampling: dict[str, Any], seed: int) -> dict[str, Any]:
    return {"do_sample": True, "seed": seed, "max_new_tokens": 1, "details": True, **sampling}


def _distribution(own: OwnEngine, prompt: str, sampling: Mapping[str, Any]) -> dict[int, float]:
    """Return the probabilities of the first token by the definition of one parameter."""
    found = own.logprobs(prompt) / sampling.get("temperature", 1.0)
    shares = np.exp(found - found.max())
    order = np.argsort(-shares)[: sampling.get("top_k") or None]
    retained = shares[order] / shares.sum()
    order = order[: int(np.searchsorted(np.cumsum(retained), sampling.get("top_p", 2.0))) + 1]
    retained = shares[order]
    retained = retained[retained >= sampling.get("min_p", 0.0) * retained.max()]
    return dict(zip(order.tolist(), (retained / retained.sum()).tolist(), strict=False))
