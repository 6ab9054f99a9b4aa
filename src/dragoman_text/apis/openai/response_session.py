"""Responses over a WebSocket connection (Open Responses 2026-04-24): each message of the client is a turn.

The connection remembers its last response, stored or not, so that the next turn needs only its new items and
`previous_response_id`. A turn that fails forgets the response which it refers to: the client begins a new chain.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dragoman.core.errors import InvalidInput
from dragoman.core.sampling import format_value
from dragoman.formats.exact_json import dump_json, load_json
from dragoman.protocols.parameters import object_body
from dragoman.protocols.wire import EndpointResult, HttpRequest, HttpResponse, Policy
from dragoman_text.apis.openai.response_routes import Responses, Turn
from dragoman_text.apis.openai.responses import parse_response_parameters

_CREATE = "response.create"


class ResponseSession(Turn):
    """A `MessageSession`: one connection, and its current turn."""

    is_local = True
    end = b""

    def __init__(self, responses: Responses, policy: Policy) -> None:
        self._responses, self._policy = responses, policy
        self._last: tuple[str, Sequence[Mapping[str, Any]]] = ("", ())
        self._previous: Any = None  # the response that the current turn refers to

    @staticmethod
    def frame(kind: str, data: bytes) -> bytes:
        """Return an event as a line."""
        return data + b"\n"

    def answer(self, http: HttpRequest) -> EndpointResult:
        self._previous, self.generates = None, True
        body = {**object_body(http.body, self._policy)}
        self._previous = body.get("previous_response_id")
        if (kind := body.pop("type", None)) != _CREATE:
            raise InvalidInput(f'`type` must be "{_CREATE}"; got {format_value(kind)}')
        if body.pop("stream", True) is False:
            raise InvalidInput("`stream` must be true or left out: responses over a WebSocket are streamed")
        if (generate := body.pop("generate", True)) not in (True, False, None):
            raise InvalidInput(f"`generate` must be true or false; got {format_value(generate)}")
        self.generates = generate is not False
        return self._responses.create_from(http, body, parse_response_parameters(body, self._policy), self)

    def format_response(self, response: HttpResponse) -> bytes:
        """Return the lines of a turn that was not streamed: its events, or an error."""
        data = b"".join(map(bytes, response.body))
        if response.status < 400:
            return data
        self.forget()
        error = load_json(data)["error"]
        headers = {name: value for name, value in response.headers if name != "content-type"}
        value = {**error, "code": error.get("code") or error["type"], **({"headers": headers} if headers else {})}
        return dump_json({"type": "error", "status": response.status, "error": value}) + b"\n"

    # --- the turn ------------------------------------------------------------------------------------------------

    def find(self, id_: str) -> Sequence[Mapping[str, Any]] | None:
        return self._last[1] if id_ and id_ == self._last[0] else None

    def keep(self, id_: str, items: Sequence[Mapping[str, Any]]) -> None:
        self._last = id_, items

    def forget(self) -> None:
        if self._previous == self._last[0]:
            self._last = "", ()
