"""Async result store: responses that are kept in memory and fetched later by a token."""

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from dragoman.core.calls import Request, ServerCall
from dragoman.core.errors import Overloaded
from dragoman.protocols.wire import (
    BackgroundCall,
    Buffer,
    Headers,
    HttpRequest,
    HttpResponse,
    PartialResult,
    ResultPoll,
)

# How many answers are kept and how many bytes they take together; how long after the last that was heard of each.
_MOST_KEPT = 1024
_MOST_BYTES = 1 << 28
_KEPT_S = 900.0
_MOST_DIGITS = 9


@dataclass(frozen=True, slots=True)
class StoredResultCall(ServerCall[HttpResponse]):
    """A request about an answer that is kept, on its way to the one process that keeps those of several front ends."""

    http: HttpRequest


def stored_result_request(http: HttpRequest) -> Request[HttpResponse]:
    """The request with everything in it that a process needs to answer it for another."""
    sent = structs.replace(http, body=bytes(http.body), headers=dict(http.headers), params=dict(http.params))
    return Request(StoredResultCall(sent), id=http.headers.get("x-request-id", ""))


class AsyncResult:
    """The caller of one request whose client has gone to come back: what is written stays here, part by part."""

    def __init__(self, shelf: "AsyncResultStore") -> None:
        self._shelf = shelf
        self.status = 0
        self.headers: Headers = ()
        self.parts: list[bytes] = []
        self.done = False
        self.left = False

    @property
    def started(self) -> bool:
        return self.status > 0

    async def send(self, response: HttpResponse) -> None:
        await self.start(response.status, response.headers)
        await self.end(b"".join(response.body))

    async def start(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers

    async def write(self, part: Buffer) -> None:
        if self.left or not self._shelf.has_room(len(part)):
            self.hang_up()
            raise asyncio.CancelledError
        if part:
            self.parts.append(bytes(part))
        await asyncio.sleep(0)  # a model that never waits would not let anybody else

    async def end(self, part: Buffer) -> None:
        await self.write(part)
        self.done = True

    def hang_up(self) -> None:
        """What was written is not the whole, and never will be."""
        self.left = self.done = True


class AsyncResultStore:
    """The answers that wait to be fetched."""

    def __init__(self) -> None:
        self._kept: dict[str, AsyncResult] = {}
        self._ends: dict[str, asyncio.TimerHandle] = {}
        self._work: dict[str, asyncio.Task[None]] = {}
        self._bytes = 0

    def has_room(self, size: int) -> bool:
        """Whether so many bytes more may be kept; they are counted then."""
        if self._bytes + size > _MOST_BYTES:
            return False
        self._bytes += size
        return True

    def begin(self, later: BackgroundCall, work: Callable[[AsyncResult], Coroutine[Any, Any, None]]) -> HttpResponse:
        """Let an answer be worked out, and tell its token. Raises Overloaded where too many are kept already."""
        if len(self._kept) >= _MOST_KEPT or self._bytes >= _MOST_BYTES:
            raise Overloaded("too many answers wait to be fetched; fetch some, or ask later", 1.0)
        token, kept = secrets.token_urlsafe(24), AsyncResult(self)
        self._kept[token] = kept
        self._work[token] = asyncio.get_running_loop().create_task(work(kept))
        self._keep(token)
        return later.format_accepted(token)

    def fetch(self, asked: ResultPoll) -> HttpResponse:
        """So many of the parts of an answer as there are, and are wanted, from where its token points to."""
        name, _, place = asked.token.partition(".")
        kept = self._kept.get(name)
        placed = not place or (place.isdecimal() and len(place) <= _MOST_DIGITS)
        if kept is None or not placed or int(place or 0) > len(kept.parts):
            return asked.format_response(None)
        self._keep(name)
        start = int(place or 0)
        parts = kept.parts[start : start + asked.max_chunks]
        stop = start + len(parts)
        following = "" if kept.done and stop == len(kept.parts) else f"{name}.{stop}"
        return asked.format_response(
            PartialResult(kept.status, kept.headers, tuple(parts), following, is_truncated=kept.left and not following)
        )

    def _keep(self, token: str) -> None:
        """Keep an answer for a while from now on."""
        if token in self._ends:
            self._ends[token].cancel()
        self._ends[token] = asyncio.get_running_loop().call_later(_KEPT_S, self._drop, token)

    def _drop(self, token: str) -> None:
        kept = self._kept.pop(token)
        del self._ends[token]
        self._work.pop(token).cancel()
        self._bytes -= sum(map(len, kept.parts))
