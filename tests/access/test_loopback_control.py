"""Model control for processes on the server's machine, and for no others."""

import grpc
import pytest

from access.access_models import Doubler
from dragoman.access.control import AccessControl, AccessRules, is_local
from dragoman.core.errors import Forbidden, Unauthorized
from dragoman.formats import grpc_messages as m
from rest.rest_server import serving

LOCAL = {"host": "localhost:8080"}


@pytest.mark.parametrize(
    ("headers", "address", "expected"),
    [
        (LOCAL, "127.0.0.1", True),
        ({"host": "127.0.0.1"}, "127.0.0.5", True),
        ({"host": "[::1]:8080"}, "::1", True),
        (LOCAL, "10.0.0.5", False),
        (LOCAL, "2001:db8::1", False),
        (LOCAL, "", False),
        ({}, "127.0.0.1", False),
        ({"host": "models.example"}, "127.0.0.1", False),
        ({"host": "localhost.models.example"}, "127.0.0.1", False),
        ({"host": "[::1"}, "127.0.0.1", False),
        ({**LOCAL, "x-forwarded-for": "10.0.0.5"}, "127.0.0.1", False),
        ({**LOCAL, "forwarded": "for=10.0.0.5"}, "127.0.0.1", False),
        ({**LOCAL, "x-real-ip": "127.0.0.1"}, "127.0.0.1", False),
        ({**LOCAL, "via": "1.1 proxy"}, "127.0.0.1", False),
        ({**LOCAL, "origin": "http://localhost:8080"}, "127.0.0.1", False),
    ],
)
def test_requests_of_processes_on_this_machine(headers: dict[str, str], address: str, expected: bool) -> None:
    assert is_local(headers, address) is expected
    control = AccessControl(AccessRules(control_loopback=True))
    if expected:
        assert "admin" in control.authorize("admin", headers, lambda: address).roles
    else:
        with pytest.raises(Forbidden, match="processes on the server's machine only"):
            control.authorize("admin", headers, lambda: address)
    assert control.authorize("infer", headers, lambda: address).roles >= {"infer"}


def test_a_token_is_still_accepted_and_a_wrong_one_rejected() -> None:
    control = AccessControl(AccessRules(control_loopback=True, control_token="sesame"))
    token = {"authorization": "Bearer sesame", "host": "models.example"}
    assert "admin" in control.authorize("admin", token, lambda: "10.0.0.5").roles
    assert "admin" in control.authorize("admin", LOCAL, lambda: "127.0.0.1").roles
    with pytest.raises(Unauthorized):
        control.authorize("admin", {**LOCAL, "authorization": "Bearer wrong"}, lambda: "127.0.0.1")
    with pytest.raises(Unauthorized):
        control.authorize("admin", {"host": "models.example"}, lambda: "10.0.0.5")


def test_with_keys_loopback_opens_control_only() -> None:
    control = AccessControl(AccessRules(control_loopback=True, api_key="drg_" + "a" * 40))
    assert "admin" in control.authorize("admin", LOCAL, lambda: "127.0.0.1").roles
    with pytest.raises(Unauthorized):
        control.authorize("infer", LOCAL, lambda: "127.0.0.1")


def test_without_the_setting_loopback_opens_nothing() -> None:
    control = AccessControl(AccessRules(control_token="sesame"))
    with pytest.raises(Unauthorized):
        control.authorize("admin", LOCAL, lambda: "127.0.0.1")


async def test_the_rule_holds_over_grpc() -> None:
    denied, forwarded = grpc.StatusCode.PERMISSION_DENIED, ("x-forwarded-for", "10.0.0.5")
    async with serving(Doubler, grpc_port=0, control_loopback=True) as server:
        for port in (server.dragoman.grpc_port, server.port):
            for authority, metadata, expected in (
                ("", (), grpc.StatusCode.OK),
                ("localhost", (), grpc.StatusCode.OK),
                ("models.example", (), denied),
                ("", (forwarded,), denied),
            ):
                options = [("grpc.default_authority", authority)] if authority else []
                async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) as channel:
                    call = channel.unary_unary(f"/{m.SERVICE}/RepositoryIndex")(b"", metadata=metadata)
                    assert await call.code() is expected, (port, authority, metadata)
