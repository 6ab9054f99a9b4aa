"""Incremental parser of generated text that may contain tool calls, in any of the known formats.

Whatever is certain is passed on at once, because completions are streamed: `_parse` runs the method of the current
state until that needs more text. An opener (`OPENER`: markup, or at the start of the text a bare object or list) ends
the text; its `Format` says what follows. Arguments are passed on while they arrive, those of an object whose name
comes last and calls in Python's syntax once they are complete. Markup that leads to no call is text, unchanged.

    state                    expects                                    becomes
    _parse_text              text                                       _parse_opener, at an opener
    _parse_opener            what precedes the calls of the format      _parse_object, _parse_python, _parse_text;
                                                                        after a name _parse_arguments, _parse_parameters
    _parse_object            an object with a name and arguments        _parse_arguments, _parse_after_object;
                                                                        _parse_other_object if it is no call
    _parse_arguments         the rest of arguments in JSON              _parse_after_arguments, _parse_after_object
    _parse_after_arguments   the rest of their object                   _parse_after_object
    _parse_parameters        arguments as parameter tags                _parse_after_object
    _parse_other_object      the rest of an object that is text         _parse_after_object
    _parse_python            calls in Python's syntax                   _parse_after_python, _parse_text
    _parse_after_python      another one of them                        _parse_python, else as _parse_after_object
    _parse_after_object      another object, or the end of the list or  _parse_object, _parse_text
                             of the markup

The booleans are independent of the state. They say what the opener had (`_in_list`, `_named_by_markup`), whether it
has led to a call yet (`_has_calls`), whether calls without markup may still begin (`_started`), and whether the
current call is dropped because only one is allowed (`_dropping`).
"""

import json
import re
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from dragoman.core.documents import parse_json
from dragoman.protocols.wire import replace_surrogates
from dragoman_text.apis.common.python_calls import PythonEndFinder, parse_python_calls
from dragoman_text.apis.common.tool_formats import (
    ENDING,
    FORMATS,
    LIST_END,
    LONGEST_OPENER,
    MEMBERS,
    NEXT,
    OBJECT_END,
    OPENER,
    OPENING,
    PLAIN,
    PYTHON_NAME,
    PYTHON_NAME_PREFIX,
    QWEN,
    SPACE,
    Format,
    may_be_call,
    parse_call_start,
)
from dragoman_text.apis.common.tool_values import MARKUP, XmlParameters
from dragoman_text.apis.common.tools import ChatChunk, ToolCallDelta, Tools, new_call
from dragoman_text.limits import MAX_PYTHON_CALL_CHARACTERS

_CHUNK = 4096
# Characters that matter outside and inside a string. JSON has no `<` outside: markup begins, and the value is broken.
_OUTSIDE = re.compile(r'["{}\[\]<]')
_INSIDE = re.compile(r'["\\]')


# Another call in Python's syntax, and what may become one.
_NEXT_PYTHON = re.compile(f"{SPACE}(?={PYTHON_NAME})")
_MAYBE_PYTHON = re.compile(f"{SPACE}{PYTHON_NAME_PREFIX}")


class JsonEndFinder:
    """Finds the end of an object or list in chunks by its brackets, `depth` of which are open already."""

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
            delimiter = (_INSIDE if self._quoted else _OUTSIDE).search(text, at)
            if delimiter is None:
                return None
            if delimiter[0] == "<":
                return delimiter.start()
            at = delimiter.end()
            match delimiter[0]:
                case "\\":
                    self._escaped = True
                case '"':
                    self._quoted = not self._quoted
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
            if not self._depth:
                return at
        return None


def parse_call(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments (JSON text) of the tool call that an object is; None if it is not one."""
    try:
        return _call(parse_json(text))
    except ValueError:
        return None


def _call(value: Any) -> tuple[str, str] | None:
    match value:
        case {"function": {"name": str(_)} as inner}:
            value = inner
    match value:
        case {"name": str(name), "arguments": arguments} | {"name": str(name), "parameters": arguments}:
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            return name, replace_surrogates(text)
        case {"name": str(name)} if len(value) == 1:
            return name, "{}"
    return None


class ToolCallParser:
    """Parses one completion in chunks; results do not depend on where chunks end.

    A call begins where the name of an offered tool is followed by the `{` of its arguments or by a parameter tag.
    Markup that leads to no call is text, unchanged. White space between calls and the start or end of the text is
    removed. `_state` is the method that parses what comes next; it returns whether another step is possible.
    """

    def __init__(self, tools: Tools) -> None:
        self._tools, self._names, self._single = tools, tools.names, tools.single
        self._text = ""  # not parsed yet
        self._state: Callable[[], bool] = self._parse_text
        self._last = self._truncated = False
        self._parts: list[str | ToolCallDelta] = []
        self._space = ""  # white space that may be at the end of the text
        self._started = self._has_content = False
        self._count = 0
        # of the current calls
        self._format: Format = PLAIN
        self._end_finder = JsonEndFinder()
        self._parameters: XmlParameters | None = None
        self._python_end = PythonEndFinder()
        self._object_start = self._scanned = 0
        self._named_by_markup = self._in_list = self._has_calls = self._dropping = False

    def feed(self, text: str, *, last: bool, cut: bool) -> ChatChunk:
        """Parse a chunk. last: the text is complete; cut: it was truncated by the token limit."""
        self._parts = []
        while len(text) > _CHUNK:  # each step copies the remaining text
            chunk, text = text[:_CHUNK], text[_CHUNK:]
            self._parse(chunk)
        self._last, self._truncated = last, cut
        self._parse(text)
        if last and not self._count:
            self._parts.append(self._space)
        return ChatChunk(self._parts)

    def _parse(self, text: str) -> None:
        self._text += text
        while self._state():
            pass

    # --- results -----------------------------------------------------------------------------------------------

    def _emit_text(self, end: int | None = None) -> None:
        text, self._text = self._space + self._text[:end], "" if end is None else self._text[end:]
        if self._count and not self._has_content:
            text = text.lstrip()
        content = text.rstrip()
        self._space = text[len(content) :]
        self._has_content = self._has_content or bool(content)
        if content:
            self._parts.append(content)

    def _drop_markup(self, end: int) -> None:
        """Drop the markup up to `end` if it belongs to calls; otherwise it is text."""
        if self._has_calls:
            self._text = self._text[end:]
        else:
            self._emit_text(end)

    def _open_call(self, name: str, end: int, call_id: str = "") -> None:
        """Begin a call whose arguments start at `end`; `call_id` is the id that the model wrote."""
        self._text = self._text[end:]
        self._has_calls = True
        self._dropping = self._single and self._count > 0
        if not self._dropping:
            call = new_call(name)
            self._parts.append(ToolCallDelta(self._count, "", replace(call, id=call_id) if call_id else call))
            self._count += 1

    def _emit_arguments(self, arguments: str) -> None:
        if arguments and not self._dropping:
            self._parts.append(ToolCallDelta(self._count - 1, arguments))

    # --- states ------------------------------------------------------------------------------------------------

    def _parse_text(self) -> bool:
        """Text, up to an opener of calls or its possible beginning."""
        space = len(self._text) - len(self._text.lstrip())
        if not self._started and space < len(self._text) and (self._last or not OPENING.match(self._text, space)):
            self._started = True  # calls without markup are only recognized at the start
            if self._text[space] in "{[" and not OPENER.match(self._text, space):
                return self._begin_calls(PLAIN, space)
        opener = OPENER.search(self._text)
        if opener:
            return self._begin_calls(FORMATS[opener[0]], opener.start())
        start = max(0, len(self._text) - LONGEST_OPENER)
        opening = None if self._last else OPENING.search(self._text, start)
        self._emit_text(opening.start() if opening else None)
        return False

    def _begin_calls(self, format_: Format, at: int) -> bool:
        self._emit_text(at)
        self._format, self._started, self._has_calls, self._state = format_, True, False, self._parse_opener
        return True

    def _parse_opener(self) -> bool:
        start = self._format.start.match(self._text)
        if start is None:
            if not self._last and self._format.start_prefix.fullmatch(self._text):
                return False
            return self._end_calls(len(self._format.opener) or 1)
        groups = start.groupdict()
        if groups.get("python"):
            return self._begin_python(start.end(), groups["python"])
        name = groups.get("name") or groups.get("glm")
        self._named_by_markup, self._in_list = name is not None, bool(groups.get("list"))
        if name is None:
            return self._begin_object(start.end())
        if name not in self._names:
            return self._end_calls(len(self._format.opener))
        self._open_call(name, start.end(), groups.get("id") or "")
        markup = "glm" if groups.get("glm") else self._format.parameters
        if self._text.startswith("{") and markup == "qwen":
            return self._enter(self._parse_arguments)
        self._parameters = XmlParameters(self._tools.parameters(name), MARKUP[markup])
        if markup == "qwen":
            self._format = FORMATS[QWEN]
        self._emit_arguments("{")
        return self._enter(self._parse_parameters)

    def _begin_python(self, at: int, name: str) -> bool:
        """Continue with calls in Python's syntax at this offset."""
        if name not in self._names:
            return self._end_calls(at or 1)
        self._python_end, self._object_start, self._scanned = PythonEndFinder(), at, at
        self._state = self._parse_python
        return True

    def _parse_python(self) -> bool:
        scanned, self._scanned = self._scanned, len(self._text)
        end = self._python_end.feed(self._text[scanned:])
        if end is None:
            too_long = len(self._text) - self._object_start > MAX_PYTHON_CALL_CHARACTERS
            return (self._last or too_long) and self._end_calls(self._object_start or 1)
        calls = parse_python_calls(self._text[self._object_start : scanned + end])
        if not calls or not all(name in self._names for name, _ in calls):
            return self._end_calls(self._object_start or 1)
        self._text = self._text[scanned + end :]
        for name, arguments in calls:
            self._open_call(name, 0)
            self._emit_arguments(arguments)
        self._in_list, self._named_by_markup = False, False
        return self._enter(self._parse_after_python)

    def _parse_after_python(self) -> bool:
        """Another call on a new line inside of markup, the end of calls, or text."""
        start = self._format.opener and _NEXT_PYTHON.match(self._text)
        if start and start["python"] in self._names:
            return self._begin_python(start.end(), start["python"])
        if start is None and not self._last and _MAYBE_PYTHON.fullmatch(self._text):
            return False
        return self._parse_after_object()

    def _end_calls(self, end: int) -> bool:
        """Continue with text; what precedes `end` is text as well."""
        self._emit_text(end)
        self._state = self._parse_text
        return True

    def _enter(self, state: Callable[[], bool], depth: int = 0) -> bool:
        self._end_finder, self._scanned, self._state = JsonEndFinder(depth), 0, state
        return True

    def _begin_object(self, at: int) -> bool:
        """Continue with an object at this offset, after markup."""
        self._enter(self._parse_object)
        self._object_start = self._scanned = at
        return True

    def _parse_object(self) -> bool:
        start = parse_call_start(self._text, self._object_start)
        if start and start[0] in self._names:
            self._open_call(*start)
            return self._enter(self._parse_arguments)
        if start or not may_be_call(self._text, self._object_start, self._names):
            return self._reject_object()
        end = self._find_end()
        if end is None:
            return self._last and self._reject_object()
        call = parse_call(self._text[self._object_start : end])
        if call is None or call[0] not in self._names:
            return self._reject_object()
        self._open_call(call[0], end)
        self._emit_arguments(call[1])
        return self._enter(self._parse_after_object)

    def _find_end(self) -> int | None:
        """Return the offset in the text at which the current value ends."""
        scanned, self._scanned = self._scanned, len(self._text)
        end = self._end_finder.feed(self._text[scanned:])
        return None if end is None else scanned + end

    def _reject_object(self) -> bool:
        self._emit_text(self._object_start)
        return self._enter(self._parse_other_object)

    def _parse_other_object(self) -> bool:
        end = self._end_finder.feed(self._text)
        self._emit_text(end)
        return end is not None and self._enter(self._parse_after_object)

    def _parse_arguments(self) -> bool:
        end = self._end_finder.feed(self._text)
        self._emit_arguments(self._text[:end])
        self._text = "" if end is None else self._text[end:]
        following = self._parse_after_object if self._named_by_markup else self._parse_after_arguments
        return end is not None and self._enter(following, depth=1)

    def _parse_parameters(self) -> bool:
        """Arguments as parameter tags."""
        assert self._parameters is not None
        parsed = self._parameters.feed(self._text, last=self._last, cut=self._truncated)
        self._emit_arguments(parsed.arguments)
        self._text = self._text[parsed.used :]
        return parsed.complete and self._enter(self._parse_after_object)

    def _parse_after_arguments(self) -> bool:
        """The rest of the object after the arguments; models may forget to close it."""
        end = OBJECT_END.match(self._text)
        if end:
            self._drop_markup(end.end())
            return self._enter(self._parse_after_object)
        if MEMBERS.match(self._text):
            stop = self._find_end()
            if stop is None and not self._last:
                return False
            self._drop_markup(stop if stop is not None else len(self._text) if self._truncated else 0)
        elif not self._last and ENDING.fullmatch(self._text):
            return False
        return self._enter(self._parse_after_object)

    def _parse_after_object(self) -> bool:
        """Another object, the end of calls, or text."""
        following = None if self._named_by_markup else NEXT.match(self._text)
        if following:
            return self._begin_object(following.end())
        end = LIST_END.match(self._text) if self._in_list else None
        if end:
            self._in_list = False
            self._drop_markup(end.end())
            return True
        may_continue = self._format.separator_prefix.fullmatch(self._text)
        if may_continue and not self._last:
            return False
        closer = self._format.closer and self._format.closer.match(self._text)
        if closer or (may_continue and self._truncated):
            self._drop_markup(closer.end() if closer else len(self._text))
        return self._end_calls(0)
