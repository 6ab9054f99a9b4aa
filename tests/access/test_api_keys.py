"""API keys over HTTP: roles, models, limits, error formats, reload."""

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

import dragoman
from access.access_models import BODY, Doubler, KeyFile, Tripler, bearer, connect
from dragoman.access.control import AccessControl, AccessRules
from dragoman.access.failures import FailedAttempts
from dragoman.access.grants import CallLimiter
from dragoman.access.keys import create_key, parse_keys
from dragoman.core.calls import Infer
from dragoman.core.errors import InvalidInput, RateLimited
from e2e.forked_process import run_command
from rest.rest_server import RestServer, read_response, request, serving

INFER = "/v2/models/Doubler/infer"


async def infer(server: RestServer, headers: Mapping[str, str], model: str = "Doubler") -> Any:
    return await server.request("POST", f"/v2/models/{model}/infer", BODY, headers)


# --- who may come in ---------------------------------------------------------------------------------------------


async def test_a_key_is_accepted_in_both_headers(server: RestServer, keys: KeyFile) -> None:
    for headers in (bearer(keys.keys["user"]), {"x-api-key": keys.keys["user"]}):
        response = await infer(server, headers)
        assert (response.status, response.json["outputs"][0]["data"]) == (200, [3.0])


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer "},
        {"authorization": "Basic dXNlcjpwdw=="},
        {"x-api-key": "drg_" + "A" * 43},
        {"x-api-key": "é" * 100},
        {"authorization": "Bearer " + "a" * 12_000},
    ],
)
async def test_other_credentials_get_401(server: RestServer, headers: Mapping[str, str]) -> None:
    response = await infer(server, headers)
    assert (response.status, response.headers["www-authenticate"]) == (401, "Bearer")
    assert "expected a header 'Authorization: Bearer <key>'" in response.error


@pytest.mark.parametrize(
    "path", ["/v2/health/live", "/v2/health/ready", "/v2/models/Doubler/ready", "/ping", "/health"]
)
async def test_health_checks_are_open(server: RestServer, path: str) -> None:
    assert (await server.request("GET", path)).status == 200


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v2/models/Doubler/infer", ("error",)),
        ("/v2/models/Doubler/generate", ("error",)),
        ("/v1/models/Doubler:predict", ("error",)),
        ("/v1/chat/completions", ("error", "message")),
        ("/generate", ("error",)),
        ("/invocations", ("message",)),
        ("/Evaluate", ("error", "message")),
        ("/handled/by/no/model", ("error",)),
    ],
)
async def test_each_protocol_reports_a_missing_key_in_its_format(
    server: RestServer, path: str, field: tuple[str, ...]
) -> None:
    response = await server.request("POST", path, "{}")
    assert (response.status, response.headers["www-authenticate"]) == (401, "Bearer")
    found = response.json
    for name in field:
        found = found[name]
    assert "this request has no key" in found


async def test_metrics_need_a_key_and_count_denied_requests(server: RestServer, keys: KeyFile) -> None:
    denied = await server.request("GET", "/metrics")
    assert (denied.status, denied.headers["www-authenticate"]) == (401, "Bearer")
    await infer(server, bearer("wrong"))
    text = (await server.request("GET", "/metrics", headers=bearer(keys.keys["user"]))).body.decode()
    assert 'dragoman_access_denied_total{reason="missing"} 1\n' in text
    assert 'dragoman_access_denied_total{reason="invalid"} 1\n' in text


# --- roles and models --------------------------------------------------------------------------------------------


async def test_a_key_may_only_do_what_its_roles_say(server: RestServer, keys: KeyFile) -> None:
    one = {"infer": keys.add("infer", ["infer"]), "read": keys.add("read", ["read"]), "admin": keys.add("a", ["admin"])}
    server.dragoman.reload()
    calls = {
        "infer": ("POST", INFER, BODY),
        "read": ("GET", "/v2/models/Doubler", None),
        "admin": ("POST", "/v2/repository/index", b"{}"),
    }
    for role, key in one.items():
        for needed, (method, path, body) in calls.items():
            response = await server.request(method, path, body, bearer(key))
            allowed = role in (needed, "admin")
            assert response.status == (200 if allowed else 403), (role, needed)
            assert allowed or f"does not have the role '{needed}'" in response.error


async def test_a_key_loads_and_unloads_models_with_the_role_admin(server: RestServer, keys: KeyFile) -> None:
    admin = bearer(keys.add("admin", ["admin"]))
    server.dragoman.reload()
    path = "/v2/repository/models/Tripler/unload"
    assert (await server.request("POST", path, b"{}", bearer(keys.keys["user"]))).status == 403
    assert (await infer(server, admin, "Tripler")).status == 200
    assert (await server.request("POST", path, b"{}", admin)).status == 200
    assert (await infer(server, admin, "Tripler")).status == 404


async def test_a_key_of_some_models_sends_no_configuration(keys: KeyFile) -> None:
    bound, free = (bearer(keys.add(n, roles=["admin"], models=m)) for n, m in (("bound", ["Doubler"]), ("free", None)))
    path, config = "/v2/repository/models/Doubler/load", {"parameters": {"config": '{"max_batch_size": 4}'}}
    async with serving(Doubler, api_keys=str(keys.path), allow_config_override=True) as server:
        response = await server.request("POST", path, config, headers=bound)
        assert (response.status, "cannot send configurations or files" in response.error) == (403, True)
        assert (await server.request("POST", path, config, headers=free)).status == 200
        assert (await server.request("POST", path, headers=bound)).status == 200


async def test_requests_with_restricted_keys_are_observed_each_time(keys: KeyFile, tmp_path: Path) -> None:
    bound, log = bearer(keys.add("bound", models=["Doubler"])), tmp_path / "access.log"
    async with serving(Doubler, Tripler, api_keys=str(keys.path), access_log=str(log)) as server:
        for status, model in ((200, "Doubler"), (200, "Doubler"), (403, "Tripler")):
            assert (await infer(server, bound, model)).status == status
        assert (await infer(server, {})).status == 401
    lines = [line for line in log.read_text().splitlines() if "/infer" in line]
    assert [line.partition("status=")[2][:3] for line in lines] == ["200", "200", "403", "401"]


async def test_a_key_may_use_its_models_only(server: RestServer, keys: KeyFile) -> None:
    bound = bearer(keys.add("bound", ["admin"], ["Doubler"]))
    server.dragoman.reload()
    assert (await infer(server, bound)).status == 200
    for method, path, body in (
        ("POST", "/v2/models/Tripler/infer", BODY),
        ("POST", "/v2/models/Unknown/infer", BODY),
        ("GET", "/v2/models/Tripler", None),
        ("GET", "/v2/models/Tripler/config", None),
        ("GET", "/v2/models/Tripler/stats", None),
        ("POST", "/v2/repository/models/Tripler/unload", b"{}"),
        ("POST", "/models/Tripler/invoke", BODY),
        ("POST", "/v1/models/Tripler:predict", b'{"instances": [1]}'),
        ("GET", "/metrics", None),
        ("POST", "/Evaluate", b'{"name": "Tripler", "input": [[1]]}'),
    ):
        response = await server.request(method, path, body, bound)
        assert response.status == 403, path
    assert (await server.request("GET", "/v2/models", headers=bound)).json == {"models": ["Doubler"]}
    statistics = (await server.request("GET", "/v2/models/stats", headers=bound)).json["model_stats"]
    assert [entry["name"] for entry in statistics] == ["Doubler"]
    index = await server.request("POST", "/v2/repository/index", b"{}", bound)
    assert [entry["name"] for entry in index.json] == ["Doubler"]
    for path in ("/Info", "/v1/models", "/models", "/v2", "/openapi.json", "/version", "/load", "/info"):
        response = await server.request("GET", path, headers=bound)
        assert b"Tripler" not in response.body, path
    # Without a name it is the only model that the key may use.
    rows = b'{"instances": [1.5]}'
    assert (await server.request("POST", "/invocations", rows, bound)).json == {"predictions": [3.0]}
    assert (await server.request("POST", "/invocations", rows, bearer(keys.keys["user"]))).status == 400


async def test_the_default_model_is_for_keys_that_may_use_it(keys: KeyFile) -> None:
    rows = b'{"instances": [1.5]}'
    async with serving(Doubler, Tripler, api_keys=str(keys.path), default_model="Tripler") as server:
        for models, status in ((["Tripler"], 200), (["Unloaded"], 403), (["Unloaded", "Other"], 403)):
            bound = bearer(keys.add(f"{models[0]}-{len(models)}", models=models))
            server.dragoman.reload()
            response = await server.request("POST", "/invocations", rows, bound)
            assert response.status == status, response.body
            assert (b"4.5" in response.body) == (status == 200)


# --- limits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("calls_per_s", "burst", "retry_after_s", "later_s", "more"),
    [(2.0, 2, 0.5, 0.5, 1), (2.0, 2, 0.5, 1000.0, 2), (0.5, 1, 2.0, 2.0, 1), (0.5, 1, 2.0, 1000.0, 1)],
)
def test_a_rate_limit_allows_a_burst_and_then_one_call_per_interval(
    calls_per_s: float, burst: int, retry_after_s: float, later_s: float, more: int
) -> None:
    now_s = 100.0
    limiter = CallLimiter("k", calls_per_s, 0, lambda: now_s)
    for calls in (burst, more):
        for _ in range(calls):
            limiter.acquire()
        with pytest.raises(RateLimited, match=f"limit of {calls_per_s:g} calls per second") as found:
            limiter.acquire()
        assert found.value.retry_after_s == retry_after_s
        now_s += later_s


def test_concurrent_calls_end_when_released_or_dropped() -> None:
    limiter = CallLimiter("k", 0.0, 2)
    first, second = limiter.acquire(), limiter.acquire()
    with pytest.raises(RateLimited, match="limit of 2 concurrent calls") as found:
        limiter.acquire()
    assert found.value.retry_after_s == 1.0
    first.release()
    first.release()  # counts once
    third = limiter.acquire()
    with pytest.raises(RateLimited):
        limiter.acquire()
    del second, third
    limiter.acquire()
    kept = limiter.acquire(), limiter.acquire()
    assert len(kept) == 2


async def test_calls_above_the_rate_get_429_and_retry_after(server: RestServer, keys: KeyFile) -> None:
    slow = bearer(keys.add("slow", calls_per_s=0.01))
    server.dragoman.reload()
    assert (await infer(server, slow)).status == 200
    for path in (INFER, "/invocations", "/v1/models/Doubler:predict"):
        body = BODY if path == INFER else b'{"instances": [1]}'
        response = await server.request("POST", path, body, {**slow, "x-amzn-sagemaker-target-model": "Doubler"})
        assert (response.status, 90 <= int(response.headers["retry-after"]) <= 100) == (429, True), path
    assert (await server.request("GET", "/v2/models/Doubler", headers=slow)).status == 200
    assert (await infer(server, bearer(keys.keys["user"]))).status == 200


class Slow(dragoman.Model):
    inputs = Doubler.inputs
    placement = "inline"

    def load(self) -> None:
        self.open = asyncio.Event()
        self.running = 0

    async def infer(self, call: Infer) -> dict[str, Any]:
        self.running += 1
        await self.open.wait()
        return {"y": np.ones(1, np.float32)}


async def test_concurrent_calls_of_a_key_are_limited_until_they_end(keys: KeyFile) -> None:
    few = bearer(keys.add("few", max_concurrent=2))
    async with serving(Slow, api_keys=str(keys.path), trial_s=0) as server:
        running = [asyncio.create_task(infer(server, few, "Slow")) for _ in range(2)]
        while server.model("Slow").running < 2:
            await asyncio.sleep(0.001)
        denied = await infer(server, few, "Slow")
        assert (denied.status, denied.headers["retry-after"]) == (429, "1")
        assert "limit of 2 concurrent calls" in denied.error
        server.model("Slow").open.set()
        assert [response.status for response in await asyncio.gather(*running)] == [200, 200]
        assert (await infer(server, few, "Slow")).status == 200


async def test_a_client_that_disconnects_ends_its_call(keys: KeyFile) -> None:
    few = bearer(keys.add("few", max_concurrent=1))
    async with serving(Slow, api_keys=str(keys.path), trial_s=0) as server:
        connection = await connect(server.port)
        connection.writer.write(request("POST", "/v2/models/Slow/infer", BODY, few))
        while server.model("Slow").running < 1:
            await asyncio.sleep(0.001)
        connection.writer.transport.abort()
        server.model("Slow").open.set()
        while (await infer(server, few, "Slow")).status != 200:
            await asyncio.sleep(0.01)


# --- failed attempts ---------------------------------------------------------------------------------------------


def test_failed_attempts_of_an_address_are_limited() -> None:
    now_s = 0.0
    failures = FailedAttempts(6, lambda: now_s)
    for _ in range(6):
        failures.check("a")
        failures.add("a", "invalid")
    with pytest.raises(RateLimited) as found:
        failures.check("a")
    assert found.value.retry_after_s == 10.0
    failures.check("b")
    now_s += 10.0
    failures.check("a")
    assert failures.counts["invalid"] == 6
    assert failures.counts["throttled"] == 1


def test_failed_attempts_that_are_rare_or_without_a_limit() -> None:
    now_s = 0.0
    rare, free = FailedAttempts(0.5, lambda: now_s), FailedAttempts(0, lambda: now_s)
    for failures in (rare, free):
        failures.check("a")
        failures.add("a", "invalid")
        failures.add("a", "expired")
    free.check("a")
    with pytest.raises(RateLimited) as found:
        rare.check("a")
    assert found.value.retry_after_s == 240.0  # the burst is one attempt, and a second one came without a check
    now_s = 10_000.0
    rare.check("a")
    rare.add("a", "invalid")  # attempts that were not made do not add up
    with pytest.raises(RateLimited):
        rare.check("a")


def test_the_oldest_addresses_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dragoman.access.failures._MAX_ADDRESSES", 2)
    failures = FailedAttempts(1, lambda: 0.0)
    for address in ("a", "b", "b"):
        failures.add(address, "invalid")
    with pytest.raises(RateLimited):
        failures.check("a")
    for address in ("a", "c"):
        failures.add(address, "invalid")
    failures.check("b")
    for address in ("a", "c"):
        with pytest.raises(RateLimited):
            failures.check(address)


def test_denied_requests_are_counted_by_reason() -> None:
    failures = FailedAttempts(1)
    failures.add("a", "expired")
    (family,) = failures.families()
    assert {sample.labels["reason"]: sample.value for sample in family.samples} == {
        "missing": 0,
        "invalid": 0,
        "expired": 1,
        "forbidden": 0,
        "throttled": 0,
        "foreign_site": 0,
    }
    assert (family.name, family.kind) == ("dragoman_access_denied_total", "counter")


async def test_wrong_keys_are_limited_and_right_ones_are_not(keys: KeyFile) -> None:
    async with serving(Doubler, api_keys=str(keys.path), auth_failures_per_minute=3) as server:
        found = [await infer(server, bearer("wrong")) for _ in range(5)]
        assert [response.status for response in found] == [401, 401, 401, 429, 429]
        assert 1 <= int(found[-1].headers["retry-after"]) <= 20
        assert (await infer(server, bearer(keys.keys["user"]))).status == 200
        assert (await infer(server, {})).status == 401


@pytest.mark.parametrize("with_keys", [False, True])
@pytest.mark.parametrize(("token", "expected"), [("short", 429), ("of-20-characters-now", 200)])
async def test_only_control_tokens_that_can_be_guessed_are_throttled(
    keys: KeyFile, with_keys: bool, token: str, expected: int
) -> None:
    settings: dict[str, Any] = {"api_keys": str(keys.path)} if with_keys else {}
    async with serving(Doubler, control_token=token, auth_failures_per_minute=3, **settings) as server:
        index = "/v2/repository/index"
        assert (await server.request("POST", index, b"{}", bearer(token))).status == 200
        found = [(await server.request("POST", index, b"{}", bearer("wrong"))).status for _ in range(4)]
        assert found == [401, 401, 401, 429]
        assert (await server.request("POST", index, b"{}", bearer(token))).status == expected
        open_call = await infer(server, bearer(keys.keys["user"]) if with_keys else bearer("EMPTY"))
        assert open_call.status == 200


# --- the key file ------------------------------------------------------------------------------------------------


async def test_new_and_deleted_keys_take_effect_on_open_connections(server: RestServer, keys: KeyFile) -> None:
    raw = request("POST", INFER, BODY, bearer(keys.add("late")))
    connection = await connect(server.port)

    async def status() -> int:
        connection.writer.write(raw)
        return (await read_response(connection.reader)).status

    assert await status() == 401
    server.dragoman.reload()
    assert [await status() for _ in range(3)] == [200] * 3
    keys.delete("late")
    server.dragoman.reload()
    assert await status() == 401
    connection.writer.close()


def test_keys_that_do_not_change_keep_the_state_of_their_limits(keys: KeyFile) -> None:
    slow = bearer(keys.add("slow", calls_per_s=0.01))
    access = AccessControl(AccessRules(keys_file=str(keys.path)))
    granted = access.authorize("infer", slow, lambda: "10.0.0.1")
    keys.add("other")
    access.reload()
    assert access.authorize("infer", slow, lambda: "10.0.0.1") is granted
    assert granted.limiter is not None
    granted.limiter.acquire()
    keys.path.write_text(keys.path.read_text().replace("calls_per_s = 0.01", "calls_per_s = 0.02"))
    access.reload()
    changed = access.authorize("infer", slow, lambda: "10.0.0.1")
    assert (changed is granted, changed.calls_per_s) == (False, 0.02)


async def test_a_changed_file_is_read_without_a_signal(server: RestServer, keys: KeyFile) -> None:
    new = bearer(keys.add("new"))
    async with asyncio.timeout(60):
        while (await infer(server, new)).status != 200:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("broken", ["not = [toml", "", None, '[[key]]\nname = "user"\n'])
async def test_a_broken_key_file_closes_the_server(
    server: RestServer, keys: KeyFile, broken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    text = keys.path.read_text()
    keys.path.unlink() if broken is None else keys.path.write_text(broken)
    server.dragoman.reload()
    response = await infer(server, bearer(keys.keys["user"]))
    assert response.status == (401 if broken == "" else 503)
    assert str(keys.path) not in response.error
    assert broken == "" or "no API key is accepted until this is fixed" in caplog.text
    assert (await infer(server, {})).status == 401
    assert (await server.request("GET", "/v2/health/ready")).status == 200
    keys.path.write_text(text)
    server.dragoman.reload()
    assert (await infer(server, bearer(keys.keys["user"]))).status == 200


@pytest.mark.parametrize(("mode", "is_reported"), [(0o602, True), (0o664, False), (0o600, False)])
async def test_a_key_file_that_every_user_can_change_is_reported(
    keys: KeyFile, mode: int, is_reported: bool, caplog: pytest.LogCaptureFixture
) -> None:
    keys.path.chmod(mode)
    async with serving(Doubler, api_keys=str(keys.path)):
        pass
    assert (f"every user of this machine can add keys; chmod o-w {keys.path}" in caplog.messages) == is_reported


ENTRY = f'[[key]]\nname = "a"\nsha256 = "{"0" * 64}"\nroles = ["infer"]\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keys = 1", "unknown field `keys`"),
        (ENTRY + "role = 1", "unknown field `role` - at `$.key[0]`"),
        (ENTRY.replace('"infer"', '"root"'), "Invalid enum value 'root' - at `$.key[0].roles[0]`"),
        (ENTRY.replace('["infer"]', "[]"), "length >= 1 - at `$.key[0].roles`"),
        (ENTRY.replace("0" * 64, "0" * 63), "$.key[0].sha256"),
        (ENTRY + "calls_per_s = -1", "$.key[0].calls_per_s"),
        (ENTRY + "max_concurrent = true", "$.key[0].max_concurrent"),
        (ENTRY + "tokens_per_minute = 0", "Expected `int` >= 1 - at `$.key[0].tokens_per_minute`"),
        (ENTRY + "tokens_per_day = 1.5", "$.key[0].tokens_per_day"),
        (ENTRY + 'priority = ""', "Invalid enum value '' - at `$.key[0].priority`"),
        (
            ENTRY + "tokens_per_minute = 11\ntokens_per_day = 10",
            "key 'a': 'tokens_per_minute' is never reached: expected at most 'tokens_per_day' (10), got 11",
        ),
        (ENTRY.replace("infer", "read") + "tokens_per_day = 10", "key 'a': 'tokens_per_day' needs the role 'infer'"),
        (ENTRY.replace("infer", "read") + 'priority = "low"', "key 'a': 'priority' needs the role 'infer'"),
        (ENTRY + "models = []", "$.key[0].models"),
        (ENTRY + "expires = 2030-01-01T00:00:00", "$.key[0].expires"),
        (ENTRY + ENTRY, "two keys have the name 'a'"),
        (ENTRY + ENTRY.replace('"a"', '"b"'), "two keys have the sha256"),
        (ENTRY.replace('"a"', '"a b"'), "$.key[0].name"),
    ],
)
def test_invalid_entries_are_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as found:
        parse_keys(text)
    assert message in found.value.message
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(InvalidInput, match=r"key file '.*keys\.toml'"):
        dragoman.asgi(Doubler, api_keys=str(file))


async def test_an_expired_key_is_rejected(server: RestServer, keys: KeyFile) -> None:
    old = keys.add("old", expires_s=1_000_000_000.0)
    server.dragoman.reload()
    response = await infer(server, bearer(old))
    assert response.status == 401
    assert "key 'old' has expired" in response.error


async def test_a_key_that_expires_is_rejected_on_open_connections(
    server: RestServer, keys: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = request("POST", INFER, BODY, bearer(keys.add("short", expires_s=time.time() + 1000)))
    server.dragoman.reload()
    connection = await connect(server.port)
    for later_s, status in ((0, 200), (0, 200), (1001, 401), (0, 200)):
        now_s = time.time()
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda now_s=now_s + later_s: now_s)
            connection.writer.write(raw)
            assert (await read_response(connection.reader)).status == status
    connection.writer.close()


async def test_a_single_key_is_enough() -> None:
    with pytest.raises(InvalidInput, match="'api_key': expected 20 to 8192 characters, got 5"):
        dragoman.asgi(Doubler, api_key="short")
    key = create_key()
    async with serving(Doubler, api_key=key) as server:
        assert [(await infer(server, headers)).status for headers in ({}, bearer(key))] == [401, 200]


# --- what happens before the body --------------------------------------------------------------------------------


async def test_a_body_without_a_key_is_not_received(server: RestServer) -> None:
    connection = await connect(server.port)
    head = f"POST {INFER} HTTP/1.1\r\nHost: a\r\nContent-Length: 60000000\r\n\r\n"
    connection.writer.write(head.encode())
    response = await read_response(connection.reader)
    assert (response.status, response.headers["connection"]) == (401, "close")
    connection.writer.close()


async def test_pages_of_allowed_origins_can_read_the_error(keys: KeyFile) -> None:
    settings: dict[str, Any] = {"api_keys": str(keys.path), "cors_origins": "https://a.org"}
    async with serving(Doubler, **settings) as server:
        origin = {"origin": "https://a.org"}
        preflight = {**origin, "access-control-request-method": "POST"}
        response = await server.request("OPTIONS", INFER, None, preflight)
        assert (response.status, response.headers["access-control-allow-origin"]) == (204, "https://a.org")
        denied = await infer(server, origin)
        assert (denied.status, denied.headers["access-control-allow-origin"]) == (401, "https://a.org")
        assert (await infer(server, {**origin, **bearer(keys.keys["user"])})).status == 200


async def test_compressed_and_streamed_requests_need_a_key_too(server: RestServer, keys: KeyFile) -> None:
    for extra in ({"content-encoding": "gzip"}, {"expect": "100-continue"}, {"connection": "close"}):
        assert (await infer(server, extra)).status == 401
    stream = "/v2/models/Doubler/infer_stream"
    assert (await server.request("POST", stream, BODY)).status == 401
    assert (await server.request("POST", stream, BODY, bearer(keys.keys["user"]))).status == 200


async def test_asgi_applications_need_keys_too(keys: KeyFile) -> None:
    application = dragoman.asgi(Doubler, Tripler, api_keys=str(keys.path))
    bound = bearer(keys.add("bound", models=["Doubler"]))
    async with (
        application,
        httpx2.AsyncClient(transport=httpx2.ASGITransport(application), base_url="http://a") as client,
    ):
        assert (await client.get("/v2/health/live")).status_code == 200
        denied = await client.post(INFER, content=BODY)
        assert (denied.status_code, denied.headers["www-authenticate"]) == (401, "Bearer")
        assert (await client.post(INFER, content=BODY, headers=bearer(keys.keys["user"]))).status_code == 200
        async with asyncio.timeout(60):
            while (await client.post(INFER, content=BODY, headers=bound)).status_code != 200:
                await asyncio.sleep(0.05)
        other = await client.post("/v2/models/Tripler/infer", content=BODY, headers=bound)
        assert other.status_code == 403


# --- keys stay secret --------------------------------------------------------------------------------------------


async def test_keys_appear_in_no_log_and_no_metric(
    server: RestServer, keys: KeyFile, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = keys.keys["user"]
    wrong = "drg_" + "w" * 43
    found = [
        await infer(server, bearer(secret)),
        await infer(server, bearer(wrong)),
        await infer(server, {"x-api-key": wrong}),
    ]
    found.append(await server.request("POST", INFER, b"{", bearer(secret)))
    found.append(await server.request("GET", "/metrics", headers=bearer(secret)))
    server.dragoman.reload()
    everything = caplog.text + "".join(response.body.decode() for response in found)
    assert secret not in everything
    assert wrong not in everything
    assert secret not in keys.path.read_text()


def test_the_command_creates_lists_and_deletes_keys(tmp_path: Path) -> None:
    options = ("--roles", "infer", "--models", "a,b", "--calls-per-s", "2.5", "--max-concurrent", "3")
    tokens = ("--tokens-per-minute", "500", "--tokens-per-day", "9000", "--priority", "low")
    created = run_command("keys", "create", "ci", *options, *tokens, "--expires-days", "1", folder=tmp_path)
    key = created.stdout.strip()
    assert created.returncode == 0, created.stderr
    assert key.startswith("drg_")
    assert len(key) == 47
    file = tmp_path / "keys.toml"
    assert key not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    run_command("keys", "create", "all", "--roles", "admin", folder=tmp_path)
    listed = run_command("keys", "list", folder=tmp_path).stdout.splitlines()
    limits = "calls_per_s=2.5  max_concurrent=3  tokens_per_minute=500  tokens_per_day=9000  priority=low"
    assert listed[0].startswith(f"ci  roles=infer  models=a,b  {limits}  expires=20")
    assert listed[1] == "all  roles=infer,read,admin"
    again = run_command("keys", "create", "ci", folder=tmp_path)
    assert (again.returncode, "two keys have the name 'ci'" in again.stderr) == (2, True)
    assert "did you mean 'all'" in run_command("keys", "delete", "alll", folder=tmp_path).stderr
    assert run_command("keys", "delete", "ci", folder=tmp_path).returncode == 0
    assert run_command("keys", "list", folder=tmp_path).stdout == "all  roles=infer,read,admin\n"
    assert json.loads(run_command("keys", "list", "--json", folder=tmp_path).stdout) == [
        {
            "name": "all",
            "certificate": None,
            "roles": ["infer", "read", "admin"],
            "models": None,
            "calls_per_s": None,
            "max_concurrent": None,
            "tokens_per_minute": None,
            "tokens_per_day": None,
            "priority": None,
            "expires": None,
        }
    ]
    for wrong in (
        ("create", "x", "--roles", "root"),
        ("create", "x y"),
        ("create", "x", "--calls-per-s", "-1"),
        ("create",),
    ):
        assert run_command("keys", *wrong, folder=tmp_path).returncode == 2
