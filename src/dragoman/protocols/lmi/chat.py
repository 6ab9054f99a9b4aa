"""OpenAI chats and completions at LMI's paths; streams may be JSON lines."""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import structs

from dragoman.core.calls import Response
from dragoman.core.errors import DragomanError
from dragoman.protocols.lmi.errors import LmiErrors
from dragoman.protocols.lmi.model import LmiModel
from dragoman.protocols.text_common.chat import parse_chat_request
from dragoman.protocols.text_common.completions import parse_completion_request
from dragoman.protocols.wire import EndpointResult, Headers, HttpRequest, HttpStream, Policy, PreliminaryCall

_LINES: Headers = (("content-type", "application/jsonlines"),)
_OF_EVENTS = ("content-type", "cache-control")


def parse_openai_request(
    body: Mapping[str, Any], http: HttpRequest, policy: Policy, errors: LmiErrors, model: LmiModel
) -> EndpointResult:
    """Parse a body with `messages` or with a `prompt`. Raises InvalidInput naming the field."""
    answers = parse_chat_request if "messages" in body else parse_completion_request
    asked = answers(body, http, policy, errors.write, model.name)
    return _in_lines(asked) if model.formatter == "jsonlines" else asked


def _in_lines(asked: EndpointResult) -> EndpointResult:
    """Return the same exchange with JSON lines instead of events, and without [DONE]."""
    if isinstance(asked, PreliminaryCall):
        then: Callable[[Response[Any]], EndpointResult] = asked.then
        return structs.replace(asked, then=lambda response: _in_lines(then(response)))
    if not isinstance(asked, HttpStream):
        return asked
    piece, error, closing = asked.format_chunk, asked.format_late_error, asked.format_last_chunk

    def lines_of(response: Response[Any]) -> bytes:
        return _lines(piece(response))

    def format_error(fault: DragomanError) -> bytes:
        return _lines(error(fault))

    def closing_lines() -> bytes:
        return _lines(closing())

    kept = tuple(pair for pair in asked.headers if pair[0] not in _OF_EVENTS)
    headers = (*_LINES, *kept)
    return structs.replace(asked, piece=lines_of, error=format_error, closing=closing_lines, end=b"", headers=headers)


def _lines(events: bytes) -> bytes:
    return b"".join(event.removeprefix(b"data: ") + b"\n" for event in events.split(b"\n\n") if event)
