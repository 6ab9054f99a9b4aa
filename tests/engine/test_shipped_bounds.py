"""What the files beside a model say of it is bounded, in size and in time."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from dragoman.core.calls import ClassLabels
from dragoman.core.datatypes import FP32
from dragoman.core.signature import TensorSpec
from dragoman.protocols.open_inference.extensions import metadata_tensors
from dragoman.runtimes.class_names import parse_names
from dragoman.runtimes.onnx import layers


@pytest.mark.parametrize(("length", "is_sent"), [(10, True), (60_000, False)])
def test_long_class_names_are_not_in_the_metadata(length: int, is_sent: bool) -> None:
    labels = {"y": ClassLabels("", ("a" * length, "b" * length))}
    ((*_, parameters),) = metadata_tensors([TensorSpec("y", FP32, (-1, 2))], labels)
    assert ("labels" in parameters) == is_sent


def test_a_long_list_in_a_file_is_not_parsed() -> None:
    assert parse_names(str(["a"] * 100_000)) == ("a",) * 100_000
    assert parse_names(f"({'1,' * 100_001})") == ()


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
