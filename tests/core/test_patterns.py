"""Patterns that are compiled when they are first used."""

import re
from unittest import mock

import pytest

from dragoman.core.patterns import LazyPattern


def test_compiled_once_when_first_used() -> None:
    with mock.patch.object(re, "compile", wraps=re.compile) as compiling:
        pattern = LazyPattern("(?P<first>a)b?")
        assert compiling.call_count == 0
        found = pattern.search("cab")
        assert found is not None
        assert (found["first"], found.span()) == ("a", (1, 3))
        assert pattern.match("b") is None
        assert [each.span() for each in pattern.finditer("a ab")] == [(0, 1), (2, 4)]
        assert compiling.call_count == 1


def test_other_attributes() -> None:
    with pytest.raises(AttributeError):
        LazyPattern("a").matches  # noqa: B018
