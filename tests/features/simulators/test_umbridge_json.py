"""Numbers in UM-Bridge's JSON are exact with every parser."""

import json
import math
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dragoman.core.errors import InvalidInput, InvalidOutput, TooLarge
from dragoman.formats import json_numbers
from dragoman.formats.policy import Policy
from dragoman_simulators.umbridge import requests
from dragoman_simulators.umbridge.requests import InvalidUmBridgeRequest, UmBridgeRequest, parse_umbridge_request
from dragoman_simulators.umbridge.responses import format_vector, parse_output

POLICY = Policy()
FINITE = st.floats(allow_nan=False, allow_infinity=False)


def parse(body: Any, policy: Policy = POLICY) -> Any:
    request = parse_umbridge_request(body if isinstance(body, bytes) else json.dumps(body).encode(), policy)
    assert isinstance(request, UmBridgeRequest)
    return request


def error_message(body: Any, policy: Policy = POLICY) -> str:
    result = parse_umbridge_request(body if isinstance(body, bytes) else json.dumps(body).encode(), policy)
    assert isinstance(result, InvalidUmBridgeRequest)
    return result.error.message


@given(st.lists(st.lists(FINITE, max_size=5), max_size=4), st.lists(FINITE, max_size=5), st.booleans())
def test_vectors_are_parsed_exactly(vectors: Any, sens: Any, long: bool) -> None:
    padding = " " * json_numbers.LONG if long else ""  # long bodies go through another parser
    body = json.dumps({"name": "f", "input": vectors, "sens": sens, "outWrt": 3}) + padding
    request = parse(body.encode())
    assert [v.tolist() for v in request.input] == vectors
    assert all(v.dtype == np.float64 and v.ndim == 1 for v in request.input)
    assert (request.sens.tolist(), request.outWrt) == (sens, 3)


@given(st.lists(st.floats(), max_size=20))
def test_vectors_roundtrip(values: list[float]) -> None:
    policy = Policy(nonfinite="literal")
    text = orjson.dumps({"output": format_vector(np.array(values), "y", policy)}, option=orjson.OPT_SERIALIZE_NUMPY)
    np.testing.assert_array_equal(parse_output(text, several=False)[0], np.array(values))
    np.testing.assert_array_equal(json.loads(text)["output"], values)


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("input", "[[1, [2]]]", "input[0][1]: expected a number, got an array"),
        ("input", "[[[1], 2]]", "input[0][0]: expected a number, got an array"),
        ("input", "[[true]]", "input[0][0]: expected a number, got a boolean"),
        ("input", '[["1"]]', "input[0][0]: expected a number, got '1'"),
        ("input", "[1]", "input[0]: expected an array of numbers, got 1"),
        ("sens", "[[1]]", "sens[0]: expected a number, got an array"),
        ("vec", "{}", "vec: expected an array of numbers, got an object"),
        ("outWrt", "1.0", "'outWrt': expected an integer, got 1.0"),
        ("outWrt", '"1"', "'outWrt': expected an integer, got '1'"),
        ("config", "[]", "'config': expected an object, got an array"),
    ],
)
def test_all_parsers_report_types_equally(field: str, value: str, message: str, long: bool) -> None:
    body = f'{{"name": "f", "{field}": {value}}}' + " " * (json_numbers.LONG if long else 0)
    assert error_message(body.encode()) == message


LONG = ",".join(["0.25000", "-1.00e3", "7.00000"] * 80_000)  # more than a MiB, in as many values as one parser may see


def test_elements_that_are_not_vectors_and_too_many_vectors_create_no_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []

    def parse_vector(text: memoryview) -> Any:
        parsed.append(bytes(text))
        return np.zeros(1)

    monkeypatch.setattr(requests, "parse_vector", parse_vector)
    assert requests.parse_vectors(memoryview(b"[" + b"1," * 1000 + b"1]")) is None
    assert requests.parse_vectors(memoryview(b"[[1]," + b"1," * 1000 + b"1]")) is None
    assert len(requests.parse_vectors(memoryview(b"[" + b"[] ," * 1000 + b"[]]"), 3) or ()) == 3
    assert parsed == [b"[1]", b"[]", b"[]", b"[]"]


PARTS = [
    '{"name": "f"',
    ', "input": ',
    "[[1.5, 2]",
    ", [3]]",
    ', "sens" : [4, 5]',
    "}",
    "[",
    "]",
    ",",
    ":",
    " ",
    '"a"',
    "7",
]
PARTS += [
    ', "config": {"a": ["]", "\\"}"]}',
    ', "outWrt": 1',
    "[[]]",
    "[6 ,\n7]",
    '{"name": "\\u0066"',
    "\t} ",
    "NaN",
    ', "sens": 3',
    ', "config": null',
]


@given(st.lists(st.sampled_from(PARTS), max_size=9))
@example(
    ['{"name": "f"', ', "input": ', "[[1.5, 2]", ", [3]]", ', "sens" : [4, 5]', ', "config": {"a": ["]", "\\"}"]}', "}"]
)
@example(['{"name": "f"', ', "input": ', "[[1.5, 2]", "[3]]", "}"])
@example(['{"name": "f"', "]"])
@example(['{"name": "f", "input": [[1]] [2]}'])
@example(['{"name": "f", "sens": [4, 5}}'])
@example(['{"name": "f", "sens": , "outWrt": 1}'])
@example(['{"name": "f", "sens": [4][[]], "sens": [4]}'])
def test_long_requests_are_split_into_the_members_that_the_parser_finds(pieces: list[str]) -> None:
    """The parser that skips vectors would keep the interpreter lock for a quarter of a second."""
    text = "".join(pieces).encode()
    results: list[Any] = []
    for long_bytes in (1 << 30, 0):
        with mock.patch.object(requests, "_LONG_BYTES", long_bytes), mock.patch.object(requests, "LONG", 3):
            try:
                request = parse_umbridge_request(memoryview(text), POLICY)
                assert not isinstance(request, InvalidUmBridgeRequest), request.error
                vectors = [each.tolist() for each in request.input] if request.input is not msgspec.UNSET else None
                sens = request.sens.tolist() if request.sens is not msgspec.UNSET else None
                results.append(repr((request.name, vectors, sens, request.config, request.outWrt)))
            except (InvalidInput, AssertionError):
                results.append("error")
    if results[1] == "error" and b"NaN" in text:
        return  # what is wrong with a long request is not looked for
    assert results[0] == results[1]


def as_object(members: list[tuple[str, str]]) -> str:
    return "{" + ", ".join(f'"{key}": {value}' for key, value in members) + "}"


NUMBERS = st.one_of(
    FINITE.map(repr),
    st.integers(-(1 << 70), 1 << 70).map(str),
    st.sampled_from(["-0", "-0.0", "1e5", "1E-7", "9007199254740993", "18446744073709551615", "5e-324", "1e999"]),
)
SCALARS = NUMBERS | st.sampled_from(
    ["null", "true", '"a"', '""', '"[{"', '"\\"]"', '"\\u00e9"', '"\\ud800"', '"\u00e9"', "01", "+1", '"\t"']
)
VECTORS = st.lists(NUMBERS, max_size=4).map(lambda each: f"[{','.join(each)}]")
VALUES = st.recursive(
    SCALARS | VECTORS,
    lambda each: (
        st.lists(each, max_size=3).map(lambda items: f"[{', '.join(items)}]")
        | st.lists(st.tuples(st.sampled_from(["a", "b", "name"]), each), max_size=3).map(as_object)
    ),
    max_leaves=5,
)


MEMBERS = st.one_of(
    st.tuples(st.just("name"), st.sampled_from(['"f"', '""', "3"])),
    st.tuples(st.just("input"), st.lists(VECTORS, max_size=3).map(lambda each: f"[{','.join(each)}]") | VALUES),
    st.tuples(st.sampled_from(["sens", "vec"]), VECTORS | VALUES),
    st.tuples(st.just("config"), st.lists(st.tuples(st.sampled_from("ab"), SCALARS), max_size=4).map(as_object)),
    st.tuples(
        st.sampled_from(["outWrt", "inWrt", "inWrt1", "inWrt2"]), st.sampled_from(["0", "7", "-1", "1.0", "true"])
    ),
    st.tuples(st.sampled_from(["config", "outWrt", "other", "inp\\u0075t"]), VALUES),
)


def outcome(text: bytes, policy: Policy) -> str:
    try:
        request = parse_umbridge_request(text, policy)
    except InvalidInput as error:
        return f"{type(error)} {error.message}"
    if isinstance(request, InvalidUmBridgeRequest):
        return f"{request.name} {request.error.message}"
    arrays = [*(request.input or ()), request.sens, request.vec]
    kinds = [(each.dtype, each.ndim, each.flags.writeable) for each in arrays if isinstance(each, np.ndarray)]
    fields = {key: getattr(request, key) for key in UmBridgeRequest.__struct_fields__}
    with np.printoptions(floatmode="unique"):
        return repr((fields, kinds))


@given(st.lists(MEMBERS, max_size=6), st.sampled_from(["", " ", "\ufeff", "x", "}", ","]), st.booleans())
@example(
    [("name", '"f"'), ("input", "[[1,2],[3]]"), ("sens", "[4]"), ("config", '{"a": 1}'), ("outWrt", "1")], "", False
)
@example([("name", '"f"'), ("input", "[[1,[2]]]")], "", False)
@example([("name", '"f"'), ("input", "[[1]]"), ("input", "[[2]]")], "", False)
@example([("name", '"f"'), ("input", "{}")], "", False)
@example([("name", '"f"'), ("outWrt", "true")], "", False)
@example([("name", "3")], "", False)
@example([("name", '"f"'), ("input", "[[1]]")], "\ufeff", False)
@example([("name", '"f"'), ("input", "[[1],[2]]")], "", True)
@example([("name", '"f"'), ("config", '{"a": 1, "b": 2, "a": 3}')], "", True)
@example([("name", '"f"'), ("config", '{"a": "%s"}' % ("x" * 60))], "", True)
@example([("name", '"f"'), ("config", '{"a": {"a": {}}}')], "", True)
def test_both_parsers_of_long_requests_return_the_same(members: list[tuple[str, str]], end: str, strict: bool) -> None:
    text = as_object(members)
    text = end + text if end == "\ufeff" else text + end
    policy = (
        Policy(nonfinite="error", max_tensors=1, max_json_values=2, max_json_bytes=60, max_json_depth=2)
        if strict
        else POLICY
    )
    with mock.patch.object(requests, "LONG", 0):
        found = outcome(text.encode(), policy)
        with mock.patch.object(json_numbers, "simd_parser_class", return_value=None):
            assert found == outcome(text.encode(), policy)


def test_vectors_may_be_longer_than_other_json() -> None:
    values = [0.1] * 1000
    policy = Policy(max_json_bytes=500, max_json_values=100)
    assert parse({"name": "f", "input": [values], "config": {"a": 1}}, policy).input[0].tolist() == values
    with pytest.raises(TooLarge, match=r"too much JSON: expected at most 500 bytes \(max_json_bytes\)"):
        parse({"name": "f", "input": [values], "config": {"a": "b" * 500}}, policy)
    policy = Policy(max_json_values=100)
    with pytest.raises(InvalidInput, match="too many values in JSON"):
        parse({"name": "f", "input": [values], "config": {"a": [1] * 101}}, policy)


def test_long_requests_may_have_what_short_ones_may() -> None:
    body = json.dumps(
        {"name": "f", "input": [[0.5] * (1 << 20), [math.nan] * 1000], "sens": 2, "config": {"a": math.inf}}
    )
    request = parse(body.encode())
    assert [each.size for each in request.input] == [1 << 20, 1000]
    assert np.isnan(request.input[1]).all()
    assert (request.sens.tolist(), request.config) == ([2.0], {"a": math.inf})
    with pytest.raises(InvalidInput, match="the request is not valid: expected an object"):
        parse(b'{"name": "f", "input": [[%b1]], %b}' % (b"1," * (1 << 20), b", ".join([b'"a": 1'] * 200)))


def test_what_is_wrong_with_a_long_request_is_not_looked_for() -> None:
    """Python's own parser would stop all threads for a second."""
    with (
        mock.patch.object(requests, "parse_json", side_effect=AssertionError("it was parsed")),
        pytest.raises(InvalidInput, match=r"vectors of numbers.* requests of at most 2097152 bytes"),
    ):
        parse({"name": "f", "input": [0] * (1 << 20)})


@pytest.mark.parametrize("simdjson", [True, False])
@pytest.mark.parametrize("vectors", ["[[%s]]", "[ [1, 2] ,\n[%s], [ ] ]", "[[%s], [3], [%s]]"])
def test_very_long_vectors_are_parsed_in_pieces(vectors: str, simdjson: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not simdjson:
        monkeypatch.setattr(json_numbers, "simd_parser_class", lambda: None)
    text = vectors.replace("%s", LONG)
    request = parse(f'{{"name": "f", "config": {{"a": [1]}}, "input": {text}, "outWrt": 1}}'.encode())
    expected = json.loads(text)
    assert len(request.input) == len(expected)
    for actual, expected_vector in zip(request.input, expected, strict=True):
        np.testing.assert_array_equal(actual, expected_vector)
    assert (request.config, request.outWrt) == ({"a": [1]}, 1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("[[%s,]]", "the request is not valid JSON"),
        ("[[%s,,1]]", "the request is not valid JSON"),
        ("[[%s] [1]]", "the request is not valid JSON"),
        ("[[%s", "the request is not valid JSON"),
        ('[[%s, "x]"]]', "input[0][240000]: expected a number, got 'x]'"),
        ("[[%s, [1]]]", "input[0][240000]: expected a number, got an array"),
        ("[[%s, null]]", "input[0][240000]: expected a number, got null"),
        ("[[%s], 5]", "input[1]: expected an array of numbers, got 5"),
    ],
)
def test_errors_in_very_long_bodies_are_reported(changed: str, message: str) -> None:
    body = f'{{"name": "f", "input": {changed.replace("%s", LONG)}}}'.encode()
    if message.startswith("input"):
        assert error_message(body) == message
    else:
        with pytest.raises(InvalidInput, match=message):
            parse_umbridge_request(body, POLICY)


def test_a_key_input_in_the_config_is_not_the_input() -> None:
    request = parse(f'{{"name": "f", "config": {{"input": [[{LONG}]]}}, "input": [[]]}}'.encode())
    assert [v.tolist() for v in request.input] == [[]]
    assert len(request.config["input"][0]) == 240_000
    request = parse(f'{{"name": "f", "config": {{"input": [[{LONG}]]}}}}'.encode())
    assert request.input is msgspec.UNSET


def test_long_bodies_with_configs_and_duplicate_keys() -> None:
    vector = np.random.default_rng(1).normal(size=500).tolist()
    request = parse({"name": "f", "input": [vector], "config": {"mesh": [1, [2]], "deep": {"a": None, "b": "["}}})
    assert request.config == {"mesh": [1, [2]], "deep": {"a": None, "b": "["}}
    assert request.input[0].tolist() == vector
    doubled = b'{"name": "f", "outWrt": 1, "outWrt": 2, "input": [%s]}' % json.dumps(vector).encode()
    assert parse(doubled).outWrt == 2
    assert parse(b'{"name": "f", "other": [%s], "input": [[1e5]]}' % json.dumps(vector).encode()).input[0] == [1e5]


@pytest.mark.parametrize("spelled", ["1e999", "Infinity"])
def test_infinities_are_accepted_in_both_spellings_unless_disabled(spelled: str) -> None:
    body = f'{{"name": "f", "input": [[0, -{spelled}]]}}'.encode()
    assert parse(body).input[0].tolist() == [0.0, -math.inf]
    assert error_message(body, Policy(nonfinite="error")) == "input[0][1]: expected a finite number, got -inf"


def test_nan_in_responses_follows_the_nonfinite_setting() -> None:
    array = np.array([1.0, np.nan, np.inf])
    with pytest.raises(InvalidOutput, match="output 'y': element 1 is nan"):
        format_vector(array, "output 'y'", POLICY)
    with pytest.raises(InvalidOutput, match="element 1 is inf"):
        format_vector(array[[0, 2]], "y", Policy(nonfinite="error"))
    assert orjson.dumps(format_vector(array, "y", Policy(nonfinite="literal"))) == b"[1.0,NaN,Infinity]"
    assert orjson.dumps(format_vector(array[[2, 0]], "y", POLICY)) == b"[1e999,1.0]"


def test_numbers_of_single_precision_keep_their_value() -> None:
    assert json.loads(
        orjson.dumps(format_vector(np.array([0.1], np.float32), "y", POLICY), option=orjson.OPT_SERIALIZE_NUMPY)
    ) == [float(np.float32(0.1))]


@pytest.mark.parametrize(
    ("text", "several", "expected"),
    [
        (b'{"output": [[nan, 1.0], [-inf, inf]] }', True, [[math.nan, 1.0], [-math.inf, math.inf]]),
        (b'{"output":[[null,1]]}', True, [[math.nan, 1.0]]),
        (b'{"output": [1, 2.5]}', False, [[1.0, 2.5]]),
        (b'{"output": [NaN, -Infinity]}', False, [[math.nan, -math.inf]]),
    ],
)
def test_responses_of_other_servers_are_parsed(text: bytes, several: bool, expected: Any) -> None:
    np.testing.assert_array_equal(parse_output(text, several=several), expected)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b'{"output": 5}', b'{"output": [["a"]]}', b'{"output": [[1], 2]}', b"<html>"]
)
def test_invalid_responses_are_reported(text: bytes) -> None:
    with pytest.raises(InvalidOutput, match="the response is"):
        parse_output(text, several=True)


@pytest.mark.parametrize("value", [b'"1"', b"true", b"{}", b"[1]"])
@pytest.mark.parametrize("count", [1, 2000], ids=["short", "long"])
@pytest.mark.parametrize("several", [True, False])
def test_a_value_that_is_not_a_number_is_rejected_not_converted(value: bytes, count: int, several: bool) -> None:
    vector = b"[%s]" % b", ".join([b"1.5"] * count + [value])
    text = b'{"output": %s}' % (b"[%s]" % vector if several else vector)
    with pytest.raises(InvalidOutput, match="expected numbers in 'output', got"):
        parse_output(text, several=several)


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_random_bytes_are_rejected(garbage: bytes) -> None:
    try:
        result = parse_umbridge_request(garbage, POLICY)
    except InvalidInput:
        return
    assert isinstance(json.loads(garbage)["name"], str)
    assert isinstance(result, UmBridgeRequest | InvalidUmBridgeRequest)
