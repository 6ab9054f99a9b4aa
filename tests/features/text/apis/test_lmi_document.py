"""Every field of the LMI document "LMI handlers Inference API Schema" (0.31.0) has a case here, by value."""

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import dragoman
from text_server import TextServer, events, lines, serve

from .test_lmi import write_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

# The sections of the document with the names that they define.
DOCUMENT: Mapping[str, str] = {
    "request": "inputs parameters stream",
    "response": "generated_text details",
    "stream": "token generated_text details",
    "sse": "data",
    "error before": "error code",
    "error during": "generated_text details.finish_reason details.generated_tokens details.inputs details.tokens",
    "error in a stream": "token.id token.text token.log_prob token.special_token generated_text details.finish_reason "
    "details.generated_tokens details.inputs",
    "tgi_compat": "generated_text details data",
    "dynamic request": "inputs parameters",
    "dynamic response": "generated_text",
    "dynamic stream": "outputs",
    "dynamic error": "code message error",
    "Token": "id text log_prob",
    "Details": "finish_reason generated_tokens inputs tokens prefill best_of_sequences",
    "BestOfSequence": "finish_reason generated_tokens tokens generated_text",
    "GenerationParameters": "do_sample seed temperature repetition_penalty top_k top_p max_new_tokens details "
    "return_full_text stop_sequences decoder_input_details",
    "LmiDist": "typical_p truncate ignore_eos_token top_k min_p presence_penalty frequency_penalty n best_of num_beams "
    "length_penalty early_stopping stop_token_ids include_stop_str_in_output logprobs prompt_logprobs "
    "skip_special_tokens spaces_between_special_tokens",
    "vLLM": "top_k min_p presence_penalty frequency_penalty n best_of num_beams length_penalty early_stopping "
    "stop_token_ids include_stop_str_in_output ignore_eos_token logprobs prompt_logprobs skip_special_tokens "
    "spaces_between_special_tokens",
    "TensorRT-LLM": "temperature top_k top_p min_length bad_sequences stop presence_penalty length_penalty "
    "frequency_penalty",
}


@dataclass(frozen=True)
class Case:
    """A request, and where the value of a field is: a function of the response of the server."""

    body: Any
    find: Callable[[Any], Any]
    expected: Any
    settings: str = ""
    status: int = 200


def parameters(**values: Any) -> dict[str, Any]:
    return {"inputs": "a b c", "parameters": values}


TOKENS = [
    {"id": 109, "text": "c", "log_prob": -0.5},
    {"id": 108, "text": " b", "log_prob": -1.0},
]
DETAILS = {"finish_reason": "length", "generated_tokens": 2, "inputs": "a b c"}
TWO = parameters(max_new_tokens=2, details=True)
SEVERAL = parameters(max_new_tokens=2, details=True, n=2, do_sample=True, decoder_input_details=True)
STREAM = {**parameters(max_new_tokens=2), "stream": True}
FAILS = {"inputs": "a !fault"}
FAILS_LATER = {"inputs": "!fault b a", "stream": True}
ERROR_TOKEN = {"id": -1, "text": "", "log_prob": -1, "special_token": True}
NO_DETAILS = {"finish_reason": "error", "generated_tokens": None, "inputs": None}
OTHERS = [{"finish_reason": "length", "generated_tokens": 2, "generated_text": "b a"}]
OTHER_TOKENS = [{"id": 108, "text": "b", "log_prob": -1.5}, {"id": 107, "text": " a", "log_prob": -2.0}]


def _json(*path: str | int) -> Callable[[Any], Any]:
    """Find a value in a JSON body."""

    def find(response: Any) -> Any:
        value = response.json
        for name in path:
            value = value[name]
        return value

    return find


def _lines(*path: str, last: bool = True) -> Callable[[Any], Any]:
    """Find a value in the last JSON line; `last` false: in every line that has it."""

    def find(response: Any) -> Any:
        every = lines(response.body)
        if not last:
            return [line[path[0]] for line in every if path[0] in line]
        value = every[-1]
        for name in path:
            value = value[name]
        return value

    return find


def _other(name: str) -> Callable[[Any], Any]:
    return _json("details", "best_of_sequences", 0, name)


CASES: Mapping[str, Mapping[str, Case]] = {
    "request": {
        "inputs": Case({"inputs": "a b c"}, _json("generated_text"), "c b a"),
        "parameters": Case(parameters(max_new_tokens=1), _json("generated_text"), "c"),
        "stream": Case(STREAM, lambda response: response.headers["content-type"], "application/jsonlines"),
    },
    "response": {
        "generated_text": Case(TWO, _json("generated_text"), "c b"),
        "details": Case(TWO, _json("details"), {**DETAILS, "tokens": TOKENS}),
    },
    "stream": {
        "token": Case(STREAM, _lines("token", last=False), TOKENS),
        "generated_text": Case(STREAM, _lines("generated_text", last=False), ["c b"]),
        "details": Case(STREAM, _lines("details", last=False), [DETAILS]),
    },
    "sse": {
        "data": Case(
            STREAM,
            lambda response: events(response.body)[-1],
            {"token": TOKENS[1], "generated_text": "c b", "details": DETAILS},
            "sse",
        )
    },
    "error before": {
        "error": Case(
            parameters(top_k="x"), _json("error"), '`top_k` must be an integer >= -1 (-1 and 0: all); got "x"',
            status=424,
        ),
        "code": Case(parameters(top_k="x"), _json("code"), 424, status=424),
    },
    "error during": {
        "generated_text": Case(FAILS, _json("generated_text"), "", status=424),
        **{
            f"details.{name}": Case(FAILS, _json("details", name), value, status=424)
            for name, value in {**NO_DETAILS, "tokens": None}.items()
        },
    },
    "error in a stream": {
        "generated_text": Case(FAILS_LATER, _lines("generated_text"), ""),
        **{f"token.{name}": Case(FAILS_LATER, _lines("token", name), value) for name, value in ERROR_TOKEN.items()},
        **{f"details.{name}": Case(FAILS_LATER, _lines("details", name), value) for name, value in NO_DETAILS.items()},
    },
    "tgi_compat": {
        "generated_text": Case(TWO, _json(0, "generated_text"), "c b", "tgi"),
        "details": Case(TWO, _json(0, "details", "generated_tokens"), 2, "tgi"),
        "data": Case(STREAM, lambda response: events(response.body)[-1]["generated_text"], "c b", "tgi"),
    },
    "dynamic request": {
        "inputs": Case({"inputs": ["a b", "c"]}, lambda r: [e["generated_text"] for e in r.json], ["a bb a", "cc"]),
        "parameters": Case(
            {"inputs": ["a b"], "parameters": {"max_new_tokens": 1}}, _json(0, "generated_text"), "a bb", "dynamic"
        ),
    },
    "dynamic response": {
        "generated_text": Case({"inputs": "a b"}, _json(), [{"generated_text": "a bb a"}], "dynamic"),
    },
    "dynamic stream": {
        "outputs": Case(
            {"inputs": "a b"}, _lines("outputs", last=False), [["b"], [" a"], [""]], "dynamic stream"
        )
    },
    "dynamic error": {
        "code": Case(FAILS, _json("code"), 424, "dynamic", 424),
        "message": Case(FAILS, _json("message"), "invoke handler failure", "dynamic", 424),
        "error": Case(FAILS, _json("error"), "generated !fault", "dynamic", 424),
    },
    "Token": {name: Case(TWO, _json("details", "tokens", 0, name), value) for name, value in TOKENS[0].items()},
    "Details": {
        **{name: Case(TWO, _json("details", name), value) for name, value in DETAILS.items()},
        "tokens": Case(TWO, _json("details", "tokens"), TOKENS),
        "prefill": Case(
            SEVERAL,
            _json("details", "prefill"),
            [
                {"id": 107, "text": "a", "log_prob": None},
                {"id": 108, "text": " b", "log_prob": -0.125},
                {"id": 109, "text": " c", "log_prob": -0.25},
            ],
        ),
        "best_of_sequences": Case(
            SEVERAL, _json("details", "best_of_sequences"), [{**OTHERS[0], "tokens": OTHER_TOKENS}]
        ),
    },
    "BestOfSequence": {
        **{name: Case(SEVERAL, _other(name), value) for name, value in OTHERS[0].items()},
        "tokens": Case(SEVERAL, _other("tokens"), OTHER_TOKENS),
    },
}  # fmt: skip

# A parameter: a value, the field of Sampling that it sets, the value there, and the value without the parameter.
SAMPLING: Mapping[str, tuple[Any, str, Any, Any]] = {
    "do_sample": (True, "do_sample", True, False),
    "seed": (7, "seed", 7, None),  # None: one is drawn
    "temperature": (0.5, "temperature", 0.5, 1.0),
    "repetition_penalty": (1.5, "repetition_penalty", 1.5, 1.0),
    "top_k": (7, "top_k", 7, 0),  # -1 of vLLM and lmi-dist is the same as 0: all
    "top_p": (0.5, "top_p", 0.5, 1.0),
    "max_new_tokens": (2, "max_new_tokens", 2, 30),
    "stop_sequences": (["x"], "stop", ("x",), ()),
    "decoder_input_details": (True, "prompt_logprobs", 0, None),
    "typical_p": (0.5, "typical_p", 0.5, 1.0),
    "truncate": (2, "truncate", 2, None),
    "ignore_eos_token": (True, "ignore_eos", True, False),
    "min_p": (0.5, "min_p", 0.5, 0.0),
    "presence_penalty": (0.5, "presence_penalty", 0.5, 0.0),
    "frequency_penalty": (0.5, "frequency_penalty", 0.5, 0.0),
    "n": (2, "n", 2, 1),
    "best_of": (2, "best_of", 2, 0),  # 0: as `n`
    "num_beams": (2, "num_beams", 2, 1),
    "length_penalty": (0.5, "length_penalty", 0.5, 1.0),
    "early_stopping": (True, "early_stopping", True, False),
    "stop_token_ids": ([5], "stop_token_ids", (5,), ()),
    "include_stop_str_in_output": (True, "include_stop", True, False),
    "logprobs": (2, "top_logprobs", 2, 0),
    "prompt_logprobs": (2, "prompt_logprobs", 2, None),
    "skip_special_tokens": (False, "skip_special_tokens", False, True),
    "spaces_between_special_tokens": (False, "spaces_between_special_tokens", False, True),
    "min_length": (2, "min_new_tokens", 2, 0),
    "bad_sequences": (["x"], "bad_words", ("x",), ()),
    "stop": (["x"], "stop", ("x",), ()),
}
# Parameters of the response.
SHOWN: Mapping[str, tuple[Case, Case]] = {
    "details": (
        Case(parameters(details=True, max_new_tokens=2), _json("details"), {**DETAILS, "tokens": TOKENS}),
        Case(parameters(max_new_tokens=2), _json(), {"generated_text": "c b"}),
    ),
    "return_full_text": (
        Case(parameters(return_full_text=True), _json("generated_text"), "a b cc b a"),
        Case(parameters(), _json("generated_text"), "c b a"),
    ),
}
PARAMETER_SECTIONS = ("GenerationParameters", "LmiDist", "vLLM", "TensorRT-LLM")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mapping[str, TextServer]]:
    """A server for each of the settings that the document names."""
    folder = tmp_path_factory.mktemp("models")

    def model(name: str, **values: Any) -> str:
        return write_model(Path(folder / name), **values)

    dynamic = {"rolling_batch": "disable"}
    async with (
        serve() as rolling,
        serve(model("sse", output_formatter="sse")) as sse,
        serve(model("tgi", tgi_compat=True)) as tgi,
        serve(model("dynamic", **dynamic)) as batch,
        serve(model("streams", **dynamic, enable_streaming=True)) as streams,
        serve(model("trtllm", rolling_batch="trtllm")) as trtllm,
    ):
        names = ("", "sse", "tgi", "dynamic", "dynamic stream", "trtllm")
        yield dict(zip(names, (rolling, sse, tgi, batch, streams, trtllm), strict=True))


async def test_every_documented_field_has_a_case() -> None:
    cases = {section: set(each) for section, each in CASES.items()}
    cases |= {section: set(DOCUMENT[section].split()) & {*SAMPLING, *SHOWN} for section in PARAMETER_SECTIONS}
    assert cases == {section: set(names.split()) for section, names in DOCUMENT.items()}


async def check(servers: Mapping[str, TextServer], case: Case) -> None:
    response = await servers[case.settings].post("/invocations", case.body)
    assert response.status == case.status, response.body
    assert case.find(response) == case.expected


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=f"{section}: {name}") for section in CASES for name, case in CASES[section].items()]
)
async def test_fields_of_requests_and_responses(servers: Mapping[str, TextServer], case: Case) -> None:
    await check(servers, case)


@pytest.mark.parametrize("name", SAMPLING)
async def test_parameters_and_their_defaults(servers: Mapping[str, TextServer], name: str) -> None:
    value, field, expected, default = SAMPLING[name]

    async def sampled(values: dict[str, Any]) -> dragoman.Sampling:
        response = await servers[""].post("/invocations", {"inputs": "a", "parameters": values})
        assert response.status == 200, response.body
        assert "x-ignored-parameters" not in response.headers
        sampling: dragoman.Sampling = servers[""].model().calls[-1].sampling
        return sampling

    more = {"do_sample": True} if name == "best_of" else {}
    assert getattr(await sampled({name: value, **more}), field) == expected
    assert getattr(await sampled({}), field) == default


@pytest.mark.parametrize("name", SHOWN)
async def test_parameters_of_the_response(servers: Mapping[str, TextServer], name: str) -> None:
    for case in SHOWN[name]:
        await check(servers, case)


@pytest.mark.parametrize(
    ("values", "expected"),
    [({"do_sample": True}, (0.8, 5, 0.85)), ({"do_sample": True, "top_k": 9, "top_p": 0.5}, (0.8, 9, 0.5))],
)
async def test_defaults_of_tensorrt_llm(
    servers: Mapping[str, TextServer], values: dict[str, Any], expected: tuple[float, ...]
) -> None:
    await servers["trtllm"].post("/invocations", {"inputs": "a", "parameters": values})
    sampling = servers["trtllm"].model("custom").calls[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == expected


async def test_stop_of_tensorrt_llm_may_be_a_boolean(servers: Mapping[str, TextServer]) -> None:
    response = await servers[""].post("/invocations", {"inputs": "a", "parameters": {"stop": True}})
    assert (response.status, response.headers["x-ignored-parameters"]) == (200, "stop")
