"""Settings that transports use: limits and CORS."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dragoman.protocols.wire import Headers, HttpResponse, json_response
from dragoman.settings import TransportOptions

_WILDCARD = ("*",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cors:
    """Allowed origins, methods and headers. Without origins, no CORS header is sent.

    origins: such as `https://example.org`; "*" for all.
    origin_regex: a regular expression that further origins match as a whole.
    credentials: whether browsers may send credentials; responses then name the origin.
    methods, headers: allowed besides those that need no permission; "*" for all.
    expose: response headers that pages may read.
    max_age_s: how long browsers may cache the permission.
    """

    origins: tuple[str, ...] = ()
    origin_regex: str = ""
    credentials: bool = False
    methods: tuple[str, ...] = ("GET", "POST")
    headers: tuple[str, ...] = ()
    expose: tuple[str, ...] = ()
    max_age_s: int = 600

    _pattern: "re.Pattern[str] | None" = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if self.origin_regex:
            object.__setattr__(self, "_pattern", re.compile(self.origin_regex))

    @property
    def is_enabled(self) -> bool:
        return bool(self.origins or self.origin_regex)

    def preflight(self, method: str, headers: Mapping[str, str]) -> HttpResponse | None:
        """Return the response to a preflight request; None if the request is not one."""
        requested_method = headers.get("access-control-request-method")
        origin = headers.get("origin", "")
        if not self.is_enabled or method != "OPTIONS" or not requested_method or not origin:
            return None
        if not self.allows(origin):
            return json_response({"error": "this origin is not allowed"}, 403)
        methods = requested_method if self.methods == _WILDCARD else ", ".join(self.methods)
        requested_headers = headers.get("access-control-request-headers", "")
        allowed_headers = requested_headers if self.headers == _WILDCARD else ", ".join(self.headers)
        response_headers = [
            *self._allow_origin(origin),
            ("access-control-allow-methods", methods),
            ("access-control-max-age", str(self.max_age_s)),
        ]
        if allowed_headers:
            response_headers.append(("access-control-allow-headers", allowed_headers))
        return HttpResponse(204, (), tuple(response_headers))

    def response_headers(self, headers: Mapping[str, str]) -> Headers:
        """Return the headers to add to a response; none if the origin may not read it."""
        origin = headers.get("origin", "") if self.is_enabled else ""
        if not origin or not self.allows(origin):
            return ()
        expose = (("access-control-expose-headers", ", ".join(self.expose)),) if self.expose else ()
        return (*self._allow_origin(origin), *expose)

    def allows(self, origin: str) -> bool:
        """Return whether pages of an origin may send requests."""
        if self.origins == _WILDCARD or origin in self.origins:
            return True
        return self._pattern is not None and self._pattern.fullmatch(origin) is not None

    def _allow_origin(self, origin: str) -> Headers:
        if self.origins == _WILDCARD and not self.credentials:
            return (("access-control-allow-origin", "*"),)
        named = (("access-control-allow-origin", origin), ("vary", "origin"))
        return (*named, ("access-control-allow-credentials", "true")) if self.credentials else named


@dataclass(frozen=True, kw_only=True)
class Limits(TransportOptions):
    """Settings of transports, with what is derived from other settings and from the process.

    max_open_files: the process's limit on file descriptors, 0 for none; the last of them are kept for health checks.
    compress_min_bytes: smaller responses are not compressed.
    keeps_answers: whether responses that clients fetch later are kept here; with several processes the engine's
    process keeps them, because any server process may be asked.
    """

    max_open_files: int = 0
    compress_min_bytes: int = 1000
    keeps_answers: bool = True
    cors: Cors = field(default_factory=Cors)
