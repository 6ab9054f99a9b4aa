"""LMI's model management: register by URL, scale, unregister; SageMaker's multi-model contract."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rest.rest_server import RawResponse
from text_server import ReverseModel, TextServer, serve

TOKEN = {"authorization": "Bearer open"}

MODEL = """
import dragoman

class M(dragoman.Model):
    placement = {placement!r}
    inputs = (dragoman.TensorSpec("x", dragoman.FP64, (-1,)),)
    outputs = (dragoman.TensorSpec("y", dragoman.FP64, (-1,)),)

    def load(self):
        {load}

    def infer(self, call):
        {infer}
        return {{"y": {factor} * call.inputs["x"].data}}
"""
# Responds once as many replicas as the input says are busy, or after 20 s; returns their number.
COUNT_REPLICAS = """
        import pathlib, os, time
        expected, folder = int(call.inputs["x"].data[0]), pathlib.Path(__file__).parent / "busy"
        folder.mkdir(exist_ok=True)
        (folder / f"{os.getpid()}-{id(self)}").touch()
        end_s = time.monotonic() + 20
        while len(list(folder.iterdir())) < expected and time.monotonic() < end_s:
            time.sleep(0.005)
        return {"y": call.inputs["x"].data * 0 + len(list(folder.iterdir()))}
"""


def write_model(folder: Path, factor: int = 2, placement: str = "inline", load: str = "pass", infer: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = MODEL.format(factor=factor, placement=placement, load=load, infer=infer)
    (folder / "model.py").write_text(text)
    if placement != "process" and not folder.name.isdigit():  # else a worker process imports the class to find out
        (folder / "dragoman.toml").write_text(f"[model]\nplacement = '{placement}'\n")
    return folder


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Write models in an allowed folder, which is returned, and one outside of it."""
    write_model(tmp_path / "outside" / "model", 7)
    write_model(tmp_path / "models" / "a" / "model", 2)
    (write_model(tmp_path / "models" / "b" / "model", 3) / "dragoman.toml").unlink()
    return tmp_path / "models"


@pytest.fixture
async def server(models: Path) -> AsyncIterator[TextServer]:
    async with serve(ReverseModel, control_token="open", model_folders=str(models)) as server:
        yield server


async def register(server: TextServer, name: str, url: object) -> RawResponse:
    return await server.post("/models", {"model_name": name, "url": str(url)}, TOKEN)


async def invoke(server: TextServer, name: str, *values: float) -> Any:
    response = await server.post(f"/models/{name}/invoke", {"inputs": values})
    return response.json["predictions"] if response.status == 200 else response.status


@pytest.mark.parametrize(("path", "is_there"), [("/metrics", True), ("/server/metrics", True), ("", False)])
async def test_metrics_at_the_path_of_djl_serving(path: str, is_there: bool) -> None:
    async with serve(ReverseModel, metrics_path=path) as server:
        response = await server.request("GET", "/server/metrics?name[]=dragoman_model_ready")
        assert response.status == (200 if is_there else 404)
        assert (b"dragoman_model_ready{" in response.body) is is_there


# --- by url --------------------------------------------------------------------------------------------------


async def test_register_and_unregister_by_url(server: TextServer, models: Path) -> None:
    url = str(models / "a" / "model")
    assert await invoke(server, "h4sh", 1.0) == 404
    response = await register(server, "h4sh", url)
    assert (response.status, response.json) == (200, {"status": 'Model "h4sh" registered.'})
    assert await invoke(server, "h4sh", 1.0, 2.0) == [2.0, 4.0]
    entry = {"modelName": "h4sh", "modelUrl": url, "status": "READY"}
    assert entry in (await server.request("GET", "/models")).json["models"]
    assert (await server.request("GET", "/models/h4sh")).json == [{**entry, "reason": ""}]
    unregistered = await server.request("DELETE", "/models/h4sh", headers=TOKEN)
    assert (unregistered.status, unregistered.json) == (200, {"status": 'Model "h4sh" unregistered'})
    assert await invoke(server, "h4sh", 1.0) == 404
    assert (await server.request("DELETE", "/models/h4sh", headers=TOKEN)).status == 404
    index = (await server.post("/v2/repository/index", {}, TOKEN)).json
    assert [e["name"] for e in index] == ["ReverseModel"]
    again = await server.post("/v2/repository/models/h4sh/load", {}, TOKEN)
    assert "not in the repository" in again.json["error"]
    assert (await register(server, "h4sh", models / "b" / "model")).status == 200
    assert await invoke(server, "h4sh", 1.0) == [3.0]


async def test_registering_a_used_name_is_a_conflict(server: TextServer, models: Path) -> None:
    url = models / "a" / "model"
    responses = await asyncio.gather(*(register(server, "m", url) for _ in range(3)))
    assert sorted(a.status for a in responses) == [200, 409, 409]
    rejected = await register(server, "ReverseModel", url)
    assert rejected.json["code"] == 409
    assert "'ReverseModel' is loaded already" in rejected.json["message"]
    assert (await server.post("/generate", {"inputs": "a"})).status == 200


async def test_registering_again_reloads_from_the_same_path(server: TextServer, models: Path) -> None:
    await register(server, "m", models / "a" / "model")
    write_model(models / "a" / "model", 5)
    assert (await server.post("/models?model_name=m", None, TOKEN)).status == 200
    assert await invoke(server, "m", 1.0) == [5.0]
    (models / "a" / "model" / "model.py").write_text("")
    assert (await server.post("/models?model_name=m", None, TOKEN)).status == 424
    assert await invoke(server, "m", 1.0) == [5.0]


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("url={}/a/model", "model"),
        ("url={}/a/model/", "model"),
        ("url=file://{}/a/model&model_name=other", "other"),
        ("url=file%3A//localhost{}/a/%256dodel", "model"),
    ],
)
async def test_registration_by_query_parameters(server: TextServer, models: Path, query: str, name: str) -> None:
    response = await server.post(f"/models?{query.format(models)}&engine=Python", None, TOKEN)
    assert response.json == {"status": f'Model "{name}" registered.'}
    assert response.headers["x-ignored-parameters"] == "engine"
    assert await invoke(server, name, 1.0) == [2.0]


async def test_settings_and_versions_of_registered_models(server: TextServer, models: Path) -> None:
    write_model(models / "c" / "1", 1)
    write_model(models / "c" / "2", 2)
    (models / "c" / "dragoman.toml").write_text(
        "[model]\nname = 'ignored'\nversion_policy = 'all'\nplacement = 'inline'\n"
    )
    assert (await register(server, "m", models / "c")).status == 200
    assert [m["version"] for m in (await server.request("GET", "/models/m")).json] == ["1", "2"]
    response = await server.post("/predictions/m/1", {"inputs": [1.0]})
    assert response.json == {"predictions": [1.0]}
    assert (await server.request("DELETE", "/models/m/1", headers=TOKEN)).status == 200
    assert [m["version"] for m in (await server.request("GET", "/models/m")).json] == ["2"]


async def test_only_paths_in_model_folders_are_loaded(server: TextServer, models: Path) -> None:
    outside = models.parent / "outside" / "model"
    (models / "link").symlink_to(outside)
    (models / "round").symlink_to(models / "round")
    shortcut = models.parent / "shortcut"
    shortcut.symlink_to(models / "a")
    for url, status, expected in (
        (outside, 403, f"expected a path below {models}"),
        (models / ".." / "outside" / "model", 403, "may not be loaded"),
        (f"file://{models}/%2e%2e/outside/model", 403, "may not be loaded"),
        (models / "link", 403, "may not be loaded"),
        (models, 403, "may not be loaded"),
        (f"{models}-more/a", 403, "may not be loaded"),
        ("/etc/shadow/nothing", 403, "may not be loaded"),
        (models / "none", 424, "no file or folder at"),
        (models / "round", 424, "cannot be resolved"),
        (models / ("a" * 5000), 424, "cannot be resolved"),
        (f"{models}/a\0", 424, "cannot be resolved"),
        ("a/model", 400, "absolute path"),
        *((f"{kind}://there/model", 400, "absolute path, or the file:// URL") for kind in ("s3", "djl", "https")),
        (f"file://there{models}/a", 400, "downloaded before"),
        (f"file://{models}/a?x=1", 400, "downloaded before"),
        ("file://[", 424, "cannot be resolved"),
    ):
        response = await register(server, "m", url)
        message = response.json.get("message", response.json.get("error"))
        assert (response.status, expected in message) == (status, True), response.body
        assert len(message) < 600
    assert await invoke(server, "m", 1.0) == 404
    assert (await register(server, "m", shortcut / "model")).status == 200


async def test_registrations_without_one_model_are_rejected(server: TextServer, models: Path) -> None:
    (models / "empty").mkdir()
    (models / "many").mkdir()
    for name in ("one", "two"):
        write_model(models / "many" / name)
    assert "found no model in" in (await register(server, "m", models / "empty")).json["error"]
    assert "found several" in (await register(server, "m", models / "many")).json["error"]
    for body in ({}, {"model_name": 3}, {"model_name": "m", "url": 3}, {"url": ["/a"]}):
        assert "`model_name` and `url` must be text" in (await server.post("/models", body, TOKEN)).json["error"]
    for name in ("../m", "a b", ".m"):
        expected = "path traversal" if "/" in name else "is not allowed"
        assert expected in (await register(server, name, models / "a" / "model")).json["error"]


async def test_registration_needs_model_folders_and_a_token(models: Path) -> None:
    body = {"model_name": "m", "url": str(models / "a" / "model")}
    async with serve(model_folders=str(models)) as server:
        assert (await server.post("/models", body, TOKEN)).status == 403
    async with serve(control_token="open") as server:
        rejected = await server.post("/models", body, TOKEN)
        assert (rejected.status, "--model-folders" in rejected.json["message"]) == (403, True)
    async with serve(control_token="open", control_open=True, model_folders=f"/srv/none,{models}") as server:
        assert (await server.post("/models", body)).status == 401
        assert (await server.post("/models", body, {"authorization": "Bearer x"})).status == 401
        assert (await server.request("PUT", "/models/ReverseModel?min_worker=1")).status == 401
        assert (await server.post("/models", body, TOKEN)).status == 200
    async with serve(control_open=True, model_folders=str(models)) as server:
        assert (await server.post("/models", body)).status == 200
        assert (await server.request("DELETE", "/models/m")).status == 200


async def test_a_loading_model_does_not_change_readiness(server: TextServer, models: Path) -> None:
    started, finish = models / "begun", models / "go"
    wait = f"import pathlib, time; pathlib.Path({str(started)!r}).touch()"
    wait += f"\n        while not pathlib.Path({str(finish)!r}).exists(): time.sleep(0.005)"
    url = write_model(models / "slow", load=wait, placement="thread")
    loading = asyncio.ensure_future(register(server, "slow", url))
    async with asyncio.timeout(60):
        while not started.exists():
            await asyncio.sleep(0.002)
    assert (await server.request("GET", "/ping")).status == 200
    assert (await server.request("GET", "/v2/health/ready")).status == 200
    assert await invoke(server, "slow", 1.0) == 404
    finish.touch()
    assert (await loading).status == 200
    assert await invoke(server, "slow", 1.0) == [2.0]


async def test_a_failed_registration_leaves_nothing(server: TextServer, models: Path) -> None:
    broken = write_model(models / "broken", load="raise ValueError('no weights')")
    rejected = await register(server, "m", broken)
    assert (rejected.status, rejected.json["error"]) == (424, "failed to load 'm', ValueError: no weights")
    large = write_model(models / "large", load="raise MemoryError")
    out_of_memory = await register(server, "m", large)
    assert out_of_memory.status == 507
    assert out_of_memory.json == {
        "code": 507,
        "type": "WlmOutOfMemoryException",
        "message": "failed to load 'm', MemoryError: ",
    }
    assert (await server.request("GET", "/ping")).status == 200
    assert (await server.request("GET", "/models/m")).status == 404
    assert (await register(server, "m", models / "a" / "model")).status == 200


async def test_unregistering_cancels_a_load(server: TextServer, models: Path) -> None:
    started = models / "begun"
    wait = f"import pathlib, time; pathlib.Path({str(started)!r}).touch(); time.sleep(3600)"
    loading = asyncio.ensure_future(
        register(server, "m", write_model(models / "hangs", load=wait, placement="process"))
    )
    async with asyncio.timeout(60):
        while not started.exists():
            await asyncio.sleep(0.002)
        assert (await server.request("DELETE", "/models/m", headers=TOKEN)).status == 200
        assert "unloaded meanwhile" in (await loading).json["error"]
    assert (await register(server, "m", models / "a" / "model")).status == 200


async def test_a_server_may_start_without_models(models: Path) -> None:
    from dragoman import Server

    async with Server(http_port=0, grpc_port=-1, control_open=True, model_folders=str(models)) as server:
        client = TextServer(server.http_ports[0])
        assert (await client.request("GET", "/v2/health/ready")).status == 200
        assert (await client.request("GET", "/ping")).status == 200
        assert (await client.post("/models", {"url": str(models / "a" / "model")})).status == 200
        assert (await client.post("/invocations", {"inputs": [1.0]})).json == {"predictions": [2.0]}


# --- scaling -------------------------------------------------------------------------------------------------


async def scale(server: TextServer, name: str, query: str) -> RawResponse:
    return await server.request("PUT", f"/models/{name}?{query}", headers=TOKEN)


async def test_scaling_changes_the_number_of_replicas(server: TextServer, models: Path) -> None:
    url = write_model(models / "c", placement="thread", infer=COUNT_REPLICAS)
    await register(server, "m", url)
    response = await scale(server, "m", "min_worker=1&max_worker=3&device=cpu")
    assert (response.status, response.headers["x-ignored-parameters"]) == (200, "device")
    message = 'Model "m" worker scaled. New Worker configuration min workers:3 max workers:3'
    assert response.json == {"status": message}
    assert await asyncio.gather(*(invoke(server, "m", 3.0) for _ in range(3))) == [[3.0]] * 3
    for file in (url / "busy").iterdir():
        file.unlink()
    assert (await scale(server, "m", "min_worker=1")).status == 200
    assert await asyncio.gather(*(invoke(server, "m", 1.0) for _ in range(3))) == [[1.0]] * 3
    assert (await server.request("GET", "/models/m")).json[0]["modelUrl"] == str(url)


async def test_scaling_processes_loses_no_request(server: TextServer, models: Path) -> None:
    folder = models / "c"
    touch = f"import os, pathlib; pathlib.Path({str(folder)!r}, f'{{os.getpid()}}.process').touch()"
    await register(server, "m", write_model(folder, placement="process", infer=touch))
    responses: list[list[list[float]]] = [[], []]  # by client
    stop = asyncio.Event()

    async def invoke_repeatedly(client: int) -> None:
        while not stop.is_set():
            responses[client].append(await invoke(server, "m", 1.0))

    async def wait_for_responses(count: int) -> None:
        """Wait until each client has further responses."""
        ends = [len(each) + count for each in responses]
        async with asyncio.timeout(60):
            while any(len(each) < end for each, end in zip(responses, ends, strict=True)):
                await asyncio.sleep(0.01)

    async def used_processes(count: int) -> int:
        """Return the number of processes that answer many calls, once there are as many as expected."""
        await wait_for_responses(1)  # those of calls that began before
        for file in folder.glob("*.process"):
            file.unlink()
        await wait_for_responses(20)
        async with asyncio.timeout(60):
            while len(list(folder.glob("*.process"))) < count:
                await asyncio.sleep(0.01)
        return len(list(folder.glob("*.process")))

    clients = [asyncio.ensure_future(invoke_repeatedly(client)) for client in range(2)]
    for count in (2, 1):
        assert (await scale(server, "m", f"max_worker={count}")).status == 200
        assert await used_processes(count) == count
    stop.set()
    await asyncio.gather(*clients)
    assert all(response == [2.0] for each in responses for response in each)


async def test_versions_are_scaled_together_or_one_by_one(server: TextServer, models: Path) -> None:
    for version in ("1", "2"):
        write_model(models / "c" / version, placement="thread", infer=COUNT_REPLICAS)
    (models / "c" / "dragoman.toml").write_text("[model]\nversion_policy = 'all'\nplacement = 'thread'\n")
    await register(server, "m", models / "c")

    async def count_replicas(version: str, count: int) -> list[Any]:
        responses = [server.post(f"/predictions/m/{version}", {"inputs": [float(count)]}) for _ in range(count)]
        return [a.json["predictions"] for a in await asyncio.gather(*responses)]

    assert (await scale(server, "m/1", "max_worker=2")).status == 200
    assert await count_replicas("1", 2) == [[2.0], [2.0]]
    assert await count_replicas("2", 1) == [[1.0]]
    (models / "c" / "2" / "busy").rename(models / "c" / "2" / "was")
    (models / "c" / "1" / "busy").rename(models / "c" / "1" / "was")
    assert (await scale(server, "m", "max_worker=3")).status == 200
    for version in ("1", "2"):
        assert await count_replicas(version, 3) == [[3.0]] * 3
    assert (await scale(server, "m/3", "max_worker=2")).status == 404


async def test_a_failed_scaling_keeps_the_model(server: TextServer, models: Path) -> None:
    url = write_model(models / "c", placement="thread")
    await register(server, "m", url)
    write_model(models / "c", placement="thread", load="raise MemoryError")
    assert (await scale(server, "m", "max_worker=2")).status == 507
    assert await invoke(server, "m", 1.0) == [2.0]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("", "must be at least 1"),
        ("min_worker=0", "must be at least 1"),
        ("min_worker=0&max_worker=0", "to have none, unregister the model"),
        ("min_worker=3&max_worker=2", "`min_worker` must be <= `max_worker`; got 3 and 2"),
        ("max_worker=65", "`max_worker` must be an integer >= 0 and <= 64; got '65'"),
        ("min_worker=-1", "`min_worker` must be an integer >= 0 and <= 64; got '-1'"),
        ("min_worker=two", "got 'two'"),
        (f"max_worker={'0' * 12}65", "got '00000000000065'"),
        (f"max_worker={'0' * 12}{'1' * 5000}", "must be an integer >= 0 and <= 64"),
    ],
)
async def test_invalid_worker_counts_are_rejected(server: TextServer, query: str, message: str) -> None:
    response = await scale(server, "ReverseModel", query)
    assert (response.status, message in response.json["error"]) == (424, True), response.body


async def test_an_inline_model_cannot_be_scaled(server: TextServer) -> None:
    rejected = await scale(server, "ReverseModel", "min_worker=1&max_worker=2")
    assert (rejected.status, rejected.json["code"]) == (400, 400)
    assert rejected.json["message"] == (
        "model 'ReverseModel' has one replica in the server's process, which answers all calls; expected 1 worker, "
        "got 2; with `placement` process it may have several"
    )
    assert (await scale(server, "ReverseModel", "min_worker=0&max_worker=1")).status == 200
    assert (await scale(server, "missing", "max_worker=1")).status == 404
