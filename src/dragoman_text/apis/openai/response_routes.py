"""Endpoints of OpenAI's Responses API: create, and read or delete what is stored."""

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any
from urllib.parse import parse_qs

from dragoman.core.calls import Generate, Request, Response, Tokenize
from dragoman.core.errors import DragomanError, InvalidInput
from dragoman.core.record_calls import DeleteRecord, ReadRecord, SaveRecord
from dragoman.core.sampling import format_value
from dragoman.core.text import Generation, Tokenized
from dragoman.formats.exact_json import dump_json, load_json
from dragoman.protocols import parameters as common
from dragoman.protocols.parameters import ParsedParameters, object_body
from dragoman.protocols.wire import (
    EVENT_STREAM_HEADERS,
    EndpointResult,
    EngineCall,
    HttpError,
    HttpRequest,
    HttpResponse,
    HttpStream,
    Policy,
    PreliminaryCall,
    json_response,
)
from dragoman_text.apis.common.openai_format import resolve_model
from dragoman_text.apis.common.records import owner_of
from dragoman_text.apis.openai.response_format import ResponseFormatter, new_id
from dragoman_text.apis.openai.responses import (
    COUNT,
    build_request,
    input_items,
    parse_response_parameters,
    referenced_id,
)
from dragoman_text.limits import MAX_MESSAGES

_OFF = "this server stores no responses (setting max_stored_responses)"
_PAGE, _MAX_PER_PAGE = 20, 100
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


class Responses:
    """Endpoints of the Responses API. `write_error` formats errors.

    Responses are stored for the key that created them: of requests with another key, or without, they are not found.
    """

    def __init__(self, policy: Policy, write_error: Callable[[DragomanError | HttpError], HttpResponse]) -> None:
        self._policy, self._write_error = policy, write_error
        self._has_store = policy.max_stored_responses > 0

    def create(self, http: HttpRequest) -> EndpointResult:
        body = object_body(http.body, self._policy)
        parameters = parse_response_parameters(body, self._policy)
        items = input_items(parameters.options.get("input"))
        is_new = [referenced_id(item) is None for item in items]

        def then(history: Sequence[Mapping[str, Any]], resolved: Sequence[Mapping[str, Any]]) -> EndpointResult:
            return self._respond(body, http, parameters, history, resolved, is_new)

        return self._read_conversation(http, parameters, items, then)

    def count_tokens(self, http: HttpRequest) -> EndpointResult:
        """Return the number of tokens of the prompt that a response to this request would have."""
        body = object_body(http.body, self._policy)
        parameters = parse_response_parameters(body, self._policy, COUNT)
        format_error = parameters.error_formatter(self._write_error)

        def reply(response: Response[Tokenized]) -> HttpResponse:
            value = {"object": "response.input_tokens", "input_tokens": len(response.answer.tokens)}
            return json_response(value, 200, parameters.headers)

        def then(history: Sequence[Mapping[str, Any]], resolved: Sequence[Mapping[str, Any]]) -> EndpointResult:
            call = Tokenize(build_request(parameters, history, resolved, self._policy).chat)
            return resolve_model(
                body,
                http,
                lambda model: EngineCall(common.build_request(call, http, self._policy, model), reply, format_error),
            )

        return self._read_conversation(http, parameters, input_items(parameters.options.get("input")), then)

    def compact(self, http: HttpRequest) -> EndpointResult:
        """Clients may ask for this; the path would else be that of a response with this id."""
        raise HttpError(404, 'this server does not compact conversations; `truncation`: "auto" shortens them')

    def _read_conversation(
        self,
        http: HttpRequest,
        parameters: ParsedParameters,
        items: Sequence[Mapping[str, Any]],
        then: Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], EndpointResult],
    ) -> EndpointResult:
        """Read the earlier items and those that the request refers to; continue with both."""

        def resolve(history: Sequence[Mapping[str, Any]]) -> EndpointResult:
            return self._resolve(http, history, items, lambda resolved: then(history, resolved))

        previous = parameters.options.get("previous_response_id")
        if previous is None:
            return resolve(())
        if not self._has_store:
            raise InvalidInput(f"`previous_response_id`: {_OFF}; send the earlier items as `input`")
        return self._read(
            http, previous, lambda record: resolve([*record["input"], *record["response"]["output"]]), _missing
        )

    def _resolve(
        self,
        http: HttpRequest,
        history: Sequence[Mapping[str, Any]],
        items: Sequence[Mapping[str, Any]],
        then: Callable[[Sequence[Mapping[str, Any]]], EndpointResult],
    ) -> EndpointResult:
        """Replace references by the stored items, one after the other, then continue with `then`."""
        references = {i: id_ for i, item in enumerate(items) if (id_ := referenced_id(item)) is not None}
        if references and not self._has_store:
            raise InvalidInput(f"`input[{min(references)}]`: {_OFF}; send the item")
        known = {id_ for item in (*history, *items) if referenced_id(item) is None and (id_ := _id_of(item))}
        for i, id_ in references.items():
            if id_ in known:
                raise InvalidInput(f"`input[{i}]`: item {format_value(id_)} must be in the conversation once; got two")
            known.add(id_)
        resolved, remaining = list(items), iter(references.items())

        def resolve_next() -> EndpointResult:
            i, id_ = next(remaining, (-1, ""))
            if i < 0:
                return then(resolved)

            def continue_with(item: Mapping[str, Any]) -> EndpointResult:
                resolved[i] = item
                return resolve_next()

            return self._read(http, id_, continue_with, lambda id_: _missing_item(i, id_), is_part=True)

        return resolve_next()

    def _respond(
        self,
        body: Mapping[str, Any],
        http: HttpRequest,
        parameters: ParsedParameters,
        history: Sequence[Mapping[str, Any]],
        items: Sequence[Mapping[str, Any]],
        is_new: Sequence[bool],
    ) -> EndpointResult:
        if len(history) + len(items) > MAX_MESSAGES:
            raise InvalidInput(f"`input` and the earlier items must be at most {MAX_MESSAGES}; got more")
        chat = build_request(parameters, history, items, self._policy)
        stored = self._has_store and parameters.options.get("store", True)
        stream = parameters.options.get("stream", False)
        formatter = ResponseFormatter(chat, stored=stored)
        headers, format_error = chat.parameters.headers, chat.parameters.error_formatter(self._write_error)

        def save() -> Request[None]:
            new = [*map(_with_id, items)]
            value = dump_json({"response": formatter.value, "input": [*history, *new]})
            # For requests that refer to them. Items that this one refers to belong to another response.
            parts = {_id_of(item): dump_json(item) for item in (*compress(new, is_new), *formatter.value["output"])}
            return Request(SaveRecord(owner_of(http), formatter.value["id"], value, parts))

        def reply(response: Response[Generation]) -> EndpointResult:
            result = json_response(formatter.complete(response), 200, headers)
            return EngineCall(save(), lambda _: result) if stored else result

        def then(model: str) -> EndpointResult:
            call = Generate(prompts=(chat.chat,), sampling=chat.sampling, stream=stream)
            request = common.build_request(call, http, self._policy, model)
            if not stream:
                return PreliminaryCall(request, reply, format_error)
            return HttpStream(
                request,
                formatter.format_chunk,
                formatter.format_late_error,
                headers=(*EVENT_STREAM_HEADERS, *headers),
                format_error=format_error,
                format_last_chunk=formatter.format_last_chunk,
                final_request=save if stored else None,
            )

        return resolve_model(body, http, then)

    # --- stored responses ------------------------------------------------------------------------------------

    def retrieve(self, http: HttpRequest) -> EndpointResult:
        if parse_qs(http.query).get("stream", ["false"])[-1] not in ("", "false", "False"):
            raise InvalidInput("`stream` must be false: stored responses are not streamed")
        return self._read(http, http.params["id"], lambda record: json_response(record["response"]), _missing)

    def input_items(self, http: HttpRequest) -> EndpointResult:
        query = parse_qs(http.query)
        limit, order = query.get("limit", [str(_PAGE)])[-1], query.get("order", ["desc"])[-1]
        if not limit.isdecimal() or not 1 <= int(limit[:9]) <= _MAX_PER_PAGE:
            raise InvalidInput(f"`limit` must be an integer from 1 to {_MAX_PER_PAGE}; got {format_value(limit)}")
        if order not in ("asc", "desc"):
            raise InvalidInput(f'`order` must be "asc" or "desc"; got {format_value(order)}')
        after = query.get("after", [""])[-1]

        def then(record: Mapping[str, Any]) -> EndpointResult:
            items = record["input"] if order == "asc" else record["input"][::-1]
            start = next((i + 1 for i, item in enumerate(items) if item["id"] == after), 0)
            page = items[start : start + int(limit)]
            ids = (
                {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
            )
            return json_response({"object": "list", "data": page, **ids, "has_more": start + len(page) < len(items)})

        return self._read(http, http.params["id"], then, _missing)

    def cancel(self, http: HttpRequest) -> EndpointResult:
        def then(record: Mapping[str, Any]) -> EndpointResult:
            raise InvalidInput("only responses created with `background`: true can be cancelled; close the connection")

        return self._read(http, http.params["id"], then, _missing)

    def delete(self, http: HttpRequest) -> EndpointResult:
        id_ = http.params["id"]

        def reply(response: Response[bool]) -> HttpResponse:
            if not response.answer:
                return self._write_error(_missing(id_))
            return json_response({"id": id_, "object": "response", "deleted": True})

        return EngineCall(Request(DeleteRecord(owner_of(http), id_)), reply)

    def _read(
        self,
        http: HttpRequest,
        id_: str,
        then: Callable[[Any], EndpointResult],
        missing: Callable[[str], HttpError],
        *,
        is_part: bool = False,
    ) -> EndpointResult:
        def continue_with(response: Response[bytes | None]) -> EndpointResult:
            if response.answer is None:
                raise missing(id_)
            return then(load_json(response.answer))

        return PreliminaryCall(Request(ReadRecord(owner_of(http), id_, is_part)), continue_with)


def _missing(id_: str) -> HttpError:
    return HttpError(404, f"response {format_value(id_)} not found: it does not exist, or is no longer stored")


def _missing_item(at: int, id_: str) -> HttpError:
    return HttpError(
        404, f"`input[{at}]`: item {format_value(id_)} not found: it is not of a stored response, or no longer stored"
    )


def _id_of(item: Mapping[str, Any]) -> str:
    """Return the id of an item, "" if it has none."""
    id_ = item.get("id")
    return id_ if isinstance(id_, str) else ""


def _with_id(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an input item with the fields that clients may leave out."""
    kind = item.get("type") or "message"
    return {"id": new_id(_PREFIXES.get(kind, "item")), "type": kind, **{n: v for n, v in item.items() if v is not None}}
