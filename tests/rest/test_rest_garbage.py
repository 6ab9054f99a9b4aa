"""Fuzzing: random changes of REST requests get a well-formed response, and the server keeps running."""

import asyncio
import json
import string
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dragoman.core.datatypes import DATATYPES
from rest.rest_server import (
    Adder,
    Identity,
    KeepAliveClient,
    Phrase,
    Picture,
    RawResponse,
    RestServer,
    Trio,
    binary,
    inputs,
    request,
    serving,
    tensor,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[RestServer]:
    async with serving(Identity, Adder, Phrase, Picture, Trio) as server:
        yield server


LIVE = request("GET", "/v2/health/live")
JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.one_of(
                st.sampled_from(["inputs", "outputs", "id", "name", "shape", "datatype", "data", "parameters"]),
                st.text(string.printable, max_size=4),
            ),
            inner,
            max_size=5,
        ),
    ),
    max_leaves=30,
)
VALID = inputs(
    tensor("x", [2, 2], "INT32", [[1, 2], [3, 4]], parameters={"p": 1}),
    tensor("y", [1], "BYTES", ["text"]),
    tensor("z", [2], "FP32", [1.5, None]),
    id="1",
    parameters={"q": True},
    outputs=[{"name": "x", "parameters": {"binary_data": False}}],
)


def bodies() -> st.SearchStrategy[bytes]:
    text = json.dumps(VALID).encode()

    @st.composite
    def mutated(draw: st.DrawFn) -> bytes:
        """Replace, remove or duplicate some bytes of a valid request."""
        found = bytearray(text)
        for _ in range(draw(st.integers(1, 4))):
            at = draw(st.integers(0, len(found) - 1))
            length = draw(st.integers(0, 6))
            put = draw(st.one_of(st.binary(max_size=4), st.sampled_from([b'"', b"{", b"[", b"1e999", b"-", b"null"])))
            found[at : at + length] = put
        return bytes(found)

    @st.composite
    def replaced(draw: st.DrawFn) -> bytes:
        """Replace one value inside a valid request by another."""
        value: Any = json.loads(text)
        places = list(_places(value))
        where = draw(st.sampled_from(places))
        inner = value
        for key in where[:-1]:
            inner = inner[key]
        inner[where[-1]] = draw(JSON_VALUES)
        return json.dumps(value).encode()

    return st.one_of(mutated(), replaced(), JSON_VALUES.map(lambda v: json.dumps(v).encode()), st.binary(max_size=60))


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield (*path, key)
        yield from _places(value[key], (*path, key))


def check_decent(response: RawResponse) -> None:
    assert response.status in (200, 400), response
    if response.status == 400:
        assert response.error
    elif response.headers["content-type"] == "application/json":
        json.loads(response.body, parse_constant=_no_constant)


def _no_constant(word: str) -> None:
    raise AssertionError(f"{word} is not valid JSON")


async def test_random_changes_get_a_valid_response(server: RestServer) -> None:
    def attack() -> None:
        client = KeepAliveClient(server.port)

        @settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
        @given(bodies(), st.sampled_from(["Trio", "Adder", "Phrase"]))
        def send_request(body: bytes, model: str) -> None:
            check_decent(client.request(request("POST", f"/v2/models/{model}/infer", body)))
            assert client.request(LIVE).status == 200

        try:
            send_request()
        finally:
            client.close()

    await asyncio.to_thread(attack)


async def test_random_changes_of_binary_requests_get_a_valid_response(server: RestServer) -> None:
    def attack() -> None:
        client = KeepAliveClient(server.port)

        @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
        @given(
            st.sampled_from(list(DATATYPES)),
            st.lists(st.integers(-1, 5), max_size=3),
            st.one_of(st.integers(-2, 40), st.sampled_from([2**63, 2**70, True, "8", 1.0])),
            st.binary(max_size=40),
            st.one_of(
                st.none(), st.sampled_from(["0", "-1", "abc", "", " 5", "1_0", "99999999999999999999", "9" * 5000])
            ),
            st.sampled_from(["Identity", "Picture", "Phrase"]),
        )
        def send_request(
            datatype: str, shape: list[int], size: Any, raw: bytes, length: str | None, model: str
        ) -> None:
            given = {"name": "x", "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}
            body, headers = binary(inputs(given, parameters={"binary_data_output": True}), raw)
            if length is not None:
                headers = {"Inference-Header-Content-Length": length}
            check_decent(client.request(request("POST", f"/v2/models/{model}/infer", body, headers)))
            assert client.request(LIVE).status == 200

        try:
            send_request()
        finally:
            client.close()

    await asyncio.to_thread(attack)


async def test_random_bytes_do_not_stop_the_server(server: RestServer) -> None:
    def attack() -> None:
        @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.one_of(st.binary(max_size=80), _mutated_heads()))
        def send(raw: bytes) -> None:
            client = KeepAliveClient(server.port)
            client.send(raw)
            client.close()
            client = KeepAliveClient(server.port)
            assert client.request(LIVE).status == 200
            client.close()

        send()

    await asyncio.to_thread(attack)


@st.composite
def _mutated_heads(draw: st.DrawFn) -> bytes:
    found = bytearray(request("POST", "/v2/models/Identity/infer", VALID, {"Connection": "keep-alive"})[:160])
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(found) - 1))
        found[at : at + draw(st.integers(0, 5))] = draw(st.binary(max_size=4))
    return bytes(found)
