"""How each call goes, step by step, whether a thread or an event loop takes the steps."""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from dragoman.client import inputs as given
from dragoman.client.address import Address
from dragoman.client.exchange import Ask, Deadline, Exchange, Open, Steps, StreamExchange, Wait
from dragoman.client.faults import ServerUnreachable
from dragoman.core.calls import IndexEntry, ModelDescription, ServerDescription
from dragoman.core.errors import DragomanError, InvalidInput, ModelNotFound
from dragoman.core.tensor import Scalar
from dragoman.payload.message import InferenceRequest, InferenceResponse

T = TypeVar("T")

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


def wire(address: Address) -> Wire:
    """The form that a URL asks for; gRPC's library is imported for gRPC alone."""
    if address.over_grpc:
        from dragoman.client.rpc import Rpc

        return Rpc()
    from dragoman.client.rest import Rest

    return Rest(address)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inferring:
    """A question for a model as the caller put it; see `Client.infer`."""

    model: str
    inputs: Any
    version: str = ""
    outputs: given.Wanted = None
    parameters: Mapping[str, Scalar] | None = None
    id: str = ""
    timeout_s: float | None = None


class Calls:
    """The calls to one server. What models told of themselves is remembered until it does not fit any more."""

    def __init__(self, wire: Wire, timeout_s: float | None, retries: int) -> None:
        self._wire = wire
        self._timeout_s = timeout_s
        self._retries = retries
        self._known: dict[tuple[str, str], ModelDescription] = {}

    def infer(self, asked: Inferring) -> Steps[InferenceResponse]:
        return self._fitting(asked, self._infer(asked))

    def stream(self, asked: Inferring) -> Steps[Any]:
        return self._fitting(asked, self._stream(asked))

    def live(self) -> Steps[bool]:
        return self._health(self._wire.live())

    def ready(self, model: str | None, version: str) -> Steps[bool]:
        return self._health(self._wire.ready(model or "", version))

    def metadata(self, model: str | None, version: str) -> Steps[Any]:
        return self._asked(self._wire.model(model, version) if model else self._wire.server())

    def models(self) -> Steps[list[str]]:
        return self._asked(self._wire.models())

    def index(self, ready: bool) -> Steps[list[IndexEntry]]:
        return self._asked(self._wire.index(ready))

    def load(self, model: str, timeout_s: float | None) -> Steps[None]:
        self._known.clear()
        return self._asked(self._wire.load(model), timeout_s)

    def unload(self, model: str, timeout_s: float | None) -> Steps[None]:
        self._known.clear()
        return self._asked(self._wire.unload(model), timeout_s)

    # --- the steps that these share ----------------------------------------------------------------------------

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline.after(self._timeout_s if timeout_s is None else timeout_s)

    def _asked(self, exchange: Exchange[T], timeout_s: float | None = None) -> Steps[T]:
        deadline = self._deadline(timeout_s)
        found: T = yield from self._retried(lambda: Ask(exchange, deadline), deadline)
        return found

    def _health(self, exchange: Exchange[bool]) -> Steps[bool]:
        """Asked once: whoever waits for a server asks again; one that does not listen is neither live nor ready."""
        try:
            found: bool = yield Ask(exchange, self._deadline(None))
        except ServerUnreachable as fault:
            if fault.refused:
                return False
            raise
        return found

    def _retried(self, step: Callable[[], Ask | Open], deadline: Deadline) -> Steps[Any]:
        """Take a step, again after a wait where the server did not take it on and asks for that."""
        for wait_s in waits(self._retries):
            try:
                return (yield step())
            except DragomanError as fault:
                refused = isinstance(fault, ServerUnreachable) and fault.refused
                if fault.retry_after_s is None and not refused:
                    raise
                wait_s += fault.retry_after_s or 0.0
                if not deadline.allows(wait_s):
                    raise  # it tells more than that the time is over
            yield Wait(wait_s)
        return (yield step())

    # --- the steps of inference --------------------------------------------------------------------------------

    def _infer(self, asked: Inferring) -> Steps[InferenceResponse]:
        deadline = self._deadline(asked.timeout_s)
        request = yield from self._request(asked, deadline)
        exchange = self._wire.infer(asked.model, asked.version, request)
        found: InferenceResponse = yield from self._retried(lambda: Ask(exchange, deadline), deadline)
        return found

    def _stream(self, asked: Inferring) -> Steps[Any]:
        deadline = self._deadline(asked.timeout_s)
        request = yield from self._request(asked, deadline)
        exchange = self._wire.stream(asked.model, asked.version, request)
        return (yield from self._retried(lambda: Open(exchange, deadline), deadline))

    def _request(self, asked: Inferring, deadline: Deadline) -> Steps[InferenceRequest]:
        signature = None
        if given.needs_signature(asked.inputs):
            key = asked.model, asked.version
            if key not in self._known:
                exchange = self._wire.model(*key)
                self._known[key] = yield from self._retried(lambda: Ask(exchange, deadline), deadline)
            signature = self._known[key].signature
        made = given.request(asked.inputs, signature, asked.model)
        return given.completed(made, asked.outputs, asked.parameters, asked.id)

    def _fitting(self, asked: Inferring, steps: Steps[T]) -> Steps[T]:
        """The steps; what was known of the model is asked anew after a refusal, for it may have been replaced."""
        try:
            return (yield from steps)
        except (InvalidInput, ModelNotFound):
            self._known.pop((asked.model, asked.version), None)
            raise


def waits(retries: int) -> Iterator[float]:
    """How long to wait before each retry, in seconds: ever longer, and by chance, so that clients do not march."""
    for attempt in range(retries):
        yield min(_FIRST_WAIT_S * 2**attempt, _LONGEST_WAIT_S) * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
