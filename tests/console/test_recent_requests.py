"""Requests by their ids: their times, batch, status and trace, for callers that may read all of them."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

import dragoman
from access.access_models import BODY, Doubler, KeyFile, bearer
from access.conftest import keys as keys
from console.console_models import Wage, write_graphs
from e2e.otlp_receiver import running_receiver
from rest.rest_server import RestServer, serving

KEPT: dict[str, Any] = {"recent_requests": 5}
TRACE = "0af7651916cd43dd8448eb211c80319c"


class Slow(dragoman.Model):
    """Waits until a test sets `open`, so that further calls are in the queue and merged; then computes for 20 ms."""

    begun, open = threading.Event(), threading.Event()
    placement = "thread"
    batched = True
    inputs = (dragoman.TensorSpec("x", dragoman.FP32, (-1,)),)

    def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        self.begun.set()
        assert self.open.wait(60)
        time.sleep(0.02)
        return {"y": np.asarray(call.inputs["x"].data) * 2}


async def find(server: RestServer, request_id: str) -> list[dict[str, Any]]:
    response = await server.request("GET", f"/console/requests/{request_id}")
    assert response.status == 200, response.body
    found: list[dict[str, Any]] = response.json["requests"]
    return found


async def test_a_request_is_found_by_its_id() -> None:
    async with serving(Doubler, **KEPT) as server:
        sent = await server.infer("Doubler", BODY, {"x-request-id": "order/17"})
        (found,) = await find(server, "order%2F17")
    expected = {
        "id": "order/17", "trace_id": "", "protocol": "oip_rest", "method": "POST",
        "path": "/v2/models/Doubler/infer", "model": "Doubler", "version": "", "status": 200,
        "received_bytes": len(BODY), "sent_bytes": len(sent.body), "queue_ms": 0.0, "batch": None, "calls": [],
        "first_chunk_ms": None,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    parts = found["parse_ms"] + found["queue_ms"] + found["compute_ms"] + found["format_ms"]
    assert parts == pytest.approx(found["total_ms"], abs=0.01)
    assert found["time"].endswith("Z")


async def test_queue_and_batch_of_merged_requests() -> None:
    async with serving(Slow, recent_requests=50, max_batch_size=8, trial_s=0) as server:
        sending = [asyncio.create_task(server.infer("Slow", BODY, {"x-request-id": "first"}))]
        await asyncio.to_thread(Slow.begun.wait)
        sending += [asyncio.create_task(server.infer("Slow", BODY, {"x-request-id": f"r{i}"})) for i in range(3)]
        while b'dragoman_queued_calls{model="Slow",version=""} 3' not in (await server.request("GET", "/metrics")).body:
            await asyncio.sleep(0.01)
        Slow.open.set()
        await asyncio.gather(*sending)
        first, *merged = [(await find(server, name))[0] for name in ("first", "r0", "r1", "r2")]
    assert first["batch"]["calls"] == 1
    assert [(each["batch"]["calls"], each["batch"]["rows"]) for each in merged] == [(3, 3)] * 3
    assert all(each["queue_ms"] >= 19 for each in merged)
    assert all(each["compute_ms"] >= 19 for each in (first, *merged))


async def test_calls_of_other_models(tmp_path: Path) -> None:
    _, payroll = write_graphs(tmp_path)
    tensors = [{"name": name, "datatype": "FP64", "shape": [1], "data": [2]} for name in ("time", "price")]
    async with serving(Wage, payroll, **KEPT) as server:
        response = await server.infer("payroll", {"inputs": tensors}, {"x-request-id": "month"})
        assert response.json["outputs"][0]["data"] == [8]
        (found,) = await find(server, "month")
    assert [(each["model"], each["depth"]) for each in found["calls"]] == [("Wage", 1)] * 2
    assert all(0 < each["total_ms"] <= found["total_ms"] for each in found["calls"])


async def test_only_the_last_requests_are_kept() -> None:
    async with serving(Doubler, **KEPT) as server:
        for i in range(7):
            await server.infer("Doubler", BODY, {"x-request-id": f"r{i}"})
        response = await server.request("GET", "/console/requests")
        assert response.json["kept"] == 5
        assert [each["id"] for each in response.json["requests"]] == ["r6", "r5", "r4", "r3", "r2"]
        missing = await server.request("GET", "/console/requests/r0")
        assert (missing.status, missing.error) == (404, "no request 'r0' among the last 5")


async def test_errors_and_unknown_paths_are_kept() -> None:
    async with serving(Doubler, **KEPT) as server:
        await server.infer("Doubler", b"{", {"x-request-id": "broken"})
        await server.request("GET", "/nowhere", None, {"x-request-id": "lost"})
        (broken,), (lost,) = await find(server, "broken"), await find(server, "lost")
    assert (broken["status"], broken["compute_ms"], broken["model"]) == (400, None, "")
    assert (lost["status"], lost["path"]) == (404, "/nowhere")


async def test_the_access_log_and_recent_requests_together(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    async with serving(Doubler, **KEPT, access_log=str(log)) as server:
        await server.infer("Doubler", BODY, {"x-request-id": "both"})
        assert [each["status"] for each in await find(server, "both")] == [200]
    line = next(line for line in log.read_text().splitlines() if '"both"' in line)
    assert "status=200" in line


async def test_of_what_a_client_sends_little_is_quoted_and_kept(tmp_path: Path) -> None:
    """A compressed body of a few KB may hold many MB."""
    log, long = tmp_path / "access.log", "a" * (1 << 20)
    x = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/Evaluate", {"name": long, "input": [[1]]}),
        ("/v2/models/Doubler/infer", {"inputs": [x], "parameters": {"binary_data_output": long}}),
        ("/v2/models/Doubler/infer", {"inputs": [{**x, "datatype": long}]}),
        ("/v2/models/Doubler/infer", {"inputs": [x], "outputs": [{"name": long}]}),
        ("/v2/models/Doubler/infer", {"inputs": [x], "parameters": {"timeout": long}}),
    ]
    async with serving(Doubler, **KEPT, access_log=str(log)) as server:
        for path, body in bodies:
            response = await server.request("POST", path, body)
            assert (response.status, len(response.body) < 3000) == (400, True), response.body[:99]
            assert b"aaaaaaaaaa" in response.body
        assert len((await server.request("GET", "/console/requests")).body) < 8000
    lines = log.read_text().splitlines()
    assert len(lines) >= 5
    assert max(map(len, lines)) < 800


async def test_the_trace_of_a_request() -> None:
    with running_receiver() as receiver:
        async with serving(Doubler, **KEPT, tracing_endpoint=receiver.url) as server:
            parent = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "x-request-id": "traced"}
            await server.infer("Doubler", BODY, parent)
            (found,) = await find(server, "traced")
    assert found["trace_id"] == TRACE


async def test_without_the_setting_nothing_is_kept() -> None:
    async with serving(Doubler) as server:
        await server.infer("Doubler", BODY, {"x-request-id": "r"})
        assert (await server.request("GET", "/console/requests")).json == {"kept": 0, "requests": []}
        missing = await server.request("GET", "/console/requests/r")
        assert (missing.status, "--recent-requests" in missing.error) == (404, True)


async def test_requests_need_the_role_read_for_all_models(keys: KeyFile) -> None:
    keys.add("caller", ["infer"])
    keys.add("reader", ["read"])
    keys.add("one", ["read"], ["Doubler"])
    async with serving(Doubler, **KEPT, api_keys=str(keys.path)) as server:
        for path in ("/console/requests", "/console/requests/r"):
            assert (await server.request("GET", path)).status == 401
            assert (await server.request("GET", path, None, bearer(keys.keys["caller"]))).status == 403
            assert (await server.request("GET", path, None, bearer(keys.keys["one"]))).status == 403
        found = await server.request("GET", "/console/requests", None, bearer(keys.keys["reader"]))
        assert (found.status, found.json["requests"]) == (200, [])


async def test_with_an_admin_port_they_are_there_only() -> None:
    async with serving(Doubler, **KEPT, admin_port=0) as server:
        await server.infer("Doubler", BODY, {"x-request-id": "r"})
        assert (await server.request("GET", "/console/requests/r")).status == 404
        assert len(await find(RestServer(int(server.dragoman.admin_url.rpartition(":")[2]), None), "r")) == 1


async def test_an_asgi_application_keeps_requests() -> None:
    app = dragoman.asgi(Doubler, **KEPT)
    async with app, httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://test") as client:
        await client.post("/v2/models/Doubler/infer", content=BODY, headers={"x-request-id": "r"})
        (found,) = (await client.get("/console/requests/r")).json()["requests"]
    assert (found["model"], found["status"]) == ("Doubler", 200)
