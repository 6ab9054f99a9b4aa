"""Blocking client."""

import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Self, overload

from dragoman.client.calls import ClientBase, ClientTransport, InferArguments, RetryPolicy
from dragoman.client.html import escape, table
from dragoman.client.http_sync import iterate_blocking, run_blocking, sleep
from dragoman.client.mapping import MapOptions, MapRun, PointResult, map_in_threads
from dragoman.client.messages import Address
from dragoman.client.results import Result
from dragoman.client.tensors import OutputNames
from dragoman.core.calls import IndexEntry, ModelDescription, ServerDescription
from dragoman.core.errors import DragomanError
from dragoman.core.signature import TensorSpec
from dragoman.core.tensor import Scalar


def _sides(model: ModelDescription | None) -> tuple[str, str]:
    """Return the inputs and outputs of a model as HTML."""
    if model is None:
        return "not available", ""
    return _tensors(model.signature.inputs), _tensors(model.signature.outputs)


def _tensors(specs: Sequence[TensorSpec]) -> str:
    texts = (f"{s.name} {s.datatype}{'' if s.shape is None else list(s.shape)}" for s in specs)
    return "<br>".join(map(escape, texts))


class Client(ClientBase):
    """Blocking client of a server that implements the Open Inference Protocol; see `AsyncClient` for asyncio.

    url: http://host:port or https:// for REST with binary tensors, grpc:// or grpcs:// for gRPC.
    timeout_s: limit of each call in seconds, including retries and streaming; None or 0 for no limit.
    retries: how often a call is sent again that the server did not start: 503 with Retry-After (for gRPC the
    metadata of that name), or connection refused. Nothing else is sent twice.
    token: sent with every request as `Authorization: Bearer`.
    headers: also sent with every request; metadata for gRPC.
    compression: of requests and responses, "gzip" or "deflate".
    tls_ca: PEM file of trusted certificates, instead of those of the system. tls_verify=False accepts any
    certificate.

    Connections are kept open: use the client in a `with` statement, or call `close`. It is thread-safe. Every method
    raises an error of `dragoman.errors` with the message of the server; one that is also a ConnectionError if the
    server cannot be reached, and DeadlineExceeded after `timeout_s`.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close idle connections; the client can still be used."""
        run_blocking(self._calls.close())

    # --- inference -----------------------------------------------------------------------------------------------

    def infer(
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
        """Call a model and return its outputs.

        inputs: a dict of arrays, lists, scalars, DataFrame columns or other values with a codec; a DataFrame, one
        input per column; an array or list for a model with one input; or the output of a codec (an InferenceRequest
        or RequestInputs). A model of one matrix takes a DataFrame as its columns; images of Pillow are sent as pixels,
        see `dragoman.client.picture`. Lists and numbers are converted to the datatype of the model's metadata, and
        arrays if that changes no value, such as float32 for FP64; values that do not fit raise InvalidInput.
        outputs: names of the outputs to return; all by default.
        decode: decode outputs by their content types, instead of returning arrays.
        cast: convert arrays to the datatype of the model also if that rounds floats, such as float64 for FP32. A number
        that is too large, or a fraction for an integer, still raises InvalidInput.
        """
        arguments = InferArguments(model, inputs, version, outputs, parameters, id, timeout_s, decode, cast)
        return run_blocking(self._calls.infer(arguments))

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
    ) -> Generator[Result, None, None]:
        """Yield the responses of a streaming model as they arrive; see `infer` for the arguments.

        Leaving the loop or calling `close` cancels the call. `timeout_s` applies to the whole stream.
        """
        arguments = InferArguments(model, inputs, version, outputs, parameters, id, timeout_s, decode, cast)
        return iterate_blocking(self._calls.stream(arguments))

    def map(
        self,
        model: str,
        points: Iterable[Any],
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
    ) -> Generator[PointResult, None, None]:
        """Call a model for each of many points and return the outcomes as they arrive.

        points: an iterable of the `inputs` of `infer`; it may be lazy or endless. At most `window` points (2 *
        `concurrency` by default) are read before their outcomes have been taken from the iterator. Leaving the loop
        or calling `close` cancels the calls in progress.
        parameters: those of every call, such as {"derivative": "gradient"} and {"config": "{...}"} of a simulator.
        timeout_s: limit of each point, including retries.
        concurrency: number of calls at a time.
        ordered: return the outcomes in the order of the points.
        retries: how often a point is sent again after 429 or 503 with Retry-After, and if nothing listens; None until
        `timeout_s`. idempotent=True: also after a lost connection, when the model may have computed the point.
        journal: file of finished points. A run that is started again with the same file, model and arguments does not
        compute them again. journal_fsync=False does not wait for the disk: faster, but a crash of the machine, not
        of the process, may lose the last points.
        progress: show a line on stderr; by default if it is a terminal.

        A point that fails has an `error`, and its `result` raises it. Raises InvalidInput if the journal is of another
        model or call, and ServerUnreachable after the other outcomes if nothing listens until the timeout.
        """
        arguments = InferArguments(model, None, version, outputs, parameters, "", timeout_s, decode, cast)
        options = MapOptions.of(concurrency, window, ordered, journal, journal_fsync, progress)
        retry = RetryPolicy(retries, idempotent)
        transport = self._transport(self._address)
        stopped = threading.Event()

        def interrupt() -> None:
            stopped.set()
            transport.interrupt()
            run_blocking(transport.close())

        async def wait(delay_s: float) -> None:
            if stopped.wait(delay_s):
                raise ConnectionAbortedError("the iterator was closed")

        async def run_here(function: Callable[..., Any], *args: Any) -> Any:
            return function(*args)

        run = MapRun(self._new_calls(transport, wait, retry), arguments, options, points, run_here)
        return map_in_threads(run, points, interrupt)

    # --- health and metadata -------------------------------------------------------------------------------------

    def live(self) -> bool:
        """Return whether the server is live; False if nothing listens. Sent once, without retries."""
        return run_blocking(self._calls.live())

    def ready(self, model: str | None = None, version: str = "") -> bool:
        """Return whether a model, or the server with all its models, is ready; False for an unknown model or server."""
        return run_blocking(self._calls.ready(model, version))

    @overload
    def metadata(self, model: None = None, version: str = "") -> ServerDescription: ...
    @overload
    def metadata(self, model: str, version: str = "") -> ModelDescription: ...
    def metadata(self, model: str | None = None, version: str = "") -> Any:
        """Return the metadata of a model (`.signature.inputs`), or of the server if no model is named."""
        return run_blocking(self._calls.metadata(model, version))

    def models(self) -> list[str]:
        """Return the names of the models; over gRPC they are taken from the index, which needs the token."""
        return run_blocking(self._calls.models())

    # --- model control -------------------------------------------------------------------------------------------

    def index(self, *, ready: bool = False) -> list[IndexEntry]:
        """Return all model versions of the repository, or only those that are ready; needs the token."""
        return run_blocking(self._calls.index(ready))

    def load(self, model: str, *, timeout_s: float | None = None) -> None:
        """Load or reload a model; needs the token."""
        run_blocking(self._calls.load(model, timeout_s))

    def unload(self, model: str, *, timeout_s: float | None = None) -> None:
        """Unload a model; needs the token."""
        run_blocking(self._calls.unload(model, timeout_s))

    def _repr_html_(self) -> str:
        """Return a table of the server's models for notebooks."""
        title = f"<b>{escape(repr(self))}</b>"
        try:
            models, rest = run_blocking(self._calls.summary())
        except DragomanError as error:
            return f"<div>{title}<br>{escape(error.message)}</div>"
        rows = [(escape(name), *_sides(model)) for name, model in models]
        rows += [(f"and {rest} more", "", "")] if rest else []
        return table(title, ("model", "inputs", "outputs"), rows)

    # --- transport ------------------------------------------------------------------------------------------------

    _sleep = staticmethod(sleep)

    def _transport(self, where: Address) -> ClientTransport:
        from dragoman.client.http_sync import connect_transport, connector

        if where.is_grpc:
            from dragoman.client.rpc import GrpcTransport

            return GrpcTransport(where, connector)
        return connect_transport(where)
