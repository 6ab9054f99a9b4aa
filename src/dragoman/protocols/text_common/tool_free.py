"""The text of a model that may call tools, read as it comes: what is certain goes on, and so do the calls in it."""

import json
import re
from collections.abc import Callable
from typing import Any

from dragoman.protocols.text_common.tool_formats import (
    ENDING,
    FORMATS,
    LIST_END,
    MEMBERS,
    NEXT,
    OBJECT_END,
    OPENER,
    OPENING,
    PLAIN,
    QWEN,
    Format,
    head,
    may_be_call,
)
from dragoman.protocols.text_common.tool_xml import XmlParameters
from dragoman.protocols.text_common.tools import ToolCallDelta, ToolChunk, Tools, new_call
from dragoman.protocols.wire import replace_surrogates

# What counts outside of a string, and inside of one. No JSON has a `<` there: markup begins, and the value is broken.
_OUTSIDE = re.compile(r'["{}\[\]<]')
_INSIDE = re.compile(r'["\\]')


class Extent:
    """Finds the end of an object or list by its brackets, `depth` of which are open already."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._quoted = self._escaped = False

    def feed(self, text: str) -> int | None:
        """Return the offset in this chunk at which the value ends; None if it continues."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            found = (_INSIDE if self._quoted else _OUTSIDE).search(text, at)
            if found is None:
                return None
            if found[0] == "<":
                return found.start()
            at = found.end()
            self._take(found[0])
            if not self._depth:
                return at
        return None

    def _take(self, character: str) -> None:
        match character:
            case "\\":
                self._escaped = True
            case '"':
                self._quoted = not self._quoted
            case "{" | "[":
                self._depth += 1
            case _:
                self._depth -= 1


def call_in(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments (JSON text) of the tool call that an object is; None if it is not one."""
    try:
        value = json.loads(text)
        return _call(value)
    except (ValueError, RecursionError):
        return None


def _call(value: Any) -> tuple[str, str] | None:
    match value:
        case {"function": {"name": str(_)} as inner}:
            value = inner
    match value:
        case {"name": str(name), "arguments": arguments} | {"name": str(name), "parameters": arguments}:
            written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            return name, replace_surrogates(written)
        case {"name": str(name)} if len(value) == 1:
            return name, "{}"
    return None


_AT_ONCE = 4096


class FreeCalls:
    """Reads one text in pieces, which may be cut anywhere: what comes of it is the same.

    A call is one from where its name, of a tool that there is, is followed by the `{` of its arguments, or by the mark
    of a parameter. Markup that leads to no call is text, to the letter. Space between calls and the text's start or end
    is left out.
    """

    def __init__(self, tools: Tools) -> None:
        self._tools, self._names, self._single = tools, tools.names, tools.single
        self._text = ""  # what is not decided yet
        self._step: Callable[[], bool] = self._free
        self._last = self._cut = False
        self._content: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self._space = ""
        self._begun = self._said = False
        self._count = 0
        # of the calls that are being read
        self._format: Format = PLAIN
        self._extent = Extent()
        self._given: XmlParameters | None = None
        self._at = self._seen = 0
        self._named = self._listed = self._called = self._muted = False

    def feed(self, text: str, *, last: bool, cut: bool) -> ToolChunk:
        self._content, self._deltas = [], []
        while len(text) > _AT_ONCE:  # each step copies what is left
            piece, text = text[:_AT_ONCE], text[_AT_ONCE:]
            self._read(piece)
        self._last, self._cut = last, cut
        self._read(text)
        if last and not self._count:
            self._content.append(self._space)
        return ToolChunk("".join(self._content), self._deltas)

    def _read(self, text: str) -> None:
        self._text += text
        while self._step():
            pass

    # --- what comes of it ------------------------------------------------------------------------------------

    def _say(self, end: int | None = None) -> None:
        """The text up to there is for the reader."""
        text, self._text = self._space + self._text[:end], "" if end is None else self._text[end:]
        if self._count and not self._said:
            text = text.lstrip()
        said = text.rstrip()
        self._space = text[len(said) :]
        self._said = self._said or bool(said)
        self._content.append(said)

    def _drop(self, end: int) -> None:
        """The text up to there is the markup of calls, if there were any."""
        if self._called:
            self._text = self._text[end:]
        else:
            self._say(end)

    def _open(self, name: str, end: int) -> None:
        """A call begins, whose arguments do at that place."""
        self._text = self._text[end:]
        self._called = True
        self._muted = self._single and self._count > 0
        if not self._muted:
            self._deltas.append(ToolCallDelta(self._count, "", new_call(name)))
            self._count += 1

    def _add(self, arguments: str) -> None:
        if arguments and not self._muted:
            self._deltas.append(ToolCallDelta(self._count - 1, arguments))

    # --- steps: each says whether the next one can be taken ------------------------------------------------------

    def _free(self) -> bool:
        """Text, up to what opens calls, or may."""
        space = len(self._text) - len(self._text.lstrip())
        if not self._begun and space < len(self._text) and (self._last or not OPENING.match(self._text, space)):
            self._begun = True  # calls without markup stand at the start alone
            if self._text[space] in "{[" and not OPENER.match(self._text, space):
                return self._enter(PLAIN, space)
        opener = OPENER.search(self._text)
        if opener:
            return self._enter(FORMATS[opener[0]], opener.start())
        opening = None if self._last else OPENING.search(self._text)
        self._say(opening.start() if opening else None)
        return False

    def _enter(self, way: Format, at: int) -> bool:
        self._say(at)
        self._format, self._begun, self._called, self._step = way, True, False, self._opened
        return True

    def _opened(self) -> bool:
        """What opens calls, and has to be followed by one."""
        start = self._format.start.match(self._text)
        if start is None:
            if not self._last and self._format.starting.fullmatch(self._text):
                return False
            return self._leave(len(self._format.opener) or 1)
        found = start.groupdict()
        name = found.get("name")
        self._named, self._listed = name is not None, bool(found.get("list"))
        if name is None:
            return self._meet(start.end())
        if name not in self._names:
            return self._leave(len(self._format.opener))
        self._open(name, start.end())
        if not self._text.startswith("<"):
            return self._go(self._arguments)
        self._given, self._format = XmlParameters(self._tools.parameters(name)), FORMATS[QWEN]
        self._add("{")
        return self._go(self._parameters)

    def _leave(self, end: int) -> bool:
        self._say(end)
        self._step = self._free
        return True

    def _go(self, step: Callable[[], bool], depth: int = 0) -> bool:
        self._extent, self._seen, self._step = Extent(depth), 0, step
        return True

    def _meet(self, at: int) -> bool:
        """An object, with markup before it."""
        self._go(self._object)
        self._at = self._seen = at
        return True

    def _object(self) -> bool:
        """An object that is a call, or may be one."""
        begun = head(self._text, self._at)
        if begun and begun[0] in self._names:
            self._open(*begun)
            return self._go(self._arguments)
        if begun or not may_be_call(self._text, self._at, self._names):
            return self._pass()
        stop = self._reach()
        if stop is None:
            return self._last and self._pass()
        found = call_in(self._text[self._at : stop])
        if found is None or found[0] not in self._names:
            return self._pass()
        self._open(found[0], stop)
        self._add(found[1])
        return self._go(self._between)

    def _reach(self) -> int | None:
        """Where in the text the value ends whose extent is looked for."""
        seen, self._seen = self._seen, len(self._text)
        stop = self._extent.feed(self._text[seen:])
        return None if stop is None else seen + stop

    def _pass(self) -> bool:
        self._say(self._at)
        return self._go(self._other)

    def _other(self) -> bool:
        """An object that is no call."""
        stop = self._extent.feed(self._text)
        self._say(stop)
        return stop is not None and self._go(self._between)

    def _arguments(self) -> bool:
        stop = self._extent.feed(self._text)
        self._add(self._text[:stop])
        self._text = "" if stop is None else self._text[stop:]
        return stop is not None and self._go(self._between if self._named else self._tail, depth=1)

    def _parameters(self) -> bool:
        """Arguments that come as parameters, each with a mark of its own."""
        assert self._given is not None
        read = self._given.feed(self._text, last=self._last, cut=self._cut)
        self._add(read.arguments)
        self._text = self._text[read.used :]
        return read.over and self._go(self._between)

    def _tail(self) -> bool:
        """What follows the arguments in their object; a model may forget to end it."""
        end = OBJECT_END.match(self._text)
        if end:
            self._drop(end.end())
            return self._go(self._between)
        if MEMBERS.match(self._text):
            stop = self._reach()
            if stop is None and not self._last:
                return False
            self._drop(stop if stop is not None else len(self._text) if self._cut else 0)
        elif not self._last and ENDING.fullmatch(self._text):
            return False
        return self._go(self._between)

    def _between(self) -> bool:
        """What follows an object: another one, the end of calls, or text."""
        step = None if self._named else NEXT.match(self._text)
        if step:
            return self._meet(step.end())
        end = LIST_END.match(self._text) if self._listed else None
        if end:
            self._listed = False
            self._drop(end.end())
            return True
        held = self._format.going_on.fullmatch(self._text)
        if held and not self._last:
            return False
        closer = self._format.closer and self._format.closer.match(self._text)
        if closer or (held and self._cut):
            self._drop(closer.end() if closer else len(self._text))
        return self._leave(0)
