"""Fixtures of all tests of text."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def unhurried_compilation() -> Iterator[None]:
    """Let grammars take as long as they need: only their CPU time is bounded, however busy the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        for limit in ("_START_S", "_GRACE_S", "_WALL_S"):
            patch.setattr(f"dragoman_text.generation.grammar_compiler.{limit}", 600.0)
        yield
