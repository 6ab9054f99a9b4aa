"""The client for code that blocks."""

import time
from collections.abc import Generator, Mapping
from contextlib import closing
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


class Client:
    """Asks a server that speaks the Open Inference Protocol; `AsyncClient` is the same for asyncio.

    url: http://host:port or https:// for REST with binary tensors, grpc:// or grpcs:// for gRPC.
    timeout_s: how long a call may take in all, retries and streaming included; None or 0 is no limit.
    retries: how often a call is sent again that the server did not take on: 503 with Retry-After (for gRPC its
    metadata of that name), or nothing listens. Anything else is never sent twice.
    token: goes with every request as `Authorization: Bearer`.
    headers: go with every request too; for gRPC they are metadata.
    compression: of requests and answers.
    tls_ca: a file (PEM) of the certificates to trust, instead of the system's. tls_verify=False trusts anybody, over
    REST alone.

    It keeps connections open: use it in `with`, or call `close`. Several threads may share one. Every method raises
    an error of `dragoman.errors` with the server's own words; ConnectionError (it is both) where no server is
    reached, and DeadlineExceeded after `timeout_s`.
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections that are kept; the client may still be used over REST."""
        self._transport.close()

    # --- inference -----------------------------------------------------------------------------------------------

    def infer(
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
        """The answer of a model; see `Result` for what can be had from it.

        inputs: a dict of arrays, lists, single values, columns of a DataFrame or anything that a codec knows; a
        DataFrame, one input a column; one array or list for a model of one input; what codecs encoded (an
        InferenceRequest, or RequestInputs). An array is sent in its own dtype and shape. Numbers without a dtype
        become the datatype that the model's metadata tells, where they fit it.
        outputs: the names of those wanted; all by default.
        decode: give outputs as their content types say, instead of as arrays.
        """
        asked = Inferring(
            model=model,
            inputs=inputs,
            version=version,
            outputs=outputs,
            parameters=parameters,
            id=id,
            timeout_s=timeout_s,
        )
        return Result(self._run(self._calls.infer(asked)), decode)

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
    ) -> Generator[Result, None, None]:
        """The answers of a model that streams, as they come; see `infer`.

        Leaving the loop, or `close`, cancels what the model still does. `timeout_s` is for the whole stream.
        """
        asked = Inferring(
            model=model,
            inputs=inputs,
            version=version,
            outputs=outputs,
            parameters=parameters,
            id=id,
            timeout_s=timeout_s,
        )
        first, rest = self._run(self._calls.stream(asked))
        with closing(rest):
            for response in first:
                yield Result(response, decode)
            for response in rest:
                yield Result(response, decode)

    # --- health and metadata -------------------------------------------------------------------------------------

    def live(self) -> bool:
        """Whether the server answers; False where nothing listens. Asked once, without retries."""
        return self._run(self._calls.live())

    def ready(self, model: str | None = None, version: str = "") -> bool:
        """Whether a model, or the server with all of its models, can answer; False where nothing listens."""
        return self._run(self._calls.ready(model, version))

    @overload
    def metadata(self, model: None = None, version: str = "") -> ServerDescription: ...
    @overload
    def metadata(self, model: str, version: str = "") -> ModelDescription: ...
    def metadata(self, model: str | None = None, version: str = "") -> Any:
        """What a model tells of itself (`.signature.inputs`), or without one the server."""
        return self._run(self._calls.metadata(model, version))

    def models(self) -> list[str]:
        """The names of the models; over gRPC those of the index, which needs the token."""
        return self._run(self._calls.models())

    # --- model control -------------------------------------------------------------------------------------------

    def index(self, *, ready: bool = False) -> list[IndexEntry]:
        """Every model version that the server knows, or those that are ready; needs the token."""
        return self._run(self._calls.index(ready))

    def load(self, model: str, *, timeout_s: float | None = None) -> None:
        """Load a model, or load it anew; needs the token."""
        self._run(self._calls.load(model, timeout_s))

    def unload(self, model: str, *, timeout_s: float | None = None) -> None:
        """Let the server drop a model; needs the token."""
        self._run(self._calls.unload(model, timeout_s))

    # --- the steps of a call -------------------------------------------------------------------------------------

    def _run(self, steps: Steps[T]) -> T:
        try:
            step = next(steps)
            while True:
                try:
                    found = self._taken(step)
                except DragomanError as fault:
                    step = steps.throw(fault)
                else:
                    step = steps.send(found)
        except StopIteration as end:
            value: T = end.value
            return value

    def _taken(self, step: Ask | Open | Wait) -> Any:
        match step:
            case Ask(exchange, deadline):
                return exchange.read(self._transport.ask(exchange.question, deadline))
            case Open(streamed, deadline):
                pieces = self._pieces(streamed, deadline)
                return [p for p in [next(pieces, None)] if p is not None], pieces
            case Wait(wait_s):
                return time.sleep(wait_s)

    def _pieces(self, exchange: StreamExchange, deadline: Deadline) -> Generator[InferenceResponse, None, None]:
        read = exchange.reader()
        with closing(self._transport.stream(exchange.question, deadline)) as chunks:
            for chunk in chunks:
                yield from read(chunk)


def _transport(where: Address) -> Any:
    if where.over_grpc:
        from dragoman.client.grpc_sync import GrpcTransport

        return GrpcTransport(where)
    from dragoman.client.http_sync import HttpTransport

    return HttpTransport(where)
