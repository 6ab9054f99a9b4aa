"""What every engine behind the text APIs must keep, asked of a real server: the same texts as our own engine."""

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


def make(folder: Path) -> Path:
    """A tiny Llama that has learnt a little, with heads as wide as every engine has kernels for."""
    import torch

    import text_models

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        text_models.train.train(folder, "llama", replace(text_models.train.TINY, heads=2), 60)
    finally:
        torch.set_num_threads(before)
    return folder


class Own:
    """Our own engine on the same folder: what others are compared with."""

    def __init__(self, folder: Path) -> None:
        from dragoman.runtimes.llm.model import LanguageModel

        self._model = LanguageModel(ModelSpec(name="own", uri=str(folder), parameters={"dtype": "float32"}))
        self._model.load()

    def text(self, prompt: str, **sampling: Any) -> Text:
        return asyncio.run(self._whole(prompt, sampling)).texts[0]

    def prefill(self, prompt: str) -> list[float | None]:
        """The log-probabilities of the prompt's own tokens."""
        (info,) = asyncio.run(self._whole(prompt, {"prompt_logprobs": 0})).prompts
        return [token.logprob for token in info.prefill]

    async def _whole(self, prompt: str, sampling: Mapping[str, Any]) -> Generation:
        call = Generate(prompts=(prompt,), sampling=Sampling(**{"max_new_tokens": NEW, **sampling}))
        (whole,) = [piece async for piece in self._model.generate(call)]
        return whole

    def logprobs(self, prompt: str) -> Any:
        """Of every token after the prompt, by transformers."""
        import torch
        import transformers

        tokens = self._model.text_engine.intake.vocabulary.encode(prompt)[1]
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(self._model.spec.uri, dtype=torch.float32)
        with torch.no_grad():
            return model.eval()(torch.tensor([tokens])).logits[0, -1].double().log_softmax(-1).numpy()

    def close(self) -> None:
        asyncio.run(self._model.close())


@dataclass(frozen=True)
class Served:
    """A server in a thread of its own with the model `story` on the engine under test, and our own beside it."""

    server: dragoman.Server
    own: Own
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
            with urllib.request.urlopen(request, timeout=120) as answer:
                content = answer.read()
                return answer.status, content if path.endswith("_stream") else json.loads(content)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def ask(self, path: str, body: Any) -> Any:
        status, answer = self.post(path, body)
        assert status == 200, answer
        return answer

    def lmi(self, prompt: str, **parameters: Any) -> Any:
        return self.ask("/invocations", {"inputs": prompt, "parameters": {"max_new_tokens": NEW, **parameters}})

    def together(self, asked: list[tuple[str, Any]]) -> list[tuple[int, Any]]:
        with ThreadPoolExecutor(len(asked)) as threads:
            return list(threads.map(lambda each: self.post(*each), asked))


@contextmanager
def served(place: Path, own: Own) -> Iterator[Served]:
    """A server of a folder with one model in it, until the tests are over."""
    server = dragoman.Server(str(place), http_port=0, grpc_port=-1)
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
        assert ready.wait(300)
        if errors:
            raise errors[0]
        yield Served(server, own, loaded[0])
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()


def _tokens(answer: Any) -> tuple[list[int], list[float]]:
    tokens = answer["details"]["tokens"]
    return [token["id"] for token in tokens], [token["log_prob"] for token in tokens]


class EngineTests:
    """A module of tests derives from it, with a fixture `served` of its own."""

    def test_eight_at_a_time_give_the_tokens_of_our_own_engine(self, served: Served) -> None:
        asked = [
            ("/invocations", {"inputs": prompt, "parameters": {"max_new_tokens": NEW, "details": True}})
            for prompt in (*PROMPTS, *PROMPTS[:2])
        ]
        for (_, body), (status, answer) in zip(asked, served.together(asked), strict=True):
            assert status == 200, answer
            wanted = served.own.text(str(body["inputs"]))
            tokens, logprobs = _tokens(answer)
            assert tokens == [token.id for token in wanted.tokens]
            assert logprobs == pytest.approx([token.logprob for token in wanted.tokens], abs=1e-4)
            assert answer["generated_text"] == wanted.whole
            assert answer["details"]["finish_reason"] == wanted.finish

    def test_every_api_gives_the_same_text(self, served: Served) -> None:
        prompt, few = PROMPTS[0], {"max_new_tokens": NEW}
        text = served.own.text(prompt).whole
        assert served.lmi(prompt)["generated_text"] == text
        assert served.ask("/generate", {"inputs": prompt, "parameters": few})["generated_text"] == text
        assert served.ask("/", {"inputs": prompt, "parameters": few})[0]["generated_text"] == text
        done = served.ask("/v1/completions", {"model": "story", "prompt": prompt, "max_tokens": NEW, "temperature": 0})
        assert done["choices"][0]["text"] == text
        told = served.ask("/v2/models/story/generate", {"text_input": prompt, "parameters": {"max_tokens": NEW}})
        assert told["text_output"] == text
        both = served.ask("/invocations", {"inputs": [prompt, "The"], "parameters": few})
        assert both[0]["generated_text"] == prompt + text

    def test_streams_add_up(self, served: Served) -> None:
        import openai

        whole = served.own.text(PROMPTS[2]).whole
        body = {"inputs": PROMPTS[2], "parameters": {"max_new_tokens": NEW}}
        events = [json.loads(line[5:]) for line in served.ask("/generate_stream", body).splitlines() if line]
        assert len(events) == len(served.own.text(PROMPTS[2]).tokens)
        assert events[-1]["generated_text"] == whole
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="-", max_retries=0) as client:
            stream = client.completions.create(
                model="story", prompt=PROMPTS[2], max_tokens=NEW, temperature=0, stream=True
            )
            assert "".join(chunk.choices[0].text for chunk in stream) == whole
            chat = client.chat.completions.create(
                model="story", messages=[{"role": "user", "content": "Hello"}], max_tokens=4, n=2
            )
            assert [choice.index for choice in chat.choices] == [0, 1]

    def test_stop_strings_end_a_text(self, served: Served) -> None:
        whole = served.own.text(PROMPTS[0]).whole
        stop = whole[len(whole) // 2 :][:3]
        wanted = served.own.text(PROMPTS[0], stop=(stop,))
        answer = served.lmi(PROMPTS[0], stop_sequences=[stop], details=True)
        assert answer["generated_text"] == wanted.whole
        assert answer["details"]["finish_reason"] == "stop_sequence"

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
    def test_penalties_change_the_same_tokens(self, served: Served, parameters: dict[str, float]) -> None:
        for prompt in PROMPTS[:4]:
            wanted = served.own.text(prompt, **parameters)
            tokens, logprobs = _tokens(served.lmi(prompt, details=True, **parameters))
            assert tokens == [token.id for token in wanted.tokens]
            assert logprobs == pytest.approx([token.logprob for token in wanted.tokens], abs=1e-4)

    def test_ends(self, served: Served) -> None:
        first = served.own.text("The").tokens[3].id
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
            wanted = served.own.text("The", **sampling)
            answer = served.lmi("The", details=True, **parameters)
            assert _tokens(answer)[0] == [token.id for token in wanted.tokens], parameters
            assert answer["details"]["finish_reason"] == wanted.finish

    def test_the_same_seed_alone_and_in_a_crowd(self, served: Served) -> None:
        drawn = {"do_sample": True, "temperature": 0.9, "seed": 11, "max_new_tokens": NEW, "details": True}
        asked = ("/generate", {"inputs": "The", "parameters": drawn})
        alone = served.ask(*asked)
        assert alone["details"]["seed"] == 11
        others = [
            ("/generate", {"inputs": prompt, "parameters": {**drawn, "seed": number}})
            for number, prompt in enumerate([*PROMPTS, "one more"])
        ]
        together = served.together([asked, *others])
        assert [token["id"] for token in together[0][1]["details"]["tokens"]] == [
            token["id"] for token in alone["details"]["tokens"]
        ]

    @pytest.mark.parametrize("given", [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.4}, {"min_p": 0.2}], ids=str)
    def test_draws_are_of_the_distribution(self, served: Served, given: dict[str, Any]) -> None:
        expected = _distribution(served.own, "The", given)
        count = 400
        seen: dict[int, int] = {}
        for batch in range(count // 50):
            asked = [
                ("/invocations", {"inputs": "The", "parameters": _draw_token(given, 1000 * batch + number)})
                for number in range(50)
            ]
            for status, answer in served.together(asked):
                assert status == 200, answer
                token = answer["details"]["tokens"][0]["id"]
                seen[token] = seen.get(token, 0) + 1
        assert set(seen) <= set(expected), "a token that must not be drawn"
        often = {token: share for token, share in expected.items() if share * count >= 5}
        rest = 1 - sum(often.values())
        cells = [(seen.get(token, 0), share * count) for token, share in often.items()]
        if rest * count >= 5:
            cells.append((count - sum(number for number, _ in cells), rest * count))
        chi = sum((number - wanted) ** 2 / wanted for number, wanted in cells)
        assert chi < len(cells) + 5 * np.sqrt(2 * len(cells)), (chi, cells)

    def test_one_bad_and_seven_good(self, served: Served) -> None:
        good = [
            ("/invocations", {"inputs": f"The {word}", "parameters": {"max_new_tokens": NEW, "details": True}})
            for word in ("class", "function", "list", "value", "name", "return", "object")
        ]
        alone = [served.ask(*each) for each in good]
        for wrong, named in (
            ({"temperature": -1}, "temperature"),
            ({"num_beams": 3}, "num_beams"),
            ({"typical_p": 0.5, "do_sample": True}, "typical_p"),
        ):
            bad = ("/invocations", {"inputs": "The", "parameters": wrong})
            status, answer = (found := served.together([bad, *good]))[0]
            assert status == 424
            assert named in json.dumps(answer)
            assert [answer["generated_text"] for _, answer in found[1:]] == [each["generated_text"] for each in alone]

    def test_a_prompt_that_is_longer_than_the_context(self, served: Served) -> None:
        status, answer = served.post("/generate", {"inputs": "word " * 2000})
        assert status == 422
        assert "context" in json.dumps(answer)

    def test_who_leaves_takes_the_work_along(self, served: Served) -> None:
        async def leave(number: int) -> None:
            port = served.server.http_ports[0]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            parameters = {"max_new_tokens": 400, "stop": [], "seed": number, "do_sample": True}
            body = json.dumps({"inputs": PROMPTS[0], "parameters": parameters}).encode()
            head = f"POST /generate_stream HTTP/1.1\r\nhost: t\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await asyncio.wait_for(reader.readuntil(b"data:"), 120)
            writer.close()

        async def all_leave() -> None:
            await asyncio.gather(*map(leave, range(16)))
            async with asyncio.timeout(60):
                while served.engine.active or self.works(served.engine):
                    await asyncio.sleep(0.01)

        asyncio.run(all_leave())
        assert served.lmi(PROMPTS[0])["generated_text"] == served.own.text(PROMPTS[0]).whole

    def works(self, engine: Any) -> bool:
        """Whether the engine under test still works on anything."""
        raise NotImplementedError


def _draw_token(given: dict[str, Any], seed: int) -> dict[str, Any]:
    return {"do_sample": True, "seed": seed, "max_new_tokens": 1, "details": True, **given}


def _distribution(own: Own, prompt: str, given: Mapping[str, Any]) -> dict[int, float]:
    """What the first token may be, by the definition of one parameter."""
    found = own.logprobs(prompt) / given.get("temperature", 1.0)
    shares = np.exp(found - found.max())
    order = np.argsort(-shares)[: given.get("top_k") or None]
    kept = shares[order] / shares.sum()
    order = order[: int(np.searchsorted(np.cumsum(kept), given.get("top_p", 2.0))) + 1]
    kept = shares[order]
    kept = kept[kept >= given.get("min_p", 0.0) * kept.max()]
    return dict(zip(order.tolist(), (kept / kept.sum()).tolist(), strict=False))
