"""Endpoints of OpenAI's Responses API: create, and read or delete what is stored."""

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any
from urllib.parse import parse_qs

from dragoman.core.calls import Generate, Request, Response, Tokenize
from dragoman.core.errors import DragomanError, InvalidInput, ModelFailed
from dragoman.core.record_calls import DeleteRecord, ReadRecord, SaveRecord
from dragoman.core.sampling import format_value
from dragoman.core.text import Generation, Tokenized
from dragoman.formats.exact_json import dump_json, load_json
from dragoman.protocols import parameters as common
from dragoman.protocols.parameters import ParsedParameters, object_body, require_text
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
from dragoman_text.apis.common.openai_format import DONE, resolve_model
from dragoman_text.apis.common.records import owner_of
from dragoman_text.apis.openai.compaction import (
    compacted_output,
    format_compaction,
    with_request,
)
from dragoman_text.apis.openai.conversations import append_items, conversation_id
from dragoman_text.apis.openai.conversations import read as read_items_of
from dragoman_text.apis.openai.response_format import ResponseFormatter, frame_event, new_id, output_text
from dragoman_text.apis.openai.responses import (
    COMPACT,
    COUNT,
    PreviousNotFound,
    build_request,
    input_items,
    page_of,
    parse_page,
    parse_response_parameters,
    referenced_id,
    with_id,
)
from dragoman_text.limits import MAX_MESSAGES

_OFF = "this server stores no responses (setting max_stored_responses)"
_PREFIX = "resp_"
_UPGRADE = (("upgrade", "websocket"), ("connection", "upgrade"))


class Turn:
    """How a response is sent: over HTTP, as events of a stream. A subclass is a turn of a WebSocket connection."""

    is_local = False  # whether the connection remembers responses
    generates = True
    end = DONE
    frame = staticmethod(frame_event)

    def find(self, id_: str) -> Sequence[Mapping[str, Any]] | None:
        """Return the items of an earlier response that the connection remembers."""
        return None

    def keep(self, id_: str, items: Sequence[Mapping[str, Any]]) -> None:
        """Remember the items of a response: its conversation, with its output."""

    def forget(self) -> None:
        """Forget the response that the current turn refers to, because the turn failed."""


HTTP = Turn()


class Responses:
    """Endpoints of the Responses API. `write_error` formats errors.

    Responses are stored for the key that created them: of requests with another key, or without, they are not found.
    """

    def __init__(self, policy: Policy, write_error: Callable[[DragomanError | HttpError], HttpResponse]) -> None:
        self._policy, self._write_error = policy, write_error
        self._has_store = policy.max_stored_responses > 0

    def create(self, http: HttpRequest) -> EndpointResult:
        body = object_body(http.body, self._policy)
        return self.create_from(http, body, parse_response_parameters(body, self._policy), HTTP)

    def create_from(
        self, http: HttpRequest, body: Mapping[str, Any], parameters: ParsedParameters, turn: "Turn"
    ) -> EndpointResult:
        """Create the response of a parsed request, over HTTP or as a turn of a WebSocket connection."""
        items = input_items(parameters.options.get("input"))
        is_new = [referenced_id(item) is None for item in items]

        def then(history: Sequence[Mapping[str, Any]], resolved: Sequence[Mapping[str, Any]]) -> EndpointResult:
            return self._respond(body, http, parameters, history, resolved, is_new, turn)

        return self._read_conversation(http, parameters, items, then, turn)

    def upgrade(self, http: HttpRequest) -> EndpointResult:
        """Answer a GET that asks for no WebSocket, or that came over HTTP/2 or by an ASGI server."""
        raise HttpError(
            426, "GET /v1/responses opens a WebSocket: send the handshake of RFC 6455 over HTTP/1.1", _UPGRADE
        )

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
        """Return the items of a shorter conversation that stands for this one: its model writes a summary."""
        body = object_body(http.body, self._policy)
        parameters = parse_response_parameters(body, self._policy, COMPACT)
        if not http.params.get("model"):
            require_text(body, "model")
        value, previous = parameters.options.get("input"), parameters.options.get("previous_response_id")
        items = [] if value is None and previous is not None else input_items(value)

        def then(history: Sequence[Mapping[str, Any]], resolved: Sequence[Mapping[str, Any]]) -> EndpointResult:
            _check_count(history, resolved)
            chat = build_request(parameters, history, with_request(resolved), self._policy)
            formatter = ResponseFormatter(chat, stored=False)

            def reply(response: Response[Generation]) -> HttpResponse:
                response_value = formatter.complete(response)
                summary = output_text(response_value["output"])
                if not summary:
                    raise ModelFailed("the model wrote no summary of the conversation")
                output = compacted_output([*history, *resolved], summary, new_id)
                value = format_compaction(output, response_value["usage"], new_id)
                return json_response(value, 200, parameters.headers)

            call = Generate(prompts=(chat.chat,), sampling=chat.sampling, stream=False)
            format_error = chat.parameters.error_formatter(self._write_error)
            return resolve_model(
                body,
                http,
                lambda model: EngineCall(common.build_request(call, http, self._policy, model), reply, format_error),
            )

        return self._read_conversation(http, parameters, items, then)

    def _read_conversation(
        self,
        http: HttpRequest,
        parameters: ParsedParameters,
        items: Sequence[Mapping[str, Any]],
        then: Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], EndpointResult],
        turn: "Turn | None" = None,
    ) -> EndpointResult:
        """Read the earlier items and those that the request refers to; continue with both."""

        def resolve(history: Sequence[Mapping[str, Any]]) -> EndpointResult:
            return self._resolve(http, history, items, lambda resolved: then(history, resolved))

        previous, conversation = (parameters.options.get(name) for name in ("previous_response_id", "conversation"))
        if conversation is not None:
            id_ = conversation_id(conversation)
            if previous is not None:
                raise InvalidInput("`conversation` must not be given with `previous_response_id`")
            if not self._has_store:
                raise InvalidInput(f"`conversation`: {_OFF}; send its items as `input`")
            return read_items_of(http, id_, lambda found: resolve([*found.items.values()]))
        if previous is None:
            return resolve(())
        if turn is not None and (local := turn.find(previous)) is not None:
            return resolve(local)
        if not self._has_store and turn is not None and turn.is_local:
            raise _no_previous(previous)
        if not self._has_store:
            raise InvalidInput(f"`previous_response_id`: {_OFF}; send the earlier items as `input`")
        return self._read(
            http, previous, lambda record: resolve([*record["input"], *record["response"]["output"]]), _no_previous
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
        turn: "Turn",
    ) -> EndpointResult:
        _check_count(history, items)
        chat = build_request(parameters, history, items, self._policy)
        stored = self._has_store and parameters.options.get("store", True)
        stream = turn.is_local or parameters.options.get("stream", False)
        formatter = ResponseFormatter(chat, stored=stored, frame=turn.frame)
        if turn.is_local and chat.parameters.ignored:  # there are no headers that name them
            formatter.value["ignored_parameters"] = [*chat.parameters.ignored]
        headers, format_error = chat.parameters.headers, chat.parameters.error_formatter(self._write_error)

        conversation = parameters.options.get("conversation")
        if conversation is not None:
            formatter.value["conversation"] = {"id": conversation_id(conversation)}

        def save() -> Request[Any]:
            new, output = [with_id(item, new_id) for item in items], formatter.value["output"]
            record = None
            if stored:
                value = dump_json({"response": formatter.value, "input": [*history, *new]})
                # For requests that refer to them. Items that this one refers to belong to another response.
                parts = {_id_of(item): dump_json(item) for item in (*compress(new, is_new), *output)}
                record = SaveRecord(owner_of(http), formatter.value["id"], value, parts)
            if conversation is None:
                assert record is not None
                return Request(record)
            return Request(append_items(owner_of(http), conversation_id(conversation), [*new, *output], record))

        saves = stored or conversation is not None

        def reply(response: Response[Generation]) -> EndpointResult:
            result = json_response(formatter.complete(response), 200, headers)
            return EngineCall(save(), lambda _: result) if saves else result

        def end() -> bytes:
            last = formatter.format_last_chunk()
            turn.keep(formatter.value["id"], (*history, *items, *formatter.value["output"]))
            return last

        def fail(error: DragomanError) -> bytes:
            turn.forget()
            return formatter.format_late_error(error)

        def prepare(response: Response[Tokenized]) -> HttpResponse:
            data = formatter.format_prepared(response.model, len(response.answer.tokens))
            turn.keep(formatter.value["id"], (*history, *items))
            return HttpResponse(200, (data,))

        def then(model: str) -> EndpointResult:
            if not turn.generates:
                tokenize = common.build_request(Tokenize(chat.chat), http, self._policy, model)
                return EngineCall(tokenize, prepare, format_error)
            call = Generate(prompts=(chat.chat,), sampling=chat.sampling, stream=stream)
            request = common.build_request(call, http, self._policy, model)
            if not stream:
                return PreliminaryCall(request, reply, format_error)
            return HttpStream(
                request,
                formatter.format_chunk,
                fail,
                end=turn.end,
                headers=(*EVENT_STREAM_HEADERS, *headers),
                format_error=format_error,
                format_last_chunk=end,
                final_request=save if saves else None,
            )

        return resolve_model(body, http, then)

    # --- stored responses ------------------------------------------------------------------------------------

    def retrieve(self, http: HttpRequest) -> EndpointResult:
        if parse_qs(http.query).get("stream", ["false"])[-1] not in ("", "false", "False"):
            raise InvalidInput("`stream` must be false: stored responses are not streamed")
        return self._read(http, http.params["id"], lambda record: json_response(record["response"]), _missing)

    def input_items(self, http: HttpRequest) -> EndpointResult:
        limit, order, after = parse_page(http.query)

        def then(record: Mapping[str, Any]) -> EndpointResult:
            return json_response(page_of(record["input"] if order == "asc" else record["input"][::-1], limit, after))

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

        if not id_.startswith(_PREFIX):
            raise _missing(id_)
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
            if response.answer is None or not (is_part or id_.startswith(_PREFIX)):  # or a record of another kind
                raise missing(id_)
            return then(load_json(response.answer))

        return PreliminaryCall(Request(ReadRecord(owner_of(http), id_, is_part)), continue_with)


def _check_count(history: Sequence[Mapping[str, Any]], items: Sequence[Mapping[str, Any]]) -> None:
    if len(history) + len(items) > MAX_MESSAGES:
        raise InvalidInput(f"`input` and the earlier items must be at most {MAX_MESSAGES}; got more")


_MISSING = "response {} not found: it does not exist, or is no longer stored"


def _missing(id_: str) -> HttpError:
    return HttpError(404, _MISSING.format(format_value(id_)))


def _no_previous(id_: str) -> HttpError:
    return PreviousNotFound(404, f"`previous_response_id`: {_MISSING.format(format_value(id_))}")


def _missing_item(at: int, id_: str) -> HttpError:
    return HttpError(
        404, f"`input[{at}]`: item {format_value(id_)} not found: it is not of a stored response, or no longer stored"
    )


def _id_of(item: Mapping[str, Any]) -> str:
    """Return the id of an item, "" if it has none."""
    id_ = item.get("id")
    return id_ if isinstance(id_, str) else ""
