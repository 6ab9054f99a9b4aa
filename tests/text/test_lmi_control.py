"""Models that come by their url, grow and go over LMI's paths, and SageMaker's contract for many models in one."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rest.rest_server import RawResponse

from .text_house import House, Speaker, speaking

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
# Answers once as many replicas as the input says are busy with a call, or when that takes too long.
TOGETHER = """
        import pathlib, os, time
        wanted, place = int(call.inputs["x"].data[0]), pathlib.Path(__file__).parent / "busy"
        place.mkdir(exist_ok=True)
        (place / f"{os.getpid()}-{id(self)}").touch()
        end_s = time.monotonic() + 20
        while len(list(place.iterdir())) < wanted and time.monotonic() < end_s:
            time.sleep(0.005)
        return {"y": call.inputs["x"].data * 0 + len(list(place.iterdir()))}
"""


def written(folder: Path, factor: int = 2, placement: str = "inline", load: str = "pass", infer: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = MODEL.format(factor=factor, placement=placement, load=load, infer=infer)
    (folder / "model.py").write_text(text)
    return folder


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """The folder below which models may be loaded, beside one with a model that may not."""
    written(tmp_path / "elsewhere" / "model", 7)
    written(tmp_path / "models" / "a" / "model", 2)
    written(tmp_path / "models" / "b" / "model", 3)
    return tmp_path / "models"


@pytest.fixture
async def house(models: Path) -> AsyncIterator[House]:
    async with speaking(Speaker, control_token="open", model_folders=str(models)) as made:
        yield made


async def registered(house: House, name: str, url: object) -> RawResponse:
    return await house.post("/models", {"model_name": name, "url": str(url)}, TOKEN)


async def asked(house: House, name: str, *values: float) -> Any:
    answer = await house.post(f"/models/{name}/invoke", {"inputs": values})
    return answer.json["predictions"] if answer.status == 200 else answer.status


# --- by url --------------------------------------------------------------------------------------------------


async def test_a_model_is_loaded_by_its_url_and_forgotten(house: House, models: Path) -> None:
    url = str(models / "a" / "model")
    assert await asked(house, "h4sh", 1.0) == 404
    answer = await registered(house, "h4sh", url)
    assert (answer.status, answer.json) == (200, {"status": 'Model "h4sh" registered.'})
    assert await asked(house, "h4sh", 1.0, 2.0) == [2.0, 4.0]
    told = {"modelName": "h4sh", "modelUrl": url, "status": "READY"}
    assert told in (await house.ask("GET", "/models")).json["models"]
    assert (await house.ask("GET", "/models/h4sh")).json == [{**told, "reason": ""}]
    gone = await house.ask("DELETE", "/models/h4sh", headers=TOKEN)
    assert (gone.status, gone.json) == (200, {"status": 'Model "h4sh" unregistered'})
    assert await asked(house, "h4sh", 1.0) == 404
    assert (await house.ask("DELETE", "/models/h4sh", headers=TOKEN)).status == 404
    index = (await house.post("/v2/repository/index", {}, TOKEN)).json
    assert [e["name"] for e in index] == ["Speaker"]
    again = await house.post("/v2/repository/models/h4sh/load", {}, TOKEN)
    assert "not in the repository" in again.json["error"]
    assert (await registered(house, "h4sh", models / "b" / "model")).status == 200
    assert await asked(house, "h4sh", 1.0) == [3.0]


async def test_a_name_that_is_taken_is_a_conflict(house: House, models: Path) -> None:
    url = models / "a" / "model"
    answers = await asyncio.gather(*(registered(house, "m", url) for _ in range(3)))
    assert sorted(a.status for a in answers) == [200, 409, 409]
    refused = await registered(house, "Speaker", url)
    assert refused.json["code"] == 409
    assert "'Speaker' is loaded already" in refused.json["message"]
    assert (await house.post("/generate", {"inputs": "a"})).status == 200


async def test_what_was_registered_is_loaded_anew_from_its_place(house: House, models: Path) -> None:
    await registered(house, "m", models / "a" / "model")
    written(models / "a" / "model", 5)
    assert (await house.post("/models?model_name=m", None, TOKEN)).status == 200
    assert await asked(house, "m", 1.0) == [5.0]
    (models / "a" / "model" / "model.py").write_text("")
    assert (await house.post("/models?model_name=m", None, TOKEN)).status == 424
    assert await asked(house, "m", 1.0) == [5.0]


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("url={}/a/model", "model"),
        ("url={}/a/model/", "model"),
        ("url=file://{}/a/model&model_name=other", "other"),
        ("url=file%3A//localhost{}/a/%256dodel", "model"),
    ],
)
async def test_lmi_asks_in_the_query(house: House, models: Path, query: str, name: str) -> None:
    answer = await house.post(f"/models?{query.format(models)}&engine=Python", None, TOKEN)
    assert answer.json == {"status": f'Model "{name}" registered.'}
    assert answer.headers["x-ignored-parameters"] == "engine"
    assert await asked(house, name, 1.0) == [2.0]


async def test_settings_and_versions_are_read_as_in_a_repository(house: House, models: Path) -> None:
    written(models / "c" / "1", 1)
    written(models / "c" / "2", 2)
    (models / "c" / "dragoman.toml").write_text("[model]\nname = 'unheeded'\nversion_policy = 'all'\n")
    assert (await registered(house, "m", models / "c")).status == 200
    assert [m["version"] for m in (await house.ask("GET", "/models/m")).json] == ["1", "2"]
    answer = await house.post("/predictions/m/1", {"inputs": [1.0]})
    assert answer.json == {"predictions": [1.0]}
    assert (await house.ask("DELETE", "/models/m/1", headers=TOKEN)).status == 200
    assert [m["version"] for m in (await house.ask("GET", "/models/m")).json] == ["2"]


async def test_only_what_lies_below_the_folders_is_loaded(house: House, models: Path) -> None:
    elsewhere = models.parent / "elsewhere" / "model"
    (models / "link").symlink_to(elsewhere)
    (models / "round").symlink_to(models / "round")
    within = models.parent / "shortcut"
    within.symlink_to(models / "a")
    for url, status, told in (
        (elsewhere, 403, f"expected a path below {models}"),
        (models / ".." / "elsewhere" / "model", 403, "may not be loaded"),
        (f"file://{models}/%2e%2e/elsewhere/model", 403, "may not be loaded"),
        (models / "link", 403, "may not be loaded"),
        (models, 403, "may not be loaded"),
        (f"{models}-more/a", 403, "may not be loaded"),
        ("/etc/shadow/nothing", 403, "may not be loaded"),
        (models / "none", 424, "there is nothing at"),
        (models / "round", 424, "cannot be resolved"),
        (models / ("a" * 5000), 424, "cannot be resolved"),
        (f"{models}/a\0", 424, "cannot be resolved"),
        ("a/model", 400, "absolute path"),
        *((f"{kind}://there/model", 400, "absolute path, or the file:// URL") for kind in ("s3", "djl", "https")),
        (f"file://there{models}/a", 400, "downloaded before"),
        (f"file://{models}/a?x=1", 400, "downloaded before"),
        ("file://[", 424, "cannot be resolved"),
    ):
        answer = await registered(house, "m", url)
        message = answer.json.get("message", answer.json.get("error"))
        assert (answer.status, told in message) == (status, True), answer.body
        assert len(message) < 600
    assert await asked(house, "m", 1.0) == 404
    assert (await registered(house, "m", within / "model")).status == 200


async def test_what_is_no_one_model_is_refused(house: House, models: Path) -> None:
    (models / "empty").mkdir()
    (models / "many").mkdir()
    for name in ("one", "two"):
        written(models / "many" / name)
    assert "found no model in" in (await registered(house, "m", models / "empty")).json["error"]
    assert "found several" in (await registered(house, "m", models / "many")).json["error"]
    for body in ({}, {"model_name": 3}, {"model_name": "m", "url": 3}, {"url": ["/a"]}):
        assert "`model_name` and `url` must be text" in (await house.post("/models", body, TOKEN)).json["error"]
    for name in ("../m", "a b", ".m"):
        assert "is not allowed" in (await registered(house, name, models / "a" / "model")).json["error"]


async def test_who_may_load(models: Path) -> None:
    ask = {"model_name": "m", "url": str(models / "a" / "model")}
    async with speaking(model_folders=str(models)) as house:
        assert (await house.post("/models", ask, TOKEN)).status == 403
    async with speaking(control_token="open") as house:
        refused = await house.post("/models", ask, TOKEN)
        assert (refused.status, "--model-folders" in refused.json["message"]) == (403, True)
    async with speaking(control_token="open", control_open=True, model_folders=f"/srv/none,{models}") as house:
        assert (await house.post("/models", ask)).status == 401
        assert (await house.post("/models", ask, {"authorization": "Bearer x"})).status == 401
        assert (await house.ask("PUT", "/models/Speaker?min_worker=1")).status == 401
        assert (await house.post("/models", ask, TOKEN)).status == 200
    async with speaking(control_open=True, model_folders=str(models)) as house:
        assert (await house.post("/models", ask)).status == 200
        assert (await house.ask("DELETE", "/models/m")).status == 200


async def test_a_load_leaves_the_server_as_healthy_as_it_was(house: House, models: Path) -> None:
    begun, go = models / "begun", models / "go"
    wait = f"import pathlib, time; pathlib.Path({str(begun)!r}).touch()"
    wait += f"\n        while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.005)"
    url = written(models / "slow", load=wait, placement="thread")
    loading = asyncio.ensure_future(registered(house, "slow", url))
    async with asyncio.timeout(60):
        while not begun.exists():
            await asyncio.sleep(0.002)
    assert (await house.ask("GET", "/ping")).status == 200
    assert (await house.ask("GET", "/v2/health/ready")).status == 200
    assert await asked(house, "slow", 1.0) == 404
    go.touch()
    assert (await loading).status == 200
    assert await asked(house, "slow", 1.0) == [2.0]


async def test_a_model_that_cannot_be_loaded_leaves_nothing(house: House, models: Path) -> None:
    broken = written(models / "broken", load="raise ValueError('no weights')")
    refused = await registered(house, "m", broken)
    assert (refused.status, refused.json["error"]) == (424, "failed to load 'm', ValueError: no weights")
    large = written(models / "large", load="raise MemoryError")
    short = await registered(house, "m", large)
    assert short.status == 507
    assert short.json == {
        "code": 507,
        "type": "WlmOutOfMemoryException",
        "message": "failed to load 'm', MemoryError: ",
    }
    assert (await house.ask("GET", "/ping")).status == 200
    assert (await house.ask("GET", "/models/m")).status == 404
    assert (await registered(house, "m", models / "a" / "model")).status == 200


async def test_unloading_gives_up_a_load(house: House, models: Path) -> None:
    begun = models / "begun"
    wait = f"import pathlib, time; pathlib.Path({str(begun)!r}).touch(); time.sleep(3600)"
    loading = asyncio.ensure_future(registered(house, "m", written(models / "hangs", load=wait, placement="process")))
    async with asyncio.timeout(60):
        while not begun.exists():
            await asyncio.sleep(0.002)
        assert (await house.ask("DELETE", "/models/m", headers=TOKEN)).status == 200
        assert "unloaded meanwhile" in (await loading).json["error"]
    assert (await registered(house, "m", models / "a" / "model")).status == 200


async def test_nothing_need_be_there_at_the_start(models: Path) -> None:
    from dragoman import Server

    async with Server(http_port=0, grpc_port=-1, control_open=True, model_folders=str(models)) as server:
        house = House(server.http_ports[0], server)
        assert (await house.ask("GET", "/v2/health/ready")).status == 200
        assert (await house.ask("GET", "/ping")).status == 200
        assert (await house.post("/models", {"url": str(models / "a" / "model")})).status == 200
        assert (await house.post("/invocations", {"inputs": [1.0]})).json == {"predictions": [2.0]}


# --- scaling -------------------------------------------------------------------------------------------------


async def scaled(house: House, name: str, query: str) -> RawResponse:
    return await house.ask("PUT", f"/models/{name}?{query}", headers=TOKEN)


@pytest.mark.parametrize("placement", ["thread", "process"])
async def test_a_model_has_as_many_workers_as_it_may(house: House, models: Path, placement: str) -> None:
    url = written(models / "c", placement=placement, infer=TOGETHER)
    await registered(house, "m", url)
    answer = await scaled(house, "m", "min_worker=1&max_worker=3&device=cpu")
    assert (answer.status, answer.headers["x-ignored-parameters"]) == (200, "device")
    told = 'Model "m" worker scaled. New Worker configuration min workers:3 max workers:3'
    assert answer.json == {"status": told}
    assert await asyncio.gather(*(asked(house, "m", 3.0) for _ in range(3))) == [[3.0]] * 3
    for file in (url / "busy").iterdir():
        file.unlink()
    assert (await scaled(house, "m", "min_worker=1")).status == 200
    assert await asyncio.gather(*(asked(house, "m", 1.0) for _ in range(3))) == [[1.0]] * 3
    assert (await house.ask("GET", "/models/m")).json[0]["modelUrl"] == str(url)


async def test_scaling_loses_no_request(house: House, models: Path) -> None:
    await registered(house, "m", written(models / "c", placement="process"))
    done = asyncio.Event()

    async def asks() -> list[Any]:
        found = []
        while not done.is_set():
            found.append(await asked(house, "m", 1.0))
        return found

    asking = [asyncio.ensure_future(asks()) for _ in range(4)]
    for count in (2, 1):
        assert (await scaled(house, "m", f"max_worker={count}")).status == 200
    done.set()
    answers = [answer for found in await asyncio.gather(*asking) for answer in found]
    assert answers == [[2.0]] * len(answers)
    assert answers


async def test_versions_are_scaled_together_or_one_by_one(house: House, models: Path) -> None:
    for version in ("1", "2"):
        written(models / "c" / version, placement="thread", infer=TOGETHER)
    (models / "c" / "dragoman.toml").write_text("[model]\nversion_policy = 'all'\n")
    await registered(house, "m", models / "c")

    async def together(version: str, count: int) -> list[Any]:
        answers = [house.post(f"/predictions/m/{version}", {"inputs": [float(count)]}) for _ in range(count)]
        return [a.json["predictions"] for a in await asyncio.gather(*answers)]

    assert (await scaled(house, "m/1", "max_worker=2")).status == 200
    assert await together("1", 2) == [[2.0], [2.0]]
    assert await together("2", 1) == [[1.0]]
    (models / "c" / "2" / "busy").rename(models / "c" / "2" / "was")
    (models / "c" / "1" / "busy").rename(models / "c" / "1" / "was")
    assert (await scaled(house, "m", "max_worker=3")).status == 200
    for version in ("1", "2"):
        assert await together(version, 3) == [[3.0]] * 3
    assert (await scaled(house, "m/3", "max_worker=2")).status == 404


async def test_a_model_that_cannot_be_loaded_again_stays_as_it_is(house: House, models: Path) -> None:
    url = written(models / "c", placement="thread")
    await registered(house, "m", url)
    written(models / "c", placement="thread", load="raise MemoryError")
    assert (await scaled(house, "m", "max_worker=2")).status == 507
    assert await asked(house, "m", 1.0) == [2.0]


@pytest.mark.parametrize(
    ("query", "told"),
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
async def test_numbers_of_workers_that_make_no_sense(house: House, query: str, told: str) -> None:
    answer = await scaled(house, "Speaker", query)
    assert (answer.status, told in answer.json["error"]) == (424, True), answer.body


async def test_a_model_with_one_engine_stays_alone(house: House) -> None:
    refused = await scaled(house, "Speaker", "min_worker=1&max_worker=2")
    assert (refused.status, refused.json["code"]) == (400, 400)
    assert refused.json["message"] == (
        "model 'Speaker' has one replica in the server's process, which answers all calls; expected 1 worker, got 2; "
        "with `placement` process it may have several"
    )
    assert (await scaled(house, "Speaker", "min_worker=0&max_worker=1")).status == 200
    assert (await scaled(house, "nobody", "max_worker=1")).status == 404
