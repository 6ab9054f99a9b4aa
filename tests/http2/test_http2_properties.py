"""Chunking does not change the outcome of a connection, and no bytes raise an exception or hang."""

import random
from itertools import pairwise
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
from hpack import Encoder
from http2_fakes import GET, POST, EchoService, Wire
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.formats.http2 import frames
from dragoman.formats.http2.frames import frame
from dragoman.transports.http2.limits import Http2Limits


def recorded_frames() -> bytes:
    """Return the bytes of a client: concurrent requests, and control frames."""
    encoder = Encoder()
    big = bytes(range(256)) * 300
    data = [frames.PREFACE, frames.settings({frames.INITIAL_WINDOW_SIZE: 1 << 20}), frames.window_update(0, 1 << 20)]
    data += [frame(1, 4, n, encoder.encode([*POST, ("x-number", str(n))])) for n in (1, 3, 5)]
    data += [frame(0, 0, 1, big[:16_000]), frame(0, 9, 3, b"\x03abc..."), frame(6, 0, 0, b"12345678")]
    block = encoder.encode(GET)
    data += [frame(1, 1, 7, block[:2]), frame(9, 4, 7, block[2:]), frame(0, 1, 1, big[16_000:])]
    data += [frames.rst_stream(5, 8), frame(1, 5, 9, encoder.encode(GET[1:])), frame(0x50, 3, 9, b"what")]
    data += [frame(2, 0, 11, bytes(5)), frame(1, 5, 11, encoder.encode(GET))]
    return b"".join(data)


RECORDED = recorded_frames()


def outcome(chunks: list[bytes]) -> tuple[Any, ...]:
    wire = Wire(with_preface=False)
    wire.send(*chunks)
    handlers = [(li.stream.number, li.body, li.ended, li.code) for li in wire.service.handlers]
    responses: dict[int, bytes] = {}
    for f in wire.read():
        if type(f).__name__ == "DataFrame":
            responses[f.stream_id] = responses.get(f.stream_id, b"") + f.data
    return handlers, responses, wire.closed


WHOLE = outcome([RECORDED])


def split(data: bytes, positions: list[int]) -> list[bytes]:
    at = [0, *sorted(positions), len(data)]
    return [data[a:b] for a, b in pairwise(at)]


def test_the_recorded_frames_get_responses() -> None:
    handlers, responses, closed = WHOLE
    assert [h[0] for h in handlers] == [1, 3, 5, 7, 11]
    assert {n: len(b) for n, b in responses.items()} == {1: 76_800, 3: 3, 7: 0, 11: 0}
    assert handlers[2][3] == frames.CANCEL
    assert not closed


@settings(deadline=None)
@given(positions=st.lists(st.integers(0, len(RECORDED)), max_size=40))
def test_chunking_does_not_change_the_outcome(positions: list[int]) -> None:
    assert outcome(split(RECORDED, positions)) == WHOLE


def test_single_bytes_do_not_change_the_outcome() -> None:
    assert outcome([RECORDED[n : n + 1] for n in range(len(RECORDED))]) == WHOLE


@settings(deadline=None)
@given(data=st.binary(max_size=400))
def test_random_bytes_raise_no_exception(data: bytes) -> None:
    wire = Wire().headers(1)
    wire.send(data)
    wire.connection.on_connection_lost()
    assert wire.service.handlers[0].ended or wire.service.handlers[0].code is not None


KINDS = st.tuples(st.integers(0, 11), st.integers(0, 255), st.integers(0, 9), st.binary(max_size=60))


@settings(deadline=None)
@given(data=st.lists(KINDS, max_size=30))
def test_random_frames_raise_no_exception(data: list[tuple[int, int, int, bytes]]) -> None:
    wire = Wire(EchoService(responds=False), Http2Limits(max_streams=3, stream_window=100))
    for one in data:
        wire.send(frame(*one))
    wire.connection.on_connection_lost()
    assert all(li.ended or li.code is not None for li in wire.service.handlers)
    assert not wire.connection.streams


@settings(deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_changed_bytes_raise_no_exception(seed: int) -> None:
    dice = random.Random(seed)
    data = bytearray(RECORDED[:600] + RECORDED[-400:])
    for _ in range(dice.randrange(1, 6)):
        data[dice.randrange(24, len(data))] = dice.randrange(256)
    wire = Wire(with_preface=False).send(bytes(data))
    wire.connection.on_connection_lost()
    assert not wire.connection.streams


@settings(deadline=None)
@given(
    bodies=st.lists(st.binary(max_size=3000).map(lambda b: b * 50), min_size=1, max_size=4),
    window=st.integers(1, 100_000),
    chunk_size=st.integers(100, 70_000),
)
def test_the_h2_package_as_a_client(bodies: list[bytes], window: int, chunk_size: int) -> None:
    """The h2 package checks every frame, and acknowledges only data that it has read."""
    bodies = [body[: 500 * window] for body in bodies]
    wire = Wire(
        with_preface=False, limits=Http2Limits(stream_window=50_000, connection_window=80_000, max_frame=20_000)
    )
    client = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    client.initiate_connection()
    client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
    left = {2 * n + 1: body for n, body in enumerate(bodies)}
    got = dict.fromkeys(left, b"")
    ended: set[int] = set()
    for number in left:
        client.send_headers(number, POST)
    for _ in range(4000):  # 1,500 to send with the smallest chunk, and up to four for each window to receive
        wire.send(client.data_to_send())
        received, wire.received = wire.received, b""
        for event in client.receive_data(received):
            match event:
                case h2.events.DataReceived():
                    got[event.stream_id] += event.data
                    client.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                case h2.events.StreamEnded():
                    ended.add(event.stream_id)
        for number in [n for n in left if n not in ended]:
            size = min(chunk_size, client.local_flow_control_window(number), client.max_outbound_frame_size)
            data, left[number] = left[number][:size], left[number][size:]
            if data or not left[number]:
                client.send_data(number, data, end_stream=not left[number])
            if not left[number]:
                del left[number]
        if len(ended) == len(bodies):
            break
    assert list(got.values()) == bodies
