"""The page that shows OpenAPI documents: Swagger UI from the package, without requests to other hosts."""

import gzip
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path

from dragoman.protocols.wire import Endpoint, HttpError, HttpRequest, HttpResponse, Route

_ROOT = Path(__file__).parent
_ASSETS = "/docs/assets"
# Files of the page, with their media types. Vendored ones are stored compressed.
_FILES = {
    "swagger-ui-bundle.js": ("vendor/swagger-ui/swagger-ui-bundle.js.gz", "text/javascript; charset=utf-8"),
    "swagger-ui.css": ("vendor/swagger-ui/swagger-ui.css.gz", "text/css; charset=utf-8"),
    "page.js": ("static/page.js", "text/javascript; charset=utf-8"),
    "page.css": ("static/page.css", "text/css; charset=utf-8"),
}
# No inline code, no other hosts, and no page around this one. Swagger UI has images as data URLs.
_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PAGE_HEADERS = (
    ("content-type", "text/html; charset=utf-8"),
    ("content-security-policy", _CONTENT_SECURITY_POLICY),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cache-control", "no-cache"),
)


def page_routes(pages: Sequence[tuple[str, str]]) -> list[Route]:
    """Return the routes of pages, each a path and that of the document it shows, and of the files that they load.

    Pages and files are public: they hold nothing of the server, and a browser sends no key when it opens a page. The
    page asks for a key if the document needs one.
    """
    routes = [Route("GET", path, _page(path, document), role="read", is_public=True) for path, document in pages]
    return [*routes, Route("GET", f"{_ASSETS}/{{file}}", _file, role="read", is_public=True)]


def _page(pattern: str, document: str) -> Endpoint:
    # Relative addresses hold behind a proxy that adds a prefix and in an application that mounts this one.
    depth = pattern.count("/") - 1
    up = "../" * depth
    own = document.rpartition(f"{pattern.rpartition('/')[0]}/")[2]
    text = (_ROOT / "static" / "page.html").read_text().replace("{assets}", f"{up}docs/assets")
    body = text.replace("{document}", own).encode()
    name = pattern.rpartition("/")[2]

    def endpoint(http: HttpRequest) -> HttpResponse:
        if http.path.endswith("/"):  # its relative addresses would be those of another folder
            return HttpResponse(308, (), (("location", f"../{name}"),))
        return HttpResponse(200, (body,), _PAGE_HEADERS)

    return endpoint


def _file(http: HttpRequest) -> HttpResponse:
    name = http.params["file"]
    if name not in _FILES:
        raise HttpError(404, f"no such file: {name[:256]}")
    compressed, tag = _read(name)
    headers = (
        ("content-type", _FILES[name][1]),
        ("etag", tag),
        ("cache-control", "no-cache"),
        ("vary", "accept-encoding"),
        ("x-content-type-options", "nosniff"),
    )
    if tag in http.headers.get("if-none-match", ""):
        return HttpResponse(304, (), headers)
    if "gzip" in http.headers.get("accept-encoding", ""):
        return HttpResponse(200, (compressed,), (*headers, ("content-encoding", "gzip")))
    return HttpResponse(200, (gzip.decompress(compressed),), headers)


@cache
def _read(name: str) -> tuple[bytes, str]:
    """Return the compressed content of a file, and its entity tag."""
    path = _FILES[name][0]
    content = (_ROOT / path).read_bytes()
    compressed = content if path.endswith(".gz") else gzip.compress(content, mtime=0)
    return compressed, f'"{sha256(compressed).hexdigest()[:32]}"'
