"""A request's body is freed once it is parsed, and its inputs once the model has answered."""

import asyncio
import time
import weakref
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import numpy as np
import pytest
import pytest_asyncio

from dragoman.core.calls import Infer, Inference, Request, Response
from dragoman.core.datatypes import FP32
from dragoman.core.tensor import Tensor
from dragoman.protocols.wire import (
    EngineCall,
    HttpProtocol,
    HttpRequest,
    HttpResponse,
    PreliminaryCall,
    Route,
    json_response,
)
from dragoman.system.coroutines import begin
from dragoman.transports.application import Application
from dragoman.transports.http_server import HttpServer
from dragoman.transports.limits import Limits

BODY = b"0" * (3 << 20)


def is_kept(reference: Any) -> bool:
    """Return whether an object stays alive; the thread that parsed a body may drop its reference a little later."""
    end_s = time.monotonic() + 60
    while reference() is not None and time.monotonic() < end_s:
        time.sleep(0.001)
    return reference() is not None


class LifetimeProbe:
    """A protocol and an engine that record which objects are alive."""

    def __init__(self) -> None:
        self.body: Any = None
        self.inputs: Any = None
        self.alive: dict[str, bool] = {}

    def send_request(self, request: HttpRequest) -> PreliminaryCall[Any]:
        self.body = weakref.ref(memoryview(request.body).obj)
        return PreliminaryCall(Request(Infer({})), lambda _: self.parse(request))

    def parse(self, request: HttpRequest) -> EngineCall[Any, HttpResponse]:
        inputs = np.zeros(len(request.body), np.float32)
        self.inputs = weakref.ref(inputs)
        return EngineCall(Request(Infer({"x": Tensor(inputs, FP32)})), self.write)

    def write(self, response: Response[Any]) -> HttpResponse:
        self.alive["inputs while the response is written"] = is_kept(self.inputs)
        return HttpResponse(200, (b"ok",))

    def begin(self, request: Request[Any]) -> Any:
        return begin(self.call(request))

    async def call(self, request: Request[Any]) -> Response[Any]:
        if not getattr(request.call, "inputs", None):
            return Response(Inference({}), "", "")
        self.alive["body during the call"] = await asyncio.to_thread(is_kept, self.body)
        self.alive["inputs during the call"] = self.inputs() is not None
        return Response(Inference({"y": Tensor(np.zeros(1 << 20, np.float32), FP32)}), "", "")


@pytest.fixture
def lifetime_probe() -> LifetimeProbe:
    return LifetimeProbe()


@pytest_asyncio.fixture
async def port(lifetime_probe: LifetimeProbe) -> AsyncIterator[int]:
    routes = (Route("POST", "/", lifetime_probe.send_request),)
    table = HttpProtocol("test", routes, lambda error, _: json_response({"error": str(error)}, 500))
    engine: Any = lifetime_probe
    server = HttpServer(Application(engine, (table,), Limits()))
    (found,) = await server.start([("127.0.0.1", 0)])
    yield found
    await server.stop(0.0)


@pytest.mark.parametrize("http2", [False, True])
async def test_a_body_and_inputs_are_freed_early(port: int, lifetime_probe: LifetimeProbe, http2: bool) -> None:
    async with httpx2.AsyncClient(http1=not http2, http2=http2) as client:
        answer = await client.post(f"http://127.0.0.1:{port}/", content=BODY)
    assert (answer.status_code, answer.content) == (200, b"ok"), answer.text
    assert lifetime_probe.alive == {
        "body during the call": False,
        "inputs during the call": True,
        "inputs while the response is written": False,
    }
