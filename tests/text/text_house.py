"""What the tests of text protocols share: a text model that a test can foretell, and a server with it."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

import dragoman
from dragoman import errors
from dragoman.core.calls import Embed, Embedded, Generate, Tokenize
from dragoman.core.tensor import Tensor
from dragoman.core.text import Chat, Generation, Prompt, PromptInfo, Text, Token, Tokenized, TokenSpan, merge_chunks
from rest.rest_server import RawResponse

CONTEXT = 64


class Speaker(dragoman.Model):
    """Says the words of its prompt again, the last one first, one a token, then `</s>`; each is less likely than the
    one before. A word `!fault` in the prompt fails when it is said, `!wait` waits until a test opens `gate`."""

    placement = "inline"

    def load(self) -> None:
        self.calls: list[Generate] = []
        self.gate = asyncio.Event()
        self.active = 0
        self.cancelled = 0

    def details(self) -> dict[str, Any]:
        return {
            "max_context": CONTEXT,
            "model_id": "speaker",
            "device": "cpu",
            "dtype": "float32",
            "adapters": ["pirate"],
        }

    async def generate(self, call: Generate) -> AsyncIterator[Generation]:
        self.calls.append(call)
        self.active += 1
        try:
            if call.stream:
                async for piece in self._pieces(call):
                    yield piece
            else:
                yield merge_chunks([piece async for piece in self._pieces(call)])
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            self.active -= 1

    async def _pieces(self, call: Generate) -> AsyncIterator[Generation]:
        infos = tuple(_info(prompt, call) for prompt in call.prompts)
        for prompt in call.prompts:
            if len(words(prompt)) >= CONTEXT:
                raise errors.InvalidInput(f"the prompt has {len(words(prompt))} tokens and the context {CONTEXT}")
        count = call.sampling.num_beams if call.sampling.num_beams > 1 else max(1, call.sampling.n)
        says = [(p, c, said(words(prompt), c, call)) for p, prompt in enumerate(call.prompts) for c in range(count)]
        for step in range(max(len(tokens) for _, _, (tokens, _) in says)):
            texts = []
            for p, c, (tokens, finish) in says:
                if step >= len(tokens):
                    continue
                token = tokens[step]
                if token.text.strip() == "!fault":
                    raise errors.ModelFailed("it would not say that")
                if token.text.strip() == "!wait":
                    await self.gate.wait()
                await asyncio.sleep(0)
                last = step + 1 == len(tokens)
                whole = "".join(t.text for t in tokens if not t.special)
                seed = (call.sampling.seed or 7) if call.sampling.do_sample else None
                part = "" if token.special else token.text
                ends = {"finish": finish, "whole": whole, "seed": seed} if last else {}
                texts.append(Text(p, c, part, (token,), step + 1, **ends))  # type: ignore[arg-type]
            yield Generation(tuple(texts), infos if step == 0 else ())

    def tokenize(self, call: Tokenize) -> Tokenized:
        text, at, spans = _text(call.prompt), 0, []
        for i, word in enumerate(text.split(" ")):
            piece = f" {word}" if i else word
            spans.append(TokenSpan(number(word), piece, at, at + len(piece)))
            at += len(piece)
        return Tokenized(text, tuple(spans))

    def embed(self, call: Embed) -> Embedded:
        counts = [len(words(prompt)) for prompt in call.inputs]
        vectors = np.array([[3.0, 4.0, 0.0] for _ in counts], np.float32) / 5
        return Embedded(Tensor.of(vectors), sum(counts))


def words(prompt: Prompt) -> list[str]:
    return [str(i) for i in prompt] if isinstance(prompt, tuple) else _text(prompt).split(" ")


def _text(prompt: Prompt) -> str:
    if isinstance(prompt, Chat):
        turns = " ".join(f"{m['role']}: {m.get('content') or ''}" for m in prompt.messages)
        return turns + ("" if not prompt.tools else f" tools: {' '.join(t['function']['name'] for t in prompt.tools)}")
    return prompt if isinstance(prompt, str) else " ".join(map(str, prompt))


def number(word: str) -> int:
    return 10 + sum(word.encode()) % 1000


def said(prompt: list[str], choice: int, call: Generate) -> tuple[list[Token], str]:
    """The tokens of one text and why it ends. The text of a prompt that begins with `=` is the rest of the prompt."""
    sampling = call.sampling
    found = " ".join(prompt)[1:].split(" ") if prompt[0].startswith("=") else prompt[::-1]
    found = found[choice:] or found
    tokens, finish = [], "eos_token"
    for i, word in enumerate(found):
        logprob = -0.5 * (i + 1) - choice
        text = f" {word}" if i else word
        top = tuple(
            Token(number(word) + j, f"{text}{j}" if j else text, logprob - j) for j in range(sampling.top_logprobs)
        )
        if any(stop in word for stop in sampling.stop):
            finish = "stop_sequence"
            if sampling.include_stop:
                tokens.append(Token(number(word), text, logprob, top=top))
            break
        tokens.append(Token(number(word), text, logprob, top=top))
        if sampling.max_new_tokens is not None and len(tokens) >= sampling.max_new_tokens:
            return tokens, "length"
    if finish == "eos_token":
        tokens.append(Token(2, "</s>", -0.25, special=True))
    return tokens, finish


def _info(prompt: Prompt, call: Generate) -> PromptInfo:
    found = words(prompt)
    prefill: tuple[Token, ...] = ()
    if call.sampling.prompt_logprobs is not None:
        texts = [f" {word}" if i else word for i, word in enumerate(found)]
        prefill = tuple(
            Token(number(w), t, -0.125 * i if i else None) for i, (w, t) in enumerate(zip(found, texts, strict=True))
        )
    return PromptInfo(_text(prompt), len(found), 0, prefill)


# --- a server and its clients --------------------------------------------------------------------------------


@dataclass(frozen=True)
class House:
    """A running server, as its clients see it."""

    port: int
    server: dragoman.Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def model(self, name: str = "Speaker") -> Any:
        """The model object itself."""
        deployment = next(d for d in self.server.engine.deployments() if d.spec.name == name)
        pool: Any = deployment._pool
        return (getattr(pool, "_inline", None) or pool)._executor.model

    async def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> RawResponse:
        """One request on a connection of its own; anything but bytes goes as JSON."""
        reader, writer = await self.send(method, path, body, headers)
        try:
            return await read_answer(reader)
        finally:
            writer.close()

    async def send(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A request whose answer nobody has read yet."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        given = {"host": "test", "content-length": str(len(data)), **(headers or {})}
        head = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in given.items()), "", ""]
        writer.write("\r\n".join(head).encode("latin-1") + data)
        return reader, writer

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> RawResponse:
        return await self.ask("POST", path, body, headers)


async def read_answer(reader: asyncio.StreamReader) -> RawResponse:
    status, headers = await read_head(reader)
    if headers.get("transfer-encoding") == "chunked":
        return RawResponse(status, headers, b"".join([chunk async for chunk in read_chunks(reader)]))
    return RawResponse(status, headers, await reader.readexactly(int(headers.get("content-length", 0))))


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    return int(first.split()[1]), {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}


async def read_chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await asyncio.wait_for(reader.readuntil(b"\r\n"), 60), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)


@asynccontextmanager
async def speaking(*models: Any, **settings: Any) -> AsyncIterator[House]:
    """A server with these models, by default with the one that speaks."""
    server = dragoman.Server(*(models or (Speaker,)), **{"http_port": 0, "grpc_port": -1, **settings})
    async with server:
        yield House(server.http_ports[0], server)


def lines(body: bytes) -> list[Any]:
    """The objects in JSON lines."""
    assert body.endswith(b"\n")
    return [json.loads(line) for line in body.splitlines()]


def events(body: bytes) -> list[Any]:
    """The objects in server-sent events, "[DONE]" as it is."""
    assert body.endswith(b"\n\n")
    found = []
    for event in body.decode().removesuffix("\n\n").split("\n\n"):
        data = event.removeprefix("data:").strip()
        found.append(data if data == "[DONE]" else json.loads(data))
    return found
