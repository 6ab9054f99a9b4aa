"""Chats and completions of OpenAI's form at LMI's paths, whose streams may be JSON lines as LMI's own were."""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import structs

from dragoman.core.calls import Response
from dragoman.core.errors import DragomanError
from dragoman.protocols.lmi.errors import Faults
from dragoman.protocols.lmi.model import LmiModel
from dragoman.protocols.text_common.chat import chat_asked
from dragoman.protocols.text_common.completions import completion_asked
from dragoman.protocols.wire import Asked, Headers, HttpRequest, HttpStream, Inquiry, Policy

_LINES: Headers = (("content-type", "application/jsonlines"),)
_OF_EVENTS = ("content-type", "cache-control")


def openai_asked(body: Mapping[str, Any], http: HttpRequest, policy: Policy, faults: Faults, model: LmiModel) -> Asked:
    """What a body with `messages`, or with a `prompt`, asks. Raises InvalidInput naming what does not fit."""
    answers = chat_asked if "messages" in body else completion_asked
    asked = answers(body, http, policy, faults.write, model.name)
    return _in_lines(asked) if model.formatter == "jsonlines" else asked


def _in_lines(asked: Asked) -> Asked:
    """The same answer, a stream of which has a line where it had an event, and no [DONE]."""
    if isinstance(asked, Inquiry):
        then: Callable[[Response[Any]], Asked] = asked.then
        return structs.replace(asked, then=lambda response: _in_lines(then(response)))
    if not isinstance(asked, HttpStream):
        return asked
    piece, error, closing = asked.piece, asked.error, asked.closing

    def lines_of(response: Response[Any]) -> bytes:
        return _lines(piece(response))

    def fault_of(fault: DragomanError) -> bytes:
        return _lines(error(fault))

    def closing_lines() -> bytes:
        return _lines(closing())

    kept = tuple(pair for pair in asked.headers if pair[0] not in _OF_EVENTS)
    headers = (*_LINES, *kept)
    return structs.replace(asked, piece=lines_of, error=fault_of, closing=closing_lines, end=b"", headers=headers)


def _lines(events: bytes) -> bytes:
    return b"".join(event.removeprefix(b"data: ") + b"\n" for event in events.split(b"\n\n") if event)
