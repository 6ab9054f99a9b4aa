"""Rare and malformed requests of the text APIs, by value: each with its whole response, as kept in `contract`.

Set DRAGOMAN_TEST_WRITE=1 to write the files anew after a change that is meant, and read what `git diff` shows.
"""

import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import dragoman
from rest.rest_server import RawResponse
from text_server import ReverseModel, TextServer, serve

from .test_lmi_arrays import Upper, Vectors, double, joined
from .test_scoring import Angles, SharedWords
from .test_text_contract import (
    ANSWERED,
    ASKED,
    CALL,
    PIXEL,
    REQUESTS,
    TOOL,
    USER,
    VERSION,
    check,
    compact,
    plain,
    replaced,
    says,
    shortened,
    without_variable,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

Headers = Mapping[str, str]
Step = tuple[str, str, Any, Headers]
JSON = {"content-type": "application/json"}
MODELS = (ReverseModel, SharedWords, Angles)
# Fields of a call that a model sets unless the request does.
SET_BY_MODELS = frozenset(
    """
    frequency_penalty max_new_tokens min_p presence_penalty repetition_penalty skip_special_tokens temperature top_k
    top_p
    """.split()  # noqa: SIM905
)
# What differs from run to run, besides ids and times.
_TIMES = re.compile(r'"(max_concurrent_requests|size)": ?\d+')
_HEADERS = ("content-type", "x-ignored-parameters", "allow", "retry-after")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[TextServer]:
    async with serve(*MODELS, default_model="ReverseModel", control_open=True) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def strict() -> AsyncIterator[TextServer]:
    models = (*MODELS, double)
    async with serve(*models, default_model="ReverseModel", strict_parameters=True, max_stored_responses=0) as server:
        yield server


def cases(*values: Any) -> tuple[Any, ...]:
    """Return values of any types."""
    return values


def post(path: str, body: Any, headers: Headers = {}) -> Step:  # noqa: B006 - it is not changed
    return "POST", path, body, headers


def get(path: str, headers: Headers = {}) -> Step:  # noqa: B006
    return "GET", path, None, headers


async def exchange(server: TextServer, step: Step) -> tuple[RawResponse, list[str]]:
    """Send a request; return its response, and the lines that describe the request, the response and the calls."""
    method, path, body, headers = step
    models = [model for model in server.models.values() if hasattr(model, "calls")]
    for model in models:
        model.calls.clear()
        model.embedded = None
    response = await server.request(method, path, body, headers)
    calls = [call for model in models for call in model.calls]
    seen = plain([*calls, *(model.embedded for model in models if model.embedded)])
    sent = "" if body is None else repr(body) if isinstance(body, bytes) else compact(body)
    kept = " ".join(f"{name}: {value}" for name, value in headers.items())
    found = [" ".join(filter(None, (method, _masked(path), shortened(_masked(sent)), kept)))]
    values = (f"{name}={response.headers[name]}" for name in _HEADERS if name in response.headers)
    found.append(f"  {response.status} {' '.join(values)}".rstrip())
    found += [f"  saw {compact(_without_defaults(each))}" for each in seen]
    found += [f"  {line}" for line in _masked(without_variable(response.body)).splitlines() if line]
    return response, found


def _without_defaults(call: Any) -> Any:
    """Return a call without the names of the fields that have the defaults of the model: those that are set remain."""
    sampling = call.get("sampling") if isinstance(call, dict) else None
    if not isinstance(sampling, dict):
        return call
    rest = {name: value for name, value in sampling.items() if name != "model_defaults"}
    given = sorted(SET_BY_MODELS - set(sampling.get("model_defaults", ())))
    return {**call, "sampling": {**rest, **({"given": given} if given else {})}}


def _masked(text: str) -> str:
    text = without_variable(text.encode()).replace(f'"{dragoman.__version__}"', '"VERSION"')
    return _TIMES.sub(r'"\1":NUMBER', text)


# --- what is listed --------------------------------------------------------------------------------------------------


def lists() -> Iterator[Step]:
    for path in ("/v1/models", "/v1/models/ReverseModel", "/v1/models/pirate", "/v1/models/Angles", "/v1/models/none"):
        yield get(path)
        yield get(path, VERSION)
    for path in ("/version", "/load", "/health", "/info", "/ping", "/api/tags", "/api/ps", "/api/version", "/models"):
        yield get(path)
    for model in ("ReverseModel", "Angles", "none"):
        for rest in ("health", "info", "adapters", "adapters/pirate", "adapters/none"):
            yield get(f"/models/{model}/{rest}")
        yield get(f"/models/{model}")
        yield get(f"/models/{model}/1")
        for field in ("model", "name"):
            yield post("/api/show", {field: model})
            yield post("/api/show", {field: f"{model}:latest"})
    for query in ("limit=1", "limit=2", "limit=2&next_page_token=1", "limit=1&next_page_token=2", "next_page_token=9"):
        yield get(f"/models?{query}")
    for query in ("limit=0", "limit=101", "limit=x", "next_page_token=-1", "next_page_token=1e3", "limit=", "limit=+1"):
        yield get(f"/models?{query}")
    yield get("/models?limit=0000000000001")
    yield get("/models?limit=000000000001")
    for path in ("/adapters", "/adapters/pirate", "/adapters/none"):
        yield get(path)
    for query in (
        *(
            "limit=1",
            "limit=2",
            "limit=1000",
            "limit=1001",
            "limit=0",
            "limit=x",
            "after_id=pirate",
            "before_id=pirate",
        ),
        *("limit=1&after_id=ReverseModel", "limit=1&before_id=pirate", "after_id=none", "before_id=none", "after_id="),
        *("after_id=ReverseModel:pirate", "before_id=Angles", "after_id=pirate&before_id=pirate", "limit=2&limit=1"),
    ):
        yield get(f"/v1/models?{query}", VERSION)
    for method in ("GET", "PUT", "DELETE"):
        for path in ("/v1/chat/completions", "/v1/messages", "/api/chat", "/generate", "/invocations", "/rerank"):
            yield method, path, None, {}
    for path in ("/v1/none", "/api/none", "/models/a/b/c/d"):
        yield post(path, {})


# --- bodies ----------------------------------------------------------------------------------------------------------

PATHS = (*REQUESTS, "/generate_stream", "/", "/predictions/ReverseModel", "/api/embeddings", "/api/pull", "/v1/score")
BODIES: tuple[Any, ...] = (b"", b"{", b"[]", b"null", b'"x"', b"\xff", b'{"a": NaN}', b"[" * 70 + b"]" * 70, {})


def bodies() -> Iterator[Step]:
    for path in PATHS:
        for body in BODIES:
            yield post(path, body, JSON)


def names() -> Iterator[Step]:
    """A model that does not exist, or that cannot do this, and values that are no name."""
    for path, body in REQUESTS.items():
        for name in cases(
            "none",
            "Angles",
            "SharedWords",
            "ReverseModel:pirate",
            "ReverseModel:none",
            "pirate",
            "",
            5,
            None,
        ):
            yield post(path, {**body, "model": name})
    for path in ("/generate", "/generate_stream", "/tokenize", "/chat_tokenize", "/v1/chat/completions", "/embed"):
        body = REQUESTS.get(path, REQUESTS["/generate"])
        yield post(f"/models/none{path}", body)
        yield post(f"/models/Angles{path}", body)
        yield post(f"/models/ReverseModel{path}", {**body, "model": "other"})
    for name in ("gpt-3.5-turbo", "tgi", "lmi", "org/ReverseModel", "https://x.org/ReverseModel", "default"):
        for path in ("/generate", "/v1/chat/completions", "/api/chat", "/v1/messages", "/invocations"):
            yield post(path, {**REQUESTS[path], "model": name})
    yield post("/models/org/ReverseModel", REQUESTS["/generate"])
    yield post("/models/ReverseModel", {**REQUESTS["/generate"], "stream": True})


# --- messages --------------------------------------------------------------------------------------------------------

TEXT = {"type": "text", "text": "t"}
URL = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}


def messages() -> Iterator[Step]:
    """Messages of OpenAI's chats, of any form."""
    (call,) = cases(*ASKED["tool_calls"])
    odd: list[Any] = [
        5,
        {},
        {"role": "user"},
        {"role": 5, "content": "a"},
        {"role": "", "content": "a"},
        {"role": "user", "content": 5},
        {"role": "user", "content": None},
        {"role": "user", "content": []},
        {"role": "user", "content": [5]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "system", "content": [URL]},
        {"role": "tool", "tool_call_id": "t", "content": [TEXT, TEXT]},
        {"role": "tool", "tool_call_id": "t", "content": None},
        {"role": "tool", "tool_call_id": "t", "content": [URL]},
        {"role": "assistant", "content": [URL]},
        {"role": "assistant", "content": [TEXT, {"type": "refusal", "refusal": "no"}]},
        {"role": "assistant", "content": None, "refusal": "no"},
        {"role": "assistant", "content": None, "refusal": ""},
        {"role": "assistant", "content": None},
        {"role": "assistant", "reasoning": "r", "content": "c"},
        {"role": "assistant", "reasoning": "r", "reasoning_content": "s", "content": "c"},
        {"role": "assistant", "tool_calls": 5},
        {"role": "assistant", "tool_calls": []},
        {"role": "assistant", "tool_calls": [5]},
        {"role": "assistant", "tool_calls": [{"function": {"name": 5}}]},
        {"role": "assistant", "tool_calls": [{**call, "function": {"name": "f"}}]},
        {"role": "assistant", "tool_calls": [{**call, "function": {"name": "f", "arguments": {"a": "é"}}}]},
        {"role": "assistant", "tool_calls": [{**call, "function": {"name": "f", "arguments": 5}}]},
        {"role": "assistant", "tool_calls": [{"id": "u", "custom": {"name": "c", "input": "é"}, "own": 1}]},
        {"role": "assistant", "tool_calls": [{"custom": {"name": "c"}}]},
        {"role": "developer", "content": "d", "name": "n", "none": None},
        {"role": "critic", "content": "d"},
        {"role": "critic", "content": [URL]},
    ]
    for url in cases(
        5, None, "x", "https://x.org/a.png", "data:,x", "data:image/png,x", "DATA:image/png;BASE64,eA==", {}
    ):
        odd += [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]
        odd += [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    for message in odd:
        yield post("/v1/chat/completions", {"messages": [USER, message], "max_tokens": 2})
    for more in cases(
        {"chat_template": "x"},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"chat_template_kwargs": {"add_generation_prompt": False, "x": 1}},
        {"chat_template_kwargs": {"continue_final_message": True}},
        {"continue_final_message": True},
        {"chat_template_kwargs": {"reasoning_effort": "high"}, "reasoning_effort": "none"},
        {"reasoning_effort": "x" * 32},
        {"reasoning_effort": "x" * 33},
        {"reasoning_effort": ""},
        {"top_logprobs": 1},
        {"top_logprobs": 1, "logprobs": False},
        {"top_logprobs": 0},
        {"max_tokens": 5, "max_completion_tokens": 1},
        {"functions": []},
        {"functions": [5]},
        {"function_call": "auto"},
        {"modalities": ["text"]},
        {"modalities": ["text", "audio"]},
        {"verbosity": "medium", "safety_identifier": "s", "prompt_cache_key": "k"},
        {"verbosity": "low", "prediction": {"type": "content"}, "own": 1},
        {"n": 2, "best_of": 2},
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"stream_options": {"include_usage": True}},
        {"echo": True},
        {"prompt_logprobs": 1},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"minLength": "x"}}}},
        {"guided_regex": "a", "guided_choice": ["a"]},
        {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
        {"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"},
        {"tools": [TOOL], "response_format": {"type": "json_object"}},
        {"tools": [TOOL], "guided_regex": "a"},
        {"tools": [TOOL], "guided_choice": ["a"], "parallel_tool_calls": False},
    ):
        yield post("/v1/chat/completions", {"messages": [USER], "max_tokens": 2, **more})


def messages_of_anthropic() -> Iterator[Step]:
    used = {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_t", "name": "f", "input": {"é": 1}}]}
    result = {"type": "tool_result", "tool_use_id": "toolu_t"}
    thought = {"type": "thinking", "thinking": "r", "signature": "s"}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/gif", "data": PIXEL}}
    given: list[Any] = [
        [5],
        [{"role": "user"}],
        [{"role": "tool", "content": "a"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [5]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "u"}}]}],
        [{"role": "user", "content": [image, image]}],
        [{"role": "system", "content": [image]}],
        [{"role": "system", "content": "s"}, {"role": "system", "content": [TEXT, TEXT]}, USER],
        [USER, {"role": "system", "content": [TEXT]}, USER],
        [USER, USER],
        [USER, {"role": "user", "content": [TEXT, TEXT]}],
        [USER, {"role": "assistant", "content": []}, USER],
        [USER, {"role": "assistant", "content": [image]}],
        [USER, {"role": "assistant", "content": [thought, {**thought, "thinking": "q"}, TEXT, TEXT]}, USER],
        [USER, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "d"}, TEXT]}, USER],
        [USER, used, {"role": "user", "content": [result]}],
        [USER, used, {"role": "user", "content": [{**result, "content": "x", "is_error": False}]}],
        [USER, used, {"role": "user", "content": [TEXT, {**result, "content": [TEXT, TEXT], "is_error": True}]}],
        [USER, used, {"role": "user", "content": [{**result, "content": [image]}]}],
        [USER, used, {"role": "user", "content": [{**result, "content": 5}]}],
        [USER, used, {"role": "user", "content": [{**result, "tool_use_id": "other"}]}],
        [USER, used, {"role": "user", "content": [{**result, "tool_use_id": 5}]}],
        [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": 5, "name": "f", "input": {}}]}],
        [USER, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": [TEXT]}],
    ]
    for value in given:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            body = {"messages": value, **({} if "count" in path else {"max_tokens": 2})}
            yield post(path, body, VERSION)
    tool = {"name": "f", "input_schema": {"type": "object"}}
    for more in cases(
        {"system": "x-anthropic-billing-header: a"},
        {"system": [{"type": "text", "text": "x-anthropic-billing-header: a"}, TEXT, TEXT]},
        {"system": [image]},
        {"tools": [tool], "tool_choice": {"type": "tool", "name": "g"}},
        {"tools": [tool], "tool_choice": {"type": "tool"}},
        {"tools": [tool], "tool_choice": {"type": "any", "disable_parallel_tool_use": "x"}},
        {"tools": [tool], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"tool_choice": {"type": "any"}},
        {"tools": [{**tool, "description": "d", "strict": True, "defer_loading": True, "cache_control": {}}]},
        {"tools": [{**tool, "type": "custom"}]},
        {"tools": [{**tool, "type": "bash_20250124"}]},
        {"tools": [{**tool, "allowed_callers": ["code"]}]},
        {"tools": [{**tool, "allowed_callers": ["direct", "code"]}]},
        {"tools": [{**tool, "name": "a b"}]},
        {"tools": [{"name": "f"}]},
        {"tools": [5]},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1024},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1025},
        {"thinking": {"type": "enabled", "budget_tokens": 1023}, "max_tokens": 1025},
        {"thinking": {"type": "enabled", "budget_tokens": True}, "max_tokens": 1025},
        {"thinking": {"type": "adaptive", "display": "omitted"}},
        {"output_config": {"effort": "max", "task_budget": {}}, "thinking": {"type": "disabled"}},
        {"output_config": {"effort": 5}},
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "array"}}}},
        {"output_config": {"format": {"type": "xml"}}},
        {"output_format": {}},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}},
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        {"context_management": {"edits": []}},
        {"context_management": {}},
        {"context_management": {"edits": 5}},
        {"context_management": {"edits": ""}},
        {"context_management": {"edits": [5]}},
        {"context_management": 5},
        {"mcp_servers": [5], "compaction": {}},
        {"speed": "standard", "service_tier": "auto"},
        {"speed": "fast", "inference_geo": "eu", "own": 1},
        {"container": "c"},
        {"max_tokens": None},
        {"stop_sequences": ["a"]},
        {"temperature": 1.0},
        {"temperature": 1.5},
    ):
        yield post("/v1/messages", {"messages": [USER], "max_tokens": 2, **more}, VERSION)
        counted = {name: value for name, value in more.items() if name not in ("max_tokens", "stop_sequences")}
        yield post("/v1/messages/count_tokens", {"messages": [USER], **counted}, VERSION)


def messages_of_ollama() -> Iterator[Step]:
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    base = {"model": "ReverseModel", "stream": False, "options": {"num_predict": 2}}
    for message in cases(
        5,
        {"role": "user"},
        {"role": "user", "content": "a", "images": "x"},
        {"role": "user", "images": [PIXEL]},
        {"role": "user", "content": "a", "images": []},
        {"role": "assistant", "thinking": "r", "content": "c", "tool_calls": [call, {**call, "id": "i"}]},
        {"role": "assistant", "tool_calls": 5},
        {"role": "assistant", "tool_calls": [5]},
        {"role": "tool", "tool_name": "f", "content": "x"},
        {"role": "tool", "tool_name": "f", "name": "g", "content": "x"},
    ):
        yield post("/api/chat", {**base, "messages": [USER, message]})
    for options in cases(
        {"num_predict": -1},
        {"num_predict": 0},
        {"num_predict": True},
        {"seed": -5},
        {"repeat_last_n": -1, "tfs_z": 1.0, "mirostat": 0},
        {"tfs_z": 0.5, "num_ctx": 1, "num_gpu": 1, "low_vram": True, "own": 1},
        {"temperature": 2.5},
        {"temperature": 0},
        {"stop": ["a"], "top_k": 2, "min_p": 0.5, "typical_p": 0.5, "presence_penalty": 1, "frequency_penalty": 1},
        {"stop": 5},
    ):
        yield post("/api/chat", {**base, "messages": [USER], "options": options})
    for keep in cases(
        "5m", "-1", "1h30m0.5s", "300", "0", 0, -1, 1.5, True, "1 m", "m", ".5s", "5.", "+5s", [], 1 << 40
    ):
        yield post("/api/chat", {**base, "messages": [USER], "keep_alive": keep})
        yield post("/api/generate", {**base, "keep_alive": keep})
    for more in cases(
        {"prompt": "a", "raw": True, "images": [PIXEL]},
        {"prompt": "a", "raw": True, "system": "s"},
        {"prompt": "a", "suffix": "b", "system": "s"},
        {"prompt": "a", "suffix": "b", "images": [PIXEL]},
        {"prompt": "a", "suffix": ""},
        {"prompt": "a", "images": [5]},
        {"prompt": "a", "template": "x"},
        {"prompt": "a", "context": [1]},
        {"prompt": "a", "width": 5},
        {"prompt": "a", "think": "max"},
        {"prompt": "a", "think": "min"},
        {"prompt": "a", "format": ""},
        {"prompt": "a", "format": "json", "logprobs": True, "top_logprobs": 1},
        {"prompt": "a", "truncate": False, "shift": True},
        {"system": "s"},
    ):
        yield post("/api/generate", {**base, **more})
    for path, field in (("/api/embed", "input"), ("/api/embeddings", "prompt")):
        for value in ("", None, [], ["a", ""], [5], 5, "a", ["a", "b"]):
            yield post(path, {"model": "ReverseModel", field: value})
        yield post(path, {"model": "ReverseModel", field: "a", "truncate": False, "dimensions": 1, "options": {"a": 1}})
        yield post(path, {"model": "ReverseModel", field: "a", "dimensions": 4})
        yield post(path, {"model": "ReverseModel", field: ["a"] * 2049})
    for name in ("none", "none:latest", "ReverseModel:latest", 5):
        yield post("/api/pull", {"model": name, "insecure": True})
        yield post("/api/pull", {"name": name, "stream": False})


# --- tools -----------------------------------------------------------------------------------------------------------


def tools() -> Iterator[Step]:
    function: Any = TOOL["function"]
    other = {"type": "function", "function": {"name": "g"}}
    custom = {"type": "custom", "custom": {"name": "c", "description": "d", "format": {"type": "text"}}}
    nested: list[Any] = [
        5,
        [5],
        [{}],
        [{"type": "function"}],
        [{**TOOL, "type": "retrieval"}],
        [{**TOOL, "function": {**function, "name": "a b"}}],
        [{**TOOL, "function": {**function, "name": "x" * 129}}],
        [{**TOOL, "function": {**function, "name": "x" * 128}}],
        [{**TOOL, "function": {**function, "parameters": 5}}],
        [{**TOOL, "function": {**function, "parameters": {"type": "array"}}}],
        [{**TOOL, "function": {**function, "parameters": {"type": ["null", "object"]}}}],
        [{**TOOL, "function": {**function, "parameters": {"type": ["null"]}}}],
        [{**TOOL, "function": {**function, "strict": True}}],
        [other, custom, TOOL],
        [{"type": "custom", "custom": {"name": "c", "format": {"type": "grammar"}}}],
        [{"type": "custom", "custom": {"name": ""}}],
        [TOOL, TOOL],
    ]
    choices: list[Any] = [
        None,
        "none",
        "auto",
        "required",
        "f",
        "x",
        5,
        {"type": "function", "function": {"name": "f"}},
        {"type": "function", "function": {"name": "x"}},
        {"type": "function"},
        {"type": "custom", "custom": {"name": "c"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOL, other]}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOL, {"function": {"name": "x"}}]}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "never", "tools": [TOOL]}},
    ]
    body = {"messages": [USER], "max_tokens": 2}
    for value in nested:
        yield post("/v1/chat/completions", {**body, "tools": value})
        yield post("/v1/chat/completions", {**body, "tools": value, "tool_choice": "required"})
        yield post("/chat_tokenize", {"messages": [USER], "tools": value})
        yield post("/api/chat", {**body, "model": "ReverseModel", "stream": False, "tools": value})
    for choice in choices:
        yield post("/v1/chat/completions", {**body, "tools": [TOOL, other, custom], "tool_choice": choice})
        yield post("/v1/chat/completions", {**body, "tool_choice": choice})
        yield post("/v1/chat/completions", {**body, "tools": [], "tool_choice": choice})
    flat = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    for value in cases(
        5,
        [5],
        [{"type": "function"}],
        [{**flat, "name": "a b"}],
        [{**flat, "parameters": 5}],
        [{**flat, "parameters": None, "strict": False, "description": "d"}],
        [{"type": "web_search"}],
        [{"type": "custom", "name": "c", "description": "d", "format": {"type": "text"}}],
        [{"type": "custom", "name": ""}],
        [{**flat, "defer_loading": True, "output_schema": {}, "async": True, "input_examples": [1]}],
        [{**flat, "allowed_callers": []}],
        [{**flat, "allowed_callers": 5}],
    ):
        yield post("/v1/responses", {"input": "a", "max_output_tokens": 2, "tools": value})
    for choice in cases(
        "none",
        "required",
        {"type": "function", "name": "f"},
        {"type": "custom", "name": "f"},
        {"type": "function", "name": "x"},
        {"type": "file_search"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "x"}]},
        {"type": "allowed_tools", "mode": "auto"},
        5,
    ):
        yield post("/v1/responses", {"input": "a", "max_output_tokens": 2, "tools": [flat], "tool_choice": choice})


# --- LMI, TGI and scores ---------------------------------------------------------------------------------------------


def bodies_of_lmi() -> Iterator[Step]:
    form = {"content-type": "application/x-www-form-urlencoded"}
    parts = {"content-type": "multipart/form-data; boundary=b"}
    multipart = b'--b\r\ncontent-disposition: form-data; name="%s"\r\n\r\na b\r\n--b--\r\n'
    for kind, data in cases(
        ("text/plain", b"a b"),
        ("text/plain; charset=utf-8", "é".encode()),
        ("text/plain", b"\xff"),
        ("text/plain", b""),
        ("text/csv", b"inputs,x\na b,1\nc,2\n"),
        ("text/csv", b"inputs\na b\n\n"),
        ("text/csv", b"x\na\n"),
        ("text/csv", b""),
        ("text/csv", b"inputs\n"),
        ("text/csv", b"\xff"),
        ("TEXT/CSV", b"inputs\n,\na\n"),
        ("image/png", b'{"inputs": "a"}'),
    ):
        yield post("/invocations", data, {"content-type": kind})
    for data in (b"inputs=a+b", b"data=a%20b&x=1", b"x=a&y=b", b"a b", b"=", b"", b' {"inputs": "a b"}', b"\xff=a"):
        yield post("/invocations", data, form)
    yield post("/invocations", b"inputs=a&model_name=ReverseModel", form)
    yield post("/invocations", b"inputs=a&model_name=none", form)
    for name in (b"inputs", b"data", b"other"):
        yield post("/invocations", multipart % name, parts)
    yield post("/invocations", b"--b\r\n\r\na b\r\n--b--\r\n", parts)
    yield post("/invocations", b"--b--\r\n", parts)
    for headers in cases(
        {"x-amzn-sagemaker-target-model": "ReverseModel.tar.gz"},
        {"x-amzn-sagemaker-target-model": "a/none.tar.gz"},
        {"x-amzn-sagemaker-custom-attributes": "model_name=none; x=1"},
        {"x-amzn-sagemaker-custom-attributes": " model_name = ReverseModel ;adapters=pirate"},
        {"x-amzn-sagemaker-custom-attributes": "model_version=7"},
        {"x-amzn-sagemaker-adapter-identifier": "pirate"},
        {"x-amzn-sagemaker-adapter-identifier": "none"},
        {"model_name": "none"},
        {"model_version": "7"},
    ):
        yield post("/invocations", {"inputs": "a b"}, headers)
    for query in ("model_name=ReverseModel", "model_name=none", "model_version=7", "model_name=ReverseModel&x=1"):
        yield post(f"/invocations?{query}", {"inputs": "a b"})
    for path in ("/predictions/none", "/predictions/ReverseModel/7", "/models/none/invoke", "/models/none/invocations"):
        yield post(path, {"inputs": "a b"})
    for body in cases(
        {"inputs": 5},
        {"inputs": [5]},
        {"inputs": []},
        {"inputs": ""},
        {"inputs": ["a", ""]},
        {"inputs": "a", "parameters": 5},
        {"inputs": "a", "parameters": None},
        {"inputs": "a", "stream": "x"},
        {"inputs": "a", "stream": None},
        {"inputs": "a", "own": 1, "model_name": "lmi"},
        {"inputs": "a", "model_name": "other"},
        {"inputs": "a", "model_name": 5},
        {"inputs": "a", "adapters": "pirate"},
        {"inputs": "a", "adapters": ["pirate"]},
        {"inputs": ["a", "b"], "adapters": ["pirate", "pirate"]},
        {"inputs": "a", "adapters": [5]},
        {"inputs": "a", "adapters": []},
        {"prompt": "a b", "inputs": "c"},
        {"prompt": "a b", "max_tokens": 1, "stream": True},
    ):
        yield post("/invocations", body)
    for parameters in cases(
        {"stop": True},
        {"stop": False},
        {"stop": ["b"]},
        {"stop_sequences": ["b"], "include_stop_str_in_output": True},
        {"output_formatter": "json"},
        {"output_formatter": "none"},
        {"output_formatter": "xml"},
        {"output_formatter": "jsonlines_chat_completion"},
        {"details": True, "logprobs": 1, "prompt_logprobs": 0},
        {"details": True, "decoder_input_details": True, "return_full_text": True},
        {"do_sample": True, "best_of": 2, "seed": 5, "max_new_tokens": 2},
        {"do_sample": True, "best_of": 2, "n": 2, "seed": 5, "max_new_tokens": 2},
        {"num_beams": 2, "details": False},
        {"min_length": 1, "bad_sequences": ["x"], "ignore_eos_token": True},
        {"temperature": 0.5, "top_k": 3},
        {"temperature": 0.5, "top_k": 3, "do_sample": True},
        {"grammar": {"type": "regex", "value": "a"}},
        {"response_format": {"type": "json_object"}},
        {"max_new_tokens": 0},
        {"max_new_tokens": 65},
        {"watermark": True, "own": 1},
        {"truncate": 1},
    ):
        for stream in (False, True):
            yield post("/invocations", {"inputs": "a b", "parameters": parameters, "stream": stream})
        yield post("/invocations", {"inputs": ["a b"], "parameters": parameters})


def control_of_lmi() -> Iterator[Step]:
    for body in cases({}, {"model_name": 5}, {"url": 5}, {"model_name": "none"}, {"url": "x"}, b"{", b"[]"):
        yield post("/models", body)
    yield post("/models?model_name=none&engine=Python&batch_size=1", None)
    for query in ("", "min_worker=0", "min_worker=2&max_worker=1", "max_worker=65", "max_worker=x", "min_worker=1&x=1"):
        yield "PUT", f"/models/ReverseModel?{query}", None, {}
    for path in ("none?min_worker=1", "ReverseModel/7?min_worker=1"):
        yield "PUT", f"/models/{path}", None, {}
    for path in ("none", "ReverseModel/7"):
        yield "DELETE", f"/models/{path}", None, {}
    for base in ("", "/models/ReverseModel", "/models/none", "/models/Angles"):
        for query in ("", "name=a", "src=b", "name=a&src=b", "name=a&src=b&pin=TRUE&preload=x&own=1"):
            yield post(f"{base}/adapters?{query}", None)
        yield post(f"{base}/adapters/a/update?src=b", None)
        yield post(f"{base}/adapters/a/update", None)
        yield "DELETE", f"{base}/adapters/a", None, {}
    for base in ("/v1", "/models/ReverseModel/v1", "/models/none/v1"):
        for body in cases({}, {"lora_name": "a"}, {"lora_name": 5}, {"lora_name": "a", "lora_path": "b", "own": 1}):
            yield post(f"{base}/load_lora_adapter", body)
            yield post(f"{base}/unload_lora_adapter", body)
        yield post(f"{base}/load_lora_adapter", {"lora_name": "a", "lora_path": "b", "load_inplace": True, "pinned": 5})
    for path in cases(
        "/reset_prefix_cache",
        "/flush_cache",
        "/models/none/flush_cache",
        "/models/Angles/reset_prefix_cache",
    ):
        yield post(path, None)
        yield post(path, {"own": 1})


def parameters_of_tgi() -> Iterator[Step]:
    for parameters in cases(
        {"best_of": 2},
        {"best_of": 3, "do_sample": True, "max_new_tokens": 1},
        {"temperature": 0},
        {"temperature": 0.5},
        {"top_p": 1.0},
        {"top_p": 0.5, "top_k": 2, "typical_p": 0.5, "seed": 3},
        {"stop": ["a"] * 5},
        {"stop_sequences": ["a"]},
        {"truncate": 1},
        {"truncate": 0},
        {"watermark": True},
        {"watermark": False},
        {"decoder_input_details": True},
        {"details": True, "decoder_input_details": True},
        {"top_n_tokens": 6},
        {"top_n_tokens": 1, "details": True},
        {"grammar": {"type": "json", "value": {"minLength": "x"}}},
        {"grammar": {"type": "xml", "value": ""}},
        {"adapter_id": "none"},
        {"return_full_text": True},
        {"own": 1},
        5,
        None,
    ):
        for path in ("/generate", "/generate_stream"):
            yield post(path, {"inputs": "a b", "parameters": parameters})
    for body in cases(
        {"inputs": ""},
        {"inputs": 5},
        {"inputs": [5]},
        {"inputs": []},
        {"inputs": ["a b", "c"]},
        {"inputs": "a", "stream": True},
        {"inputs": "a", "stream": "x"},
        {"inputs": "a", "options": {"wait_for_model": True}, "own": 1},
        {"inputs": " ".join("a" * 70)},
    ):
        for path in ("/generate", "/generate_stream", "/", "/tokenize", "/models/ReverseModel"):
            yield post(path, body)
    for body in cases(
        {"messages": 5},
        {"messages": [USER], "tools": [TOOL], "tool_choice": "none", "own": 1},
        {"messages": [USER, ASKED, ANSWERED]},
        {"messages": [USER], "add_special_tokens": True},
    ):
        yield post("/chat_tokenize", body)
    for body in cases(
        {"prompt": 5},
        {"prompt": "a", "add_special_tokens": "x"},
        {"prompt": "a", "return_token_strs": True, "add_special_tokens": None},
        {"messages": [USER], "tools": [TOOL], "return_token_strs": False},
        {"messages": 5},
    ):
        yield post("/tokenize", body)
    for tokens in (5, [5, "x"], [-1], [1 << 31], [(1 << 31) - 1], []):
        yield post("/detokenize", {"tokens": tokens, "own": 1})


def odd_scores() -> Iterator[Step]:
    of = {"model": "SharedWords"}
    for more in cases(
        {"query": ""},
        {"query": None},
        {"documents": []},
        {"documents": [5]},
        {"documents": [{"x": "a"}]},
        {"documents": ["", "a"]},
        {"documents": None},
        {"top_n": 0},
        {"top_n": 1, "return_documents": False},
        {"top_n": -1},
        {"truncate_prompt_tokens": 1, "truncation_side": "left"},
        {"truncate_prompt_tokens": -1, "truncation_side": "up"},
        {"use_activation": False, "own": 1, "user": "u"},
        {"model": "ReverseModel"},
        {"model": "Angles", "query": "0", "documents": ["90", "60", "0"]},
    ):
        for path in ("/rerank", "/models/SharedWords/rerank"):
            yield post(path, {**of, "query": "a b", "documents": ["a", "b a"], **more})
    for more in cases(
        {"query": ""},
        {"texts": []},
        {"texts": [5]},
        {"texts": ["", "a"]},
        {"truncate": True, "truncation_direction": "Left"},
        {"truncation_direction": "left"},
        {"raw_scores": "x"},
        {"return_text": True, "own": 1},
        {"model": "none"},
    ):
        yield post("/rerank", {**of, "query": "a b", "texts": ["a", "b a"], **more})
    for more in cases(
        {"text_2": []},
        {"text_1": ["a", "b"], "text_2": ["a"]},
        {"text_1": ["a", "b"], "text_2": ["b", "b"]},
        {"text_1": None},
        {"text_1": [""]},
        {"data_1": "a", "data_2": "b", "text_1": None, "text_2": None},
        {"queries": "a", "items": ["a", "b"], "text_1": None},
        {"use_activation": False, "truncate_prompt_tokens": 2, "own": 1},
    ):
        yield post("/score", {**of, "text_1": "a", "text_2": ["a", "b"], **more})
    for more in cases(
        {"inputs": []},
        {"inputs": [""]},
        {"inputs": [5]},
        {"inputs": None},
        {"normalize": False},
        {"normalize": False, "dimensions": 2},
        {"dimensions": 1},
        {"dimensions": 4},
        {"truncate": True, "truncation_direction": "Right", "prompt_name": "p", "own": 1},
        {"model": "none"},
        {"model": "SharedWords"},
    ):
        yield post("/embed", {"inputs": "a b", **more})
    for more in cases(
        {"input": ""},
        {"input": []},
        {"input": [[]]},
        {"input": [""]},
        {"input": [1, "a"]},
        {"input": [[1], "a"]},
        {"input": [-1]},
        {"encoding_format": "base64"},
        {"encoding_format": "int8"},
        {"dimensions": 4},
        {"dimensions": 2, "encoding_format": "float"},
        {"truncate_prompt_tokens": 3, "truncation_side": "right", "prompt_name": "p", "user": "u", "own": 1},
        {"model": "SharedWords"},
    ):
        yield post("/v1/embeddings", {"input": "a b", **more})


GROUPS = (
    lists,
    bodies,
    names,
    messages,
    messages_of_anthropic,
    messages_of_ollama,
    tools,
    bodies_of_lmi,
    control_of_lmi,
    parameters_of_tgi,
    odd_scores,
)


@pytest.mark.parametrize("steps", GROUPS, ids=lambda each: each.__name__)
async def test_rare_requests(server: TextServer, steps: Callable[[], Iterator[Step]]) -> None:
    found: list[str] = []
    for step in steps():
        found += (await exchange(server, step))[1]
    check(f"rare {steps.__name__}", found)


# --- a server that rejects what has no effect ------------------------------------------------------------------------

_FIELDS: tuple[tuple[str, Any], ...] = (
    ("own", 1),
    ("user", "u"),
    ("model_name", "other"),
    ("keep_alive", 5),
    ("shift", True),
    ("verbosity", "low"),
    ("stop", True),
    ("metadata", {"a": "b"}),
    ("service_tier", "flex"),
    ("prediction", {}),
    ("include", ["file_search_call.results"]),
    ("speed", "fast"),
    ("thinking", {"type": "adaptive", "budget_tokens": 5}),
    ("context_management", {"edits": [{"type": "clear_thinking_x"}]}),
)


def _strict_steps() -> Iterator[Step]:
    for path, body in REQUESTS.items():
        yield post(path, body)
        for name, value in _FIELDS:
            yield post(path, {**body, name: value})
        inner = "options" if path.startswith("/api/") else "parameters"
        for name, value in (("own", 1), ("watermark", True), ("num_ctx", 5), ("stop", True), ("details", True)):
            yield post(path, replaced(body, (inner, name), value))
    tool = {**TOOL, "defer_loading": True}
    yield post(
        "/v1/messages", {**REQUESTS["/v1/messages"], "tools": [{"name": "f", "input_schema": {}, "async": True}]}
    )
    yield post("/v1/chat/completions", {**REQUESTS["/v1/chat/completions"], "tools": [tool]})
    yield post("/invocations", {"inputs": ["a"], "parameters": {"details": True, "n": 2}})
    yield post("/models?model_name=none&engine=Python", None)
    yield post("/predictions/double", {"inputs": [1], "own": 1})
    yield post("/predictions/double", {"inputs": [1], "model_name": "other"})
    yield get("/v1/responses/resp_a")
    yield post("/v1/responses", {"input": "a", "previous_response_id": "resp_a"})
    yield post("/v1/responses", {"input": [{"type": "item_reference", "id": "msg_a"}]})


async def test_strict_parameters(strict: TextServer) -> None:
    found: list[str] = []
    for step in _strict_steps():
        response, lines = await exchange(strict, step)
        found += [shortened(line) for line in (lines if response.status >= 400 else lines[:2])]
    check("rare strict", found)


# --- stored responses ------------------------------------------------------------------------------------------------


async def test_stored_responses(server: TextServer) -> None:
    """Create, refer to, list, cancel and delete; ids are those of the responses before."""
    found: list[str] = []

    async def send(method: str, path: str, body: Any = None) -> Any:
        response, text = await exchange(server, (method, path, body, {}))
        found.extend(text)
        return json.loads(response.body) if response.body.startswith(b"{") else None

    flat = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    first = await send("POST", "/v1/responses", {"input": says(f"a {CALL}"), "tools": [flat], "instructions": "i"})
    call_id = next(item["call_id"] for item in first["output"] if item["type"] == "function_call")
    output = {"type": "function_call_output", "call_id": call_id, "output": "rain"}
    after = {"previous_response_id": first["id"], "max_output_tokens": 2}
    second = await send("POST", "/v1/responses", {**after, "input": [output]})
    await send("POST", "/v1/responses", {**after, "input": [{**output, "call_id": "other"}]})
    message = first["output"][0]
    for reference in cases(
        {"type": "item_reference", "id": message["id"]},
        {"id": message["id"]},
        {"type": "item_reference", "id": "msg_missing"},
        {"type": "item_reference"},
    ):
        await send("POST", "/v1/responses", {"input": [USER, reference], "max_output_tokens": 2})
        await send("POST", "/v1/responses/input_tokens", {"input": [USER, reference]})
    twice = [{"type": "item_reference", "id": message["id"]}] * 2
    await send("POST", "/v1/responses", {"input": twice})
    await send("POST", "/v1/responses", {**after, "input": twice[:1]})
    await send("POST", "/v1/responses/input_tokens", {"previous_response_id": first["id"], "input": [output]})
    path = f"/v1/responses/{second['id']}"
    for query in ("", "?stream=false", "?stream=True", "?stream=", "?stream=1"):
        await send("GET", path + query)
    items = await send("GET", f"{path}/input_items?order=asc&limit=1")
    for query in cases(
        "",
        "?order=asc",
        "?limit=2",
        f"?order=asc&after={items['last_id']}",
        f"?limit=1&after={items['last_id']}",
        "?after=none",
        "?order=up",
        "?limit=0",
        "?limit=100",
        "?limit=101",
        "?limit=x",
    ):
        await send("GET", f"{path}/input_items{query}")
    await send("POST", f"{path}/cancel")
    await send("DELETE", path)
    for method, rest in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
        await send(method, path + rest)
    await send("POST", "/v1/responses/compact", {})
    unstored = await send("POST", "/v1/responses", {"input": "a", "store": False, "max_output_tokens": 1})
    await send("GET", f"/v1/responses/{unstored['id']}")
    for given in cases(
        [5],
        [],
        "",
        5,
        [{}],
        [{"type": "message", "role": "user"}],
        [{"type": "file", "role": "user", "content": "a"}],
        [{"role": "critic", "content": "a"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [5]}],
        [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}],
        [{"role": "user", "content": [{"type": "input_image"}, {"type": "input_text", "text": "t"}]}],
        [{"role": "user", "content": [{"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"}, 5]}],
        [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, USER],
        [{"role": "assistant", "content": [{"type": "input_image"}]}],
        [{"type": "reasoning", "summary": 5}],
        [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}]},
            {"role": "assistant", "content": "c"},
        ],
        [{"type": "function_call", "call_id": "call_t", "name": "f", "arguments": 5}],
        [
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}]},
            {"type": "function_call", "call_id": "call_t", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "call_u", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_u", "output": [{"type": "input_text", "text": "é"}]},
            {"type": "function_call_output", "call_id": "call_t", "output": 5},
        ],
        [
            {"role": "system", "content": "s"},
            {"role": "developer", "content": "d"},
            USER,
            {"role": "system", "content": "t"},
        ],
    ):
        await send("POST", "/v1/responses", {"input": given, "max_output_tokens": 2, "store": False})
    for more in cases(
        {"background": True},
        {"background": False},
        {"truncation": "auto"},
        {"truncation": "always"},
        {"include": ["message.output_text.logprobs", "file_search_call.results"], "top_logprobs": 1},
        {"include": "x"},
        {"text": {"format": {"type": "json_object"}, "verbosity": "low"}},
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}}},
        {"text": {"format": {"type": "xml"}}},
        {"reasoning": {"effort": 5}},
        {"reasoning": {"effort": "none", "summary": "auto", "context": "auto"}},
        {"chat_template_kwargs": {"enable_thinking": True}, "reasoning": {"effort": "none"}},
        {"metadata": {"a": "b"}, "user": "u", "max_tool_calls": 1, "prompt_cache_key": "k", "service_tier": "auto"},
        {"service_tier": "flex", "prompt": {"id": "p"}},
        {"conversation": "c"},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"instructions": ""},
        {"previous_response_id": "resp_missing"},
        {"model": "none"},
        {"own": 1},
    ):
        await send("POST", "/v1/responses", {"input": "a b", "max_output_tokens": 1, "store": False, **more})
    check("rare stored responses", found)


# --- threads of messages ---------------------------------------------------------------------------------------------


async def test_threads(server: TextServer) -> None:
    found: list[str] = []

    async def send(thread: Any, *messages: Any, **more: Any) -> str:
        body = {"max_tokens": 2, "messages": [*messages], "thread": thread, **more}
        response, text = await exchange(server, post("/v1/messages", body, VERSION))
        found.extend(text)
        return str(response.json.get("id", "")) if response.body.startswith(b"{") else ""

    def following(id_: str) -> dict[str, str]:
        return {"type": "continue", "previous_message_id": id_}

    tool = {"name": "f", "input_schema": {"type": "object"}}
    blocks = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}, TEXT]
    first = await send({"type": "create"}, USER, system="s", tools=[tool])
    second = await send(following(first), {"role": "user", "content": blocks})
    third = await send(following(second), USER, {"role": "assistant", "content": "so "})
    await send(following(third), USER, {"role": "assistant", "content": [TEXT, {**TEXT, "text": "u"}]})
    await send(following(first), USER, stream=True)
    await send({"type": "create"}, USER, stream=True)
    for thread in (
        *cases(None, False, True, 5, {}, {"type": "create", "own": 1}, {"type": "continue"}, {"type": "fork"}),
        *(following(id_) for id_ in cases("", 5, "msg_missing")),
    ):
        await send(thread, USER)
    await send(following(first), USER, system="t")
    await send(following(first), USER, tools=[])
    await send(following(first))
    await send(following(first), {"role": "robot", "content": "a"})
    await send(following(first), USER, 5)
    await send(following(first), messages=5)
    check("rare threads", found)


async def test_threads_of_a_server_without_a_store(strict: TextServer) -> None:
    found: list[str] = []
    for thread in cases(None, {"type": "create"}, {"type": "continue", "previous_message_id": "msg_a"}, 5):
        body = {"max_tokens": 2, "messages": [USER], "thread": thread}
        found += (await exchange(strict, post("/v1/messages", body, VERSION)))[1]
    check("rare threads without a store", found)


# --- LMI: settings of models, arrays and embeddings ------------------------------------------------------------------

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "usual": {},
    "tgi": {"tgi_compat": True},
    "dynamic": {"rolling_batch": "disable"},
    "streaming": {"rolling_batch": "disable", "enable_streaming": True},
    "json": {"output_formatter": "json"},
    "lines": {"output_formatter": "jsonlines"},
    "events": {"output_formatter": "sse"},
    "text": {"output_formatter": "none"},
    "chat": {"output_formatter": "jsonlines_chat_completion"},
    "infer": {"infer_do_sample": True},
    "bedrock": {"bedrock_compat": True},
    "trtllm": {"rolling_batch": "trtllm"},
}


def bodies_by_settings() -> Iterator[Any]:
    yield {"inputs": "a b"}
    yield {"inputs": "a b", "stream": True}
    yield {"inputs": ["a b", "c"], "stream": True}
    yield {"inputs": ["a b", "c"], "parameters": {"max_new_tokens": 1, "details": True}}
    yield {"inputs": "a b", "parameters": {"temperature": 0.5, "details": True, "decoder_input_details": True}}
    yield {"inputs": "a b", "parameters": {"do_sample": True, "seed": 5, "n": 2, "max_new_tokens": 2}}
    yield {"inputs": "a b", "parameters": {"top_n_tokens": 1, "prompt_logprobs": 1, "details": True}, "stream": True}
    yield {"inputs": "a b", "parameters": {"output_formatter": "sse", "return_full_text": True}}
    yield {"inputs": "a b", "parameters": {"output_formatter": "none"}, "stream": True}
    yield {"inputs": "a !fault b"}
    yield {"inputs": "a !fault b", "stream": True}
    yield {"inputs": "!fault a"}
    yield {"inputs": 5}
    yield {"inputs": "a", "parameters": {"max_new_tokens": 0}}
    yield {"prompt": "a b", "max_tokens": 1}
    yield {"prompt": "a b", "max_gen_len": 1, "stream": True}
    yield {"prompt": "a !fault b", "stream": True}
    yield {"prompt": "", "temperature": 0.25, "top_p": 0.5}
    yield {"messages": [USER], "max_tokens": 1}
    yield {"messages": [USER], "max_tokens": 2, "stream": True}


async def test_settings_of_lmi(tmp_path: Path) -> None:
    tests = Path(__file__).parents[3]
    for name, settings in SETTINGS.items():
        (tmp_path / name).mkdir()
        code = f"import sys\nsys.path.insert(0, {str(tests)!r})\nfrom text_server import ReverseModel\n"
        (tmp_path / name / "model.py").write_text(f"{code}\n\nclass Custom(ReverseModel):\n    pass\n")
        lines = [f"{each} = {json.dumps(value)}" for each, value in settings.items()]
        table = "\n".join(["[model]", "placement = 'inline'", "[model.protocols.lmi]", *lines, ""])
        (tmp_path / name / "dragoman.toml").write_text(table)
    found: list[str] = []
    async with serve(str(tmp_path)) as server:
        usual: dict[str, list[str]] = {}
        for name in SETTINGS:
            for body in bodies_by_settings():
                _, text = await exchange(server, post(f"/predictions/{name}", body))
                sent, *outcome = (line.replace(f'"{name}"', '"MODEL"') for line in text)
                key = sent.replace(f"/{name} ", "/MODEL ")
                # of each model only what differs from the first one
                if usual.setdefault(key, outcome) != outcome or name == "usual":
                    found += [f"{sent}", *outcome]
    check("rare settings of lmi", found)


def arrays() -> Iterator[Step]:
    for body in (
        *cases(5, "a", [], {}, [1.5], [[1.5, 2.0]], {"x": [1]}, {"y": [1]}, {"x": [1], "y": [1]}, {"inputs": [1]}),
        *cases({"instances": [{"x": 1}, {"x": 2}]}, {"instances": [{"x": 1}, {"z": 2}]}, {"data": 1}, {"inputs": None}),
        *cases({"inputs": {"x": [1]}, "parameters": {"a": 1}}, {"inputs": [1], "parameters": {"a": {}}}),
        *cases({"model_name": "double", "x": [1]}, {"model_name": "other", "inputs": [1]}, {"inputs": [1], "own": 1}),
    ):
        yield post("/predictions/double", body)
        yield post("/predictions/joined", body)
        yield post("/predictions/Upper", body)
    yield post("/predictions/joined", {"a": [1, 2], "b": [0.5, 1.5]})
    yield post("/predictions/joined", {"instances": [{"a": 1, "b": 0.5}]})
    for kind in ("text/plain", "application/octet-stream", "text/csv", "tensor/npz", "application/x-npy", "image/png"):
        for model in ("double", "joined", "Upper", "Vectors"):
            yield post(f"/predictions/{model}", b"ab", {"content-type": kind})
            yield post(f"/predictions/{model}", b"", {"content-type": kind})
    yield post("/predictions/Upper", b"\xff", {"content-type": "text/plain"})
    for body in cases(
        {"inputs": "abc"},
        {"inputs": ["abc", "d"]},
        {"inputs": []},
        {"inputs": ""},
        {"inputs": ["a", ""]},
        {"inputs": ["a", 5]},
        {"inputs": "long"},
        {"inputs": "a", "parameters": {}, "own": 1},
        {"inputs": "a", "model_name": "other"},
        {"inputs": [[1.0]]},
        b"{",
    ):
        yield post("/predictions/Vectors", body)


async def test_arrays_and_embeddings_of_lmi() -> None:
    found: list[str] = []
    async with serve(double, joined, Upper, Vectors, placement="inline") as server:
        for step in arrays():
            found += (await exchange(server, step))[1]
    check("rare arrays", found)
