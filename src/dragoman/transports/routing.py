"""Find the endpoint of a path: the routes of all protocols in one tree."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from urllib.parse import unquote_to_bytes

import msgspec

from dragoman.core.errors import DragomanError, PathNotFound
from dragoman.protocols.wire import (
    OWN_PAGES,
    Endpoint,
    EndpointResult,
    EngineCall,
    HttpError,
    HttpProtocol,
    HttpRequest,
    HttpResponse,
    MessageSession,
    Role,
    Route,
    Spool,
)
from dragoman.transports.counters import HTTP_STATUSES, Statuses, TransportCounters

# Where the paths of APIs begin, and those that users put before another one.
_BASES = ("", "v1", "api", "v2")
_EXTRA_BASES = frozenset({"v1", "api"})
# Segments of the longest path for which others are looked up.
_MAX_SEGMENTS = 8
_MAX_PATH = 200  # characters in the audit log


class _Node(msgspec.Struct):
    parts: dict[str, "_Node"] = msgspec.field(default_factory=dict)
    parameter: "tuple[str, _Node] | None" = None
    endpoints: dict[str, list[tuple[Route, HttpProtocol]]] = msgspec.field(default_factory=dict)
    protocol: HttpProtocol | None = None  # the first that has a path here or below


class Match(msgspec.Struct, frozen=True):
    """The endpoint of a path; None for OPTIONS, whose response is `allow`.

    `health`: it is a health check. `role`: what a caller with a key needs, unless the path `is_public`. `statuses`
    counts the responses of the protocol by status. `route`: the pattern of the path, "" if it has none; then `path` is
    its beginning. `session`, `spool` as for a `Route`.
    """

    endpoint: Endpoint | None
    protocol: HttpProtocol
    params: dict[str, str]
    allow: str
    health: bool = False
    role: Role = "infer"
    statuses: defaultdict[int, int] = msgspec.field(default_factory=lambda: defaultdict(int))
    route: str = ""
    is_public: bool = False
    path: str = ""
    session: Callable[[HttpRequest], MessageSession] | None = None
    spool: Spool | None = None

    @property
    def is_sheddable(self) -> bool:
        """Whether the request may be rejected because the server is overloaded: only inference may."""
        return self.role == "infer" and self.endpoint is not None and not self.health


class Router:
    """The routes as a tree of path segments; fixed segments have priority over parameters.

    Of several protocols with a route the one whose header the request has serves it, else the first without a header.
    """

    def __init__(self, protocols: Iterable[HttpProtocol], counters: TransportCounters | None = None) -> None:
        self._counters = counters or TransportCounters()
        self._root = _Node()
        self._fallback: Match | None = None
        for protocol in (protocols := tuple(protocols)):
            if protocol.fallback is not None:
                statuses = self._statuses(protocol)
                self._fallback = Match(protocol.fallback, protocol, {}, "", statuses=statuses)
            for route in protocol.routes:
                node = self._root
                for part in _segments(route.pattern):
                    node = _child(node, part)
                    node.protocol = node.protocol or protocol
                node.endpoints.setdefault(route.method, []).append((route, protocol))
                self._statuses(protocol, is_health=route.health)
        self._with_header = [protocol for protocol in protocols if protocol.header]
        methods = {"HEAD", "OPTIONS"} | {route.method for protocol in protocols for route in protocol.routes}
        statuses = self._statuses(protocols[0])
        self._server_options = Match(None, protocols[0], {}, ", ".join(sorted(methods)), statuses=statuses)

    def _statuses(self, protocol: HttpProtocol, *, is_health: bool = False) -> Statuses:
        if protocol.label == OWN_PAGES:
            return defaultdict(int)
        described = frozenset[int]() if protocol.errors is None else protocol.errors.statuses
        return self._counters.statuses(protocol.label, HTTP_STATUSES | described, is_health=is_health)

    def match(self, method: str, raw_path: str, headers: Mapping[str, str]) -> Match:
        """Return the endpoint of a path, still percent-encoded; a trailing slash does not matter.

        Several slashes at the start are one, as clients send them whose base URL ends with a slash; not for routes of
        operators, which a proxy may block by their paths.

        HEAD is answered as GET. Unknown paths go to the fallback if a protocol has one. Raises HttpError 404 for an
        unknown path, 405 with `Allow` for another method.
        """
        if raw_path == "*" and method == "OPTIONS":  # RFC 9110, 9.3.7: asks about the server, not a resource
            return self._server_options
        node, params = self._root, {}
        for segment in _segments(raw_path):
            found = node.parts.get(segment)
            if found is None and node.parameter is not None and segment:
                name, found = node.parameter
                # Decoded once, and after splitting, so that an encoded slash stays part of a name.
                params[name] = unquote_to_bytes(segment).decode(errors="replace") if "%" in segment else segment
            if found is None:
                return self._no_route(method, raw_path, node.protocol, headers)
            node = found
        if not node.endpoints:
            return self._no_route(method, raw_path, node.protocol, headers)
        if raw_path.startswith("//") and any(
            _is_of_operators(endpoint) for found in node.endpoints.values() for endpoint in found
        ):
            return self._no_route(method, raw_path, node.protocol, headers)
        return self._by_method(node, method, params, headers)

    def _no_route(self, method: str, raw_path: str, nearest: HttpProtocol | None, headers: Mapping[str, str]) -> Match:
        nearest = None if "//" in raw_path.lstrip("/") else nearest  # an empty segment belongs to no protocol
        marked = next((protocol for protocol in self._with_header if protocol.header in headers), None)
        fallback = self._fallback
        if fallback is None or fallback.endpoint is None:
            suggestion, meant = self._suggest(method, raw_path, headers)
            raise HttpError(404, _no_path(raw_path, suggestion), (), marked or meant or nearest)

        def explain(error: DragomanError, request_id: str) -> HttpResponse:
            """Format an error of the fallback; if it does not serve the path, with a path that does."""
            if not isinstance(error, PathNotFound):
                return (marked or nearest or fallback.protocol).format_error(error, request_id)
            suggestion, meant = self._suggest(method, raw_path, headers)
            protocol = marked or meant or nearest or fallback.protocol
            return protocol.format_error(PathNotFound(_no_path(raw_path, suggestion)), request_id)

        endpoint = partial(_answer_or_explain, fallback.endpoint, explain)
        protocol, path = marked or nearest or fallback.protocol, raw_path.partition("?")[0][:_MAX_PATH]
        return msgspec.structs.replace(fallback, protocol=protocol, endpoint=endpoint, path=path)

    def _suggest(self, method: str, raw_path: str, headers: Mapping[str, str]) -> tuple[str, HttpProtocol | None]:
        """Return the path that a client may have meant, "" for none, and its protocol.

        Clients get the address of an API with or without its base, such as `/v1`, or with another one before it.
        """
        segments = [segment for segment in raw_path.split("/") if segment]
        if len(segments) > _MAX_SEGMENTS:
            return "", None
        while segments:
            for base in _BASES:
                path = [base, *segments] if base else segments
                routes = self._routes(path, method, 1 if base else 0)
                if routes:
                    return f"/{'/'.join(path)}", _choose(routes, headers)[1]
            first = segments.pop(0)
            if first in self._root.parts and first not in _EXTRA_BASES:
                break
        return "", None

    def _routes(self, segments: Sequence[str], method: str, skipped: int) -> Sequence[tuple[Route, HttpProtocol]]:
        """Return the routes of a path with a fixed segment after the first ones, and one parameter at most."""
        node, fixed, parameters = self._root, 0, 0
        for i, segment in enumerate(segments):
            found = node.parts.get(segment)
            fixed += found is not None and i >= skipped
            if found is None and node.parameter is not None:
                found, parameters = node.parameter[1], parameters + 1
            if found is None:
                return ()
            node = found
        return node.endpoints.get("GET" if method == "HEAD" else method, ()) if fixed and parameters < 2 else ()

    def _by_method(self, node: _Node, method: str, params: dict[str, str], headers: Mapping[str, str]) -> Match:
        routes = node.endpoints.get("GET" if method == "HEAD" and "HEAD" not in node.endpoints else method)
        if routes is not None:
            route, protocol = routes[0] if len(routes) == 1 else _choose(routes, headers)
            statuses = self._statuses(protocol, is_health=route.health)
            health, is_public = route.health, route.health or route.is_public
            return Match(
                route.endpoint, protocol, params, "", health, route.role, statuses, route.pattern, is_public,
                session=route.session,
                spool=route.spool,
            )  # fmt: skip
        methods = {*node.endpoints, "OPTIONS"} | ({"HEAD"} if "GET" in node.endpoints else set())
        allow = ", ".join(sorted(methods))
        _, protocol = _choose([endpoint for routes in node.endpoints.values() for endpoint in routes], headers)
        if method == "OPTIONS":
            return Match(None, protocol, params, allow, statuses=self._statuses(protocol))
        text = f"method {method[:32]} is not allowed here; expected one of {allow}"
        raise HttpError(405, text, (("allow", allow),), protocol)


def _choose(routes: Sequence[tuple[Route, HttpProtocol]], headers: Mapping[str, str]) -> tuple[Route, HttpProtocol]:
    """Return the route of the protocol whose header the request has, else the first of those without a header."""

    def rank(route: tuple[Route, HttpProtocol]) -> int:
        header = route[1].header
        return 1 if not header else 0 if header in headers else 2

    return min(routes, key=rank)


def _no_path(raw_path: str, suggestion: str) -> str:
    return f"no such path: {raw_path[:256]}" + (f"; did you mean {suggestion[:256]}?" if suggestion else "")


def _answer_or_explain(
    endpoint: Endpoint, explain: Callable[[DragomanError, str], HttpResponse], http: HttpRequest
) -> EndpointResult:
    call = endpoint(http)
    assert isinstance(call, EngineCall), "a fallback calls a model"
    return msgspec.structs.replace(call, format_error=lambda error: explain(error, http.request_id))


def _segments(path: str) -> list[str]:
    path = path.lstrip("/")
    return path.rstrip("/").split("/") if "//" not in path else path.split("/")


def _is_of_operators(endpoint: tuple[Route, HttpProtocol]) -> bool:
    route = endpoint[0]
    return route.is_administrative or (route.role == "admin" and not (route.health or route.is_public))


def _child(node: _Node, part: str) -> _Node:
    if not part.startswith("{"):
        return node.parts.setdefault(part, _Node())
    if node.parameter is None:
        node.parameter = part[1:-1], _Node()
    return node.parameter[1]
