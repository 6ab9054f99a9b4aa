"""Clients that start sequences of a stateful model without end."""

import json
from collections import Counter
from http.client import HTTPConnection
from typing import Any

from benchmarks.attack.attack import AimMissedError, Attack, Target
from benchmarks.attack.keys import KEYS, bearer, key_flags

_STARTS = 1500  # more than `max_sequences`
_FULL = 1024


class _Client:
    """A client with a key."""

    def __init__(self, target: Target, name: str) -> None:
        self._connection = HTTPConnection(target.host, target.http_port, timeout=60)
        self._headers = bearer(name)

    def send(self, number: int, x: int, **flags: bool) -> tuple[int, Any]:
        """Send a request of a sequence; return the status and the total, or the error."""
        parameters = {"sequence_id": number, **{f"sequence_{name}": value for name, value in flags.items()}}
        tensor = {"name": "x", "datatype": "INT64", "shape": [1], "data": [x]}
        body = json.dumps({"inputs": [tensor], "parameters": parameters})
        self._connection.request("POST", "/v2/models/Total/infer", body, self._headers)
        response = self._connection.getresponse()
        answer = json.loads(response.read())
        return response.status, answer["outputs"][0]["data"][0] if "outputs" in answer else answer["error"]


def _starts(target: Target) -> str:
    """Start sequences until the model has no place; another key goes on with its own, and starts a new one."""
    honest, hostile = _Client(target, "honest"), _Client(target, "hostile")
    _expect(honest.send(1, 10, start=True), (200, 10), "the honest client's start")
    answers: Counter[Any] = Counter()
    for number in range(1, _STARTS + 1):
        status, answer = hostile.send(number, 1, start=True)
        answers[status if status == 200 and answer == 1 else f"{status} {answer}"] += 1
        if number % 50 == 0:
            _expect(honest.send(1, 1), (200, 10 + number // 50), "the honest client's sequence")
    full = f"503 model 'Total': expected at most {_FULL * 7 // 8} sequences"
    expected = {200: _FULL * 7 // 8, full: _STARTS - _FULL * 7 // 8}
    if dict(answers) != expected:
        raise AimMissedError(f"expected {expected}, got {dict(answers)}")
    _expect(honest.send(2, 5, start=True), (200, 5), "a new sequence of the honest client")
    status, answer = hostile.send(2**63, 1)
    if status != 400:
        raise AimMissedError(f"expected 400 for a sequence that was not started, got {status} {answer}")
    return f"{_STARTS:,} starts, of which {answers[200]} were accepted and the others got 503"


def _expect(found: tuple[int, Any], expected: tuple[int, Any], what: str) -> None:
    if found != expected:
        raise AimMissedError(f"{what}: expected {expected}, got {found}")


ATTACKS = (
    Attack(
        name="sequences-started",
        about=f"{_STARTS:,} sequences that are started and never ended",
        run=_starts,
        models=("doubled", "Total"),
        prepare=key_flags,
        token=KEYS["honest"],
        body_bytes=1 << 20,
    ),
)
