"""The client for asyncio."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from os import PathLike
from typing import Any, Self, TypeVar, overload

from dragoman.client.address import Address, Compression, address
from dragoman.client.calls import Calls, Inferring, wire
from dragoman.client.exchange import Ask, Deadline, Open, Steps, StreamExchange, Wait
from dragoman.client.inputs import Wanted
from dragoman.client.result import Result
from dragoman.core.calls import IndexEntry, ModelDescription, ServerDescription
from dragoman.core.errors import DragomanError
from dragoman.core.tensor import Scalar
from dragoman.payload.message import InferenceResponse

T = TypeVar("T")


class AsyncClient:
    """`Client` for asyncio: the same arguments and methods, to be awaited; `stream` is for `async for`.

    It belongs to the event loop that first uses it.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float | None = 60.0,
        retries: int = 3,
        token: str = "",
        headers: Mapping[str, str] | None = None,
        compression: Compression = None,
        tls_ca: str | PathLike[str] | None = None,
        tls_verify: bool = True,
    ) -> None:
        self.url = url
        where = address(url, token, headers, compression, str(tls_ca or ""), tls_verify)
        self._calls = Calls(wire(where), timeout_s, retries)
        self._transport = _transport(where)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections that are kept; the client may still be used over REST."""
        await self._transport.close()

    # --- inference -----------------------------------------------------------------------------------------------

    async def infer(
        self,
        model: str,
        inputs: Any,
        *,
        version: str = "",
        outputs: Wanted = None,
        parameters: Mapping[str, Scalar] | None = None,
        id: str = "",  # noqa: A002 - the protocol's own word
        timeout_s: float | None = None,
        decode: bool = True,
    ) -> Result:
        """See `Client.infer`."""
        asked = Inferring(
            model=model,
            inputs=inputs,
            version=version,
            outputs=outputs,
            parameters=parameters,
            id=id,
            timeout_s=timeout_s,
        )
        return Result(await self._run(self._calls.infer(asked)), decode)

    async def stream(
        self,
        model: str,
        inputs: Any,
        *,
        version: str = "",
        outputs: Wanted = None,
        parameters: Mapping[str, Scalar] | None = None,
        id: str = "",  # noqa: A002
        timeout_s: float | None = None,
        decode: bool = True,
    ) -> AsyncGenerator[Result, None]:
        """See `Client.stream`; a loop that is left early is best wrapped in `contextlib.aclosing`."""
        asked = Inferring(
            model=model,
            inputs=inputs,
            version=version,
            outputs=outputs,
            parameters=parameters,
            id=id,
            timeout_s=timeout_s,
        )
        first, rest = await self._run(self._calls.stream(asked))
        async with aclosing(rest):
            for response in first:
                yield Result(response, decode)
            async for response in rest:
                yield Result(response, decode)

    # --- health and metadata -------------------------------------------------------------------------------------

    async def live(self) -> bool:
        """Whether the server answers; False where nothing listens. Asked once, without retries."""
        return await self._run(self._calls.live())

    async def ready(self, model: str | None = None, version: str = "") -> bool:
        """Whether a model, or the server with all of its models, can answer; False where nothing listens."""
        return await self._run(self._calls.ready(model, version))

    @overload
    async def metadata(self, model: None = None, version: str = "") -> ServerDescription: ...
    @overload
    async def metadata(self, model: str, version: str = "") -> ModelDescription: ...
    async def metadata(self, model: str | None = None, version: str = "") -> Any:
        """What a model tells of itself (`.signature.inputs`), or without one the server."""
        return await self._run(self._calls.metadata(model, version))

    async def models(self) -> list[str]:
        """The names of the models; over gRPC those of the index, which needs the token."""
        return await self._run(self._calls.models())

    # --- model control -------------------------------------------------------------------------------------------

    async def index(self, *, ready: bool = False) -> list[IndexEntry]:
        """Every model version that the server knows, or those that are ready; needs the token."""
        return await self._run(self._calls.index(ready))

    async def load(self, model: str, *, timeout_s: float | None = None) -> None:
        """Load a model, or load it anew; needs the token."""
        await self._run(self._calls.load(model, timeout_s))

    async def unload(self, model: str, *, timeout_s: float | None = None) -> None:
        """Let the server drop a model; needs the token."""
        await self._run(self._calls.unload(model, timeout_s))

    # --- the steps of a call -------------------------------------------------------------------------------------

    async def _run(self, steps: Steps[T]) -> T:
        try:
            step = next(steps)
            while True:
                try:
                    found = await self._taken(step)
                except DragomanError as fault:
                    step = steps.throw(fault)
                else:
                    step = steps.send(found)
        except StopIteration as end:
            value: T = end.value
            return value

    async def _taken(self, step: Ask | Open | Wait) -> Any:
        match step:
            case Ask(exchange, deadline):
                return exchange.read(await self._transport.ask(exchange.question, deadline))
            case Open(streamed, deadline):
                pieces = self._pieces(streamed, deadline)
                return [p for p in [await anext(pieces, None)] if p is not None], pieces
            case Wait(wait_s):
                return await asyncio.sleep(wait_s)

    async def _pieces(self, exchange: StreamExchange, deadline: Deadline) -> AsyncGenerator[InferenceResponse, None]:
        read = exchange.reader()
        async with aclosing(self._transport.stream(exchange.question, deadline)) as chunks:
            async for chunk in chunks:
                for piece in read(chunk):
                    yield piece


def _transport(where: Address) -> Any:
    if where.over_grpc:
        from dragoman.client.grpc_async import GrpcTransport

        return GrpcTransport(where)
    from dragoman.client.http_async import HttpTransport

    return HttpTransport(where)
