"""Errors of the command line that say what may be meant: names of models, options, and ports."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import dragoman
from dragoman import Infer, Server, TensorSpec
from dragoman.cli import main
from text_server import ReverseModel

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Iris(dragoman.Model):
    placement = "inline"
    inputs = (TensorSpec("flowers", dragoman.FP64, (-1, 4)),)
    outputs = (TensorSpec("label", dragoman.INT64, (-1,)),)

    def infer(self, call: Infer) -> dict[str, np.ndarray]:
        return {"label": np.zeros(len(call.inputs["flowers"].data), np.int64)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    async with Server(Iris, ReverseModel, http_port=0, grpc_port=0, control_open=True) as server:
        yield server


async def run(*arguments: str) -> int:
    """Run a command in a thread, because the server runs in this event loop."""
    return await asyncio.to_thread(main, arguments)


@pytest.mark.parametrize(
    "words",
    [
        ["infer", "URL", "Iriss", "1,2,3,4"],
        ["infer", "grpc://GRPC", "Iriss", "1,2,3,4"],
        ["models", "URL", "Iriss"],
        ["status", "URL", "Iriss"],
        ["bench", "URL", "Iriss", "--seconds", "0.1"],
        ["bench", "URL", "Iriss", "--protocol", "openai-chat", "--seconds", "0.1"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
async def test_a_misspelled_model_has_a_suggestion(
    server: Server, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"URL": server.http_url, "grpc://GRPC": f"grpc://{server.grpc_url}"}
    assert await run(*(places.get(word, word) for word in words)) == 2
    error = capsys.readouterr().err.strip()
    assert error.endswith("; did you mean 'Iris'?")
    assert len(error.splitlines()) == 1


async def test_a_model_of_another_name_is_told_what_there_is(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run("infer", server.http_url, "zzz", "1") == 2
    assert capsys.readouterr().err.endswith("is not found; expected Iris, ReverseModel, pirate, ReverseModel:pirate\n")
    assert await run("infer", server.http_url, "Iris", "1,2,3,4", "--version", "7") == 2
    assert "did you mean" not in capsys.readouterr().err  # the name is right


class Gone(dragoman.Model):
    """Cannot be loaded."""

    placement = "inline"

    def load(self) -> None:
        raise RuntimeError("the weights are gone")

    def infer(self, call: Infer) -> dict[str, np.ndarray]:
        return {}


@pytest.mark.parametrize("is_open", [True, False])
async def test_a_model_that_is_not_ready_has_the_reason_of_its_status(
    is_open: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    async with Server(Gone, http_port=0, grpc_port=-1, control_open=is_open) as server:
        assert await run("infer", server.http_url, "Gone", "1") == 2
    error = capsys.readouterr().err
    assert ("; its status: " in error) == ("the weights are gone" in error) == is_open


async def test_a_model_that_does_not_respond_has_the_reason_of_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    spec = {"name": "x", "datatype": "FP32", "shape": [-1]}
    status = {"ready": True, "models": [{"name": n, "reason": f"{n} waits for workers"} for n in ("m", "n")]}
    documents = {
        "/v2/models/m": {"name": "m", "versions": [], "platform": "", "inputs": [spec], "outputs": []},
        "/v2/repository/status": status,
    }

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (request := await reader.readuntil(b"\r\n\r\n")) and (path := request.split()[1].decode()) in documents:
            body = json.dumps(documents[path]).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        await reader.read()  # a request without a response
        writer.close()

    async with await asyncio.start_server(respond, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        assert await run("infer", f"http://127.0.0.1:{port}", "m", "1", "--timeout-s", "1") == 2
        listener.close_clients() if hasattr(listener, "close_clients") else None
    assert capsys.readouterr().err == "dragoman: no response within 1 s; its status: m waits for workers\n"


async def test_names_of_outputs(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("infer", server.http_url, "Iris", "1,2,3,4", "--output", "lable") == 2
    assert "did you mean 'label'?" in capsys.readouterr().err


async def test_models_and_status_of_some_names(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("models", server.http_url, "Iris", "--json") == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)] == ["Iris"]
    assert await run("status", server.http_url, "ReverseModel", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in found["models"]] == ["ReverseModel"]
    assert found["ready"] is True


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["infer", "URL", "Iris", "1,2,3,4"], "expected grpc://HOST"),
        (["models", "URL"], "expected grpc://HOST"),
        (["status", "URL"], "expected the port of HTTP"),
        (["chat", "URL", "m", "--message", "x"], "expected the port of HTTP"),
        (["bench", "URL", "Iris"], "expected the port of HTTP; see --grpc"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
async def test_the_port_of_grpc_is_recognised(
    server: Server, words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://{server.grpc_url}"
    assert await run(*(url if word == "URL" else word for word in words)) == 2
    error = capsys.readouterr().err
    expected = expected.replace("HOST", str(server.grpc_url))
    assert error.endswith(f"the response is not HTTP/1.1; is this a gRPC port? {expected}\n")


async def test_a_port_of_neither_is_not_called_grpc(capsys: pytest.CaptureFixture[str]) -> None:
    async def respond(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")
        writer.close()

    other = await asyncio.start_server(respond, "127.0.0.1", 0)
    async with other:
        url = f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}"
        assert await run("models", url) == 2
    assert capsys.readouterr().err == f"dragoman: {url}: the response is not HTTP/1.1\n"


async def test_options_of_the_same_meaning(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--duration", "0.1", "--clients=2", "--warmup", "0", "--json", "-"]
    assert await run("bench", server.http_url, "Iris", *words) == 0
    (measurement,) = json.loads(capsys.readouterr().out)["measurements"]
    assert measurement["load"]["seconds"] == 0.1
    assert measurement["load"]["concurrency"] == 2
    assert measurement["load"]["warmup_s"] == 0
    assert await run("bench", server.http_url, "Iris", "--connections", "2") == 2
    assert "expected --rate too, or --concurrency instead" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["serve", "--workers=2"], "did you mean '--replicas' or '--processes'?"),
        (["serve", "--http-prot", "1"], "did you mean '--http-port'?"),
        (["bench", "--secnds", "1"], "did you mean '--seconds'?"),
        (["chat", "--model", "m"], "MODEL is written without '--model'"),
        (["status", "--url=http://127.0.0.1:1"], "URL is written without '--url'"),
        (["models", "--file", "a"], "did you mean '--key-file'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
async def test_options_with_several_meanings_are_suggested(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert hint in capsys.readouterr().err


async def test_words_after_two_hyphens_are_not_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("infer", "http://127.0.0.1:1", "m", "--timeout", "-1", "--", "--timeout") == 2
    assert "--timeout-s: expected seconds above 0, got -1" in capsys.readouterr().err


async def test_the_help_has_the_protocols_of_the_server(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    for title in {"KServe V1", "UM-Bridge", *server.http_protocols} - {"metrics", "Open Inference generate"}:
        assert title.partition(" (")[0] in text


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=127.0.0.1 -keyout key.pem"
    more = ["-addext", "subjectAltName=IP:127.0.0.1", "-out", "cert.pem"]
    subprocess.run(["openssl", *words.split(), *more], cwd=folder, check=True, capture_output=True)
    return folder


async def test_tls_and_its_absence_are_recognised(
    server: Server, certificate: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, *more in (["models"], ["status"], ["infer", "Iris", "1,2,3,4"]):
        url = server.http_url.replace("http:", "https:")
        assert await run(command, url, *more) == 2
        assert (
            capsys.readouterr().err
            == f"dragoman: cannot reach {url}: the response is not TLS; expected {server.http_url}?\n"
        )
    files: dict[str, Any] = {"tls_cert": str(certificate / "cert.pem"), "tls_key": str(certificate / "key.pem")}
    async with Server(Iris, http_port=0, grpc_port=-1, **files) as secure:
        for command, *more in (["models"], ["status"], ["infer", "Iris", "1,2,3,4"]):
            assert await run(command, secure.http_url, *more) == 2
            assert "; name the certificate or its authority with --ca FILE" in capsys.readouterr().err
            plain = secure.http_url.replace("https:", "http:")
            assert await run(command, plain, *more) == 2
            assert capsys.readouterr().err.endswith(f"; expected {secure.http_url}?\n")
        assert await run("models", secure.http_url, "--ca", files["tls_cert"]) == 0


async def test_a_key_without_the_role_of_reading_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, key = tmp_path / "keys.toml", tmp_path / "app.key"
    assert await run("keys", "create", "app", "--file", str(keys), "--roles", "infer") == 0
    key.write_text(capsys.readouterr().out)
    async with Server(Iris, http_port=0, grpc_port=-1, api_keys=str(keys)) as server:
        assert await run("infer", server.http_url, "Iris", "1,2,3,4", "--key-file", str(key)) == 2
        error = capsys.readouterr().err
        assert "key 'app' does not have the role 'read'" in error
        assert error.endswith(
            "; commands read what a model takes before they call it: the key needs the role 'read' as well\n"
        )
        assert await run("bench", server.http_url, "Iris", "--key-file", str(key), "--seconds", "0.1") == 2
        error = capsys.readouterr().err
        assert "does not have the role 'read'" in error
        assert "--input FILE" in error


@pytest.mark.parametrize("role", ["read", "infer"])
async def test_the_main_port_of_a_server_with_an_admin_port(
    role: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """It has no status. A key without the role `infer` is refused for paths that it does not have: say the same."""
    caplog.set_level("INFO")
    keys, key = tmp_path / "keys.toml", tmp_path / "app.key"
    assert await run("keys", "create", "app", "--file", str(keys), "--roles", role) == 0
    key.write_text(capsys.readouterr().out)
    async with Server(Iris, http_port=0, admin_port=0, grpc_port=-1, api_keys=str(keys)) as server:
        for command in (["status"], ["top", "--json"]):
            assert await run(command[0], server.http_url, *command[1:], "--key-file", str(key)) == 2
            error = capsys.readouterr().err
            assert error.endswith("; with an admin port, expected its URL\n"), error
            assert "role" not in error
    where = [vars(record)["request"] for record in caplog.records if vars(record).get("action") == "refused"]
    assert ("GET /v2/repository/status" in where) is (role == "read")
    assert "GET " not in where
