"""BYTES tensors with many elements: sent without an object per element, and equal in both forms."""

import pickle
import struct
from typing import Any

import numpy as np
import pytest

from dragoman.core.bytes_tensor import (
    BytesTensor,
    bytes_from_raw,
    came_as_text,
    flatten,
    raw_of,
    texts_of,
    with_parameters,
)
from dragoman.core.calls import Inference
from dragoman.core.datatypes import BYTES
from dragoman.core.tensor import Tensor, object_array
from dragoman.workers.frames import deserialize, serialize

MIXED = ["é\0" * (n % 3) + str(n) for n in range(5000)]
PLAIN = [str(n) for n in range(5000)]
SHAPE = (50, 100)
MOST_OBJECTS = 256  # elements that are sent as objects


def encoded(texts: list[str]) -> list[bytes]:
    return [text.encode() for text in texts]


def packed(texts: list[str], shape: tuple[int, ...], parameters: dict[str, Any], came_as_text: bool = True) -> Tensor:
    """Return a tensor that was received in the raw encoding."""
    return bytes_from_raw("x", shape, raw_encoding(texts), parameters, came_as_text)


def raw_encoding(texts: list[str]) -> bytes:
    return b"".join(struct.pack("<I", len(element)) + element for element in encoded(texts))


def sent(tensor: Tensor) -> tuple[Any, list[Any]]:
    """Return a tensor that was sent to a process, and its parts on the way."""
    parts = serialize(Inference({"x": tensor}))
    return deserialize([memoryview(part) for part in parts]).outputs["x"], parts


@pytest.mark.parametrize("texts", [MIXED, PLAIN], ids=["mixed", "ASCII"])
@pytest.mark.parametrize("stored_as", ["text", "bytes", "packed"])
def test_many_texts_are_sent_in_the_raw_encoding(texts: list[str], stored_as: str) -> None:
    tensor: Tensor = BytesTensor.of_texts(texts, SHAPE, {"a": 1})
    if stored_as == "bytes":
        tensor = Tensor(object_array(encoded(texts), SHAPE), BYTES, {"a": 1})
    elif stored_as == "packed":
        tensor = packed(texts, SHAPE, {"a": 1})
    again, parts = sent(tensor)
    assert (len(parts), bytes(parts[1])) == (2, raw_encoding(texts))
    assert len(parts[0]) < 1000, "no object for each element"
    for received in (again, sent(again)[0]):
        assert (received.shape, received.datatype, received.parameters) == (SHAPE, BYTES, {"a": 1})
        assert came_as_text(received) == (stored_as != "bytes")
        assert texts is MIXED or received.is_raw
        assert received.data.reshape(-1).tolist() == encoded(texts)
        assert texts_of(received) == texts
        assert bytes(raw_of(received)) == raw_encoding(texts)


def test_packed_texts_with_another_shape_and_other_parameters() -> None:
    texts = ["a", "bcd", "é", "e"] * 5
    tensor = packed(texts, (2, 10), {"a": 1})
    assert isinstance(tensor, BytesTensor)
    assert tensor.is_raw
    assert (tensor.shape, tensor.parameters) == ((2, 10), {"a": 1})
    other = with_parameters(tensor, {"b": 2})
    assert (other.shape, other.parameters, came_as_text(other)) == ((2, 10), {"b": 2}, True)
    assert other.data.tolist() == [encoded(texts[:10]), encoded(texts[10:])]
    flat = flatten(tensor)
    assert (flat.shape, flat.data.tolist(), flat.parameters) == ((20,), encoded(texts), {"a": 1})
    empty = flatten(packed([], (0, 2), {"a": 1}))
    assert (empty.shape, empty.data.tolist()) == ((0,), [])


@pytest.mark.parametrize("count", [0, 1, MOST_OBJECTS, MOST_OBJECTS + 1])
def test_few_elements_are_sent_as_objects(count: int) -> None:
    texts = PLAIN[:count]
    for tensor in (Tensor(object_array(encoded(texts), (count,)), BYTES), BytesTensor.of_texts(texts, (count,))):
        received, parts = sent(tensor)
        assert len(parts) == (2 if count > MOST_OBJECTS else 1)
        assert received.data.tolist() == encoded(texts)
        assert came_as_text(received) == came_as_text(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        BytesTensor.of_texts(["é", "b"], (1, 2), {"a": 1}),
        BytesTensor.of_any_texts(["é", "b"], (1, 2), {"a": 1}),
        Tensor(object_array([b"\xc3\xa9", b"b"], (1, 2)), BYTES, {"a": 1}),
        BytesTensor.of_raw(b"\2\0\0\0\xc3\xa9\1\0\0\0b", np.array([0, 6]), (1, 2), {"a": 1}),
        BytesTensor.of_raw(b"\2\0\0\0\xc3\xa9\1\0\0\0b", np.array([0, 6]), (1, 2), {"a": 1}, True),
    ],
)
def test_every_form_is_unchanged_by_a_pickle_and_by_other_processes(tensor: Tensor) -> None:
    def values(other: Any) -> Any:
        return other.data.tolist(), other.shape, other.datatype, other.parameters, came_as_text(other), texts_of(other)

    expected = ([[b"\xc3\xa9", b"b"]], (1, 2), BYTES, {"a": 1}, came_as_text(tensor), ["é", "b"])
    for _ in range(2):  # without elements, and with those that the first round has created
        for received in (tensor, pickle.loads(pickle.dumps(tensor)), sent(tensor)[0], sent(sent(tensor)[0])[0]):
            assert values(received) == expected


def test_elements_may_be_invalid_utf8_or_none() -> None:
    plain = Tensor(object_array([b"\xff\0"] * (MOST_OBJECTS + 1), (MOST_OBJECTS + 1,)), BYTES)
    again, _ = sent(plain)
    assert again.data.tolist() == plain.data.tolist()
    for tensor in (again, BytesTensor.of_raw(b"\1\0\0\0\xff", np.array([0]), (1,))):
        with pytest.raises(UnicodeDecodeError):
            texts_of(tensor)
    for count in (2, MOST_OBJECTS + 1):
        nulls = Tensor(object_array([None] * count, (count,)), BYTES)
        assert sent(nulls)[0].data.tolist() == [None] * count
