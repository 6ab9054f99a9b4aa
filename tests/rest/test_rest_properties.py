"""Property tests: tensors roundtrip over REST bit by bit, in JSON and in binary form."""

import math
from decimal import Decimal
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dragoman.core.calls import Infer, Inference, Response
from dragoman.core.datatypes import BOOL, BYTES, DATATYPES, Datatype
from dragoman.core.tensor import object_array
from dragoman.protocols.open_inference.rest import OpenInferenceRest
from dragoman.protocols.wire import HttpRequest, HttpResponse, Policy
from rest.rest_server import binary, encode_body, inputs, tensor

quick = settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))

TABLE = OpenInferenceRest(Policy())

SHAPES = st.one_of(
    st.just(()),
    arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4),
    arrays.array_shapes(min_dims=8, max_dims=8, min_side=1, max_side=2),
)
TEXT = st.text(max_size=8)


def elements(datatype: Datatype) -> st.SearchStrategy[Any]:
    """All bit patterns, edge cases more often."""
    if datatype is BYTES:
        return st.one_of(TEXT.map(str.encode), st.binary(max_size=8))
    if datatype is BOOL:
        return st.integers(0, 1)
    bits = 8 * datatype.size
    telling = [0, 1, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1, (1 << (bits - 1)) + 1]
    return st.one_of(st.sampled_from(telling), st.integers(0, (1 << bits) - 1))


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Datatype, Any]:
    """A datatype and an array with random bits."""
    datatype = draw(st.sampled_from(list(DATATYPES.values())))
    shape = draw(SHAPES)
    count = math.prod(shape)
    found = draw(st.lists(elements(datatype), min_size=count, max_size=count))
    if datatype is BYTES:
        return datatype, object_array(found, shape)
    raw = b"".join(e.to_bytes(datatype.size, "little") for e in found)
    return datatype, np.frombuffer(raw, datatype.dtype).reshape(shape)


def round_trip(body: bytes | dict[str, Any], headers: dict[str, str] | None = None) -> tuple[Any, Infer, bytes]:
    """Return the response's JSON, the inputs of an identity model, and the response, without a server."""
    lower = {k.lower(): v for k, v in (headers or {}).items()}
    exchange: Any = TABLE.infer(HttpRequest("POST", "", {"model": "m"}, lower, encode_body(body)))
    call = exchange.request.call
    assert isinstance(call, Infer)
    response: HttpResponse = exchange.format_response(Response(Inference(call.inputs), "m"))
    assert response.status == 200
    body = b"".join(response.body)
    length = int(dict(response.headers).get("inference-header-content-length", len(body)))
    return orjson.loads(body[:length]), call, body[length:]


def raw_of(datatype: Datatype, array: Any) -> bytes:
    """Return the binary form, implemented independently."""
    if datatype is BYTES:
        return b"".join(len(e).to_bytes(4, "little") + e for e in array.flat)
    return bytes(array.tobytes())


def json_of(datatype: Datatype, array: Any) -> Any:
    """Return nested lists, NaN as null."""
    if datatype is BYTES:
        array = object_array([e.decode() for e in array.flat], array.shape)
    listed = array.tolist()
    return listed if datatype.kind != "float" else _without_nan(listed)


def _without_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nan(v) for v in value]
    return None if math.isnan(value) else value


def same(datatype: Datatype, one: Any, other: Any, *, payloads: bool = True) -> bool:
    """Return whether the bits are equal; without `payloads` all NaNs are equal."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if datatype is BYTES:
        return list(one.flat) == list(other.flat)
    if payloads or datatype.kind != "float":
        return bool(one.tobytes() == other.tobytes())
    nan = np.isnan(one)
    bits = [np.where(nan, 0, a.view(f"u{datatype.size}")) for a in (one, other)]
    return bool((nan == np.isnan(other)).all() and (bits[0] == bits[1]).all())


def declared(name: str, datatype: Datatype, shape: tuple[int, ...], **more: Any) -> dict[str, Any]:
    return {"name": name, "shape": list(shape), "datatype": datatype.name, **more}


# --- bit for bit -----------------------------------------------------------------------------------------------


@quick
@given(st.lists(tensors(), min_size=1, max_size=4))
def test_binary_comes_back_bit_for_bit(given: list[tuple[Datatype, Any]]) -> None:
    raws = [raw_of(d, a) for d, a in given]
    head = [
        declared(f"x{i}", d, a.shape, parameters={"binary_data_size": len(raw)})
        for i, ((d, a), raw) in enumerate(zip(given, raws, strict=True))
    ]
    body, headers = binary(inputs(*head, parameters={"binary_data_output": True}), *raws)
    result, call, rest = round_trip(body, headers)
    for (datatype, array), seen in zip(given, call.inputs.values(), strict=True):
        assert seen.datatype is datatype
        assert same(datatype, array, seen.data)
        assert not seen.data.flags.writeable
    assert rest == b"".join(raws)
    for output, raw in zip(result["outputs"], raws, strict=True):
        assert output.get("parameters", {}).get("binary_data_size", 0) == len(raw)
        assert output.get("data") == (None if raw else [])


@quick
@given(tensors(), st.booleans())
def test_json_comes_back_bit_for_bit(given: tuple[Datatype, Any], nested: bool) -> None:
    datatype, array = given
    if datatype is BYTES:
        assume(all(_is_text(e) for e in array.flat))
    if datatype.kind == "float":
        assume(not np.isinf(array).any())
    data = json_of(datatype, array if nested and array.ndim else array.reshape(-1))
    result, call, _ = round_trip(inputs(declared("x", datatype, array.shape, data=data)))
    seen = call.inputs["x"].data
    assert same(datatype, array, seen, payloads=False)
    assert not seen.flags.writeable
    output = result["outputs"][0]
    assert (output["datatype"], output["shape"]) == (datatype.name, list(array.shape))
    # What went out is read again, flat, and is still the same.
    _, again, _ = round_trip(inputs(declared("x", datatype, array.shape, data=output["data"])))
    assert same(datatype, array, again.inputs["x"].data, payloads=False)


def _is_text(element: bytes) -> bool:
    try:
        element.decode()
    except UnicodeDecodeError:
        return False
    return True


@quick
@given(st.lists(st.tuples(tensors(), st.booleans(), st.booleans()), min_size=1, max_size=5))
def test_json_and_binary_in_one_request(given: list[tuple[tuple[Datatype, Any], bool, bool]]) -> None:
    head, raws, expected = [], [], []
    for i, ((datatype, array), binary_in, binary_out) in enumerate(given):
        in_json = datatype is not BYTES and not (datatype.kind == "float" and not np.isfinite(array).all())
        expected.append({"name": f"x{i}", "parameters": {"binary_data": binary_out or not in_json}})
        if binary_in or not in_json:
            raws.append(raw_of(datatype, array))
            head.append(declared(f"x{i}", datatype, array.shape, parameters={"binary_data_size": len(raws[-1])}))
        else:
            head.append(declared(f"x{i}", datatype, array.shape, data=json_of(datatype, array.reshape(-1))))
    body, headers = binary(inputs(*head, outputs=expected), *raws)
    result, call, rest = round_trip(body, headers)
    assert list(call.inputs) == [f"x{i}" for i in range(len(given))]
    at = 0
    for ((datatype, array), _, _), seen, output in zip(given, call.inputs.values(), result["outputs"], strict=True):
        assert same(datatype, array, seen.data)
        size = output.get("parameters", {}).get("binary_data_size", 0)
        if size:
            assert rest[at : at + size] == raw_of(datatype, array)
            at += size
    assert at == len(rest)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_every_half_float_survives_json(datatype: str) -> None:
    kind = DATATYPES[datatype]
    bits = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):  # signalling NaN
        bits = bits[np.isfinite(bits.view(kind.dtype))]
    array = bits.view(kind.dtype)
    data = json_of(kind, array)
    result, call, _ = round_trip(inputs(declared("x", kind, array.shape, data=data)))
    assert call.inputs["x"].data.tobytes() == bits.tobytes()
    _, again, _ = round_trip(inputs(declared("x", kind, array.shape, data=result["outputs"][0]["data"])))
    assert again.inputs["x"].data.tobytes() == bits.tobytes()


def _count_digits(number: float) -> int:
    """Return the number of significant digits of a number's shortest text."""
    return len(Decimal(repr(number)).normalize().as_tuple().digits)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
@example([999999995904.0])
@quick
def test_fp32_prints_as_its_shortest_digits(values: list[float]) -> None:
    result, _, _ = round_trip(inputs(tensor("x", [len(values)], "FP32", values)))
    for value, printed in zip(values, result["outputs"][0]["data"], strict=True):
        assert _count_digits(printed) <= _count_digits(float(np.float32(value)))
        assert np.float32(printed).tobytes() == np.float32(value).tobytes()
