"""The admin port, the warning about open servers, and the addresses that the server prints."""

import logging
from typing import Any

import grpc
import pytest

import dragoman
from access.access_models import BODY, Doubler, KeyFile, bearer
from dragoman.cli.startup import startup_table
from dragoman.formats import grpc_messages as m
from rest.rest_server import RestServer, serving

ADMINISTRATIVE = [("GET", "/metrics"), ("POST", "/v2/repository/index"), ("POST", "/v2/repository/models/Doubler/load")]


async def test_metrics_and_control_are_on_the_admin_port_only() -> None:
    async with serving(Doubler, admin_port=0, control_open=True) as server:
        admin = RestServer(int(server.dragoman.admin_url.rpartition(":")[2]), server.dragoman)
        assert admin.port != server.port
        for method, path in ADMINISTRATIVE:
            assert (await admin.request(method, path, b"{}")).status == 200, path
            assert (await server.request(method, path, b"{}")).status == 404, path
        assert (await admin.request("GET", "/v2/repository/status")).status == 200
        assert (await server.request("GET", "/v2/repository/status")).status == 404
        for path in ("/v2/health/ready", "/v2/models/Doubler"):
            assert (await admin.request("GET", path)).status == 200
            assert (await server.request("GET", path)).status == 200
        assert (await server.request("POST", "/v2/models/Doubler/infer", BODY)).status == 200
        assert (await admin.request("POST", "/v2/models/Doubler/infer", BODY)).status in (404, 405)


async def test_the_same_holds_for_grpc() -> None:
    async with serving(Doubler, admin_port=0, grpc_port=0, control_open=True) as server:
        ports = {"admin": server.dragoman.admin_url.rpartition(":")[2], "grpc": server.dragoman.grpc_port}
        ports["http"] = server.port
        codes = {}
        for name, port in ports.items():
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                call: Any = channel.unary_unary(f"/{m.SERVICE}/RepositoryIndex")(b"")
                codes[name] = await call.code()
        unknown = grpc.StatusCode.UNIMPLEMENTED
        assert codes == {"admin": grpc.StatusCode.OK, "grpc": unknown, "http": unknown}


async def test_the_admin_port_needs_keys_too(keys: KeyFile) -> None:
    async with serving(Doubler, admin_port=0, api_keys=str(keys.path)) as server:
        admin = RestServer(int(server.dragoman.admin_url.rpartition(":")[2]), server.dragoman)
        assert (await admin.request("GET", "/metrics")).status == 401
        assert (await admin.request("GET", "/metrics", headers=bearer(keys.keys["user"]))).status == 200
        load = ADMINISTRATIVE[2]
        assert (await admin.request(*load, b"{}", bearer(keys.keys["user"]))).status == 403


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0", "api_key": "a" * 20}, False),
        ({"admin_port": 0, "admin_host": "0.0.0.0"}, True),
        ({"admin_port": 0}, False),
    ],
)
async def test_a_public_address_without_keys_is_reported(
    settings: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with serving(Doubler, **settings):
        assert ("no authentication on a public address: every client of 0.0.0.0" in caplog.text) is warns


async def test_the_table_shows_the_addresses_that_are_bound(capsys: pytest.CaptureFixture[str]) -> None:
    settings: Any = {"host": "0.0.0.0", "http_port": 0, "grpc_port": 0, "admin_port": 0}
    async with dragoman.Server(Doubler, **settings, admin_host="127.0.0.1") as server:
        startup_table(server, 0.0)
        text = capsys.readouterr().err
        assert f"  HTTP  http://0.0.0.0:{server.http_ports[0]}   " in text
        assert f"  gRPC  0.0.0.0:{server.grpc_port}   " in text
        assert f"  admin {server.admin_url}   " in text
        assert server.admin_url.startswith("http://127.0.0.1:")
        assert f"curl http://127.0.0.1:{server.http_ports[0]}/v2" in text
