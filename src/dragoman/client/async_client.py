"""The client for asyncio."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping
from os import PathLike
from typing import Any, Self, overload

from dragoman.client.calls import ClientBase, ClientTransport, InferArguments, RetryPolicy
from dragoman.client.mapping import MapOptions, MapRun, PointResult, map_in_tasks
from dragoman.client.messages import Address
from dragoman.client.results import Result
from dragoman.client.tensors import OutputNames
from dragoman.core.calls import IndexEntry, ModelDescription, ServerDescription
from dragoman.core.tensor import Scalar


class AsyncClient(ClientBase):
    """Client of one server for asyncio: arguments and methods of `Client`, awaited; `stream` is an async generator.

    It belongs to the event loop that first uses it.
    """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close idle connections; the client can still be used."""
        await self._calls.close()

    # --- inference -----------------------------------------------------------------------------------------------

    async def infer(
        self,
        model: str,
        inputs: Any,
        *,
        version: str = "",
        outputs: OutputNames = None,
        parameters: Mapping[str, Scalar] | None = None,
        id: str = "",  # noqa: A002 - the protocol's own word
        timeout_s: float | None = None,
        decode: bool = True,
        cast: bool = False,
    ) -> Result:
        """See `Client.infer`."""
        arguments = InferArguments(model, inputs, version, outputs, parameters, id, timeout_s, decode, cast)
        return await self._calls.infer(arguments)

    def stream(
        self,
        model: str,
        inputs: Any,
        *,
        version: str = "",
        outputs: OutputNames = None,
        parameters: Mapping[str, Scalar] | None = None,
        id: str = "",  # noqa: A002
        timeout_s: float | None = None,
        decode: bool = True,
        cast: bool = False,
    ) -> AsyncGenerator[Result, None]:
        """See `Client.stream`. Wrap the generator in `contextlib.aclosing` if the loop may end early."""
        arguments = InferArguments(model, inputs, version, outputs, parameters, id, timeout_s, decode, cast)
        return self._calls.stream(arguments)

    def map(
        self,
        model: str,
        points: Iterable[Any] | AsyncIterable[Any],
        *,
        version: str = "",
        outputs: OutputNames = None,
        parameters: Mapping[str, Scalar] | None = None,
        timeout_s: float | None = None,
        decode: bool = True,
        cast: bool = False,
        concurrency: int = 32,
        window: int | None = None,
        ordered: bool = False,
        retries: int | None = None,
        idempotent: bool = False,
        journal: str | PathLike[str] | None = None,
        journal_fsync: bool = True,
        progress: bool | None = None,
    ) -> AsyncGenerator[PointResult, None]:
        """See `Client.map`; `points` may be an async iterable. Wrap the generator in `contextlib.aclosing`."""
        arguments = InferArguments(model, None, version, outputs, parameters, "", timeout_s, decode, cast)
        options = MapOptions.of(concurrency, window, ordered, journal, journal_fsync, progress)
        retry = RetryPolicy(retries, idempotent)
        calls = self._new_calls(self._calls.transport, asyncio.sleep, retry)
        return map_in_tasks(MapRun(calls, arguments, options, points, asyncio.to_thread), points)

    # --- health and metadata -------------------------------------------------------------------------------------

    async def live(self) -> bool:
        """Return whether the server is live; False if nothing listens. Sent once, without retries."""
        return await self._calls.live()

    async def ready(self, model: str | None = None, version: str = "") -> bool:
        """Return whether a model, or the server with all its models, is ready; False for an unknown model or server."""
        return await self._calls.ready(model, version)

    @overload
    async def metadata(self, model: None = None, version: str = "") -> ServerDescription: ...
    @overload
    async def metadata(self, model: str, version: str = "") -> ModelDescription: ...
    async def metadata(self, model: str | None = None, version: str = "") -> Any:
        """Return the metadata of a model (`.signature.inputs`), or of the server if no model is named."""
        return await self._calls.metadata(model, version)

    async def models(self) -> list[str]:
        """Return the names of the models; over gRPC they are taken from the index, which needs the token."""
        return await self._calls.models()

    # --- model control -------------------------------------------------------------------------------------------

    async def index(self, *, ready: bool = False) -> list[IndexEntry]:
        """Return all model versions of the repository, or only those that are ready; needs the token."""
        return await self._calls.index(ready)

    async def load(self, model: str, *, timeout_s: float | None = None) -> None:
        """Load or reload a model; needs the token."""
        await self._calls.load(model, timeout_s)

    async def unload(self, model: str, *, timeout_s: float | None = None) -> None:
        """Unload a model; needs the token."""
        await self._calls.unload(model, timeout_s)

    # --- transport ------------------------------------------------------------------------------------------------

    _sleep = staticmethod(asyncio.sleep)

    def _transport(self, where: Address) -> ClientTransport:
        from dragoman.client.http_async import connect_transport, connector

        if where.is_grpc:
            from dragoman.client.rpc import GrpcTransport

            return GrpcTransport(where, connector)
        return connect_transport(where)
