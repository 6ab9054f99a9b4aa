"""Shared by the tests of the text protocols: a text model with predictable output, and a server with it."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import dragoman
from dragoman import errors
from dragoman.core.calls import Embed, Embedded, Generate, Tokenize
from dragoman.core.tensor import Tensor
from dragoman.core.text import (
    Chat,
    Generation,
    InfillPrompt,
    Prompt,
    PromptInfo,
    Text,
    Token,
    Tokenized,
    TokenSpan,
    merge_chunks,
)
from loaded_models import recorded_models
from rest.rest_server import RawResponse

CONTEXT = 64


class ReverseModel(dragoman.Model):
    """Generate the words of the prompt in reverse order, one word per token, then `</s>`.

    Each token is less likely than the one before. Two words are special: `!fault` raises ModelFailed when it is
    generated, and `!wait` waits until a test sets `gate`.
    """

    placement = "inline"

    def load(self) -> None:
        self.calls: list[Generate] = []
        self.gate = asyncio.Event()
        self.active = 0
        self.cancelled = 0

    def details(self) -> dict[str, Any]:
        return {
            "max_context": CONTEXT,
            "model_id": "reverse",
            "device": "cpu",
            "dtype": "float32",
            "adapters": ["pirate"],
            "chat_template": {"tools": True, "reasoning": False},
        }

    async def generate(self, call: Generate) -> AsyncIterator[Generation]:
        self.calls.append(call)
        self.active += 1
        try:
            if call.stream:
                async for chunk in self._chunks(call):
                    yield chunk
            else:
                yield merge_chunks([chunk async for chunk in self._chunks(call)])
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            self.active -= 1

    async def _chunks(self, call: Generate) -> AsyncIterator[Generation]:
        infos = tuple(_info(prompt, call) for prompt in call.prompts)
        for prompt in call.prompts:
            if len(words(prompt)) >= CONTEXT:
                raise errors.InvalidInput(f"the prompt has {len(words(prompt))} tokens and the context {CONTEXT}")
        count = call.sampling.num_beams if call.sampling.num_beams > 1 else max(1, call.sampling.n)
        completions = [
            (p, c, completion_tokens(words(prompt), c, call))
            for p, prompt in enumerate(call.prompts)
            for c in range(count)
        ]
        for step in range(max(len(tokens) for _, _, (tokens, _) in completions)):
            texts = []
            for p, c, (tokens, finish) in completions:
                if step >= len(tokens):
                    continue
                token = tokens[step]
                if token.text.strip() == "!fault":
                    raise errors.ModelFailed("generated !fault")
                if token.text.strip() == "!wait":
                    await self.gate.wait()
                await asyncio.sleep(0)
                last = step + 1 == len(tokens)
                whole = "".join(t.text for t in tokens if not t.special)
                seed = (call.sampling.seed or 7) if call.sampling.do_sample else None
                text = "" if token.special else token.text
                stop = token.id if finish == "eos_token" else None  # as the engine does
                end = {"finish": finish, "whole": whole, "seed": seed, "stop": stop} if last else {}
                texts.append(Text(p, c, text, (token,), step + 1, **end))  # type: ignore[arg-type]
            yield Generation(tuple(texts), infos if step == 0 else ())

    def tokenize(self, call: Tokenize) -> Tokenized:
        text, start, spans = _text(call.prompt), 0, []
        for i, word in enumerate(text.split(" ")):
            token = f" {word}" if i else word
            spans.append(TokenSpan(token_id(word), token, start, start + len(token)))
            start += len(token)
        return Tokenized(text, tuple(spans))

    def embed(self, call: Embed) -> Embedded:
        self.embedded = call
        counts = [len(words(prompt)) for prompt in call.inputs]
        vectors = np.array([[3.0, 4.0, 0.0] for _ in counts], np.float32) / 5
        return Embedded(Tensor.of(vectors), sum(counts))


def words(prompt: Prompt) -> list[str]:
    return [str(i) for i in prompt] if isinstance(prompt, tuple) else _text(prompt).split(" ")


def _text(prompt: Prompt) -> str:
    if isinstance(prompt, Chat):
        turns = " ".join(f"{m['role']}: {m.get('content') or ''}" for m in prompt.messages)
        return turns + ("" if not prompt.tools else f" tools: {' '.join(t['function']['name'] for t in prompt.tools)}")
    if isinstance(prompt, InfillPrompt):
        return f"{prompt.prefix} _ {prompt.suffix}"
    return prompt if isinstance(prompt, str) else " ".join(map(str, prompt))


def token_id(word: str) -> int:
    return 10 + sum(word.encode()) % 1000


def completion_tokens(prompt: list[str], choice: int, call: Generate) -> tuple[list[Token], str]:
    """Return the tokens of one completion and its finish reason.

    A prompt that begins with `=` is completed with the rest of the prompt.
    """
    sampling = call.sampling
    completion = " ".join(prompt)[1:].split(" ") if prompt[0].startswith("=") else prompt[::-1]
    completion = completion[choice:] or completion
    tokens, finish = [], "eos_token"
    for i, word in enumerate(completion):
        logprob = -0.5 * (i + 1) - choice
        text = f" {word}" if i else word
        top = tuple(
            Token(token_id(word) + j, f"{text}{j}" if j else text, logprob - j) for j in range(sampling.top_logprobs)
        )
        if any(stop in word for stop in sampling.stop):
            finish = "stop_sequence"
            if sampling.include_stop:
                tokens.append(Token(token_id(word), text, logprob, top=top))
            break
        tokens.append(Token(token_id(word), text, logprob, top=top))
        if sampling.max_new_tokens is not None and len(tokens) >= sampling.max_new_tokens:
            return tokens, "length"
    if finish == "eos_token":
        tokens.append(Token(2, "</s>", -0.25, special=True))
    return tokens, finish


def _info(prompt: Prompt, call: Generate) -> PromptInfo:
    prompt_words = words(prompt)
    prefill: tuple[Token, ...] = ()
    if call.sampling.prompt_logprobs is not None:
        prefill = tuple(
            Token(token_id(word), f" {word}" if i else word, -0.125 * i if i else None)
            for i, word in enumerate(prompt_words)
        )
    ids = tuple(token_id(word) for word in prompt_words) if call.sampling.prompt_token_ids else ()
    return PromptInfo(_text(prompt), len(prompt_words), 0, prefill, token_ids=ids)


# --- a server and its clients --------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextServer:
    """A running server and a raw HTTP client for it."""

    port: int
    models: Mapping[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def model(self, name: str = "ReverseModel") -> Any:
        """Return the object of a loaded model."""
        return self.models[name]

    async def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> RawResponse:
        """Send one request on its own connection and return the response. A body other than bytes is sent as JSON."""
        reader, writer = await self.send(method, path, body, headers)
        try:
            return await read_response(reader)
        finally:
            writer.close()

    async def send(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request without reading the response."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        fields = {"host": "test", "content-length": str(len(data)), **(headers or {})}
        lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items()), "", ""]
        writer.write("\r\n".join(lines).encode("latin-1") + data)
        return reader, writer

    async def engine_load(self) -> float:
        """Return the number of queued prompts and running sequences of the text engines."""
        metrics = (await self.request("GET", "/metrics")).body.decode().splitlines()
        names = ("dragoman_text_queue_size{", "dragoman_text_batch_size{")
        sizes = [float(line.rpartition(" ")[2]) for line in metrics if line.startswith(names)]
        assert sizes, "no text engine"
        return sum(sizes)

    async def wait_until_idle(self) -> None:
        """Wait until the text engines have neither queued nor running prompts."""
        async with asyncio.timeout(120):
            while await self.engine_load():
                await asyncio.sleep(0.01)

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> RawResponse:
        return await self.request("POST", path, body, headers)


async def read_response(reader: asyncio.StreamReader) -> RawResponse:
    status, headers = await read_headers(reader)
    if headers.get("transfer-encoding") == "chunked":
        return RawResponse(status, headers, b"".join([chunk async for chunk in read_chunks(reader)]))
    return RawResponse(status, headers, await reader.readexactly(int(headers.get("content-length", 0))))


async def read_headers(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Read a status line and headers; return the status and the headers in lower case."""
    data = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 120)
    first, *lines = data.decode("latin-1").split("\r\n")[:-2]
    return int(first.split()[1]), {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}


async def read_chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await asyncio.wait_for(reader.readuntil(b"\r\n"), 120), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)


@asynccontextmanager
async def serve(*models: Any, **settings: Any) -> AsyncIterator[TextServer]:
    """Serve these models, by default `ReverseModel`, without the calls of a trial."""
    server = dragoman.Server(
        *(models or (ReverseModel,)), **{"http_port": 0, "grpc_port": -1, "trial_s": 0, **settings}
    )
    with recorded_models() as loaded:
        async with server:
            yield TextServer(server.http_ports[0], loaded)


def lines(body: bytes) -> list[Any]:
    """Parse JSON lines."""
    assert body.endswith(b"\n")
    return [json.loads(line) for line in body.splitlines()]


def events(body: bytes) -> list[Any]:
    """Parse the data of server-sent events as JSON, except "[DONE]"."""
    assert body.endswith(b"\n\n")
    fields = [event.removeprefix("data:").strip() for event in body.decode().removesuffix("\n\n").split("\n\n")]
    return [data if data == "[DONE]" else json.loads(data) for data in fields]


def typed_events(body: bytes) -> list[Any]:
    """Parse server-sent events whose names are the types of their data; `[DONE]` may follow them."""
    found = []
    for block in body.decode().removesuffix("data: [DONE]\n\n").removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found
