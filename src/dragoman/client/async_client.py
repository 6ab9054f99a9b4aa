"""The client for asyncio."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Self, overload

from dragoman.client.address import Address
from dragoman.client.calls import Inferring, Transport
from dragoman.client.connected import Connected
from dragoman.client.inputs import Wanted
from dragoman.client.result import Result
from dragoman.core.calls import IndexEntry, ModelDescription, ServerDescription
from dragoman.core.tensor import Scalar


class AsyncClient(Connected):
    """`Client` for asyncio: the same arguments and methods, to be awaited; `stream` is for `async for`.

    It belongs to the event loop that first uses it.
    """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections that are kept; the client may still be used over REST."""
        await self._calls.close()

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
        asked = Inferring(model, inputs, version, outputs, parameters, id, timeout_s, decode)
        return await self._calls.infer(asked)

    def stream(
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
        asked = Inferring(model, inputs, version, outputs, parameters, id, timeout_s, decode)
        return self._calls.stream(asked)

    # --- health and metadata -------------------------------------------------------------------------------------

    async def live(self) -> bool:
        """Whether the server answers; False where nothing listens. Asked once, without retries."""
        return await self._calls.live()

    async def ready(self, model: str | None = None, version: str = "") -> bool:
        """Whether a model, or the server with all of its models, can answer; False where nothing listens."""
        return await self._calls.ready(model, version)

    @overload
    async def metadata(self, model: None = None, version: str = "") -> ServerDescription: ...
    @overload
    async def metadata(self, model: str, version: str = "") -> ModelDescription: ...
    async def metadata(self, model: str | None = None, version: str = "") -> Any:
        """What a model tells of itself (`.signature.inputs`), or without one the server."""
        return await self._calls.metadata(model, version)

    async def models(self) -> list[str]:
        """The names of the models; over gRPC those of the index, which needs the token."""
        return await self._calls.models()

    # --- model control -------------------------------------------------------------------------------------------

    async def index(self, *, ready: bool = False) -> list[IndexEntry]:
        """Every model version that the server knows, or those that are ready; needs the token."""
        return await self._calls.index(ready)

    async def load(self, model: str, *, timeout_s: float | None = None) -> None:
        """Load a model, or load it anew; needs the token."""
        await self._calls.load(model, timeout_s)

    async def unload(self, model: str, *, timeout_s: float | None = None) -> None:
        """Let the server drop a model; needs the token."""
        await self._calls.unload(model, timeout_s)

    # --- what it is made of --------------------------------------------------------------------------------------

    _sleep = staticmethod(asyncio.sleep)

    def _transport(self, where: Address) -> Transport:
        if where.over_grpc:
            from dragoman.client.grpc_channel import GrpcTransport

            return GrpcTransport(where, asynchronous=True)
        from dragoman.client.http_async import transport

        return transport(where)
