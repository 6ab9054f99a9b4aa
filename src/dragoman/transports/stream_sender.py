"""Formats the chunks of a streamed response and writes them.

A chunk of text or of small tensors is formatted and written within the call of `take`. The first one waits until the
headers are written, and larger ones may be formatted in a thread: `take` then returns a coroutine to wait for.
"""

from collections.abc import Awaitable
from typing import Any, NoReturn

from dragoman.core.calls import Response
from dragoman.core.chunks import ReaderClosed
from dragoman.core.errors import DragomanError
from dragoman.core.foreign_code import is_interruption
from dragoman.core.sizes import INLINE
from dragoman.core.text import Generation
from dragoman.protocols.wire import Headers, HttpResponse, HttpStream, rate_limit_headers
from dragoman.transports.executor import MessageExecutor, weight
from dragoman.transports.response_writer import ResponseWriter, with_headers


class StreamSender:
    """Writes the chunks of one stream. `take` raises ReaderClosed once no more are to come.

    error: of the format, which ends the stream. broken: of the writer, which breaks the response off.
    whole: the response, if the first chunk is a whole one. Nothing is written then.
    """

    __slots__ = ("_executor", "_is_started", "_stream", "_writer", "broken", "error", "whole")

    def __init__(self, stream: HttpStream[Any], writer: ResponseWriter, executor: MessageExecutor) -> None:
        self._stream = stream
        self._writer = writer
        self._executor = executor
        self._is_started = False
        self.error: BaseException | None = None
        self.broken: BaseException | None = None
        self.whole: HttpResponse | None = None

    def take(self, response: Response[Any]) -> Awaitable[None] | None:
        """Write a chunk; see `dragoman.core.chunks.Take`."""
        answer = response.answer
        if not self._is_started:
            return self._take_first(response)
        if type(answer) is not Generation and (isinstance(answer, DragomanError) or weight(answer) > INLINE):
            return self._take_large(response)
        try:
            chunk = self._stream.format_chunk(response)
        except BaseException as error:
            self._fail(error)
        try:
            sending = self._writer.write(chunk)
        except BaseException as error:
            self._break_off(error)
        return None if sending is None else self._wait(sending)

    async def _wait(self, sending: Awaitable[None]) -> None:
        try:
            await sending
        except BaseException as error:
            self._break_off(error)

    def _break_off(self, error: BaseException) -> NoReturn:
        if is_interruption(error):
            raise error
        self.broken = error
        raise ReaderClosed from error

    async def _take_first(self, response: Response[Any]) -> None:
        """Write the headers and the first chunk, unless that is an error with a status of its own, or all of it."""
        if not isinstance(response.answer, DragomanError):
            try:
                self.whole = self._stream.format_whole(response)
            except BaseException as error:
                self._fail(error)
            if self.whole is not None:
                self.whole = with_headers(self.whole, rate_limit_headers(response.limits))
                raise ReaderClosed
        chunk = await self._format(response)
        self._is_started = True
        await self._wait(self._start(chunk, rate_limit_headers(response.limits)))

    async def _start(self, chunk: bytes, limits: Headers) -> None:
        await self._writer.start(200, (*self._stream.headers, *limits))
        await self._write(chunk)

    async def _take_large(self, response: Response[Any]) -> None:
        await self._wait(self._write(await self._format(response)))

    async def _write(self, chunk: bytes) -> None:
        if (sending := self._writer.write(chunk)) is not None:
            await sending

    async def _format(self, response: Response[Any]) -> bytes:
        """Return a chunk of any size, or the error of one."""
        answer = response.answer
        try:
            if isinstance(answer, DragomanError):
                return self._stream.format_late_error(answer)
            return await self._executor.format(self._stream.format_chunk, response)
        except BaseException as error:
            if is_interruption(error):
                raise
            self._fail(error)

    def _fail(self, error: BaseException) -> NoReturn:
        self.error = error
        raise ReaderClosed from error
