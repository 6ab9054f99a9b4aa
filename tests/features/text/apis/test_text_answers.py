"""What each text API says about a wrong body, and how it describes its models: whole messages and whole objects."""

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

import dragoman
from text_server import ReverseModel, TextServer, events, serve

Request = tuple[str, dict[str, Any]]
USER = {"role": "user", "content": "a b"}
CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {}}]}
F = {"type": "function", "function": {"name": "f"}}


def chat(**fields: Any) -> Request:
    return "/v1/chat/completions", {"messages": [USER], **fields}


def messages(*given: Any) -> Request:
    return chat(messages=list(given))


def completion(**fields: Any) -> Request:
    return "/v1/completions", {"prompt": "a b", **fields}


def message(**fields: Any) -> Request:
    return "/v1/messages", {"messages": [USER], "max_tokens": 4, **fields}


def turns(*given: Any) -> Request:
    return message(messages=list(given))


def respond(**fields: Any) -> Request:
    return "/v1/responses", {"input": "a b", **fields}


def items(*given: Any) -> Request:
    return respond(input=list(given))


def oll(**fields: Any) -> Request:
    return "/api/chat", {"model": "ReverseModel", "messages": [USER], **fields}


def gen(**fields: Any) -> Request:
    return "/api/generate", {"model": "ReverseModel", "prompt": "a b", **fields}


def tgi(inputs: Any = "a b", **parameters: Any) -> Request:
    return "/generate", {"inputs": inputs, "parameters": parameters}


CASES: list[tuple[Request, int, str]] = [
    (("/v1/chat/completions", {"messages": []}), 400, "`messages` must be a list of 1 to 4096 messages; got []"),
    (chat(top_logprobs=2), 400, "`top_logprobs` must only be given with `logprobs`: true"),
    (chat(model=5), 400, "`model` must be the name of a model; got 5"),
    (chat(stream_options={"include_usage": True}), 400, "`stream_options` must only be given with `stream`: true"),
    (chat(reasoning_effort=""), 400, '`reasoning_effort` must be a string such as "none", "low" or "high"; got ""'),
    (
        chat(chat_template="x"),
        400,
        (
            "`chat_template` is not accepted: this server only uses the model's own template, unless its "
            "operator allows others with --trust-request-chat-template"
        ),
    ),
    (
        chat(continue_final_message=True),
        400,
        "`continue_final_message` must only be given with `add_generation_prompt`: false",
    ),
    (chat(audio={}), 400, "`audio` is not supported: this server generates text alone; got {}"),
    (
        chat(modalities=["audio"]),
        400,
        ('`modalities` is not supported: this server generates text alone: expected ["text"]; got ["audio"]'),
    ),
    (chat(functions=[{}]), 400, "`functions` is not supported: send them as `tools`; got [{}]"),
    (chat(function_call="f"), 400, '`function_call` is not supported: send `tools` and `tool_choice`; got "f"'),
    (
        chat(web_search_options={}),
        400,
        (
            "`web_search_options` is not supported: this server does not search; offer a function that "
            "does, in `tools`; got {}"
        ),
    ),
    (chat(moderation={}), 400, "`moderation` is not supported: this server does not moderate texts; got {}"),
    (chat(tools=5), 400, "`tools` must be a list of at most 128 functions; got 5"),
    (
        chat(tools=[5]),
        400,
        (
            '`tools[0]` must be {"type": "function", "function": {"name": ..., "parameters": {a JSON '
            "schema}}}, with a name of 1 to 128 letters, digits, _ . or -; got 5"
        ),
    ),
    (
        chat(tools=[{**F, "function": {"name": "a b"}}]),
        400,
        (
            '`tools[0]` must be {"type": "function", "function": {"name": ..., "parameters": {a JSON '
            'schema}}}, with a name of 1 to 128 letters, digits, _ . or -; got {"type": "function", '
            '"function": {"name": "a b"}}'
        ),
    ),
    (
        chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]),
        400,
        '`tools[0]`: `parameters` must be the JSON schema of an object; got the type "string"',
    ),
    (
        chat(tools=[{"type": "custom", "custom": {"name": "c", "format": {"type": "grammar"}}}]),
        400,
        (
            '`tools[0]`: `format` of a custom tool must be {"type": "text"}: its input cannot follow a '
            'grammar; a function can follow a JSON schema; got {"type": "grammar"}'
        ),
    ),
    (chat(tool_choice="required"), 400, '`tool_choice` must not be given without `tools`; got "required"'),
    (chat(tools=[F], tool_choice="g"), 400, '`tool_choice` must name one of `tools`; got "g"'),
    (
        chat(tools=[F], tool_choice=5),
        400,
        ('`tool_choice` must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}; got 5'),
    ),
    (
        chat(
            tools=[F],
            tool_choice={
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]},
            },
        ),
        400,
        ('`tool_choice` must allow some of `tools`; got [{"type": "function", "function": {"name": "g"}}]'),
    ),
    (
        chat(tools=[F], tool_choice="required", guided_regex="a"),
        400,
        ("`guided_regex` must not be given with a `tool_choice` that requires a call: the call is the whole text"),
    ),
    (messages(5), 400, "`messages[0]` must be an object with `role` and `content`; got 5"),
    (
        messages({"content": "a"}),
        400,
        '`messages[0]` must be an object with `role` and `content`; got {"content": "a"}',
    ),
    (
        messages({"role": "user", "content": 5}),
        400,
        "`messages[0]`: `content` must be a string, or a list of parts; got 5",
    ),
    (messages({"role": "user"}), 400, "`messages[0]`: `content` must be a string, or a list of parts; got null"),
    (
        messages({"role": "user", "content": [{"type": "audio"}]}),
        400,
        '`messages[0]`: `content` must have parts of text, or image_url; got {"type": "audio"}',
    ),
    (
        messages({"role": "assistant", "content": [{"type": "image_url", "image_url": "x"}]}),
        400,
        ('`messages[0]`: `content` must have parts of text, or refusal; got {"type": "image_url", "image_url": "x"}'),
    ),
    (messages({"role": "tool", "content": [5]}), 400, "`messages[0]`: `content` must have parts of text alone; got 5"),
    (
        messages({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}]}),
        400,
        (
            "`messages[0]`: `image_url` must be a data: URL, such as data:image/png;base64,...; the "
            'server fetches no other URLs; got "http://a/b.png"'
        ),
    ),
    (messages({"role": "assistant", "tool_calls": 5}), 400, "`messages[0]`: `tool_calls` must be a list; got 5"),
    (
        messages({"role": "assistant", "tool_calls": [{"function": {}}]}),
        400,
        ('`messages[0]`: `tool_calls` must have a `function` with `name` and `arguments`; got {"function": {}}'),
    ),
    (
        messages({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}),
        400,
        (
            "`messages[0]`: `tool_calls` must have a `function` with `name` and `arguments`; got "
            '{"function": {"name": "f", "arguments": 5}}'
        ),
    ),
    (
        completion(prompt=5),
        400,
        (
            "`prompt` must be a string, a list of at most 256 strings or lists of token ids, or a list "
            "of at most 262144 token ids; got 5"
        ),
    ),
    (
        completion(prompt=[]),
        400,
        (
            "`prompt` must be a string, a list of at most 256 strings or lists of token ids, or a list "
            "of at most 262144 token ids; got []"
        ),
    ),
    (completion(max_tokens=0), 400, "`max_tokens` must be strictly positive unless `echo` is true; got 0"),
    (
        completion(prompt=[1], suffix="x"),
        400,
        "`suffix` must only be given with a `prompt` that is text; got token ids",
    ),
    (completion(suffix="x", echo=True), 400, "`suffix` must not be given with `echo`"),
    (
        completion(best_of=3, stream=True),
        400,
        "`best_of` must not be greater than `n` in a stream, where each choice is sent as it comes",
    ),
    (
        completion(truncate_prompt_tokens=0),
        400,
        ("`truncate_prompt_tokens` must be an integer that is strictly positive, or -1: as many as fit; got 0"),
    ),
    (completion(seed="x"), 400, '`seed` must be an integer >= -9223372036854775808; got "x"'),
    (
        ("/v1/embeddings", {"input": ""}),
        400,
        ('`input` must be a string, or a list of at most 2048 strings or lists of token ids, none empty; got ""'),
    ),
    (
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}),
        400,
        '`encoding_format` must be "float" or "base64"; got "hex"',
    ),
    (("/v1/embeddings", {"input": "a", "dimensions": 4}), 400, "`dimensions` must be <= 3, what the model has; got 4"),
    (("/detokenize", {"tokens": "a"}), 400, '`tokens` must be a list of token ids; got "a"'),
    (("/tokenize", {"prompt": 5}), 422, "Input validation error: `prompt` must be a string; got 5"),
    (
        ("/v1/messages", {"messages": [USER]}),
        400,
        "`max_tokens` must be an integer that is strictly positive; got none",
    ),
    (message(messages=[]), 400, "`messages` must be a list of at least one message; got []"),
    (message(messages=5), 400, "`messages` must be a list of at least one message; got 5"),
    (message(system=5), 400, "`system` must be a string or a list of blocks; got 5"),
    (message(system=[5]), 400, "`system` must have blocks of text alone; got 5"),
    (
        message(thinking={"type": "enabled", "budget_tokens": 5}),
        400,
        (
            '`thinking` must be of type "enabled" with `budget_tokens` >= 1024 and < `max_tokens`, '
            '"disabled" or "adaptive"; got {"type": "enabled", "budget_tokens": 5}'
        ),
    ),
    (message(output_format={}), 400, "`output_format` is not supported: send it as `output_config.format`; got {}"),
    (
        message(compaction={}),
        400,
        "`compaction` is not supported: this server does not summarize conversations; got {}",
    ),
    (
        message(mcp_servers=[{}]),
        400,
        ("`mcp_servers` is not supported: this server calls no tools; offer those of the server as `tools`; got [{}]"),
    ),
    (message(container="c"), 400, '`container` is not supported: this server runs no code; got "c"'),
    (
        message(context_management={"edits": [{"type": "clear_tool_uses_20250919"}]}),
        400,
        (
            "`context_management` must be an object with `edits` that clear thinking alone: this server "
            'keeps tool results, and does not compact conversations; got {"edits": [{"type": '
            '"clear_tool_uses_20250919"}]}'
        ),
    ),
    (message(tools=5), 400, "`tools` must be a list; got 5"),
    (
        message(tools=[{"type": "web_search_20250305"}]),
        400,
        ('`tools[0]`: tools of type "web_search_20250305" are not supported: the server has nothing that runs them'),
    ),
    (
        message(tools=[{"name": "f"}]),
        400,
        (
            '`tools[0]` must be {"name": ..., "input_schema": {a JSON schema}}, with a name of 1 to 128 '
            'letters, digits, _ . or -; got {"name": "f"}'
        ),
    ),
    (
        message(tools=[{"name": "f", "input_schema": {}}], tool_choice={"type": "x"}),
        400,
        ('`tool_choice` must be of type "auto", "any", "none", or "tool" with a `name`; got {"type": "x"}'),
    ),
    (
        message(tools=[{"name": "f", "input_schema": {}, "allowed_callers": ["code"]}]),
        400,
        ('`tools[0]`: `allowed_callers` must include "direct": this server runs no programs; got ["code"]'),
    ),
    (
        turns({"role": "x", "content": "a"}),
        400,
        (
            '`messages[0]` must be an object with `role` (user or assistant) and `content`; got {"role": '
            '"x", "content": "a"}'
        ),
    ),
    (turns({"role": "user", "content": 5}), 400, "`messages[0]`: `content` must be a string or a list; got 5"),
    (
        turns({"role": "user", "content": [{"type": "x"}]}),
        400,
        '`messages[0]`: `content` must have blocks of text or image; got {"type": "x"}',
    ),
    (
        turns({"role": "system", "content": [{"type": "x"}]}, USER),
        400,
        '`messages[0]`: `content` must have blocks of text alone; got {"type": "x"}',
    ),
    (
        turns({"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://a"}}]}),
        400,
        (
            '`messages[0]`: `content`: `source` of an image must be of type "base64" with `media_type` '
            'and `data`; the server fetches no URLs; got {"type": "url", "url": "http://a"}'
        ),
    ),
    (
        turns({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t9"}]}),
        400,
        '`messages[0]`: `tool_use_id` must be the id of an earlier tool_use; got "t9"',
    ),
    (
        turns(CALL, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": 5}]}),
        400,
        "`messages[1]`: `content` of a tool_result must be a string or a list of blocks; got 5",
    ),
    (
        turns(
            CALL,
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "image"}]}]},
        ),
        400,
        ('`messages[1]`: `content` of a tool_result must have blocks of text alone; got {"type": "image"}'),
    ),
    (
        turns({"role": "assistant", "content": [{"type": "x"}]}),
        400,
        (
            "`messages[0]`: `content` must have blocks of text, thinking, redacted_thinking or tool_use; "
            'got {"type": "x"}'
        ),
    ),
    (
        message(thread="t"),
        400,
        ('`thread` must be {"type": "create"} or {"type": "continue", "previous_message_id": ...}; got "t"'),
    ),
    (respond(input=5), 400, "`input` must be a non-empty string, or a list of 1 to 4096 items; got 5"),
    (respond(input=[]), 400, "`input` must be a non-empty string, or a list of 1 to 4096 items; got []"),
    (items(5), 400, "`input[0]` must be an object; got 5"),
    (
        items({"type": "x"}),
        400,
        (
            "`input[0]`: expected a message with `role` and `content`, function_call, "
            "function_call_output, custom_tool_call, custom_tool_call_output, reasoning, compaction or "
            'item_reference; got {"type": "x"}'
        ),
    ),
    (
        items({"type": "message", "role": "user", "content": [{"type": "input_image", "file_id": "f"}]}),
        400,
        "`input[0]`: `file_id` of an input_image is not supported: send `image_url` with a data: URL",
    ),
    (
        items({"type": "function_call_output", "call_id": "c", "output": "x"}),
        400,
        '`input[0]`: `call_id` must be the `call_id` of an earlier call; got "c"',
    ),
    (
        items({"role": "user", "content": [{"type": "x"}]}),
        400,
        '`input[0]`: `content` must have parts of text alone; got {"type": "x"}',
    ),
    (
        items({"type": "reasoning", "content": 5}),
        400,
        "`input[0]`: `content` must be a string or a list of parts; got 5",
    ),
    (
        respond(background=True),
        400,
        (
            "`background` is not supported: this server does not run responses in the background: "
            "expected false; got true"
        ),
    ),
    (respond(prompt={}), 400, "`prompt` is not supported: send its text as `instructions` and `input`; got {}"),
    (respond(moderation={}), 400, "`moderation` is not supported: this server does not moderate texts; got {}"),
    (
        respond(context_management=[{}]),
        400,
        (
            "`context_management` is not supported: compact by /v1/responses/compact; "
            '`truncation`: "auto" leaves out old turns; got [{}]'
        ),
    ),
    (
        respond(tools=[{"type": "web_search"}]),
        400,
        (
            '`tools[0]`: tools of type "web_search" are not supported: the server has nothing that runs '
            "them; expected functions"
        ),
    ),
    (
        respond(tools=[{"type": "function", "name": "f"}], tool_choice=5),
        400,
        ('`tool_choice` must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}; got 5'),
    ),
    (respond(stream_options={"a": 1}), 400, "`stream_options` must only be given with `stream`: true"),
    (respond(truncation="x"), 400, '`truncation` must be "disabled" or "auto"; got "x"'),
    (
        respond(reasoning={"effort": 5}),
        400,
        '`reasoning.effort` must be a string such as "none", "low" or "high"; got 5',
    ),
    (("/v1/responses/compact", {"input": "a"}), 400, "`model` must be a non-empty string; got null"),
    (
        ("/v1/responses/resp_x/cancel", {}),
        404,
        'response "resp_x" not found: it does not exist, or is no longer stored',
    ),
    (oll(messages=5), 400, "`messages` must be a list; got 5"),
    (oll(format="xml"), 400, '`format` must be "json" or a JSON schema; got "xml"'),
    (oll(think="x"), 400, '`think` must be true, false or one of low, medium, high, max; got "x"'),
    (
        oll(keep_alive="x"),
        400,
        ('`keep_alive` must be a number of seconds or a duration such as "5m", negative to keep the model; got "x"'),
    ),
    (oll(tools=5), 400, "`tools` must be a list of at most 128 functions; got 5"),
    (
        oll(messages=[{"role": "user", "content": "a", "images": 5}]),
        400,
        "`messages[0]`: `images` must be a list of image files in base64; got 5",
    ),
    (oll(options=5), 400, "`options` must be an object; got 5"),
    (oll(options={"num_predict": "x"}), 400, '`num_predict` must be an integer that is strictly positive; got "x"'),
    (
        gen(template="x"),
        400,
        (
            "`template` is not supported: prompts have the chat template of the model; send `raw`: true "
            'for none; got "x"'
        ),
    ),
    (gen(context=[1]), 400, "`context` is not supported: send the conversation as `messages` to /api/chat; got [1]"),
    (gen(width=5), 400, "`width` is not supported: this server generates no images; got 5"),
    (gen(prompt=5), 400, "`prompt` must be a string; got 5"),
    (gen(raw="x"), 400, '`raw` must be true or false; got "x"'),
    (gen(suffix=5), 400, "`suffix` must be a string; got 5"),
    (
        ("/api/embed", {"model": "ReverseModel", "input": 5}),
        400,
        "`input` must be a string, or a list of at most 2048 strings, none empty; got 5",
    ),
    (
        ("/api/embed", {"model": "ReverseModel", "input": [""]}),
        400,
        '`input` must be a string, or a list of at most 2048 strings, none empty; got [""]',
    ),
    (
        ("/api/embeddings", {"model": "ReverseModel", "prompt": 5}),
        400,
        "`prompt` must be a string, or a list of at most 2048 strings, none empty; got 5",
    ),
    (("/api/show", {"model": "none"}), 404, 'model "none" not found'),
    (
        ("/api/pull", {"model": "none", "stream": False}),
        404,
        (
            'model "none" is not served here, and this server downloads no models: put its folder into '
            "the folder of the models"
        ),
    ),
    (tgi(inputs=5), 422, "Input validation error: `inputs` must be a string, or a list of strings; got 5"),
    (tgi(best_of=2), 422, "Input validation error: you must use sampling when `best_of` is > 1"),
    (tgi(top_k=0), 422, "Input validation error: `top_k` must be an integer that is strictly positive; got 0"),
    (
        tgi(stop=["x"] * 5),
        422,
        (
            "Input validation error: `stop` must be a list of at most 4 non-empty strings, of at most "
            '4096 characters each; got ["x", "x", "x", "x", "x"]'
        ),
    ),
    (
        tgi(max_new_tokens=0),
        422,
        "Input validation error: `max_new_tokens` must be an integer that is strictly positive; got 0",
    ),
    (tgi(adapter_id=5), 422, "Input validation error: `adapter_id` must be a string; got 5"),
    (
        tgi(grammar={"type": "x"}),
        422,
        (
            'Input validation error: `grammar` must be an object: {"type": "json", "value": {a JSON '
            'schema}} or {"type": "regex", "value": "..."}; got {"type": "x"}'
        ),
    ),
    (("/rerank", {"query": "", "documents": ["a"]}), 400, '`query` must be a non-empty string; got ""'),
    (("/rerank", {"query": "a", "documents": []}), 400, "`documents` must be a list of 1 to 2048 strings; got []"),
    (("/score", {}), 400, "`text_1` and `text_2` must be given, or `queries` and `documents`; got neither"),
    (
        ("/score", {"text_1": ["a", "b", "c"], "text_2": ["a", "b"]}),
        400,
        "`text_1` must have one string, or as many as `text_2`, 2; got 3",
    ),
]


class Other(dragoman.Model):
    """A model without texts, which no text API lists."""

    placement = "inline"

    def infer(self, call: dragoman.Infer) -> dict[str, dragoman.Tensor]:
        return dict(call.inputs)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[TextServer]:
    async with serve(ReverseModel, Other) as server:
        yield server


@pytest.mark.parametrize("name", ["tgi", "ReverseModel"])
async def test_a_model_may_have_the_name_that_clients_send_for_any(name: str) -> None:
    async with serve(ReverseModel, type("tgi", (ReverseModel,), {})) as server:
        response = await server.post("/v1/completions", {"model": name, "prompt": "a"})
    assert (response.status, response.json["model"]) == (200, name)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("request_", "status", "expected"), CASES, ids=[f"{case[0][0]}-{case[2][:40]}" for case in CASES]
)
async def test_messages_of_invalid_bodies(server: TextServer, request_: Request, status: int, expected: str) -> None:
    path, body = request_
    response = await server.post(path, body)
    error = response.json["error"]
    message = error if isinstance(error, str) else error["message"]
    assert (response.status, message) == (status, expected)
    if path.startswith("/v1/messages"):
        kind = "invalid_request_error" if status == 400 else "not_found_error"
        assert (response.json["type"], error["type"]) == ("error", kind)
    elif isinstance(error, dict):
        field = message.removeprefix("`").partition("`")[0] if message.startswith("`") and status == 400 else None
        assert error == {"message": expected, "type": "invalid_request_error", "param": field, "code": None}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"best_of": 2}, "`best_of` != 1 is not supported when streaming tokens"),
        ({"decoder_input_details": True}, "`decoder_input_details` == true is not supported when streaming tokens"),
    ],
)
async def test_messages_in_streams_of_tgi(server: TextServer, parameters: dict[str, Any], expected: str) -> None:
    response = await server.post("/generate_stream", {"inputs": "a b", "parameters": parameters})
    assert response.body.startswith(b"data:")
    assert events(response.body) == [{"error": f"Input validation error: {expected}", "error_type": "validation"}]


DETAILS = {
    "parent_model": "",
    "format": "",
    "family": "python_function",
    "families": ["python_function"],
    "parameter_size": "",
    "quantization_level": "F32",
}
TAG = {
    "name": "ReverseModel:latest",
    "model": "ReverseModel:latest",
    "modified_at": "TIME",
    "size": 0,
    "digest": "DIGEST",
    "details": DETAILS,
    "capabilities": ["completion", "tools", "embedding"],
    "context_length": 64,
}


def of_openai(name: str, parent: str | None = None) -> dict[str, Any]:
    fields = {"id": name, "object": "model", "created": "SECONDS", "owned_by": "dragoman", "root": "reverse"}
    return {**fields, "parent": parent, "max_model_len": 64, "permission": []}


def of_anthropic(name: str) -> dict[str, Any]:
    fields = {"type": "model", "id": name, "display_name": name, "created_at": "TIME", "lifecycle": "active"}
    return {**fields, "max_input_tokens": 64, "max_tokens": 64}


def page(*names: str, has_more: bool = False) -> dict[str, Any]:
    data = [of_anthropic(name) for name in names]
    return {"data": data, "has_more": has_more, "first_id": names[0], "last_id": names[-1]}


NAMES = ("ReverseModel", "pirate", "ReverseModel:pirate")
DESCRIPTIONS: list[tuple[str, str, Any, Any]] = [
    (
        "",
        "/info",
        None,
        {
            "model_id": "reverse",
            "model_sha": None,
            "model_dtype": "float32",
            "model_device_type": "cpu",
            "model_pipeline_tag": "text-generation",
            "max_concurrent_requests": None,
            "max_best_of": 2,
            "max_stop_sequences": 4,
            "max_input_tokens": 63,
            "max_total_tokens": 64,
            "validation_workers": 1,
            "max_client_batch_size": 4,
            "router": "dragoman",
            "version": dragoman.__version__,
            "sha": None,
            "docker_label": None,
        },
    ),
    ("", "/api/tags", None, {"models": [TAG]}),
    ("", "/api/ps", None, {"models": [{**TAG, "size_vram": 0, "expires_at": "TIME"}]}),
    (
        "",
        "/api/show",
        {"model": "ReverseModel"},
        {
            "modelfile": "",
            "parameters": "",
            "template": "",
            "details": DETAILS,
            "model_info": {"general.architecture": "python_function", "python_function.context_length": 64},
            "capabilities": TAG["capabilities"],
            "modified_at": "TIME",
        },
    ),
    ("", "/api/version", None, {"version": "0.12.11", "dragoman": dragoman.__version__}),
    (
        "",
        "/v1/models",
        None,
        {
            "object": "list",
            "data": [of_openai(NAMES[0]), *(of_openai(name, "ReverseModel") for name in NAMES[1:])],
        },
    ),
    ("", "/v1/models/ReverseModel", None, of_openai("ReverseModel")),
    ("anthropic", "/v1/models", None, page(*NAMES)),
    ("anthropic", "/v1/models?limit=1", None, page(NAMES[0], has_more=True)),
    ("anthropic", "/v1/models?limit=1&after_id=ReverseModel", None, page(NAMES[1], has_more=True)),
    ("anthropic", "/v1/models?limit=2&after_id=ReverseModel", None, page(*NAMES[1:])),
    ("anthropic", "/v1/models?limit=1&before_id=ReverseModel:pirate", None, page(NAMES[1], has_more=True)),
    ("anthropic", "/v1/models?before_id=pirate", None, page(NAMES[0])),
    ("anthropic", "/v1/models/ReverseModel", None, of_anthropic("ReverseModel")),
    ("", "/version", None, {"version": dragoman.__version__}),
    (
        "",
        "/v1/embeddings",
        {"input": "a b", "dimensions": 1},
        {
            "object": "list",
            "data": [{"object": "embedding", "index": 0, "embedding": [1.0]}],
            "model": "ReverseModel",
            "usage": {"prompt_tokens": 2, "total_tokens": 2},
        },
    ),
    ("", "/load", None, {"server_load": 0}),
    ("", "/api/embeddings", {"model": "ReverseModel", "prompt": "a"}, {"embedding": [0.6, 0.8, 0.0]}),
    (
        "",
        "/tokenize",
        {"prompt": "a b", "return_token_strs": True},
        {"count": 2, "max_model_len": 64, "tokens": [107, 108], "token_strs": ["a", " b"]},
    ),
    ("", "/tokenize", {"prompt": "a"}, {"count": 1, "max_model_len": 64, "tokens": [107], "token_strs": None}),
    ("", "/detokenize", {"tokens": [1, 2]}, {"prompt": "1 2"}),
    ("", "/v1/messages/count_tokens", {"messages": [USER]}, {"input_tokens": 3}),
    ("", "/v1/responses/input_tokens", {"input": "a b"}, {"object": "response.input_tokens", "input_tokens": 3}),
]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("api", "path", "body", "expected"), DESCRIPTIONS)
async def test_descriptions(server: TextServer, api: str, path: str, body: Any, expected: Any) -> None:
    headers = {"anthropic-version": "2023-06-01"} if api else {}
    response = await server.request("GET" if body is None else "POST", path, body, headers)
    assert (response.status, without_times(response.json)) == (200, expected)


def without_times(value: Any) -> Any:
    """Return an object with words for times and digests, whose form is checked."""
    if isinstance(value, list):
        return [without_times(each) for each in value]
    if not isinstance(value, dict):
        return value
    found = {name: without_times(each) for name, each in value.items()}
    for name, form, word in (
        ("modified_at", r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", "TIME"),
        ("expires_at", r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", "TIME"),
        ("created_at", r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "TIME"),
        ("created", r"1\d{9}", "SECONDS"),
        ("digest", "[0-9a-f]{64}", "DIGEST"),
    ):
        if name in found:
            assert re.fullmatch(form, str(found[name])), found[name]
            found[name] = word
    return found


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("limit=0", '`limit` must be an integer from 1 to 1000; got "0"'),
        ("limit=1001", '`limit` must be an integer from 1 to 1000; got "1001"'),
        ("limit=x", '`limit` must be an integer from 1 to 1000; got "x"'),
        ("after_id=pirate&before_id=pirate", "`after_id` must not be given with `before_id`"),
        ("after_id=none", '`after_id` must be the id of a model; got "none"'),
    ],
)
async def test_invalid_pages_of_models(server: TextServer, query: str, expected: str) -> None:
    response = await server.request("GET", f"/v1/models?{query}", None, {"anthropic-version": "2023-06-01"})
    assert (response.status, response.json["error"]["message"]) == (400, expected)
