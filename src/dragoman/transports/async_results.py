"""Async result store: responses that are kept in memory and fetched later by a token."""

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
from msgspec import structs

from dragoman.core.callers import share_of
from dragoman.core.calls import Request, ServerCall
from dragoman.core.errors import Overloaded
from dragoman.core.foreign_code import ClientDisconnected
from dragoman.protocols.wire import (
    BackgroundCall,
    Buffer,
    Headers,
    HttpRequest,
    HttpResponse,
    PartialResult,
    ResultPoll,
)
from dragoman.system.request_context import client_request_id

MAX_RESULTS = 1024
_MAX_BYTES = 1 << 28  # of all results
KEEP_S = 900.0  # after the request or the last poll
_MAX_OFFSET_DIGITS = 9


class StoredResultCall(msgspec.Struct, ServerCall[HttpResponse], frozen=True):
    """A request about a stored result, on its way from a server process to the process that stores them."""

    http: HttpRequest


def stored_result_request(http: HttpRequest) -> Request[HttpResponse]:
    """Return a request that carries all of an HTTP request to another process."""
    sent = structs.replace(http, body=bytes(http.body), headers=dict(http.headers), params=dict(http.params))
    return Request(StoredResultCall(sent), id=client_request_id(http.headers))


class AsyncResult:
    """The response writer of a background call of an owner, which stores the chunks of the response."""

    def __init__(self, store: "AsyncResultStore", owner: str) -> None:
        self._store = store
        self.owner = owner
        self.status = 0
        self.headers: Headers = ()
        self.chunks: list[bytes] = []
        self.is_complete = False
        self.is_disconnected = False  # the response broke off

    @property
    def started(self) -> bool:
        return self.status > 0

    async def send(self, response: HttpResponse) -> None:
        await self.start(response.status, response.headers)
        await self.end(b"".join(response.body))

    async def start(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers

    def write(self, chunk: Buffer) -> Awaitable[None]:
        if self.is_disconnected or not self._store.reserve(self.owner, len(chunk)):
            self.abort()
            raise ClientDisconnected
        if chunk:
            self.chunks.append(bytes(chunk))
        return asyncio.sleep(0)  # a model that never waits would block the event loop

    async def end(self, chunk: Buffer) -> None:
        await self.write(chunk)
        self.is_complete = True

    def abort(self) -> None:
        self.is_disconnected = self.is_complete = True


class AsyncResultStore:
    """Stores the results of background calls by token. Only the owner of a call can fetch its result."""

    def __init__(self) -> None:
        self._results: dict[str, AsyncResult] = {}
        self._expiries: dict[str, asyncio.TimerHandle] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._bytes: Counter[str] = Counter()  # by owner

    def reserve(self, owner: str, size: int) -> bool:
        """Count `size` bytes more; return False if there is no space for them."""
        if self._free_bytes(owner) < size:
            return False
        self._bytes[owner] += size
        return True

    def _free_bytes(self, owner: str) -> int:
        return min(_MAX_BYTES - self._bytes.total(), share_of(owner, _MAX_BYTES) - self._bytes[owner])

    def begin(
        self, call: BackgroundCall, run: Callable[[AsyncResult], Coroutine[Any, Any, None]], owner: str
    ) -> HttpResponse:
        """Start a background call and return the response with its token. Raises Overloaded if the store is full."""
        own = sum(result.owner == owner for result in self._results.values())
        has_space = len(self._results) < MAX_RESULTS and own < share_of(owner, MAX_RESULTS)
        if not has_space or self._free_bytes(owner) <= 0:
            raise Overloaded("too many results wait to be fetched; fetch some, or try again later", 1.0)
        token, result = secrets.token_urlsafe(24), AsyncResult(self, owner)
        self._results[token] = result
        self._tasks[token] = asyncio.get_running_loop().create_task(run(result))
        self._renew(token)
        return call.format_accepted(token)

    def poll(self, poll: ResultPoll, owner: str) -> HttpResponse:
        """Return the chunks that are there from the offset in the token on, at most as many as are asked for."""
        token, _, offset = poll.token.partition(".")
        result = self._results.get(token)
        is_valid = not offset or (offset.isdecimal() and len(offset) <= _MAX_OFFSET_DIGITS)
        if result is None or result.owner != owner or not is_valid or int(offset or 0) > len(result.chunks):
            return poll.format_response(None)
        self._renew(token)
        start = int(offset or 0)
        chunks = tuple(result.chunks[start : start + poll.max_chunks])
        stop = start + len(chunks)
        following = "" if result.is_complete and stop == len(result.chunks) else f"{token}.{stop}"
        is_truncated = result.is_disconnected and not following
        return poll.format_response(PartialResult(result.status, result.headers, chunks, following, is_truncated))

    def _renew(self, token: str) -> None:
        """Keep a result for some time from now on."""
        if token in self._expiries:
            self._expiries[token].cancel()
        self._expiries[token] = asyncio.get_running_loop().call_later(KEEP_S, self._drop, token)

    def _drop(self, token: str) -> None:
        result = self._results.pop(token)
        del self._expiries[token]
        self._tasks.pop(token).cancel()
        self._bytes[result.owner] -= sum(map(len, result.chunks))
        self._bytes += Counter()  # without owners of nothing
