"""In whose name lines run: keys that may use some models, that are deleted, that have limits; several processes."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

import dragoman
from access.access_models import KeyFile
from dragoman.access.control import AccessControl, AccessRules
from dragoman.core.callers import ANYONE, Caller
from dragoman.core.calls import Request
from dragoman.core.errors import Forbidden, NotSupported
from dragoman.core.fair_share import WEIGHTS, FairShares
from dragoman.core.services import WireResponse
from dragoman.services import InternalSender
from dragoman_batches.calls import ListFiles

WAIT_S = 120.0


def first(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x


def second(x: NDArray[np.float64]) -> NDArray[np.float64]:
    time.sleep(0.05)
    return x


class Running:
    """A server with a key file, and its requests."""

    def __init__(self, folder: Path) -> None:
        self.keys = KeyFile(folder / "keys.toml")
        self.keys.add("some", roles=["infer"], models=["first"])
        self.keys.add("slow", roles=["infer"], calls_per_s=20.0)
        self.keys.add("gone", roles=["infer"])
        options: dict[str, Any] = {"http_port": 0, "grpc_port": -1, "api_keys": str(self.keys.path)}
        self.server = dragoman.Server(first, second, **options)

    def send(self, name: str, method: str, path: str, **options: Any) -> Any:
        headers = {"authorization": f"Bearer {self.keys.keys[name]}"}
        response = httpx.request(method, f"{self.server.http_url}{path}", headers=headers, timeout=WAIT_S, **options)
        return response.text if path.endswith("/content") else response.json()

    def start(self, name: str, *models: str) -> Any:
        lines = (
            {
                "custom_id": f"{number}",
                "method": "POST",
                "url": f"/v2/models/{model}/infer",
                "body": {"inputs": [{"name": "x", "shape": [1], "datatype": "FP64", "data": [number]}]},
            }
            for number, model in enumerate(models)
        )
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        file = self.send(name, "POST", "/v1/files", files={"file": ("a", content)}, data={"purpose": "batch"})
        body = {"input_file_id": file["id"], "endpoint": "*", "completion_window": "1h"}
        return self.send(name, "POST", "/v1/batches", json=body)

    def ended(self, name: str, batch: Any) -> Any:
        end_s = time.monotonic() + WAIT_S
        while batch["status"] not in ("completed", "failed"):
            assert time.monotonic() < end_s, batch
            time.sleep(0.02)
            batch = self.send(name, "GET", f"/v1/batches/{batch['id']}")
        return batch


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("keys"))
    with running.server:
        yield running


def test_lines_may_use_the_models_of_the_key_only(running: Running) -> None:
    batch = running.ended("some", running.start("some", "first", "second"))
    assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    (error,) = running.send("some", "GET", f"/v1/files/{batch['error_file_id']}/content").splitlines()
    assert (json.loads(error)["custom_id"], json.loads(error)["response"]["status_code"]) == ("1", 403)


def test_lines_wait_for_the_limits_of_the_key(running: Running) -> None:
    started_s = time.monotonic()
    batch = running.ended("slow", running.start("slow", *["first"] * 30))
    assert batch["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
    assert time.monotonic() - started_s > 0.5  # 20 at once, then 20 a second


def test_a_batch_ends_with_its_key(running: Running) -> None:
    batch = running.start("gone", *["second"] * 2000)
    while not running.send("gone", "GET", f"/v1/batches/{batch['id']}")["request_counts"]["completed"]:
        time.sleep(0.02)
    running.keys.delete("gone")  # the server sees it within a second
    service = running.server.engine.services["batches"]
    end_s = time.monotonic() + WAIT_S
    while (found := service._jobs.find(batch["id"], "key:gone", "batch")) is not None and not found.ended:  # type: ignore[attr-defined]
        assert time.monotonic() < end_s
        time.sleep(0.02)
    assert found is not None
    assert (found.data["status"], found.data["problems"][0]["code"]) == ("failed", "key_revoked")


async def test_the_endpoints_are_refused_with_several_processes() -> None:
    settings = dragoman.Settings(processes=2)
    engine = dragoman.Server(first, settings=settings).engine
    with pytest.raises(NotSupported, match="--processes 1"):
        await engine.call(Request(ListFiles()))
    await engine.close()


async def test_files_and_lines_in_an_asgi_application() -> None:
    application = dragoman.asgi(first, max_body_bytes=1 << 16)
    content = bytes(1 << 19)  # larger than a body: it is received into a file
    transport = httpx.ASGITransport(app=application)
    async with application, httpx.AsyncClient(transport=transport, base_url="http://a") as client:
        file = await client.post("/v1/files", files={"file": ("a", content)}, data={"purpose": "batch"})
        assert (await client.get(f"/v1/files/{file.json()['id']}/content")).content == content
        too_large = await client.post("/v1/messages", content=bytes(1 << 17))
        assert too_large.status_code == 413
        body = b'{"inputs": [{"name": "x", "shape": [1], "datatype": "FP64", "data": [1]}]}'
        found: WireResponse = await application.sender.send("/v2/models/first/infer", body, ANYONE, None, "line-1")
        assert (found.status, json.loads(found.body)["outputs"][0]["data"]) == (200, [1.0])


def test_lines_of_a_token_have_its_models_and_those_of_an_unknown_key_nothing(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.toml")
    keys.add("ann", roles=["infer"], priority="high")
    access = AccessControl(AccessRules(keys_file=str(keys.path)))
    models = frozenset(("first",))
    token = InternalSender._grant(access, Caller("jwt:1", "someone"), models)
    assert (token.models, token.roles, token.owner) == (models, frozenset(("infer",)), "jwt:1")
    assert InternalSender._grant(access, Caller("key:ann", "ann"), None).priority == "low"
    for owner in ("key:bob", ""):
        with pytest.raises(Forbidden):
            InternalSender._grant(access, Caller(owner, "bob"), None)


def test_requests_of_a_lower_class_do_not_change_the_weight_of_others() -> None:
    shares = FairShares()
    shares.enter(Caller("key:ann", priority="high"))
    shares.enter(Caller("key:ann", priority="low"))
    assert shares.weight("key:ann") == WEIGHTS["high"]
