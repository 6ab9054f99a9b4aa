"""Custom handlers of MLServer models: arguments from a request, and the response from the result.

The rules are those of FastAPI, which MLServer uses: path parameters come from the path, single values from the query,
anything else from the JSON body. Markers of FastAPI (`Body`, `Query`, `Path`, `Header`, `Depends`) say otherwise.
"""

import functools
import inspect
import types
import typing
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin
from urllib.parse import parse_qsl

from dragoman.core.calls import Handle, Handled, Request
from dragoman.core.errors import InvalidInput, InvalidOutput
from dragoman.core.type_aliases import without_aliases
from dragoman.formats import fast_json
from dragoman.formats.json_scan import check_json
from dragoman_mlserver.mlserver.handlers import POLICY, PlainRequest, parse_body

Source = Literal["request", "path", "query", "header", "body", "depends"]
_SOURCES: tuple[Source, ...] = ("path", "query", "header", "depends")
_FASTAPI = "fastapi.params"
# The types of the marks of a default that is missing, in Pydantic 2 and 1.
_UNDEFINED_NAMES = ("PydanticUndefinedType", "UndefinedType")
_SINGLE = (str, int, float, bool)
_TRUE, _FALSE = frozenset({"1", "true", "on", "yes"}), frozenset({"0", "false", "off", "no"})


@dataclass(frozen=True, slots=True)
class HandlerParameter:
    """A parameter of a handler: where its value comes from, and under which name.

    `embed`: the value is a member of the body, even if no other parameter comes from the body.
    """

    name: str
    hint: Any
    default: Any
    source: Source
    key: str
    embed: bool = False
    dependency: Callable[..., Any] | None = None

    @classmethod
    def of(cls, parameter: inspect.Parameter, hint: Any, path: Container[str]) -> "HandlerParameter":
        """Return a parameter by its annotation and default, which may be markers of FastAPI such as `Body(...)`."""
        name, default = parameter.name, parameter.default
        markers = [default, *getattr(hint, "__metadata__", ())]
        hint = get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
        marker = next((each for each in markers if type(each).__module__ == _FASTAPI), None)
        if marker is None:
            return cls(name, hint, default, _source(name, hint, path), name)
        if default is marker:
            default = getattr(marker, "default", inspect.Parameter.empty)
            default = (
                inspect.Parameter.empty if default is ... or type(default).__name__ in _UNDEFINED_NAMES else default
            )
        kind = type(marker).__name__.lower()
        source: Source = next((each for each in _SOURCES if each == kind), "body")
        key = getattr(marker, "alias", None) or name
        if source == "header" and key == name and getattr(marker, "convert_underscores", True):
            key = name.replace("_", "-")
        dependency = getattr(marker, "dependency", None) or (hint if source == "depends" else None)
        return cls(name, hint, default, source, key, bool(getattr(marker, "embed", None)), dependency)


def _source(name: str, hint: Any, path: Container[str]) -> Source:
    if getattr(hint, "__name__", "") in ("Request", PlainRequest.__name__):
        return "request"
    if name in path:
        return "path"
    return "query" if all(kind in (*_SINGLE, type(None)) for kind in _kinds(hint)) else "body"


class Handler:
    """A method, `async` or not, that answers at a path."""

    def __init__(self, method: Callable[..., Any], path: str) -> None:
        names = frozenset(part[1:-1] for part in path.split("/") if part.startswith("{"))
        self._method = Arguments(method, names)

    async def answer(self, request: Request[Handled]) -> Handled:
        """Call the method. Raises InvalidInput naming the argument that is missing or invalid."""
        return _to_handled(await self._method.call(request))


class Arguments:
    """A function whose arguments come from a request."""

    def __init__(self, function: Callable[..., Any], path: Container[str]) -> None:
        self._function = function
        self._parameters = [
            HandlerParameter.of(p, Any if p.annotation is p.empty else p.annotation, path)
            for p in _signature(function)
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        self._dependencies = {
            p.name: Arguments(p.dependency, path) for p in self._parameters if p.dependency is not None
        }
        bodies = [p for p in self._parameters if p.source == "body"]
        self._has_body = bool(bodies)
        self._is_whole_body = len(bodies) == 1 and not bodies[0].embed

    async def call(self, request: Request[Handled]) -> Any:
        """Call the function, after its dependencies. Raises InvalidInput."""
        call = request.call
        assert isinstance(call, Handle)
        sources: dict[str, Mapping[str, Any]] = {
            "path": call.params,
            "query": dict(parse_qsl(call.query, keep_blank_values=True)),
            "header": {"content-type": call.content_type, **request.metadata},
        }
        body = parse_body(call.content) if self._has_body else None
        arguments: dict[str, Any] = {}
        for p in self._parameters:
            if p.source == "request":
                arguments[p.name] = _request(p.hint, call, request.metadata)
            elif p.name in self._dependencies:
                arguments[p.name] = await self._dependencies[p.name].call(request)
            else:
                whole = p.source == "body" and self._is_whole_body
                given = body if whole else _member(sources.get(p.source, body), p.key)
                arguments[p.name] = _value(p.name, given, p.hint, p.default)
        result = self._function(**arguments)
        return await result if inspect.isawaitable(result) else result


# --- in ------------------------------------------------------------------------------------------------------


def _signature(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function, or of the constructor of a class, with their annotations evaluated."""
    try:
        found = inspect.signature(function, eval_str=True).parameters.values()
        return [p.replace(annotation=without_aliases(p.annotation)) for p in found]
    except (NameError, TypeError):  # an annotation that exists only for type checkers
        return list(inspect.signature(function).parameters.values())


def _kinds(hint: Any) -> Sequence[Any]:
    return get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


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
        except (ValueError, TypeError, OverflowError):
            continue
    raise InvalidInput(f"'{name}': expected {_describe(hint)}, got {str(given)[:100]!r}")


def _as(kind: Any, given: Any) -> Any:
    """Convert `given` to an object of `kind`. Raises ValueError, TypeError or OverflowError."""
    kind = get_origin(kind) or kind
    if kind is Any or not isinstance(kind, type):
        return given
    if kind is bool and isinstance(given, str):
        if given.lower() not in _TRUE | _FALSE:
            raise ValueError(given)
        return given.lower() in _TRUE
    if kind in (int, float) and isinstance(given, str | int | float) and not isinstance(given, bool):
        if kind is int and isinstance(given, float) and not given.is_integer():
            raise ValueError(given)
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
            check_json(await self.body(), POLICY)
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
        return Handled(fast_json.dumps(result, default=_to_plain, any_keys=True))
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
