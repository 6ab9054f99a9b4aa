"""BYTES tensors with many elements: pickled without an object per element, and equal in every representation."""

import pickle
from typing import Any

import numpy as np
import pytest

from dragoman.core.bytes_tensor import (
    MANY,
    BytesTensor,
    buffer_of,
    came_as_text,
    flatten,
    reduce_large,
    texts_of,
    with_parameters,
)
from dragoman.core.datatypes import BYTES
from dragoman.core.tensor import Tensor, object_array

MIXED = ["é\0" * (n % 3) + str(n) for n in range(5000)]
PLAIN = [str(n) for n in range(5000)]
SHAPE = (50, 100)


def encoded(texts: list[str]) -> list[bytes]:
    return [text.encode() for text in texts]


def packed(texts: list[str], shape: tuple[int, ...], parameters: dict[str, Any]) -> BytesTensor:
    """Return a tensor that holds texts as one buffer and their lengths."""
    elements = encoded(texts)
    lengths = np.array([len(element) for element in elements], np.int64)
    return BytesTensor.of_lengths(np.frombuffer(b"".join(elements), np.uint8), lengths, shape, parameters, True)


@pytest.mark.parametrize("texts", [MIXED, PLAIN], ids=["mixed", "ASCII"])
@pytest.mark.parametrize("stored_as", ["text", "bytes", "packed"])
def test_many_texts_are_pickled_as_two_buffers(texts: list[str], stored_as: str) -> None:
    tensor: Tensor = BytesTensor.of_texts(texts, SHAPE, {"a": 1})
    if stored_as == "bytes":
        tensor = Tensor(object_array(encoded(texts), SHAPE), BYTES, {"a": 1})
    elif stored_as == "packed":
        tensor = packed(texts, SHAPE, {"a": 1})
    views: list[pickle.PickleBuffer] = []
    assert len(pickle.dumps(tensor, 5, buffer_callback=views.append)) < 1000, "no object for each element"
    assert len(views) == 2
    for again in (pickle.loads(pickle.dumps(tensor)), pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(tensor))))):
        assert (again.shape, again.datatype, again.parameters) == (SHAPE, BYTES, {"a": 1})
        assert came_as_text(again) == (stored_as != "bytes")
        assert again.count == 5000
        assert again.data.reshape(-1).tolist() == encoded(texts)
        assert texts_of(again) == texts
        assert buffer_of(again) == b"".join(b"\0\0\0\0" + element for element in encoded(texts))


def test_packed_texts_with_another_shape_and_other_parameters() -> None:
    tensor = packed(["a", "bcd", "é", "", "e", "f"], (2, 3), {"a": 1})
    expected = encoded(["a", "bcd", "é", "", "e", "f"])
    assert (tensor.shape, tensor.count, tensor.parameters) == ((2, 3), 6, {"a": 1})
    other = with_parameters(tensor, {"b": 2})
    assert (other.shape, other.parameters, came_as_text(other)) == ((2, 3), {"b": 2}, True)
    assert other.data.tolist() == [expected[:3], expected[3:]]
    flat = flatten(tensor)
    assert (flat.shape, flat.data.tolist(), flat.parameters) == ((6,), expected, {"a": 1})
    empty = flatten(packed([], (0, 2), {"a": 1}))
    assert (empty.shape, empty.data.tolist()) == ((0,), [])


@pytest.mark.parametrize(("count", "packed"), [(MANY, False), (MANY + 1, True)])
def test_few_elements_are_pickled_individually(count: int, packed: bool) -> None:
    texts = PLAIN[:count]
    plain = Tensor(object_array(encoded(texts), (count,)), BYTES)
    assert (reduce_large(plain) is not None) == packed
    for tensor in (plain, BytesTensor.of_texts(texts, (count,))):
        views: list[pickle.PickleBuffer] = []
        data = pickle.dumps(tensor, 5, buffer_callback=views.append)
        assert len(views) == (2 if packed else 0)
        assert pickle.loads(data, buffers=views).data.tolist() == encoded(texts)


@pytest.mark.parametrize(
    "tensor",
    [
        BytesTensor.of_texts(["é", "b"], (1, 2), {"a": 1}),
        BytesTensor.of_any_texts(["é", "b"], (1, 2), {"a": 1}),
        BytesTensor.of_buffer(b"\0\0\0\0\xc3\xa9\0\0\0\0b", (1, 2), {"a": 1}),
        BytesTensor(object_array([b"\xc3\xa9", b"b"], (1, 2)), BYTES, {"a": 1}),
        packed(["é", "b"], (1, 2), {"a": 1}),
    ],
)
def test_every_representation_survives_pickling(tensor: BytesTensor) -> None:
    def values(other: Any) -> Any:
        return other.data.tolist(), other.shape, other.datatype, other.parameters, came_as_text(other), texts_of(other)

    first = pickle.loads(pickle.dumps(tensor))
    assert values(first) == ([[b"\xc3\xa9", b"b"]], (1, 2), BYTES, {"a": 1}, came_as_text(tensor), ["é", "b"])
    tensor.texts()
    assert values(pickle.loads(pickle.dumps(tensor))) == values(first)
    assert BytesTensor.of_texts(["é", "b"], (1, 2)).count == 2
    assert tensor.count == 2


def test_elements_may_be_invalid_utf8() -> None:
    plain = Tensor(object_array([b"\xff\0"] * (MANY + 1), (MANY + 1,)), BYTES)
    again = pickle.loads(pickle.dumps(plain))
    assert again.data.tolist() == plain.data.tolist()
    assert np.array_equal(plain.data, again.data)
    with pytest.raises(UnicodeDecodeError):
        texts_of(again)
