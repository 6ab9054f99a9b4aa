"""Calls to a server, with deadline and retries, for the blocking and the asyncio client."""

import math
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from itertools import count
from os import PathLike
from typing import Any, Protocol, TypeVar

from dragoman.client import tensors as request_inputs
from dragoman.client.errors import ServerUnreachable
from dragoman.client.messages import Address, Compression, Deadline, RemoteCall, RemoteStream, address
from dragoman.client.results import Result
from dragoman.core.calls import IndexEntry, ModelDescription, ServerDescription
from dragoman.core.errors import CallerError, DragomanError, Forbidden, InvalidInput, ModelNotFound, NotSupported
from dragoman.core.signature import Signature
from dragoman.core.tensor import Scalar
from dragoman.formats.message import InferenceRequest, InferenceResponse

T = TypeVar("T")
OpenStream = tuple[list[InferenceResponse], AsyncGenerator[InferenceResponse, None]]

_FIRST_WAIT_S = 0.1
_MAX_WAIT_S = 10.0
_SUMMARY_S = 3.0
_SUMMARY_MODELS = 30


class WireFormat(Protocol):
    """Requests of the protocol over REST or gRPC."""

    def infer(self, model: str, version: str, request: InferenceRequest) -> RemoteCall[InferenceResponse]: ...
    def stream(self, model: str, version: str, request: InferenceRequest) -> RemoteStream: ...
    def live(self) -> RemoteCall[bool]: ...
    def ready(self, model: str, version: str) -> RemoteCall[bool]: ...
    def server(self) -> RemoteCall[ServerDescription]: ...
    def model(self, model: str, version: str) -> RemoteCall[ModelDescription]: ...
    def models(self) -> RemoteCall[list[str]]: ...
    def index(self, ready: bool) -> RemoteCall[list[IndexEntry]]: ...
    def load(self, model: str) -> RemoteCall[None]: ...
    def unload(self, model: str) -> RemoteCall[None]: ...


class ClientTransport(Protocol):
    """Sends requests to one server and receives the responses.

    The transport of a blocking client never suspends: its coroutines finish in one step.
    """

    async def send(self, request: Any, deadline: Deadline) -> Any: ...
    def stream(self, request: Any, deadline: Deadline) -> AsyncGenerator[Any, None]: ...
    async def close(self) -> None: ...
    def interrupt(self) -> None: ...


@dataclass(frozen=True, slots=True)
class InferArguments:
    """Arguments of `Client.infer`."""

    model: str
    inputs: Any
    version: str
    outputs: request_inputs.OutputNames
    parameters: Mapping[str, Scalar] | None
    id: str
    timeout_s: float | None
    decode: bool
    cast: bool = False


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Which calls are sent again, and how often.

    retries: None for no limit. idempotent: also a call whose connection was lost, which may have been computed.
    """

    retries: int | None
    idempotent: bool = False

    def allows(self, error: DragomanError) -> bool:
        """Return whether a failed call may be sent again: it was not started, or may be computed twice."""
        if isinstance(error, ServerUnreachable) and (self.idempotent or error.refused):
            return True
        return error.retry_after_s is not None

    def delays_s(self) -> Iterator[float]:
        """Yield the delay before each retry in seconds: exponential back-off with jitter."""
        for attempt in count() if self.retries is None else range(self.retries):
            longest = min(_FIRST_WAIT_S * 2 ** min(attempt, 30), _MAX_WAIT_S)
            yield longest * random.uniform(0.5, 1.0)  # noqa: S311 - no secret


class ClientCalls:
    """Calls to one server. Metadata of models are cached until the server rejects a request based on them."""

    def __init__(
        self,
        wire: WireFormat,
        transport: ClientTransport,
        sleep: Callable[[float], Awaitable[None]],
        timeout_s: float | None,
        retry: RetryPolicy,
    ) -> None:
        self._wire = wire
        self.transport = transport
        self._sleep = sleep
        self._timeout_s = timeout_s
        self._retry = retry
        self._descriptions: dict[tuple[str, str], ModelDescription] = {}

    async def infer(self, arguments: InferArguments) -> Result:
        deadline = self.deadline(arguments.timeout_s)
        request = await self.request(arguments, deadline)
        return self.result(await self.send(arguments, request, deadline), arguments)

    async def send(self, arguments: InferArguments, request: InferenceRequest, deadline: Deadline) -> InferenceResponse:
        """Send a request that `request` built from the arguments."""
        with self._forget_if_rejected(arguments, request):
            return await self._call(self._wire.infer(arguments.model, arguments.version, request), deadline)

    async def stream(self, arguments: InferArguments) -> AsyncGenerator[Result, None]:
        deadline = self.deadline(arguments.timeout_s)
        request = await self.request(arguments, deadline)
        with self._forget_if_rejected(arguments, request):
            call = self._wire.stream(arguments.model, arguments.version, request)
            first, rest = await self._with_retries(lambda: self._open(call, deadline), deadline)
        async with aclosing(rest):
            for response in first:
                yield self.result(response, arguments)
            async for response in rest:
                yield self.result(response, arguments)

    def result(self, response: InferenceResponse, arguments: InferArguments) -> Result:
        description = self._descriptions.get((arguments.model, arguments.version))
        labels = {} if description is None else {name: each.names for name, each in description.labels.items()}
        return Result(response, arguments.decode, labels)

    async def live(self) -> bool:
        return await self._health(self._wire.live())

    async def ready(self, model: str | None, version: str) -> bool:
        return await self._health(self._wire.ready(model or "", version))

    async def metadata(self, model: str | None, version: str) -> Any:
        return await self._call(self._wire.model(model, version) if model else self._wire.server())

    async def models(self) -> list[str]:
        return await self._call(self._wire.models())

    async def summary(self) -> tuple[list[tuple[str, ModelDescription | None]], int]:
        """Return the first models with their metadata, None for one without, and how many there are more.

        Sent once, within a few seconds.
        """
        deadline = Deadline.after(min(self._timeout_s or math.inf, _SUMMARY_S))
        names = await self._once(self._wire.models(), deadline)
        found: list[tuple[str, ModelDescription | None]] = []
        for name in names[:_SUMMARY_MODELS]:
            try:
                description = await self._once(self._wire.model(name, ""), deadline)
            except CallerError:  # not loaded, or not for this key
                found.append((name, None))
            else:
                found.append((name, description))
        return found, len(names) - len(found)

    async def index(self, ready: bool) -> list[IndexEntry]:
        return await self._call(self._wire.index(ready))

    async def load(self, model: str, timeout_s: float | None) -> None:
        self._descriptions.clear()
        await self._call(self._wire.load(model), self.deadline(timeout_s))

    async def unload(self, model: str, timeout_s: float | None) -> None:
        self._descriptions.clear()
        await self._call(self._wire.unload(model), self.deadline(timeout_s))

    async def close(self) -> None:
        await self.transport.close()

    # --- shared ------------------------------------------------------------------------------------------------

    def deadline(self, timeout_s: float | None = None) -> Deadline:
        return Deadline.after(self._timeout_s if timeout_s is None else timeout_s)

    async def _once(self, call: RemoteCall[T], deadline: Deadline) -> T:
        return call.read(await self.transport.send(call.request, deadline))

    async def _call(self, call: RemoteCall[T], deadline: Deadline | None = None) -> T:
        until = deadline or self.deadline()
        return await self._with_retries(lambda: self._once(call, until), until)

    async def _health(self, call: RemoteCall[bool]) -> bool:
        """Send a health request once, without retries.

        A server that refuses connections is neither live nor ready, and an unknown model is not ready.
        """
        try:
            return await self._once(call, self.deadline())
        except ModelNotFound:
            return False
        except ServerUnreachable as error:
            if error.refused:
                return False
            raise

    async def _with_retries(self, attempt: Callable[[], Awaitable[T]], deadline: Deadline) -> T:
        """Call `attempt`, and call it again after a wait as long as the policy allows and time is left."""
        for wait_s in self._retry.delays_s():
            try:
                return await attempt()
            except DragomanError as error:
                if not self._retry.allows(error):
                    raise
                wait_s += error.retry_after_s or 0.0
                if not deadline.allows(wait_s):
                    raise  # more informative than DeadlineExceeded
                last_error = error
            await self._sleep(wait_s)
            if not deadline.allows(0.0):
                raise last_error
        return await attempt()

    # --- inference ---------------------------------------------------------------------------------------------

    async def request(self, arguments: InferArguments, deadline: Deadline) -> InferenceRequest:
        signature = None
        with self._forget_if_rejected(arguments):
            if request_inputs.needs_signature(arguments.inputs):
                signature = await self._signature(arguments, deadline)
            request = request_inputs.request(arguments.inputs, signature, arguments.model, arguments.cast)
            return request_inputs.with_options(request, arguments.outputs, arguments.parameters, arguments.id)

    async def _signature(self, arguments: InferArguments, deadline: Deadline) -> Signature | None:
        """Return the signature of a model; None if the server does not tell and the inputs have their own datatypes."""
        key = arguments.model, arguments.version
        if key not in self._descriptions:
            try:
                self._descriptions[key] = await self._call(self._wire.model(*key), deadline)
            except (NotSupported, Forbidden):
                if not request_inputs.has_own_datatypes(arguments.inputs) or arguments.cast:
                    raise
                return None
        return self._descriptions[key].signature

    async def _open(self, call: RemoteStream, deadline: Deadline) -> OpenStream:
        """Open a stream and wait for its first response, if any, so that an earlier error can be retried."""
        responses = self._responses(call, deadline)
        return [p for p in [await anext(responses, None)] if p is not None], responses

    async def _responses(self, call: RemoteStream, deadline: Deadline) -> AsyncGenerator[InferenceResponse, None]:
        read = call.reader()
        async with aclosing(self.transport.stream(call.request, deadline)) as chunks:
            async for chunk in chunks:
                for response in read(chunk):
                    yield response

    @contextmanager
    def _forget_if_rejected(self, arguments: InferArguments, request: InferenceRequest | None = None) -> Iterator[None]:
        """Drop the cached metadata of a model if the server rejects a request: it may have been replaced.

        An error about the datatype of an array says how to convert it.
        """
        try:
            yield
        except (InvalidInput, ModelNotFound) as error:
            description = self._descriptions.pop((arguments.model, arguments.version), None)
            if request is not None and description is not None:
                hint = request_inputs.conversion_hint(error.message, request, description.signature)
                if hint:
                    error.args = (f"{error.message}; {hint}",)
            raise


class ClientBase:
    """Client of one server; see `Client` for the arguments."""

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
        self._address = address(url, token, headers, compression, str(tls_ca or ""), tls_verify)
        self._timeout_s = timeout_s
        self._calls = self._new_calls(self._transport(self._address), self._sleep, RetryPolicy(retries))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def _new_calls(
        self, transport: ClientTransport, sleep: Callable[[float], Awaitable[None]], retry: RetryPolicy
    ) -> ClientCalls:
        return ClientCalls(_wire(self._address), transport, sleep, self._timeout_s, retry)

    def _transport(self, where: Address) -> ClientTransport:
        raise NotImplementedError

    def _sleep(self, delay: float) -> Coroutine[Any, Any, None]:
        raise NotImplementedError


def _wire(where: Address) -> WireFormat:
    """Return the wire format of a URL's scheme. grpcio is imported for gRPC only."""
    if where.is_grpc:
        from dragoman.client.rpc import Rpc

        return Rpc()
    from dragoman.client.rest import Rest

    return Rest(where)
