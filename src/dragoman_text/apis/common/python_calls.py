"""Tool calls in Python's syntax, such as `[weather(city="Oslo"), time()]`."""

import ast
import json
import re
import warnings

from dragoman.protocols.wire import replace_surrogates
from dragoman_text.limits import MAX_PYTHON_CALL_CHARACTERS

_DELIMITER = re.compile(r"""["'\\()\[\]{}]""")
_CLOSERS = {")": "(", "]": "[", "}": "{"}


class PythonEndFinder:
    """Finds the end of a list or of calls in chunks; brackets in strings do not count."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._quote = ""
        self._is_escaped = False

    def feed(self, text: str) -> int | None:
        """Return the offset in this chunk at which the first bracket is closed, or is closed by another one."""
        at = 0
        while at < len(text):
            if self._is_escaped:
                self._is_escaped, at = False, at + 1
                continue
            delimiter = _DELIMITER.search(text, at)
            if delimiter is None:
                return None
            character, at = delimiter[0], delimiter.end()
            if character == "\\":
                self._is_escaped = True
            elif self._quote:
                self._quote = "" if character == self._quote else self._quote
            elif character in "\"'":
                self._quote = character
            elif character in _CLOSERS:
                if not self._open or self._open.pop() != _CLOSERS[character] or not self._open:
                    return at
            else:
                self._open.append(character)
        return None


def parse_python_calls(text: str) -> list[tuple[str, str]] | None:
    """Return name and arguments (JSON text) of each call; None if the text is anything but calls with literals."""
    if len(text) > MAX_PYTHON_CALL_CHARACTERS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the syntax of the text
            (statement,) = ast.parse(text.strip()).body
            value = statement.value if isinstance(statement, ast.Expr) else None
            nodes = value.elts if isinstance(value, ast.List) else [value]
            return [_parse_call(node) for node in nodes]
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _parse_call(node: ast.expr | None) -> tuple[str, str]:
    """Return name and arguments of a call. Raises ValueError or TypeError if it is not one."""
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        raise ValueError("not a call with keywords")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("not a call with keywords")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return ast.unparse(node.func), replace_surrogates(json.dumps(arguments, ensure_ascii=False, allow_nan=False))
