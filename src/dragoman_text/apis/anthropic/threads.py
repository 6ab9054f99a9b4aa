"""Threads of the Messages API: conversations that the server keeps, so that a request sends its new messages alone.

A thread is the record of its last response: `system`, `tools` and all messages, under the id of that response. A
request continues it by this id, any number of times. Clients that are told that a thread is unsupported or not found
send the whole conversation instead, so these errors have the `details` that they read.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dragoman.core.calls import Request
from dragoman.core.errors import InvalidInput
from dragoman.core.record_calls import ReadRecord, SaveRecord
from dragoman.core.sampling import format_value
from dragoman.formats.exact_json import dump_json, load_json
from dragoman.protocols.wire import HttpError, HttpRequest
from dragoman_text.apis.common.records import owner_of

# What a thread keeps from its first request, and later ones must not send.
_OF_THE_THREAD = ("system", "tools")


class ThreadError(HttpError):
    """An error about the thread itself; `details` tell clients to send the whole conversation."""

    def __init__(self, status: int, message: str, details: Mapping[str, Any]) -> None:
        super().__init__(status, message)
        self.details = details


class Thread(msgspec.Struct, frozen=True):
    """The thread that a request continues, or with `previous_id` "" starts."""

    previous_id: str
    system: Any = None
    tools: Any = None
    messages: Sequence[Mapping[str, Any]] = ()

    def complete(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the body of a request with the conversation before it. Raises InvalidInput."""
        if not self.previous_id:
            return body
        for name in _OF_THE_THREAD:
            if body.get(name) is not None:
                raise InvalidInput(f"`{name}` must not be given with a thread of type continue, which has it already")
        messages = body.get("messages")
        if not isinstance(messages, list):
            raise InvalidInput(f"`messages` must be a list of at least one message; got {format_value(messages)}")
        return {**body, "system": self.system, "tools": self.tools, "messages": [*self.messages, *messages]}

    def save(self, http: HttpRequest, body: Mapping[str, Any], response: Mapping[str, Any]) -> Request[None]:
        """Return the request that stores the conversation with a response; `body` is complete."""
        *messages, last = body["messages"]
        content = response["content"]
        if last["role"] == "assistant":  # the response continues it
            start = last["content"]
            content = _continued([{"type": "text", "text": start}] if isinstance(start, str) else start, content)
        else:
            messages.append(last)
        kept = {name: body.get(name) for name in _OF_THE_THREAD}
        value = {**kept, "messages": [*messages, {"role": "assistant", "content": content}]}
        return Request(SaveRecord(_owner(http), response["id"], dump_json(value)))


def parse_thread(value: Any, *, has_store: bool) -> Thread | None:
    """Return the thread that the parameter `thread` of a request names, None for none.

    Raises InvalidInput, or ThreadError if this server stores no threads.
    """
    match value:
        case None | False:
            return None
        case {"type": "create"}:
            thread = Thread("")
        case {"type": "continue", "previous_message_id": str(id_)} if id_:
            thread = Thread(id_)
        case _:
            expected = '{"type": "create"} or {"type": "continue", "previous_message_id": ...}'
            raise InvalidInput(f"`thread` must be {expected}; got {format_value(value)}")
    if not has_store:
        message = "`thread` is not supported: this server stores no conversations (setting max_stored_responses)"
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        raise ThreadError(400, f"{message}; send all messages", details)
    return thread


def read_thread(http: HttpRequest, thread: Thread) -> Request[bytes | None]:
    """Return the request that reads the record of a thread that is continued."""
    return Request(ReadRecord(_owner(http), thread.previous_id))


def load_thread(thread: Thread, record: bytes | None) -> Thread:
    """Return the thread with its conversation. Raises ThreadError if there is no record of it."""
    if record is None:
        message = f"thread {format_value(thread.previous_id)} not found: it does not exist, or is no longer stored"
        raise ThreadError(404, f"{message}; send all messages", {"error_code": "thread_not_found"})
    return Thread(thread.previous_id, **load_json(record))


def _continued(start: Sequence[Any], content: Sequence[Any]) -> list[Any]:
    """Return the blocks of a message that a response continues, within its last text if it is one."""
    match [*start[-1:], *content[:1]]:
        case [{"type": "text", "text": before}, {"type": "text", "text": after} as first]:
            return [*start[:-1], {**first, "text": before + after}, *content[1:]]
    return [*start, *content]


def _owner(http: HttpRequest) -> str:
    """Return the owner of the records, apart from those of stored responses."""
    return f"{owner_of(http)}/threads"
