"""Settings that transports use."""

from dataclasses import dataclass, field

from dragoman.settings import TransportOptions
from dragoman.transports.cors import Cors


@dataclass(frozen=True, kw_only=True)
class Limits(TransportOptions):
    """Settings of transports, with what is derived from other settings and from the process.

    max_open_files: the process's limit on file descriptors, 0 for none; the last of them are kept for health checks.
    compress_min_bytes: smaller responses are not compressed.
    keeps_answers: whether responses that clients fetch later are kept here; with several front ends the engine's
    process keeps them, because any front end may be asked.
    """

    max_open_files: int = 0
    compress_min_bytes: int = 1024
    keeps_answers: bool = True
    cors: Cors = field(default_factory=Cors)
