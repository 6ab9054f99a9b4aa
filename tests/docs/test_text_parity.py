"""Each row of benchmarks/results/text-parity.md that claims something of Dragoman names an existing test or command."""

import ast
from pathlib import Path

from .test_docs_reference import rows

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "benchmarks" / "results" / "text-parity.md"
SERVERS = ["vLLM", "TGI", "SGLang", "llama.cpp", "LMI", "Ollama", "Dragoman"]


def _exists(reference: str) -> bool:
    name, _, function = reference.strip("`").partition("::")
    path = ROOT / name
    if not function:
        return name.startswith("./scripts/") and path.is_file()
    tree = ast.parse(path.read_text())
    return any(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function for node in ast.walk(tree)
    )


def test_every_row_is_shown_by_a_test() -> None:
    table = [row for row in rows(PAGE.read_text()) if len(row) == len(SERVERS) + 2]
    assert [row for row in table if row[0] == "feature"] == [["feature", *SERVERS, "shown by"]] * 3
    table = [row for row in table if row[0] != "feature"]
    assert len(table) > 50
    for feature, *servers, reference in table:
        assert set(servers) <= {"yes", "part", "no", "?"}, feature
        if servers[-1] == "yes":
            assert reference, feature
        assert servers[-1] in ("yes", "part", "no"), feature
        assert not reference or _exists(reference), (feature, reference)


def test_partial_rows_are_explained() -> None:
    table = rows(PAGE.read_text())
    explained = {row[0] for row in table if len(row) == 2}
    assert set(SERVERS) <= explained
