"""Settings that parsers and formatters of payloads use."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from dragoman.core.datatypes import Buffer as Buffer
from dragoman.core.dialect import OWN, Dialect
from dragoman.formats.shared_regions import SharedRegions
from dragoman.settings import ProtocolOptions
from dragoman.system.trace_settings import TraceSettings

CREDENTIALS = frozenset({"authorization", "proxy-authorization", "cookie", "x-api-key"})


@dataclass(frozen=True, kw_only=True)
class Policy(ProtocolOptions):
    """Settings of protocols.

    forward_headers: patterns, in lower case, of the headers that models receive.
    regions: the shared memory of clients, None if the operator has not enabled it.
    traces: which requests are traced; None if several processes answer requests, each with its own log and traces.
    dialect: habits of another server, by the setting `responses_as`.
    upload_folder: where large uploads are received; "": the system's folder of temporary files.
    irregular_texts: BYTES in JSON may hold null, and a single text may have its length as shape, as in MLServer.
    """

    forward_headers: tuple[str, ...] = ()
    regions: SharedRegions | None = None
    traces: TraceSettings | None = None
    dialect: Dialect = OWN
    irregular_texts: bool = False
    upload_folder: str = ""

    def of(self, owner: str) -> "Policy":
        """Return these settings for the requests of an owner, who has shared memory of its own."""
        return self if self.regions is None else replace(self, regions=self.regions.of(owner))

    def forwarded_headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Return the headers, named in lower case, that models receive; credentials are never among them."""
        patterns = self.forward_headers
        if "*" in patterns:
            return {name: value for name, value in headers.items() if name not in CREDENTIALS}
        return {n: v for n, v in headers.items() if n not in CREDENTIALS and any(fnmatchcase(n, p) for p in patterns)}
