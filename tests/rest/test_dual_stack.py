"""The host `::` is every interface over IPv4 and IPv6, for HTTP and gRPC; `[::1]` is an address as in URLs."""

import asyncio
import socket
from contextlib import closing, suppress

import grpc
import pytest

from dragoman.processes.server_processes import bind_all
from rest.rest_server import Identity, RestServer, request, serving

LIVE = request("GET", "/v2/health/live")


def has_ipv6() -> bool:
    with suppress(OSError), socket.socket(socket.AF_INET6) as sock:
        sock.bind(("::1", 0))
        return True
    return False


pytestmark = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this machine")


async def status_at(server: RestServer, host: str) -> int:
    reader, writer = await asyncio.open_connection(host, server.port)
    writer.write(LIVE)
    line = await reader.readline()
    writer.close()
    return int(line.split()[1])


async def test_every_interface_over_both_protocols() -> None:
    async with serving(Identity, host="::", grpc_port=0) as server:
        for host in ("127.0.0.1", "::1"):
            assert await status_at(server, host) == 200
        for host in ("127.0.0.1", "[::1]"):
            async with grpc.aio.insecure_channel(f"{host}:{server.dragoman.grpc_port}") as channel:
                await asyncio.wait_for(channel.channel_ready(), 20)


async def test_an_address_in_brackets_is_that_address_alone() -> None:
    async with serving(Identity, host="[::1]") as server:
        assert server.dragoman.http_url == f"http://[::1]:{server.port}"
        assert await status_at(server, "::1") == 200
        with pytest.raises(OSError, match=r"refused|failed"):
            await status_at(server, "127.0.0.1")


def test_the_port_that_several_processes_share() -> None:
    (bound,) = bind_all([("::", 0)])
    with closing(bound):
        bound.listen()
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, bound.getsockname()[1]), 5).close()
