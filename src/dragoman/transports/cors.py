"""Cross-origin requests of browsers: which pages of other sites may read answers (the CORS protocol of Fetch)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dragoman.protocols.wire import Headers, HttpResponse

_ANY = ("*",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cors:
    """Who may ask, and what. Without origins nobody may, and no header is sent.

    origins: as a browser names them, `https://example.org`; "*" is everybody. origin_regex: further ones, by a regular
    expression that the whole origin matches. credentials: whether the browser may send its user's credentials; the
    answer then names the origin. methods, headers: what a request may have besides what any page may send; "*" is
    anything. expose: which headers of an answer a page may read. max_age_s: how long a browser may remember.
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
    def on(self) -> bool:
        return bool(self.origins or self.origin_regex)

    def preflight(self, method: str, headers: Mapping[str, str]) -> HttpResponse | None:
        """The answer to a browser that asks whether it may ask; None where that is not what the request is."""
        asked = headers.get("access-control-request-method")
        origin = headers.get("origin", "")
        if not self.on or method != "OPTIONS" or not asked or not origin:
            return None
        if not self._allows(origin):
            return HttpResponse(403, (b'{"error":"this origin may not ask"}',), (("content-type", "application/json"),))
        wanted = headers.get("access-control-request-headers", "")
        allowed = wanted if self.headers == _ANY else ", ".join(self.headers)
        given = [
            *self._told(origin),
            ("access-control-allow-methods", asked if self.methods == _ANY else ", ".join(self.methods)),
            ("access-control-max-age", str(self.max_age_s)),
        ]
        if allowed:
            given.append(("access-control-allow-headers", allowed))
        return HttpResponse(204, (), tuple(given))

    def added(self, headers: Mapping[str, str]) -> Headers:
        """What an answer gets for a request from a page; nothing where its origin may not read it."""
        origin = headers.get("origin", "") if self.on else ""
        if not origin or not self._allows(origin):
            return ()
        expose = (("access-control-expose-headers", ", ".join(self.expose)),) if self.expose else ()
        return (*self._told(origin), *expose)

    def _allows(self, origin: str) -> bool:
        if self.origins == _ANY or origin in self.origins:
            return True
        return self._pattern is not None and self._pattern.fullmatch(origin) is not None

    def _told(self, origin: str) -> Headers:
        if self.origins == _ANY and not self.credentials:
            return (("access-control-allow-origin", "*"),)
        named = (("access-control-allow-origin", origin), ("vary", "origin"))
        return (*named, ("access-control-allow-credentials", "true")) if self.credentials else named
