"""Serve the models of these tests in a process of its own: python served_models.py FOLDER.

It prints the addresses of two servers as a JSON object: `url` and `grpc` of one without keys, and `keyed`, of one that
accepts one key. The clients live in other environments than the servers, so that neither constrains the other's
dependencies.
"""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import dragoman
from dragoman.core.calls import Embed, Embedded, Generate, Infer, Tokenize
from dragoman.core.scoring import Score, Scored
from dragoman.core.tensor import Tensor
from dragoman.core.text import Chat, Generation, Prompt, PromptInfo, Text, Token, Tokenized, TokenSpan, merge_chunks

KEY = "open-sesame-open-sesame"


class Scripted(dragoman.Model):
    """Do what the last message says, one token for each word.

    `say TEXT` is answered with the text, `call NAME ARGUMENTS` with a call of a tool, `wait` with nothing until the
    client leaves, the result of a tool with `the result is RESULT`, and anything else with its words in reverse order.
    """

    placement = "inline"

    def details(self) -> dict[str, Any]:
        return {"max_context": 4096}

    def tokenize(self, call: Tokenize) -> Tokenized:
        is_chat = isinstance(call.prompt, Chat)
        text = " ".join(map(_content, _messages(call.prompt))) if is_chat else str(call.prompt)
        spans, start = [], 0
        for i, word in enumerate(text.split(" ")):
            token = f" {word}" if i else word
            spans.append(TokenSpan(10 + len(word), token, start, start + len(token)))
            start += len(token)
        return Tokenized(text, tuple(spans))

    async def generate(self, call: Generate):  # type: ignore[no-untyped-def]
        chunks = []
        for i, prompt in enumerate(call.prompts):
            if _last(prompt) == "wait":
                await asyncio.sleep(60)
            words = _completion(prompt).split(" ")
            tokens = [Token(10 + len(word), f" {word}" if at else word, -0.5) for at, word in enumerate(words)]
            limit = call.sampling.max_new_tokens
            finish = "length" if limit is not None and limit < len(tokens) else "eos_token"
            tokens = tokens[:limit]
            whole = "".join(token.text for token in tokens)
            for at, token in enumerate(tokens, 1):
                end = {"finish": finish, "whole": whole} if at == len(tokens) else {}
                infos = tuple(PromptInfo("", _count(each)) for each in call.prompts) if i == 0 and at == 1 else ()
                chunk = Generation((Text(i, 0, token.text, (token,), at, **end),), infos)  # type: ignore[arg-type]
                if call.stream:
                    yield chunk
                chunks.append(chunk)
        if not call.stream:
            yield merge_chunks(chunks)


def _messages(prompt: Prompt) -> Sequence[Mapping[str, Any]]:
    return prompt.messages if isinstance(prompt, Chat) else ()


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)


def _count(prompt: Prompt) -> int:
    """Return the number of words of a prompt, as `tokenize` does."""
    text = " ".join(map(_content, _messages(prompt))) if isinstance(prompt, Chat) else prompt
    return len(text) if isinstance(text, tuple) else len(str(text).split(" "))


def _last(prompt: Prompt) -> str:
    if isinstance(prompt, Chat):
        return _content(prompt.messages[-1])
    return " ".join(map(str, prompt)) if isinstance(prompt, tuple) else str(prompt)


def _completion(prompt: Prompt) -> str:
    is_result = isinstance(prompt, Chat) and prompt.messages[-1]["role"] == "tool"
    return f"the result is {_last(prompt)}" if is_result else _obey(_last(prompt))


def _obey(text: str) -> str:
    verb, _, rest = text.partition(" ")
    if verb == "say":
        return rest
    if verb == "call":
        name, _, arguments = rest.partition(" ")
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    return " ".join(text.split(" ")[::-1])


class SharedWords(dragoman.Model):
    """Score a document by the number of words that it shares with the query."""

    placement = "inline"

    def score(self, call: Score) -> Scored:
        return Scored(tuple(float(len(set(a.split()) & set(b.split()))) for a, b in call.pairs), len(call.pairs))


class Angles(dragoman.Model):
    """Embed a text, an angle in degrees, as a unit vector."""

    placement = "inline"

    def embed(self, call: Embed) -> Embedded:
        angles = np.radians([float(text) for text in call.inputs if isinstance(text, str)])
        return Embedded(Tensor.of(np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)), len(angles))


class Doubler(dragoman.Model):
    """Double numbers, and repeat texts."""

    placement = "inline"
    inputs = (dragoman.TensorSpec("x", dragoman.FP32, (-1, 2)), dragoman.TensorSpec("s", dragoman.BYTES, (-1,)))
    outputs = (dragoman.TensorSpec("y", dragoman.FP32, (-1, 2)), dragoman.TensorSpec("t", dragoman.BYTES, (-1,)))

    def infer(self, call: Infer) -> dict[str, Any]:
        return {"y": call.inputs["x"].data * 2, "t": [text * 2 for text in call.inputs["s"].data]}


# Of a version, which tritony requests.
TRIPLER = """
import dragoman


class Tripler(dragoman.Model):
    placement = "inline"
    inputs = (dragoman.TensorSpec("x", dragoman.FP32, (2,)),)
    outputs = (dragoman.TensorSpec("y", dragoman.FP32, (2,)),)

    def infer(self, call):
        return {"y": call.inputs["x"].data * 3}
"""


async def _serve(folder: Path) -> None:
    models = (Scripted, SharedWords, Angles, Doubler)
    version = folder / "Tripler" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(TRIPLER)
    ports: dict[str, Any] = {"http_port": 0, "max_body_bytes": 1 << 20}
    async with (
        dragoman.Server(str(folder), *models, grpc_port=0, cors_origins="*", control_token=KEY, **ports) as server,
        dragoman.Server(Scripted, grpc_port=-1, api_key=KEY, **ports) as keyed,
    ):
        addresses = {
            "url": f"http://127.0.0.1:{server.http_ports[0]}",
            "grpc": f"127.0.0.1:{server.grpc_port}",
            "keyed": f"http://127.0.0.1:{keyed.http_ports[0]}",
        }
        print(json.dumps(addresses), flush=True)
        await asyncio.to_thread(sys.stdin.read)  # until the tests close it


if __name__ == "__main__":
    import text_models

    text_models.make_model(Path(sys.argv[1]) / "tiny-llama")
    asyncio.run(_serve(Path(sys.argv[1])))
