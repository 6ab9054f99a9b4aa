"""Echo servers over gRPC: grpc.aio, its synchronous server, and one on our transport.

usage: python -m benchmarks.grpc_echo aio|aio-uvloop|sync|own PORT
"""

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import uvloop

from benchmarks.workloads import GRPC_PATH
from dragoman.protocols.wire import GrpcRequest
from dragoman.system.process import keep_freed_memory
from dragoman.transports.bodies import BodyMemory
from dragoman.transports.executor import MessageExecutor
from dragoman.transports.grpc.calls import GrpcCalls, GrpcServer
from dragoman.transports.grpc.handlers import UnaryHandler
from dragoman.transports.limits import Limits

_UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def _handlers(method: Any) -> Any:
    service, name = GRPC_PATH.strip("/").split("/")
    return grpc.method_handlers_generic_handler(service, {name: grpc.unary_unary_rpc_method_handler(method)})


async def aio(port: int) -> None:
    async def echo(message: bytes, context: object) -> bytes:
        return message

    server = grpc.aio.server(options=_UNLIMITED)
    server.add_generic_rpc_handlers([_handlers(echo)])
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


def sync(port: int) -> None:
    server = grpc.server(ThreadPoolExecutor(4), options=_UNLIMITED)
    server.add_generic_rpc_handlers([_handlers(lambda message, context: message)])
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


class _NoEngine:
    """An engine that is not used."""

    is_remote = False

    async def call(self, request: Any) -> Any:
        raise NotImplementedError

    def begin(self, request: Any) -> Any:
        raise NotImplementedError

    def stream(self, request: Any) -> Any:
        raise NotImplementedError

    def ready(self) -> bool:
        return True

    async def wait_for_change(self) -> None:
        await asyncio.Event().wait()


class _EchoServer(GrpcServer):
    def make_calls(self) -> GrpcCalls:
        async def echo(request: GrpcRequest) -> Any:
            return request.body

        calls = super().make_calls()
        calls.handlers = {GRPC_PATH: UnaryHandler(echo)}
        return calls


async def python_generator(port: int) -> None:
    keep_freed_memory()
    server = _EchoServer(_NoEngine(), (), limits=Limits(), executor=MessageExecutor(BodyMemory(0)))
    await server.start("127.0.0.1", port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    kind, port = sys.argv[1], int(sys.argv[2])
    match kind:
        case "aio":
            asyncio.run(aio(port))
        case "aio-uvloop":
            uvloop.run(aio(port))
        case "sync":
            sync(port)
        case "own":
            uvloop.run(python_generator(port))
