"""Custom handlers of models."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__custom_handler__"


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


__all__ = ["CustomHandler", "custom_handler", "get_custom_handlers"]
