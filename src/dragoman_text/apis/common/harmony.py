"""Parse completions in the harmony format of gpt-oss: channels of reasoning, text and tool calls."""

import re

from dragoman_text.apis.common.tool_formats import prefixes
from dragoman_text.apis.common.tools import ChatChunk, Reasoning, ToolCallDelta, Tools, new_call

_Part = str | Reasoning | ToolCallDelta
_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_END = re.compile("|".join(map(re.escape, _ENDS)))
_LEADING = re.compile(rf"(?:\s*(?:{'|'.join(map(re.escape, _ENDS))}))+")
_HEAD = re.compile(r"\s*<\|(?:start|channel)\|>")
_PARTIAL = re.compile(f"(?:{'|'.join(map(prefixes, (*_ENDS, _MESSAGE)))})\\Z")
_LONGEST = max(map(len, (*_ENDS, _MESSAGE)))
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([A-Za-z0-9_.\-]{1,128})")
# A prompt of the format ends with the role of the assistant, and maybe with the head of its message.
_PROMPT = re.compile(r"<\|start\|>assistant((?:<\|channel\|>|<\|constrain\|>|[^<])*)(<\|message\|>)?\Z")
_MAX_HEADER_CHARACTERS = 1024


def harmony_head(prompt: str) -> str | None:
    """Return the head of the message that a prompt ends with, "" for none; None if the prompt has another format."""
    match = _PROMPT.search(prompt, max(0, len(prompt) - _MAX_HEADER_CHARACTERS))
    return None if match is None else match[1] + (match[2] or "")


class HarmonyParser:
    """Parses one completion in chunks; results do not depend on where chunks end.

    The channel `analysis` is reasoning, a message to a function a call of it, and any other message text. Messages to
    anything else than an offered tool are text.
    """

    def __init__(self, tools: Tools, head: str = "") -> None:
        self._names, self._single = tools.names, tools.single
        self._text = head
        self._is_body = False
        self._kind = ""
        self._count = 0

    def feed(self, text: str, *, last: bool) -> ChatChunk:
        self._text += text
        parts: list[_Part] = []
        while self._parse_body(parts, last=last) if self._is_body else self._parse_head(parts, last=last):
            pass
        return ChatChunk(parts)

    def _parse_head(self, parts: list[_Part], *, last: bool) -> bool:
        at = self._text.find(_MESSAGE, 0, _MAX_HEADER_CHARACTERS)
        if at < 0:
            is_short = len(self._text) < _MAX_HEADER_CHARACTERS
            if not self._text or (is_short and not last):
                return False
            if is_short and _HEAD.match(self._text):  # cut off
                self._text = ""
                return False
            self._text = _LEADING.sub("", self._text)
            self._kind, self._is_body = "text", True
            return True
        head, self._text = self._text[:at], self._text[at + len(_MESSAGE) :]
        head = head[max(head.rfind("<|start|>"), 0) :]
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        name = recipient[1] if recipient else ""
        self._is_body = True
        if name in self._names:
            self._kind = "dropped" if self._single and self._count else "call"
            if self._kind == "call":
                parts.append(ToolCallDelta(self._count, "", new_call(name)))
                self._count += 1
        else:
            self._kind = "reasoning" if channel and channel[1] == "analysis" else "text"
        return True

    def _parse_body(self, parts: list[_Part], *, last: bool) -> bool:
        end = _END.search(self._text)
        if end:
            body, self._text, self._is_body = self._text[: end.start()], self._text[end.start() :], False
            self._text = self._text.removeprefix(end[0]) if end[0] not in ("<|start|>", "<|channel|>") else self._text
        else:
            partial = None if last else _PARTIAL.search(self._text, max(0, len(self._text) - _LONGEST))
            split = partial.start() if partial else len(self._text)
            body, self._text = self._text[:split], self._text[split:]
        if body:
            match self._kind:
                case "call":
                    parts.append(ToolCallDelta(self._count - 1, body))
                case "reasoning":
                    parts.append(Reasoning(body))
                case "text":
                    parts.append(body)
        return end is not None
