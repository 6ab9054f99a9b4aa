"""The audit log: a line for each change of a model or the server, and for each refused request."""

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

import dragoman
from access.access_models import BODY, Doubler, KeyFile, Tripler, bearer
from dragoman.access import refusals
from dragoman.access.refusals import Refusals
from dragoman.core.audit import log_change
from dragoman.core.callers import Caller
from dragoman.core.errors import Forbidden, RateLimited, Unauthorized
from dragoman.formats import grpc_messages as m
from e2e.server_process import ServerProcess, running_server
from rest.rest_server import serving
from text_server import ReverseModel, serve

INFER = "/v2/models/Doubler/infer"


class Lines(list[dict[str, Any]]):
    """The fields of the lines that were logged, without the client, which is always this machine."""

    def take(self) -> list[dict[str, Any]]:
        found, self[:] = [*self], []
        return found


_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


@pytest.fixture
def lines() -> Iterator[Lines]:
    found = Lines()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            fields = {name: value for name, value in vars(record).items() if name not in _STANDARD}
            assert fields.pop("client") == "127.0.0.1", fields
            found.append(fields)

    log, handler = logging.getLogger("dragoman.audit"), Handler()
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield found
    log.removeHandler(handler)
    log.setLevel(before)


def refused(status: int, request: str, key: str = "", **more: Any) -> dict[str, Any]:
    return {"action": "refused", "status": status, "request": request, "key": key, **more}


def became(before: str, after: str) -> dict[str, str]:
    """Return the states of the versions of a model before and after a change."""
    return {"before": before, "after": after}


def without_reason(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name != "reason"} for line in found]


# --- changes -----------------------------------------------------------------------------------------------------


async def test_changes_of_models(lines: Lines, keys: KeyFile, tmp_path: Path) -> None:
    ops = bearer(keys.add("ops", ["admin"]))
    (tmp_path / "models" / "m" / "1").mkdir(parents=True)
    (tmp_path / "models" / "m" / "1" / "model.py").write_text(
        "import dragoman\n\n@dragoman.model(placement='thread')\ndef model(x: float) -> float:\n    return x\n"
    )
    settings = {"api_keys": str(keys.path), "version_weights_file": "-"}
    async with serving(tmp_path / "models", **settings, grpc_port=0) as server:
        for path, body, expected in (
            ("POST /v2/repository/models/m/unload", b"", {"action": "unload", "model": "m", **became("1=READY", "")}),
            ("POST /v2/repository/models/m/load", b"", {"action": "load", "model": "m", **became("", "1=READY")}),
            (
                "POST /v2/repository/models/m/load",
                b"",
                {"action": "reload", "model": "m", **became("1=READY", "1=READY")},
            ),
            (
                "POST /v2/repository/models/m/load",
                {"parameters": {"version_weights": "1=100"}},
                {
                    "action": "weights",
                    "model": "m",
                    "version_weights": "1=100",
                    **became("1=READY", "1=READY@100"),
                },
            ),
            (
                "DELETE /models/m/1",
                b"",
                {"action": "unload", "model": "m", "version": "1", **became("1=READY@100", "")},
            ),
        ):
            method, _, target = path.partition(" ")
            assert (await server.request(method, target, body, ops)).status == 200, path
            assert lines.take() == [{**expected, "key": "ops", "outcome": "done"}]
        response = await server.request("POST", "/v2/repository/models/none/load", b"", ops)
        (line,) = lines.take()
        assert line == {
            "action": "load",
            "model": "none",
            "before": "",
            "key": "ops",
            "outcome": "failed",
            "reason": response.error,
        }
        await server.request("GET", "/v2/repository/index", None, ops)  # which changes nothing
        await server.request("POST", "/v2/repository/index", b"", ops)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            load = channel.unary_unary(f"/{m.SERVICE}/RepositoryModelLoad")
            body = m.RepositoryModelLoadRequest(model_name="m").SerializeToString()
            await load(body, metadata=[*ops.items()])
        expected = {"action": "load", "model": "m", **became("", "1=READY")}
        assert lines.take() == [{**expected, "key": "ops", "outcome": "done"}]


async def test_changes_without_keys(lines: Lines) -> None:
    async with serving(Doubler, control_open=True) as server:
        await server.request("POST", "/v2/repository/models/Doubler/unload", b"")
        unloaded = {"action": "unload", "model": "Doubler", **became("READY", ""), "outcome": "done"}
        assert lines.take() == [{**unloaded, "key": ""}]
    async with serving(Doubler, control_token="sesame") as server:
        await server.request("POST", "/v2/repository/models/Doubler/unload", b"", bearer("sesame"))
        assert lines.take() == [{**unloaded, "key": "control_token"}]


async def test_changes_of_text_engines(lines: Lines) -> None:
    class Adapting(ReverseModel):
        def load_adapter(self, call: Any) -> None:
            if call.name == "missing":
                raise dragoman.errors.InvalidInput("no such file")

        def unload_adapter(self, call: Any) -> None: ...

        def reset_prefix_cache(self, call: Any) -> None: ...

    async with serve(Adapting, control_token="sesame") as server:
        done = {"model": "Adapting", "key": "control_token", "outcome": "done", **became("READY", "READY")}
        for path, body, expected in (
            ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "p"}, {"adapter": "a", "path": "p"}),
            ("/v1/unload_lora_adapter", {"lora_name": "a"}, {"adapter": "a"}),
            ("/reset_prefix_cache", b"", {}),
        ):
            assert (await server.post(f"/models/Adapting{path}", body, bearer("sesame"))).status == 200
            (line,) = lines.take()
            assert line.pop("action") == path.rpartition("/")[2].replace("_lora_", " ").replace("_", " ")
            assert line == {**done, **expected}
        await server.post(
            "/models/Adapting/v1/load_lora_adapter", {"lora_name": "missing", "lora_path": "p"}, bearer("sesame")
        )
        (line,) = lines.take()
        assert (line["outcome"], line["reason"]) == ("failed", "no such file")


async def test_changes_of_settings(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dragoman.protocols.open_inference.server_settings._change_logs", lambda _policy, changes: {})
    async with serving(Doubler, control_open=True, shared_memory=True) as server:
        await server.request("POST", "/v2/logging", {"log_info": False})
        changed = {"action": "log settings", "settings": '{"log_info": false}'}
        assert lines.take() == [{**changed, "key": "", "outcome": "done"}]
        await server.request("POST", "/v2/trace/setting", {"trace_level": ["OFF"]})
        assert [line["action"] for line in lines.take()] == ["trace settings"]
        await server.request("GET", "/v2/logging")
        await server.request("POST", "/v2/logging", {})
        await server.request("POST", "/v2/systemsharedmemory/region/r/register", {"key": "none", "byte_size": 4})
        assert [(line["action"], line["outcome"]) for line in lines.take()] == [("register shared memory", "failed")]
        # Names that every line has are not overwritten by those that a client sends.
        hostile = {"message": "m", "key": "root", "time": "0", "action": "none"}
        assert (await server.request("POST", "/v2/trace/setting", hostile)).status == 400
        assert [(line["outcome"], line["key"]) for line in lines.take()] == [("failed", "")]
        await server.request("POST", "/v2/systemsharedmemory/unregister", b"")
        assert lines.take() == [{"action": "unregister shared memory", "region": "*", "key": "", "outcome": "done"}]


async def test_changes_by_files_and_by_models(tmp_path: Path) -> None:
    """In a process of its own, as its operator reads the log, at a level that leaves other lines out."""
    model = tmp_path / "models" / "m" / "1" / "model.py"
    model.parent.mkdir(parents=True)
    source = "import dragoman\n\n@dragoman.model(placement='thread')\ndef model(x: float) -> float:\n    return x\n"
    model.write_text(source)

    def changed(server: ServerProcess) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in server.log().splitlines() if line.startswith("{")]
        kept = ("action", "model", "cause", "outcome", "client", "key")
        return [{k: v for k, v in each.items() if k in kept} for each in found if each["logger"] == "dragoman.audit"]

    flags = ("--log-format", "json", "--log-level", "error", "--watch", "--watch-quiet-s", "0.05", "--control-open")
    with running_server(str(tmp_path / "models"), *flags) as server:
        model.write_text(source.replace("return x", "return 2 * x"))
        await asyncio.to_thread(server.wait_for_log, '"reload"')
        expected = {"action": "reload", "model": "m", "cause": "files", "key": "", "client": "", "outcome": "done"}
        assert changed(server) == [expected]
        assert server.request("POST", "/v2/repository/models/m/unload", b"")[0] == 200
        assert changed(server)[1:] == [
            {"action": "unload", "model": "m", "key": "", "client": "127.0.0.1", "outcome": "done"}
        ]


# --- refusals ----------------------------------------------------------------------------------------------------


async def test_refused_requests(lines: Lines, keys: KeyFile) -> None:
    user, bound = bearer(keys.keys["user"]), bearer(keys.add("bound", ["infer", "read"], ["Doubler"]))
    limited = bearer(keys.add("limited", max_concurrent=1, calls_per_s=0.001))
    expired = bearer(keys.add("expired", expires_s=1.0))
    async with serving(Doubler, Tripler, api_keys=str(keys.path), grpc_port=0, auth_failures_per_minute=2) as server:
        infer = f"POST {INFER}".replace("Doubler", "{model}")
        for headers, path, expected in (
            ({}, INFER, refused(401, infer, reason="this request has no key")),
            (expired, INFER, refused(401, infer, "expired", reason="key 'expired' has expired")),
            (bearer("wrong" * 10), INFER, refused(401, infer, reason="this key is not valid")),
            (bearer("other" * 10), INFER, refused(429, infer, reason="too many failed attempts")),
            (
                user,
                "/v2/repository/index",
                refused(403, "POST /v2/repository/index", "user", reason="key 'user' does not have the role 'admin'"),
            ),
            (bound, "/v2/models/Tripler/infer", refused(403, "Infer Tripler", "bound", reason="this key is for some")),
            (limited, INFER, None),
            (limited, INFER, refused(429, "Infer Doubler", "limited", reason="key 'limited' has reached its limit")),
        ):
            response = await server.request("POST", path, BODY, headers)
            found = lines.take()
            if expected is None:
                assert (response.status, found) == (200, [])
                continue
            reason = expected.pop("reason")
            assert response.status == expected["status"]
            assert without_reason(found) == [expected]
            assert found[0]["reason"].startswith(reason)
        metadata = [*bound.items()]
        request = m.ModelInferRequest(model_name="Tripler")
        request.inputs.add(name="x", datatype="FP32", shape=[1]).contents.fp32_contents.append(1.5)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            for method, body, expected in (
                ("RepositoryIndex", b"", refused(403, f"/{m.SERVICE}/RepositoryIndex", "bound")),
                ("ModelInfer", request.SerializeToString(), None),
            ):
                with pytest.raises(grpc.aio.AioRpcError):
                    await channel.unary_unary(f"/{m.SERVICE}/{method}")(body, metadata=metadata)
                # The second one equals a refusal over HTTP, which is counted only.
                assert without_reason(lines.take()) == ([] if expected is None else [expected])


async def test_refused_streams_and_lists(lines: Lines, keys: KeyFile) -> None:
    bound = bearer(keys.add("bound", ["infer", "read"], ["other"]))
    async with serving(ReverseModel, api_keys=str(keys.path)) as server:
        body = {"model": "ReverseModel", "prompt": "a", "stream": True}
        assert (await server.request("POST", "/v1/completions", body, bound)).status == 403
        assert (await server.request("GET", "/metrics", None, bound)).status == 403
        assert without_reason(lines.take()) == [
            refused(403, "Generate ReverseModel", "bound"),
            refused(403, "Measure", "bound"),
        ]


@pytest.mark.parametrize("is_asgi", [False, True])
async def test_refusals_that_are_counted_are_logged_at_the_end(lines: Lines, keys: KeyFile, is_asgi: bool) -> None:
    if is_asgi:
        app: Any = dragoman.asgi(Doubler, api_keys=str(keys.path))
        async with app, httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            statuses = [(await client.post(INFER, content=BODY)).status_code for _ in range(3)]
    else:
        async with serving(Doubler, api_keys=str(keys.path)) as server:
            statuses = [(await server.request("POST", INFER, BODY)).status for _ in range(3)]
    assert statuses == [401] * 3
    assert [line.get("times") for line in lines.take()] == [None, 2]


async def test_control_that_is_off(lines: Lines) -> None:
    async with serving(Doubler) as server:
        assert (await server.request("POST", "/v2/repository/models/Doubler/unload", b"")).status == 403
        (line,) = lines.take()
        assert line["reason"] == "model control is off; an operator enables it with --control-token"
        assert without_reason([line]) == [refused(403, "Unload Doubler")]


async def test_a_flood_of_refusals_is_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "INTERVAL_S", 0.05)
    monkeypatch.setattr(refusals, "MAX_KINDS", 2)
    caplog.set_level(logging.INFO, "dragoman.audit")
    found = Refusals()
    for error, client, times in (
        (Unauthorized("no key"), "10.0.0.1", 5),
        (RateLimited("limit"), "10.0.0.2", 1),
        (Forbidden("no role"), "10.0.0.3", 3),
        (Forbidden("no role"), "10.0.0.4", 2),
    ):
        for _ in range(times):
            found.add(error, "Infer m", "ann", client)

    def seen() -> list[tuple[Any, ...]]:
        return [tuple(getattr(r, name, None) for name in ("status", "client", "key", "times")) for r in caplog.records]

    first = [(401, "10.0.0.1", "ann", None), (429, "10.0.0.2", "ann", None), (403, "others", "", None)]
    assert seen() == first
    async with asyncio.timeout(60):
        while len(seen()) < 5:
            await asyncio.sleep(0.01)
    assert sorted(seen()[3:]) == [(401, "10.0.0.1", "ann", 4), (403, "others", "", 4)]
    monkeypatch.setattr(refusals, "INTERVAL_S", 1000.0)
    await asyncio.sleep(0.1)
    for _ in range(3):
        found.add(RateLimited("limit"), "Infer m", "ann", "10.0.0.2")
    assert seen()[5:] == [(429, "10.0.0.2", "ann", None)]
    found.flush()
    assert seen()[6:] == [(429, "10.0.0.2", "ann", 2)]


def test_the_text_of_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dragoman.audit"):
        caller = Caller("", 'a "b"\nc', "10.0.0.9")
        log_change("load", caller, {"model": "m", "version": None, "url": "/srv/my models"})
        log_change("unload", Caller(), {"model": "m"}, ValueError())
        log_change("load", Caller(), {"model": "m" * 2001})
    assert caplog.messages == [
        'load: model=m url="/srv/my models" key="a \\"b\\"\\nc" client=10.0.0.9 outcome=done',
        'unload: model=m key="" client="" outcome=failed reason=cancelled',
        f'load: model={"m" * 2000} key="" client="" outcome=done',
    ]
