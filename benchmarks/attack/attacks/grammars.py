"""Grammars that take long to compile or to apply, with a client that requests short completions of the same model."""

import http.client
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from benchmarks.attack.attack import AimMissedError, Attack, Target
from benchmarks.attack.http import post

_MODEL = "tiny-llama"
_TEXT_MS = 1000.0  # the aim: longest time of a short completion of the same model
_LIMIT_S = 120.0
_SLOW_STEPS = "start: (" + "/[a-z]/? " * 500 + ")*"


def bomb(count: int) -> str:
    """Return a regular expression of 10^9 repetitions, different for each count."""
    return f"((b{{1000}}){{1000}}){{{count}}}"


def requests(regex: str) -> Mapping[str, tuple[str, Mapping[str, Any]]]:
    """Return a request with this regular expression for each API that accepts one."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": regex}}, "required": ["a"]}
    openai = {"model": _MODEL, "prompt": "x", "max_tokens": 40}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    lark = f"start: /{regex}/"
    tgi = {"grammar": {"type": "regex", "value": regex}, "max_new_tokens": 40}
    return {
        "LMI guided_regex": (f"/predictions/{_MODEL}", {"inputs": "x", "parameters": {"guided_regex": regex}}),
        "TGI grammar": (f"/models/{_MODEL}/generate", {"inputs": "x", "parameters": tgi}),
        "structured_outputs.regex": ("/v1/completions", {**openai, "structured_outputs": {"regex": regex}}),
        "response_format": ("/v1/completions", {**openai, "response_format": form}),
        "Lark": ("/v1/completions", {**openai, "guided_grammar": lark}),
    }


def _lmi(**parameters: Any) -> tuple[str, Mapping[str, Any]]:
    return f"/predictions/{_MODEL}", {"inputs": "x", "parameters": parameters}


def _in_a_row(target: Target) -> str:
    return _run_attack(target, [_lmi(guided_regex=bomb(1000 + i)) for i in range(62)], 1)


def _at_once(target: Target) -> str:
    bodies_by_path = [item for i in range(8) for item in requests(bomb(1000 + i)).values()]
    return _run_attack(target, bodies_by_path, 8)


def _steps(target: Target) -> str:
    bodies_by_path = [_lmi(guided_grammar=_SLOW_STEPS, max_new_tokens=60, do_sample=True, seed=i) for i in range(16)]
    return _run_attack(target, bodies_by_path, 8)


def _large(target: Target) -> str:
    references = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(5000)}
    schemas: Sequence[Any] = (
        {"$ref": "#/$defs/d0", "$defs": {**references, "d5000": {"type": "null"}}},
        {"type": "integer", "multipleOf": 99_999_989},
        {"type": "object", "patternProperties": {f"^a{i}x$": {"type": "string"} for i in range(1000)}},
        {"enum": [f"v{i}" for i in range(20_000)]},
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5_000)}},
        {"$ref": "#"},
    )
    return _run_attack(target, [_lmi(guided_json=schema) for schema in schemas], 2)


def _run_attack(target: Target, bodies_by_path: Sequence[tuple[str, Mapping[str, Any]]], at_once: int) -> str:
    bodies = [(path, json.dumps(body).encode()) for path, body in bodies_by_path]
    with texts_beside(target) as waits, ThreadPoolExecutor(at_once) as attackers:
        results = list(attackers.map(lambda item: post(target, *item), bodies))
    longest = max(waits)
    note = f"{len(results)} requests; {len(waits)} short completions of the same model took up to {longest:.0f} ms"
    if longest > _TEXT_MS:
        raise AimMissedError(f"a short completion took {longest:.0f} ms ({note}; {results[0]})")
    return f"{note}; {results[0]}"


@contextmanager
def texts_beside(target: Target, headers: Mapping[str, str] = {}) -> Iterator[list[float]]:
    """Request short completions with these headers in a thread; yield their durations in ms.

    Raises AimMissedError if one failed.
    """
    waits: list[float] = []
    errors: list[str] = []
    stopped = threading.Event()

    def work() -> None:
        while not stopped.is_set():
            began_s = time.monotonic()
            try:
                _text(target, headers)
            except (OSError, ValueError, http.client.HTTPException) as error:
                errors.append(f"a short completion failed: {type(error).__name__}: {error}")
            waits.append((time.monotonic() - began_s) * 1000)

    _text(target, headers)
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield waits
    finally:
        stopped.set()
        thread.join()
    if errors:
        raise AimMissedError(errors[0])


def _text(target: Target, headers: Mapping[str, str]) -> None:
    connection = http.client.HTTPConnection(target.host, target.http_port, timeout=_LIMIT_S)
    try:
        body = {"inputs": "The", "parameters": {"max_new_tokens": 8, "ignore_eos_token": True}}
        connection.request("POST", f"/predictions/{_MODEL}", json.dumps(body), dict(headers))
        response = connection.getresponse()
        text = response.read()
        if response.status != 200:
            raise ValueError(f"status {response.status}: {text[:100]!r}")
    finally:
        connection.close()


def _attack(name: str, about: str, run: Any) -> Attack:
    return Attack(name=name, about=about, run=run, models=("doubled", _MODEL))


ATTACKS = (
    _attack("grammar-regex-row", "62 regular expressions of 10^9 repetitions, one after another", _in_a_row),
    _attack("grammar-regex-apis", "40 such expressions through five parameters, eight at once", _at_once),
    _attack("grammar-slow-steps", "16 grammars of which every token takes long, eight at once", _steps),
    _attack("grammar-large", "schemas that overflow stacks, or take minutes to compile", _large),
)
