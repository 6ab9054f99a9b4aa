"""Settings: parsing, bounds, unknown names, environment variables, and the page that lists them."""

import inspect
import math
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

import dragoman
from dragoman.core.errors import InvalidInput
from dragoman.core.options import ModelOptions, options
from dragoman.core.spec import ModelSpec
from dragoman.formats.policy import Policy
from dragoman.settings import GROUPS, SETTINGS, Settings, from_environment, parse_settings
from dragoman.transports.limits import Limits

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("http_port", "0", 0),
        ("http_port", 65535, 65535),
        ("drain_s", 5, 5.0),
        ("drain_s", "2.5", 2.5),
        ("health_json", "Yes", True),
        ("health_json", False, False),
        ("placement", "thread", "thread"),
        ("tls_cert", Path("/c.pem"), "/c.pem"),
        ("version_policy", 3, "3"),
    ],
)
def test_values_are_converted(name: str, raw: Any, value: Any) -> None:
    parsed = getattr(parse_settings({name: raw}), name)
    assert (parsed, type(parsed)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("http_port", -1, "setting 'http_port': expected 0 to 65535, got -1"),
        ("http_port", 65536, "setting 'http_port': expected 0 to 65535, got 65536"),
        ("http_port", 80.0, "setting 'http_port': expected an integer, got 80.0"),
        ("http_port", True, "setting 'http_port': expected an integer, got True"),
        ("http_port", "9" * 5000, "setting 'http_port': expected an integer, got"),
        ("replicas", "0", "setting 'replicas': expected at least 1, got 0"),
        ("drain_s", "nan", "setting 'drain_s': expected at least 0, got nan"),
        ("drain_s", math.nan, "setting 'drain_s': expected at least 0, got nan"),
        ("drain_s", None, "setting 'drain_s': expected a number, got None"),
        ("batch_linger", 11, "setting 'batch_linger': expected 0 to 10, got 11.0"),
        ("health_json", "maybe", "setting 'health_json': expected true or false, got 'maybe'"),
        ("placement", "moon", "setting 'placement': expected one of inline, thread, process, got 'moon'"),
        ("cors_origins", ["https://a.org"], "setting 'cors_origins': expected text, got ['https://a.org']"),
        ("server_name", 1.5, "setting 'server_name': expected text, got 1.5"),
        ("max_rankk", 1, "unknown setting 'max_rankk'; did you mean 'max_rank'?"),
        ("zzz", 1, "unknown setting 'zzz'"),
        ("host", "", "setting 'host': expected a value, got an empty one; leave it out, or unset DRAGOMAN_HOST, for"),
        ("worker_host", " ", "setting 'worker_host': expected a value, got an empty one"),
    ],
)
def test_invalid_values_are_rejected(name: str, raw: Any, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_settings({name: raw})
    assert caught.value.message.startswith(message)


def test_addresses_and_secrets_may_not_be_empty() -> None:
    """An empty one would open the server, and is what a variable that was forgotten leaves."""
    words = ("host", "tls_", "api_key", "jwt_", "token", "secret")
    named = {
        n for n, option in SETTINGS.items() if option.type is str and not option.choices and any(w in n for w in words)
    }
    for name in named:
        with pytest.raises(InvalidInput, match=f"setting '{name}': expected a value, got an empty one"):
            parse_settings({name: ""})


def test_later_layers_override_earlier_ones() -> None:
    assert parse_settings({"http_port": 1, "grpc_port": 2}, {"http_port": "3"}) == Settings(http_port=3, grpc_port=2)


def test_environment_variables() -> None:
    assert from_environment({"DRAGOMAN_MAX_QUEUE": "7", "HOME": "/root"}) == {"max_queue": "7"}
    expected = "unknown environment variable 'DRAGOMAN_MAX_QUEU'; did you mean 'DRAGOMAN_MAX_QUEUE'?"
    with pytest.raises(InvalidInput) as caught:
        from_environment({"DRAGOMAN_MAX_QUEU": "7"})
    assert caught.value.message == expected


def test_variables_of_kubernetes_services_are_ignored() -> None:
    service = {
        "DRAGOMAN_SERVICE_HOST": "10.0.0.1",
        "DRAGOMAN_SERVICE_PORT": "80",
        "DRAGOMAN_SERVICE_PORT_HTTP": "80",
        "DRAGOMAN_PORT": "tcp://10.0.0.1:80",
        "DRAGOMAN_PORT_80_TCP": "tcp://10.0.0.1:80",
        "DRAGOMAN_PORT_80_TCP_PROTO": "tcp",
        "DRAGOMAN_PORT_80_TCP_PORT": "80",
        "DRAGOMAN_PORT_80_TCP_ADDR": "10.0.0.1",
        "DRAGOMAN_HTTP_SERVICE_HOST": "10.0.0.1",
        "DRAGOMAN_HTTP_PORT": "tcp://10.0.0.1:80",
    }
    assert from_environment(service) == {}
    with pytest.raises(InvalidInput, match="unknown environment variable 'DRAGOMAN_PORT'"):
        from_environment({"DRAGOMAN_PORT": "80"})


def test_defaults_are_declared_once() -> None:
    """`Settings` and the types of lower layers inherit their defaults from the same classes of options."""
    settings = Settings()
    for instance in (Policy(), Limits(), ModelSpec(name="m")):
        declared = {
            n for kind in type(instance).__mro__[1:] if hasattr(kind, "__dataclass_fields__") for n in options(kind)
        }
        assert declared
        assert {n: getattr(instance, n) for n in declared} == {n: getattr(settings, n) for n in declared}
    defaults = {n: getattr(ModelSpec(name="m"), n) for n in options(ModelOptions)}
    assert settings.model_defaults() == {**defaults, "share_caches": True}  # without keys, all requests have one owner
    assert Settings(api_key="k" * 24).model_defaults() == defaults


def test_every_setting_has_help_and_a_group() -> None:
    assert {*SETTINGS} == {*typing.get_type_hints(Settings)}
    for option in SETTINGS.values():
        assert option.help
        assert option.group in GROUPS


def test_the_settings_page_is_up_to_date() -> None:
    """Run `scripts/settings-page` to update docs/settings.md and settings_arguments.py."""
    completed = subprocess.run([sys.executable, ROOT / "scripts" / "settings-page", "--check"], check=False)
    assert completed.returncode == 0


@pytest.mark.parametrize("function", [dragoman.serve, dragoman.Server])
def test_arguments_are_in_the_order_of_use(function: Any) -> None:
    names = list(inspect.signature(function).parameters)
    assert names[:7] == ["models", "host", "http_port", "grpc_port", "model_name", "watch", "allow_pickle"]
    common = [name for name, option in SETTINGS.items() if option.common]
    assert [name for name in names if name in SETTINGS] == list(SETTINGS)
    assert list(SETTINGS)[: len(common)] == common
    groups = [GROUPS.index(option.group) for option in SETTINGS.values() if not option.common]
    assert groups == sorted(groups)
    text = inspect.getdoc(function)
    assert text is not None
    assert all(re.search(rf"\b{name}\b", text) for name in SETTINGS)
    assert all(f"\n{group}: " in text for group in GROUPS)
