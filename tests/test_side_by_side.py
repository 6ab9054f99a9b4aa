"""Tables of differences of `./scripts/side-by-side`: read, and compared with the differences that are found."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.side_by_side import __main__ as command  # noqa: E402
from benchmarks.side_by_side.cases import Case, Http, numbered  # noqa: E402
from benchmarks.side_by_side.exchange import NO_ANSWER, Ports, difference  # noqa: E402
from benchmarks.side_by_side.verdicts import Difference, entry, judge, read_verdicts  # noqa: E402

SIZE = Difference("rest size", '{"status": 500}', '{"status": 400}')
VERDICT = "ours is right: the request is invalid"


@pytest.mark.parametrize("name", command.PEERS)
def test_requests_of_each_table_are_made(name: str) -> None:
    peer = command.PEERS[name]
    titles = {case.title for case in numbered(peer.cases())}
    verdicts = read_verdicts(peer.differences)
    assert verdicts
    assert {each.request for each in verdicts} <= titles


def test_a_difference_needs_a_verdict_on_the_same_answers() -> None:
    assert judge([SIZE.request], [SIZE], {SIZE: VERDICT}).judged == [(SIZE, VERDICT)]
    assert not judge([SIZE.request], [SIZE], {}).passes
    other = Difference(SIZE.request, SIZE.peer, '{"status": 404}')
    assert judge([SIZE.request], [other], {SIZE: VERDICT}).without_verdict == [other]


def test_a_verdict_needs_a_difference_of_a_request_that_was_sent() -> None:
    result = judge([SIZE.request], [], {SIZE: VERDICT})
    assert (result.without_difference, result.passes) == ([SIZE.request], False)
    assert judge([], [], {SIZE: VERDICT}).passes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[difference]]\nrequest = "a"\n', "expected 'request'"),
        (entry(SIZE, ""), "verdict of 'rest size'"),
        (entry(SIZE, "ours is right:"), "verdict of 'rest size'"),
        (entry(SIZE, "who knows: x"), "verdict of 'rest size'"),
        (entry(SIZE, VERDICT) * 2, "got two"),
    ],
)
def test_a_table_with_a_wrong_entry_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    table = tmp_path / "differences.toml"
    table.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_verdicts(table)


def test_an_entry_is_read_as_it_was_written(tmp_path: Path) -> None:
    table = tmp_path / "differences.toml"
    odd = Difference('rest "x" ä\n\\', '{"a": "\\u0000"}', "")
    table.write_text(entry(odd, VERDICT), encoding="utf-8")
    assert read_verdicts(table) == {odd: VERDICT}


def test_only_the_parts_that_differ_are_shown() -> None:
    theirs = [{"status": 200, "body": {"id": "a", "data": [1, 2]}}, {"status": 200}]
    ours = [{"status": 200, "body": {"data": [1, 3]}}, {"status": 200}]
    expected = {"0": {"body": {"id": "a", "data": {"1": 2}}}}, {"0": {"body": {"id": "(none)", "data": {"1": 3}}}}
    assert difference(theirs, ours) == expected


class FakeServer:
    """A server that needs no process. Its ports are its kind."""

    def __init__(self, command: Any, folder: Path, ready: Any) -> None:
        self.ports = Ports(0, 0) if folder.name == "peer" else Ports(1, 1)
        self.is_running = True
        self.starts = 0

    def start(self) -> None:
        self.starts += 1

    def __enter__(self) -> "FakeServer":
        return self

    def __exit__(self, *error: object) -> None:
        pass


def _run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, table: str, answer: Any) -> int:
    def cases() -> Iterator[Case]:
        yield Case("rest", "rest size", [Http("/v2")])

    (tmp_path / "differences.toml").write_text(table)
    fields = {"name": "Other", "release": "1", "flags": (), "deadline_s": 1.0, "ready": None, "cases": cases}
    peer = SimpleNamespace(**fields, write_models=lambda folder: None, differences=tmp_path / "differences.toml")
    monkeypatch.setitem(command.PEERS, "triton", peer)
    monkeypatch.setattr(command, "Server", FakeServer)
    monkeypatch.setattr(command, "answers", answer)
    return command.main(["triton", "--python", "python"])


def test_the_command_fails_without_a_verdict_and_without_a_difference(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def different(ports: Ports, case: Case, deadline_s: float) -> Any:
        return [{"status": 400 if ports.http else 500}]

    def equal(ports: Ports, case: Case, deadline_s: float) -> Any:
        return [{"status": 400}]

    assert _run(monkeypatch, tmp_path, "", different) == 1
    drafts = capsys.readouterr().out.partition("[[difference]]")[2]
    assert 'request = "rest size"' in drafts
    table = entry(Difference("rest size", '{"0": {"status": 500}}', '{"0": {"status": 400}}'), VERDICT)
    assert _run(monkeypatch, tmp_path, table, different) == 0
    assert _run(monkeypatch, tmp_path, table, equal) == 1
    assert _run(monkeypatch, tmp_path, "", equal) == 0
    assert _run(monkeypatch, tmp_path, table.replace("rest size", "rest gone"), equal) == 1


def test_a_peer_without_an_answer_is_started_again_and_asked_once_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def late(ports: Ports, case: Case, deadline_s: float) -> Any:
        asked.append(ports.http)
        return [NO_ANSWER] if asked == [0] else [{"status": 200}]

    assert _run(monkeypatch, tmp_path, "", late) == 0
    assert asked == [0, 0, 1]


def test_titles_are_unique() -> None:
    one = Case("rest", "rest size", [])
    with pytest.raises(ValueError, match="rest size"):
        numbered(iter([one, one]))
