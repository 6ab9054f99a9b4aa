"""One question asked once, to see that the answer is right and how many bytes it has."""

import socket
from dataclasses import dataclass

import grpc

from benchmarks.workloads import Answer, Workload

_UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


@dataclass(frozen=True, slots=True)
class Asked:
    """A question with the answer that a server gave. `whole_bytes` counts the head of an HTTP answer too."""

    workload: Workload
    port: int
    body: bytes
    whole_bytes: int


def ask(workload: Workload, port: int, *, echo: bool) -> Asked:
    """Raises ValueError where the answer is not right: for an echo, other than the question."""
    head, body = (_over_http if workload.wire == "http" else _over_grpc)(workload, port)
    answer = Answer(_headers(head), body)
    if not (body == workload.body if echo else workload.right(answer)):
        raise ValueError(f"{workload.name}: the answer is not right: {body[:300]!r}")
    return Asked(workload, port, body, len(head) + len(body))


def _over_http(workload: Workload, port: int) -> tuple[bytes, bytes]:
    """The head as it came, since its bytes count too, and the body."""
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
        body = came.read(int(_headers(head)["content-length"]))
    status = head.partition(b"\r\n")[0]
    if b" 200 " not in status:
        raise ValueError(f"{workload.name}: refused with {status!r}: {body[:300]!r}")
    return head, body


def _over_grpc(workload: Workload, port: int) -> tuple[bytes, bytes]:
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=_UNLIMITED) as channel:
        try:
            return b"", channel.unary_unary(workload.path)(workload.body, timeout=60)
        except grpc.RpcError as fault:
            raise ValueError(f"{workload.name}: refused: {fault}") from fault


def _headers(head: bytes) -> dict[str, str]:
    pairs = (line.partition(":") for line in head.decode("latin-1").splitlines()[1:] if line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}
