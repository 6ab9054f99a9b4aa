"""Values of JSON and TOML of others nest to a limit, whatever the parser and the stack."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dragoman.core.documents import MAX_DEPTH, parse, parse_json, parse_toml, read_json

SRC = Path(__file__).parents[2] / "src"
# Modules that parse what another process of ours has written.
OWN_TEXTS = {
    "dragoman/workers/probe.py",
    "dragoman_cluster/launchers/ray.py",
    "dragoman_text/generation/grammar_worker.py",
    "dragoman_triton/bls.py",
    "dragoman_triton/python_backend.py",
}


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (parse_json, lambda n: "[" * n + "]" * n),
        (parse_json, lambda n: ('{"a":' * n + "1" + "}" * n).encode()),
        (parse_toml, lambda n: ".".join("a" * n) + " = 1"),
        (parse_toml, lambda n: f"a = {'[' * (n - 1) + ']' * (n - 1)}"),
    ],
)
def test_what_nests_deeper_is_invalid(parser: Callable[[Any], Any], text: Callable[[int], Any]) -> None:
    value = parser(text(MAX_DEPTH))
    for _ in range(MAX_DEPTH - 1):
        value = value[0] if isinstance(value, list) else value["a"]
    assert value in ([], {"a": 1})
    for depth in (MAX_DEPTH + 1, 5000, 200_000 if parser is parse_json else 6000):
        with pytest.raises(ValueError, match="it nests deeper than 200"):
            parser(text(depth))


def test_values_as_the_parser_returns_them(tmp_path: Path) -> None:
    assert parse_json('{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}
    assert parse_json("[1.50]", parse_float=str) == ["1.50"]
    assert parse_json(b"3") == 3
    for text in ("[", b"\xff"):
        with pytest.raises(ValueError):
            parse_json(text)
    file = tmp_path / "a.json"
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json(file) == {"a": 1}
    shared: list[Any] = [1]
    for _ in range(60):  # with each element apart, 2^60 of them
        shared = [shared, shared]
    assert parse(lambda: shared) is shared


def test_no_other_module_parses_the_texts_of_others() -> None:
    own = re.compile(r"(?<![\w.])(json\.loads?|tomllib\.loads?)\b")
    found = {str(path.relative_to(SRC)) for path in SRC.rglob("*.py") if own.search(path.read_text())}
    packages = {path.name for path in SRC.iterdir()}  # a feature may be absent
    own_texts = {name for name in OWN_TEXTS if name.partition("/")[0] in packages}
    assert found == {"dragoman/core/documents.py", *own_texts}
