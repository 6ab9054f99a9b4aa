"""JSON in the text of a model: where a value ends that comes in pieces, and the call that an object is."""

import json
import re
from typing import Any

from dragoman.protocols.wire import sendable

# What counts outside of a string, and inside of one. No JSON has a `<` there: markup begins, and the value is broken.
_OUTSIDE = re.compile(r'["{}\[\]<]')
_INSIDE = re.compile(r'["\\]')


class Extent:
    """How far an object or a list reaches, by its brackets; `depth` of them are open already."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._quoted = self._escaped = False

    def feed(self, text: str) -> int | None:
        """Where in this piece the value ends; None where it goes on."""
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
    """The name and the arguments, as JSON text, of the call that an object is; None where it is none."""
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
            return name, sendable(written)
        case {"name": str(name)} if len(value) == 1:
            return name, "{}"
    return None
