"""Fixtures of the tests of worker processes."""

import pytest
from workers_harness import forget_children


@pytest.fixture(autouse=True)
def _no_children_of_earlier_tests() -> None:
    forget_children()
