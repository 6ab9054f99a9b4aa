"""What outlives a request belongs to the key that left it: sequences, caches, results, shared memory."""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import dragoman
from access.access_models import KeyFile, bearer
from dragoman import INT64, Infer, SequenceOptions, TensorSpec
from dragoman.core.callers import Caller, current_caller, share_of
from dragoman.core.calls import Request
from dragoman.core.errors import Overloaded
from dragoman.core.record_calls import DeleteRecord, ReadRecord, SaveRecord
from dragoman.core.sequences import SequenceStep
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor
from dragoman.engine import record_store
from dragoman.engine.engine import Engine
from dragoman.engine.record_store import RecordStore
from dragoman.engine.repository import Repository
from dragoman.formats import grpc_messages as m
from dragoman.transports import async_results
from loaded_models import recorded_models
from rest.rest_server import RestServer, serving
from stateful_models import Total
from text_models import make_model
from text_server import ReverseModel, serve

# --- sequences ---------------------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> tuple[dict[str, Any], Mapping[str, str], Mapping[str, str]]:
    """The settings of a server with two keys, and the headers of each."""
    keys = KeyFile(tmp_path / "keys.toml")
    ann, bob = (bearer(keys.add(name, ["admin"])) for name in ("ann", "bob"))
    return {"api_keys": str(keys.path)}, ann, bob


def step(x: int, flags: str = "", id_: object = 7) -> dict[str, Any]:
    parameters = {"sequence_id": id_, **{f"sequence_{flag}": True for flag in flags.split()}}
    return {"parameters": parameters, "inputs": [{"name": "x", "shape": [1], "datatype": "INT64", "data": [x]}]}


async def total(server: RestServer, headers: Mapping[str, str], x: int, flags: str = "", model: str = "Total") -> Any:
    """Return the sum of the sequence 7 so far, or the status of the error."""
    response = await server.infer(model, step(x, flags), headers)
    if response.status != 200:
        return response.status if response.status != 500 else response.error
    return next(o["data"][0] for o in response.json["outputs"] if o["name"] in ("total", "OUT"))


@pytest.mark.parametrize("placement", ["inline", "thread", "process"])
async def test_two_keys_with_one_sequence_id_have_two_sequences(two: Any, placement: str) -> None:
    settings, ann, bob = two
    async with serving(Total, **settings, placement=placement) as server:
        assert await total(server, ann, 100, "start") == 100
        assert await total(server, bob, 1) == 400  # not the one of ann
        assert await total(server, bob, 1, "start") == 1  # which does not restart hers
        assert await total(server, ann, 10) == 110
        assert await total(server, bob, 1, "end") == 2  # nor ends it
        assert await total(server, ann, 1) == 111


async def test_a_sequence_of_a_key_is_the_same_over_grpc(two: Any) -> None:
    settings, ann, bob = two
    request = m.ModelInferRequest(model_name="Total")
    request.inputs.add(name="x", datatype="INT64", shape=[1]).contents.int64_contents.append(1)
    request.parameters["sequence_id"].int64_param = 7
    body, totals = request.SerializeToString(), []
    async with serving(Total, **settings, grpc_port=0) as server:
        assert await total(server, ann, 5, "start") == 5
        for port in (server.dragoman.grpc_port, server.port):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                call = channel.unary_unary(f"/{m.SERVICE}/ModelInfer")
                stream = channel.stream_stream(f"/{m.SERVICE}/ModelStreamInfer")
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await call(body, metadata=[*bob.items()])
                assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                found = m.ModelInferResponse.FromString(await call(body, metadata=[*ann.items()]))
                totals.append(int.from_bytes(found.raw_output_contents[0], "little"))
                (sent,) = [each async for each in stream(iter([body]), metadata=[*bob.items()])]
                assert "must specify the START flag" in m.ModelStreamInferResponse.FromString(sent).error_message
                (sent,) = [each async for each in stream(iter([body]), metadata=[*ann.items()])]
                streamed = m.ModelStreamInferResponse.FromString(sent).infer_response
                totals.append(int.from_bytes(streamed.raw_output_contents[0], "little"))
    assert totals == [6, 7, 8, 9]


async def test_a_new_key_of_the_same_name_goes_on(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.toml")
    before = bearer(keys.add("ann"))
    async with serving(Total, api_keys=str(keys.path)) as server:
        assert await total(server, before, 5, "start") == 5
        keys.delete("ann")
        after = bearer(keys.add("ann"))
        server.dragoman.reload()
        assert await total(server, before, 1) == 401
        assert await total(server, after, 1) == 6


async def test_without_keys_all_have_one_sequence() -> None:
    async with serving(Total, control_token="sesame") as server:
        assert await total(server, {}, 5, "start") == 5
        assert await total(server, bearer("sesame"), 1) == 6
        assert await total(server, bearer("anything"), 1) == 7


async def test_the_sequences_of_a_key_leave_room_for_those_of_others() -> None:
    def start(owner: str, id_: int) -> Request[Any]:
        call = Infer({"x": Tensor(np.array([1]), INT64)}, parameters={"sequence_id": id_, "sequence_start": True})
        return Request(call, "Total", caller=Caller(owner))

    spec = ModelSpec(name="Total", target=Total, runtime="python", sequences=SequenceOptions(max_sequences=16))
    async with Engine(Repository([spec])) as engine:
        for id_ in range(1, 15):
            await engine.call(start("key:ann", id_))
        with pytest.raises(Overloaded, match="expected at most 14 sequences"):
            await engine.call(start("key:ann", 15))
        await engine.call(start("key:ann", 14))  # a restart needs no further one
        await engine.call(start("key:bob", 1))
    async with Engine(Repository([spec])) as engine:
        for id_ in range(1, 17):  # without keys there is nobody to leave room for
            await engine.call(start("", id_))
        with pytest.raises(Overloaded, match="expected at most 16 sequences"):
            await engine.call(start("", 17))


def test_models_see_different_ids_of_different_owners() -> None:
    assert SequenceStep(7).correlation_id == 7
    assert SequenceStep("a").correlation_id == "a"
    found = [SequenceStep(id_, owner=owner).correlation_id for id_ in (7, "7") for owner in ("key:ann", "key:bob")]
    assert [type(each) for each in found] == [int, int, str, str]
    assert len(set(map(str, found))) == 4
    assert SequenceStep(7, owner="key:ann").correlation_id == found[0]
    assert 0 < int(found[0]) < 1 << 60
    assert SequenceStep(0, owner="key:ann").correlation_id == 0  # no sequence


_NUMBERS = 'input { name: "x" data_type: TYPE_INT64 dims: 1 }\noutput { name: "OUT" data_type: TYPE_INT64 dims: 1 }\n'
# Adds up by the correlation id itself, in a dictionary of its own.
_OWN_STATE = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.totals = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            id_ = request.correlation_id()
            x = int(pb_utils.get_input_tensor_by_name(request, "x").as_numpy()[0])
            self.totals[id_] = x + (0 if request.flags() & 1 else self.totals[id_])
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([self.totals[id_]]))]))
        return responses
"""
# Sends the request on to `state`, from its `execute`.
_BLS = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            sent = pb_utils.InferenceRequest(
                model_name="state", requested_output_names=["OUT"], inputs=request.inputs(),
                correlation_id=7, flags=request.flags(),
            )
            got = sent.exec()
            error = got.error()
            responses.append(
                pb_utils.InferenceResponse(error=error) if error else pb_utils.InferenceResponse(got.output_tensors())
            )
        return responses
"""


def _write_repository(root: Path) -> None:
    def write(name: str, config: str, source: str = "") -> None:
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
        if source:
            (root / name / "1" / "model.py").write_text(source)

    python = f'backend: "python"\n{_NUMBERS}'
    write("state", f"{python}sequence_batching {{ oldest {{ max_candidate_sequences: 8 }} }}", _OWN_STATE)
    write("bls", f"{python}sequence_batching {{ oldest {{ max_candidate_sequences: 8 }} }}", _BLS)
    maps = 'input_map { key: "x" value: "x" } output_map { key: "OUT" value: "OUT" }'
    scheduling = f'ensemble_scheduling {{ step [ {{ model_name: "state" model_version: -1 {maps} }} ] }}'
    write("ensemble", f'platform: "ensemble"\n{_NUMBERS}{scheduling}')


@pytest.mark.parametrize("model", ["state", "bls", "ensemble"])
async def test_models_that_call_others_do_so_for_the_same_owner(two: Any, tmp_path: Path, model: str) -> None:
    settings, ann, bob = two
    _write_repository(tmp_path / "models")
    async with serving(tmp_path / "models", **settings) as server:
        assert await total(server, ann, 100, "start", model) == 100
        assert await total(server, bob, 1, "start", model) == 1
        assert await total(server, ann, 10, "", model) == 110
        assert await total(server, bob, 1, "end", model) == 2
        assert await total(server, ann, 1, "", model) == 111


class Square(dragoman.Model):
    """Squares; `calls` has the owner and the rows of each call."""

    placement = "thread"
    batched = True
    inputs = outputs = (TensorSpec("x", dragoman.FP64, (-1, 1)),)

    def load(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def infer(self, call: Infer) -> Any:
        self.calls.append((current_caller.get().owner, len(call.inputs["x"].data)))
        return {"x": call.inputs["x"].data ** 2}


async def test_a_batch_of_a_model_that_calls_others_has_one_owner(tmp_path: Path) -> None:
    nodes = "[nodes]\ns = { served = 'Square' }\ne = { builtin = 'exp' }\n"
    (tmp_path / "graph.graph.toml").write_text(f"edges = ['s -> e']\noutputs = ['e']\n{nodes}")
    with recorded_models() as models:
        async with dragoman.open_engine(tmp_path / "graph.graph.toml", Square, max_batch_size=8, trial_s=0) as engine:
            call = Infer({"s": Tensor(np.ones((1, 1)), dragoman.FP64)})
            sent = [Request(call, "graph", caller=Caller(owner)) for owner in ("a", "b", "a", "b", "a")]
            answers = await asyncio.gather(*map(engine.call, sent))
            assert [each.answer.outputs["e"].data.tolist() for each in answers] == [[[np.e]]] * 5
            assert sorted(models["Square"].calls) == [("a", 3), ("b", 2)]


# Returns how many requests were executed together.
_BATCHES = """
# It may call others: request.exec(
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        count = np.array([[len(requests)]])
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", count)]) for request in requests]
"""


async def test_a_batch_of_a_python_backend_that_calls_others_has_one_owner(tmp_path: Path) -> None:
    waits = "dynamic_batching { max_queue_delay_microseconds: 600000000 }"
    (tmp_path / "batches" / "1").mkdir(parents=True)
    (tmp_path / "batches" / "config.pbtxt").write_text(f'backend: "python"\nmax_batch_size: 2\n{_NUMBERS}{waits}')
    (tmp_path / "batches" / "1" / "model.py").write_text(_BATCHES)
    call = Infer({"x": Tensor(np.ones((1, 1), np.int64), INT64)})
    async with dragoman.open_engine(tmp_path, trial_s=0) as engine, asyncio.timeout(60):
        sent = [Request(call, "batches", caller=Caller(owner)) for owner in ("ann", "bob", "bob")]
        answers = await asyncio.gather(*map(engine.call, sent))
        assert [each.answer.outputs["OUT"].data.item() for each in answers] == [1, 2, 2]


# --- the response cache ------------------------------------------------------------------------------------------


class Numbering(dragoman.Model):
    """Return the number of the computation. A gate holds those of negative numbers."""

    placement = "inline"
    inputs = outputs = (TensorSpec("x", INT64, (1,)),)
    gate = asyncio.Event()

    def load(self) -> None:
        self.number = 0

    async def infer(self, call: Infer) -> Any:
        self.number += 1
        number = self.number
        if call.inputs["x"].data[0] < 0:
            await self.gate.wait()
        return {"x": np.array([number])}


async def number(server: RestServer, headers: Mapping[str, str], x: int = 5) -> int:
    response = await server.infer("Numbering", {"inputs": step(x)["inputs"]}, headers)
    assert response.status == 200
    return int(response.json["outputs"][0]["data"][0])


async def test_responses_are_cached_for_each_key(two: Any) -> None:
    settings, ann, bob = two
    async with serving(Numbering, **settings, trial_s=0, response_cache_bytes=1 << 20) as server:
        assert [await number(server, each) for each in (ann, ann, bob, bob, ann)] == [1, 1, 2, 2, 1]
        Numbering.gate.clear()
        running = [asyncio.create_task(number(server, each, -1)) for each in (ann, bob)]
        while server.model("Numbering").number < 4:  # both compute
            await asyncio.sleep(0.001)
        Numbering.gate.set()
        assert sorted(await asyncio.gather(*running)) == [3, 4]


async def test_keys_can_share_the_response_cache(two: Any) -> None:
    settings, ann, bob = two
    async with serving(Numbering, **settings, trial_s=0, response_cache_bytes=1 << 20, share_caches=True) as server:
        assert [await number(server, each) for each in (ann, bob)] == [1, 1]


async def test_a_file_beside_models_cannot_share_caches(tmp_path: Path) -> None:
    (tmp_path / "dragoman.toml").write_text("[server]\nshare_caches = true\n")
    with pytest.raises(dragoman.errors.InvalidInput, match="setting 'share_caches' cannot be set in a file beside"):
        dragoman.Server(tmp_path)


# --- the prefix cache --------------------------------------------------------------------------------------------

_PROMPT = "the sun rises over the quiet hills and the river runs to the sea while birds sing in the old tree"


async def cached(server: RestServer, headers: Mapping[str, str], salt: str = "", path: str = "completions") -> int:
    """Return how many tokens of the prompt were in the prefix cache."""
    body: dict[str, Any] = {"model": "lm", **({"cache_salt": salt} if salt else {})}
    usage = "prompt_tokens_details"
    if path == "completions":
        body |= {"prompt": _PROMPT, "max_tokens": 1}
    elif path == "responses":
        body |= {"input": _PROMPT, "max_output_tokens": 1}
        usage = "input_tokens_details"
    else:
        body |= {"messages": [{"role": "user", "content": _PROMPT}], "max_tokens": 1}
    response = await server.request("POST", f"/v1/{path}", body, headers)
    assert response.status == 200, response.body
    assert "x-ignored-parameters" not in response.headers
    return int(response.json["usage"][usage]["cached_tokens"])


@asynccontextmanager
async def language_model(folder: Path, **settings: Any) -> AsyncIterator[RestServer]:
    make_model(folder / "lm")
    async with serving(folder, **settings) as server:
        yield server


@pytest.mark.parametrize("placement", ["inline", "process"])
async def test_a_prompt_of_another_key_is_no_cache_hit(two: Any, tmp_path: Path, placement: str) -> None:
    settings, ann, bob = two
    async with language_model(tmp_path / "models", **settings, placement=placement) as server:
        assert await cached(server, ann) == 0
        hit = await cached(server, ann)
        assert hit >= 16
        assert await cached(server, bob) == 0
        assert await cached(server, bob) == hit
        assert await cached(server, ann, "s1") == 0  # a salt of its own
        assert await cached(server, ann, "s1") == hit
        assert await cached(server, bob, "s1") == 0  # the same text is another salt of another key
        assert await cached(server, ann, "", "chat/completions") == 0  # the chat template writes another prompt
        assert await cached(server, ann, "", "responses") >= 16
        assert await cached(server, bob, "", "responses") == 0
        assert await cached(server, bob, "", "chat/completions") >= 16
        assert await cached(server, bob, "s1", "responses") == 0


async def test_inference_requests_of_another_key_are_no_cache_hit(two: Any, tmp_path: Path) -> None:
    settings, ann, bob = two
    body = {
        "inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [_PROMPT]}],
        "parameters": {"max_tokens": 1},
    }
    async with language_model(tmp_path / "models", **settings) as server:
        for headers in (ann, bob):
            assert await cached(server, headers) == 0
            assert await cached(server, headers) >= 16
        await server.request("POST", "/reset_prefix_cache", b"", ann)
        assert (await server.infer("lm", body, ann)).status == 200
        assert await cached(server, bob) == 0
        assert await cached(server, ann) >= 16


async def test_without_keys_only_salts_separate_prompts(tmp_path: Path) -> None:
    async with language_model(tmp_path / "models") as server:
        assert await cached(server, {}) == 0
        assert await cached(server, bearer("anything")) >= 16
        assert await cached(server, {}, "salt") == 0
        for wrong in ("", 5, "a" * 1025):
            body = {"model": "lm", "prompt": "x", "cache_salt": wrong}
            response = await server.request("POST", "/v1/completions", body)
            assert response.status == 400
            assert "`cache_salt` must be a string of 1 to 1024 characters" in response.json["error"]["message"]


async def test_keys_can_share_the_prefix_cache(two: Any, tmp_path: Path) -> None:
    settings, ann, bob = two
    async with language_model(tmp_path / "models", **settings, share_caches=True) as server:
        assert await cached(server, ann) == 0
        assert await cached(server, bob) >= 16
        assert await cached(server, bob, "salt") == 0


# --- stored results ----------------------------------------------------------------------------------------------


async def test_only_the_key_that_asked_fetches_an_asynchronous_response(two: Any) -> None:
    settings, ann, bob = two

    async with serve(**settings) as server:
        started = await server.post("/invocations", {"inputs": "a b"}, {**ann, "x-synchronous": "false"})
        token = started.headers["x-next-token"]
        assert started.status == 200
        for unknown in (token, "unknown"):
            other = await server.post("/invocations", b"", {**bob, "x-starting-token": unknown})
            assert (other.status, other.json["message"]) == (400, f"Invalid x-starting-token: {unknown}")
        async with asyncio.timeout(60):
            while (own := await server.post("/invocations", b"", {**ann, "x-starting-token": token})).status == 202:
                await asyncio.sleep(0.001)
        assert (own.status, own.json) == (200, {"generated_text": "b a"})


async def test_results_of_one_key_leave_room_for_those_of_others(two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, ann, bob = two
    monkeypatch.setattr(async_results, "MAX_RESULTS", 8)

    async with serve(**settings) as server:
        found = [
            (await server.post("/invocations", {"inputs": "a b"}, {**headers, "x-synchronous": "false"})).status
            for headers in [ann] * 8 + [bob] * 2
        ]
        assert found == [200] * 7 + [503, 200, 503]


def test_records_of_one_owner_do_not_displace_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    store = RecordStore(4)
    store.answer(SaveRecord("bob", "mine", b"x"))
    for number in range(10):
        store.answer(SaveRecord("ann", f"r{number}", b"x"))
    assert store.answer(ReadRecord("bob", "mine")) == b"x"
    assert [store.answer(ReadRecord("ann", f"r{number}")) for number in range(6, 10)] == [None, b"x", b"x", b"x"]
    monkeypatch.setattr(record_store, "MAX_BYTES", 4000)
    store.answer(SaveRecord("ann", "large", b"x" * 2500))
    assert store.answer(ReadRecord("bob", "mine")) == b"x"
    assert store.answer(DeleteRecord("ann", "mine")) is False


async def test_stored_responses_belong_to_the_name_of_the_key(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.toml")
    ann, bob = bearer(keys.add("ann")), bearer(keys.add("bob"))
    async with serving(ReverseModel, api_keys=str(keys.path)) as server:
        asked = {"model": "ReverseModel", "input": "a b"}
        created = await server.request("POST", "/v1/responses", asked, ann)
        path = f"/v1/responses/{created.json['id']}"
        assert (await server.request("GET", path, None, ann)).status == 200
        assert (await server.request("GET", path, None, bob)).status == 404
        assert (await server.request("DELETE", path, None, bob)).status == 404
        keys.delete("ann")
        again = bearer(keys.add("ann"))
        server.dragoman.reload()
        assert (await server.request("GET", path, None, again)).status == 200


def test_the_share_of_an_owner() -> None:
    assert [share_of("", 16), share_of("key:a", 16), share_of("key:a", 1), share_of("key:a", 1024)] == [16, 14, 1, 896]


# --- shared memory -----------------------------------------------------------------------------------------------


class Double(dragoman.Model):
    placement = "inline"
    inputs = outputs = (TensorSpec("x", INT64, (1,)),)

    def infer(self, call: Infer) -> Any:
        return {"x": call.inputs["x"].data * 2}


@pytest.fixture
def files() -> Iterator[list[Path]]:
    """Two objects of shared memory with two numbers each: 21 and 0, 4 and 0."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("no POSIX shared memory as files")
    files = [Path("/dev/shm") / f"dragoman-test-{secrets.token_hex(8)}" for _ in range(2)]
    try:
        for file, value in zip(files, (21, 4), strict=True):
            file.write_bytes(np.array([value, 0], np.int64).tobytes())
        yield files
    finally:
        for file in files:
            os.unlink(file)


def numbers(file: Path) -> list[int]:
    found: list[int] = np.frombuffer(file.read_bytes(), np.int64).tolist()
    return found


_PART = {"shared_memory_region": "r", "shared_memory_byte_size": 8}
_SHARED = {
    "inputs": [{"name": "x", "shape": [1], "datatype": "INT64", "parameters": _PART}],
    "outputs": [{"name": "x", "parameters": {**_PART, "shared_memory_offset": 8}}],
}
_REGISTER = "/v2/systemsharedmemory/region/r/register"


async def test_a_region_belongs_to_the_key_that_registered_it(two: Any, files: list[Path]) -> None:
    settings, ann, bob = two
    message = m.ModelInferRequest(model_name="Double")
    tensor = message.inputs.add(name="x", datatype="INT64", shape=[1])
    tensor.parameters["shared_memory_region"].string_param = "r"
    tensor.parameters["shared_memory_byte_size"].int64_param = 8
    async with serving(Double, **settings, shared_memory=True, grpc_port=0) as server:
        region = {"key": files[0].name, "byte_size": 16}
        assert (await server.request("POST", _REGISTER, region, ann)).status == 200
        refused = await server.infer("Double", _SHARED, bob)
        assert refused.status == 404
        assert "Unable to find shared memory region: 'r'" in refused.error
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            call = channel.unary_unary(f"/{m.SERVICE}/ModelInfer")
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call(message.SerializeToString(), metadata=[*bob.items()])
            assert error.value.code() is grpc.StatusCode.NOT_FOUND
            found = m.ModelInferResponse.FromString(await call(message.SerializeToString(), metadata=[*ann.items()]))
            assert int.from_bytes(found.raw_output_contents[0], "little") == 42
        assert (await server.request("GET", "/v2/systemsharedmemory/status", None, bob)).json == []
        assert (await server.request("POST", "/v2/systemsharedmemory/unregister", b"", bob)).status == 200
        assert (await server.infer("Double", _SHARED, ann)).status == 200
        # The same name of another key is another region.
        assert (await server.request("POST", _REGISTER, {**region, "key": files[1].name}, bob)).status == 200
        assert (await server.infer("Double", _SHARED, bob)).status == 200
    assert [numbers(file) for file in files] == [[21, 42], [4, 8]]


async def test_without_keys_a_region_is_for_everyone(files: list[Path]) -> None:
    async with serving(Double, control_token="sesame", shared_memory=True) as server:
        region = {"key": files[0].name, "byte_size": 16}
        assert (await server.request("POST", _REGISTER, region, bearer("sesame"))).status == 200
        assert (await server.infer("Double", _SHARED)).status == 200
    assert numbers(files[0]) == [21, 42]


# --- several processes -------------------------------------------------------------------------------------------


async def test_owners_hold_in_several_processes(two: Any) -> None:
    settings, ann, bob = two
    async with serving(Total, **settings, processes=2) as server:
        assert await total(server, ann, 100, "start") == 100
        assert await total(server, bob, 1) == 400
        assert await total(server, bob, 1, "start") == 1
        for number in range(1, 6):  # by either process
            assert await total(server, ann, 1) == 100 + number
    async with serve(**settings, processes=2) as texts:
        started = await texts.post("/invocations", {"inputs": "a b"}, {**ann, "x-synchronous": "false"})
        token = started.headers["x-next-token"]
        for headers, expected in ((ann, {200}), (bob, {400, 404})):
            statuses = set()
            for _ in range(20):
                response = await texts.post("/invocations", b"", {**headers, "x-starting-token": token})
                if response.status != 202:
                    statuses.add(response.status)
            assert statuses <= expected
            assert statuses
