"""Responses of decoupled models: errors among them, and the mark of the last one, as Triton 2.51 sends them."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

import dragoman
from dragoman.formats import grpc_messages as m
from features.triton.repository import NUMBER_HEAD, NUMBER_TENSORS, write

STEPS = """
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def send(sender, steps):
    # A number is a response, a word an error, "raise" an exception; "!" marks the last one.
    for step in steps.split():
        flags = FINAL * step.endswith("!")
        step = step.rstrip("!")
        if step == "raise":
            raise ValueError("raised")
        if step.isdigit():
            sender.send(response(int(step)), flags)
        elif step:
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(step)), flags)
        else:
            sender.send(flags=flags)


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            steps = json.loads(request.parameters())["steps"]
            sender = request.get_response_sender()
            if json.loads(request.parameters()).get("when") == "later":
                threading.Thread(target=send, args=(sender, steps)).start()
            else:
                send(sender, steps)
"""
PLUS_TEN = """
class TritonPythonModel:
    def execute(self, requests):
        return [response(10 + number(request)) for request in requests]
"""
CALLER = """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            call = pb_utils.InferenceRequest(model_name="steps", requested_output_names=["OUT"],
                                             inputs=request.inputs(), parameters=request.parameters())
            words = []
            for each in call.exec(decoupled=True):
                tensors = each.output_tensors()
                words.append(each.error().message() if each.has_error() else
                             str(tensors[0].as_numpy()[0]) if tensors else "-")
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", np.array([" ".join(words)], object))]))
        return responses
"""
DECOUPLED = "model_transaction_policy { decoupled: true }\n"
ENSEMBLE = """
platform: "ensemble"
ensemble_scheduling { step [
  { model_name: "steps" model_version: -1 input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "M" } },
  { model_name: "ten" model_version: -1 input_map { key: "IN" value: "M" } output_map { key: "OUT" value: "OUT" } } ] }
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dragoman.Server]:
    folder = tmp_path_factory.mktemp("models")
    write(folder / "steps/config.pbtxt", 'backend: "python"' + NUMBER_TENSORS + DECOUPLED)
    write(folder / "steps/1/model.py", NUMBER_HEAD + STEPS)
    write(folder / "ten/config.pbtxt", 'backend: "python"' + NUMBER_TENSORS)
    write(folder / "ten/1/model.py", NUMBER_HEAD + PLUS_TEN)
    text = 'output { name: "TEXT" data_type: TYPE_STRING dims: 1 }'
    write(folder / "caller/config.pbtxt", 'backend: "python" input { name: "IN" data_type: TYPE_INT32 dims: 1 }' + text)
    write(folder / "caller/1/model.py", NUMBER_HEAD + CALLER)
    write(folder / "ensemble/config.pbtxt", ENSEMBLE + NUMBER_TENSORS)
    async with dragoman.Server(str(folder), http_port=0, grpc_port=0) as server:
        yield server


pytestmark = pytest.mark.asyncio(loop_scope="module")


def message(model: str, steps: str, when: str = "now", *, empty_end: bool = False) -> Any:
    request = m.ModelInferRequest(model_name=model, id=steps)
    request.inputs.add(name="IN", datatype="INT32", shape=[1])
    request.raw_input_contents.append(bytes(4))
    for name, value in {"steps": steps, "when": when}.items():
        request.parameters[name].string_param = value
    if empty_end:
        request.parameters["triton_enable_empty_final_response"].bool_param = True
    return request


async def stream(server: dragoman.Server, *messages: Any, metadata: Any = ()) -> list[tuple[Any, bool]]:
    """Return the responses to messages on one stream: a number, an error or None, and whether it is marked as last."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        method = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=m.ModelInferRequest.SerializeToString,
            response_deserializer=m.ModelStreamInferResponse.FromString,
        )
        responses = [each async for each in method(iter(messages), metadata=metadata, timeout=60)]
    found = []
    for each in responses:
        answer = each.infer_response
        numbers = [int.from_bytes(raw, "little") for raw in answer.raw_output_contents]
        value = each.error_message or next(iter(numbers), None)
        found.append((value, answer.parameters["triton_final_response"].bool_param))
    return found


# The steps of the model, and what Triton 2.51 sends for them; the last empty response only if the request asks for it.
RAISED = "Failed to process the request(s) for model 'steps', message: ValueError: raised"
STREAMS: dict[str, list[tuple[Any, bool]]] = {
    "0 1 half 3 4 !": [(0, False), (1, False), ("half", False), (3, False), (4, False), (None, True)],
    "0 1!": [(0, False), (1, True)],
    "7!": [(7, True)],
    "0 end!": [(0, False), ("end", True)],
    "first 1 !": [("first", False), (1, False), (None, True)],
    "only!": [("only", True)],
    "a b !": [("a", False), ("b", False), (None, True)],
    "!": [(None, True)],
    "0 raise": [(0, False), (RAISED, True)],
    "raise": [(RAISED, True)],
    "0 ! raise": [(0, False), (None, True)],
}


@pytest.mark.parametrize(
    ("when", "steps"),
    [("now", steps) for steps in STREAMS] + [("later", steps) for steps in STREAMS if "raise" not in steps],
)
async def test_responses_of_a_decoupled_model(server: dragoman.Server, when: str, steps: str) -> None:
    expected = STREAMS[steps]
    assert await stream(server, message("steps", steps, when, empty_end=True)) == expected
    assert await stream(server, message("steps", steps, when)) == [each for each in expected if each[0] is not None]


async def test_requests_of_one_stream_are_answered_one_after_the_other(server: dragoman.Server) -> None:
    messages = [message("steps", steps, empty_end=True) for steps in STREAMS]
    assert await stream(server, *messages) == [each for responses in STREAMS.values() for each in responses]


async def test_an_error_ends_the_stream_if_the_client_expects_a_status(server: dragoman.Server) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="half") as raised:
        await stream(server, message("steps", "0 half 1 !"), metadata=(("triton_grpc_error", "true"),))
    assert raised.value.code() is grpc.StatusCode.INTERNAL


async def test_models_that_are_not_decoupled_mark_their_response_or_error(server: dragoman.Server) -> None:
    wrong = message("ten", "")
    wrong.inputs[0].name = "NO"
    (right, error) = await stream(server, message("ten", ""), wrong)
    assert right == (10, True)
    assert error[0].startswith("unexpected inference input 'NO'")
    assert error[1], "a client that waits for the mark gets it"


@pytest.mark.parametrize(
    ("steps", "received"),
    [
        ("0 1 half 3 4 !", "0 1 half 3 4 -"),
        ("0 1!", "0 1"),
        ("0 end!", "0 end"),
        ("first 1 !", "first 1 -"),
        ("only!", "only"),
        ("!", "-"),
    ],
)
async def test_a_model_that_calls_a_decoupled_one_gets_the_same_responses(
    server: dragoman.Server, steps: str, received: str
) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        method = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=m.ModelInferRequest.SerializeToString,
            response_deserializer=m.ModelInferResponse.FromString,
        )
        response = await method(message("caller", steps), timeout=60)
    assert response.raw_output_contents[0][4:].decode() == received


@pytest.mark.parametrize(
    ("steps", "received"),
    [
        ("0 1!", [(10, False), (11, True)]),
        ("0 1 !", [(10, False), (11, False), (None, True)]),
        ("7!", [(17, True)]),
        ("0 half 1 !", [(10, False), ("in ensemble 'ensemble', half", True)]),
        ("only!", [("in ensemble 'ensemble', only", True)]),
        ("!", [(None, True)]),
    ],
)
async def test_an_error_of_a_decoupled_step_ends_the_ensemble(
    server: dragoman.Server, steps: str, received: list[Any]
) -> None:
    assert await stream(server, message("ensemble", steps, empty_end=True)) == received


def post(url: str, body: Any) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize(
    ("steps", "events"),
    [
        ("0 half 3 !", [0, "half", 3]),
        ("first 1 !", ["first", 1]),
        ("0 end!", [0, "end"]),
        ("!", []),
    ],
)
async def test_events_of_generate_stream_and_infer_stream(
    server: dragoman.Server, steps: str, events: list[Any]
) -> None:
    base = f"{server.http_url}/v2/models/steps"
    bodies = {
        "generate_stream": {"IN": 0, "steps": steps},
        "infer_stream": {
            "inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [0]}],
            "parameters": {"steps": steps},
        },
    }
    for path, body in bodies.items():
        status, content = await asyncio.to_thread(post, f"{base}/{path}", body)
        values = [json.loads(line.removeprefix("data: ")) for line in content.splitlines() if line]
        found = [
            each.get(
                "error",
                each.get("OUT", each.get("outputs", [{}])[0].get("data", [None])[0] if "outputs" in each else None),
            )
            for each in values
        ]
        assert (status, found) == (200, events), path


async def test_unary_calls_of_a_decoupled_model_need_one_response(server: dragoman.Server) -> None:
    body = {"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [0]}]}
    results = {}
    for steps in ("7!", "7 !", "7 8!", "!", "only!", "only 8!"):
        status, content = await asyncio.to_thread(
            post, f"{server.http_url}/v2/models/steps/infer", {**body, "parameters": {"steps": steps}}
        )
        answer = json.loads(content)
        results[steps] = status, answer["outputs"][0]["data"][0] if status == 200 else answer["error"]
    text = "model 'steps' gives {} to this call; request a stream"
    assert results == {
        "7!": (200, 7),
        "7 !": (200, 7),
        "7 8!": (400, text.format("several responses")),
        "!": (400, text.format("no response")),
        "only!": (500, "only"),
        "only 8!": (400, text.format("several responses")),
    }


async def test_a_stream_with_an_error_among_its_responses_is_counted_as_failed(server: dragoman.Server) -> None:
    async def counts() -> tuple[int, int]:
        def fetch() -> Any:
            with urllib.request.urlopen(f"{server.http_url}/v2/models/steps/stats", timeout=60) as response:
                return json.load(response)

        stats = (await asyncio.to_thread(fetch))["model_stats"][0]["inference_stats"]
        return stats["success"]["count"], stats["fail"]["count"]

    succeeded, failed = await counts()
    await stream(server, message("steps", "0 1 !"))
    assert await counts() == (succeeded + 1, failed)
    await stream(server, message("steps", "0 half 3 !"))
    assert await counts() == (succeeded + 1, failed + 1)
