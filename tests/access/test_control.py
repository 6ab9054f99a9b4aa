"""Decisions about requests: lengths of credentials, what is counted and logged of those that are refused."""

import logging
from collections.abc import Mapping

import pytest

from access.access_models import KeyFile, bearer
from dragoman.access.control import AccessControl, AccessRules
from dragoman.access.grants import EVERYTHING
from dragoman.core.errors import DragomanError, Forbidden, InvalidInput, NotReady, RateLimited, Unauthorized
from dragoman.protocols.wire import Role

LONGEST = "k" * 8192


def address() -> str:
    return "10.0.0.1"


@pytest.mark.parametrize("name", ["api_key", "control_token"])
def test_the_longest_credential_is_accepted_and_a_longer_one_rejected_at_the_start(name: str) -> None:
    access = AccessControl(AccessRules(**{name: LONGEST}))  # type: ignore[arg-type]
    assert access.authorize("admin", bearer(LONGEST), address).name == name
    with pytest.raises(InvalidInput, match=f"setting '{name}': expected .*8192 characters, got 8193"):
        AccessControl(AccessRules(**{name: LONGEST + "k"}))  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [0, 19, 20])
def test_a_short_key_is_rejected_at_the_start(length: int) -> None:
    rules = AccessRules(api_key="k" * length, control_token="sesame")
    if 0 < length < 20:
        with pytest.raises(InvalidInput, match=f"setting 'api_key': expected 20 to 8192 characters, got {length}"):
            AccessControl(rules)
        return
    assert AccessControl(rules).needs_credentials is (length > 0)


def test_refused_requests_are_counted_by_their_reason(keys: KeyFile, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dragoman.audit")
    user, expired = bearer(keys.keys["user"]), bearer(keys.add("old", expires_s=1.0))
    access = AccessControl(AccessRules(keys_file=str(keys.path), failures_per_minute=2))
    cases: tuple[tuple[Role, Mapping[str, str], type[DragomanError], str, str], ...] = (
        ("infer", {}, Unauthorized, "missing", ""),
        ("admin", user, Forbidden, "forbidden", "user"),
        ("infer", expired, Unauthorized, "expired", "old"),
        ("infer", bearer("wrong"), Unauthorized, "invalid", ""),
        ("infer", bearer("wrong"), RateLimited, "throttled", ""),
    )
    for role, headers, error, reason, key in cases:
        before = dict(access.failures.counts)
        caplog.clear()
        with pytest.raises(error):
            access.authorize(role, headers, address, f"GET /{reason}")
        after = dict(access.failures.counts)
        assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {reason: 1}
        fields = [tuple(getattr(r, name) for name in ("request", "key", "client")) for r in caplog.records]
        assert fields == [(f"GET /{reason}", key, "10.0.0.1")]
    assert access.authorize("infer", user, address).name == "user"


def test_an_address_has_thirty_attempts_a_minute_by_default(keys: KeyFile) -> None:
    access = AccessControl(AccessRules(keys_file=str(keys.path)))
    for _ in range(30):
        with pytest.raises(Unauthorized):
            access.authorize("infer", bearer("wrong"), address)
    with pytest.raises(RateLimited) as found:
        access.authorize("infer", bearer("wrong"), address)
    assert 0 < (found.value.retry_after_s or 0) <= 2.0


def test_without_readable_keys_every_request_is_rejected_and_none_is_a_guess(keys: KeyFile) -> None:
    access = AccessControl(AccessRules(keys_file=str(keys.path), failures_per_minute=1))
    version = access.version
    text = keys.path.read_text()
    keys.path.write_text("[")
    access.reload()
    assert access.version == version + 1
    for _ in range(3):
        with pytest.raises(NotReady, match="the API keys of this server cannot be read; its log has more"):
            access.authorize("infer", bearer(keys.keys["user"]), address)
    keys.path.write_text(text)
    access.reload()
    assert access.version == version + 2
    assert access.authorize("infer", bearer(keys.keys["user"]), address).name == "user"


def test_a_decision_holds_until_the_keys_change_or_its_key_expires(keys: KeyFile) -> None:
    access = AccessControl(AccessRules(keys_file=str(keys.path)))
    assert access.is_current(access.version, float("inf"))
    assert not access.is_current(access.version, 1.0)
    assert not access.is_current(access.version - 1, float("inf"))


@pytest.mark.parametrize(
    ("rules", "guarded"),
    [
        (AccessRules(), ""),
        (AccessRules(control_token="t"), "admin"),
        (AccessRules(control_loopback=True), "admin"),
        (AccessRules(control_loopback=True, control_open=True), ""),
        (AccessRules(control_open=True), ""),
        (AccessRules(control_token="t", control_open=True), "admin"),
        (AccessRules(api_key="k" * 20), "infer read admin"),
        (AccessRules(api_key="k" * 20, control_open=True), "infer read admin"),
    ],
)
def test_which_roles_need_a_credential(rules: AccessRules, guarded: str) -> None:
    access = AccessControl(rules)
    roles: tuple[Role, ...] = ("infer", "read", "admin")
    assert [role for role in roles if access.is_guarded(role)] == guarded.split()
    # Requests for control are always checked: a web page may have sent them.
    assert [role for role in roles if access.has_to_check(role, {"host": "localhost"})] == (
        guarded.split() or ["admin"]
    )
    assert all(access.has_to_check(role, {"origin": "https://site.example"}) for role in roles)


def test_a_page_of_another_site_is_refused_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dragoman.audit")
    access = AccessControl(AccessRules())
    page = {"host": "localhost", "origin": "https://site.example", "content-type": "text/plain"}
    for role in ("infer", "admin"):
        with pytest.raises(Forbidden):
            access.check_site(role, "POST", page, address, f"POST /{role}")
    assert access.failures.counts["foreign_site"] == 2
    fields = [tuple(getattr(r, name) for name in ("request", "key", "client")) for r in caplog.records]
    assert fields == [("POST /infer", "", "10.0.0.1"), ("POST /admin", "", "10.0.0.1")]
    # A credential is proof enough, where one is needed.
    AccessControl(AccessRules(api_key="k" * 20)).check_site("infer", "POST", page, address, "")


@pytest.mark.parametrize(
    ("rules", "role", "headers", "client", "expected"),
    [
        (AccessRules(), "infer", {}, "10.0.0.1", ("", "")),
        (AccessRules(control_loopback=True), "admin", {"host": "localhost:8"}, "127.0.0.1", ("loopback", "")),
        (AccessRules(control_token="t"), "admin", bearer("t"), "10.0.0.1", ("control_token", "")),
        (AccessRules(api_key=LONGEST), "read", bearer(LONGEST), "10.0.0.1", ("api_key", "api_key")),
        (
            AccessRules(api_key=LONGEST, control_token="t"),
            "infer",
            bearer("t"),
            "10.0.0.1",
            ("control_token", "control_token"),
        ),
    ],
)
def test_the_name_and_the_owner_of_a_caller(
    rules: AccessRules, role: Role, headers: Mapping[str, str], client: str, expected: tuple[str, str]
) -> None:
    grant = AccessControl(rules).authorize(role, headers, lambda: client)
    caller = grant.caller(client)
    assert (caller.name, caller.owner, caller.address) == (*expected, client)
    assert (grant.roles, grant.models, grant.limiter) == (EVERYTHING, None, None)
    assert grant.is_anonymous is (expected[1] == "")


def test_a_page_controls_models_with_a_token_only() -> None:
    access = AccessControl(AccessRules())
    page = {"host": "models.example", "origin": "https://models.example", "content-type": "application/json"}
    with pytest.raises(Forbidden, match="model control from a web page needs a control token"):
        access.check_site("admin", "POST", page, address, "")
    access.check_site("admin", "POST", {**page, **bearer("t")}, address, "")
    access.check_site("infer", "POST", page, address, "")
    for own in ("http://localhost:8080", "http://127.0.0.1:8080", "http://[::1]:8080"):
        access.check_site("admin", "POST", {"host": own.partition("//")[2], "origin": own}, address, "")
        with pytest.raises(Forbidden):
            access.check_site("admin", "POST", {"host": "localhost", "origin": own}, address, "")
    access.check_site("admin", "POST", {"host": "models.example"}, address, "")
