"""Servers that several tests share."""

from collections.abc import Callable, Iterator

import pytest

from e2e.served import MODELS, Served, serving, started

TOKEN = "open sesame"

SHAPES = [
    f"{MODELS / 'shapes.py'}:{name}" for name in ("SumDiff", "Echo", "Upper", "Scores", "Count", "Ticks", "Sleep")
]


@pytest.fixture(scope="session")
def shapes() -> Iterator[Served]:
    """The models of `shapes.py`; model control is on."""
    with serving(*SHAPES, "--control-token", TOKEN) as served:
        yield served


@pytest.fixture
def start() -> Iterator[Callable[..., Served]]:
    """Starts servers of which nothing is awaited; they are gone after the test."""
    running = []

    def go(*arguments: str, **options: object) -> Served:
        context = started(*arguments, **options)
        served = context.__enter__()
        running.append(context)
        return served

    yield go
    for context in running:
        context.__exit__(None, None, None)
