"""Responses over a WebSocket: the cases of Open Responses 2026-04-24, and more, with a real client."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
import websockets
from websockets.asyncio.client import ClientConnection

import dragoman
from access.access_models import KeyFile
from features.text.apis.test_open_responses import CALL, WEATHER, check, message
from loaded_models import recorded_models
from text_server import ReverseModel, TextServer, serve

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATH = "/v1/responses"
_ENDS = ("response.completed", "response.failed", "response.incomplete", "error")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[TextServer]:
    async with serve(ReverseModel) as server:
        yield server


@asynccontextmanager
async def connect(server: TextServer, **options: Any) -> AsyncIterator[ClientConnection]:
    async with websockets.connect(f"ws://127.0.0.1:{server.port}{PATH}", **options) as socket:
        yield socket


async def events(socket: ClientConnection) -> list[Any]:
    """Read the events of a turn."""
    found: list[Any] = []
    async with asyncio.timeout(30):
        while not found or found[-1]["type"] not in _ENDS:
            found.append(json.loads(await socket.recv()))
    return found


async def turn(socket: ClientConnection, value: Any, **fields: Any) -> Any:
    """Send a turn; return its last event."""
    await socket.send(json.dumps({"type": "response.create", "model": "ReverseModel", "input": value, **fields}))
    last = (await events(socket))[-1]
    if last["type"] != "error":
        check(last["response"])
    return last


def text_of(event: Any) -> str:
    return event["response"]["output"][0]["content"][0]["text"]  # type: ignore[no-any-return]


def code_of(event: Any) -> tuple[int, str, str | None]:
    return event["status"], event["error"]["code"], event["error"]["param"]


MISSING = (404, "previous_response_not_found", "previous_response_id")


async def test_a_turn_has_the_events_of_a_stream(server: TextServer) -> None:
    async with connect(server) as socket:
        create = {"type": "response.create", "model": "ReverseModel", "input": [message("user", "one two")]}
        await socket.send(json.dumps(create))
        found = await events(socket)
    assert [each["type"].removeprefix("response.") for each in found] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * 3,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    assert text_of(found[-1]) == "two one user:"
    stored = await server.request("GET", f"{PATH}/{found[-1]['response']['id']}")
    assert stored.json == found[-1]["response"]


async def test_turns_of_one_connection_follow_each_other(server: TextServer) -> None:
    async with connect(server) as socket:
        first, second = [await turn(socket, text, store=False) for text in ("first", "second")]
        assert (text_of(first), text_of(second)) == ("first user:", "second user:")
        for text in ("a", "b", "c"):  # without waiting for the responses
            await socket.send(json.dumps({"type": "response.create", "model": "ReverseModel", "input": text}))
        assert [text_of((await events(socket))[-1]) for _ in range(3)] == ["a user:", "b user:", "c user:"]


async def test_a_turn_continues_a_response_that_is_not_stored(server: TextServer) -> None:
    async with connect(server) as socket:
        first = await turn(socket, "cobalt", store=False)
        assert first["response"]["store"] is False
        second = await turn(socket, "again", store=False, previous_response_id=first["response"]["id"])
        assert text_of(second) == "again user: user: cobalt assistant: cobalt user:"
        assert second["response"]["previous_response_id"] == first["response"]["id"]
        third = await turn(socket, "end", store=False, previous_response_id=second["response"]["id"])
        assert third["type"] == "response.completed"
        messages = server.model().calls[-1].prompts[0].messages
        assert [each["content"] for each in messages[::2]] == ["cobalt", "again", "end"]
        # Only the last response is remembered.
        assert code_of(await turn(socket, "a", previous_response_id=first["response"]["id"])) == MISSING


async def test_a_stored_response_is_found_after_a_reconnect_and_another_is_not(server: TextServer) -> None:
    async with connect(server) as socket:
        unstored = await turn(socket, "copper", store=False)
        stored = await turn(socket, "silver")
    async with connect(server) as socket:
        found = await turn(socket, "a", store=False, previous_response_id=unstored["response"]["id"])
        assert code_of(found) == MISSING
        assert (await turn(socket, [message("user", "recovered")], store=False))["type"] == "response.completed"
        found = await turn(socket, "a", previous_response_id=stored["response"]["id"])
        assert found["type"] == "response.completed"


async def test_a_response_that_never_was_is_not_found(server: TextServer) -> None:
    async with connect(server) as socket:
        for id_ in ("resp_missing", ""):
            assert code_of(await turn(socket, "a", store=False, previous_response_id=id_)) == MISSING


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ([{"type": "function_call_output", "call_id": "call_missing", "output": "a"}], "error"),
        ([message("user", "!fault a b")], "response.failed"),
    ],
)
async def test_a_failed_turn_forgets_the_response_it_refers_to(server: TextServer, value: Any, kind: str) -> None:
    async with connect(server) as socket:
        first = await turn(socket, "a", store=False)
        previous = {"store": False, "previous_response_id": first["response"]["id"]}
        assert (await turn(socket, value, **previous))["type"] == kind
        assert code_of(await turn(socket, "stale", **previous)) == MISSING
        assert (await turn(socket, "a", store=False))["type"] == "response.completed"


async def test_a_compacted_conversation_begins_a_new_chain(server: TextServer) -> None:
    parts = [{"type": "input_text", "text": "Remember: slate."}]
    items = [message("user", parts), message("assistant", "OK.")]  # type: ignore[arg-type]
    compacted = (await server.post(f"{PATH}/compact", {"model": "ReverseModel", "input": items})).json["output"]
    async with connect(server) as socket:
        found = await turn(socket, [*compacted, message("user", "Go on.")], store=False, tools=[])
    assert found["type"] == "response.completed"


async def test_calls_and_their_results_over_one_connection_with_the_sdk(server: TextServer) -> None:
    async with (
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-") as client,
        client.responses.connect() as connection,
    ):
        tools: Any = [WEATHER]
        await connection.response.create(model="ReverseModel", input=CALL, tools=tools, store=False)
        async for event in connection:
            if event.type == "response.completed":
                break
        call = next(item for item in event.response.output if item.type == "function_call")
        assert call.arguments == '{"city":"Oslo"}'
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        await connection.response.create(
            model="ReverseModel", input=[result], tools=tools, store=False, previous_response_id=event.response.id
        )
        async for event in connection:
            if event.type == "response.completed":
                break
        assert "rain tool:" in event.response.output_text


async def test_a_turn_may_only_prepare_the_conversation(server: TextServer) -> None:
    calls = len(server.model().calls)
    async with connect(server) as socket:
        prepared = await turn(socket, "one two", store=False, generate=False)
        assert (prepared["type"], prepared["response"]["output"]) == ("response.completed", [])
        assert prepared["response"]["usage"]["input_tokens"] == 3
        assert len(server.model().calls) == calls
        found = await turn(socket, "three", store=False, previous_response_id=prepared["response"]["id"])
        assert text_of(found) == "three user: two one user:"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("{", "not valid JSON"),
        ("[]", "object"),
        ({"model": "ReverseModel", "input": "a"}, '`type` must be "response.create"; got null'),
        ({"type": "response.cancel"}, '`type` must be "response.create"; got "response.cancel"'),
        ({"stream": False}, "`stream` must be true or left out"),
        ({"background": True}, "`background`"),
        ({"generate": 5}, "`generate` must be true or false"),
        ({"input": None}, "`input` must be"),
        ({"temperature": "x"}, "`temperature` must be"),
        ({"model": "none"}, "none"),
    ],
)
async def test_errors_are_events_and_the_connection_stays_open(server: TextServer, body: Any, text: str) -> None:
    whole = {"type": "response.create", "model": "ReverseModel", "input": "a"}
    async with connect(server) as socket:
        is_whole = isinstance(body, str) or ("input" in body and "type" not in body and "model" in body)
        await socket.send(body if isinstance(body, str) else json.dumps(body if is_whole else {**whole, **body}))
        (error,) = await events(socket)
        assert text in error["error"]["message"]
        assert error["status"] == (404 if text == "none" else 400)
        assert isinstance(error["error"]["code"], str)
        assert (await turn(socket, "a", stream=True))["type"] == "response.completed"


async def test_parameters_without_effect_are_named_in_the_response(server: TextServer) -> None:
    async with connect(server) as socket:
        found = await turn(socket, "a", text={"verbosity": "low"})
        assert found["response"]["ignored_parameters"] == ["text.verbosity"]
        assert "ignored_parameters" not in (await turn(socket, "a"))["response"]


async def test_a_client_that_closes_cancels_the_generation(server: TextServer) -> None:
    model = server.model()
    model.gate.clear()
    cancelled = model.cancelled
    async with connect(server) as socket:
        await socket.send(json.dumps({"type": "response.create", "model": "ReverseModel", "input": "b !wait a"}))
        while json.loads(await socket.recv())["type"] != "response.output_text.delta":
            pass
        pong = await socket.ping()
        await asyncio.wait_for(pong, 30)  # answered in the middle of a response
    async with asyncio.timeout(30):
        while model.cancelled == cancelled or model.active:
            await asyncio.sleep(0.01)
    assert socket.close_code == 1000


async def test_a_long_message_in_fragments(server: TextServer) -> None:
    async with connect(server) as socket:
        create = {"type": "response.create", "model": "ReverseModel", "input": "x" * 300_000}
        data = json.dumps(create)
        await socket.send([data[i : i + 1000] for i in range(0, len(data), 1000)])
        assert text_of((await events(socket))[-1]) == "x" * 300_000 + " user:"


async def test_a_get_without_a_handshake_needs_an_upgrade(server: TextServer) -> None:
    response = await server.request("GET", PATH)
    assert (response.status, response.headers["upgrade"]) == (426, "websocket")


async def test_a_server_that_stops_completes_the_turn_and_closes() -> None:
    server = dragoman.Server(ReverseModel, http_port=0, grpc_port=-1, trial_s=0)
    with recorded_models() as loaded:
        async with server:
            target = TextServer(server.http_ports[0], loaded)
            model = target.model()
            async with connect(target) as idle, connect(target) as busy:
                create = {"type": "response.create", "model": "ReverseModel", "input": "b !wait a"}
                await busy.send(json.dumps(create))
                while json.loads(await busy.recv())["type"] != "response.output_text.delta":
                    pass
                stopping = asyncio.create_task(server.stop(30))
                with pytest.raises(websockets.ConnectionClosed):
                    await idle.recv()
                model.gate.set()
                assert (await events(busy))[-1]["type"] == "response.completed"
                with pytest.raises(websockets.ConnectionClosed):
                    await busy.recv()
                assert (idle.close_code, busy.close_code) == (1001, 1001)
            await stopping


async def test_connections_of_other_keys_do_not_share_responses(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.toml")
    one, two = ({"authorization": f"Bearer {keys.add(name)}"} for name in ("one", "two"))
    async with serve(api_keys=str(keys.path)) as server:
        with pytest.raises(websockets.InvalidStatus, match="401"):
            async with connect(server):
                pass
        async with (
            connect(server, additional_headers=one) as first,
            connect(server, additional_headers=two) as second,
        ):
            found = await turn(first, "a")
            assert code_of(await turn(second, "b", previous_response_id=found["response"]["id"])) == MISSING
            assert (await turn(first, "b", previous_response_id=found["response"]["id"]))["type"] == _ENDS[0]


async def test_pages_of_other_sites_get_no_connection(server: TextServer) -> None:
    with pytest.raises(websockets.InvalidStatus, match="403"):
        async with connect(server, origin="https://evil.example"):
            pass
    async with connect(server, origin=f"http://127.0.0.1:{server.port}") as socket:
        assert (await turn(socket, "a"))["type"] == "response.completed"
