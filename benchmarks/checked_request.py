"""Send one request, check its response, and record the size of the response."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from benchmarks.workloads import Answer, Workload

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
    answer = Answer(_headers(head), body)
    if not (body == workload.body if echo else workload.right(answer)):
        raise ValueError(f"{workload.name}: wrong response: {body[:300]!r}")
    return CheckedRequest(workload, port, body, sent, len(head) + len(sent))


def _over_http(workload: Workload, port: int) -> tuple[bytes, bytes, bytes]:
    """Return the headers as received, the decoded body, and the body as received."""
    lines = [f"POST {workload.path} HTTP/1.1", "host: localhost", f"content-length: {len(workload.body)}"]
    lines += [f"{name}: {value}" for name, value in workload.headers.items()]
    with socket.create_connection(("127.0.0.1", port), 60) as connection, connection.makefile("rb") as came:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + workload.body)
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            line = came.readline()
            if not line:
                raise ValueError(f"{workload.name}: the server hung up after {head!r}")
            head += line
        body, sent = read_body(came, _headers(head))
    status = head.partition(b"\r\n")[0]
    if b" 200 " not in status:
        raise ValueError(f"{workload.name}: rejected with {status!r}: {body[:300]!r}")
    return head, body, sent


def read_body(came: Any, headers: Mapping[str, str]) -> tuple[bytes, bytes]:
    """Return a body of known length, or in chunks, decoded and as received."""
    if "chunked" not in headers.get("transfer-encoding", ""):
        body = came.read(int(headers["content-length"]))
        return body, body
    body, sent, size = b"", b"", -1
    while size:
        line = came.readline()
        size = int(line, 16)
        piece = came.read(size + 2)
        body, sent = body + piece[:-2], sent + line + piece
    return body, sent


def _over_grpc(workload: Workload, port: int) -> tuple[bytes, bytes, bytes]:
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=_UNLIMITED) as channel:
        try:
            body: bytes = channel.unary_unary(workload.path)(workload.body, timeout=60)
            return b"", body, body
        except grpc.RpcError as fault:
            raise ValueError(f"{workload.name}: rejected: {fault}") from fault


def _headers(head: bytes) -> dict[str, str]:
    pairs = (line.partition(":") for line in head.decode("latin-1").splitlines()[1:] if line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}
