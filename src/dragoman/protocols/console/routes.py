"""Routes of the console: its page at `/` for browsers and at `/console`, and its files."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dragoman.protocols.web_files import files_route, html_response, public_route
from dragoman.protocols.wire import EndpointResult, HttpError, HttpProtocol, HttpRequest, HttpResponse, Route

_ROOT = Path(__file__).parent
_SUFFIXES = {".js", ".mjs", ".css", ".svg"}
_FILES = {path.name: path for path in (*_ROOT.glob("static/*"), *_ROOT.glob("vendor/*/*")) if path.suffix in _SUFFIXES}
_PAGE = html_response((_ROOT / "static" / "console.html").read_text())


def with_console(protocols: Sequence[HttpProtocol]) -> list[HttpProtocol]:
    """Return the protocols and the console.

    `GET /` is the console for clients that accept `text/html`, as browsers do. Others get the response of the
    protocol that has this path.
    """
    changed = [replace(p, routes=tuple(_for_browsers(route) for route in p.routes)) for p in protocols]
    routes = [public_route("/console", _console), files_route("/console/assets", _FILES)]
    if not any(route.pattern == "/" for p in protocols for route in p.routes if route.method == "GET"):
        routes.append(_for_browsers(public_route("/", _no_page)))
    return [*changed, HttpProtocol("console", tuple(routes), protocols[0].format_error)]


def _for_browsers(route: Route) -> Route:
    if (route.method, route.pattern) != ("GET", "/"):
        return route

    def endpoint(http: HttpRequest) -> EndpointResult:
        return _PAGE if "text/html" in http.headers.get("accept", "") else route.endpoint(http)

    return replace(route, endpoint=endpoint)


def _console(http: HttpRequest) -> HttpResponse:
    if http.path.endswith("/"):  # its relative addresses would be those of another folder
        return HttpResponse(308, (), (("location", "../console"),))
    return _PAGE


def _no_page(http: HttpRequest) -> HttpResponse:
    raise HttpError(404, f"no such path: {http.path[:256]}")
