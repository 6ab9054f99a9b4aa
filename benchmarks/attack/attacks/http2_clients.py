"""HTTP/2 and gRPC clients that exhaust calls, file descriptors or memory."""

import json
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import grpc

from benchmarks.attack.attack import AimMissedError, Attack, Target
from benchmarks.attack.http2 import OTHER_ADDRESS, SERVICE, RawHttp2, connections, message
from dragoman.formats.grpc_messages import ModelInferRequest, ModelInferResponse

_HOLD_S = 3.0
_STREAMS = 1000  # more than a connection may have
_MIB = 1 << 20


def _infer_over_grpc(target: Target) -> float:
    """Call a model as a well-behaved client of another address, and return the seconds it took."""
    request = ModelInferRequest(model_name="doubled")
    request.inputs.add(name="x", datatype="FP64", shape=[1]).contents.fp64_contents.append(2.0)
    began_s = time.monotonic()
    with grpc.insecure_channel(
        f"{target.host}:{target.grpc_port}", options=(("grpc.use_local_subchannel_pool", 1),)
    ) as channel:
        try:
            response = channel.unary_unary(f"{SERVICE}ModelInfer")(request.SerializeToString(), timeout=30)
        except grpc.RpcError as error:
            raise AimMissedError(
                f"gRPC inference from another address: {error.code().name} {error.details()}"
            ) from error
    if list(ModelInferResponse.FromString(response).raw_output_contents) != [struct.pack("<d", 4.0)]:
        raise AimMissedError("gRPC inference from another address: wrong response")
    return time.monotonic() - began_s


def _hold_calls(target: Target, method: str, count: int) -> str:
    """Open calls that send nothing, on `count` connections."""
    with connections(count, target.grpc_port, OTHER_ADDRESS) as attackers:
        for item in attackers:
            item.send(b"".join(item.request(SERVICE + method, ended=False) for _ in range(_STREAMS)))
        time.sleep(_HOLD_S / 2)
        took_s = _infer_over_grpc(target)
        time.sleep(_HOLD_S / 2)
    return f"{count} connections, {count * _STREAMS:,} calls; gRPC inference meanwhile {took_s * 1000:.0f} ms"


def _idle_streams(target: Target) -> str:
    return _hold_calls(target, "ModelStreamInfer", 1)


def _idle_streams_of_many(target: Target) -> str:
    return _hold_calls(target, "ModelStreamInfer", 20)


def _headers_alone(target: Target) -> str:
    return _hold_calls(target, "ModelInfer", 20)


def _health_headers_alone(target: Target) -> str:
    return _hold_calls(target, "ServerLive", 20)


def _claimed_lengths(target: Target) -> str:
    """Announce messages of 64 MiB and send one byte of each."""
    claim = (64 * _MIB - 1).to_bytes(4)
    with connections(2, target.grpc_port, OTHER_ADDRESS) as attackers:
        for item in attackers:
            results = (item.request(f"{SERVICE}ModelInfer", b"\0" + claim + b"x", ended=False) for _ in range(490))
            item.send(b"".join(results))
        time.sleep(_HOLD_S)
        largest = _address_space_mib(target)
    if largest > 8192:
        raise AimMissedError(f"{largest:.0f} MiB of address space for 1,000 bytes")
    return f"980 announced messages of 64 MiB; {largest:.0f} MiB of address space"


def _address_space_mib(target: Target) -> float:
    with open(f"/proc/{target.process.pids()[0]}/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmSize:"))


def _idle_connections(target: Target) -> str:
    """Open connections until the server reaches its limit of open files."""
    opened: list[socket.socket] = []
    for port in (target.http_port, target.grpc_port):
        for _ in range(300):
            with suppress(OSError):
                opened.append(socket.create_connection((target.host, port), 5, (OTHER_ADDRESS, 0)))
    time.sleep(_HOLD_S)
    for item in opened:
        item.close()
    if "running out of file descriptors" not in target.process.log.read_text():
        raise AimMissedError("the log does not report that file descriptors run out")
    return f"{len(opened)} idle connections"


def _unread(target: Target, path: str, body: bytes, content_type: str) -> str:
    """Request 100 responses on each of 30 connections, and read none."""
    with connections(30, target.http_port, OTHER_ADDRESS) as attackers:
        threads = [threading.Thread(target=_send_unread, args=(item, path, body, content_type)) for item in attackers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        time.sleep(_HOLD_S)
    return f"30 connections, 100 requests of {len(body):,} bytes each"


def _send_unread(attacker: RawHttp2, path: str, body: bytes, content_type: str) -> None:
    with suppress(OSError):  # the server may close the connection
        for _ in range(100):
            attacker.send(attacker.request(path, body, content_type=content_type))


def _numbers() -> Sequence[float]:
    return [n / 7 for n in range(12_000)]


def _unread_json(target: Target) -> str:
    tensor = {"name": "x", "datatype": "FP64", "shape": [12_000], "data": _numbers()}
    return _unread(target, "/v2/models/doubled/infer", json.dumps({"inputs": [tensor]}).encode(), "application/json")


def _unread_grpc(target: Target) -> str:
    request = ModelInferRequest(model_name="doubled")
    request.inputs.add(name="x", datatype="FP64", shape=[12_000]).contents.fp64_contents.extend(_numbers())
    return _unread(target, f"{SERVICE}ModelInfer", message(request.SerializeToString()), "application/grpc")


ATTACKS = (
    Attack(name="grpc-idle-streams", about="a connection opens 1,000 ModelStreamInfer streams", run=_idle_streams),
    Attack(
        name="grpc-idle-streams-20",
        about="20 connections of one address open 1,000 ModelStreamInfer streams each",
        run=_idle_streams_of_many,
    ),
    Attack(
        name="grpc-headers-alone",
        about="20 connections of one address open 1,000 ModelInfer calls each and send no message",
        run=_headers_alone,
    ),
    Attack(
        name="grpc-health-headers-alone",
        about="20 connections open 1,000 ServerLive calls each and send no message",
        run=_health_headers_alone,
    ),
    Attack(
        name="grpc-claimed-lengths",
        about="980 messages that announce 64 MiB and contain one byte, to a server with 256 files",
        run=_claimed_lengths,
        max_files=256,
    ),
    Attack(
        name="idle-connections",
        about="600 idle connections, to a server with 256 files",
        run=_idle_connections,
        max_files=256,
        infer_may_fail=True,
    ),
    Attack(
        name="http2-unread-json",
        about="30 connections over HTTP/2 ask for 100 JSON responses each and read none",
        run=_unread_json,
        options=("--max-bodies-bytes", str(256 * _MIB)),
        body_bytes=256 * _MIB,
    ),
    Attack(
        name="http2-unread-grpc",
        about="30 connections ask for 100 gRPC responses each and read none",
        run=_unread_grpc,
        options=("--max-bodies-bytes", str(256 * _MIB)),
        body_bytes=256 * _MIB,
    ),
)
