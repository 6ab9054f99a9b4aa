"""The page that shows OpenAPI documents: Swagger UI."""

from collections.abc import Sequence
from pathlib import Path

from dragoman.protocols.web_files import files_route, html_response, public_route
from dragoman.protocols.wire import Endpoint, HttpRequest, HttpResponse, Route

_ROOT = Path(__file__).parent
_FILES = {
    "swagger-ui-bundle.js": _ROOT / "vendor/swagger-ui/swagger-ui-bundle.js.gz",
    "swagger-ui.css": _ROOT / "vendor/swagger-ui/swagger-ui.css.gz",
    "page.js": _ROOT / "static/page.js",
    "page.css": _ROOT / "static/page.css",
}


def page_routes(pages: Sequence[tuple[str, str]]) -> list[Route]:
    """Return the routes of pages, each a path and that of the document it shows, and of the files that they load.

    They are public; the page asks for a key if the document needs one.
    """
    routes = [public_route(path, _page(path, document)) for path, document in pages]
    return [*routes, files_route("/docs/assets", _FILES)]


def _page(pattern: str, document: str) -> Endpoint:
    # Relative addresses hold behind a proxy that adds a prefix and in an application that mounts this one.
    up = "../" * (pattern.count("/") - 1)
    own = document.rpartition(f"{pattern.rpartition('/')[0]}/")[2]
    text = (_ROOT / "static" / "page.html").read_text().replace("{assets}", f"{up}docs/assets")
    text = text.replace("{console}", f"{up}console")
    response = html_response(text.replace("{document}", own))
    name = pattern.rpartition("/")[2]

    def endpoint(http: HttpRequest) -> HttpResponse:
        if http.path.endswith("/"):  # its relative addresses would be those of another folder
            return HttpResponse(308, (), (("location", f"../{name}"),))
        return response

    return endpoint
