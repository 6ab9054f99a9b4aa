"""Parse tool calls in a stream of generated text; what is certain is passed on at once."""

import re
from collections.abc import Iterator

from dragoman.protocols.text_common.tool_free import Extent, FreeCalls
from dragoman.protocols.text_common.tools import ToolCall, ToolCallDelta, ToolChunk, Tools, new_call

# Where a call is required: `[{"name": ..., "arguments": {...}}, ...]`, the names in this order.
_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([A-Za-z0-9_.\-]+)"\s*,\s*"arguments"\s*:\s*(?=\{)')
_BETWEEN = " \t\r\n[]},"
_LONGEST_HEAD = 4096


class PlainText:
    """No tools: all text is for the user."""

    def feed(self, text: str, *, last: bool, cut: bool) -> ToolChunk:
        return ToolChunk(text)


class NamedCall:
    """One function must be called: the text is its arguments."""

    def __init__(self, name: str) -> None:
        self._call: ToolCall | None = new_call(name)
        self._held = ""

    def feed(self, text: str, *, last: bool, cut: bool) -> ToolChunk:
        text = self._held + text
        out = text.strip() if self._call else text.rstrip()  # space behind the end is nobody's
        self._held = text[len(text.rstrip()) :]
        if not out and not (last and self._call):
            return ToolChunk()
        opens, self._call = self._call, None
        return ToolChunk("", [ToolCallDelta(0, out, opens)])


class RequiredCalls:
    """A call is required: the text is a list of calls, which may be truncated."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._whole: list[str] = []
        self._text = ""
        self._count = 0
        self._extent: Extent | None = None
        self._lost = False

    def feed(self, text: str, *, last: bool, cut: bool) -> ToolChunk:
        self._whole.append(text)
        if not self._lost:
            self._text += text
        deltas = list(self._deltas())
        if self._count or not last:
            return ToolChunk("", deltas)
        return self._other("".join(self._whole), cut=cut)

    def _other(self, text: str, *, cut: bool) -> ToolChunk:
        """Handle text that does not begin a call as required: half a list is not sent to the user."""
        part = FreeCalls(self._tools).feed(text, last=True, cut=cut)
        if not part.deltas and cut and text.lstrip()[:1] in ("", "[", "{"):
            return ToolChunk()
        return part

    def _deltas(self) -> Iterator[ToolCallDelta]:
        while self._text:
            if self._extent:
                stop = self._extent.feed(self._text)
                yield ToolCallDelta(self._count - 1, self._text[:stop])
                self._extent = self._extent if stop is None else None
                self._text = "" if stop is None else self._text[stop:]
                continue
            self._text = self._text.lstrip(_BETWEEN)
            head = _HEAD.match(self._text)
            if head is None or head[1] not in self._tools.names or (self._count and self._tools.single):
                self._lost = head is not None or len(self._text) > _LONGEST_HEAD
                self._text = "" if self._lost else self._text
                return
            self._text, self._extent = self._text[head.end() :], Extent()
            yield ToolCallDelta(self._count, "", new_call(head[1]))
            self._count += 1


TextParser = PlainText | FreeCalls | NamedCall | RequiredCalls


def parser_for(tools: Tools) -> TextParser:
    """Return the parser for a completion, by the tools of the chat and by whether a call is required."""
    if not tools.offered:
        return PlainText()
    if tools.only:
        return NamedCall(tools.only)
    return RequiredCalls(tools) if tools.required else FreeCalls(tools)
