"""Serve the models of these tests in a process of its own: python served_models.py FOLDER; it prints its port.

The clients live in another environment than the server, so that neither constrains the other's dependencies.
"""

import asyncio
import sys
from pathlib import Path

import numpy as np

import dragoman
from dragoman.core.calls import Embed, Embedded, Generate
from dragoman.core.scoring import Score, Scored
from dragoman.core.tensor import Tensor
from dragoman.core.text import Chat, Generation, Prompt, PromptInfo, Text, Token, merge_chunks


class Scripted(dragoman.Model):
    """Do what the last message says, one token for each word.

    `say TEXT` is answered with the text, `call NAME ARGUMENTS` with a call of a tool, the result of a tool with
    `the result is RESULT`, and anything else with its words in reverse order.
    """

    placement = "inline"

    async def generate(self, call: Generate):  # type: ignore[no-untyped-def]
        chunks = []
        for i, prompt in enumerate(call.prompts):
            words = _completion(prompt).split(" ")
            tokens = [Token(10 + len(word), f" {word}" if at else word, -0.5) for at, word in enumerate(words)]
            limit = call.sampling.max_new_tokens
            finish = "length" if limit is not None and limit < len(tokens) else "eos_token"
            tokens = tokens[:limit]
            whole = "".join(token.text for token in tokens)
            for at, token in enumerate(tokens, 1):
                end = {"finish": finish, "whole": whole} if at == len(tokens) else {}
                infos = tuple(PromptInfo("", 3) for _ in call.prompts) if i == 0 and at == 1 else ()
                chunk = Generation((Text(i, 0, token.text, (token,), at, **end),), infos)  # type: ignore[arg-type]
                if call.stream:
                    yield chunk
                chunks.append(chunk)
        if not call.stream:
            yield merge_chunks(chunks)


def _completion(prompt: Prompt) -> str:
    if not isinstance(prompt, Chat):
        return _obey(" ".join(map(str, prompt)) if isinstance(prompt, tuple) else str(prompt))
    last = prompt.messages[-1]
    content = last.get("content") or ""
    if not isinstance(content, str):
        content = " ".join(part.get("text", "") for part in content)
    return f"the result is {content}" if last["role"] == "tool" else _obey(content)


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


async def _serve(folder: Path) -> None:
    models = (Scripted, SharedWords, Angles)
    async with dragoman.Server(str(folder), *models, http_port=0, grpc_port=-1) as server:
        print(server.http_ports[0], flush=True)
        await asyncio.to_thread(sys.stdin.read)  # until the tests close it


if __name__ == "__main__":
    import text_models

    text_models.make_model(Path(sys.argv[1]) / "tiny-llama")
    asyncio.run(_serve(Path(sys.argv[1])))
