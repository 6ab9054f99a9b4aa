"""OpenAPI 3.1 document of the routes of a server, generated from their tables and message types."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from dragoman.protocols.wire import JSON, OCTET_STREAM, Bodies, HttpProtocol, Operation, Role, Route, reason_phrase

SCHEMAS = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)\}")
# Errors of every request: of HTTP itself, of limits, of a stopping server.
_EVERY_STATUS = frozenset((400, 408, 413, 415, 431, 500, 503))
_ACCESS_STATUSES = frozenset((401, 403, 429))
_SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
# Schemas of bodies without a description, as generators of clients know them; a stream of events has none.
_UNDESCRIBED: Mapping[str, Any] = {
    JSON: {"schema": {}},
    OCTET_STREAM: {"schema": {"type": "string", "format": "binary"}},
}
_ERROR_HEADERS: Mapping[int, str] = {401: "www-authenticate", 429: "retry-after", 503: "retry-after"}
_Described = Sequence[tuple[HttpProtocol, Route, Operation]]
_Schemas = Callable[[Bodies], dict[str, Any]]  # media types with schemas, of bodies


def document(
    protocols: Sequence[HttpProtocol], version: str, root_path: str, is_guarded: Callable[[Role], bool]
) -> dict[str, Any]:
    """Return the OpenAPI document of all routes that have a description.

    The first protocol with a route serves it. Of one that has a header of its own the responses are alternatives.
    """
    described = [(p, r, r.operation) for p in protocols for r in p.routes if r.operation is not None]
    schemas, components = _schemas([*_bodies(protocols, described)])
    paths: dict[str, dict[str, Any]] = {}
    for protocol, route, operation in described:
        secured = not (route.health or route.is_public) and is_guarded(route.role)
        of_path = paths.setdefault(operation.path or route.pattern, {})
        found = _operation(protocol, route, operation, schemas, is_secured=secured)
        first = of_path.setdefault(route.method.lower(), found)
        if first is not found and protocol.header:
            _add_alternative(first, found)
    is_secured = any("security" in operation for path in paths.values() for operation in path.values())
    return {
        "openapi": "3.1.0",
        "info": {"title": "Dragoman", "version": version},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {"schemas": components, **({"securitySchemes": _SECURITY_SCHEMES} if is_secured else {})},
    }


def _bodies(protocols: Sequence[HttpProtocol], described: _Described) -> Iterator[Bodies]:
    yield from (protocol.errors.bodies for protocol in protocols if protocol.errors is not None)
    for _, _, operation in described:
        yield operation.request
        yield from operation.responses.values()


def _schemas(every: Sequence[Bodies]) -> tuple[_Schemas, dict[str, Any]]:
    """Return a function from bodies to media types with schemas, and the schemas that these refer to."""
    types = [body_type for bodies in every for body in bodies.values() for body_type in _types(body)]
    schemas, components = _with_items(msgspec.json.schema_components(types, ref_template=SCHEMAS))
    by_type = {id(body): schema for body, schema in zip(types, schemas, strict=True)}

    def content(bodies: Bodies) -> dict[str, Any]:
        return {
            media_type: _UNDESCRIBED.get(media_type, {}) if body is None else {"schema": schema(body)}
            for media_type, body in bodies.items()
        }

    def schema(body: Any) -> Any:
        if isinstance(body, Mapping):
            return _with_items(body)
        alternatives = [by_type[id(body_type)] for body_type in _types(body)]
        return {"anyOf": alternatives} if len(alternatives) > 1 else alternatives[0]

    return content, components


def _with_items(value: Any) -> Any:
    """Return schemas in which each array has the schema of its items, which generators of clients need."""
    if isinstance(value, Mapping):
        completed = {name: _with_items(item) for name, item in value.items()}
        is_bare = completed.get("type") == "array" and not {"items", "prefixItems"} & completed.keys()
        return {**completed, "items": {}} if is_bare else completed
    return [_with_items(item) for item in value] if isinstance(value, list | tuple) else value


def _types(body: Any) -> tuple[Any, ...]:
    """Return the types of a body; none for one that is a schema already."""
    return body if isinstance(body, tuple) else () if body is None or isinstance(body, Mapping) else (body,)


def _operation(
    protocol: HttpProtocol, route: Route, operation: Operation, content: _Schemas, *, is_secured: bool
) -> dict[str, Any]:
    name = re.sub(r"\W+", "_", f"{route.method.lower()}{operation.path or route.pattern}").strip("_")
    described: dict[str, Any] = {"operationId": name, "summary": operation.summary, "tags": [protocol.name]}
    if protocol.reference:
        described["externalDocs"] = {"url": protocol.reference}
    if parameters := [*_parameters(route, operation)]:
        described["parameters"] = parameters
    if operation.request:
        described["requestBody"] = {"required": operation.is_body_required, "content": content(operation.request)}
    responses = {status: _response(status, content(bodies)) for status, bodies in operation.responses.items()}
    for status in _error_statuses(protocol, is_secured=is_secured):
        errors = content(protocol.errors.bodies) if protocol.errors is not None else {}
        responses.setdefault(status, _response(status, errors))
    described["responses"] = {str(status): responses[status] for status in sorted(responses)}
    if is_secured:
        described["security"] = [{name: []} for name in _SECURITY_SCHEMES]
    return described


def _add_alternative(first: dict[str, Any], other: dict[str, Any]) -> None:
    """Add parameters and schemas of responses to the operation of another protocol at the same path."""
    names = {parameter["name"] for parameter in first.get("parameters", ())}
    more = [parameter for parameter in other.get("parameters", ()) if parameter["name"] not in names]
    first["parameters"] = [*first.get("parameters", ()), *more]
    for status, response in other["responses"].items():
        content = first["responses"].setdefault(status, response).get("content", {})
        for media_type, body in response.get("content", {}).items():
            own = content.setdefault(media_type, body)
            if own != body:
                schemas = [*own["schema"].get("anyOf", (own["schema"],)), body["schema"]]
                content[media_type] = {"schema": {"anyOf": schemas}}


def _parameters(route: Route, operation: Operation) -> Iterator[dict[str, Any]]:
    for name in _PARAMETER.findall(route.pattern):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    for place, parameters in (("query", operation.query), ("header", operation.headers)):
        for name, schema in parameters.items():
            yield {"name": name, "in": place, "schema": schema}


def _error_statuses(protocol: HttpProtocol, *, is_secured: bool) -> frozenset[int]:
    own = frozenset() if protocol.errors is None else protocol.errors.statuses
    return _EVERY_STATUS | own | _ACCESS_STATUSES if is_secured else _EVERY_STATUS | own


def _response(status: int, content: dict[str, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {"description": reason_phrase(status)}
    if header := _ERROR_HEADERS.get(status):
        described["headers"] = {header: {"schema": {"type": "string"}}}
    return {**described, **({"content": content} if content else {})}
