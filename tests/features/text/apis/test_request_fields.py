"""Each field of a request is applied, ignored and named, or rejected: state and other kinds of output are rejected."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from newest_clients.request_types import fields_of, request_fields, undescribed_fields
from text_server import TextServer, serve

CHAT = {"model": "ReverseModel", "messages": [{"role": "user", "content": "a b"}]}
MESSAGE = {**CHAT, "max_tokens": 2}
RESPONSE = {"model": "ReverseModel", "input": "a b"}
GENERATE = {"model": "ReverseModel", "prompt": "a b", "stream": False}


@pytest.fixture
async def server() -> AsyncIterator[TextServer]:
    async with serve() as server:
        yield server


async def test_each_field_of_the_clients_is_in_a_table(server: TextServer) -> None:
    assert len({name for _, _, name, _ in request_fields()}) > 20  # the packages are installed
    assert undescribed_fields((await server.request("GET", "/openapi.json")).json) == []


UNSUPPORTED: list[tuple[str, dict[str, Any], str, Any]] = [
    ("/v1/chat/completions", CHAT, "audio", {"voice": "alloy", "format": "wav"}),
    ("/v1/chat/completions", CHAT, "modalities", ["text", "audio"]),
    ("/v1/chat/completions", CHAT, "functions", [{"name": "f"}]),
    ("/v1/chat/completions", CHAT, "function_call", {"name": "f"}),
    ("/v1/chat/completions", CHAT, "web_search_options", {}),
    ("/v1/chat/completions", CHAT, "moderation", {"model": "omni"}),
    ("/v1/responses", RESPONSE, "prompt", {"id": "pmpt_1"}),
    ("/v1/responses", RESPONSE, "background", True),
    ("/v1/responses", RESPONSE, "background_options", {"completion_window": "2h"}),
    ("/v1/responses", RESPONSE, "context_management", [{"type": "compaction"}]),
    ("/v1/responses", RESPONSE, "moderation", {"model": "omni"}),
    ("/v1/messages", MESSAGE, "container", "container_1"),
    ("/v1/messages", MESSAGE, "mcp_servers", [{"type": "url", "name": "a", "url": "https://a"}]),
    ("/v1/messages", MESSAGE, "compaction", {"type": "summarize"}),
    ("/v1/messages", MESSAGE, "context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}),
    ("/v1/messages", MESSAGE, "output_format", {"type": "json_schema", "schema": {}}),
    ("/v1/messages/count_tokens", CHAT, "mcp_servers", [{"type": "url", "name": "a", "url": "https://a"}]),
    ("/api/generate", GENERATE, "template", "{{ .Prompt }}"),
    ("/api/generate", GENERATE, "context", [1, 2]),
    ("/api/generate", GENERATE, "width", 512),
]


@pytest.mark.parametrize(("path", "body", "name", "value"), UNSUPPORTED, ids=lambda each: str(each)[:40])
async def test_state_and_other_outputs_are_rejected(
    server: TextServer, path: str, body: dict[str, Any], name: str, value: Any
) -> None:
    response = await server.post(path, {**body, name: value})
    assert response.status == 400
    error = response.json["error"]
    message = error if isinstance(error, str) else error["message"]
    assert message.startswith(f"`{name}` ")
    if path.startswith(("/v1/chat", "/v1/completions", "/v1/responses")):
        assert error["param"] == name


NEUTRAL: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT, {"modalities": ["text"], "audio": None, "function_call": "none", "store": False}),
    (
        "/v1/chat/completions",
        CHAT,
        {"user": "u", "metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "k"},
    ),
    ("/v1/responses", RESPONSE, {"background": False, "conversation": None, "service_tier": "default"}),
    ("/v1/messages", MESSAGE, {"mcp_servers": [], "container": None, "thread": None, "speed": "standard"}),
    ("/v1/messages", MESSAGE, {"metadata": {"user_id": "u"}, "cache_control": {"type": "ephemeral"}}),
    ("/api/generate", GENERATE, {"suffix": "", "template": "", "context": []}),
]


@pytest.mark.parametrize(("path", "body", "more"), NEUTRAL)
async def test_values_that_ask_for_nothing_are_accepted(
    server: TextServer, path: str, body: dict[str, Any], more: dict[str, Any]
) -> None:
    response = await server.post(path, {**body, **more})
    assert response.status == 200
    assert "x-ignored-parameters" not in response.headers


IGNORED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT, {"store": True, "service_tier": "flex", "verbosity": "low", "prediction": {"a": 1}}),
    ("/v1/responses", RESPONSE, {"text": {"verbosity": "low"}, "reasoning": {"effort": "low", "summary": "auto"}}),
    ("/v1/responses", RESPONSE, {"include": ["reasoning.encrypted_content"], "service_tier": "flex"}),
    ("/v1/messages", MESSAGE, {"speed": "fast", "inference_geo": "eu", "output_config": {"task_budget": {"total": 9}}}),
    ("/v1/messages", MESSAGE, {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
    ("/v1/messages", {**CHAT, "max_tokens": 2048}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
    ("/api/generate", GENERATE, {"options": {"num_ctx": 4096, "mirostat": 2}}),
]
NAMED = (
    "store, service_tier, verbosity, prediction",
    "text.verbosity, reasoning.summary",
    "service_tier, include.reasoning.encrypted_content",
    "speed, inference_geo, output_config.task_budget",
    "context_management",
    "thinking.budget_tokens",
    "num_ctx, mirostat",
)


@pytest.mark.parametrize(("sent", "named"), [*zip(IGNORED, NAMED, strict=True)], ids=NAMED)
async def test_knobs_without_effect_are_named(
    server: TextServer, sent: tuple[str, dict[str, Any], dict[str, Any]], named: str
) -> None:
    path, body, more = sent
    response = await server.post(path, {**body, **more})
    assert (response.status, response.headers["x-ignored-parameters"]) == (200, named)


async def test_knobs_without_effect_are_rejected_in_strict_mode() -> None:
    async with serve(strict_parameters=True) as server:
        for (path, body, more), names in zip(IGNORED, NAMED, strict=True):
            response = await server.post(path, {**body, **more})
            error = response.json["error"]
            message = error if isinstance(error, str) else error["message"]
            assert response.status == 400
            assert message.startswith("parameters that have no effect here: ")
            assert f"`{names.split(', ')[0]}`" in message


def test_the_fields_of_tools_are_known() -> None:
    """Tools are objects inside of a list, which the tables do not describe."""
    from anthropic.types import beta
    from openai.types.responses import FunctionToolParam
    from openai.types.shared_params import FunctionDefinition

    applied = {"name", "type", "description", "input_schema", "parameters", "strict"}
    without_effect = {"async", "defer_loading", "input_examples", "output_schema"}  # named in the response
    hints = {"cache_control", "eager_input_streaming"}
    fields = fields_of(beta.BetaToolParam) | fields_of(FunctionToolParam) | fields_of(FunctionDefinition)
    assert fields <= applied | without_effect | hints | {"allowed_callers"}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_tools_that_only_programs_may_call_are_rejected(server: TextServer, path: str) -> None:
    tool: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}
    if path == "/v1/responses":
        tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    body = MESSAGE if path == "/v1/messages" else RESPONSE
    response = await server.post(path, {**body, "tools": [{**tool, "allowed_callers": ["programmatic"]}]})
    assert response.status == 400
    assert response.json["error"]["message"].startswith("`tools[0]`: `allowed_callers` ")
    more = {"allowed_callers": ["direct", "programmatic"], "defer_loading": True}
    response = await server.post(path, {**body, "tools": [{**tool, **more}]})
    assert (response.status, response.headers["x-ignored-parameters"]) == (200, "tools.defer_loading")
