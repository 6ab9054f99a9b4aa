"""The access log: one line for each request, whatever happens to it or to the file."""

import asyncio
import http.client
import json
import resource
import shlex
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

import dragoman
from access.access_models import KeyFile, bearer
from dragoman.core.errors import InvalidInput
from dragoman.formats import grpc_messages as m
from e2e.server_process import ServerProcess, running_server, wait_until
from text_server import ReverseModel

MODEL = """
import time

import dragoman


class Slow(dragoman.Model):
    batched = True
    placement = "thread"
    inputs = (dragoman.TensorSpec("x", dragoman.FP64, (-1,)),)

    def infer(self, call):
        time.sleep(0.2)
        return {"y": call.inputs["x"].data}


class Quick(dragoman.Model):
    placement = "inline"
    inputs = (dragoman.TensorSpec("x", dragoman.FP64, (-1,)),)

    def infer(self, call):
        return {"y": call.inputs["x"].data}
"""
X = {"inputs": [{"name": "x", "datatype": "FP64", "shape": [1], "data": [1.0]}]}
NAMES = (
    "time request_id protocol method path model version status client key user_agent http_version received_bytes "
    "sent_bytes queue_ms compute_ms total_ms"
)


def as_json(line: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(line)
    return found


def as_text(line: str) -> dict[str, Any]:
    fields = dict(field.split("=", 1) for field in shlex.split(line))
    return {name: float(v) if name.endswith(("_ms", "_bytes")) else v for name, v in fields.items()}


def lines(file: Path, count: int, parse: Callable[[str], dict[str, Any]] = as_json) -> list[dict[str, Any]]:
    """Wait for this number of lines about inference; return all lines of the log."""

    def found() -> list[dict[str, Any]]:
        parsed = [parse(line) for line in file.read_text().splitlines()]
        return [line for line in parsed if "/health/" not in line["path"]]

    wait_until(lambda: len(found()) >= count, f"{count} lines")
    result = found()
    assert len(result) == count
    for line in result:
        assert [*line] == NAMES.split()
    return result


def serve(tmp_path: Path, *options: str) -> Any:
    (tmp_path / "authored.py").write_text(MODEL)
    for name, placement in (("Slow", "thread"), ("Quick", "inline")):
        (tmp_path / "models" / name).mkdir(parents=True, exist_ok=True)
        settings = f'[model]\nuri = "{tmp_path / "authored.py"}:{name}"\nplacement = "{placement}"\n'
        (tmp_path / "models" / name / "dragoman.toml").write_text(settings)
    return running_server(str(tmp_path / "models"), "--access-log", str(tmp_path / "access.log"), *options)


@pytest.mark.parametrize("style", ["json", "text"])
def test_each_request_over_http_has_a_line(tmp_path: Path, style: str) -> None:
    parse = as_json if style == "json" else as_text
    with serve(tmp_path, "--access-log-format", style) as server:
        status, _, headers = server.request("POST", "/v2/models/Quick/infer", X)
        assert status == 200
        for path, body in (("/v2/models/Quick/infer", b"{"), ("/v2/models/none/infer", X), ("/a%0A%22b", None)):
            server.request("POST" if body else "GET", path, body)
        server.request("DELETE", "/v2/models/Quick/infer", None, {"x-request-id": "mine"})
        ok, invalid, unknown_model, unknown_path, method = lines(tmp_path / "access.log", 5, parse)
    assert ok["request_id"] == headers["x-request-id"]
    assert (ok["protocol"], ok["method"], ok["path"]) == ("oip_rest", "POST", "/v2/models/Quick/infer")
    assert (ok["model"], str(ok["status"]), ok["received_bytes"]) == ("Quick", "200", len(json.dumps(X)))
    assert ok["sent_bytes"] == int(headers["content-length"])
    assert 0 == ok["queue_ms"] < ok["compute_ms"] < ok["total_ms"]
    assert (str(invalid["status"]), invalid["model"], invalid["sent_bytes"] > 0) == ("400", "", True)
    assert (str(unknown_model["status"]), unknown_model["model"]) == ("404", "none")
    assert str(unknown_path["status"]) == "404"
    assert str(method["status"]) == "405"


AGENT = 'curl/8 "status"=200 \xe9\x85 key="admin"' + 300 * "x"


def test_who_has_sent_a_request(tmp_path: Path) -> None:
    """Headers of proxies are not believed, and what clients write stays within its quotation marks."""
    keys = KeyFile(tmp_path / "keys.toml")
    secret, few = keys.add("ann"), keys.add("few", calls_per_s=0.001)
    message = m.ModelInferRequest(model_name="Quick")
    message.inputs.add(name="x", datatype="FP64", shape=[1]).contents.fp64_contents.append(1.0)
    data, method = message.SerializeToString(), "/inference.GRPCInferenceService/ModelInfer"
    sent = {**bearer(secret), "user-agent": AGENT, "x-forwarded-for": "203.0.113.9", "forwarded": "for=203.0.113.9"}
    with serve(tmp_path, "--access-log-format", "text", "--api-keys", str(keys.path)) as server:
        assert server.request("POST", "/v2/models/Quick/infer", X, sent)[0] == 200
        for key in (few, few, "wrong" * 8):
            server.request("POST", "/v2/models/Quick/infer", X, dict(bearer(key)))
        with socket.create_connection(("127.0.0.1", server.http_port)) as old:
            old.sendall(f"GET /v2/models/Quick HTTP/1.0\r\nx-api-key: {secret}\r\n\r\n".encode())
            assert old.recv(1 << 16).startswith(b"HTTP/1.1 200")
        with grpc.insecure_channel(server.grpc_url) as channel:
            channel.unary_unary(method)(data, metadata=(("x-api-key", secret),))
        first, *others, old_line, call = lines(tmp_path / "access.log", 6, as_text)
    assert (first["client"], first["key"], first["http_version"]) == ("127.0.0.1", "ann", "1.1")
    assert first["user_agent"] == AGENT[:256].replace("\xe9", "\\u00e9").replace("\x85", "\\u0085")
    assert secret not in (tmp_path / "access.log").read_text()
    assert [(line["status"], line["key"]) for line in others] == [("200", "few"), ("429", "few"), ("401", "")]
    assert {line["client"] for line in others} == {"127.0.0.1"}
    assert (old_line["http_version"], old_line["key"]) == ("1.0", "ann")
    assert (call["client"], call["key"], call["http_version"]) == ("127.0.0.1", "ann", "2")
    assert call["user_agent"].startswith("grpc-python/")


def test_probes_and_scrapes_have_lines_only_if_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "access.log"
    asked = ("/v2/health/ready", "/metrics", "/v2", "/v2/models/Quick")
    for skip, expected in (
        ((), ["/v2", "/v2/models/Quick"]),
        (("--access-log-skip", ""), [*asked]),
        (("--access-log-skip", "scrapes,/v2"), ["/v2/health/ready", "/v2/models/Quick"]),
    ):
        with serve(tmp_path, "--access-log-format", "json", *skip) as server:
            for path in asked:
                assert server.request("GET", path)[0] == 200
            with grpc.insecure_channel(server.grpc_url) as channel:
                channel.unary_unary("/grpc.health.v1.Health/Check")(b"")
        found = dict.fromkeys(as_json(line)["path"] for line in file.read_text().splitlines())
        assert [path for path in found if path in asked] == expected
        assert ("/grpc.health.v1.Health/Check" in found) is (skip != ())
        file.unlink()


def test_a_rejected_scrape_has_a_line(tmp_path: Path) -> None:
    """It is none, but someone without a key."""
    keys = KeyFile(tmp_path / "keys.toml")
    keys.add("ann")
    with serve(tmp_path, "--access-log-format", "json", "--api-keys", str(keys.path)) as server:
        assert server.request("GET", "/metrics")[0] == 401
        assert lines(tmp_path / "access.log", 1)[0]["status"] == 401


def test_what_cannot_be_skipped_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"'access_log_skip': expected .*, got 'healthz'"):
        dragoman.Server(ReverseModel, access_log=str(tmp_path / "a.log"), access_log_skip="probes, healthz").start()


def test_its_format_is_that_of_the_log_unless_it_has_one(tmp_path: Path) -> None:
    for options, parse in (
        (["--log-format", "json"], as_json),
        (["--log-format", "json", "--access-log-format", "text"], as_text),
    ):
        with serve(tmp_path, *options) as server:
            assert server.infer("Quick", [1.0])[0] == 200
            assert lines(tmp_path / "access.log", 1, parse)[0]["model"] == "Quick"
        (tmp_path / "access.log").unlink()


def test_queue_and_compute_times_of_a_batch(tmp_path: Path) -> None:
    with serve(tmp_path, "--access-log-format", "json", "--max-batch-size", "2", "--batch-linger", "0") as server:
        with ThreadPoolExecutor(3) as threads:
            assert {*threads.map(lambda _: server.infer("Slow", [1.0])[0], range(3))} == {200}
        found = sorted(lines(tmp_path / "access.log", 3), key=lambda line: float(line["queue_ms"]))
    assert found[-1]["queue_ms"] > 100  # behind another batch
    for line in found:
        assert line["compute_ms"] >= 199
        assert line["total_ms"] >= line["queue_ms"] + line["compute_ms"]


def test_each_grpc_call_has_a_line(tmp_path: Path) -> None:
    message = m.ModelInferRequest(model_name="Quick")
    message.inputs.add(name="x", datatype="FP64", shape=[1]).contents.fp64_contents.append(1.0)
    data, service = message.SerializeToString(), "/inference.GRPCInferenceService/"
    message.model_name = "Slow"
    with serve(tmp_path, "--access-log-format", "json") as server:
        with grpc.insecure_channel(server.grpc_url) as channel:
            sent = channel.unary_unary(service + "ModelInfer")(data, metadata=(("x-request-id", "mine"),))
            for path, body in (("ModelInfer", b"\xff"), ("None", b"")):
                with pytest.raises(grpc.RpcError):
                    channel.unary_unary(service + path)(body)
            assert len([*channel.stream_stream(service + "ModelStreamInfer")(iter([data, data]))]) == 2
            channel.unary_unary(service + "ModelInfer")(message.SerializeToString())
        ok, invalid, unknown, stream, slow = lines(tmp_path / "access.log", 5)
    assert (ok["request_id"], ok["protocol"], ok["path"]) == ("mine", "oip_grpc", service + "ModelInfer")
    assert (ok["model"], ok["status"]) == ("Quick", "OK")
    assert (ok["received_bytes"], ok["sent_bytes"]) == (len(data), len(sent))
    assert 0 < ok["compute_ms"] < ok["total_ms"]
    assert (invalid["status"], invalid["model"]) == ("INVALID_ARGUMENT", "")
    assert (unknown["status"], unknown["protocol"]) == ("UNIMPLEMENTED", "none")
    assert (slow["model"], slow["compute_ms"] >= 199) == ("Slow", True)
    assert (stream["status"], stream["model"], stream["received_bytes"]) == ("OK", "Quick", 2 * len(data))


def test_a_log_that_was_moved_is_opened_anew(tmp_path: Path) -> None:
    with serve(tmp_path, "--access-log-format", "json") as server:
        server.infer("Quick", [1.0])
        lines(tmp_path / "access.log", 1)
        (tmp_path / "access.log").rename(tmp_path / "moved.log")
        server.infer("Quick", [1.0])
        wait_until((tmp_path / "access.log").exists, "a new file")
        lines(tmp_path / "access.log", 1)
    lines(tmp_path / "moved.log", 1)


def dropped(server: ServerProcess) -> float:
    text = server.request("GET", "/metrics")[1].decode()
    return float(
        next(line for line in text.splitlines() if line.startswith("dragoman_access_log_dropped_total")).split()[1]
    )


def test_a_full_disk_drops_lines_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "authored.py").write_text(MODEL)
    with running_server(
        f"{tmp_path / 'authored.py'}:Quick", "--placement", "inline", "--access-log", "/dev/full"
    ) as server:
        for _ in range(3):
            assert server.infer("Quick", [1.0])[0] == 200
        wait_until(lambda: dropped(server) >= 3, "dropped lines")
        assert server.infer("Quick", [1.0])[0] == 200
        server.wait_for_log("access log cannot be written: No space left on device")


def test_a_line_that_was_cut_by_a_full_disk_is_not_continued(tmp_path: Path) -> None:
    (tmp_path / "authored.py").write_text(MODEL)
    path, unlimited = tmp_path / "access.log", resource.RLIM_INFINITY

    def lines() -> list[str]:
        return path.read_text().splitlines()

    flags = ("--placement", "inline", "--access-log", str(path), "--access-log-format", "json", "--log-level", "error")
    with running_server(f"{tmp_path / 'authored.py'}:Quick", *flags) as server:
        for _ in range(60):  # more than the server itself has logged, to which the limit applies too
            assert server.infer("Quick", [1.0])[0] == 200
        wait_until(lambda: sum("/infer" in line for line in lines()) == 60, "60 lines")
        size = path.stat().st_size + 100  # less than one line
        resource.prlimit(server.popen.pid, resource.RLIMIT_FSIZE, (size, unlimited))
        assert server.infer("Quick", [1.0])[0] == 200
        wait_until(lambda: dropped(server) >= 1, "a dropped line")
        assert path.stat().st_size == size
        resource.prlimit(server.popen.pid, resource.RLIMIT_FSIZE, (unlimited, unlimited))
        assert server.infer("Quick", [2.0])[0] == 200
        wait_until(lambda: "/infer" in lines()[-1], "the last line")
    *before, last = (line for line in lines() if "/infer" in line or not line.endswith("}"))
    assert json.loads(last)["path"] == "/v2/models/Quick/infer"
    assert [len(line) for line in before if not line.endswith("}")] == [100]


# `python -c`: a server whose output goes to a full disk.
FULL_OUTPUT = """
import os, sys
full = os.open("/dev/full", os.O_WRONLY)
os.dup2(full, 1)
os.dup2(full, 2)
from dragoman.cli import main
sys.exit(main())
"""


def test_a_log_that_cannot_be_opened_anew_touches_no_connection(tmp_path: Path) -> None:
    """Meanwhile the log of the server itself cannot be written either."""
    (tmp_path / "authored.py").write_text(MODEL)
    folder, moved = tmp_path / "logs", tmp_path / "moved"
    folder.mkdir()
    options = (f"{tmp_path / 'authored.py'}:Quick", "--access-log", str(folder / "access.log"), "--access-log-skip=")
    with running_server(*options, "--access-log-format", "json", command=("-c", FULL_OUTPUT, "serve")) as server:
        server.infer("Quick", [1.0])
        lines(folder / "access.log", 1)
        folder.rename(moved)
        wait_until(lambda: dropped(server), "dropped lines")
        connections = [http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60) for _ in range(3)]
        for _ in range(3):
            for connection in connections:
                connection.request("GET", "/v2")
                response = connection.getresponse()
                assert (response.status, response.read()[:1]) == (200, b"{")
            before = dropped(server)
            wait_until(lambda before=before: dropped(server) > before, "more dropped lines")  # type: ignore[misc]
        for connection in connections:
            connection.close()
        moved.rename(folder)
        size = (folder / "access.log").stat().st_size
        wait_until(lambda: dropped(server) and (folder / "access.log").stat().st_size > size, "more lines")


async def test_a_file_that_cannot_be_opened_is_reported_at_start(tmp_path: Path) -> None:
    def identity(x: float) -> float:
        return x

    path = tmp_path / "missing" / "access.log"
    with pytest.raises(InvalidInput, match=r"setting 'access_log': cannot open .*: No such file or directory"):
        async with dragoman.Server(identity, http_port=0, grpc_port=-1, access_log=str(path)):
            await asyncio.sleep(0)
