"""Parse JSON and TOML of others: files, responses, texts in parameters.

What nests deeper than MAX_DEPTH is invalid: code that walks a value calls itself, and may do so only so often. How deep
the parsers of Python's library go depends on its version and on the calls around them.
"""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_DEPTH = 200
_CONTAINERS = (dict, list)


def parse_json(text: str | bytes | bytearray, **hooks: Any) -> Any:
    """Return what `json.loads` returns with these hooks. Raises ValueError for an invalid text."""
    return parse(lambda: json.loads(text, **hooks))


def read_json(path: Path) -> Any:
    """Return the JSON value of a file. Raises OSError, and ValueError for an invalid text."""
    return parse_json(path.read_bytes())


def parse_toml(text: str) -> dict[str, Any]:
    """Return what `tomllib.loads` returns. Raises ValueError for an invalid text."""
    value: dict[str, Any] = parse(lambda: tomllib.loads(text))
    return value


def parse(parser: Callable[[], Any]) -> Any:
    """Return the value that a parser returns. Raises its errors, and ValueError if the value nests too deep."""
    try:
        value = parser()
    except RecursionError:
        raise ValueError(f"it nests deeper than {MAX_DEPTH}") from None
    level = {0: value} if isinstance(value, _CONTAINERS) else {}
    for _ in range(MAX_DEPTH):
        if not level:
            return value
        level = {  # each once: YAML has names for values that occur several times
            id(inner): inner
            for outer in level.values()
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, _CONTAINERS)
        }
    if level:
        raise ValueError(f"it nests deeper than {MAX_DEPTH}")
    return value
