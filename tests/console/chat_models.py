"""Text models for the tests of the chat: what they generate is in the question."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import dragoman
from dragoman import Generate, Generation, Text, Token, errors
from dragoman.core.text import Chat


class Talker(dragoman.Model):
    """Repeat the last message, a word a token.

    "!fail" raises ModelFailed, "!wait" waits until `gate` is set, "!calls" says how many requests there were, and after
    "!cut" it is at max tokens.
    """

    placement = "inline"
    requests: ClassVar[list[Generate]] = []
    gate: ClassVar[asyncio.Event]

    def load(self) -> None:
        type(self).gate = asyncio.Event()

    def details(self) -> dict[str, Any]:
        template = {"content": ["text", "parts"], "tools": True, "reasoning": True}
        return {"vision": True, "chat_template": template, "default_parameters": {"top_p": 0.9}, "max_context": 4096}

    async def generate(self, call: Generate) -> AsyncIterator[Generation]:
        self.requests.append(call)
        said = _last(call)
        words = said.replace("!calls", str(len(self.requests))).split(" ")
        for i, word in enumerate(words):
            if "!fail" in word:
                raise errors.ModelFailed("it was told to fail")
            if "!wait" in word:
                await self.gate.wait()
            await asyncio.sleep(0)
            text = word if i == 0 else f" {word}"
            is_cut = "!cut" in word
            is_last = i + 1 == len(words) or is_cut
            finish = {"finish": "length"} if is_cut else {"finish": "eos_token", "stop": 2}
            more: dict[str, Any] = {**finish, "whole": said} if is_last else {}
            yield Generation((Text(0, 0, text, (Token(i, text, -0.5),), i + 1, **more),))
            if is_cut:
                return


class Writer(Talker):
    """The same without a chat template."""

    requests: ClassVar[list[Generate]] = []

    def details(self) -> dict[str, Any]:
        return {"chat_template": False, "max_context": 100}


def _last(call: Generate) -> str:
    prompt = call.prompts[0]
    if not isinstance(prompt, Chat):
        return str(prompt)
    content = prompt.messages[-1]["content"]
    return (
        " ".join(part["text"] for part in content if part["type"] == "text") if isinstance(content, list) else content
    )
