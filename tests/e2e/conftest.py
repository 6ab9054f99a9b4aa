"""Servers that several test modules share."""

from collections.abc import Callable, Iterator

import pytest

from e2e.server_process import MODELS, ServerProcess, running_server, started_server

TOKEN = "open sesame"

SHAPES = [
    f"{MODELS / 'shapes.py'}:{name}" for name in ("SumDiff", "Echo", "Upper", "Scores", "Count", "Ticks", "Sleep")
]


@pytest.fixture(scope="session")
def shapes() -> Iterator[ServerProcess]:
    """The models of `shapes.py`; model control is on."""
    with running_server(*SHAPES, "--placement", "thread", "--control-token", TOKEN) as process:
        yield process


@pytest.fixture
def start() -> Iterator[Callable[..., ServerProcess]]:
    """Start servers without waiting for them; they are stopped after the test."""
    running = []

    def go(*arguments: str, **options: object) -> ServerProcess:
        context = started_server(*arguments, **options)
        process = context.__enter__()
        running.append(context)
        return process

    yield go
    for context in running:
        context.__exit__(None, None, None)
