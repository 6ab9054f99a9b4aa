"""The reader of GGUF files: values, and an error for each file that is not valid."""

import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dragoman_text.generation.gguf_file import TYPES, GgufError, GgufFile

_FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def _text(value: bytes | str) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content)) + content


def _scalar(kind: int, value: Any) -> bytes:
    return _text(value) if kind == 8 else struct.pack(f"<{_FORMS[kind]}", value)


def key(name: str | bytes, kind: int, value: Any) -> bytes:
    return _text(name) + struct.pack("<I", kind) + _scalar(kind, value)


def array(name: str, kind: int, values: Sequence[Any]) -> bytes:
    return _text(name) + struct.pack("<IIQ", 9, kind, len(values)) + b"".join(_scalar(kind, each) for each in values)


def tensor(name: str | bytes, dimensions: Sequence[int], kind: int, offset: int) -> bytes:
    sizes = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return _text(name) + sizes + struct.pack("<IQ", kind, offset)


def content(keys: Sequence[bytes] = (), tensors: Sequence[bytes] = (), data: bytes = b"", alignment: int = 32) -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join((*keys, *tensors))
    return header + bytes(-len(header) % alignment if tensors else 0) + data


VALUES = np.arange(64, dtype=np.float32)
VALID = content(
    [
        key("general.architecture", 8, "llama"),
        key("general.file_type", 4, 3),
        key("general.alignment", 4, 64),
        key("a.flag", 7, True),
        key("a.negative", 11, -5),
        key("a.number", 12, 0.25),
        array("a.tokens", 8, ["ä", "", "b"]),
        array("a.numbers", 5, [1, -2]),
        array("a.flags", 7, [True, False]),
    ],
    [tensor("a", [8, 4], 0, 0), tensor("b", [32, 1, 2], 2, 128)],
    VALUES[:32].tobytes() + bytes(range(36)),
    64,
)


def read(path: Path, data: bytes) -> GgufFile:
    (path / "a.gguf").write_bytes(data)
    return GgufFile(path / "a.gguf")


def test_values(tmp_path: Path) -> None:
    file = read(tmp_path, VALID)
    assert file.metadata == {
        "general.architecture": "llama",
        "general.file_type": 3,
        "general.alignment": 64,
        "a.flag": True,
        "a.negative": -5,
        "a.number": 0.25,
        "a.tokens": ["ä", "", "b"],
        "a.numbers": [1, -2],
        "a.flags": [True, False],
    }
    assert file.quantization == "Q4_1"
    assert file.parameters == 96
    a, b = file.tensors.values()
    assert (a.name, a.type.name, a.shape, a.row_bytes) == ("a", "F32", (4, 8), 32)
    assert np.frombuffer(file.bytes_of(a), np.float32).tolist() == VALUES[:32].tolist()
    assert (b.name, b.type.name, b.shape, b.row_bytes) == ("b", "Q4_0", (2, 1, 32), 18)
    assert bytes(file.bytes_of(b)) == bytes(range(36))


def test_types_are_those_of_the_package_gguf() -> None:
    gguf = pytest.importorskip("gguf")
    for kind, (elements, size) in gguf.GGML_QUANT_SIZES.items():
        if kind.name != "Q8_1":  # never in files
            assert (TYPES[kind].name, TYPES[kind].elements, TYPES[kind].bytes) == (kind.name, elements, size)


def test_a_file_that_states_no_quantization(tmp_path: Path) -> None:
    assert read(tmp_path, content()).quantization == ""
    assert read(tmp_path, content([key("general.file_type", 4, 999)])).quantization == ""
    assert read(tmp_path, content([key("general.file_type", 8, "Q4")])).quantization == ""


_BIG = 1 << 62
_HEADER = struct.pack("<IQQ", 3, 0, 1)
INVALID: Mapping[str, tuple[bytes, str]] = {
    "empty": (b"", "expected the bytes 'GGUF' at its start, got b''"),
    "magic": (b"GGML" + VALID[4:], "expected the bytes 'GGUF' at its start, got b'GGML'"),
    "version": (b"GGUF" + struct.pack("<I", 1) + VALID[8:], "version: expected 2 or 3, got 1"),
    "order": (b"GGUF" + struct.pack(">I", 3) + VALID[8:], "version: expected 2 or 3, got 50331648, in big-endian"),
    "tensors": (
        b"GGUF" + struct.pack("<IQQ", 3, _BIG, 0),
        f"number of tensors: expected {_BIG * 32} bytes or more at 24",
    ),
    "keys": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, _BIG),
        f"number of metadata: expected {_BIG * 13} bytes or more at 24",
    ),
    "key of no end": (
        b"GGUF" + _HEADER + struct.pack("<Q", 20) + b"a" * 9,
        "key 1 of 1: expected 20 bytes or more at 32",
    ),
    "long key": (content([key("a" * 65536, 4, 1)]), "key 1 of 1: expected at most 65535 bytes, got 65536"),
    "key in latin 1": (content([key(b"\xe4", 4, 1)]), r"key 1 of 1: expected UTF-8, got b'\xe4'"),
    "twice": (content([key("a", 4, 1), key("a", 4, 1)]), "key 'a': expected once, got it twice"),
    "kind": (
        content([_text("a") + struct.pack("<II", 13, 0)]),
        "key 'a': expected a type of metadata, 0 to 12, got 13",
    ),
    "boolean": (content([_text("a") + struct.pack("<IB", 7, 2)]), "key 'a': expected a boolean, 0 or 1, got 2"),
    "booleans": (
        content([_text("a") + struct.pack("<IIQB", 9, 7, 1, 2)]),
        "key 'a': expected a boolean, 0 or 1, got 2",
    ),
    "text": (content([key("a", 8, b"\xff")]), r"key 'a': expected UTF-8, got b'\xff'"),
    "texts": (content([array("a", 8, ["x", b"\xff"])]), r"key 'a': expected UTF-8, got b'\xff'"),
    "long text": (content([_text("a") + struct.pack("<IQ", 8, _BIG)]), "key 'a': expected at most 268435456 bytes"),
    "array in array": (
        content([_text("a") + struct.pack("<IIQ", 9, 9, 1)]),
        "key 'a': expected an array of scalars or strings, got elements of type 9",
    ),
    "long array": (content([_text("a") + struct.pack("<IIQ", 9, 4, 1000)]), "key 'a': expected 4000 bytes or more"),
    "long array of texts": (
        content([_text("a") + struct.pack("<IIQ", 9, 8, 1000)]),
        "key 'a': length: expected 8000 bytes or more at 49, got the end of the file at 49",
    ),
    "huge array": (
        content([_text("a") + struct.pack("<IIQ", 9, 8, _BIG)]),
        f"key 'a': expected at most 8388608 elements in all arrays, got {_BIG}",
    ),
    "text of an array beyond the end": (
        content([_text("a") + struct.pack("<IIQQ", 9, 8, 1, 9)]),
        "key 'a': expected 9 bytes or more at 57, got the end of the file at 57",
    ),
    "alignment 0": (content([key("general.alignment", 4, 0)]), "expected a power of two up to 1048576, got 0"),
    "alignment 48": (content([key("general.alignment", 4, 48)]), "expected a power of two up to 1048576, got 48"),
    "alignment text": (content([key("general.alignment", 8, "x")]), "expected a power of two up to 1048576, got 'x'"),
    "name": (content([], [tensor("a" * 64, [1], 0, 0)], bytes(4)), "name of tensor 1 of 1: expected at most 63 bytes"),
    "tensor twice": (
        content([], [tensor("a", [1], 0, 0), tensor("a", [1], 0, 32)], bytes(36)),
        "tensor 'a': expected once, got it twice",
    ),
    "no dimensions": (content([], [tensor("a", [], 0, 0)], bytes(64)), "tensor 'a': expected 1 to 4 dimensions, got 0"),
    "5 dimensions": (content([], [tensor("a", [1] * 5, 0, 0)], bytes(64)), "expected 1 to 4 dimensions, got 5"),
    "dimension of 0": (content([], [tensor("a", [4, 0], 0, 0)]), "expected dimensions of at least 1, got [0, 4]"),
    "type": (content([], [tensor("a", [4], 4, 0)], bytes(64)), "tensor 'a': expected a type of ggml, got number 4"),
    "row": (
        content([], [tensor("a", [33], 8, 0)], bytes(99)),
        "tensor 'a': expected rows of a multiple of 32 elements for Q8_0, got 33",
    ),
    "offset": (
        content([], [tensor("a", [1], 0, 4)], bytes(64)),
        "tensor 'a': expected an offset that is a multiple of 32, got 4",
    ),
    "truncated": (
        content([], [tensor("a", [4, 5], 0, 32)], bytes(32 + 79)),
        "tensor 'a': expected 80 bytes at 128 for F32 [5, 4], got a file of 207 bytes",
    ),
    "product of 2**64": (
        content([], [tensor("a", [1 << 32, 1 << 32], 0, 0)], bytes(64)),
        f"tensor 'a': expected {1 << 66} bytes at 96 for F32 [4294967296, 4294967296], got a file of 160 bytes",
    ),
    "offset of 2**64": (
        content([], [tensor("a", [1], 0, (1 << 64) - 32)], bytes(64)),
        f"tensor 'a': expected 4 bytes at {(1 << 64) + 32} for F32 [1], got a file of 128 bytes",
    ),
    "overlap": (
        content([], [tensor("a", [9], 0, 0), tensor("b", [1], 0, 32)], bytes(96)),
        "tensor 'b': expected data behind that of 'a', which ends at 132, got offset 128",
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_files(name: str, tmp_path: Path) -> None:
    data, message = INVALID[name]
    with pytest.raises(GgufError) as caught:
        read(tmp_path, data)
    assert message in str(caught.value)


def test_a_large_header_is_not_read(tmp_path: Path) -> None:
    """A file with holes takes no place on the disk, but has as many empty strings as its size allows."""
    with (tmp_path / "a.gguf").open("wb") as file:
        file.write(b"GGUF" + _HEADER + _text("a") + struct.pack("<IIQ", 9, 8, 1 << 23))
        file.write(struct.pack("<Q", (1 << 28) - 100))
        file.truncate(1 << 30)
    with pytest.raises(GgufError, match="key 'a': length: expected a header of at most 268435456 bytes"):
        GgufFile(tmp_path / "a.gguf")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.binary(min_size=1, max_size=8)), max_size=4),
    st.integers(0, len(VALID)),
)
def test_changed_bytes(tmp_path: Path, changes: list[tuple[int, bytes]], length: int) -> None:
    """Whatever bytes change, the file is an error, or has tensors that are inside it and do not overlap."""
    data = bytearray(VALID)
    for position, new in changes:
        data[position : position + len(new)] = new
    data = data[: length if not changes else len(VALID)]
    try:
        file = read(tmp_path, bytes(data))
    except GgufError:
        return
    places = sorted((each.offset, each.offset + each.size) for each in file.tensors.values())
    assert all(0 < begin < end <= len(data) for begin, end in places)
    assert all(first[1] <= second[0] for first, second in pairwise(places))
    for each in file.tensors.values():
        assert bytes(file.bytes_of(each)) == bytes(data[each.offset : each.offset + each.size])
