"""The client for code that blocks."""

from collections.abc import Generator, Mapping
from typing import Any, Self, overload

from dragoman.client.address import Address
from dragoman.client.blocking import done, each, sleep
from dragoman.client.calls import Inferring, Transport
from dragoman.client.connected import Connected
from dragoman.client.inputs import Wanted
from dragoman.client.result import Result
from dragoman.core.calls import IndexEntry, ModelDescription, ServerDescription
from dragoman.core.tensor import Scalar


class Client(Connected):
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections that are kept; the client may still be used over REST."""
        done(self._calls.close())

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
        asked = Inferring(model, inputs, version, outputs, parameters, id, timeout_s, decode)
        return done(self._calls.infer(asked))

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
        asked = Inferring(model, inputs, version, outputs, parameters, id, timeout_s, decode)
        return each(self._calls.stream(asked))

    # --- health and metadata -------------------------------------------------------------------------------------

    def live(self) -> bool:
        """Whether the server answers; False where nothing listens. Asked once, without retries."""
        return done(self._calls.live())

    def ready(self, model: str | None = None, version: str = "") -> bool:
        """Whether a model, or the server with all of its models, can answer; False where nothing listens."""
        return done(self._calls.ready(model, version))

    @overload
    def metadata(self, model: None = None, version: str = "") -> ServerDescription: ...
    @overload
    def metadata(self, model: str, version: str = "") -> ModelDescription: ...
    def metadata(self, model: str | None = None, version: str = "") -> Any:
        """What a model tells of itself (`.signature.inputs`), or without one the server."""
        return done(self._calls.metadata(model, version))

    def models(self) -> list[str]:
        """The names of the models; over gRPC those of the index, which needs the token."""
        return done(self._calls.models())

    # --- model control -------------------------------------------------------------------------------------------

    def index(self, *, ready: bool = False) -> list[IndexEntry]:
        """Every model version that the server knows, or those that are ready; needs the token."""
        return done(self._calls.index(ready))

    def load(self, model: str, *, timeout_s: float | None = None) -> None:
        """Load a model, or load it anew; needs the token."""
        done(self._calls.load(model, timeout_s))

    def unload(self, model: str, *, timeout_s: float | None = None) -> None:
        """Let the server drop a model; needs the token."""
        done(self._calls.unload(model, timeout_s))

    # --- what it is made of --------------------------------------------------------------------------------------

    _sleep = staticmethod(sleep)

    def _transport(self, where: Address) -> Transport:
        if where.over_grpc:
            from dragoman.client.grpc_channel import GrpcTransport

            return GrpcTransport(where, asynchronous=False)
        from dragoman.client.http_sync import transport

        return transport(where)
