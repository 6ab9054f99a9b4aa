"""Split the reasoning of a model, between tags at the start of a completion, from the text for the user."""

import re
from collections.abc import Mapping, Sequence

from dragoman.core.text import Token
from dragoman_text.apis.common.tool_formats import prefixes

# Start and end tags of reasoning, by model family: DeepSeek, Qwen, GLM and others; Mistral; Seed-OSS; Kimi K1.5;
# Gemma 4; Cohere; MiniMax M3; K2-V3; Apertus; Granite 3.2.
TAGS: Mapping[str, str] = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "\N{WHITE LEFT-POINTING TRIANGLE}think\N{WHITE RIGHT-POINTING TRIANGLE}": (
        "\N{WHITE LEFT-POINTING TRIANGLE}/think\N{WHITE RIGHT-POINTING TRIANGLE}"
    ),
    "<|channel>thought": "<channel|>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<mm:think>": "</mm:think>",
    "<ifm|think>": "</ifm|think>",
    "<|inner_prefix|>": "<|inner_suffix|>",
    "Here is my thought process:": "Here is my response:",
}
# Longest text that may be the beginning of an end tag, or of a tool call.
_MAX_TAG_CHARACTERS = 64
_START, _REASONING, _CONTENT = range(3)


def open_tag(prompt: str) -> str:
    """Return the reasoning tag that a prompt ends with, as templates of reasoning models write it; "" if none."""
    end = prompt[-_MAX_TAG_CHARACTERS:].rstrip()
    return next((tag for tag in TAGS if end.endswith(tag)), "")


class ReasoningParser:
    """Parses one completion in chunks; results do not depend on where chunks end.

    Reasoning begins with a tag at the start of the completion or at the end of the prompt. It ends with its end tag, or
    before one of `calls`, markup that begins a tool call. White space around it is removed. Without an end tag all text
    is reasoning.
    """

    def __init__(self, prompt: str, calls: Sequence[str] = ()) -> None:
        self._calls = calls
        self._text = ""  # not parsed yet
        self._state = _START
        self._count, self._tail, self._counts = 0, "", True
        self._has_reasoning = self._has_content = False
        self._opened = open_tag(prompt)

    @property
    def tokens(self) -> int:
        """Number of tokens of the reasoning."""
        return self._count if self._has_reasoning else 0

    def feed(self, text: str, *, last: bool) -> tuple[str, str]:
        """Return the reasoning and the content that are certain now."""
        self._text += text
        if self._state == _START:
            self._find_start(last=last)
        reasoning = self._parse_reasoning(last=last) if self._state == _REASONING else ""
        if self._state != _CONTENT:
            return reasoning, ""
        content, self._text = self._text, ""
        if self._has_reasoning and not self._has_content:
            content = content.lstrip()
        self._has_content = self._has_content or bool(content)
        return reasoning, content

    def count(self, tokens: Sequence[Token]) -> None:
        """Count tokens, which are those of reasoning until its end tag, if the completion has any."""
        for token in tokens:
            if not self._counts:
                return
            self._count += 1
            self._tail = (self._tail + token.text)[-2 * _MAX_TAG_CHARACTERS :]
            self._counts = not any(tag in self._tail for tag in TAGS.values())

    def _begin(self, tag: str) -> None:
        self._end_tag, self._state, self._has_reasoning = TAGS[tag], _REASONING, True
        enders = (self._end_tag, *self._calls)
        self._end = re.compile("|".join(map(re.escape, enders)))
        self._partial_end = re.compile(f"\\s*(?:{'|'.join(map(prefixes, enders))})\\Z")
        self._has_text = False

    def _find_start(self, *, last: bool) -> None:
        text = self._text.lstrip()
        tag = next((tag for tag in TAGS if text.startswith(tag)), "")
        if tag:
            self._text = text[len(tag) :]
            self._begin(tag)
        elif last or not any(tag.startswith(text) for tag in TAGS):
            if self._opened:
                self._begin(self._opened)
            else:
                self._state, self._counts = _CONTENT, False

    def _parse_reasoning(self, *, last: bool) -> str:
        end = self._end.search(self._text)
        if end:
            reasoning = self._text[: end.start()].rstrip()
            self._text = self._text[end.end() if end[0] == self._end_tag else end.start() :]
            self._state = _CONTENT
        elif last:
            reasoning, self._text = self._text.rstrip(), ""
        else:
            partial = self._partial_end.search(self._text)
            certain = self._text[: partial.start() if partial else None].rstrip()
            reasoning, self._text = certain, self._text[len(certain) :]
        if not self._has_text:
            reasoning = reasoning.lstrip()
            self._has_text = bool(reasoning)
        return reasoning
