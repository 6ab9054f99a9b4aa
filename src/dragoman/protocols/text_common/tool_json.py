"""JSON in generated text: find the end of a value in a stream, and parse tool calls."""

import json
import re
from typing import Any

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
