"""Match the paths of custom handlers: patterns such as "POST /scores/{name}"."""

from collections.abc import Iterable, Mapping
from urllib.parse import unquote


def matched(handlers: Iterable[str], method: str, path: str) -> tuple[str, Mapping[str, str]] | None:
    """Return the first handler that matches method and path, with its path parameters."""
    parts = path.strip("/").split("/")
    for handler in handlers:
        wanted, _, pattern = handler.partition(" ")
        if wanted == method:
            found = _filled(pattern.strip("/").split("/"), parts)
            if found is not None:
                return handler, found
    return None


def _filled(pattern: list[str], parts: list[str]) -> dict[str, str] | None:
    if len(pattern) != len(parts):
        return None
    found = {}
    for wanted, part in zip(pattern, parts, strict=True):
        if wanted[:1] == "{" and wanted[-1:] == "}":
            found[wanted[1:-1]] = unquote(part)
        elif wanted != part:
            return None
    return found
