"""Files that the gRPC load generator `grpc_load.c` reads."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from hpack import Encoder

from benchmarks.workloads import GRPC_PATH


def write_load_files(
    folder: Path, port: int, request: bytes, response: bytes, metadata: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Write the header blocks, the request message and the expected response message."""
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", GRPC_PATH),
        (":authority", f"127.0.0.1:{port}"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("user-agent", "grpc-c/load"),
        ("grpc-accept-encoding", "identity, deflate, gzip"),
        *metadata.items(),
    ]
    encoder = Encoder()
    for name in ("first", "next"):  # after the first request the fields are indices into the HPACK table
        (folder / name).write_bytes(encoder.encode(fields))
    (folder / "request").write_bytes(request)
    (folder / "response").write_bytes(response)
