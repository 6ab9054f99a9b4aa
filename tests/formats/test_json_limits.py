"""JSON is bounded before it is parsed, and arrays parsed in pieces equal those parsed at once."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dragoman.core.datatypes import FP32, FP64, INT64, Datatype
from dragoman.core.errors import InvalidInput, TooLarge
from dragoman.formats import body, json_data, json_numbers, json_scan, json_text
from dragoman.formats.json_document import parse_document, parse_json
from dragoman.formats.json_text import format_nested, format_numbers, json_chunks
from dragoman.formats.policy import Policy
from dragoman.system.shared_memory import LARGE, find_buffer

many_examples = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
POLICY = Policy()


@contextmanager
def pieces_of(size: int) -> Iterator[None]:
    """Parse every array of numbers in pieces of `size` bytes."""
    with (
        mock.patch.object(body, "parse_small_tensor", return_value=None),
        mock.patch.object(json_data, "LONG", 2),
        mock.patch.object(json_numbers, "_PIECE", size),
    ):
        yield


def request(data: str, shape: Any, datatype: str) -> bytes:
    return f'{{"inputs":[{{"name":"x","data":{data},"shape":{shape},"datatype":"{datatype}"}}],"id":"7"}}'.encode()


def parse(text: bytes, policy: Policy = POLICY) -> Any:
    """Return shape and elements of the only input, or None if the request is rejected."""
    try:
        tensor = body.parse_request(text, None, policy).inputs["x"]
    except InvalidInput:
        return None
    return tensor.shape, tensor.data.tolist()


SHAPES = st.lists(st.integers(0, 4), min_size=1, max_size=4)
TEXTS = st.text(st.sampled_from('ab,[]{}"\\ \n\0é🦆'), max_size=5)


@many_examples
@given(SHAPES, st.sampled_from(["INT64", "FP32", "BOOL", "BYTES"]), st.data(), st.sampled_from([None, 1]))
def test_arrays_in_pieces(shape: list[int], datatype: str, data: st.DataObject, indent: int | None) -> None:
    kinds: dict[str, st.SearchStrategy[Any]] = {
        "INT64": st.integers(-(1 << 63), (1 << 63) - 1),
        "FP32": st.floats(width=32, allow_nan=False, allow_infinity=False),
        "BOOL": st.booleans(),
        "BYTES": TEXTS,
    }
    count = int(np.prod(shape))
    values = data.draw(st.lists(kinds[datatype], min_size=count, max_size=count))
    nested = np.array(values, dtype=object).reshape(shape).tolist()
    text = request(json.dumps(nested, indent=indent), shape, datatype)
    with pieces_of(data.draw(st.sampled_from([1, 7, 64, 1 << 18]))):
        parsed = parse(text)
    expected = np.array([v.encode() if isinstance(v, str) else v for v in values], dtype=object).reshape(shape)
    assert parsed == (tuple(shape), expected.tolist())


@many_examples
@given(
    st.lists(st.sampled_from(['"a"', "1", "[", "]", ",", " ", "2.5", '"', "\\", "null", "{"]), max_size=9).map("".join),
    st.sampled_from([[2], [1, 2], [2, 1], [1, 1, 2], [0], [2, 0]]),
    st.sampled_from(["INT64", "FP32", "BYTES"]),
)
def test_pieces_are_accepted_and_rejected_as_the_complete_array(data: str, shape: list[int], datatype: str) -> None:
    text = request(f"[{data}]", shape, datatype)
    expected = parse(text)
    for size in (1, 64):
        with pieces_of(size):
            assert repr(parse(text)) == repr(expected)  # repr, because NaN != NaN


@pytest.mark.parametrize(
    "data",
    [
        "[[1[],[2]]",
        "[[1],[2]]]",
        "[[1],[2]",
        "[[1]],[2]]",
        "[[1,],[2]]",
        "[[1],,[2]]",
        "[[1] [2]]",
        "[[1]2,[3]]",
        "[1[1],[2]]",
        "[[1],2]",
        "[[[1],[2]]]",
        "[[1,2],[3]]",
        "[[1],[2],[3]]",
        "[[],[1,2]]",
    ],
)
@pytest.mark.parametrize("size", [2, 1 << 18])
@pytest.mark.parametrize("datatype", ["INT64", "FP32", "BYTES"])
def test_wrong_brackets_are_rejected(data: str, size: int, datatype: str) -> None:
    if datatype == "BYTES":
        for number in "123":
            data = data.replace(number, f'"{number}"')
    text = request(data, [2, 1], datatype)
    assert parse(text) is None
    with pieces_of(size):
        assert parse(text) is None


@pytest.mark.parametrize("data", [["[1]"] * 50_000, ["[1]"] * 49_998 + ["[1,2]", "[]"]], ids=["shape", "ragged"])
def test_long_lists_of_another_shape_are_rejected_without_creating_them(data: list[str]) -> None:
    with (
        mock.patch.object(json_numbers, "_decode", side_effect=AssertionError("elements were parsed")),
        pytest.raises(InvalidInput, match=r"input 'x': 'data' does not nest as its shape \[50001, 1\]"),
    ):
        body.parse_request(request(f"[{','.join(data)}]", [50_001, 1], "FP32"), None, POLICY)


def test_a_shape_that_is_larger_than_the_text_takes_no_memory() -> None:
    for shape in ([1, 1 << 30], [1 << 30, 1], [1 << 30, 0], [0, 1 << 30], [1, 0, 1 << 30]):
        assert json_numbers.flatten_lists(b"[[1]]", shape) is None


# --- limits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("filler", ["[]", '{"a":{}}', '"a,[{"', "1", '"\\""'])
def test_values_are_counted_as_the_parser_creates_them(filler: str) -> None:
    few, many = (f'{{"a": [{",".join([filler] * count)}]}}'.encode() for count in (100, 400))
    policy = Policy(max_json_values=350)
    assert len(parse_json(few, policy)["a"]) == 100
    with (
        mock.patch.object(orjson, "loads", side_effect=AssertionError("it was parsed")),
        pytest.raises(InvalidInput, match=r"too many values in JSON: expected at most 350 \(max_json_values\)"),
    ):
        parse_json(many, policy)


def test_elements_of_documents_do_not_count_as_values_but_lists_do() -> None:
    policy = Policy(max_json_values=350)
    assert parse_document(json.dumps({"a": list(range(400))}).encode(), policy) == {"a": list(range(400))}
    with pytest.raises(InvalidInput, match="too many values in JSON: expected at most 350"):
        parse_document(json.dumps({"a": [[1]] * 400}).encode(), policy)
    with pytest.raises(InvalidInput, match="too many values in JSON: expected at most 350"):
        parse_document(json.dumps({str(i): 1 for i in range(400)}).encode(), policy)


@pytest.mark.parametrize("parse", [parse_json, parse_document])
def test_bytes_of_json_are_limited(parse: Callable[[bytes, Policy], Any]) -> None:
    policy = Policy(max_json_bytes=20)
    assert parse(b'{"a": "0123456789"}', policy) == {"a": "0123456789"}
    with pytest.raises(TooLarge, match=r"expected at most 20 bytes \(max_json_bytes\), got 21"):
        parse(b'{"a": "0123456789ab"}', policy)


@pytest.mark.parametrize("position", ["before", "behind"])
def test_unknown_fields_create_no_values(position: str) -> None:
    tensor = '"inputs":[{"name":"x","shape":[1],"datatype":"INT64","data":[1]}]'
    other = '"x":[' + ",".join(["[]"] * 2000) + "]"
    text = "{" + (f"{other},{tensor}" if position == "before" else f"{tensor},{other}") + "}"
    assert parse(text.encode(), Policy(max_json_values=1000)) == ((1,), [1])
    deep = text.replace("[]", "[" * 70 + "]" * 70, 1)
    with pytest.raises(InvalidInput, match="JSON nests too deep; the limit is 64"):
        body.parse_request(deep.encode(), None, POLICY)


def test_data_of_tensors_in_json_is_limited_in_bytes() -> None:
    numbers, texts = list(range(30_000)), [[f"a,{n}"] for n in range(30_000)]
    expected = [[text[0].encode()] for text in texts]
    policy = Policy(max_json_values=1000)
    assert parse(request(json.dumps(numbers), [30_000], "INT64"), policy) == ((30_000,), numbers)
    assert parse(request(json.dumps(texts), [30_000, 1], "BYTES"), policy) == ((30_000, 1), expected)
    text = request(json.dumps(numbers), [30_000], "INT64")
    assert parse(text, Policy(max_json_bytes=len(text))) is not None
    with pytest.raises(TooLarge, match=r"bytes \(max_json_bytes\), got \d+; send large tensors as binary data"):
        body.parse_request(text, None, Policy(max_json_bytes=len(text) - 1))


@pytest.mark.parametrize("depth", [64, 65])
@pytest.mark.parametrize("size", [3, 1 << 18])
def test_brackets_in_strings_do_not_count_as_depth(depth: int, size: int) -> None:
    text = b'{"t": "[[[\\"[[' + b"[" * 99 + b'", "a": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"
    with mock.patch.object(json_scan, "_BLOCK", size):
        if depth == 64:
            assert parse_json(text, POLICY)["t"] == '[[["[[' + "[" * 99
        else:
            with pytest.raises(InvalidInput, match="JSON nests too deep; the limit is 64"):
                parse_json(text, POLICY)


# --- documents -----------------------------------------------------------------------------------------------------


@many_examples
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.sampled_from(["<f4", "<f8", "<i8", "|b1"]))
def test_nested_arrays_are_serialized_in_chunks(shape: list[int], dtype: str) -> None:
    array = (np.arange(np.prod(shape)) / 3).reshape(shape).astype(dtype)
    for size in (1, 2, 5, 1 << 14):
        with mock.patch.object(json_text, "_CHUNK_ELEMENTS", size):
            assert orjson.loads(b"".join(json_chunks({"y": format_nested(array)})))["y"] == array.tolist()


def test_documents_with_long_texts_are_serialized_in_chunks() -> None:
    long = np.arange(600_000) / 8
    value = {
        "id": "\0 \\0",
        "y": format_nested(long),
        "z": [format_numbers(long), format_numbers(np.arange(40_000)), "\0"],
        "k": long,
    }
    chunks = json_chunks(value)
    assert max(map(len, chunks[:-1])) < 1 << 23, "a chunk is copied while the GIL is held"
    assert max(map(len, json_chunks({"y": format_nested(long)}))) < 1 << 20
    expected = {"id": "\0 \\0", "y": long.tolist(), "z": [long.tolist(), list(range(40_000)), "\0"], "k": long.tolist()}
    assert orjson.loads(b"".join(chunks)) == expected
    assert len(json_chunks({"y": [1.5]})) == 1
    with pytest.raises(TypeError, match="object"):
        json_chunks({"y": object()})


def test_large_arrays_are_parsed_into_shared_memory() -> None:
    count = LARGE // 8
    array = json_numbers.parse_array("x", FP64, b"[" + b"1," * (count - 1) + b"2]")
    assert find_buffer(array.data) is not None
    assert (array.size, float(array.sum()), array[-1]) == (count, count + 1, 2.0)


# --- other guards of payloads ---------------------------------------------------------------------------------------


def rows_with(change: Callable[[list[Any]], object]) -> str:
    """Return JSON of 40 rows of 20 numbers after a change: long enough for simdjson, in one piece."""
    rows = [[1000 + column for column in range(20)] for _ in range(40)]
    change(rows)
    return json.dumps(rows)


IRREGULAR = {
    "unequal lengths": rows_with(lambda rows: rows[7].append(rows[3].pop())),
    "unequal lengths, flat index in order": rows_with(lambda rows: rows[4].insert(0, rows[3].pop())),
    "list in place of a number": rows_with(lambda rows: rows[3].insert(5, [rows[3].pop(5)])),
    "number in place of a list": rows_with(lambda rows: rows.__setitem__(3, 5)),
    "number in place of a list, list in place of a number": rows_with(
        lambda rows: (rows.__setitem__(3, 5), rows[7].__setitem__(0, rows[7][:20]))
    ),
    "list in place of the last number": rows_with(lambda rows: rows[-1].append([rows[-1].pop()])),
}


@pytest.mark.parametrize("data", IRREGULAR.values(), ids=IRREGULAR.keys())
@pytest.mark.parametrize("datatype", [INT64, FP64, FP32])
def test_rows_of_unequal_depth_or_length_are_rejected(data: str, datatype: Datatype) -> None:
    assert parse(request(rows_with(len), [40, 20], datatype.name)) == ((40, 20), json.loads(rows_with(len)))
    assert parse(request(data, [40, 20], datatype.name)) is None


@pytest.mark.parametrize("datatype", [INT64, FP64, FP32])
def test_a_list_in_a_flat_array_is_rejected(datatype: Datatype) -> None:
    flat = list(range(1000))
    data = json.dumps([*flat[:-1], [flat[-1]]])
    assert json_numbers.parse_with_simdjson(json.dumps(flat).encode(), datatype) is not None
    assert json_numbers.parse_with_simdjson(data.encode(), datatype) is None
    assert parse(request(data, [1000], datatype.name)) is None


@pytest.mark.parametrize("data", ["[1,2,]", "[1, ,2]", "[1,]", "[ ,1]", "[,1]", "[,]"])
@pytest.mark.parametrize("size", [1, 2, 3, 1 << 18])
@pytest.mark.parametrize("datatype", ["INT64", "FP32", "FP16", "BOOL", "BYTES"])
def test_a_missing_value_between_commas_is_rejected(data: str, size: int, datatype: str) -> None:
    value = {"BOOL": "true", "BYTES": '"a"'}.get(datatype, "1")
    for shape in ([1], [2], [3]):
        text = request(data.replace("1", value).replace("2", value), shape, datatype)
        with pieces_of(size):
            assert parse(text) is None


@pytest.mark.parametrize("end", ["]", ",]", ",  ]"])
@pytest.mark.parametrize("datatype", ["INT64", "FP32", "FP16"])
def test_a_trailing_comma_at_a_chunk_boundary_is_rejected(end: str, datatype: str) -> None:
    count = (1 << 17) + 1  # the first comma from byte 2^18 on is the one behind the last number
    parsed = parse(request("[" + "1," * (count - 1) + "1" + end, [count], datatype))
    assert parsed == (None if "," in end else ((count,), [1] * count))


@pytest.mark.parametrize("count", [1, 5000])
def test_a_raw_bool_is_0_or_1(count: int) -> None:
    raw = bytearray(count)
    tensor = {"name": "x", "shape": [count], "datatype": "BOOL", "parameters": {"binary_data_size": count}}
    header = json.dumps({"inputs": [tensor]})
    assert not body.parse_request(header.encode(), memoryview(raw), POLICY).inputs["x"].data.any()
    raw[-1] = 2
    with pytest.raises(InvalidInput, match="input 'x': expected BOOL bytes of 0 or 1, got 2"):
        body.parse_request(header.encode(), memoryview(raw), POLICY)
