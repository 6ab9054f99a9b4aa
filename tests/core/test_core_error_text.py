"""What clients and the log see of an exception, whatever its text holds."""

import logging
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.errors import public_message, public_text
from dragoman.system.logs import TextFormatter

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
    ("text", "wanted"),
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
        ("file:///tmp/m/w.bin is gone", "w.bin is gone"),
        ("no server of http://127.0.0.1:1/a/b.json answers", "no server of http://127.0.0.1:1/a/b.json answers"),
        ("POST /v2/models/m/infer failed", "POST /v2/models/m/infer failed"),
        ("expected m/s, got 3/4 and a/b/c.txt", "expected m/s, got 3/4 and a/b/c.txt"),
    ],
)
def test_tracebacks_and_paths_are_left_out(text: str, wanted: str) -> None:
    assert public_message(text) == wanted


def test_the_type_is_named_and_the_length_bounded() -> None:
    assert public_text(ValueError("seven")) == "ValueError: seven"
    assert public_text(ValueError("x" * 5000)) == f"ValueError: {'x' * 988} ..."


@given(st.lists(st.text(alphabet="ab-_. 7", min_size=1, max_size=9), min_size=1, max_size=5))
def test_no_path_of_this_machine_is_left(parts: list[str]) -> None:
    path = "/tmp/" + "/".join(part.strip() or "x" for part in parts)
    assert "/tmp/" not in public_message(f"cannot open {path}, nor '{path}': sorry")


# --- the log -------------------------------------------------------------------------------------------------


BEGINNING = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ERROR   dragoman\.model \[\d+\]: ")


def logged(message: str, fault: BaseException | None = None) -> str:
    info = None if fault is None else (type(fault), fault, fault.__traceback__)
    record = logging.LogRecord("dragoman.model", logging.ERROR, __file__, 1, "%s", (message,), info)
    return TextFormatter().format(record)


@given(st.text())
def test_a_message_is_one_line_of_the_log(message: str) -> None:
    text = logged(message)
    assert BEGINNING.match(text)
    assert len(text.splitlines()) == 1
    assert text.replace("\t", "").isprintable() or any(not c.isprintable() for c in message)
    assert "\x1b" not in text


@given(st.text())
def test_an_exception_begins_no_line_of_the_log(message: str) -> None:
    try:
        raise ValueError(f"one\n2026-11-22 10:00:00,000 INFO    dragoman.server [1]: {message}")
    except ValueError:
        text = logged("failed", sys.exc_info()[1])
    first, *others = text.splitlines()
    assert BEGINNING.match(first)
    assert all(line.startswith("  | ") for line in others)
    assert others[0] == "  | Traceback (most recent call last):"


def test_what_is_escaped_can_be_read() -> None:
    assert logged("one\nInjected: yes\r\tä\x1b[2J").endswith(": one\\nInjected: yes\\r\tä\\x1b[2J")
