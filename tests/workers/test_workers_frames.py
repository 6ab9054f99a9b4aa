"""Tensors reach worker processes unchanged and uncopied; frames are parsed from chunks of any size."""

import socket
import struct
from pathlib import Path
from pickle import PROTO
from typing import Any

import numpy as np
import pytest

from dragoman.core.calls import Infer, Request
from dragoman.core.datatypes import BF16, BYTES, DATATYPES, FP64, datatype_of
from dragoman.core.errors import ModelFailed
from dragoman.core.metrics import Family, Sample
from dragoman.core.sequences import SequenceStep
from dragoman.core.tensor import Tensor, object_array
from dragoman.system.coroutines import complete
from dragoman.system.shared_memory import create_memory_file
from dragoman.workers.channel import Channel, receive
from dragoman.workers.frames import Frame, FrameKind, FrameParser, encode
from dragoman.workers.jobs import Job
from dragoman.workers.shared_blocks import BlockReader, close_files
from dragoman.workers.worker_messages import Measurements, serialize_message
from workers.workers_harness import PLACEMENTS, call, first_value, pool_of, processes, wait_until

every_placement = pytest.mark.parametrize("placement", PLACEMENTS)


def every_tensor() -> dict[str, Tensor]:
    tensors = {}
    for name, datatype in DATATYPES.items():
        if datatype is BYTES:
            continue
        for shape in ((), (0,), (2, 0, 3), (2, 3), (70_000,)):
            array = (np.arange(np.prod(shape, dtype=int)) % 100).reshape(shape).astype(datatype.dtype)
            tensors[f"{name}{shape}"] = Tensor(array, datatype, {"p": 1} if shape == (2, 3) else {})
    tensors["BYTES"] = Tensor(object_array([b"", b"a\0b", b"x" * 100_000], (3, 1)), BYTES)
    tensors["no BYTES"] = Tensor(object_array([], (0,)), BYTES)
    strided = np.arange(200_000, dtype=np.float32).reshape(400, 500)
    tensors |= {"strided": Tensor.of(strided[::2, ::3]), "fortran": Tensor.of(np.asfortranarray(strided))}
    return tensors


@every_placement
@pytest.mark.parametrize("model", ["Echo", "AsyncEcho"])
async def test_tensors_of_every_datatype_are_unchanged(placement: str, model: str) -> None:
    sent = every_tensor()
    async with pool_of(placement, model) as pool:
        response = await complete(pool.call(Request(Infer(sent))))
    assert list(response.outputs) == list(sent)
    for name, tensor in sent.items():
        received = response.outputs[name]
        assert received.datatype is tensor.datatype, name
        assert received.data.dtype == tensor.data.dtype, name
        assert received.data.shape == tensor.data.shape, name
        assert (received.data == tensor.data).all(), name
        assert dict(received.parameters) == dict(tensor.parameters), name
    assert response.outputs["BF16(2, 3)"].datatype is BF16
    assert datatype_of(response.outputs["UINT16(2, 3)"].data.dtype) is not BF16


async def test_arrays_share_the_received_buffer() -> None:
    async with processes("Echo") as pool:
        response = await pool.call(Request(Infer({"a": Tensor.of(np.zeros(9)), "b": Tensor.of(np.zeros(90_000))})))
    for tensor in response.outputs.values():
        assert not tensor.data.flags.writeable
        assert not tensor.data.flags.owndata
        assert tensor.data.ctypes.data % 16 == 0


OPTIONAL_FIELDS: dict[str, Any] = {
    "outputs": ("y",),
    "parameters": {"p": 1},
    "config": {"k": [1]},
    "content_types": {"y": "str"},
    "sequences": (SequenceStep(5, start=True, slot=2, number=3),),
}


def frame_of(request: Request[Any]) -> Frame:
    """Return the frame of a request as its worker receives it."""
    data = b"".join(encode(FrameKind.CALL, 1, Job(1, FrameKind.CALL, request, lambda *_: None).fields()))
    parser = FrameParser()
    parser.buffer()[: len(data)] = data
    (frame,) = parser.feed(len(data))
    return frame


@pytest.mark.parametrize("field", OPTIONAL_FIELDS)
def test_optional_fields_of_a_call_are_sent(field: str) -> None:
    call = Infer({"x": Tensor.of(np.zeros(2))}, **{field: OPTIONAL_FIELDS[field]})
    _, received, model, *_ = frame_of(Request(call, "m")).value()
    assert model == "m"
    assert getattr(received, field) == OPTIONAL_FIELDS[field]


def test_usual_calls_are_not_pickled() -> None:
    """Pickle takes three times as long."""
    inputs = {"x": Tensor(np.zeros(2), FP64, {"p": True}), "h": Tensor.of(np.ones(3, BF16.dtype))}
    request = Request(Infer(inputs, ("y",), {"q": 0.5}), "m", "1", "id", 5.0, {"x-a": "b"})
    frame = frame_of(request)
    assert frame.parts[0][0] != PROTO[0]
    context, received, *fields = frame.value()
    assert (context, fields) == ((), ["m", "1", "id", 5.0, {"x-a": "b"}])
    assert (received.outputs, received.parameters) == (("y",), {"q": 0.5})
    assert (received.inputs["x"].data.tolist(), received.inputs["x"].parameters) == ([0.0, 0.0], {"p": True})
    assert (received.inputs["h"].datatype, received.inputs["h"].data.tolist()) == (BF16, [1.0, 1.0, 1.0])
    assert frame_of(Request(Infer(inputs), models=frozenset({"m"}))).parts[0][0] == PROTO[0]


def test_every_field_of_a_call_is_covered() -> None:
    bound_before = {"inputs", "raw", "positional"}
    assert set(Infer.__struct_fields__) == bound_before | set(OPTIONAL_FIELDS)


async def test_subclasses_of_plain_types_are_pickled() -> None:
    unaligned: Any = {np.str_("a"): Tensor(np.arange(3), datatype_of(np.dtype(int)), {"p": np.float64(0.5)})}
    async with processes("Echo") as pool:
        response = await pool.call(Request(Infer(unaligned, (np.str_("a"),)), "m", "", np.str_("id"), np.float64(1e12)))
    assert response.outputs["a"].parameters == {"p": 0.5}
    assert (response.outputs["a"].data == np.arange(3)).all()


async def test_unpicklable_response_fails_only_its_call() -> None:
    async with processes("Actions") as pool:
        with pytest.raises(ModelFailed, match="its response cannot be sent from the worker process"):
            await call(pool, do="lambda")
        assert first_value(await call(pool, do="readonly")) == 0


async def test_unpicklable_input_fails_only_its_call() -> None:
    async with processes("Echo") as pool:
        unaligned: Any = {"x": Tensor(object_array([lambda: 0], (1,)), BYTES)}
        with pytest.raises(ModelFailed, match="its input cannot be sent"):
            await pool.call(Request(Infer(unaligned)))
        assert first_value(await call(pool, 3)) == 3


@pytest.mark.parametrize("step", [1, 7, 24, 1000, 1_000_000])
def test_frames_are_parsed_from_chunks_of_any_size(step: int) -> None:
    values: list[Any] = [b"a", None, b"b" * 30_000, np.arange(20_000.0), {"k": 1}, b"c" * 65_000, b""]
    sent = memoryview(b"".join(b"".join(encode(FrameKind.CHUNK, n, value)) for n, value in enumerate(values)))
    parser, frames = FrameParser(), []
    while sent:
        buffer = parser.buffer()
        count = min(step, len(buffer), len(sent))
        buffer[:count] = sent[:count]
        frames += parser.feed(count)
        sent = sent[count:]
    assert [(f.kind, f.job) for f in frames] == [(FrameKind.CHUNK, n) for n in range(len(values))]
    assert all(np.array_equal(f.value(), value) for f, value in zip(frames, values, strict=True))


@pytest.mark.parametrize("size", [10, 100_000])
async def test_a_truncated_frame_is_end_of_file(size: int) -> None:
    frame = b"".join(encode(FrameKind.CHUNK, 1, bytes(size)))
    ours, theirs = socket.socketpair()
    theirs.sendall(frame[: len(frame) // 2])
    theirs.close()
    events: list[Frame | str] = []
    channel = Channel(ours, events.append, lambda: events.append("lost"))
    await wait_until(lambda: events)
    assert events == ["lost"]
    assert channel.closed
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(frame[: len(frame) // 2])
        theirs.shutdown(socket.SHUT_WR)
        assert receive(ours) is None


INVALID_FRAMES: dict[str, bytes] = {
    "shared memory that is not shared": struct.pack("<IIQQ4d", FrameKind.RESPONSE, 1, 1, 32, 0, 0, 0, 0)
    + struct.pack("<QQQQ", 16 | 1 << 63, 0, 0, 64),
    "parts beyond the frame": struct.pack("<IIQQ4d", FrameKind.RESPONSE, 9, 1, 16, 0, 0, 0, 0) + bytes(16),
}


@pytest.mark.parametrize("data", INVALID_FRAMES.values(), ids=INVALID_FRAMES)
async def test_an_invalid_frame_closes_the_channel(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        events: list[Frame | str] = []
        channel = Channel(ours, events.append, lambda: events.append("closed"))
        theirs.sendall(data)
        await wait_until(lambda: events)
        assert events == ["closed"]
        assert channel.closed


def test_only_shared_buffers_are_opened(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret" * 1000)
    descriptor = create_memory_file("arena", 4096)
    reader = BlockReader(descriptor, lambda _number: None)
    close_files([descriptor])
    with pytest.raises(ValueError, match="expected the path of a shared buffer"):
        reader.open_shared(1 << 62 | 1, 0, 6, str(secret))


@pytest.mark.parametrize(
    ("family", "sample", "label"), [("a\n", "a", "b"), ("a", "a\n", "b"), ("a", "a", "b\n"), ("a", "a b", "b")]
)
def test_names_of_metrics_that_would_break_their_format_are_not_sent(family: str, sample: str, label: str) -> None:
    serialize_message(Measurements((Family("a", "gauge", "A gauge.", (Sample("a", {"b": "c\n"}, 1.0),)),)))
    with pytest.raises(ValueError, match="Expected `str` matching regex"):
        serialize_message(Measurements((Family(family, "gauge", "A gauge.", (Sample(sample, {label: "c"}, 1.0),)),)))
