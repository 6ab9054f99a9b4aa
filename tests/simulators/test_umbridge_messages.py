"""The whole message for each thing that can be wrong with a UM-Bridge request or with a server's answer."""

from typing import Any

import pytest

from dragoman.core.errors import InvalidInput, InvalidOutput
from dragoman.formats.policy import Policy
from dragoman.formats.umbridge import InvalidUmBridgeRequest, parse_umbridge_request
from dragoman.formats.umbridge_response import parse_output


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[]", "the request is not a JSON object: got an array"),
        (b"3", "the request is not a JSON object: got an integer"),
        (b"null", "the request is not a JSON object: got null"),
        (b"{}", "'name' is missing; expected the name of a model"),
        (b'{"name": 3}', "'name': expected the name of a model, got an integer"),
        (b'{"name": null}', "'name': expected the name of a model, got null"),
    ],
)
def test_a_request_that_names_no_model_is_rejected(body: bytes, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_umbridge_request(body, Policy())
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (b'"input": 3', "'input': expected an array of vectors, got 3"),
        (b'"input": [3]', "input[0]: expected an array of numbers, got 3"),
        (b'"input": [[1], [1, "x"]]', "input[1][1]: expected a number, got 'x'"),
        (b'"input": [[true]]', "input[0][0]: expected a number, got a boolean"),
        (b'"sens": {}', "sens: expected an array of numbers, got an object"),
        (b'"vec": [null]', "vec[0]: expected a number, got null"),
        (b'"vec": [1%s]' % (b"0" * 400), "vec: an integer in it does not fit into a double"),
        (b'"outWrt": 1.5', "'outWrt': expected an integer, got 1.5"),
        (b'"inWrt": "1"', "'inWrt': expected an integer, got '1'"),
        (b'"config": [1]', "'config': expected an object, got an array"),
    ],
)
def test_a_field_that_is_wrong_is_named(field: bytes, message: str) -> None:
    found = parse_umbridge_request(b'{"name": "f", %s}' % field, Policy())
    assert isinstance(found, InvalidUmBridgeRequest)
    assert (found.name, found.error.message) == ("f", message)


def test_infinite_numbers_are_named_where_they_are_not_wanted() -> None:
    found = parse_umbridge_request(b'{"name": "f", "sens": [1, Infinity, NaN]}', Policy(nonfinite="error"))
    assert isinstance(found, InvalidUmBridgeRequest)
    assert found.error.message == "sens[1]: expected a finite number, got inf"


@pytest.mark.parametrize(
    ("text", "several", "message"),
    [
        (b"<html>", True, "the response is not valid: expected an output, got b'<html>'"),
        (b"[]", False, "the response is not valid: expected an output, got b'[]'"),
        (b"{}", True, "the response is not valid: expected an output, got b'{}'"),
        (b"x" * 300, True, f"the response is not valid: expected an output, got b'{'x' * 200}'"),
        (b'{"output": 5}', True, "the response is not valid: expected a list of vectors, got b'{\"output\": 5}'"),
        (b'{"output": [1]}', True, "the response is not valid: expected a list of vectors, got b'{\"output\": [1]}'"),
        (b'{"output": 5}', False, "the response is not valid: expected a vector, got b'{\"output\": 5}'"),
        (b'{"output": [["a"]]}', True, "the response is not valid: expected numbers in 'output', got 'a'"),
        (b'{"output": [true]}', False, "the response is not valid: expected numbers in 'output', got True"),
    ],
)
def test_an_answer_that_is_none_is_shown(text: bytes, several: bool, message: str) -> None:
    with pytest.raises(InvalidOutput) as caught:
        parse_output(text, several=several)
    assert caught.value.message == message


def test_a_vector_is_read_with_its_place() -> None:
    found: Any = parse_umbridge_request(
        b'{"name": "f", "input": [[1, 2], []], "sens": [3], "vec": [4], "outWrt": 5, "inWrt": 6, "inWrt1": 7, '
        b'"inWrt2": 8, "config": {"a": [1]}}',
        Policy(),
    )
    assert [vector.tolist() for vector in found.input] == [[1, 2], []]
    assert (found.sens.tolist(), found.vec.tolist(), found.config) == ([3], [4], {"a": [1]})
    assert (found.outWrt, found.inWrt, found.inWrt1, found.inWrt2) == (5, 6, 7, 8)
