"""Schemas and numbers in requests: formats of the output, tools, and integers of any size."""

import json
from typing import Any

import pytest

from dragoman.core.text import Grammar
from text_server import TextServer, events, serve

HELLO = [{"role": "user", "content": "hello"}]
CITY: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PATH = "/v1/chat/completions"
LARGE = 123456789012345678901234567890


@pytest.fixture
async def server() -> Any:
    async with serve() as running:
        yield running


async def post(server: TextServer, path: str = PATH, **body: Any) -> Any:
    return await server.post(path, {"model": "ReverseModel", "messages": HELLO, **body})


def grammar_of(server: TextServer) -> Grammar | None:
    grammar: Grammar | None = server.model().calls[-1].sampling.grammar
    return grammar


@pytest.mark.parametrize(
    ("form", "grammar", "ignored"),
    [
        ({"type": "json_object", "schema": CITY}, CITY, ""),
        ({"type": "json_object", "schema": None}, None, ""),
        ({"type": "json_object", "name": "n", "strict": True, "schema": CITY}, CITY, ""),
        ({"type": "json_schema", "schema": CITY, "name": "n"}, CITY, ""),
        ({"type": "json_object", "scheme": CITY}, None, "response_format.scheme"),
        (
            {"type": "json_schema", "json_schema": {"schema": CITY, "stict": True}, "max": 1},
            CITY,
            "response_format.max, response_format.json_schema.stict",
        ),
    ],
)
async def test_the_fields_of_a_format(server: TextServer, form: Any, grammar: Any, ignored: str) -> None:
    expected = Grammar("json_object") if grammar is None else Grammar("json_schema", json.dumps(grammar))
    for stream in (False, True):
        response = await post(server, response_format=form, stream=stream)
        assert response.status == 200
        assert response.headers.get("x-ignored-parameters", "") == ignored
        assert grammar_of(server) == expected
    async with serve(strict_parameters=True) as strict:
        response = await post(strict, response_format=form)
        assert response.status == (400 if ignored else 200)
        assert all(f"`{name}`" in response.json["error"]["message"] for name in filter(None, ignored.split(", ")))


async def test_unknown_fields_of_other_formats(server: TextServer) -> None:
    response = await post(
        server, structured_outputs={"json": CITY, "whitespace_pattern": " ", "disable_fallback": False}
    )
    assert response.headers["x-ignored-parameters"] == "structured_outputs.whitespace_pattern"
    body = {
        "model": "ReverseModel",
        "input": "a",
        "text": {"format": {"type": "json_schema", "schema": CITY, "nane": "x"}},
    }
    response = await server.post("/v1/responses", body)
    assert (response.status, response.headers["x-ignored-parameters"]) == (200, "text.format.nane")
    body = {"inputs": "a", "parameters": {"grammar": {"type": "json", "value": CITY, "strict": True}}}
    response = await server.post("/models/ReverseModel/generate", body)
    assert (response.status, response.headers["x-ignored-parameters"]) == (200, "grammar.strict")


# --- tools -----------------------------------------------------------------------------------------------------


def tool(parameters: Any) -> Any:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": CITY["properties"], "required": ["city"]},
        {**CITY, "type": ["object", "null"]},
        {"anyOf": [CITY, {"type": "object"}]},
    ],
)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
async def test_arguments_are_an_object(server: TextServer, parameters: Any, choice: Any) -> None:
    assert (await post(server, tools=[tool(parameters)], tool_choice=choice)).status == 200
    grammar = grammar_of(server)
    assert grammar is not None
    schema = json.loads(grammar.text)
    assert (schema if isinstance(choice, dict) else schema["$defs"]["f"])["type"] == "object"
    assert server.model().calls[-1].prompts[0].tools == (tool(parameters),)  # as the client sent it


@pytest.mark.parametrize("kind", ["string", ["string", "null"], "array"])
async def test_parameters_that_are_not_those_of_an_object_are_rejected(server: TextServer, kind: Any) -> None:
    response = await post(server, tools=[tool(CITY), tool({"type": kind})])
    assert response.status == 400
    expected = f"`tools[1]`: `parameters` must be the JSON schema of an object; got the type {json.dumps(kind)}"
    assert response.json["error"]["message"] == expected


# --- integers of any size -----------------------------------------------------------------------------------------


async def test_integers_of_schemas_keep_their_digits(server: TextServer) -> None:
    schema = {"const": LARGE}
    text = json.dumps(schema)
    requests: list[tuple[str, Any]] = [
        (PATH, {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}),
        (PATH, {"guided_json": schema}),
        (PATH, {"guided_json": text}),
        ("/api/chat", {"format": schema, "stream": False}),
        ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}}),
        (
            "/models/ReverseModel/generate",
            {"inputs": "a", "parameters": {"grammar": {"type": "json", "value": schema}}},
        ),
    ]
    for path, body in requests:
        response = await post(server, path, **body)
        assert response.status == 200, (path, response.body)
        assert grammar_of(server) == Grammar("json_schema", text)
    assert json.loads((await server.post(*_stored(schema))).body)["text"]["format"]["schema"] == schema


def _stored(schema: Any) -> tuple[str, Any]:
    format_ = {"type": "json_schema", "name": "n", "schema": schema}
    return "/v1/responses", {"model": "ReverseModel", "input": "a", "text": {"format": format_}}


async def test_a_stored_response_with_a_large_integer(server: TextServer) -> None:
    created = (await server.post(*_stored({"const": LARGE}))).json
    stored = (await server.request("GET", f"/v1/responses/{created['id']}")).json
    assert stored == created
    stream = await server.post("/v1/responses", {**_stored({"const": LARGE})[1], "stream": True})
    assert str(LARGE).encode() in stream.body


async def test_integers_of_arguments_keep_their_digits(server: TextServer) -> None:
    call = {"function": {"name": "f", "arguments": {"id": LARGE}}}
    messages = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert (await post(server, "/api/chat", messages=messages, stream=False)).status == 200
    sent = server.model().calls[-1].prompts[0].messages[1]["tool_calls"][0]["function"]["arguments"]
    assert sent == f'{{"id": {LARGE}}}'
    # The model repeats the text of the role.
    says = [{"role": f'={{"name":"f","arguments":{{"id":{LARGE}}}}} ', "content": "."}]
    answer = (await post(server, "/api/chat", messages=says, tools=[tool({"type": "object"})], stream=False)).json
    assert answer["message"]["tool_calls"][0]["function"]["arguments"] == {"id": LARGE}


async def test_an_integer_of_too_many_digits_is_invalid_input(server: TextServer) -> None:
    body = b'{"model": "ReverseModel", "prompt": "a", "x": ' + b"9" * 5000 + b"}"
    response = await server.request("POST", "/v1/completions", body)
    assert response.status == 400
    assert "not valid JSON" in response.json["error"]["message"]


# --- further fields of vLLM -----------------------------------------------------------------------------------------


async def test_tokens_as_ids(server: TextServer) -> None:
    fields = {"return_tokens_as_token_ids": True, "logprobs": 1, "prompt": "b a"}
    for stream in (False, True):
        response = await post(server, "/v1/completions", **fields, messages=None, stream=stream)
        bodies = [response.json] if not stream else [each for each in events(response.body) if each != "[DONE]"]
        found = [
            name for body in bodies for each in body["choices"] for name in (each["logprobs"] or {}).get("tokens", ())
        ]
        ids = [f"token_id:{id_}" for id_ in (10 + ord("a"), 10 + ord("b"))]
        assert found[:2] == ids
    top = (await post(server, "/v1/completions", **fields, messages=None)).json["choices"][0]["logprobs"][
        "top_logprobs"
    ]
    assert all(name.startswith("token_id:") for each in top for name in each)
    chat = (await post(server, return_tokens_as_token_ids=True, logprobs=True, top_logprobs=1)).json
    first = chat["choices"][0]["logprobs"]["content"][0]
    assert first["token"].startswith("token_id:")
    assert bytes(first["bytes"]) != first["token"].encode()
    plain = (await post(server, logprobs=True)).json["choices"][0]["logprobs"]["content"][0]
    assert not plain["token"].startswith("token_id:")


async def test_the_first_chunk_of_a_chat_counts_no_tokens(server: TextServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = await post(server, messages=[{"role": "user", "content": "b a"}], stream=True, stream_options=options)
    chunks = [each for each in events(response.body) if each != "[DONE]"]
    assert [each["usage"]["completion_tokens"] for each in chunks][:3] == [0, 1, 2]


async def test_an_empty_prompt_has_no_tokens_to_reject(server: TextServer) -> None:
    response = await server.post("/tokenize", {"model": "ReverseModel", "prompt": ""})
    assert (response.status, response.json["count"]) == (200, 1)  # this model's tokenizer splits at spaces


async def test_a_suffix_reaches_the_model(server: TextServer) -> None:
    response = await post(server, "/v1/completions", prompt="def f():", suffix="return x", messages=None, max_tokens=2)
    assert (response.status, response.json["choices"][0]["text"]) == (200, "x return")
    for wrong in ({"prompt": [1, 2]}, {"prompt": "a", "echo": True}):
        response = await post(server, "/v1/completions", **wrong, suffix="b", messages=None)
        assert (response.status, response.json["error"]["param"]) == (400, "suffix")
    answer = await post(server, "/api/generate", prompt="a", suffix="b", stream=False, messages=None)
    assert (answer.status, answer.json["response"].split()[0]) == (200, "b")
    answer = await post(server, "/api/generate", prompt="a", suffix="b", system="c", messages=None)
    assert (answer.status, "`suffix` must not be given" in answer.json["error"]) == (400, True)
