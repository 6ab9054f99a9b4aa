"""Custom handlers of models."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from dragoman.core.calls import Handle
from dragoman.formats.json_document import parse_json
from dragoman.formats.policy import Policy

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__custom_handler__"
POLICY = Policy()


@dataclass(frozen=True, slots=True)
class CustomHandler:
    """Path and method of a custom handler."""

    rest_path: str
    rest_method: str = "POST"


def custom_handler(rest_path: str, rest_method: str = "POST") -> Callable[[F], F]:
    """Mark a method as the handler of a path."""

    def mark(method: F) -> F:
        setattr(method, _MARK, CustomHandler(rest_path, rest_method))
        return method

    return mark


def get_custom_handlers(model: Any) -> list[tuple[CustomHandler, Callable[..., Any]]]:
    """Return the handlers of a model."""
    methods = inspect.getmembers(model, callable)
    return [(getattr(method, _MARK), method) for _, method in methods if hasattr(method, _MARK)]


class PlainRequest:
    """The request object for handlers whose annotation does not name a class of Starlette."""

    def __init__(self, call: Handle, metadata: Mapping[str, str]) -> None:
        self.method = call.method
        self.headers = {"content-type": call.content_type, **metadata}
        self.path_params = dict(call.params)
        self.query_params = dict(parse_qsl(call.query, keep_blank_values=True))
        self._content = call.content

    async def body(self) -> bytes:
        return self._content

    async def json(self) -> Any:
        return parse_body(self._content)


def parse_body(content: bytes) -> Any:
    """Return the JSON of a body, None if it is empty. Raises InvalidInput."""
    return parse_json(content, POLICY) if content.strip() else None


__all__ = ["CustomHandler", "PlainRequest", "custom_handler", "get_custom_handlers"]
