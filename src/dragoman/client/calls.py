"""How each call goes, whether a thread that blocks or an event loop takes it from one wait to the next."""

import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from dragoman.client import inputs as given
from dragoman.client.exchange import Deadline, Exchange, StreamExchange
from dragoman.client.faults import ServerUnreachable
from dragoman.client.result import Result
from dragoman.core.calls import IndexEntry, ModelDescription, ServerDescription
from dragoman.core.errors import DragomanError, InvalidInput, ModelNotFound
from dragoman.core.tensor import Scalar
from dragoman.formats.message import InferenceRequest, InferenceResponse

T = TypeVar("T")
Opened = tuple[list[InferenceResponse], AsyncGenerator[InferenceResponse, None]]

_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 10.0


class Wire(Protocol):
    """The questions of the protocol in one of its forms, REST or gRPC."""

    def infer(self, model: str, version: str, request: InferenceRequest) -> Exchange[InferenceResponse]: ...
    def stream(self, model: str, version: str, request: InferenceRequest) -> StreamExchange: ...
    def live(self) -> Exchange[bool]: ...
    def ready(self, model: str, version: str) -> Exchange[bool]: ...
    def server(self) -> Exchange[ServerDescription]: ...
    def model(self, model: str, version: str) -> Exchange[ModelDescription]: ...
    def models(self) -> Exchange[list[str]]: ...
    def index(self, ready: bool) -> Exchange[list[IndexEntry]]: ...
    def load(self, model: str) -> Exchange[None]: ...
    def unload(self, model: str) -> Exchange[None]: ...


class Transport(Protocol):
    """What carries questions to one server and their answers back.

    That of a client that blocks never suspends a coroutine: it has its answers by the time it comes back.
    """

    async def ask(self, question: Any, deadline: Deadline) -> Any: ...
    def stream(self, question: Any, deadline: Deadline) -> AsyncGenerator[Any, None]: ...
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Inferring:
    """A question for a model as the caller put it; see `Client.infer`."""

    model: str
    inputs: Any
    version: str
    outputs: given.Wanted
    parameters: Mapping[str, Scalar] | None
    id: str
    timeout_s: float | None
    decode: bool


class Calls:
    """The calls to one server. What models told of themselves is remembered until it does not fit any more."""

    def __init__(
        self,
        wire: Wire,
        transport: Transport,
        sleep: Callable[[float], Awaitable[None]],
        timeout_s: float | None,
        retries: int,
    ) -> None:
        self._wire = wire
        self._transport = transport
        self._sleep = sleep
        self._timeout_s = timeout_s
        self._retries = retries
        self._known: dict[tuple[str, str], ModelDescription] = {}

    async def infer(self, asked: Inferring) -> Result:
        deadline = self._deadline(asked.timeout_s)
        with self._fitting(asked):
            exchange = self._wire.infer(asked.model, asked.version, await self._request(asked, deadline))
            return Result(await self._asked(exchange, deadline), asked.decode)

    async def stream(self, asked: Inferring) -> AsyncGenerator[Result, None]:
        deadline = self._deadline(asked.timeout_s)
        with self._fitting(asked):
            exchange = self._wire.stream(asked.model, asked.version, await self._request(asked, deadline))
            first, rest = await self._retried(lambda: self._opened(exchange, deadline), deadline)
        async with aclosing(rest):
            for response in first:
                yield Result(response, asked.decode)
            async for response in rest:
                yield Result(response, asked.decode)

    async def live(self) -> bool:
        return await self._health(self._wire.live())

    async def ready(self, model: str | None, version: str) -> bool:
        return await self._health(self._wire.ready(model or "", version))

    async def metadata(self, model: str | None, version: str) -> Any:
        return await self._asked(self._wire.model(model, version) if model else self._wire.server())

    async def models(self) -> list[str]:
        return await self._asked(self._wire.models())

    async def index(self, ready: bool) -> list[IndexEntry]:
        return await self._asked(self._wire.index(ready))

    async def load(self, model: str, timeout_s: float | None) -> None:
        self._known.clear()
        await self._asked(self._wire.load(model), self._deadline(timeout_s))

    async def unload(self, model: str, timeout_s: float | None) -> None:
        self._known.clear()
        await self._asked(self._wire.unload(model), self._deadline(timeout_s))

    async def close(self) -> None:
        await self._transport.close()

    # --- what these share --------------------------------------------------------------------------------------

    def _deadline(self, timeout_s: float | None = None) -> Deadline:
        return Deadline.after(self._timeout_s if timeout_s is None else timeout_s)

    async def _once(self, exchange: Exchange[T], deadline: Deadline) -> T:
        return exchange.read(await self._transport.ask(exchange.question, deadline))

    async def _asked(self, exchange: Exchange[T], deadline: Deadline | None = None) -> T:
        until = deadline or self._deadline()
        return await self._retried(lambda: self._once(exchange, until), until)

    async def _health(self, exchange: Exchange[bool]) -> bool:
        """Asked once: whoever waits for a server asks again; one that does not listen is neither live nor ready."""
        try:
            return await self._once(exchange, self._deadline())
        except ServerUnreachable as fault:
            if fault.refused:
                return False
            raise

    async def _retried(self, attempt: Callable[[], Awaitable[T]], deadline: Deadline) -> T:
        """Attempt it, again after a wait where the server did not take it on and asks for that."""
        for wait_s in waits(self._retries):
            try:
                return await attempt()
            except DragomanError as fault:
                refused = isinstance(fault, ServerUnreachable) and fault.refused
                if fault.retry_after_s is None and not refused:
                    raise
                wait_s += fault.retry_after_s or 0.0
                if not deadline.allows(wait_s):
                    raise  # it tells more than that the time is over
            await self._sleep(wait_s)
        return await attempt()

    # --- inference ---------------------------------------------------------------------------------------------

    async def _request(self, asked: Inferring, deadline: Deadline) -> InferenceRequest:
        signature = None
        if given.needs_signature(asked.inputs):
            key = asked.model, asked.version
            if key not in self._known:
                self._known[key] = await self._asked(self._wire.model(*key), deadline)
            signature = self._known[key].signature
        made = given.request(asked.inputs, signature, asked.model)
        return given.completed(made, asked.outputs, asked.parameters, asked.id)

    async def _opened(self, exchange: StreamExchange, deadline: Deadline) -> Opened:
        """A stream whose first answer, if there is one, is there: a fault before it may be worth another try."""
        pieces = self._pieces(exchange, deadline)
        return [p for p in [await anext(pieces, None)] if p is not None], pieces

    async def _pieces(self, exchange: StreamExchange, deadline: Deadline) -> AsyncGenerator[InferenceResponse, None]:
        read = exchange.reader()
        async with aclosing(self._transport.stream(exchange.question, deadline)) as chunks:
            async for chunk in chunks:
                for piece in read(chunk):
                    yield piece

    @contextmanager
    def _fitting(self, asked: Inferring) -> Iterator[None]:
        """What was known of the model is asked anew after a refusal, for it may have been replaced."""
        try:
            yield
        except (InvalidInput, ModelNotFound):
            self._known.pop((asked.model, asked.version), None)
            raise


def waits(retries: int) -> Iterator[float]:
    """How long to wait before each retry, in seconds: ever longer, and by chance, so that clients do not march."""
    for attempt in range(retries):
        yield min(_FIRST_WAIT_S * 2**attempt, _LONGEST_WAIT_S) * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
