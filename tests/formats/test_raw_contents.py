"""Raw contents split off a message equal those that protobuf parses from the whole message."""

from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dragoman.core.errors import InvalidInput
from dragoman.core.sizes import SHARED as LARGE
from dragoman.formats.grpc_messages import ModelInferRequest, split_raw_contents
from dragoman.formats.policy import Policy
from dragoman.protocols.open_inference.grpc_inference import parse_infer_request
from dragoman.protocols.wire import GrpcRequest


def message(*contents: bytes, **more: Any) -> bytes:
    inputs = [{"name": f"x{i}", "datatype": "UINT8", "shape": [len(c)]} for i, c in enumerate(contents)]
    request = ModelInferRequest(model_name="m", id="7", inputs=inputs, raw_input_contents=contents, **more)
    return bytes(request.SerializeToString())


MESSAGES = st.builds(
    lambda contents, version, position, junk: _insert(message(*contents, model_version=version), position, junk),
    st.lists(st.binary(max_size=200), max_size=4),
    st.text(max_size=3),
    st.integers(0, 400),
    st.one_of(st.just(b""), st.binary(max_size=6), st.sampled_from([b"\x3a\x01a", b"\xba\x00\x01a", b"\x38\x05"])),
)


def _insert(message: bytes, position: int, junk: bytes) -> bytes:
    return message[:position] + junk + message[position:]


@settings(max_examples=200, deadline=None)
@given(st.one_of(MESSAGES, st.binary(max_size=40)))
@example(b"\xba\x80\x80\x80\x80\x80\x80\x00\x01a")
@example(b"\x3a\x81\x80\x80\x80\x80\x80\x80\x00a")
@example(b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")
@example(b"\x3b\x3c")
def test_split_contents_equal_those_of_protobuf(body: bytes) -> None:
    parts = split_raw_contents(body)
    try:
        whole = ModelInferRequest.FromString(body)
    except DecodeError:
        if parts is not None:
            with pytest.raises(DecodeError):
                ModelInferRequest.FromString(parts[0])
        return
    if parts is None:
        return
    rest = ModelInferRequest.FromString(parts[0])
    assert not rest.raw_input_contents
    assert [bytes(c) for c in parts[1]] == list(whole.raw_input_contents)
    rest.raw_input_contents.extend(map(bytes, parts[1]))
    assert rest.SerializeToString(deterministic=True) == whole.SerializeToString(deterministic=True)


def test_contents_of_valid_messages_are_split_off() -> None:
    parts = split_raw_contents(message(b"abc", b"", b"de"))
    assert parts is not None
    assert [bytes(c) for c in parts[1]] == [b"abc", b"", b"de"]


def test_large_contents_are_views() -> None:
    numbers = np.arange(LARGE, dtype=np.uint8)
    body = message(numbers.tobytes())
    request, form = parse_infer_request(GrpcRequest(body), Policy())
    call: Any = request.call
    assert form.raw
    assert np.shares_memory(call.inputs["x0"].data, np.frombuffer(body, np.uint8))
    assert np.array_equal(call.inputs["x0"].data, numbers)


@pytest.mark.parametrize("body", [message(b"a" * LARGE)[:-1], message(b"a" * LARGE) + b"\x3a", b"\xff" * LARGE])
def test_malformed_large_messages_are_rejected(body: bytes) -> None:
    with pytest.raises(InvalidInput, match=r"the message is not a valid inference\.ModelInferRequest"):
        parse_infer_request(GrpcRequest(body), Policy())


def test_messages_of_very_many_fields_are_left_to_protobuf() -> None:
    body = b"\x38\x05" * LARGE + message(b"abc")
    assert split_raw_contents(body) is None
    request, _ = parse_infer_request(GrpcRequest(body), Policy())
    call: Any = request.call
    assert bytes(call.inputs["x0"].data) == b"abc"


def test_unknown_fields_of_every_wire_type_are_preserved() -> None:
    unknown = b"\xb9\x01" + bytes(8) + b"\xbd\x01" + bytes(4) + b"\xb8\x01\xff\x7f" + b"\xba\x01\x02ab"
    body = unknown + message(b"12345678", b"90") + unknown
    parts = split_raw_contents(body)
    assert parts is not None
    assert [bytes(each) for each in parts[1]] == [b"12345678", b"90"]
    assert parts[0] == unknown + body[len(unknown) : -len(unknown)].partition(b"\x3a\x08")[0] + unknown
    for group in (b"\xbb\x01", b"\xbc\x01", b"\xbe\x01"):
        assert split_raw_contents(body + group) is None
