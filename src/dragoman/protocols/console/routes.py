"""Routes of the console: its page at `/` for browsers and at `/console`, its files, and the recent requests."""

import re
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, Protocol

from msgspec.structs import replace

from dragoman.core.calls import InFlight, Request
from dragoman.core.record_calls import FindRequests
from dragoman.protocols.console import describe, layers
from dragoman.protocols.web_files import files_route, html_response, public_route
from dragoman.protocols.wire import (
    OWN_PAGES,
    EndpointResult,
    EngineCall,
    HttpError,
    HttpProtocol,
    HttpRequest,
    HttpResponse,
    PreliminaryCall,
    Route,
    json_response,
)

_ROOT = Path(__file__).parent
_SUFFIXES = {".js", ".mjs", ".css", ".svg"}
_FILES = {path.name: path for path in (*_ROOT.glob("static/*"), *_ROOT.glob("vendor/*/*")) if path.suffix in _SUFFIXES}
_PAGE = (_ROOT / "static" / "console.html").read_text()
_MAX_LISTED = 200
# What the page asks for below its own path, where it does not count as requests of clients. They change nothing.
_MODEL_PATHS = [f"/v2/models/{{model}}{version}" for version in ("", "/versions/{version}")]
_ASKED = frozenset(
    ["/v2", "/v2/models", "/v2/repository/status", "/v2/repository/index", "/ModelInfo", "/InputSizes", "/OutputSizes"]
    + [path + end for path in _MODEL_PATHS for end in ("", "/stats", "/openapi.json")]
)


class RequestHistory(Protocol):
    """The last `size` requests as JSON values; see `RecentRequests`."""

    size: int
    is_partial: bool

    def find(self, query: FindRequests) -> list[dict[str, Any]]: ...


def with_console(
    protocols: Sequence[HttpProtocol], history: RequestHistory | None = None, root_path: str = ""
) -> list[HttpProtocol]:
    """Return the protocols and the console, with recent requests if there is a history.

    root_path: prefix that a proxy passes on. Without one, the addresses in the page are relative to its own.

    `GET /` is the console for clients that accept `text/html`, such as browsers. Other clients get the response of the
    protocol that has this path.
    """
    page = html_response(_PAGE.replace('="console/', f'="{escape(root_path)}/console/') if root_path else _PAGE)
    changed = [replace(p, routes=tuple(_for_browsers(route, page) for route in p.routes)) for p in protocols]
    routes = [public_route("/console", _console(page)), files_route("/console/assets", _FILES, _compact)]
    routes += describe.routes()
    routes += layers.routes()
    routes += [replace(route, pattern=path, operation=None) for route, path in _asked(protocols)]
    if history is not None:
        routes += _history_routes(history)
    if not any(route.pattern == "/" for p in protocols for route in p.routes if route.method == "GET"):
        routes.append(_for_browsers(public_route("/", _no_page), page))
    return [*changed, HttpProtocol(OWN_PAGES, tuple(routes), protocols[0].format_error)]


def _compact(path: Path) -> bytes:
    """Return a file; of our own scripts without indentation and lines of comments, a tenth of what is sent.

    The numbers of lines stay the same. No text in a script may depend on either.
    """
    content = path.read_bytes()
    return re.sub(rb"^[ \t]*//.*|^[ \t]+", b"", content, flags=re.MULTILINE) if path.suffix == ".js" else content


def _asked(protocols: Sequence[HttpProtocol]) -> Iterator[tuple[Route, str]]:
    """Yield the routes that the page asks, with the paths that it uses."""
    for protocol in protocols:
        for route in protocol.routes:
            if route.pattern in _ASKED:
                yield route, f"/console{route.pattern}"
        if protocol.label == "metrics" and protocol.routes:
            yield protocol.routes[0], "/console/metrics"


def _for_browsers(route: Route, page: HttpResponse) -> Route:
    if (route.method, route.pattern) != ("GET", "/"):
        return route

    def endpoint(http: HttpRequest) -> EndpointResult:
        return page if "text/html" in http.headers.get("accept", "") else route.endpoint(http)

    return replace(route, endpoint=endpoint)


def _history_routes(history: RequestHistory) -> list[Route]:
    """Return the routes of recent requests. Like metrics they are not for keys of some models only."""

    def respond(query: FindRequests, found: list[dict[str, Any]]) -> HttpResponse:
        if found or not query.request_id:
            return json_response({"kept": history.size, "requests": found})
        if not history.size:
            raise HttpError(404, "no requests are kept: start the server with --recent-requests 1000")
        raise HttpError(404, f"no request '{query.request_id[:128]}' among the last {history.size}")

    def endpoint(http: HttpRequest) -> EndpointResult:
        request_id = http.params.get("id", "")
        query = FindRequests(history.size if request_id else _MAX_LISTED, request_id)
        if history.is_partial:
            return EngineCall(Request(query), lambda response: respond(query, response.answer))
        # The cheapest call that raises Forbidden for such keys.
        return PreliminaryCall(Request(InFlight(())), lambda _: respond(query, history.find(query)))

    return [
        Route("GET", pattern, endpoint, role="read", is_administrative=True)
        for pattern in ("/console/requests", "/console/requests/{id}")
    ]


def _console(page: HttpResponse) -> Callable[[HttpRequest], HttpResponse]:
    def endpoint(http: HttpRequest) -> HttpResponse:
        if http.path.endswith("/"):  # its relative addresses would be those of another folder
            return HttpResponse(308, (), (("location", "../console"),))
        return page

    return endpoint


def _no_page(http: HttpRequest) -> HttpResponse:
    raise HttpError(404, f"no such path: {http.path[:256]}")
