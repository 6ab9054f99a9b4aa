"""Error messages for clients and lines of the log: no tracebacks, server paths or line breaks."""

import logging
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.errors import public_message, public_text
from dragoman.system.logs import JsonFormatter, TextFormatter

SCRIPTED = """\
The following operation failed in the TorchScript interpreter.
Traceback of TorchScript, serialized code (most recent call last):
  File "code/__torch__.py", line 10, in forward
    return (l).forward(x, )
            ~~~~~~~~~~ <--- HERE

Traceback of TorchScript, original code (most recent call last):
/srv/site-packages/torch/nn/modules/linear.py(134): forward
/srv/train.py(7): <module>
RuntimeError: mat1 and mat2 must have the same dtype, but got Double and Float
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            SCRIPTED,
            "The following operation failed in the TorchScript interpreter.\n"
            "RuntimeError: mat1 and mat2 must have the same dtype, but got Double and Float",
        ),
        ('Traceback (most recent call last):\n  File "/a/b.py", line 1\n    x\nKeyError: 7\nmore', "KeyError: 7\nmore"),
        ("before: Traceback (most recent call last):\n  File x", "before: "),
        ("[Errno 2] No such file or directory: '/srv/m/data.csv'", "[Errno 2] No such file or directory: 'data.csv'"),
        ("cannot open /usr/lib/x, nor (/tmp/a/)", "cannot open x, nor (a)"),
        ("/onnxruntime_src/core/reshape.h:45 bad shape", "reshape.h:45 bad shape"),
        ("file:///tmp/m/w.bin is missing", "w.bin is missing"),
        ("no server of http://127.0.0.1:1/a/b.json answers", "no server of http://127.0.0.1:1/a/b.json answers"),
        ("POST /v2/models/m/infer failed", "POST /v2/models/m/infer failed"),
        ("expected m/s, got 3/4 and a/b/c.txt", "expected m/s, got 3/4 and a/b/c.txt"),
    ],
)
def test_tracebacks_and_paths_are_removed(text: str, expected: str) -> None:
    assert public_message(text) == expected


def test_public_text_names_the_type_and_is_truncated() -> None:
    assert public_text(ValueError("seven")) == "ValueError: seven"
    assert public_text(ValueError("x" * 5000)) == f"ValueError: {'x' * 988} ..."


@given(st.lists(st.text(alphabet="ab-_. 7", min_size=1, max_size=9), min_size=1, max_size=5))
def test_paths_with_any_names_are_removed(parts: list[str]) -> None:
    path = "/tmp/" + "/".join(part.strip() or "x" for part in parts)
    assert "/tmp/" not in public_message(f"cannot open {path}, nor '{path}': sorry")


# --- the log -------------------------------------------------------------------------------------------------


LINE_START = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}[+-]\d\d:\d\d ERROR   dragoman\.model \[\d+\]: ")


def format_record(message: str, error: BaseException | None = None) -> str:
    info = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("dragoman.model", logging.ERROR, __file__, 1, "%s", (message,), info)
    return TextFormatter().format(record)


@given(st.text())
def test_a_message_is_one_log_line(message: str) -> None:
    text = format_record(message)
    assert LINE_START.match(text)
    assert len(text.splitlines()) == 1
    assert text.replace("\t", "").isprintable() or any(not c.isprintable() for c in message)
    assert "\x1b" not in text


@given(st.text())
def test_lines_of_a_traceback_are_marked_as_continued(message: str) -> None:
    try:
        raise ValueError(f"one\n2026-11-22 10:00:00,000 INFO    dragoman.server [1]: {message}")
    except ValueError:
        text = format_record("failed", sys.exc_info()[1])
    first, *others = text.splitlines()
    assert LINE_START.match(first)
    assert all(line.startswith("  | ") for line in others)
    assert others[0] == "  | Traceback (most recent call last):"


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_of_a_long_message_both_ends_are_logged(formatter: logging.Formatter) -> None:
    """It may quote a request of many MB, of which a client has sent a few KB."""
    error = ValueError(f"begin {'a' * (1 << 20)} end")
    record = logging.LogRecord("m", logging.ERROR, "", 1, "%s", (str(error),), (ValueError, error, None))
    text = formatter.format(record)
    assert len(text) < 1 << 18
    assert len(re.findall(r"begin aaa.*?aaa \.\.\. aaa.*?aaa end", text)) == 2


def test_control_characters_are_escaped() -> None:
    assert format_record("one\nInjected: yes\r\tä\x1b[2J").endswith(": one\\nInjected: yes\\r\tä\\x1b[2J")
