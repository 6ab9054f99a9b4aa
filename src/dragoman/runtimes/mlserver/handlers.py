"""Custom handlers of MLServer models: arguments from a request, and the response from the result.

The rules are those of FastAPI, which MLServer uses: path parameters come from the path, single values from the query,
anything else from the JSON body.
"""

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args, get_origin, get_type_hints
from urllib.parse import parse_qsl

import orjson

from dragoman.core.calls import Handle, Handled, Request
from dragoman.core.errors import InvalidInput, InvalidOutput
from dragoman.core.type_aliases import without_aliases
from dragoman.formats.json_document import parse_json
from dragoman.formats.json_scan import check_json
from dragoman.formats.policy import Policy

_POLICY = Policy()
_SINGLE = (str, int, float, bool)
_TRUE, _FALSE = frozenset({"1", "true", "on", "yes"}), frozenset({"0", "false", "off", "no"})


class Handler:
    """A method, `async` or not, that answers at a path."""

    def __init__(self, method: Callable[..., Any], path: str) -> None:
        self._method = method
        self._path = {part[1:-1] for part in path.split("/") if part.startswith("{")}
        hints = _hints(method)
        self._parameters = [
            (p.name, hints.get(p.name, Any), p.default)
            for p in inspect.signature(method).parameters.values()
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        self._bodies = [name for name, hint, _ in self._parameters if self._source(name, hint) == "body"]

    async def answer(self, request: Request[Handled]) -> Handled:
        """Call the method. Raises InvalidInput naming the argument that is missing or invalid."""
        call = request.call
        assert isinstance(call, Handle)
        query = dict(parse_qsl(call.query, keep_blank_values=True))
        body = _json(call.content) if self._bodies else None
        arguments = {}
        for name, hint, default in self._parameters:
            match self._source(name, hint):
                case "request":
                    arguments[name] = _request(hint, call, request.metadata)
                    continue
                case "path":
                    given = call.params.get(name)
                case "query":
                    given = query.get(name)
                case _:
                    given = body if len(self._bodies) == 1 else _member(body, name)
            arguments[name] = _value(name, given, hint, default)
        result = self._method(**arguments)
        return _to_handled(await result if inspect.isawaitable(result) else result)

    def _source(self, name: str, hint: Any) -> str:
        if getattr(hint, "__name__", "") == "Request":
            return "request"
        if name in self._path:
            return "path"
        return "query" if all(kind in (*_SINGLE, type(None)) for kind in _kinds(hint)) else "body"


class PlainRequest:
    """The request object for handlers whose annotation names a framework that is not installed."""

    def __init__(self, call: Handle, metadata: Mapping[str, str]) -> None:
        self.method = call.method
        self.headers = {"content-type": call.content_type, **metadata}
        self.path_params = dict(call.params)
        self.query_params = dict(parse_qsl(call.query, keep_blank_values=True))
        self._content = call.content

    async def body(self) -> bytes:
        return self._content

    async def json(self) -> Any:
        return _json(self._content)


# --- in ------------------------------------------------------------------------------------------------------


def _hints(method: Callable[..., Any]) -> dict[str, Any]:
    try:
        return {name: without_aliases(hint) for name, hint in get_type_hints(method).items()}
    except (NameError, TypeError):  # an annotation that exists only for type checkers
        return {}


def _kinds(hint: Any) -> Sequence[Any]:
    return get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _json(content: bytes) -> Any:
    return parse_json(content, _POLICY) if content.strip() else None


def _member(body: Any, name: str) -> Any:
    return body.get(name) if isinstance(body, Mapping) else None


def _value(name: str, given: Any, hint: Any, default: Any) -> Any:
    if given is None:
        if default is not inspect.Parameter.empty:
            return default
        if type(None) in _kinds(hint):
            return None
        raise InvalidInput(f"'{name}' is missing; expected {_describe(hint)}")
    kinds = [kind for kind in _kinds(hint) if kind is not type(None)]
    for kind in kinds:
        try:
            return _as(kind, given)
        except (ValueError, TypeError):
            continue
    raise InvalidInput(f"'{name}': expected {_describe(hint)}, got {str(given)[:100]!r}")


def _as(kind: Any, given: Any) -> Any:
    """Convert `given` to an object of `kind`. Raises ValueError or TypeError."""
    kind = get_origin(kind) or kind
    if kind is Any or not isinstance(kind, type) or kind is inspect.Parameter.empty:
        return given
    if kind is bool and isinstance(given, str):
        if given.lower() not in _TRUE | _FALSE:
            raise ValueError(given)
        return given.lower() in _TRUE
    if kind in (int, float) and isinstance(given, str | int | float) and not isinstance(given, bool):
        return kind(given)
    if isinstance(given, kind):
        return given
    if isinstance(given, Mapping) and hasattr(kind, "model_dump"):
        return kind(**given)
    raise TypeError(kind.__name__)


def _describe(hint: Any) -> str:
    return str(getattr(hint, "__name__", hint))


def _request(hint: Any, call: Handle, metadata: Mapping[str, str]) -> Any:
    """Return the request as an instance of the annotation if that is a class of Starlette, else a PlainRequest."""
    if not str(getattr(hint, "__module__", "")).startswith("starlette"):
        return PlainRequest(call, metadata)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": call.content, "more_body": False}

    headers = {"content-type": call.content_type, **metadata}
    scope = {
        "type": "http",
        "method": call.method,
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": call.query.encode(),
        "headers": [(k.encode("latin-1"), v.encode("latin-1", "replace")) for k, v in headers.items() if v],
        "path_params": dict(call.params),
    }
    return _bounded_request_class(hint)(scope, receive)


@functools.cache
def _bounded_request_class(request_class: Any) -> Any:
    """Return a subclass of Starlette's Request whose `json()` rejects bodies beyond the limits of JSON."""

    class BoundedRequest(request_class):  # type: ignore[misc]
        async def json(self) -> Any:
            check_json(await self.body(), _POLICY)
            return await super().json()

    return BoundedRequest


# --- out -----------------------------------------------------------------------------------------------------


def _to_handled(result: Any) -> Handled:
    if isinstance(result, Handled):
        return result
    if hasattr(result, "status_code") and hasattr(result, "body"):  # a response of Starlette's
        headers = {k: v for k, v in result.headers.items() if k not in ("content-length", "content-type")}
        return Handled(bytes(result.body), result.headers.get("content-type", ""), result.status_code, headers)
    try:
        return Handled(orjson.dumps(result, default=_to_plain, option=orjson.OPT_NON_STR_KEYS))
    except TypeError as error:
        raise InvalidOutput(f"a custom handler gave {type(result).__name__}, which is no JSON: {error}") from error


def _to_plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump()
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, set | frozenset | tuple):
        return list(value)
    raise TypeError(f"{type(value).__name__} is no JSON")
