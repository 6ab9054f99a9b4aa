"""Keys and models of the tests of authentication."""

import asyncio
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import dragoman
from dragoman.access.grants import Grant
from dragoman.access.keys import StoredKey, create_key, digest_of, expand_roles, write_keys
from dragoman.core.calls import Infer

BODY = json.dumps({"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1.5]}]}).encode()


class Doubler(dragoman.Model):
    inputs = (dragoman.TensorSpec("x", dragoman.FP32, (-1,)),)
    placement = "inline"

    def infer(self, call: Infer) -> dict[str, Any]:
        return {"y": np.asarray(call.inputs["x"].data) * 2}


class Tripler(Doubler):
    def infer(self, call: Infer) -> dict[str, Any]:
        return {"y": np.asarray(call.inputs["x"].data) * 3}


class KeyFile:
    """A key file, with the keys by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keys: dict[str, str] = {}
        self._stored: list[StoredKey] = []

    def add(self, name: str, roles: Iterable[str] = ("infer", "read"), models: Any = None, **limits: Any) -> str:
        key = self.keys[name] = create_key()
        grant = Grant(name, expand_roles(roles), None if models is None else frozenset(models), **limits)
        self._stored.append(StoredKey(digest_of(key), grant))
        write_keys(self.path, self._stored)
        return key

    def delete(self, name: str) -> None:
        self._stored = [key for key in self._stored if key.grant.name != name]
        write_keys(self.path, self._stored)


def bearer(key: str) -> Mapping[str, str]:
    return {"authorization": f"Bearer {key}"}


class Connection(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


async def connect(port: int) -> Connection:
    return Connection(*await asyncio.open_connection("127.0.0.1", port))
