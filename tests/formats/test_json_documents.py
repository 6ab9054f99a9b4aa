"""Lists of JSON documents have the same values whether they are parsed and converted at once or in pieces."""

import re
from typing import Any
from unittest import mock

import numpy as np
import pytest

from dragoman.core.errors import InvalidInput
from dragoman.core.signature import TensorSpec
from dragoman.formats import fast_json, json_document
from dragoman.formats.policy import Policy
from dragoman.protocols import json_arrays

MIB = 1 << 20


@pytest.mark.parametrize(
    "values",
    [
        [1, 2, 3, 4, 5],
        [1, 2, 3, 4, 1 << 63],
        [1, 2, 3, (1 << 53) + 1, 2.5],
        [True, False, True, True, 2],
        [0.5, 1.5, 2.5, 3.5, 4.5],
        [[1, 2], [3, 4], [5, 6]],
        ["a", "bc", "d", "e", "f"],
    ],
)
def test_lists_in_pieces_are_arrays_of_the_same_dtype(values: list[Any]) -> None:
    def parse() -> Any:
        return json_arrays.parse_tensor(values, TensorSpec("x"), "x")

    whole = parse()
    with mock.patch.object(json_arrays, "_PIECE", 2):
        parsed = parse()
    assert (parsed.datatype, parsed.data.dtype, parsed.data.tolist()) == (
        whole.datatype,
        whole.data.dtype,
        whole.data.tolist(),
    )


def test_ragged_lists_in_pieces_are_rejected() -> None:
    with mock.patch.object(json_arrays, "_PIECE", 2), pytest.raises(InvalidInput, match="input 'x': "):
        json_arrays.parse_tensor([[1], [2], [3, 4], [5, 6]], TensorSpec("x"), "x")
    assert np.array_equal(json_arrays._array([[1]]), [[1]])


@pytest.mark.parametrize(
    "text",
    [
        b'{"instances": [%s], "a": 1}' % b"1,".join([b""] * MIB + [b"2"]),
        b'{"a": [%s], "a": [1]}' % b"-1.5e3, null, true,\n".join([b""] * (MIB // 8) + [b"[]"]),
        b'{"a": {"b": [%s]}}' % b"1,".join([b""] * MIB + [b"2"]),
        b'{"a": [%s]}' % b'"x,y",'.join([b""] * (MIB // 4) + [b"2"]),
        b"[%s]" % b"1,".join([b""] * MIB + [b"2"]),
        b'{"a": [%s2]}' % (b" " * 2 * MIB),
        b'{"a": [1,,%s2]}' % (b" " * 2 * MIB),
        b'{"a": [1,%s]}' % (b" " * 2 * MIB),
        b'{"a": [%s]}' % b"1,".join([b""] * MIB + [b"02"]),
        b'{"a": [%s], "b": nan}' % b"1,".join([b""] * MIB + [b"2"]),
        b'{"\xff": [%s]}' % b"1,".join([b""] * MIB + [b"2"]),
        b'{"a": [%s]' % b"1,".join([b""] * MIB + [b"2"]),
    ],
    ids=lambda text: f"{text[:9]!r}...{text[-9:]!r}",
)
def test_long_documents_have_the_values_and_the_errors_of_short_ones(text: bytes) -> None:
    assert len(text) > MIB
    policy = Policy(max_json_values=1 << 30)
    expected, message = None, ""
    try:
        expected = fast_json.loads(text)
    except fast_json.JSONDecodeError as error:
        reason = "expected text in UTF-8, got the byte 0xff at offset 2" if b"\xff" in text else error
        message = f"the request body is not valid JSON: {reason}"
    if message:
        with pytest.raises(InvalidInput, match=f"^{re.escape(message)}$"):
            json_document.parse_document(text, policy)
    else:
        assert json_document.parse_document(text, policy) == expected


def test_documents_of_many_members_are_parsed_at_once() -> None:
    expected = {f"{i:0300}": i for i in range(8000)}
    with mock.patch.object(fast_json, "loads", wraps=fast_json.loads) as loads:
        assert json_document.parse_document(fast_json.dumps(expected), Policy()) == expected
    assert loads.call_count == 1


def test_long_lists_of_numbers_are_parsed_in_pieces() -> None:
    """While a text is parsed, no other thread runs, so that health checks would wait for the whole body."""
    text = b'{"instances": [%s2]}' % (b"1," * (4 * MIB))
    with mock.patch.object(fast_json, "loads", wraps=fast_json.loads) as loads:
        document = json_document.parse_document(text, Policy())
    assert document == {"instances": [1] * (4 * MIB) + [2]}
    assert max(len(call.args[0]) for call in loads.call_args_list) < MIB
