"""Error messages for invalid UM-Bridge requests and responses."""

from typing import Any

import pytest

from dragoman.core.errors import InvalidInput, InvalidOutput
from dragoman.formats.policy import Policy
from dragoman_simulators.umbridge.requests import InvalidUmBridgeRequest, parse_umbridge_request
from dragoman_simulators.umbridge.responses import parse_output


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
def test_requests_without_a_model_name_are_rejected(body: bytes, message: str) -> None:
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
def test_errors_name_the_invalid_field(field: bytes, message: str) -> None:
    request = parse_umbridge_request(b'{"name": "f", %s}' % field, Policy())
    assert isinstance(request, InvalidUmBridgeRequest)
    assert (request.name, request.error.message) == ("f", message)


def test_non_finite_numbers_are_rejected_if_configured() -> None:
    request = parse_umbridge_request(b'{"name": "f", "sens": [1, Infinity, NaN]}', Policy(nonfinite="error"))
    assert isinstance(request, InvalidUmBridgeRequest)
    assert request.error.message == "sens[1]: expected a finite number, got inf"


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
def test_invalid_responses_are_shown(text: bytes, several: bool, message: str) -> None:
    with pytest.raises(InvalidOutput) as caught:
        parse_output(text, several=several)
    assert caught.value.message == message


def test_every_field_is_parsed() -> None:
    request: Any = parse_umbridge_request(
        b'{"name": "f", "input": [[1, 2], []], "sens": [3], "vec": [4], "outWrt": 5, "inWrt": 6, "inWrt1": 7, '
        b'"inWrt2": 8, "config": {"a": [1]}}',
        Policy(),
    )
    assert [vector.tolist() for vector in request.input] == [[1, 2], []]
    assert (request.sens.tolist(), request.vec.tolist(), request.config) == ([3], [4], {"a": [1]})
    assert (request.outWrt, request.inWrt, request.inWrt1, request.inWrt2) == (5, 6, 7, 8)
