"""What the files beside a model say of it is bounded, in size and in time."""

import ast
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dragoman.core.calls import ClassLabels
from dragoman.core.datatypes import FP32
from dragoman.core.signature import TensorSpec
from dragoman.protocols.open_inference.extensions import metadata_tensors
from dragoman.runtimes.class_names import names_of, parse_names
from dragoman.runtimes.onnx import layers


@pytest.mark.parametrize(("length", "is_sent"), [(10, True), (60_000, False)])
def test_long_class_names_are_not_in_the_metadata(length: int, is_sent: bool) -> None:
    labels = {"y": ClassLabels("", ("a" * length, "b" * length))}
    ((*_, parameters),) = metadata_tensors([TensorSpec("y", FP32, (-1, 2))], labels)
    assert ("labels" in parameters) == is_sent


def test_a_long_list_in_a_file_is_not_parsed() -> None:
    assert parse_names(str(["a"] * 100_000)) == ("a",) * 100_000
    assert parse_names(f"({'1,' * 100_001})") == ()


@pytest.mark.parametrize(
    "text",
    [
        "1" + "+1" * 499_000,
        "[" + "'a'+" * 240_000 + "1]",
        "1<" * 499_000 + "1",
        "a." * 499_000 + "a",
        "1 .a" * 249_000,
        "a or " * 199_000 + "a",
        "a" + "()" * 499_000,
        "'a'" + "[1]" * 330_000,
        "[]" * 499_000,
        "f'{a}'" * 160_000,
        "1" + "-(1" * 330_000,
        "\\'''" * 249_000,
        "1 if 1 else " * 80_000 + "1",
        "'''" + "\\'" * 400_000,
    ],
    ids=lambda text: text[:12],
)
def test_a_long_expression_is_not_parsed(text: str) -> None:
    # tracemalloc does not count the memory of Python's parser: the peak of a process does.
    code = (
        "import resource, sys, time\n"
        "from dragoman.runtimes.class_names import parse_names\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "text = sys.stdin.read()\n"
        "before = peak()\n"
        "assert parse_names(text) == (), 'names'\n"
        "print((peak() - before) // (1024 if sys.platform == 'linux' else 1 << 20), time.process_time())\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    printed = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout.split()
    assert int(printed[0]) < 40  # MiB
    assert float(printed[1]) < 20  # s


LITERALS = st.recursive(
    st.text(max_size=5) | st.integers() | st.floats() | st.complex_numbers() | st.booleans() | st.none() | st.binary(),
    lambda below: (
        st.lists(below, max_size=4)
        | st.lists(below, max_size=4).map(tuple)
        | st.dictionaries(st.integers(0, 3) | st.text(max_size=2), below, max_size=4)
    ),
    max_leaves=8,
).map(repr)
WORDS = r"""' " \' \" ''' \"\"\" \ r' b" rb' f' u" a set set() True None 1 -1 1.5e-3 1e-9-1e-9j +2J 0xFF ...
    . , , : ( ) [ ] { } + - * # = 1_0 'cat' "dog" 'a'"b" r'\\' {0:'a'} ['x'] \\ é ; ~ not in"""
TOKENS = st.lists(
    st.sampled_from([*WORDS.split(), " ", "\n", "\r", "\t", "\\\n", "#'\n", "\0", "\ufeff", "\x0c"]), max_size=8
).map("".join)


@given(LITERALS | TOKENS | TOKENS.map("[{}]".format) | TOKENS.map("{{0:'a',{}}}".format))
@example("{0: 'a', 1+2j: 'b', -1e-5-1e-5j: 'c', ...: 'd', None: set()}")
@example("['it''s', # it's\n 'b' \\\n'c', \"\"\"d'\n\"\"\", r'\\', u'é', -1, + 2, (3), True,]")
@example("'a', ('b'), (-(1))")
@settings(max_examples=1000)
def test_the_scan_before_parsing_changes_no_names(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = names_of(ast.literal_eval(text.strip()))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            expected = ()
        assert parse_names(text) == expected


def test_reading_a_long_attribute_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def field(number: int, content: bytes) -> bytes:
        size, length = b"", len(content)
        while length > 0x7F:
            size += bytes([length & 0x7F | 0x80])
            length >>= 7
        return bytes([number << 3 | 2]) + size + bytes([length]) + content

    node = field(4, b"Add") + field(5, field(1, b"values") + field(8, bytes(300_000)))
    file = tmp_path / "m.onnx"
    file.write_bytes(field(7, field(1, field(4, b"First")) + field(1, node)))
    assert [each["op"] for each in layers.read_layers(file)["nodes"]] == ["First", "Add"]
    times = iter([0.0, 1.0, 1.0, 100.0, 100.0, 100.0, 100.0, 100.0])
    monkeypatch.setattr(layers, "time", SimpleNamespace(monotonic=lambda: next(times)))
    found = layers.read_layers(file)
    assert ([each["op"] for each in found["nodes"]], found["is_complete"]) == (["First"], False)
