"""Fast paths of parsing give the same arrays, or the same errors, as the general parsers."""

import copy
import json
import pickle
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from dragoman.core import bytes_tensor
from dragoman.core.bytes_tensor import BytesTensor, came_as_text, flatten, texts_of, with_parameters
from dragoman.core.datatypes import BYTES, DATATYPES, FP32, INT64
from dragoman.core.errors import DragomanError, InvalidInput
from dragoman.core.tensor import Tensor, object_array
from dragoman.formats import body, json_data, json_numbers, raw, small_messages
from dragoman.formats.message import InferenceRequest
from dragoman.formats.policy import Policy

many_examples = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
SIMD_CLASS = json_numbers.simd_parser_class
SIMD = SIMD_CLASS() is not None
POLICY = Policy()
NEVER = 1 << 60


@contextmanager
def parsers(long_bytes: int, *, with_simd: bool, piece: int = 1 << 18, small_bytes: int = 0) -> Iterator[None]:
    """Set the sizes of long arrays, small messages and pieces, and enable or disable simdjson."""
    with (
        mock.patch.object(body, "INLINE", long_bytes),
        mock.patch.object(json_data, "THREAD", long_bytes),
        mock.patch.object(small_messages, "SMALL_BYTES", small_bytes),
        mock.patch.object(json_data, "LONG", long_bytes),
        mock.patch.object(json_numbers, "_PIECE", piece),
        mock.patch.object(json_numbers, "simd_parser_class", SIMD_CLASS if with_simd else lambda: None),
    ):
        yield


def result(parse: Callable[[], dict[str, Tensor]]) -> Any:
    """Return the tensors, or the error, in a form that can be compared."""
    try:
        tensors = parse()
    except DragomanError as error:
        return type(error), error.message
    return {n: (t.datatype, t.shape, t.data.dtype, _elements(t), dict(t.parameters)) for n, t in tensors.items()}


def _elements(tensor: Tensor) -> Any:
    return list(tensor.data.flat) if tensor.datatype is BYTES else tensor.data.tobytes()


def result_of_every_parser(text: bytes, policy: Policy = POLICY) -> Any:
    """Return the inputs of a request, or its error, after checking that all parsers agree."""

    def parse() -> dict[str, Tensor]:
        return dict(body.parse_request(text, None, policy).inputs)

    with parsers(NEVER, with_simd=False):
        plain = result(parse)
    with parsers(NEVER, with_simd=False, small_bytes=small_messages.SMALL_BYTES):
        assert result(parse) == plain
    for piece in (1 << 18, 8):
        for long_bytes in (2, 16):
            for with_simd in (False, True):
                with parsers(long_bytes, with_simd=with_simd, piece=piece):
                    actual = result(parse)
                if piece == 8 and isinstance(plain, tuple):  # the error may be of another element
                    assert isinstance(actual, tuple)
                else:
                    assert actual == plain, f"long {long_bytes}, piece {piece}, simdjson {with_simd}"
    return plain


# --- numbers ---------------------------------------------------------------------------------------------------

INTEGERS = [
    0,
    1,
    -1,
    127,
    128,
    -129,
    255,
    256,
    1 << 31,
    (1 << 53) + 1,
    (1 << 63) - 1,
    1 << 63,
    -(1 << 63),
    (1 << 64) - 1,
]
NUMBERS = [
    *map(str, INTEGERS),
    *("-0", "-0.0", "0.0", "1.0", "1e3", "2.5", "-7.25e-3", "0.1", "1e-400", "5e-324", "1e308", "3.5e38", "16777217"),
    *("18446744073709551616", "-9223372036854775809", "1e400", "9007199254740993.0", "1E+2"),
]
NOT_NUMBERS = [
    "null",
    "true",
    '"1"',
    "NaN",
    "-Infinity",
    "[]",
    "[1]",
    "{}",
    '{"data": [1, 2]}',
    "01",
    "1.",
    "+1",
    ".5",
    "",
    "1 2",
]
NUMBER_TEXTS = st.one_of(
    st.sampled_from(NUMBERS),
    st.integers(-(1 << 66), 1 << 66).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.floats(width=32, allow_nan=False, allow_infinity=False).map(repr),
)
ANY_TEXTS = st.one_of(
    NUMBER_TEXTS, NUMBER_TEXTS, NUMBER_TEXTS, NUMBER_TEXTS, NUMBER_TEXTS, st.sampled_from(NOT_NUMBERS)
)
KINDS = st.sampled_from(sorted(DATATYPES))
SPACE = st.sampled_from(["", "", " ", "\n", "\t \r\n", "\x0b"])


@st.composite
def lists(draw: st.DrawFn, element: st.SearchStrategy[str]) -> tuple[list[int], str]:
    """Draw a shape and the JSON of nested lists, which match in most cases."""
    shape = draw(st.sampled_from([[4], [12], [2, 3], [3, 1], [2, 2, 2], [1, 9], [0], [2, 0], []]))
    space = draw(SPACE)

    def nested(rest: list[int]) -> str:
        if not rest:
            return draw(element)
        count = rest[0] + draw(st.sampled_from([0] * 20 + [1, -1]))
        return f"[{space}{(space + ',' + space).join(nested(rest[1:]) for _ in range(count))}{space}]"

    flat = draw(st.booleans())
    return shape, nested([int(np.prod(shape))] if flat or not shape else shape)


def request_body(kind: str, shape: list[int], data: str, **more: str) -> bytes:
    fields = {"name": '"x"', "shape": json.dumps(shape), "datatype": f'"{kind}"', "data": data, **more}
    return ('{"inputs": [{' + ", ".join(f'"{k}": {v}' for k, v in fields.items()) + "}]}").encode()


@many_examples
@given(KINDS, lists(NUMBER_TEXTS))
@example("FP32", ([3], "[-0, -0.0, 0]"))
@example("FP64", ([2], "[18446744073709551616, -9223372036854775809]"))
@example("UINT64", ([2], "[18446744073709551615, 9223372036854775808]"))
@example("INT8", ([2], "[127, 128]"))
@example("INT32", ([2], "[1.0, 2e0]"))
@example("FP32", ([2], "[3.4028235e38, 3.5e38]"))
@example("FP32", ([2], "[3.4028235677973366e38, 1]"))
@example("FP16", ([2], "[65504, 65520]"))
@example("FP16", ([2, 2], "[[65519.9, 1e-8], [6e-8, 0.1]]"))
@example("FP64", ([2, 2], "[[1, 2], [3, 1.7976931348623159e308]]"))
@example("BOOL", ([2, 1], "[[true], [false]]"))
def test_all_parsers_return_the_same_numbers(kind: str, array: tuple[list[int], str]) -> None:
    result_of_every_parser(request_body(kind, *array))


@many_examples
@given(KINDS, lists(ANY_TEXTS))
@example("INT32", ([2, 2], "[[1, 2], [3]]"))
@example("INT32", ([2, 2], "[[1], [2, 3, 4]]"))
@example("INT32", ([3], "[1, [2, 3], []]"))
@example("INT32", ([2, 3], "[[1, [], [2, 3]], [4, 5, 6]]"))
@example("INT32", ([2, 2], "[[1, 2], 3, 4]"))
@example("INT32", ([2], "[1,,             2]"))
@example("INT32", ([0], "[             ,]"))
@example("BYTES", ([1], '["a",              ]'))
@example("BYTES", ([2], '["a]", "\\"]"]'))
@example("FP32", ([2], "[1, null]"))
@example("FP32", ([2], "[1, true]"))
@example("FP32", ([1], '[{"data": [1]}]'))
@example("FP32", ([2], "[10000000,20000000,]"))
@example("FP32", ([2], "[10000000,20000000, ]"))
@example("INT32", ([2], "[10000000,         ,20000000]"))
@example("FP32", ([3], "[,10000000,20000000,3]"))
@example("FP32", ([2], "[10000000,20000000"))
@example("FP32", ([2, 2], "[[1, 2], [3, 4]"))
@example("FP32", ([1], "[" * 200 + "]" * 200))
@example("FP32", ([1], "[" * 20_000))
def test_all_parsers_reject_with_the_same_message(kind: str, array: tuple[list[int], str]) -> None:
    result_of_every_parser(request_body(kind, *array))


LONG_DATA = "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]"
FIELDS = st.sampled_from(
    [
        f'"more": {LONG_DATA}',
        f'"data": {LONG_DATA}',
        '"data": [[[[1, 2, 3, 4, 5, 6, 7, 8, 9]]]]',
        f'"parameters": {{"data": {LONG_DATA}}}',
        '"parameters": {"p": "\\"data\\": [1, 2, 3, 4, 5, 6, 7, 8]"}',
        f'"\\"data": {LONG_DATA}',
        '"data": [[],0]',
        '"parameters": {"binary_data_size": 4}',
        '"parameters": {"data": 5}',
        '"data": []',
        '"data": 5',
        '"data": ["a", "[", "\\"data\\": [1, 2, 3, 4, 5, 6]"]',
        '"d\\u0061ta": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]',
        '"shape": [10]',
        '"shape": [2]',
        '"datatype": "FP32"',
        '"datatype": "BYTES"',
        '"name": "x"',
        '"name": "\\"data\\": [1, 2, 3, 4, 5, 6, 7, 8]"',
        f'"more": {{"data": {LONG_DATA}}}',
        f'"more": "{LONG_DATA}"',
    ]
)


@many_examples
@given(
    st.lists(st.lists(FIELDS, min_size=1, max_size=7), min_size=1, max_size=3),
    st.sampled_from(["", " ", "x", "]", "\0", f', "data": {LONG_DATA}', ', "id": "1"', ', "inputs": []']),
    st.sampled_from(["", "\ufeff", " "]),
    st.integers(1, 8),
)
def test_fields_of_any_order_and_number(tensors: list[list[str]], end: str, start: str, depth: int) -> None:
    inputs = [
        ", ".join([f'"name": "{i}", "shape": [10], "datatype": "INT64"', *fields]) for i, fields in enumerate(tensors)
    ]
    text = start + '{"inputs": [' + ", ".join(f"{{{i}}}" for i in inputs) + "]" + end + "}"
    result_of_every_parser(text.encode())
    result_of_every_parser(text.encode(), Policy(max_json_depth=depth))
    result_of_every_parser(text.encode(), Policy(nonfinite="literal"))


def test_a_list_that_looks_like_one_that_was_cut_out() -> None:
    long, marked = (f'"shape": [10], "datatype": "INT64", "data": {data}' for data in (LONG_DATA, "[[],0]"))
    text = f'{{"inputs": [{{"name": "a", {long}}}, {{"name": "b", {marked}}}]}}'
    kind, message = result_of_every_parser(text.encode())
    assert (kind, message.partition(":")[0]) == (InvalidInput, "input 'b'")


@pytest.mark.skipif(not SIMD, reason="simdjson is not installed")
@pytest.mark.parametrize("shape", [[100_000], [100, 1000], [10, 10, 1000]])
def test_long_arrays_are_parsed_by_simdjson(shape: list[int]) -> None:
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    text = request_body("FP32", shape, json.dumps(values.tolist()))
    with mock.patch.object(json_numbers, "_decode", side_effect=AssertionError):
        array = body.parse_request(text, None, POLICY).inputs["x"].data
    assert array.tobytes() == values.tobytes()
    assert not array.flags.writeable


def test_many_short_elements_share_one_buffer() -> None:
    elements = [b"a" * (1 + n % 255) for n in range(300)]
    with mock.patch.object(bytes_tensor, "_split_bytes", side_effect=AssertionError):
        tensor = raw.tensor_from_raw("x", BYTES, [300], encode_elements(elements), POLICY)
    assert list(tensor.data) == elements


@pytest.mark.parametrize("count", [1, 300])
def test_tensors_of_raw_bytes_keep_their_parameters(count: int) -> None:
    tensor = raw.tensor_from_raw("x", BYTES, [count], encode_elements([b"ab"] * count), POLICY, {"p": 1})
    assert tensor.parameters == {"p": 1}
    assert list(tensor.data) == [b"ab"] * count


def test_parsing_without_simdjson() -> None:
    text = request_body("INT64", [1000], json.dumps(list(range(1000))))
    with mock.patch.object(json_numbers, "simd_parser_class", return_value=None):
        assert body.parse_request(text, None, POLICY).inputs["x"].data.tolist() == list(range(1000))


@pytest.mark.skipif(not SIMD, reason="simdjson is not installed")
def test_simdjson_is_reused_after_invalid_text() -> None:
    good, bad = b"[1, 2, 3]", b"[1, true, 3]"
    for _ in range(3):
        assert json_numbers.parse_with_simdjson(bad, INT64) is None
        array = json_numbers.parse_with_simdjson(good, INT64)
        assert array is not None
        assert array.tolist() == [1, 2, 3]


# --- BYTES -----------------------------------------------------------------------------------------------------

ELEMENTS = st.lists(
    st.one_of(
        st.text(max_size=4).map(str.encode),
        st.binary(max_size=5),
        st.sampled_from([b"", b"\0", b"\0\0\0", b"\1\0\0\0a", b"x" * 255, b"x" * 256, b"value"]),
    ),
    max_size=40,
)
TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), min_size=1, max_size=40)


def encode_elements(elements: list[bytes]) -> bytes:
    """Encode elements as binary tensor data: the length of each as 4 bytes, then its bytes."""
    return b"".join(struct.pack("<I", len(e)) + e for e in elements)


@many_examples
@given(ELEMENTS, st.booleans())
def test_bytes_elements_are_decoded_and_encoded(elements: list[bytes], narrow: bool) -> None:
    if narrow:
        elements = [e.replace(b"\0", b"") or b"-" for e in elements]
    text = encode_elements(elements)
    for min_packed in (1, NEVER):
        with mock.patch.object(bytes_tensor, "_FEW", min_packed):
            tensor = raw.tensor_from_raw("x", BYTES, [len(elements)], text, POLICY)
            assert tensor.shape == (len(elements),)
            assert bytes(raw.raw_from_tensor(tensor)) == text
            assert list(tensor.data) == elements
            assert bytes(raw.raw_from_tensor(tensor)) == text
            assert bytes(raw.raw_from_tensor(Tensor(object_array(elements, (len(elements),)), BYTES))) == text


@many_examples
@given(st.binary(max_size=60), st.integers(0, 12))
@example(encode_elements([b"ab"] * 4) + b"\0", 4)
@example(encode_elements([b"ab"] * 4)[:-1], 4)
@example(encode_elements([b"ab"] * 4), 3)
@example(encode_elements([b"abc", b"ab", b"abc"]).replace(b"\2", b"\3"), 3)  # a length that leads into the next one
def test_invalid_lengths_are_rejected_with_the_same_message(text: bytes, count: int) -> None:
    results = []
    for min_packed in (1, NEVER):
        with mock.patch.object(bytes_tensor, "_FEW", min_packed):
            results.append(result(lambda: {"x": raw.tensor_from_raw("x", BYTES, [count], text, POLICY)}))
    assert results[0] == results[1]


@pytest.mark.parametrize("data", ['["a", "ü"]', '[["a"], ["ü"]]', ' [ ["a"] , ["ü"] ] '])
def test_json_elements_are_marked_as_text(data: str) -> None:
    tensor = body.parse_request(request_body("BYTES", [2, 1], data), None, POLICY).inputs["x"]
    assert came_as_text(tensor)
    assert tensor.data.tolist() == [[b"a"], ["ü".encode()]]
    assert not came_as_text(raw.tensor_from_raw("x", BYTES, [2, 1], encode_elements([b"a", b"b"]), POLICY))
    many = raw.tensor_from_raw("x", BYTES, [20], encode_elements([b"ab"] * 20), POLICY)
    assert texts_of(many) == ["ab"] * 20
    for other in (many, pickle.loads(pickle.dumps(many)), with_parameters(many, {"p": 1})):
        assert not came_as_text(other)  # although the texts are known


@many_examples
@given(TEXTS)
def test_text_is_the_same_from_json_and_binary(texts: list[str]) -> None:
    count = len(texts)
    elements = [t.encode() for t in texts]
    plain = Tensor(object_array(elements, (count,)), BYTES)
    tensors = [
        BytesTensor.of_texts(list(texts), (count,)),
        BytesTensor.of_any_texts(list(texts), (count,)),
        plain,
        raw.tensor_from_raw("x", BYTES, [count], encode_elements(elements), POLICY),
        InferenceRequest.from_json(request_body("BYTES", [count], json.dumps(texts))).inputs[0].tensor,
    ]
    for tensor in tensors:
        copies = [tensor, pickle.loads(pickle.dumps(tensor)), copy.copy(tensor), copy.deepcopy(tensor)]
        for variant in (
            *copies,
            with_parameters(tensor, {"p": 1}),
            flatten(tensor),
            structs.replace(tensor, parameters={"p": 1}),
        ):
            assert variant.datatype is BYTES
            assert variant.shape == (count,)
            assert texts_of(variant) == texts
            assert bytes(raw.raw_from_tensor(variant)) == encode_elements(elements)
            assert list(variant.data) == elements
            assert json_data.json_from_tensor("x", variant, POLICY) == texts


@many_examples
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5) | st.just('",'), max_size=40), st.data())
def test_many_texts_of_json_are_encoded_when_they_are_parsed(texts: list[str], data: st.DataObject) -> None:
    """The event loop would otherwise encode them for a worker process."""
    between = [data.draw(st.sampled_from([",", ", ", " ,\n"])) for _ in texts]
    dumped = (json.dumps(text, ensure_ascii=data.draw(st.booleans())) for text in texts)
    text = "[" + "".join(f"{each}{comma}" for each, comma in zip(dumped, between, strict=True)).rstrip(", \n") + "]"
    with (
        mock.patch.object(json_data, "THREAD", 2),
        mock.patch.object(json_data, "_SHORT_TEXT", NEVER),
        mock.patch.object(json_numbers, "_PIECE", data.draw(st.integers(1, 30))),
    ):
        tensor = body.parse_request(request_body("BYTES", [len(texts)], text), None, POLICY).inputs["x"]
        with pytest.raises(InvalidInput, match=rf"needs {len(texts) + 1} elements, got {len(texts)}"):
            body.parse_request(request_body("BYTES", [len(texts) + 1], text), None, POLICY)
    assert isinstance(tensor, BytesTensor) == bool(texts)
    if isinstance(tensor, BytesTensor):
        # pieces end where a text seems to end: before a text that begins with a comma they are one
        assert tensor.is_raw or any(each.startswith(",") for each in texts)
    assert texts_of(tensor) == texts
    assert tensor.data.tolist() == [each.encode() for each in texts]
    assert pickle.loads(pickle.dumps(tensor)).data.tolist() == tensor.data.tolist()


def test_lazy_elements_are_read_only_and_created_once() -> None:
    tensor = BytesTensor.of_texts(["a", "b"], (2, 1), {"p": 1})
    assert tensor.shape == tensor.data.shape == (2, 1)
    assert tensor.data is tensor.data
    assert not tensor.data.flags.writeable
    assert flatten(tensor).shape == (2,)
    assert with_parameters(tensor, {"q": 2}).parameters == {"q": 2}
    with pytest.raises(AttributeError):
        tensor.data = None  # type: ignore[misc, assignment]


def test_text_that_utf8_cannot_encode() -> None:
    with pytest.raises(UnicodeEncodeError):
        BytesTensor.of_any_texts(["a", "\ud800"], (2,))
    with pytest.raises(UnicodeDecodeError):
        BytesTensor.of_raw(b"\1\0\0\0\xff", np.array([0]), (1,)).texts()


def test_numbers_keep_their_parameters() -> None:
    flat = flatten(Tensor(np.zeros((2, 1), np.float32), FP32, {"p": 1}))
    assert (flat.shape, flat.parameters) == ((2,), {"p": 1})
    with pytest.raises(InvalidInput):
        json_data.tensor_from_json("x", FP32, [2], [1.0], POLICY)


@pytest.mark.parametrize("kind", [k for k in sorted(DATATYPES) if k not in ("BF16", "BYTES")])
@pytest.mark.parametrize("shape", [[4], [2, 2], [1, 4, 1]])
def test_small_tensors_take_the_fast_path(kind: str, shape: list[int]) -> None:
    values = np.array([True, False, True, True]) if kind == "BOOL" else np.array([1, 2, 3, 4])
    flat, nested = values.tolist(), values.reshape(shape).tolist()
    for data in (flat, nested) if len(shape) < 3 else (flat,):
        text = request_body(kind, shape, json.dumps(data))
        with mock.patch.object(body, "tensor_from_json", side_effect=AssertionError):
            array = body.parse_request(text, None, POLICY).inputs["x"].data
        assert array.dtype == DATATYPES[kind].dtype
        assert not array.flags.writeable
        assert array.tolist() == values.reshape(shape).tolist()


@pytest.mark.parametrize("policy", [Policy(max_elements=3), Policy(max_rank=1)])
def test_limits_of_small_tensors(policy: Policy) -> None:
    with pytest.raises(InvalidInput, match=r"expected at most|more elements"):
        body.parse_request(request_body("INT32", [2, 2], "[1, 2, 3, 4]"), None, policy)
