"""Endpoints of Anthropic's Messages API."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from dragoman.core.calls import Generate, Response, Tokenize
from dragoman.core.errors import DragomanError
from dragoman.core.text import Generation, Tokenized
from dragoman.protocols.anthropic import messages
from dragoman.protocols.anthropic.request import CONVERSATION, parse_message_request
from dragoman.protocols.anthropic.response import MessageFormatter
from dragoman.protocols.anthropic.threads import Thread, ThreadError, load_thread, parse_thread, read_thread
from dragoman.protocols.text_common.openai_format import resolve_model
from dragoman.protocols.text_common.parameters import EVENT_STREAM, build_request, object_body
from dragoman.protocols.wire import (
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


class Anthropic:
    """Endpoints of the Messages API. Headers of versions are accepted and have no effect."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._has_store = policy.max_stored_responses > 0

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
                headers=(*EVENT_STREAM, *headers),
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
    return HttpProtocol("Anthropic", tuple(routes), write_error, errors=messages.ERRORS)


def write_error(error: DragomanError | HttpError, request_id: str) -> HttpResponse:
    """Format an error as Anthropic does."""
    if isinstance(error, HttpError):
        details = error.details if isinstance(error, ThreadError) else None
        body = messages.error_object(messages.type_of_status(error.status), error.message, request_id, details)
        return json_response(body, error.status, (*_id_header(request_id), *error.headers))
    headers = (*_id_header(request_id), *error_headers(error))
    return json_response(messages.format_error_body(error, request_id), messages.error_status(error), headers)
