"""Shared by the client tests: models, and servers in a thread with an event loop."""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

import dragoman
from dragoman import Infer, Inference, Tensor, TensorSpec
from dragoman.core.datatypes import DATATYPES

T = TypeVar("T")
ClientKind = Literal["blocking", "asyncio"]
TOKEN = "open sesame"

# --- models ----------------------------------------------------------------------------------------------------


class Echo(dragoman.Model):
    """Return the inputs and parameters."""

    placement = "inline"

    def infer(self, call: Infer) -> Inference:
        return Inference(call.inputs, call.parameters)


class Rows(dragoman.Model):
    """Return the row sums of an FP32 input."""

    placement = "inline"
    inputs = (TensorSpec("x", dragoman.FP32, (-1, 3)),)
    outputs = (TensorSpec("sum", dragoman.FP32, (-1,)),)

    def infer(self, call: Infer) -> dict[str, Any]:
        return {"sum": call.inputs["x"].data.sum(axis=1)}


class Named(dragoman.Model):
    """Return what a classifier of a matrix with named columns returns."""

    placement = "inline"
    inputs = (TensorSpec("table", dragoman.FP64, (-1, 2), columns=("height", "width")),)
    outputs = (TensorSpec("scores", dragoman.FP64, (-1, 2)),)

    def infer(self, call: Infer) -> dict[str, Any]:
        return {"scores": call.inputs["table"].data}

    def class_labels(self) -> Mapping[str, Sequence[str]]:
        return {"scores": ["a <b>", "c"]}


class Pixels(dragoman.Model):
    """Return pictures as they are."""

    placement = "inline"
    inputs = (
        TensorSpec("bytes", dragoman.UINT8, (-1, 3, 8, 10), optional=True),
        TensorSpec("floats", dragoman.FP32, (-1, 8, 10, 3), optional=True),
        TensorSpec("any", dragoman.FP32, (-1, 3, -1, -1), optional=True),
        TensorSpec("flat", dragoman.FP32, (-1, 240), optional=True),
    )

    def infer(self, call: Infer) -> Mapping[str, Tensor]:
        return call.inputs


class Typed(dragoman.Model):
    """Return inputs, one of each datatype of numbers."""

    placement = "inline"
    inputs = tuple(
        TensorSpec(name, datatype, None, optional=True)
        for name, datatype in DATATYPES.items()
        if datatype is not dragoman.BYTES
    )

    def infer(self, call: Infer) -> Mapping[str, Tensor]:
        return call.inputs


class Mixed(dragoman.Model):
    """Return inputs of several datatypes."""

    placement = "inline"
    inputs = (
        TensorSpec("small", dragoman.UINT8, (-1,), optional=True),
        TensorSpec("half", dragoman.BF16, (-1,), optional=True),
        TensorSpec("flag", dragoman.BOOL, (1, 1), optional=True),
        TensorSpec("word", dragoman.BYTES, (1,), optional=True),
    )

    def infer(self, call: Infer) -> Mapping[str, Tensor]:
        return call.inputs


class Faulty(dragoman.Model):
    """Raise the error that the parameter `raise` names."""

    placement = "inline"

    def infer(self, call: Infer) -> dict[str, Tensor]:
        name = str(call.parameters["raise"])
        raise getattr(dragoman.errors, name, ValueError)(f"{name} was asked for")


class Gate(dragoman.Model):
    """Wait until a test sets `open`; `begun` and `cancelled` record the state."""

    placement = "inline"

    def load(self) -> None:
        self.begun, self.cancelled = threading.Event(), threading.Event()
        self.open = asyncio.Event()

    async def infer(self, call: Infer) -> Mapping[str, Tensor]:
        self.begun.set()
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return call.inputs


class Counter(dragoman.Model):
    """A stream of `n` chunks with an error before chunk `fail`; endless if `n` is negative."""

    placement = "inline"

    def load(self) -> None:
        self.closed = threading.Event()

    async def infer(self, call: Infer) -> AsyncIterator[dict[str, Any]]:
        n, fail = int(call.parameters.get("n", 3)), int(call.parameters.get("fail", -1))
        i = 0
        try:
            while i != n:
                if i == fail:
                    raise dragoman.errors.NotSupported("that far and no further")
                await asyncio.sleep(0)
                yield {"i": np.array([i])}
                i += 1
        finally:
            self.closed.set()


def power(x: NDArray[np.float64], by: float = 2.0) -> NDArray[np.float64]:
    return np.power(x, by)


# --- servers and clients ---------------------------------------------------------------------------------------


class LoopThread:
    """An event loop in a thread, and servers that run in it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def run(self, create: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(create, self._loop).result(60)

    def call(self, function: Callable[[], T]) -> T:
        async def called() -> T:
            return function()

        return self.run(called())

    @contextmanager
    def serving(self, *models: Any, **settings: Any) -> Iterator[dragoman.Server]:
        server = dragoman.Server(*models, **{"http_port": 0, "grpc_port": 0, **settings})
        try:
            self.run(server.engine.start())  # before it listens: models are unknown while they load
            self.run(server.listen())
            yield server
        finally:
            self.run(server.stop(0))

    @contextmanager
    def client(self, client_kind: ClientKind, url: str, **options: Any) -> Iterator[Any]:
        """Return a client. The asyncio client runs in the servers' loop, as gRPC needs one loop per process."""
        if client_kind == "blocking":
            with dragoman.Client(url, **options) as client:
                yield client
            return
        waiting = BlockingAsyncClient(self, url, options)
        yield waiting
        waiting.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class BlockingAsyncClient:
    """An AsyncClient with blocking methods, so that one test covers both clients."""

    def __init__(self, loop_thread: LoopThread, url: str, options: dict[str, Any]) -> None:
        async def create() -> dragoman.AsyncClient:
            return dragoman.AsyncClient(url, **options)

        self._loop_thread = loop_thread
        self.client = loop_thread.run(create())

    def stream(self, *args: Any, **options: Any) -> Iterator[Any]:
        return self._iterate(self.client.stream(*args, **options))

    def map(self, *args: Any, **options: Any) -> Iterator[Any]:
        return self._iterate(self.client.map(*args, **options))

    def _iterate(self, results: AsyncGenerator[Any, None]) -> Iterator[Any]:
        async def next_result() -> Any:
            return await anext(results, None)

        try:
            while (found := self._loop_thread.run(next_result())) is not None:
                yield found
        finally:
            self._loop_thread.run(results.aclose())

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **options: self._loop_thread.run(getattr(self.client, name)(*args, **options))


def url_of(server: dragoman.Server, wire: str) -> str:
    if wire == "rest":
        return server.http_url
    return f"grpc{'s' if server.settings.tls_cert else ''}://{server.grpc_url}"
