"""Clauses of Open Responses, edition 2026-04-24: what its suite of 17 cases checks, over HTTP and a WebSocket."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dragoman_check.conformance.clauses import (
    ClauseList,
    NotOffered,
    NotTried,
    Protocol,
    expect,
    fail,
    field_of,
)
from dragoman_check.conformance.http import HttpTarget, RecordedResponse
from dragoman_check.conformance.target import Target

_PATH = "/v1/responses"
_COMPACT = f"{_PATH}/compact"
_NONE = type(None)
_NUMBER = (int, float)
_STATUSES = ("completed", "incomplete")
_ENDS = ("response.completed", "response.failed", "response.incomplete", "error")
_NOT_FOUND = "previous_response_not_found"
_FIELDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("id", "status", "model", "truncation", "service_tier"), (str,)),
    **dict.fromkeys(("created_at", "top_logprobs"), (int,)),
    **dict.fromkeys(("output", "tools"), (list,)),
    **dict.fromkeys(("parallel_tool_calls", "store", "background"), (bool,)),
    **dict.fromkeys(("top_p", "temperature", "presence_penalty", "frequency_penalty"), _NUMBER),
    **dict.fromkeys(("completed_at", "max_output_tokens", "max_tool_calls"), (int, _NONE)),
    **dict.fromkeys(("previous_response_id", "instructions", "safety_identifier", "prompt_cache_key"), (str, _NONE)),
    **dict.fromkeys(("incomplete_details", "error", "reasoning"), (dict, _NONE)),
    "tool_choice": (str, dict),
    "text": (dict,),
}
# A red square of 1 by 1.
_IMAGE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR42mP4z8AAAAMBAQAY3Y2wAAAAAElFTkSuQmCC"
)
_TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a place",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
CLAUSES = ClauseList("responses")
_add = CLAUSES.add


@dataclass(slots=True)
class ResponsesContext:
    """The server and a model that answers."""

    http: HttpTarget
    model: str

    def body(self, value: Any, **fields: Any) -> dict[str, Any]:
        return {"model": self.model, "input": value, "max_output_tokens": 16, **fields}

    def create(self, value: Any, **fields: Any) -> RecordedResponse:
        return self.http.post(_PATH, self.body(value, **fields))

    def turns(self, *bodies: Any) -> "list[list[Any]]":
        """Return the events of turns on one WebSocket connection.

        A body may be a function of the events so far.
        """
        with self.http.conversation(_PATH) as talk:
            turns: list[list[Any]] = []
            for body in bodies:
                fields = body(turns) if callable(body) else body
                event = {"type": "response.create", "model": self.model, "max_output_tokens": 16, **fields}
                response = talk(event, _is_end)
                turns.append(response.json_lines())
            return turns


def _is_end(event: Any) -> bool:
    return isinstance(event, dict) and event.get("type") in _ENDS


def _prepare(target: Target) -> ResponsesContext:
    response = target.http.get("/v1/models")
    try:
        listed = [each["id"] for each in response.json()["data"]] if response.status == 200 else []
    except (LookupError, TypeError):
        listed = []
    names = [name for name in listed if name in target.models] if target.models else listed
    status = response.status
    for name in (names or list(target.models))[:10]:
        answer = target.http.post(_PATH, {"model": name, "input": "Say hello.", "max_output_tokens": 16})
        if answer.status == 200:
            return ResponsesContext(target.http, name)
        status = answer.status
    raise NotOffered(f"no model answers POST v1/responses: status {status}")


def _message(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content, **fields}


def _check(answer: Any) -> dict[str, Any]:
    """Return a response that has every required field of the schema, with items of it."""
    for name, kinds in _FIELDS.items():
        field_of(answer, name, kinds)
    expect(answer.get("object") == "response", "object 'response'", answer.get("object"))
    field_of(field_of(answer["text"], "format", dict, "'text'"), "type", str, "'text.format'")
    expect("metadata" in answer, "'metadata'", list(answer))
    _check_usage(field_of(answer, "usage", (dict, _NONE)))
    for item in answer["output"]:
        _check_item(item)
    return answer  # type: ignore[no-any-return]


def _check_usage(usage: Any) -> None:
    if usage is None:
        return
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        field_of(usage, name, int, "'usage'")
    field_of(field_of(usage, "input_tokens_details", dict, "'usage'"), "cached_tokens", int, "'usage'")
    field_of(field_of(usage, "output_tokens_details", dict, "'usage'"), "reasoning_tokens", int, "'usage'")


def _check_item(item: Any) -> None:
    kind = field_of(item, "type", str, "an item")
    field_of(item, "id", str, "an item")
    if kind == "message":
        expect(field_of(item, "role", str, "a message") in ("user", "assistant", "system", "developer"), "a role", item)
        expect(item.get("phase") in (None, "commentary", "final_answer"), "a phase of the standard", item)
        expect(item.get("status") in ("in_progress", *_STATUSES), "a status", item)
        for part in field_of(item, "content", list, "a message"):
            if field_of(part, "type", str, "a part") == "output_text":
                field_of(part, "text", str, "a part")
                field_of(part, "annotations", list, "a part")
    elif kind == "function_call":
        for name in ("call_id", "name", "arguments", "status"):
            field_of(item, name, str, "a function_call")
    elif kind == "compaction":
        field_of(item, "encrypted_content", str, "a compaction")


def _done(answer: Any) -> dict[str, Any]:
    """Return a response that has ended, with an output. At most 16 tokens are asked for, so that it may be cut."""
    response = _check(answer)
    expect(response["status"] in _STATUSES, "status completed or incomplete", response["status"])
    expect(response["output"], "output items", response["output"])
    return response


def _last(events: Sequence[Any]) -> dict[str, Any]:
    """Return the response in which a turn ends, after checking its events."""
    expect(events, "events", "none")
    numbers = [field_of(event, "sequence_number", int, "an event") for event in events]
    expect(numbers == [*range(numbers[0], numbers[0] + len(numbers))], "sequence numbers in their order", numbers[:8])
    kinds = [field_of(event, "type", str, "an event") for event in events]
    expect(kinds[0] == "response.created", "response.created as the first event", kinds[0])
    expect(kinds[-1] in _ENDS[:3], "response.completed or response.incomplete as the last event", kinds[-1])
    for event in events:
        if "response" in event:
            _check(event["response"])
    deltas = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    response = _done(events[-1]["response"])
    expect(deltas == _text(response), f"deltas of the text '{_text(response)}'", deltas)
    return response


def _text(response: Mapping[str, Any]) -> str:
    messages = [item for item in response["output"] if item["type"] == "message"]
    return "".join(part["text"] for item in messages for part in item["content"] if part["type"] == "output_text")


def _error_code(events: Sequence[Any]) -> str:
    """Return the code of the error in which a turn ends, "" if it does not fail."""
    last = events[-1]
    if last.get("type") == "error":
        field_of(last, "status", int, "the error event")
        error = field_of(last, "error", dict, "the error event")
        field_of(error, "message", str, "'error'")
        return str(field_of(error, "code", str, "'error'"))
    response = field_of(last, "response", dict, "the last event")
    return str((response.get("error") or {}).get("code") or "")


# --- over HTTP ---------------------------------------------------------------------------------------------------


@_add("basic-response", "ResponseResource")
def _basic(c: ResponsesContext) -> None:
    """A response has every required field and an output."""
    _done(c.create([_message("user", "Say hello.")]).ok().json())


@_add("assistant-phase", "AssistantMessageItemParam, phase")
def _phase(c: ResponsesContext) -> None:
    """Earlier messages of the assistant may have a phase."""
    earlier = [
        _message("assistant", "I look it up.", phase="commentary"),
        _message("assistant", "It is four.", phase="final_answer"),
    ]
    _done(c.create([*earlier, _message("user", "Repeat it.")]).ok().json())


@_add("response-output-phase-schema", "Message, phase")
def _output_phase(c: ResponsesContext) -> None:
    """A phase of a message in the output is commentary or final_answer, and may be sent back."""
    first = _done(c.create([_message("user", "Say hello.")]).ok().json())
    _done(c.create([_message("user", "Say hello."), *first["output"], _message("user", "Again.")]).ok().json())


@_add("streaming-response", "Streaming HTTP Responses")
def _streaming(c: ResponsesContext) -> None:
    """A stream has numbered events, deltas that are the text, a last response, and ends with [DONE]."""
    response = c.create([_message("user", "Count to five.")], stream=True).ok()
    expect(response.media_type == "text/event-stream", "text/event-stream", response.media_type)
    events = response.events()
    expect(events and events[-1] == "[DONE]", "a last event [DONE]", events[-1:] or "no events")
    _last(response.json_events())


@_add("system-prompt", "SystemMessageItemParam")
def _system(c: ResponsesContext) -> None:
    """The input may begin with a message of the system."""
    _done(c.create([_message("system", "Be brief."), _message("user", "Say hello.")]).ok().json())


@_add("tool-calling", "tool_choice")
def _tools(c: ResponsesContext) -> None:
    """A function that tool_choice names is called."""
    choice = {"type": "function", "name": "get_weather"}
    body = c.body("How is the weather in Oslo?", tools=[_TOOL], tool_choice=choice, max_output_tokens=64)
    response = _done(c.http.post(_PATH, body).ok().json())
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    expect(calls, "an item function_call", response["output"])
    expect(calls[0]["name"] == "get_weather", "a call of get_weather", calls[0])


@_add("image-input", "InputImageContentParam")
def _image(c: ResponsesContext) -> None:
    """A message of the user may have an image as a data URL."""
    parts = [{"type": "input_text", "text": "Which colour?"}, {"type": "input_image", "image_url": _IMAGE}]
    response = c.create([_message("user", parts)])
    if response.status in (400, 422):
        raise NotOffered(f"the model takes no images: status {response.status}")
    _done(response.ok().json())


@_add("multi-turn", "input")
def _multi_turn(c: ResponsesContext) -> None:
    """The input may be a conversation of several turns."""
    turns = [_message("user", "I am Alice."), _message("assistant", "Hello!"), _message("user", "Who am I?")]
    _done(c.create(turns).ok().json())


@_add("compact-response", "CompactResource")
def _compact(c: ResponsesContext) -> None:
    """A conversation is compacted to items, one of them a compaction."""
    turns = [_message("user", "We launch on Tuesday."), _message("assistant", "Understood.")]
    body = {"model": c.model, "input": turns, "prompt_cache_key": "dragoman-check"}
    answer = c.http.post(_COMPACT, body).expect_offered("POST v1/responses/compact").json()
    _check_compaction(answer)


def _check_compaction(answer: Any) -> list[Any]:
    field_of(answer, "id", str)
    expect(field_of(answer, "object", str) == "response.compaction", "object response.compaction", answer["object"])
    field_of(answer, "created_at", int)
    _check_usage(field_of(answer, "usage", dict))
    output: list[Any] = field_of(answer, "output", list)
    for item in output:
        _check_item(item)
    expect(any(item["type"] == "compaction" for item in output), "an item compaction", output)
    return output


@_add("compact-missing-model", "CompactResponseMethodPublicBody, model")
def _compact_without_model(c: ResponsesContext) -> None:
    """A compaction without a model gets status 400 or 422."""
    response = c.http.post(_COMPACT, {"input": [_message("user", "Compact this.")]})
    if response.status in (404, 405):
        raise NotOffered(f"POST v1/responses/compact gets status {response.status}")
    response.expect_rejected(400, 422)


# --- over a WebSocket --------------------------------------------------------------------------------------------


def _after(turn: int, value: Any) -> Any:
    """Return a function that continues the response of a turn."""

    def body(turns: Sequence[Sequence[Any]]) -> dict[str, Any]:
        return {"store": False, "input": value, "previous_response_id": turns[turn][-1]["response"]["id"]}

    return body


_FIRST = {"store": False, "input": "Remember the word cobalt."}


@_add("websocket-response", "WebSocket transport")
def _websocket(c: ResponsesContext) -> None:
    """A response is created over a WebSocket, with the events of a stream as messages."""
    (events,) = c.turns({"input": [_message("user", "Count to three.")]})
    _last(events)


@_add("websocket-sequential-responses", "WebSocket transport, turns")
def _websocket_turns(c: ResponsesContext) -> None:
    """Several responses are created over one connection, one after the other."""
    first, second = (_last(events) for events in c.turns(_FIRST, {"store": False, "input": "Say hello."}))
    expect(first["id"] != second["id"], "two responses", first["id"])


@_add("websocket-continuation", "WebSocket transport, store=false")
def _websocket_continuation(c: ResponsesContext) -> None:
    """A response that is not stored is continued on its connection by previous_response_id."""
    first, second = (_last(events) for events in c.turns(_FIRST, _after(0, "Which word?")))
    expect(second["previous_response_id"] == first["id"], f"previous_response_id {first['id']}", second)


@_add("websocket-reconnect-store-false-recovery", "WebSocket transport, recovery")
def _websocket_reconnect(c: ResponsesContext) -> None:
    """After a reconnect a response that was not stored is not found, and a new chain can begin."""
    (first,) = c.turns(_FIRST)
    lost, recovered = c.turns(lambda _: _after(0, "Go on.")([first]), {"store": False, "input": "Say hello."})
    expect(_error_code(lost) == _NOT_FOUND, f"the error {_NOT_FOUND}", lost[-1])
    _last(recovered)


@_add("websocket-previous-response-not-found", "WebSocket transport, errors")
def _websocket_missing(c: ResponsesContext) -> None:
    """An unknown previous_response_id gets the error previous_response_not_found."""
    (events,) = c.turns({**_FIRST, "previous_response_id": "resp_dragoman_check_unknown"})
    expect(_error_code(events) == _NOT_FOUND, f"the error {_NOT_FOUND}", events[-1])


@_add("websocket-failed-continuation-evicts-cache", "WebSocket transport, store=false")
def _websocket_failed(c: ResponsesContext) -> None:
    """A turn that fails makes the connection forget the response which it refers to."""
    result = {"type": "function_call_output", "call_id": "call_dragoman_check", "output": "no call has this id"}
    _, failed, again = c.turns(_FIRST, _after(0, [result]), _after(0, "Go on."))
    if not _error_code(failed):
        fail("an error for the result of no call", failed[-1])
    expect(_error_code(again) == _NOT_FOUND, f"the error {_NOT_FOUND}", again[-1])


@_add("websocket-compact-new-chain", "WebSocket transport, compaction")
def _websocket_compact(c: ResponsesContext) -> None:
    """The items of a compaction begin a new chain over a WebSocket."""
    turns = [_message("user", "The word is slate."), _message("assistant", "OK.")]
    answer = c.http.post(_COMPACT, {"model": c.model, "input": turns})
    if answer.status in (404, 405):
        raise NotTried(f"POST v1/responses/compact gets status {answer.status}")
    output = _check_compaction(answer.ok().json())
    (events,) = c.turns({"store": False, "input": [*output, _message("user", "Go on.")], "tools": []})
    _last(events)


PROTOCOL = Protocol("responses", "Open Responses", "Open Responses 2026-04-24", _prepare, CLAUSES)
