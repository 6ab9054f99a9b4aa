"""Settings that parsers and formatters of payloads use."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from dragoman.settings import ProtocolOptions

CREDENTIALS = frozenset({"authorization", "proxy-authorization", "cookie", "x-api-key"})

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, kw_only=True)
class Policy(ProtocolOptions):
    """Settings of protocols, and `forward_headers`: patterns, in lower case, of the headers that models receive."""

    forward_headers: tuple[str, ...] = ()

    def forwarded(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Return the headers, named in lower case, that models receive; credentials are never among them."""
        wanted = self.forward_headers
        return {n: v for n, v in headers.items() if n not in CREDENTIALS and any(fnmatchcase(n, p) for p in wanted)}
