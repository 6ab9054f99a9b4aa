"""Values from workers arrive unchanged, and decoding them runs no code that the worker chooses."""

import dataclasses
import pickle
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import structs

from dragoman.core.bytes_tensor import BytesTensor
from dragoman.core.calls import Embedded, Generate, Handled, Infer, Inference, ModelCall
from dragoman.core.datatypes import BYTES, FP32, FP64
from dragoman.core.errors import DragomanError, ModelFailed, NotReady, TooLong
from dragoman.core.scoring import Scored
from dragoman.core.sequences import SequenceOptions
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.tensor import Tensor, object_array
from dragoman.core.text import Generation, PromptInfo, Text, Token, Tokenized, TokenSpan
from dragoman.workers.frames import Frame, FrameKind
from dragoman.workers.pool import Loaded
from dragoman.workers.worker_messages import deserialize_message, serialize_message, tensor_of_row
from workers.test_workers_frames import every_tensor


def parts_of(value: object) -> list[memoryview]:
    return [memoryview(bytes(part)) for part in serialize_message(value)]


def copied(value: object) -> Any:
    return deserialize_message(parts_of(value))


SIGNATURE = Signature(
    (TensorSpec("x", FP32, (-1, 4), frozenset({FP64}), content_type="np"), TensorSpec("any", optional=True)),
    (TensorSpec("y", BYTES, ()),),
    open_outputs=True,
    batched=True,
    content_type="pd",
)
# With no field as it is by default.
WHOLE_SPEC = TensorSpec("x", FP32, (-1, 2), frozenset({FP64}), True, "np", ("height", "width"))
WHOLE_SIGNATURE = Signature((WHOLE_SPEC,), (WHOLE_SPEC,), True, True, True, True, "pd", True, True)
WHOLE = Loaded(
    WHOLE_SIGNATURE,
    "p",
    frozenset({Infer}),
    True,
    True,
    8,
    {"a": 1},
    ("GET /x",),
    SequenceOptions(strategy="direct"),
    {"x": Tensor.of(np.array([[1, 2]]))},
    {"x": ("cat", "dog")},
    "classifier",
    "A line.",
)
MODEL_CALLS = frozenset(call for call in ModelCall.__subclasses__() if call.__module__.startswith("dragoman.core."))
VALUES = [
    "why",
    "",
    [0, 1 << 62, 5],
    Generation((Text(1, 2, "ab", (Token(7, "a", -0.5, top=(Token(8, "b"),)),), 1, "stop_sequence", 5),)),
    Generation((Text(stop="end", seed=3),), (PromptInfo("p", 3, 1, (Token(1, "p", None, True),), 0.1),)),
    Tokenized("é", (TokenSpan(3, "é", 0, 1),)),
    Handled(b"\0\xff", "text/plain", 404, {"a": "b"}),
    SIGNATURE,
    Scored((0.5, -1.0), 7),
    Loaded(SIGNATURE, "p", frozenset({Infer, Generate}), True, True, 8, {"a": [1, {"b": None}]}, ("GET /x",)),
    Loaded(SIGNATURE, "p", MODEL_CALLS),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_are_unchanged(value: object) -> None:
    assert copied(value) == value


@pytest.mark.parametrize("value", [WHOLE_SPEC, WHOLE_SIGNATURE, WHOLE], ids=lambda value: type(value).__name__)
def test_no_field_of_a_description_is_left_out(value: Any) -> None:
    """A client that does not get the columns sends those of a table in another order."""
    is_struct = isinstance(value, msgspec.Struct)
    fields: Any = structs.fields(value) if is_struct else [each for each in dataclasses.fields(value) if each.init]
    for each in fields:
        has_factory = each.default_factory not in (dataclasses.MISSING, msgspec.NODEFAULT)
        default = each.default_factory() if has_factory else each.default
        assert getattr(value, each.name) != default, "give the field a value above"
    received = copied(WHOLE)
    found = {TensorSpec: received.signature.inputs[0], Signature: received.signature, Loaded: received}[type(value)]
    for each in fields:
        if each.name != "example":
            assert getattr(found, each.name) == getattr(value, each.name)
    assert received.example["x"].data.tolist() == [[1, 2]]


@pytest.mark.parametrize("error", [NotReady("wait"), TooLong("long"), ModelFailed("a lone \ud800 surrogate")])
def test_errors_keep_their_class_and_message(error: DragomanError) -> None:
    received = copied(error)
    assert type(received) is type(error)
    assert received.message == error.message.replace("\ud800", "\\ud800")


def test_an_unknown_error_is_a_failure_of_the_model() -> None:
    class OwnError(DragomanError):
        pass

    assert type(copied(OwnError("x"))) is ModelFailed


def test_every_tensor_is_unchanged() -> None:
    parameters: dict[str, Any] = {"i": 2**70, "j": -(2**65), "f": 0.1, "s": "é", "b": True, "n": np.float64(0.5)}
    sent = Inference(every_tensor(), parameters, {"header": "value"})
    received = copied(sent)
    assert list(received.outputs) == list(sent.outputs)
    for name, tensor in sent.outputs.items():
        other = received.outputs[name]
        assert (other.datatype, other.data.dtype) == (tensor.datatype, tensor.data.dtype), name
        assert np.array_equal(other.data, tensor.data), name
        assert dict(other.parameters) == dict(tensor.parameters), name
    assert dict(received.parameters) == parameters
    assert received.metadata == sent.metadata
    vectors = Tensor(np.ones((2, 3), np.float32), FP32)
    embedded = copied(Embedded(vectors, 9))
    assert embedded.tokens == 9
    assert np.array_equal(embedded.vectors.data, vectors.data)


MANY = 256  # elements of BYTES that are sent as objects


def bytes_tensors() -> dict[str, Tensor]:
    few, many = ["a", "", "é"], ["a", "é"] * MANY
    return {
        "few texts": BytesTensor.of_texts(few, (3,)),
        "many texts": BytesTensor.of_texts(many, (MANY, 2)),
        "any texts": BytesTensor.of_any_texts(["a\0\0\0\0b"], (1,)),
        "raw": BytesTensor.of_raw(b"\1\0\0\0a\0\0\0\0", np.array([0, 5]), (2,)),
        "few elements": Tensor(object_array([b"\xff", b""], (2, 1)), BYTES),
        "many elements": Tensor(object_array([b"\xff", b""] * MANY, (2 * MANY,)), BYTES),
        "forwarded": copied(BytesTensor.of_texts(many, (2 * MANY,))),
        "none": Tensor(object_array([], (0,)), BYTES),
    }


@pytest.mark.parametrize("form", bytes_tensors())
def test_bytes_tensors_of_every_form_are_unchanged(form: str) -> None:
    sent = bytes_tensors()[form]
    received = copied(Inference({"y": sent})).outputs["y"]
    assert received.shape == sent.shape
    assert received.data.reshape(-1).tolist() == sent.data.reshape(-1).tolist()
    assert getattr(received, "came_as_text", False) == getattr(sent, "came_as_text", False)


class Attack:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self._path,)


def test_a_pickle_from_a_worker_is_rejected(tmp_path: Path) -> None:
    attack = memoryview(pickle.dumps(Attack(tmp_path / "was-run"), 5))
    with pytest.raises(ValueError, match="unknown type of message 128"):
        Frame(FrameKind.RESPONSE, 1, [attack]).message()
    assert list(tmp_path.iterdir()) == []
    Frame(FrameKind.CALL, 1, [attack]).value()
    assert [each.name for each in tmp_path.iterdir()] == ["was-run"]  # so the attack would have worked


@pytest.mark.parametrize("count", [3, 5])
def test_the_elements_of_a_tensor_match_its_shape(count: int) -> None:
    for tensor in bytes_tensors().values():
        good = parts_of(Inference({"y": tensor}))
        shape = [*tensor.shape]
        head = bytes(good[0])
        other = head.replace(bytes([0x90 + len(shape)]) + packed(shape), bytes([0x91]) + packed([count + 10**6]))
        assert other != head
        with pytest.raises(ValueError, match=r"(expected|the shape needs) 10000.. BYTES elements, got"):
            deserialize_message([memoryview(other), *good[1:]])


@pytest.mark.parametrize(
    ("form", "elements", "message"),
    [
        ("text", ["a", b"b"], "expected text as elements of BYTES"),
        ("bytes", [b"a", "b"], "expected bytes as elements of BYTES"),
        ("bytes", [b"a", None], "expected bytes as elements of BYTES"),
        ("gaps", [b"a", b"b"], "unknown form of BYTES elements 'gaps'"),
    ],
)
def test_the_elements_of_a_tensor_have_its_form(form: str, elements: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tensor_of_row(("y", "BYTES", form, (2,), None, elements), iter(()))


def packed(shape: list[int]) -> bytes:
    return b"".join(msgspec.msgpack.encode(n) for n in shape)


def test_damaged_messages_raise_errors() -> None:
    """Any bytes give a value or an ordinary exception: never a crash, a huge allocation or another type."""
    draw = random.Random(0)
    sent = [parts_of(value) for value in (*VALUES, Inference(every_tensor()), Inference(bytes_tensors()))]
    outcomes = set()
    for _ in range(3000):
        parts = list(draw.choice(sent))
        at = draw.randrange(len(parts)) if draw.random() < 0.2 else 0
        data = bytearray(parts[at])
        for _ in range(draw.choice((1, 1, 3))):
            if data:
                data[draw.randrange(min(len(data), 400))] = draw.randrange(256)
        parts[at] = memoryview(bytes(data[: draw.randrange(len(data) + 1)] if draw.random() < 0.2 else data))
        try:
            deserialize_message(parts)
            outcomes.add("value")
        except (ValueError, TypeError, LookupError, StopIteration):
            outcomes.add("error")
    assert outcomes == {"value", "error"}
