"""Models that a server loads into this process, for tests that control or inspect them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import dragoman


@contextmanager
def recorded_models() -> Iterator[dict[str, Any]]:
    """Yield the models that are created meanwhile, by name."""
    models: dict[str, Any] = {}
    create = dragoman.Model.__init__

    def create_and_record(self: dragoman.Model, spec: dragoman.ModelSpec) -> None:
        create(self, spec)
        models[spec.name] = self

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dragoman.Model, "__init__", create_and_record)
        yield models
