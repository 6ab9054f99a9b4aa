"""Fast paths for small responses produce the same bytes as the general serializer."""

import tracemalloc
from collections.abc import Iterable
from typing import Any
from unittest import mock

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dragoman.core.calls import Inference, Response
from dragoman.core.datatypes import BF16, FP32, UINT8
from dragoman.core.errors import NotSupported
from dragoman.core.tensor import Tensor
from dragoman.formats import small_messages
from dragoman.formats.policy import Policy
from dragoman.protocols.open_inference import rest as oip_rest
from dragoman.protocols.wire import EngineCall, HttpRequest, HttpResponse

KINDS = ["bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"]
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)


def response_of(inference: Inference, version: str = "", body: bytes = b'{"inputs":[]}') -> HttpResponse:
    """The REST response to a request."""
    endpoint = next(r.endpoint for r in oip_rest.protocol(Policy()).routes if r.pattern == "/v2/models/{model}/infer")
    request: Any = endpoint(HttpRequest("POST", "/", {"model": "m"}, {}, body))
    assert isinstance(request, EngineCall)
    response: HttpResponse = request.format_response(Response(inference, "m", version))
    return response


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
    array = draw(arrays.arrays(np.dtype(draw(st.sampled_from(KINDS))), shape))
    if draw(st.booleans()):
        array = array.T
    return Tensor.of(array, None, draw(st.sampled_from([{}, {"content_type": "np"}])))


@given(
    st.dictionaries(NAMES, tensors(), max_size=3),
    st.sampled_from(["", "3"]),
    st.sampled_from(["", "1", 'a"\\\n', "ü"]),
    st.sampled_from([{}, {"k": 1}]),
    st.sampled_from([None, True, False]),
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([None, True, False])), max_size=3),
)
def test_fast_paths_produce_the_same_response(
    outputs: dict[str, Tensor],
    version: str,
    id_: str,
    parameters: dict[str, Any],
    binary: bool | None,
    forms: list[tuple[int, bool | None]],
) -> None:
    request: dict[str, Any] = {"id": id_, "inputs": []} if id_ else {"inputs": []}
    if binary is not None:
        request["parameters"] = {"binary_data_output": binary}
    names = [*outputs, "?"]
    request["outputs"] = [
        {"name": names[index % len(names)], **({} if form is None else {"parameters": {"binary_data": form}})}
        for index, form in forms
    ]
    inference = Inference(outputs, parameters)

    def serialize() -> Any:
        try:
            response = response_of(inference, version, orjson.dumps(request))
        except NotSupported as error:
            return error.message
        return response.status, b"".join(response.body), response.headers

    fast = serialize()
    with (
        mock.patch.object(oip_rest, "serialize_small_response", return_value=None),
        mock.patch.object(oip_rest, "serialize_binary_response", return_value=None),
    ):
        assert serialize() == fast


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_numbers_take_the_general_path(value: float) -> None:
    inference = Inference({"y": Tensor.of(np.array([1, value], np.float32))})
    assert small_messages.serialize_small_response(inference, "m", "", None) is None


@pytest.mark.parametrize("count", [small_messages.SMALL_ELEMENTS, small_messages.SMALL_ELEMENTS + 1])
def test_small_json_outputs_take_the_fast_path(count: int) -> None:
    inference = Inference({"y": Tensor(np.ones(count, np.uint8), UINT8)})
    few = count <= small_messages.SMALL_ELEMENTS
    assert (small_messages.serialize_small_response(inference, "m", "", None) is not None) is few
    assert small_messages.serialize_binary_response(inference, "m", "", None, bool) is not None


def test_bf16_takes_the_general_path() -> None:
    bits = Tensor.of(np.ones(2), BF16)
    assert b"1.0,1.0" in response_of(Inference({"y": bits})).body[0]


def test_the_cache_of_descriptions_is_bounded() -> None:
    array = np.ones(1, np.float32)

    def serialize(numbers: Iterable[int]) -> None:
        for number in numbers:
            inference = Inference({f"y{number}": Tensor(array, FP32)})
            small_messages.serialize_small_response(inference, f"m{number}", "", None)
            small_messages.serialize_binary_response(inference, f"m{number}", "", None, bool)

    tracemalloc.start()
    try:
        serialize(range(1024))  # the caches are full or have been emptied
        before, _ = tracemalloc.get_traced_memory()
        serialize(range(1024, 3072))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 100_000  # bytes; unbounded caches grow by several MB
