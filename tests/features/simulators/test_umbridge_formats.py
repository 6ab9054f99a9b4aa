"""Requests and responses of UM-Bridge in JSON: limits, long vectors, numbers that JSON cannot carry, parsers agree."""

import json
from typing import Any
from unittest import mock

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dragoman.core.errors import DragomanError, InvalidInput, InvalidOutput
from dragoman.core.tensor import Tensor
from dragoman.formats import json_numbers
from dragoman.formats.policy import Policy
from dragoman_simulators.umbridge import requests as umbridge
from dragoman_simulators.umbridge.requests import parse_umbridge_request
from dragoman_simulators.umbridge.responses import parse_output, serialize_derivative, serialize_evaluation

many_examples = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
NEVER = 1 << 60


def test_the_error_for_too_many_umbridge_vectors_names_the_model() -> None:
    vectors = ",".join([*["[1]"] * (1 << 16), '["a"]'])
    request: Any = parse_umbridge_request(f'{{"name":"m","input":[{vectors}]}}'.encode(), Policy(max_tensors=9))
    assert request.name == "m"
    assert "'input': expected at most 9 vectors, got" in request.error.message


@pytest.mark.parametrize("space", ["", " ", "\n\t"])
def test_long_vectors_of_umbridge_are_not_counted_as_json_values(space: str) -> None:
    vectors = [np.arange(300_000.0), np.array([1.5, -2.0]), np.arange(200_000) / 8]
    join = f"{space},{space}".join
    texts = [f"[{space}{join(map(repr, each.tolist()))}{space}]" for each in vectors]
    fields = (f'"input"{space}:{space}[{space}{join(texts)}{space}]', f'"sens"{space}:{space}{texts[0]}', '"outWrt":1')
    text = f'{{"name":"m",{join(fields)}}}'.encode()
    request: Any = parse_umbridge_request(text, Policy(max_json_values=50))
    assert (request.name, request.outWrt) == ("m", 1)
    assert [each.tolist() for each in request.input] == [each.tolist() for each in vectors]
    assert request.sens.tolist() == vectors[0].tolist()


def test_many_lists_in_the_config_of_umbridge() -> None:
    lists = ",".join(["[]"] * (1 << 16))
    text = f'{{"name":"m","input":[[1,2]],"config":{{"a":[{lists}]}}}}'.encode()
    request: Any = parse_umbridge_request(text, Policy(max_json_values=1 << 18))
    assert (request.name, request.config) == ("m", {"a": [[]] * (1 << 16)})
    assert [each.tolist() for each in request.input] == [[1, 2]]


@pytest.mark.parametrize("size", [3, 600])
def test_non_finite_outputs_of_umbridge(size: int) -> None:
    vector = np.arange(float(size))
    assert orjson.loads(serialize_derivative(vector, Policy())) == {"output": vector.tolist()}
    outputs = {"a": Tensor.of(vector), "b": Tensor.of(vector + 0.5)}
    both = [vector.tolist(), (vector + 0.5).tolist()]
    assert orjson.loads(serialize_evaluation(outputs, Policy())) == {"output": both}
    assert [each.tolist() for each in parse_output(serialize_evaluation(outputs, Policy()), several=True)] == both
    vector[2] = np.nan
    with pytest.raises(InvalidOutput, match=r"^output: element 2 is nan, which JSON cannot carry"):
        serialize_derivative(vector, Policy(nonfinite="null"))
    with pytest.raises(InvalidOutput, match=r"^output 'b': element 2 is nan, which JSON cannot carry"):
        serialize_evaluation({"a": Tensor.of(vector[:2]), "b": Tensor.of(vector)}, Policy(nonfinite="null"))
    assert serialize_derivative(vector, Policy(nonfinite="literal")).startswith(b'{"output":[0.0,1.0,NaN')
    vector[1:3] = np.inf, -np.inf
    assert serialize_derivative(vector, Policy(nonfinite="null")).startswith(b'{"output":[0.0,1e999,-1e999')
    with pytest.raises(InvalidOutput, match=r"^output: element 1 is inf, which JSON cannot carry"):
        serialize_derivative(vector, Policy(nonfinite="error"))
    for literals in ("Infinity,-Infinity,NaN", "inf,-inf,nan", "1e999,-1e999,null"):
        for several, text in ((False, f'{{"output":[1,{literals}]}}'), (True, f'{{"output":[[1,{literals}]]}}')):
            (parsed,) = parse_output(text.encode(), several=several)
            assert np.array_equal(parsed, [1, np.inf, -np.inf, np.nan], equal_nan=True)


def test_a_short_request_of_umbridge_that_nests_too_deep_is_rejected() -> None:
    config = b"[" * 100 + b"]" * 100
    with pytest.raises(InvalidInput, match="nests too deep; the limit is 64"):
        parse_umbridge_request(b'{"name":"v","input":[[1]],"config":{"a":%b}}' % config, Policy())


@pytest.mark.parametrize("numbers", [1, 1 << 20], ids=["short", "long"])
def test_the_config_beside_a_vector_of_umbridge_is_bounded(numbers: int) -> None:
    vector, config = b",".join([b"1"] * numbers), b",".join([b"[]"] * 3001)
    text = b'{"name":"v","input":[[%b]],"config":{"a":[%b]}}' % (vector, config)
    with pytest.raises(InvalidInput, match="too many values in JSON"):
        parse_umbridge_request(text, Policy(max_json_values=3000))


@pytest.mark.skipif(json_numbers.simd_parser_class() is None, reason="simdjson is not installed")
def test_long_vectors_are_not_parsed_by_the_general_parser() -> None:
    values = np.random.default_rng(0).standard_normal(30_000)
    text = json.dumps({"name": "m", "input": [values.tolist(), [1.5]]}).encode()
    with mock.patch.object(json_numbers, "_decode", side_effect=AssertionError):
        request = umbridge.parse_umbridge_request(text, Policy())
    assert isinstance(request, umbridge.UmBridgeRequest)
    assert isinstance(request.input, list)
    assert [vector.tolist() for vector in request.input] == [values.tolist(), [1.5]]


VECTOR_ELEMENTS = st.sampled_from(
    [
        "1",
        "-2.5",
        "0.1",
        "1e5",
        "1e400",
        "1e-320",
        "null",
        "true",
        "[1]",
        '"x"',
        "",
        "-0",
        "12345678901234567890",
        "NaN",
    ]
)
VECTORS = st.lists(
    st.lists(st.one_of(st.floats(allow_nan=False, allow_infinity=False).map(repr), VECTOR_ELEMENTS), max_size=6),
    max_size=3,
)


@given(
    VECTORS,
    st.sampled_from(
        ["", ',"config":{"a":[1,2]}', ',"sens":[1,2]', ',"vec":[1,null]', ',"input":[]', ',"outWrt":0', ',"sens":[[1]]']
    ),
)
@many_examples
def test_all_parsers_return_the_same_umbridge_request(vectors: list[list[str]], more: str) -> None:
    text = f'{{"name":"m","input":[{",".join("[" + ",".join(vector) + "]" for vector in vectors)}]{more}}}'.encode()

    def outcome(min_long: int) -> Any:
        with mock.patch.object(umbridge, "LONG", min_long):
            try:
                request = umbridge.parse_umbridge_request(text, Policy())
            except DragomanError as error:
                return error.message
            if isinstance(request, umbridge.InvalidUmBridgeRequest):
                return request.error.message
            sens, vec = (getattr(request, key) for key in umbridge.VECTORS)
            vectors = [np.asarray(v).tobytes() for v in request.input or ()]
            return request.config, request.outWrt, vectors, *(np.asarray(v).tolist() for v in (sens, vec))

    assert outcome(2) == outcome(NEVER)


def test_keys_written_with_escapes_are_recognized() -> None:
    numbers = json.dumps([float(value) for value in range(1000)])
    for text in (
        f'{{"name":"m","\\u0069nput":[[]],"config":{{"input":[{numbers}]}}}}',
        f'{{"name":"m","input":[{numbers}],"\\u0069nput":[[]]}}',
    ):
        request = umbridge.parse_umbridge_request(text.encode(), Policy())
        assert isinstance(request, umbridge.UmBridgeRequest)
        assert isinstance(request.input, list)
        assert [vector.tolist() for vector in request.input] == [[]]
        assert request.config == json.loads(text).get("config")
