"""Closed connections are freed at once, so that the garbage collector has little to do between requests."""

import asyncio
import gc
import socket

import pytest

from rest.rest_server import Identity, inputs, request, serving, tensor

pytestmark = [
    pytest.mark.asyncio(loop_scope="function"),
    pytest.mark.usefixtures("on_uvloop"),
]  # those of asyncio have cycles

SMALL = request("POST", "/v2/models/Identity/infer", inputs(tensor(data=[1])))
LARGE = request("POST", "/v2/models/Identity/infer", inputs(tensor(shape=[5000], data=list(range(5000)))))
CONNECTIONS = 40


@pytest.mark.parametrize("raw", [SMALL, LARGE], ids=["small", "large"])
async def test_closed_connections_are_no_garbage(raw: bytes) -> None:
    async with serving(Identity) as server:
        await open_and_close(server.port, raw, 1)
        gc.collect()
        gc.disable()
        try:
            await open_and_close(server.port, raw, CONNECTIONS)
            assert gc.collect() < CONNECTIONS  # objects
        finally:
            gc.enable()


async def open_and_close(port: int, raw: bytes, count: int) -> None:
    """Send a request over each of `count` connections; return once the server has closed all of them, too."""
    loop = asyncio.get_running_loop()
    for _ in range(count):
        with socket.socket() as client:
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", port))
            await loop.sock_sendall(client, raw)
            assert (await loop.sock_recv(client, 1 << 20)).startswith(b"HTTP/1.1 200")
            client.shutdown(socket.SHUT_WR)
            while await loop.sock_recv(client, 1 << 20):
                pass
    await asyncio.sleep(0)
