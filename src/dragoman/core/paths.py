"""Match the paths of custom handlers: patterns such as "POST /scores/{name}"."""

from collections.abc import Iterable, Mapping
from urllib.parse import unquote


def match_handler(handlers: Iterable[str], method: str, path: str) -> tuple[str, Mapping[str, str]] | None:
    """Return the first handler that matches method and path, with its path parameters."""
    parts = path.strip("/").split("/")
    for handler in handlers:
        handler_method, _, pattern = handler.partition(" ")
        if handler_method == method:
            parameters = _match_path(pattern.strip("/").split("/"), parts)
            if parameters is not None:
                return handler, parameters
    return None


def _match_path(pattern: list[str], parts: list[str]) -> dict[str, str] | None:
    if len(pattern) != len(parts):
        return None
    parameters = {}
    for expected, part in zip(pattern, parts, strict=True):
        if expected[:1] == "{" and expected[-1:] == "}":
            parameters[expected[1:-1]] = unquote(part)
        elif expected != part:
            return None
    return parameters
