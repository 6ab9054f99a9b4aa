"""Compaction of conversations (Open Responses 2026-04-24): a summary that the model writes, as an item of one.

The item is complete in itself, so that it needs no store and any server process reads it. Its `encrypted_content` is
opaque to clients by the standard. It is encoded, not encrypted: a client may read the summary of its own conversation,
and one that changes it changes no more than it may write in a message.
"""

import base64
import binascii
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dragoman.core.errors import InvalidInput
from dragoman.core.sampling import format_value

_PREFIX = "dragoman-1."
_REQUEST = "Summarize our conversation for its continuation: goals, facts, decisions, open tasks."
_PART = {"type": "input_text", "text": _REQUEST}


class _Content(msgspec.Struct):
    summary: str


def with_request(items: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the items of a conversation with the request for its summary, in its last message if that is a user's.

    Templates of some models reject two messages of the user in a row.
    """
    last = items[-1] if items else {}
    content = last.get("content")
    if last.get("role") != "user" or not isinstance(content, str | list):
        return [*items, _request_item()]
    asked = f"{content}\n\n{_REQUEST}" if isinstance(content, str) else [*content, _PART]
    return [*items[:-1], {**last, "content": asked}]


def _request_item() -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": _REQUEST}


def read_items(item: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the items that a compaction item stands for: the request for a summary, and the model's answer.

    So the roles alternate as templates expect, and the summary has no more authority than the model's text had.
    Raises InvalidInput for an item of another server.
    """
    content = item.get("encrypted_content")
    try:
        if not isinstance(content, str) or not content.startswith(_PREFIX):
            raise ValueError
        data = base64.urlsafe_b64decode(content.removeprefix(_PREFIX).encode("ascii"))
        summary = msgspec.json.decode(data, type=_Content).summary
    except (ValueError, binascii.Error, msgspec.MsgspecError) as error:
        raise InvalidInput(
            f"{where}: `encrypted_content` must be of a compaction of this server; got {format_value(content)}"
        ) from error
    return [_request_item(), {"type": "message", "role": "assistant", "content": summary}]


def compacted_output(items: Sequence[Mapping[str, Any]], summary: str, new_id: Any) -> list[dict[str, Any]]:
    """Return the items that replace a conversation: its system messages as they are, and the summary of the rest."""
    data = base64.urlsafe_b64encode(msgspec.json.encode(_Content(summary))).decode()
    kept = []
    for item in items:
        if item.get("role") in ("system", "developer"):
            content = item["content"]
            parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
            kept.append({"id": new_id("msg"), "status": "completed", **item, "type": "message", "content": parts})
    return [*kept, {"id": new_id("cmp"), "type": "compaction", "encrypted_content": _PREFIX + data}]


def format_compaction(output: Sequence[Mapping[str, Any]], usage: Mapping[str, Any], new_id: Any) -> dict[str, Any]:
    return {
        "id": new_id("resp"),
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": output,
        "usage": usage,
    }
