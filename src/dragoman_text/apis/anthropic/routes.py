"""Endpoints of Anthropic's Messages API."""

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any
from urllib.parse import parse_qs

from dragoman.core.calls import DescribeModels, Generate, ModelDescription, Request, Response, Tokenize
from dragoman.core.errors import DragomanError, InvalidInput, ModelNotFound
from dragoman.core.sampling import format_value
from dragoman.core.text import Generation, Tokenized
from dragoman.protocols.parameters import build_request, object_body
from dragoman.protocols.wire import (
    EVENT_STREAM_HEADERS,
    EndpointResult,
    EngineCall,
    Headers,
    HttpError,
    HttpProtocol,
    HttpRequest,
    HttpResponse,
    HttpStream,
    Policy,
    PreliminaryCall,
    Route,
    error_headers,
    json_response,
)
from dragoman_text.apis.anthropic import messages
from dragoman_text.apis.anthropic.request import CONVERSATION, parse_message_request
from dragoman_text.apis.anthropic.response import MessageFormatter
from dragoman_text.apis.anthropic.threads import Thread, ThreadError, load_thread, parse_thread, read_thread
from dragoman_text.apis.common.model_ids import text_model_ids
from dragoman_text.apis.common.openai_format import resolve_model

# Models on a page.
_PAGE, _MAX_PER_PAGE = 20, 1000


class Anthropic:
    """Endpoints of the Messages API. Versions in headers have no effect."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._has_store = policy.max_stored_responses > 0
        self._started = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")

    def create(self, http: HttpRequest) -> EndpointResult:
        body = object_body(http.body, self._policy)

        def respond(thread: Thread | None) -> EndpointResult:
            whole = body if thread is None else thread.complete(body)
            return resolve_model(whole, http, lambda name: self._create(whole, http, name, thread))

        thread = parse_thread(body.get("thread"), has_store=self._has_store)
        if thread is None or not thread.previous_id:
            return respond(thread)
        return PreliminaryCall(read_thread(http, thread), lambda found: respond(load_thread(thread, found.answer)))

    def _create(self, body: Mapping[str, Any], http: HttpRequest, model: str, thread: Thread | None) -> EndpointResult:
        chat = parse_message_request(body, self._policy, earlier=0 if thread is None else len(thread.messages))
        parameters = chat.parameters
        stream = parameters.options.get("stream", False)
        call = Generate(prompts=(chat.chat,), sampling=chat.sampling, stream=stream)
        request, formatter = build_request(call, http, self._policy, model), MessageFormatter(chat, http.request_id)
        format_error = parameters.error_formatter(partial(write_error, request_id=http.request_id))
        headers = (*_id_header(http.request_id), *parameters.headers)
        if stream:
            return HttpStream(
                request,
                formatter.format_chunk,
                formatter.format_late_error,
                headers=(*EVENT_STREAM_HEADERS, *headers),
                format_error=format_error,
                format_last_chunk=formatter.format_last_chunk,
                final_request=None if thread is None else lambda: thread.save(http, body, formatter.message),
            )

        def reply(response: Response[Generation]) -> HttpResponse:
            return json_response(formatter.complete(response), 200, headers)

        if thread is None:
            return EngineCall(request, reply, format_error)

        def save(response: Response[Generation]) -> EndpointResult:
            result = reply(response)
            return EngineCall(thread.save(http, body, formatter.message), lambda _: result)

        return PreliminaryCall(request, save, format_error)

    def count_tokens(self, http: HttpRequest) -> EndpointResult:
        body = object_body(http.body, self._policy)

        def reply(response: Response[Tokenized]) -> HttpResponse:
            return json_response({"input_tokens": len(response.answer.tokens)}, 200, _id_header(http.request_id))

        def then(model: str) -> EndpointResult:
            chat = parse_message_request(body, self._policy, CONVERSATION)
            call = Tokenize(chat.chat)
            format_error = chat.parameters.error_formatter(partial(write_error, request_id=http.request_id))
            return EngineCall(build_request(call, http, self._policy, model), reply, format_error)

        return resolve_model(body, http, then)

    # --- models ----------------------------------------------------------------------------------------------

    def models(self, http: HttpRequest) -> EngineCall[tuple[ModelDescription, ...], HttpResponse]:
        """Return a page of the models: after or before one of them."""
        query = {name: values[-1] for name, values in parse_qs(http.query).items()}
        limit, after, before = query.get("limit", str(_PAGE)), query.get("after_id"), query.get("before_id")
        if not limit.isdecimal() or not 1 <= int(limit[:9]) <= _MAX_PER_PAGE:
            raise InvalidInput(f"`limit` must be an integer from 1 to {_MAX_PER_PAGE}; got {format_value(limit)}")
        if after and before:
            raise InvalidInput("`after_id` must not be given with `before_id`")

        def reply(response: Response[tuple[ModelDescription, ...]]) -> HttpResponse:
            found = [self._card(id_, model) for id_, model, _ in text_model_ids(response.answer)]
            ids, size = [each["id"] for each in found], int(limit)
            for name, id_ in (("after_id", after), ("before_id", before)):
                if id_ and id_ not in ids:
                    error = InvalidInput(f"`{name}` must be the id of a model; got {format_value(id_)}")
                    return write_error(error, http.request_id)
            if before:
                stop = ids.index(before)
                start = max(0, stop - size)
            else:
                start = ids.index(after) + 1 if after else 0
                stop = min(start + size, len(ids))
            has_more = start > 0 if before else stop < len(ids)
            first, last = (ids[start], ids[stop - 1]) if start < stop else (None, None)
            page = {"data": found[start:stop], "has_more": has_more, "first_id": first, "last_id": last}
            return json_response(page, 200, _id_header(http.request_id))

        return EngineCall(Request(DescribeModels()), reply)

    def model(self, http: HttpRequest) -> EngineCall[tuple[ModelDescription, ...], HttpResponse]:
        name = http.params["name"]

        def reply(response: Response[tuple[ModelDescription, ...]]) -> HttpResponse:
            found = next((each for each in text_model_ids(response.answer) if each[0] == name), None)
            if found is None:
                return write_error(ModelNotFound(f"model {format_value(name)} not found"), http.request_id)
            return json_response(self._card(*found[:2]), 200, _id_header(http.request_id))

        return EngineCall(Request(DescribeModels()), reply)

    def _card(self, id_: str, model: ModelDescription) -> dict[str, Any]:
        context = model.details.get("max_context")
        about = {"type": "model", "id": id_, "display_name": id_, "created_at": self._started, "lifecycle": "active"}
        return {**about, "max_input_tokens": context, "max_tokens": context}


def _id_header(request_id: str) -> Headers:
    return (("request-id", request_id),)


def protocol(policy: Policy) -> HttpProtocol:
    """Return the routes of the protocol."""
    at = Anthropic(policy)
    routes = [
        route
        for base in ("/v1/messages", "/models/{model}/v1/messages")
        for route in (
            Route("POST", base, at.create, role="infer", operation=messages.CREATE),
            Route("POST", f"{base}/count_tokens", at.count_tokens, role="infer", operation=messages.COUNT),
        )
    ]
    # OpenAI's API has these paths too; clients of this one send the header.
    routes += [
        Route("GET", "/v1/models", at.models, role="read", operation=messages.MODELS),
        Route("GET", "/v1/models/{name}", at.model, role="read", operation=messages.MODEL),
    ]
    return HttpProtocol(
        "Anthropic",
        tuple(routes),
        write_error,
        errors=messages.ERRORS,
        header="anthropic-version",
        reference=messages.REFERENCE,
    )


def write_error(error: DragomanError | HttpError, request_id: str) -> HttpResponse:
    """Format an error as Anthropic does."""
    if isinstance(error, HttpError):
        details = error.details if isinstance(error, ThreadError) else None
        body = messages.error_object(messages.type_of_status(error.status), error.message, request_id, details)
        return json_response(body, error.status, (*_id_header(request_id), *error.headers))
    headers = (*_id_header(request_id), *error_headers(error))
    return json_response(messages.format_error_body(error, request_id), messages.error_status(error), headers)
