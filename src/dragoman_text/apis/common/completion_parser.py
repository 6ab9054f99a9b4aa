"""Parse the completion of a chat: reasoning, text for the user and tool calls."""

import re
from collections.abc import Iterator

from dragoman.core.text import Text
from dragoman_text.apis.common.harmony import HarmonyParser, harmony_head
from dragoman_text.apis.common.reasoning import ReasoningParser
from dragoman_text.apis.common.tool_formats import FORMATS
from dragoman_text.apis.common.tool_parser import JsonEndFinder, ToolCallParser
from dragoman_text.apis.common.tools import ChatChunk, CustomInputs, Reasoning, ToolCall, ToolCallDelta, Tools, new_call
from dragoman_text.limits import MAX_CALL_START_CHARACTERS

# The output if a call is required: `[{"name": ..., "arguments": {...}}, ...]`, in this order.
_CALL_START = re.compile(r'\{\s*"name"\s*:\s*"([A-Za-z0-9_.\-]+)"\s*,\s*"arguments"\s*:\s*(?=\{)')
_SEPARATORS = " \t\r\n[]},"


class PlainText:
    """Parser for chats without tools: all text is for the user."""

    def feed(self, text: str, *, last: bool, cut: bool) -> ChatChunk:
        return ChatChunk((text,) if text else ())


class NamedCall:
    """Parser for a required call of one function: the text is the arguments."""

    def __init__(self, name: str) -> None:
        self._call: ToolCall | None = new_call(name)
        self._held = ""

    def feed(self, text: str, *, last: bool, cut: bool) -> ChatChunk:
        text = self._held + text
        out = text.strip() if self._call else text.rstrip()  # white space after the arguments is removed
        self._held = text[len(text.rstrip()) :]
        if not out and not (last and self._call):
            return ChatChunk()
        opens, self._call = self._call, None
        return ChatChunk([ToolCallDelta(0, out, opens)])


class RequiredCalls:
    """Parser for required calls: the text is a JSON list of calls, which may be truncated."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._chunks: list[str] = []
        self._text = ""
        self._count = 0
        self._end_finder: JsonEndFinder | None = None
        self._is_other = False

    def feed(self, text: str, *, last: bool, cut: bool) -> ChatChunk:
        self._chunks.append(text)
        if not self._is_other:
            self._text += text
        deltas = list(self._deltas())
        if self._count or not last:
            return ChatChunk(deltas)
        return self._parse_other("".join(self._chunks), cut=cut)

    def _parse_other(self, text: str, *, cut: bool) -> ChatChunk:
        """Handle text that does not begin a call as required: a truncated list is not sent to the user."""
        chunk = ToolCallParser(self._tools).feed(text, last=True, cut=cut)
        if not chunk.deltas and cut and text.lstrip()[:1] in ("", "[", "{"):
            return ChatChunk()
        return chunk

    def _deltas(self) -> Iterator[ToolCallDelta]:
        while self._text:
            if self._end_finder:
                stop = self._end_finder.feed(self._text)
                yield ToolCallDelta(self._count - 1, self._text[:stop])
                self._end_finder = self._end_finder if stop is None else None
                self._text = "" if stop is None else self._text[stop:]
                continue
            self._text = self._text.lstrip(_SEPARATORS)
            start = _CALL_START.match(self._text)
            if start is None or start[1] not in self._tools.names or (self._count and self._tools.single):
                self._is_other = start is not None or len(self._text) > MAX_CALL_START_CHARACTERS
                self._text = "" if self._is_other else self._text
                return
            self._text, self._end_finder = self._text[start.end() :], JsonEndFinder()
            yield ToolCallDelta(self._count, "", new_call(start[1]))
            self._count += 1


TextParser = PlainText | ToolCallParser | NamedCall | RequiredCalls


def parser_for(tools: Tools) -> TextParser:
    """Return the parser for a completion, by the tools of the chat and by whether a call is required."""
    if not tools.offered:
        return PlainText()
    if tools.only:
        return NamedCall(tools.only)
    return RequiredCalls(tools) if tools.required else ToolCallParser(tools)


# Markup of tool calls that ends reasoning, if tools are offered.
_CALL_MARKUP = tuple(opener for opener in FORMATS if opener.startswith("<") and opener != "<function=")


class CompletionParser:
    """Parses one completion of a chat in chunks; results do not depend on where chunks end.

    prompt: the text of the prompt after the template. splits_reasoning: false if a grammar constrains the completion,
    which then has no reasoning.
    """

    def __init__(self, tools: Tools, prompt: str = "", *, splits_reasoning: bool = True) -> None:
        self._content = parser_for(tools)
        calls = _CALL_MARKUP if tools.offered else ()
        self._reasoning = ReasoningParser(prompt, calls)
        head = harmony_head(prompt) if splits_reasoning else None
        self._harmony = None if head is None else HarmonyParser(tools, head)
        self._splits_reasoning = splits_reasoning
        self._custom = CustomInputs(tools.custom) if tools.custom else None

    @property
    def reasoning_tokens(self) -> int:
        return self._reasoning.tokens

    def feed(self, text: Text, *, is_whole: bool = False) -> ChatChunk:
        """Parse a chunk of the completion, or all of it."""
        chunk = self._feed(text, is_whole=is_whole)
        return chunk if self._custom is None else ChatChunk(self._custom.convert(chunk.parts, last=bool(text.finish)))

    def _feed(self, text: Text, *, is_whole: bool) -> ChatChunk:
        new, last, cut = text.whole if is_whole else text.text, bool(text.finish), text.finish == "length"
        if self._harmony is not None:
            return self._harmony.feed(new, last=last)
        if not self._splits_reasoning:
            return self._content.feed(new, last=last, cut=cut)
        self._reasoning.count(text.tokens)
        reasoning, new = self._reasoning.feed(new, last=last)
        content = self._content.feed(new, last=last, cut=cut) if new or last else ChatChunk()
        return ChatChunk((Reasoning(reasoning), *content.parts)) if reasoning else content
