"""Conversations of OpenAI's API: items that the server keeps, and to which responses append theirs.

A conversation is one record of JSON lines: its creation, then a line for each change (items, a deleted item, metadata).
Changes are appended, so that two requests at once, also in several processes, lose none of them.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dragoman.core.calls import Request, Response
from dragoman.core.errors import DragomanError, InvalidInput
from dragoman.core.record_calls import AppendRecord, DeleteRecord, ReadRecord, SaveRecord
from dragoman.core.sampling import format_value
from dragoman.formats.exact_json import dump_json, load_json
from dragoman.protocols.parameters import get_object, object_body, reject_unused
from dragoman.protocols.wire import (
    EndpointResult,
    EngineCall,
    HttpError,
    HttpRequest,
    HttpResponse,
    Policy,
    PreliminaryCall,
    json_response,
)
from dragoman_text.apis.common.records import owner_of
from dragoman_text.apis.openai.responses import check_items, page_of, parse_page, with_id
from dragoman_text.limits import MAX_MESSAGES

_PREFIX = "conv_"
_ENDS: Mapping[str, str] = {"assistant": "output_text"}


def conversation_id(value: Any) -> str:
    """Return the id of a `conversation` in a request: a text, or an object with `id`. Raises InvalidInput."""
    found = value.get("id") if isinstance(value, dict) else value
    if not isinstance(found, str) or not found:
        raise InvalidInput(f'`conversation` must be the id of one, or {{"id": ...}}; got {format_value(value)}')
    return found


class ConversationItems:
    """A conversation as its record says: when it was created, metadata, and items by id."""

    def __init__(self, data: bytes) -> None:
        self.created_at = 0
        self.metadata: Mapping[str, Any] = {}
        self.items: dict[str, Mapping[str, Any]] = {}
        for line in data.splitlines():
            change = load_json(line)
            self.created_at = change.get("created_at", self.created_at)
            self.metadata = change.get("metadata", self.metadata)
            self.items |= {item["id"]: item for item in change.get("items", ())}
            self.items.pop(change.get("deleted", ""), None)

    def describe(self, id_: str) -> dict[str, Any]:
        return {"id": id_, "object": "conversation", "created_at": self.created_at, "metadata": self.metadata}


def _line(**change: Any) -> bytes:
    return dump_json(change) + b"\n"


def append_items(owner: str, id_: str, items: Iterable[Mapping[str, Any]], also: SaveRecord | None) -> AppendRecord:
    """Return the call that appends items to a conversation; `also` is stored in the same step."""
    return AppendRecord(owner, id_, _line(items=[*items]), also)


def read(
    http: HttpRequest, id_: str, then: Callable[[ConversationItems], EndpointResult]
) -> PreliminaryCall[bytes | None]:
    """Read a conversation of the caller and continue with it. Raises HttpError 404."""

    def continue_with(response: Response[bytes | None]) -> EndpointResult:
        if response.answer is None or not id_.startswith(_PREFIX):
            raise _missing(id_)
        return then(ConversationItems(response.answer))

    return PreliminaryCall(Request(ReadRecord(owner_of(http), id_)), continue_with)


def _missing(id_: str) -> HttpError:
    return HttpError(404, f"conversation {format_value(id_)} not found: it does not exist, or is no longer stored")


class Conversations:
    """Endpoints of conversations. They belong to the key that created them."""

    def __init__(
        self,
        policy: Policy,
        write_error: Callable[[DragomanError | HttpError], HttpResponse],
        new_id: Callable[[str], str],
    ) -> None:
        self._policy, self._write_error, self._new_id = policy, write_error, new_id

    def _check_store(self) -> None:
        if self._policy.max_stored_responses <= 0:
            raise InvalidInput("this server stores no conversations (setting max_stored_responses)")

    def _body(self, http: HttpRequest, *names: str) -> Mapping[str, Any]:
        self._check_store()
        body = object_body(http.body, self._policy) if len(http.body) or "items" in names[:1] else {}
        reject_unused([name for name in body if name not in names], self._policy)
        return body

    def _new_items(self, value: Any, before: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
        """Return the items of a request with ids. Raises InvalidInput naming the item."""
        if not isinstance(value, list) or len(before) + len(value) > MAX_MESSAGES:
            raise InvalidInput(
                f"`items` must be a list, of at most {MAX_MESSAGES} with those before; got {format_value(value)}"
            )
        check_items(value, "items", before)
        items = [with_id(item, self._new_id) for item in value]
        known = {item["id"] for item in before}
        for i, item in enumerate(items):
            if item["id"] in known:
                raise InvalidInput(f"`items[{i}]`: `id` must be one that no other item has; got {item['id']!r}")
            known.add(item["id"])
        return items

    def create(self, http: HttpRequest) -> EndpointResult:
        body = self._body(http, "metadata", "items")
        items = [] if body.get("items") is None else self._new_items(body["items"])
        data = _line(created_at=int(time.time()), metadata=get_object(body, "metadata"), items=items)
        id_ = self._new_id("conv")
        described = json_response(ConversationItems(data).describe(id_))
        return EngineCall(Request(SaveRecord(owner_of(http), id_, data)), lambda _: described)

    def retrieve(self, http: HttpRequest) -> EndpointResult:
        id_ = http.params["id"]
        return read(http, id_, lambda found: json_response(found.describe(id_)))

    def update(self, http: HttpRequest) -> EndpointResult:
        metadata = get_object(self._body(http, "metadata"), "metadata")

        def then(found: ConversationItems) -> EndpointResult:
            found.metadata = metadata
            return self._append(http, _line(metadata=metadata), found.describe(http.params["id"]))

        return read(http, http.params["id"], then)

    def delete(self, http: HttpRequest) -> EndpointResult:
        id_ = http.params["id"]

        def reply(response: Response[bool]) -> HttpResponse:
            if not response.answer:
                return self._write_error(_missing(id_))
            return json_response({"id": id_, "object": "conversation.deleted", "deleted": True})

        if not id_.startswith(_PREFIX):
            raise _missing(id_)
        return EngineCall(Request(DeleteRecord(owner_of(http), id_)), reply)

    def add_items(self, http: HttpRequest) -> EndpointResult:
        value = self._body(http, "items").get("items")

        def then(found: ConversationItems) -> EndpointResult:
            items = self._new_items(value, [*found.items.values()])
            return self._append(http, _line(items=items), page_of([_shown(item) for item in items], len(items), ""))

        return read(http, http.params["id"], then)

    def list_items(self, http: HttpRequest) -> EndpointResult:
        limit, order, after = parse_page(http.query)

        def then(found: ConversationItems) -> EndpointResult:
            items = [_shown(item) for item in found.items.values()]
            return json_response(page_of(items if order == "asc" else items[::-1], limit, after))

        return read(http, http.params["id"], then)

    def item(self, http: HttpRequest) -> EndpointResult:
        return read(http, http.params["id"], lambda found: json_response(_shown(self._find(http, found))))

    def delete_item(self, http: HttpRequest) -> EndpointResult:
        def then(found: ConversationItems) -> EndpointResult:
            item = self._find(http, found)
            return self._append(http, _line(deleted=item["id"]), found.describe(http.params["id"]))

        return read(http, http.params["id"], then)

    def _find(self, http: HttpRequest, found: ConversationItems) -> Mapping[str, Any]:
        item = found.items.get(http.params["item"])
        if item is None:
            raise HttpError(404, f"item {format_value(http.params['item'])} not found in this conversation")
        return item

    def _append(self, http: HttpRequest, line: bytes, value: Any) -> EndpointResult:
        """Append a change, and respond with a value unless the conversation was deleted in between."""
        id_ = http.params["id"]

        def reply(response: Response[bool]) -> HttpResponse:
            return json_response(value) if response.answer else self._write_error(_missing(id_))

        return EngineCall(Request(AppendRecord(owner_of(http), id_, line)), reply)


def _shown(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an item as responses have it: a message with parts and a status."""
    if item.get("type") != "message":
        return item
    content = item["content"]
    if isinstance(content, str):
        content = [{"type": _ENDS.get(item["role"], "input_text"), "text": content}]
    return {"status": "completed", **item, "content": content}
