"""Find the endpoint of a path: the routes of all protocols in one tree."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import unquote_to_bytes

import msgspec

from dragoman.protocols.wire import Endpoint, HttpError, HttpProtocol, Role, Route
from dragoman.transports.counters import TransportCounters


@dataclass(slots=True)
class _Node:
    parts: dict[str, "_Node"] = field(default_factory=dict)
    parameter: "tuple[str, _Node] | None" = None
    endpoints: dict[str, tuple[Route, HttpProtocol]] = field(default_factory=dict)
    protocol: HttpProtocol | None = None  # the first that has a path here or below


class Match(msgspec.Struct, frozen=True):
    """The endpoint of a path; None for OPTIONS, whose response is `allow`.

    `health`: it is a health check. `role`: what a caller with a key needs, unless the path `is_public`. `statuses`
    counts the responses of the protocol by status. `route`: the pattern of the path, "" if it has none.
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

    @property
    def is_sheddable(self) -> bool:
        """Whether the request may be rejected because the server is overloaded: only inference may."""
        return self.role == "infer" and self.endpoint is not None and not self.health


class Router:
    """The routes as a tree of path segments; fixed segments have priority over parameters.

    The first protocol that has a route serves it.
    """

    def __init__(self, protocols: Iterable[HttpProtocol], counters: TransportCounters | None = None) -> None:
        self._counters = counters or TransportCounters()
        self._root = _Node()
        self._fallback: Match | None = None
        for protocol in (protocols := tuple(protocols)):
            if protocol.fallback is not None:
                statuses = self._counters.statuses(protocol.name)
                self._fallback = Match(protocol.fallback, protocol, {}, "", statuses=statuses)
            for route in protocol.routes:
                node = self._root
                for part in _segments(route.pattern):
                    node = _child(node, part)
                    node.protocol = node.protocol or protocol
                node.endpoints.setdefault(route.method, (route, protocol))
        methods = {"HEAD", "OPTIONS"} | {route.method for protocol in protocols for route in protocol.routes}
        statuses = self._counters.statuses(protocols[0].name)
        self._server_options = Match(None, protocols[0], {}, ", ".join(sorted(methods)), statuses=statuses)

    def match(self, method: str, raw_path: str) -> Match:
        """Return the endpoint of a path, still percent-encoded; a trailing slash does not matter.

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
                return self._no_route(raw_path, node.protocol)
            node = found
        if not node.endpoints:
            return self._no_route(raw_path, node.protocol)
        return self._by_method(node, method, params)

    def _no_route(self, raw_path: str, nearest: HttpProtocol | None) -> Match:
        nearest = None if "//" in raw_path else nearest  # an empty segment belongs to no protocol
        if self._fallback is not None:
            return self._fallback if nearest is None else msgspec.structs.replace(self._fallback, protocol=nearest)
        raise HttpError(404, f"no such path: {raw_path[:256]}", (), nearest)

    def _by_method(self, node: _Node, method: str, params: dict[str, str]) -> Match:
        found = node.endpoints.get("GET" if method == "HEAD" and "HEAD" not in node.endpoints else method)
        if found is not None:
            route, protocol = found
            statuses = self._counters.statuses(protocol.name)
            health, is_public = route.health, route.health or route.is_public
            return Match(route.endpoint, protocol, params, "", health, route.role, statuses, route.pattern, is_public)
        methods = {*node.endpoints, "OPTIONS"} | ({"HEAD"} if "GET" in node.endpoints else set())
        allow = ", ".join(sorted(methods))
        protocol = next(iter(node.endpoints.values()))[1]
        if method == "OPTIONS":
            return Match(None, protocol, params, allow, statuses=self._counters.statuses(protocol.name))
        text = f"method {method[:32]} is not allowed here; expected one of {allow}"
        raise HttpError(405, text, (("allow", allow),), protocol)


def _segments(path: str) -> list[str]:
    return path.strip("/").split("/") if "//" not in path else path.split("/")


def _child(node: _Node, part: str) -> _Node:
    if not part.startswith("{"):
        return node.parts.setdefault(part, _Node())
    if node.parameter is None:
        node.parameter = part[1:-1], _Node()
    return node.parameter[1]
