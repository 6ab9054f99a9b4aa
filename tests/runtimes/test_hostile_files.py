"""Files that nest deep, or end too soon, get an error that names them; parsers of libraries never see them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dragoman.core.errors import InvalidInput
from dragoman.engine.model_files import model_settings
from dragoman.formats.model_config import parse_config
from dragoman.formats.ubjson import is_ubjson

DEEP = 100_000
KEY = b"L" + (1).to_bytes(8) + b"a"


@pytest.mark.parametrize(
    ("name", "text", "read"),
    [
        ("dragoman.toml", "a = " + "[" * DEEP, lambda file: model_settings(file.parent)),
        ("config.pbtxt", "parameters { " * DEEP, lambda file: parse_config(file.read_text(), file.name)),
    ],
)
def test_settings_that_nest_deep(name: str, text: str, read: Callable[[Path], object], tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidInput, match=name.replace("-", ".")):
        read(tmp_path / name)


def test_ubjson_as_xgboost_writes_it() -> None:
    xgboost = pytest.importorskip("xgboost")
    rows = np.arange(40.0).reshape(20, 2)
    booster = xgboost.train({"max_depth": 3}, xgboost.DMatrix(rows, rows[:, 0], feature_names=["a", "b"]), 3)
    data = bytes(booster.save_raw("ubj"))
    assert is_ubjson(data)
    assert not any(is_ubjson(data[:end]) for end in range(0, len(data), 97))
    assert not is_ubjson(data + b"}")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"{}", True),
        (b"{" + KEY + b"SU\x02ab" + b"}", True),
        (b"{" + KEY + b"[i\x01T]" + b"}", True),
        (b"{" + KEY + b"[#U\x02i\x01T" + b"}", True),
        (b"{" + KEY + b"[$d#U\x02" + bytes(8) + b"}", True),
        (b"{" + KEY + b"[$d#U\x03" + bytes(8) + b"}", False),
        (b"{" + KEY + b"[#U\xffi\x01" + b"}", False),  # a length of -1
        (b"{" + KEY + b"[" * 60 + b"]" * 60 + b"}", True),
        (b"{" + KEY + b"[" * 70 + b"]" * 70 + b"}", False),
        (b"{" + KEY + b"[" * 1000, False),
        ((b"{" + KEY) * DEEP, False),
        (b"{" + KEY + b"?}", False),
        (b"[]", False),
        (b"", False),
    ],
)
def test_ubjson_is_checked(data: bytes, expected: bool) -> None:
    assert is_ubjson(data) is expected
