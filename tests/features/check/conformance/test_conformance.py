"""`dragoman check URL`: Dragoman conforms, and each clause detects a response that violates it."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from dragoman.cli import main
from dragoman_check.cli.check import PROTOCOL_NAMES
from dragoman_check.conformance.clauses import Clause, ClauseFailed, NotTried, Outcome, Protocol
from dragoman_check.conformance.grpc_client import CallRejected
from dragoman_check.conformance.http import HttpTarget, RecordedResponse
from dragoman_check.conformance.open_inference_grpc import GrpcContext
from dragoman_check.conformance.runner import PROTOCOLS, run_clauses
from dragoman_check.conformance.target import Target
from e2e.server_process import ServerProcess
from features.check.conformance.broken import BROKEN, ChangedChannel, ChangedHttp, GrpcChange, status
from features.check.conformance.conftest import TOKEN
from features.check.load_test.conftest import SlowServer
from features.check.load_test.conftest import slow as slow

CLAUSES = {clause.id: (protocol, clause) for protocol in PROTOCOLS for clause in protocol.clauses}


@pytest.fixture(scope="module")
def target(server: ServerProcess) -> Target:
    http = ChangedHttp(f"http://127.0.0.1:{server.http_port}", {"Authorization": f"Bearer {TOKEN}"})
    return Target(http, f"127.0.0.1:{server.grpc_port}")


@pytest.fixture(scope="module")
def contexts(target: Target) -> dict[str, Any]:
    """The contexts of all protocols, prepared with unchanged responses."""
    found = {protocol.name: protocol.prepare(target) for protocol in PROTOCOLS}
    context: GrpcContext = found["open-inference-grpc"]
    context.grpc.channel = ChangedChannel(context.grpc.channel)
    return found


def test_dragoman_conforms_to_every_clause(target: Target) -> None:
    results = list(run_clauses(target, PROTOCOLS, allow_changes=True))
    assert {r.clause.id: r.reason for r in results if r.outcome is not Outcome.PASS} == {
        "umbridge-unsupported-feature": "the model supports every feature"
    }
    assert [r.clause.id for r in results] == list(CLAUSES)
    assert all(r.exchanges for r in results)


def test_there_is_a_violation_for_each_clause() -> None:
    assert set(BROKEN) == set(CLAUSES)
    assert all(BROKEN.values())


@pytest.mark.parametrize("name", CLAUSES)
def test_each_clause_detects_its_violations(name: str, target: Target, contexts: dict[str, Any]) -> None:
    protocol, clause = CLAUSES[name]
    context = contexts[protocol.name]
    http: Any = target.http
    for number, change in enumerate(BROKEN[name]):
        channel = context.grpc.channel if isinstance(change, GrpcChange) else http
        channel.change = change.apply if isinstance(change, GrpcChange) else change
        try:
            with pytest.raises(ClauseFailed):
                _check_as_run(protocol, clause, context, target)
        except pytest.fail.Exception as error:
            raise AssertionError(f"change {number} of '{name}' is not detected") from error
        finally:
            channel.change = None


def _check_as_run(protocol: Protocol, clause: Clause, context: Any, target: Target) -> None:
    """Check one clause as the command does, with a context that is prepared already."""
    prepared = Protocol(protocol.name, protocol.title, protocol.document, lambda _: context, protocol.clauses)
    (result,) = run_clauses(target, [prepared], [clause.id], allow_changes=True)
    if result.outcome is Outcome.FAIL:
        raise ClauseFailed(result.reason)


def test_the_command_knows_the_protocols() -> None:
    assert tuple(protocol.name for protocol in PROTOCOLS) == PROTOCOL_NAMES
    assert all(clause.requirement and clause.section for _, clause in CLAUSES.values())


# --- the command -------------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_and_writes_junit(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.xml"
    url = f"http://127.0.0.1:{server.http_port}"
    assert main(["check", url, "--model", "affine", "--only", "rest-infer*", "--junit", str(report)]) == 0
    text = capsys.readouterr().out
    assert "pass         rest-infer-id " in text
    assert "all 8 clauses that could be checked hold" in text
    assert "\x1b" not in text
    suites = ET.parse(report).getroot()
    assert {name: suites[0].get(name) for name in ("name", "tests", "failures", "skipped")} == {
        "name": "open-inference-rest",
        "tests": "8",
        "failures": "0",
        "skipped": "0",
    }


def test_grpc_is_found_on_the_http_port(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{server.http_port}"
    assert main(["check", url, "--protocol", "open-inference-grpc", "--only", "grpc-infer-id", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["summary"] == {"pass": 1}
    (clause,) = report["clauses"]
    assert clause["outcome"] == "pass"
    assert clause["exchanges"][0]["sent"].startswith("ModelInfer model_name:")


def test_an_unknown_model_leaves_clauses_untried(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{server.http_port}"
    assert main(["check", url, "--model", "nope", "--only", "rest-infer-id"]) == 2
    text = capsys.readouterr().out
    assert "not tried    rest-infer-id" in text
    assert "GET v2/models/nope gets status 404" in text


def test_clauses_that_need_a_key_are_not_tried(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://127.0.0.1:{server.http_port}"
    arguments = ["check", url, "--only", "extension-repository-index"]
    assert main(arguments) == 2
    hint = "status 401: give a key with --key-file FILE or the variable DRAGOMAN_API_KEY"
    assert f"the server rejects the request with {hint}" in capsys.readouterr().out
    monkeypatch.setenv("DRAGOMAN_API_KEY", TOKEN)
    assert main(arguments) == 0


def test_a_rejection_for_want_of_a_key_is_not_a_rejected_request(target: Target, contexts: dict[str, Any]) -> None:
    http: Any = target.http
    http.change = status(401)
    protocol, clause = CLAUSES["rest-metadata-unknown-model"]
    context = contexts[protocol.name]
    prepared = Protocol(protocol.name, protocol.title, protocol.document, lambda _: context, protocol.clauses)
    try:
        (result,) = run_clauses(target, [prepared], [clause.id])
    finally:
        http.change = None
    assert result.outcome is Outcome.NOT_TRIED


def test_a_request_that_the_server_forbids_asks_for_no_key() -> None:
    with pytest.raises(NotTried, match=r"^the server does not permit the request: 403 not here$"):
        RecordedResponse(403, {}, b"not here").ok()


def test_grpc_calls_that_need_a_key_are_not_tried() -> None:
    class Closed:
        def call(self, *arguments: Any) -> Any:
            raise CallRejected("UNAUTHENTICATED", "no key")

    closed: Any = Closed()
    context = GrpcContext(closed, HttpTarget(""), "none")
    for send in (context.call, context.optional, context.expect_rejected):
        with pytest.raises(NotTried, match="give a key with --key-file FILE"):
            send("ServerReady", None, None)


class ChatOnly(HttpTarget):
    """An OpenAI server of chats alone, whose model is an alias."""

    def send(self, method: str, path: str, body: bytes | None = None, headers: Any = None) -> RecordedResponse:
        if path == "/v1/models":
            return self._response(200, {"data": [{"id": "alias"}]})
        if path != "/v1/chat/completions":
            return RecordedResponse(404, {}, b"not found")
        try:
            model = json.loads(body or b"")["model"]
        except ValueError:
            return self._response(400, {"error": {"message": "not JSON", "type": "invalid_request_error"}})
        if model != "alias":
            return self._response(404, {"error": {"message": "unknown model", "type": "invalid_request_error"}})
        choice = {"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        head = {"id": "1", "object": "chat.completion", "created": 1, "model": "snapshot-2026"}
        return self._response(200, {**head, "choices": [choice], "usage": usage})

    def _response(self, status: int, value: Any) -> RecordedResponse:
        return RecordedResponse(status, {"content-type": "application/json"}, json.dumps(value).encode())


def test_a_server_of_chats_alone_conforms() -> None:
    names = ["openai-chat", "openai-error-unknown-model", "openai-error-malformed-json"]
    found = {r.clause.id: r.outcome for r in run_clauses(Target(ChatOnly("http://h")), PROTOCOLS, names)}
    assert found == dict.fromkeys(names, Outcome.PASS)


@pytest.mark.parametrize("name", ["rest-error-empty-inputs", "grpc-error-empty-inputs"])
def test_inputs_may_be_optional(name: str) -> None:
    assert CLAUSES[name][1].level == "should"


def test_the_name_of_a_server_cannot_control_the_terminal(slow: SlowServer, capsys: pytest.CaptureFixture[str]) -> None:
    slow.metadata |= {"name": "\x1b[31mred", "version": "1\x07"}
    assert main(["check", slow.url, "--only", "rest-server-live"]) == 0
    assert capsys.readouterr().out.startswith(f"{slow.url}: \ufffd[31mred 1\ufffd\n")


def test_the_given_request_is_sent(server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [7, 8, 9]}]}))
    url = f"http://127.0.0.1:{server.http_port}"
    options = ("--model", "affine", "--request", str(request), "--only", "rest-infer", "--verbose")
    assert main(["check", url, *options]) == 0
    assert '"data": [7, 8, 9]' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["http://127.0.0.1:1"], "no HTTP server answers at http://127.0.0.1:1"),
        (["ftp://host"], "expected a URL such as http://HOST:PORT"),
        (["http://127.0.0.1:1", "--request", "/nonexistent"], "--request: '/nonexistent' cannot be read"),
        (["http://127.0.0.1:1", "--config", "["], "--config: expected JSON, got '['"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *arguments]) == 2
    assert message in capsys.readouterr().err
