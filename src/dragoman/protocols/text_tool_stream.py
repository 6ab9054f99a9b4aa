"""The text of one choice as it comes, read for the calls of tools in it: what is certain goes on at once."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dragoman.protocols.text_tools import OPENERS, ToolCall, Tools, call

# Where a call is required: `[{"name": ..., "arguments": {...}}, ...]`, the names in this order.
_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([A-Za-z0-9_.\-]+)"\s*,\s*"arguments"\s*:\s*(?=\{)')
_BETWEEN = " \t\r\n[]},"
_LONGEST_HEAD = 4096


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of the arguments of the call at `index`; `opens` is that call, with its first piece."""

    index: int
    arguments: str
    opens: ToolCall | None = None

    def told(self) -> dict[str, Any]:
        opened = replace(self.opens, arguments=self.arguments).told() if self.opens else None
        return {"index": self.index, **(opened or {"function": {"arguments": self.arguments}})}


@dataclass(frozen=True, slots=True)
class Part:
    """What became certain: text for the reader, and pieces of calls."""

    content: str = ""
    deltas: Sequence[Delta] = ()


def _opened(calls: Sequence[ToolCall]) -> list[Delta]:
    return [Delta(i, made.arguments, made) for i, made in enumerate(calls)]


def merged(deltas: Sequence[Delta]) -> list[Delta]:
    """The pieces of each call as one piece."""
    found: dict[int, Delta] = {}
    for new in deltas:
        old = found.get(new.index)
        found[new.index] = new if old is None else replace(old, arguments=old.arguments + new.arguments)
    return list(found.values())


def gathered(part: Part) -> list[ToolCall]:
    """The calls that begin in one part, each with its arguments as far as they go."""
    return [replace(delta.opens, arguments=delta.arguments) for delta in merged(part.deltas) if delta.opens]


class PlainText:
    """No tools: all is for the reader."""

    def feed(self, text: str, *, last: bool, cut: bool) -> Part:
        return Part(text)


class FreeCalls:
    """The model may call: its text goes on, but what may become a call is held back to the end."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._text = ""
        self._holding = False
        self._begun = False

    def feed(self, text: str, *, last: bool, cut: bool) -> Part:
        self._text += text
        if last:
            content, calls = self._tools.parsed(self._text)
            return Part(content, _opened(calls))
        if self._holding:
            return Part()
        free = self._free()
        out, self._text = self._text[:free], self._text[free:]
        self._begun = self._begun or bool(out.strip())
        return Part(out)

    def _free(self) -> int:
        """How much of the text is certainly not of a call."""
        if not self._begun and self._text.lstrip()[:1] in ("", "{", "["):
            self._holding = self._text.strip() != ""
            return 0
        at = min((i for opener in OPENERS if (i := self._text.find(opener)) >= 0), default=-1)
        if at >= 0:
            self._holding = True
            return at
        longest = max(len(opener) for opener in OPENERS) - 1
        for start in range(max(0, len(self._text) - longest), len(self._text)):
            if any(opener.startswith(self._text[start:]) for opener in OPENERS):
                return start
        return len(self._text)


class NamedCall:
    """One function has to be called: the text is its arguments."""

    def __init__(self, name: str) -> None:
        self._call: ToolCall | None = call(name)
        self._held = ""

    def feed(self, text: str, *, last: bool, cut: bool) -> Part:
        text = self._held + text
        out = text.strip() if self._call else text.rstrip()  # space behind the end is nobody's
        self._held = text[len(text.rstrip()) :]
        if not out and not (last and self._call):
            return Part()
        opens, self._call = self._call, None
        return Part("", [Delta(0, out, opens)])


class RequiredCalls:
    """A call has to be made: the text is a list of them, which may be cut off anywhere."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._whole: list[str] = []
        self._text = ""
        self._count = 0
        self._depth = 0
        self._inside = self._quoted = self._escaped = self._lost = False

    def feed(self, text: str, *, last: bool, cut: bool) -> Part:
        self._whole.append(text)
        if not self._lost:
            self._text += text
        deltas = list(self._deltas())
        if self._count or not last:
            return Part("", deltas)
        return self._other("".join(self._whole), cut=cut)

    def _other(self, text: str, *, cut: bool) -> Part:
        """What to make of a text in which no call was begun as it should: half a list is not for the reader."""
        content, calls = self._tools.parsed(text)
        if not calls and cut and text.lstrip()[:1] in ("", "[", "{"):
            return Part()
        return Part(content, _opened(calls))

    def _deltas(self) -> Iterator[Delta]:
        while self._text:
            if self._inside:
                stop = self._stop()
                yield Delta(self._count - 1, self._text[:stop])
                self._text = self._text[stop:]
                continue
            self._text = self._text.lstrip(_BETWEEN)
            head = _HEAD.match(self._text)
            if head is None or head[1] not in self._tools.names or (self._count and self._tools.single):
                self._lost = head is not None or len(self._text) > _LONGEST_HEAD
                self._text = "" if self._lost else self._text
                return
            self._text, self._inside = self._text[head.end() :], True
            yield Delta(self._count, "", call(head[1]))
            self._count += 1

    def _stop(self) -> int:
        """Where the arguments end in the text, or the text does."""
        for i, character in enumerate(self._text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = character == "\\", character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self._inside = False
                    return i + 1
        return len(self._text)


Reader = PlainText | FreeCalls | NamedCall | RequiredCalls


def reader(tools: Tools) -> Reader:
    """What reads a text, by the tools that the chat offers and by whether it has to call one."""
    if not tools.offered:
        return PlainText()
    if tools.only:
        return NamedCall(tools.only)
    return RequiredCalls(tools) if tools.required else FreeCalls(tools)
