"""The text of a key file, what it may contain, and when two grants are the same."""

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from dragoman.access.grants import EVERYTHING, Grant
from dragoman.access.keys import (
    StoredKey,
    create_key,
    digest_of,
    expand_roles,
    format_keys,
    is_writable_by_everyone,
    parse_keys,
    read_keys,
    single_key,
    write_keys,
)
from dragoman.core.errors import InvalidInput

PLAIN = StoredKey(digest_of("a"), Grant("ann", frozenset(("read", "infer")), owner="key:ann"))
FULL = StoredKey(
    digest_of("b"), Grant("é".encode().hex(), EVERYTHING, frozenset(("m", "k é")), 2.5, 3, 1_800_000_000.0, "key:c3a9")
)
TEXT = f"""# API keys of Dragoman: `dragoman keys create NAME` adds one. Only hashes are stored.

[[key]]
name = "ann"
sha256 = "{digest_of("a").hex()}"
roles = ["infer", "read"]

[[key]]
name = "c3a9"
sha256 = "{digest_of("b").hex()}"
roles = ["admin"]
models = ["k é", "m"]
calls_per_s = 2.5
max_concurrent = 3
expires = 2027-01-15T08:00:00Z
"""


def grants(keys: list[StoredKey]) -> list[dict[str, Any]]:
    names = [field.name for field in fields(Grant) if field.init and field.repr]  # but the state of limits
    return [{"digest": key.digest, **{name: getattr(key.grant, name) for name in names}} for key in keys]


def test_a_file_and_its_keys(tmp_path: Path) -> None:
    assert format_keys([PLAIN, FULL]) == TEXT
    write_keys(tmp_path / "keys", [PLAIN, FULL])
    assert (tmp_path / "keys").read_text() == TEXT
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o600
    assert grants(read_keys(tmp_path / "keys")) == grants([PLAIN, FULL])
    assert grants(parse_keys("")) == []
    assert parse_keys(TEXT)[0].grant.expires_s == math.inf


ENTRY = f'[[key]]\nname = "{{}}"\nsha256 = "{"0" * 64}"\nroles = ["infer"]\n'


@pytest.mark.parametrize("name", ["a", "A.b_c@d-9", "0", "a" * 64])
def test_names_of_keys(name: str) -> None:
    assert parse_keys(ENTRY.format(name))[0].grant.name == name


@pytest.mark.parametrize(
    "text",
    [
        *(ENTRY.format(name) for name in ("", "-a", "a b", "a" * 65, "é", "a\\n")),
        ENTRY.format("a") + "calls_per_s = -1\n",
        ENTRY.format("a") + "calls_per_s = 1000000001\n",
        ENTRY.format("a") + "max_concurrent = -1\n",
        ENTRY.format("a") + "models = []\n",
        ENTRY.format("a") + 'models = [""]\n',
        ENTRY.format("a") + "expires = 2027-01-15T08:00:00\n",  # of which time zone?
        ENTRY.format("a") + "expire = 2027-01-15T08:00:00Z\n",
        ENTRY.format("a").replace("infer", "write"),
        ENTRY.format("a").replace('"infer"', ""),
        ENTRY.format("a").replace("0" * 64, "0" * 63),
        ENTRY.format("a").replace("0" * 64, "A" * 64),
        ENTRY.format("a").replace("0" * 64, "0" * 64 + "\\n"),
        ENTRY.format("a") + "[keys]\n",
    ],
)
def test_entries_that_no_file_may_have(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_keys(text)


@pytest.mark.parametrize("field", ["calls_per_s = 1000000000", "calls_per_s = 0", "max_concurrent = 0"])
def test_bounds_of_limits(field: str) -> None:
    (key,) = parse_keys(ENTRY.format("a") + field + "\n")
    assert key.grant.calls_per_s in (1e9, 0.0)
    assert key.grant.max_concurrent == 0


def test_two_keys_need_two_names_and_two_hashes() -> None:
    other = ENTRY.format("b").replace("0" * 64, "1" * 64)
    assert len(parse_keys(ENTRY.format("a") + other)) == 2
    with pytest.raises(InvalidInput, match=r"^two keys have the name 'a'$"):
        parse_keys(ENTRY.format("a") + ENTRY.format("a").replace("0" * 64, "1" * 64))
    with pytest.raises(InvalidInput, match=rf"^two keys have the sha256 '{'0' * 64}'$"):
        parse_keys(ENTRY.format("a") + ENTRY.format("b"))


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"^key file '.*none' cannot be read: No such file or directory$"):
        read_keys(tmp_path / "none")
    (tmp_path / "latin").write_bytes(b"\xff")
    with pytest.raises(InvalidInput, match=r"^key file '.*latin' cannot be read: 'utf-8' codec"):
        read_keys(tmp_path / "latin")
    (tmp_path / "broken").write_text("[")
    with pytest.raises(InvalidInput, match=r"^key file '.*broken': expected TOML: "):
        read_keys(tmp_path / "broken")
    with pytest.raises(InvalidInput, match=r"^key file '.*keys' cannot be written: No such file or directory$"):
        write_keys(tmp_path / "missing" / "keys", [PLAIN])
    with pytest.raises(InvalidInput):  # before the file is touched
        write_keys(tmp_path / "keys", [structs.replace(PLAIN, grant=Grant("a b", EVERYTHING))])
    assert not (tmp_path / "keys").exists()
    assert not is_writable_by_everyone(tmp_path / "none")


def test_roles_and_new_keys() -> None:
    assert expand_roles(["infer", "write"]) == {"infer"}
    assert expand_roles(["admin"]) == {"infer", "read", "admin"}
    assert expand_roles([]) == frozenset()
    first, second = create_key(), create_key()
    assert (first[:4], len(first), first == second) == ("drg_", 47, False)
    assert single_key("k" * 20).digest == digest_of("k" * 20)
    assert digest_of("\ud800") != digest_of("\udfff")  # text of any client has a hash


def test_grants_are_equivalent_if_they_allow_the_same() -> None:
    grant = Grant("a", EVERYTHING, frozenset(("m",)), 1.0, 2, 3.0, "o")
    assert grant.is_equivalent(replace(grant))
    assert not grant.is_equivalent(None)
    for name, value in (
        ("name", "b"),
        ("roles", frozenset()),
        ("models", None),
        ("calls_per_s", 2.0),
        ("max_concurrent", 3),
        ("expires_s", 4.0),
        ("owner", "p"),
    ):
        assert not grant.is_equivalent(replace(grant, **{name: value}))  # type: ignore[arg-type]


def test_which_grants_are_anonymous() -> None:
    assert Grant("a", EVERYTHING).is_anonymous
    for more in ({"models": frozenset("m")}, {"calls_per_s": 1.0}, {"max_concurrent": 1}, {"owner": "o"}):
        assert not Grant("a", EVERYTHING, **more).is_anonymous
