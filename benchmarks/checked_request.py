"""Send one request, check its response, and record the size of the response."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from benchmarks.workloads import Response, Workload

_UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request with a correct response: its `body`, and the body as it was `sent`, maybe in chunks.

    `whole_bytes` includes the headers of an HTTP response.
    """

    workload: Workload
    port: int
    body: bytes
    sent: bytes
    whole_bytes: int


def check_request(workload: Workload, port: int, *, echo: bool) -> CheckedRequest:
    """Send the request. Raises ValueError if the response is wrong; an echo must return the request."""
    head, body, sent = (_over_http if workload.wire == "http" else _over_grpc)(workload, port)
    response = Response(_headers(head), body)
    if not (body == workload.body if echo else workload.is_correct(response)):
        raise ValueError(f"{workload.name}: wrong response: {body[:300]!r}")
    return CheckedRequest(workload, port, body, sent, len(head) + len(sent))


def _over_http(workload: Workload, port: int) -> tuple[bytes, bytes, bytes]:
    """Return the headers as received, the decoded body, and the body as received."""
    with socket.create_connection(("127.0.0.1", port), 60) as connection, connection.makefile("rb") as received:
        connection.sendall(workload.http_request())
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            line = received.readline()
            if not line:
                raise ValueError(f"{workload.name}: connection closed after {head!r}")
            head += line
        body, sent = read_body(received, _headers(head))
    status = head.partition(b"\r\n")[0]
    if b" 200 " not in status:
        raise ValueError(f"{workload.name}: rejected with {status!r}: {body[:300]!r}")
    return head, body, sent


def read_body(received: Any, headers: Mapping[str, str]) -> tuple[bytes, bytes]:
    """Return a body of known length, or in chunks, decoded and as received."""
    if "chunked" not in headers.get("transfer-encoding", ""):
        body = received.read(int(headers["content-length"]))
        return body, body
    body, sent, size = b"", b"", -1
    while size:
        line = received.readline()
        size = int(line, 16)
        chunk = received.read(size + 2)
        body, sent = body + chunk[:-2], sent + line + chunk
    return body, sent


def _over_grpc(workload: Workload, port: int) -> tuple[bytes, bytes, bytes]:
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=_UNLIMITED) as channel:
        try:
            body: bytes = channel.unary_unary(workload.path)(
                workload.body, timeout=60, metadata=tuple(workload.headers.items())
            )
            return b"", body, body
        except grpc.RpcError as error:
            raise ValueError(f"{workload.name}: rejected: {error}") from error


def _headers(head: bytes) -> dict[str, str]:
    pairs = (line.partition(":") for line in head.decode("latin-1").splitlines()[1:] if line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}
