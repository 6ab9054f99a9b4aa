"""Pages and files for browsers, from the package: without inline code and without requests to other hosts."""

import gzip
from collections.abc import Callable, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path

from dragoman.protocols.wire import Endpoint, Headers, HttpError, HttpRequest, HttpResponse, Route

# Only files of this server, and no page around this one. Libraries have images as data URLs.
_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; media-src blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PAGE_HEADERS: Headers = (
    ("content-type", "text/html; charset=utf-8"),
    ("content-security-policy", _CONTENT_SECURITY_POLICY),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cache-control", "no-cache"),
    ("vary", "accept"),
)
Compact = Callable[[Path], bytes]
# By suffix, because the tables of some systems lack a few.
_MEDIA_TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


def html_response(text: str) -> HttpResponse:
    """Return the response with a page."""
    return HttpResponse(200, (text.encode(),), _PAGE_HEADERS)


def public_route(pattern: str, endpoint: Endpoint) -> Route:
    """Return a route without a key: pages hold nothing of the server, and a browser sends no key when it opens one."""
    return Route("GET", pattern, endpoint, role="read", is_public=True)


def files_route(folder: str, files: Mapping[str, Path], compact: Compact | None = None) -> Route:
    """Return the route of files below a folder, by their names. Those that end in .gz are stored compressed.

    compact: returns what is sent of a file.
    """

    @cache
    def read(name: str) -> tuple[bytes, str]:
        content = files[name].read_bytes() if compact is None else compact(files[name])
        compressed = content if files[name].suffix == ".gz" else gzip.compress(content, mtime=0)
        return compressed, f'"{sha256(compressed).hexdigest()[:32]}"'

    def endpoint(http: HttpRequest) -> HttpResponse:
        name = http.params["file"]
        if name not in files:
            raise HttpError(404, f"no such file: {name[:256]}")
        compressed, tag = read(name)
        headers = (
            ("content-type", _MEDIA_TYPES[Path(name).suffix]),
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

    return public_route(f"{folder}/{{file}}", endpoint)
