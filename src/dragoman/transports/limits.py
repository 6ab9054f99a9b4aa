"""What a transport allows a client."""

from dataclasses import dataclass, field

from dragoman.transports.cors import Cors


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on requests; times in seconds, sizes in bytes.

    max_body_bytes holds before and after decompression; max_bodies_bytes for all bodies together that are being
    received or answered, 0 for any number. A body has `body_timeout_s` to arrive, and a second more for
    each 64 KiB of it; a client that does not read its answer has `write_timeout_s`. max_headers counts the fields of a
    head, max_connections those that are open at a time, 0 for any number. `max_open_files` is
    the process's own limit of file descriptors, 0 for none: the last of them are left to health checks.

    max_streams holds for each connection over HTTP/2. max_grpc_calls and max_grpc_calls_per_address (0 for any number)
    bound the calls of gRPC on one port, health checks excepted; a stream without a request ends after
    grpc_stream_idle_timeout_s, 0 for never.

    `root_path` is what a proxy puts before every path; requests may have it or not. `cors`: which pages of other
    sites may ask. `keeps_answers`: whether an answer waits here for a client who comes back for it; the process of the
    engine keeps those of several front ends, to whichever of them he comes.
    """

    max_body_bytes: int = 64 << 20
    max_header_bytes: int = 16 << 10
    max_headers: int = 256
    max_connections: int = 20_000
    max_open_files: int = 0
    max_streams: int = 500
    max_grpc_calls: int = 2000
    max_grpc_calls_per_address: int = 1000
    grpc_stream_idle_timeout_s: float = 600.0
    header_timeout_s: float = 10.0
    max_bodies_bytes: int = 1 << 30
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    keep_alive_timeout_s: float = 75.0
    compress_responses: bool = True
    compress_min_bytes: int = 1024
    root_path: str = ""
    keeps_answers: bool = True
    cors: Cors = field(default_factory=Cors)
