"""What our load generator of gRPC, `grpc_load.c`, reads."""

from pathlib import Path

from hpack import Encoder

from benchmarks.workloads import GRPC_PATH


def write_question(folder: Path, port: int, question: bytes, answer: bytes) -> None:
    """What it sends, and the answer that it expects."""
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", GRPC_PATH),
        (":authority", f"127.0.0.1:{port}"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("user-agent", "grpc-c/load"),
        ("grpc-accept-encoding", "identity, deflate, gzip"),
    ]
    encoder = Encoder()
    for name in ("first", "next"):  # clients name the fields by their place in the table from the second time on
        (folder / name).write_bytes(encoder.encode(fields))
    (folder / "question").write_bytes(question)
    (folder / "answer").write_bytes(answer)
