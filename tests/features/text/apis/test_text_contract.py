"""What the text APIs describe, and what each field of a request does, by value: as kept in the folder `contract`.

Set DRAGOMAN_TEST_WRITE=1 to write the files anew after a change that is meant, and read what `git diff` shows.
"""

import json
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from msgspec import structs

from dragoman.core.text import Chat, Grammar, InfillPrompt
from rest.rest_server import RawResponse
from text_server import ReverseModel, TextServer, serve

from .test_scoring import Angles, SharedWords

pytestmark = pytest.mark.asyncio(loop_scope="module")

FOLDER = Path(__file__).parent / "contract"
USER = {"role": "user", "content": "a b"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TGI = {"inputs": "a b", "parameters": {"max_new_tokens": 2}}
# A valid request of each route with fields.
REQUESTS: Mapping[str, Any] = {
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 2},
    "/v1/completions": {"prompt": "a b", "max_tokens": 2},
    "/v1/responses": {"input": "a b", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "a b"},
    "/v1/embeddings": {"input": "a b"},
    "/embed": {"inputs": "a b"},
    "/v1/messages": {"messages": [USER], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/api/chat": {"model": "ReverseModel", "messages": [USER], "stream": False, "options": {"num_predict": 2}},
    "/api/generate": {"model": "ReverseModel", "prompt": "a b", "stream": False, "options": {"num_predict": 2}},
    "/api/embed": {"model": "ReverseModel", "input": "a b"},
    "/api/show": {"model": "ReverseModel"},
    "/rerank": {"model": "SharedWords", "query": "a", "documents": ["a", "b"]},
    "/score": {"model": "SharedWords", "text_1": "a", "text_2": ["a", "b"]},
    "/generate": TGI,
    "/tokenize": {"inputs": "a b"},
    "/chat_tokenize": {"messages": [USER]},
    "/detokenize": {"tokens": [1, 2]},
    "/invocations": {**TGI, "stream": False},
    "/v2/models/ReverseModel/generate": {"text_input": "a b", "parameters": {"max_tokens": 2}},
}
FieldPath = tuple[str, ...]


def check(file: str, found: Sequence[str]) -> None:
    """Compare lines with those of a kept file."""
    path = FOLDER / f"{file}.txt"
    if "DRAGOMAN_TEST_WRITE" in os.environ:
        path.write_text("".join(f"{line}\n" for line in found))
    assert found == path.read_text().splitlines()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[TextServer]:
    async with serve(ReverseModel, SharedWords, Angles, default_model="ReverseModel") as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def document(server: TextServer) -> Any:
    return (await server.request("GET", "/openapi.json")).json


# --- the document --------------------------------------------------------------------------------------------


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def operations(document: Any, tag: str) -> Iterator[str]:
    """Yield what is described of each operation; each description of a response or field in full where it is new."""
    known: set[str] = set()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if operation.get("tags") != [tag]:
                continue
            yield f"{method.upper()} {path}: {operation.get('summary')}; {compact(operation.get('externalDocs'))}"
            parts = {"parameters": operation.get("parameters", []), **operation["responses"]}
            for kind, content in operation.get("requestBody", {}).get("content", {}).items():
                parts |= {f"{kind} {name}": each for name, each in described(content.get("schema", {}), document)}
            for name, part in parts.items():
                line = f"{name} {compact(part)}"
                yield f"  {line}" if line not in known else f"  {name}"
                known.add(line)


def described(schema: Any, document: Any) -> Iterator[tuple[str, Any]]:
    """Yield the schema of a body without its properties, and each of these."""
    schema = resolved(schema, document)
    yield "body", {name: value for name, value in schema.items() if name != "properties"}
    yield from schema.get("properties", {}).items()


def resolved(schema: Any, document: Any) -> Any:
    reference = schema.get("$ref")
    return document["components"]["schemas"][reference.rpartition("/")[2]] if reference else schema


TAGS = ("OpenAI", "Anthropic", "Ollama", "TGI", "LMI")


async def test_every_api_is_described(document: Any) -> None:
    tags = {
        tag for methods in document["paths"].values() for operation in methods.values() for tag in operation["tags"]
    }
    assert set(TAGS) <= tags


@pytest.mark.parametrize("tag", TAGS)
async def test_descriptions_of_routes(document: Any, tag: str) -> None:
    check(f"routes of {tag}", [*operations(document, tag)])


# --- the fields ----------------------------------------------------------------------------------------------


def fields(schema: Any, document: Any, depth: int = 3) -> Iterator[tuple[FieldPath, Any]]:
    """Yield path and schema of each field of an object."""
    schema = resolved(schema, document)
    for part in schema.get("anyOf", ()):
        yield from fields(part, document, depth)
    for name, part in schema.get("properties", {}).items():
        yield (name,), part
        if depth:
            yield from (((name, *path), each) for path, each in fields(part, document, depth - 1))


def values(schema: Any, document: Any) -> list[Any]:
    """Return values for a field: at both sides of its bounds, each choice, and some of other types."""
    schema = resolved(schema, document)
    found: list[Any] = []
    for part in (schema, *schema.get("anyOf", ())):
        part = resolved(part, document)
        found += part.get("enum", ())
        for name, inner, outer in (("inimum", 1, -1), ("aximum", -1, 1)):
            if f"m{name}" in part:
                found += [part[f"m{name}"], part[f"m{name}"] + outer]
            elif f"exclusiveM{name}" in part:
                found += [part[f"exclusiveM{name}"], part[f"exclusiveM{name}"] + inner * 0.25]
        kind = part.get("type")
        if kind == "string" and "enum" not in part:
            found += ["x"]
        elif kind == "boolean":
            found += [True, False]
        elif kind == "array":
            items = values(part.get("items", {}), document)[:1] or ["x"]
            found += [items, items * (part["maxItems"] + 1)] if "maxItems" in part else [items]
        elif kind == "object":
            found += [{}]
    found += ["!", 7, None] if found else ["!", 7, [], {}]
    return [value for at, value in enumerate(found) if compact(value) not in map(compact, found[:at])]


def replaced(body: Any, path: FieldPath, value: Any) -> Any:
    """Return the body with a value at a path, which is created where it is missing."""
    if not path:
        return value
    known = body if isinstance(body, dict) else {}
    return {**known, path[0]: replaced(known.get(path[0]), path[1:], value)}


# What differs from run to run.
VARIABLE = (
    (re.compile(rb'"(?:total_duration|load_duration|prompt_eval_duration|eval_duration)": ?\d+,?'), b""),
    (
        re.compile(
            rb"\b(chatcmpl|cmpl|resp|msg|call|toolu|fc|fco|ctc|ctco|item|rs|rerank|score|embd|modelperm)([-_])[0-9a-f]{8,}"
        ),
        rb"\1\2ID",
    ),
    (re.compile(rb'"(created|created_at|completed_at)": ?\d{10}'), rb'"\1":TIME'),
    (re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z"), b"TIME"),
    (re.compile(rb'"signature":"[0-9a-f]{32}"'), b'"signature":"ID"'),
    (re.compile(rb'"(request_id|id)": ?"(?:[0-9a-f]{9}|[0-9a-f]{16}-\d+|[0-9a-f-]{32,36})"'), rb'"\1":"ID"'),
)


def without_variable(body: bytes) -> str:
    for pattern, replacement in VARIABLE:
        body = pattern.sub(replacement, body)
    return body.decode()


def stable(response: RawResponse) -> str:
    """Return what a client gets; of an error its message, without the value that it repeats."""
    if response.status >= 400:
        error = response.json.get("error", response.json)
        return f"{response.status} {(error if isinstance(error, str) else error['message']).partition('; got ')[0]}"
    ignored = response.headers.get("x-ignored-parameters")
    text = shortened(without_variable(response.body).replace("\n", "\\n"))
    return f"{response.status} {text}" + (f" ignores {ignored}" if ignored else "")


def plain(value: Any) -> Any:
    """Return an object without the fields that have their default."""
    if isinstance(value, Chat | Grammar | InfillPrompt) or is_dataclass(value):
        fields: Any = fields_of(value) if is_dataclass(value) else structs.fields(value)
        pairs = [(field.name, getattr(value, field.name), field.default) for field in fields]
        return {name: plain(each) for name, each, default in pairs if each != default and each not in ((), {})}
    if isinstance(value, msgspec.Struct):
        return {name: plain(each) for name, each in structs.asdict(value).items()}
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(each) for each in value]
    if isinstance(value, frozenset | set):
        return sorted(map(str, value))
    return value if isinstance(value, str | int | float | None) else repr(value)


def shortened(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:150]} ... {text[-150:]}"


async def effect(server: TextServer, path: str, body: Any) -> tuple[str, Any]:
    """Send a request; return its response, and the calls that models saw."""
    model, other = server.model(), server.model("SharedWords")
    model.calls.clear()
    other.calls.clear()
    model.embedded = None
    response = stable(await server.post(path, body))
    return response, plain([*model.calls, *other.calls, *filter(None, [model.embedded])])


@pytest.mark.parametrize("path", REQUESTS)
async def test_effects_of_fields(server: TextServer, document: Any, path: str) -> None:
    name = {"/invocations": "/generate", "/v2/models/ReverseModel/generate": "/v2/models/{model}/generate"}
    operation = document["paths"][name.get(path, path)]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    usual = await effect(server, path, REQUESTS[path])
    found = [f"POST {path} {compact(REQUESTS[path])}", f"  {usual[0]}", f"  saw {compact(usual[1])}"]
    for field, part in dict(fields(schema, document)).items():
        outcomes: dict[str, list[str]] = {}
        for value in values(part, document):
            outcome = difference(usual, await effect(server, path, replaced(REQUESTS[path], field, value)))
            outcomes.setdefault(outcome, []).append(shortened(compact(value)))
        found.append(".".join(field))
        found += [f"  {' | '.join(same)}: {outcome}" for outcome, same in outcomes.items()]
    check(f"fields of {path.strip('/').replace('/', '_')}", found)


def difference(usual: tuple[str, Any], found: tuple[str, Any]) -> str:
    """Return the response and the calls; of a single call what differs."""
    (before, calls), (response, seen) = usual, found
    texts = [response.removeprefix(before).strip()] if response != before else []
    if len(calls) == len(seen) == 1:
        seen = changes(calls[0], seen[0])
    elif seen == calls:
        seen = []
    if seen:
        texts.append(f"saw {compact(seen)}")
    return " ".join(texts) or "as usual"


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that differ, with null for those that now have their default."""
    found = {name: after.get(name) for name in before | after if before.get(name) != after.get(name)}
    if "sampling" in found:
        found["sampling"] = changes(before["sampling"], after["sampling"])
    if "model_defaults" in found:
        old, new = before["model_defaults"], after["model_defaults"]
        removed = [f"-{name}" for name in old if name not in new]
        found["model_defaults"] = [*removed, *(f"+{name}" for name in new if name not in old)]
    return found


# --- whole exchanges -----------------------------------------------------------------------------------------

CALL = '<tool_call>{"name":"f","arguments":{"x":1}}</tool_call>'
CUSTOM = {"type": "custom", "custom": {"name": "c"}}
ASKED = {
    "role": "assistant",
    "tool_calls": [{"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
ASKED_IN_WORDS = {
    "role": "assistant",
    "tool_calls": [{"id": "t", "type": "custom", "custom": {"name": "c", "input": "i"}}],
}
ANSWERED = {"role": "tool", "tool_call_id": "t", "content": "rain"}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
VERSION = {"anthropic-version": "2023-06-01"}
Exchange = tuple[str, Any]


def says(text: str) -> list[Any]:
    """Messages that the model completes with this text and the word "user:"."""
    return [{"role": "user", "content": " ".join(text.split(" ")[::-1])}]


def chats() -> Iterator[Exchange]:
    several: list[dict[str, Any]] = [
        {"messages": says("one two"), "logprobs": True, "top_logprobs": 2},
        {"messages": says("one two"), "n": 2, "max_tokens": 2},
        {"messages": says("one two"), "stop": ["two"], "user": "u"},
        {"messages": says(f"Well. {CALL}"), "tools": [TOOL], "tool_choice": "auto"},
        {"messages": says(f"{CALL} {CALL}"), "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        {"messages": says("<think> a </think> b"), "reasoning_effort": "low"},
        {"messages": says("<think> a </think> b"), "include_reasoning": False},
        {"messages": says("é 水"), "logprobs": True, "return_token_ids": True, "return_tokens_as_token_ids": True},
        {"messages": says("!fault b")},
        {"messages": says("a !fault b")},
    ]
    for body in several:
        yield "/v1/chat/completions", body
        yield "/v1/chat/completions", {**body, "stream": True, "stream_options": {"include_usage": True}}
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    for messages in (
        [USER, ASKED, ANSWERED, USER],
        [USER, ASKED_IN_WORDS, ANSWERED],
        [{"role": "system", "content": "s"}, {"role": "developer", "content": [{"type": "text", "text": "d"}]}, USER],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, image], "name": "me"}],
        [USER, {"role": "assistant", "content": "c", "reasoning_content": "r"}],
        [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
    ):
        yield "/v1/chat/completions", {"messages": messages}
    for more in (
        {"response_format": FORMAT},
        {"response_format": {"type": "json_object"}},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tools": [CUSTOM]},
        {"chat_template_kwargs": {"x": 1}, "add_generation_prompt": False, "continue_final_message": True},
        {"guided_regex": "[ab]+"},
        {"guided_json": SCHEMA},
        {"guided_choice": ["a", "b"]},
        {"min_tokens": 1, "max_completion_tokens": 3, "stop_token_ids": [1], "logit_bias": {"5": 1}},
        {"model": "pirate"},
        {"model": "ReverseModel:pirate"},
    ):
        yield "/v1/chat/completions", {"messages": [USER], **more}


def completions() -> Iterator[Exchange]:
    for body in (
        {"prompt": "a b", "logprobs": 2},
        {"prompt": ["a b", "c"], "n": 2, "max_tokens": 2},
        {"prompt": "a b", "echo": True, "max_tokens": 1, "logprobs": 1},
        {"prompt": [[1, 2], [3]], "return_token_ids": True},
        {"prompt": "a", "suffix": "b"},
        {"prompt": "a !fault b"},
        {"prompt": "a b c", "stop": "b"},
    ):
        yield "/v1/completions", body
        yield "/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}}
    yield "/v1/completions", {"prompt": "a b", "best_of": 2, "max_tokens": 2, "prompt_logprobs": 1}
    yield "/v1/completions", {"prompt": "a", "echo": True, "max_tokens": 0, "logprobs": 1}
    for inputs in ("a b", ["a", "b"], [1, 2], [[1], [2, 3]]):
        yield "/v1/embeddings", {"input": inputs}
    yield "/v1/embeddings", {"input": "a", "encoding_format": "base64", "dimensions": 2}
    for body in ({"prompt": "a b", "return_token_strs": True}, {"messages": [USER], "add_special_tokens": True}):
        yield "/tokenize", body
    of: dict[str, Any] = {"model": "ReverseModel", "other": 1}
    for body in ({"prompt": "a", "add_special_tokens": False}, {"messages": [USER], "return_token_strs": True}):
        yield "/tokenize", {**body, **of}
    yield "/detokenize", {"tokens": [1], **of}
    yield "/models/ReverseModel/v1/completions", {"prompt": "a"}


def responses() -> Iterator[Exchange]:
    tools = [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}, {"type": "custom", "name": "c"}]
    item = {"type": "function_call", "call_id": "t", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "t", "output": "rain"}
    for body in (
        {"input": says("one two")},
        {"input": says("one two"), "include": ["message.output_text.logprobs"], "top_logprobs": 1},
        {"input": says("one two"), "max_output_tokens": 1, "instructions": "i", "metadata": {"a": "b"}},
        {"input": says(f"Well. {CALL} So."), "tools": tools},
        {"input": says("<think> a </think> b"), "reasoning": {"effort": "high", "summary": "auto"}},
        {"input": says("a !fault b"), "store": False},
    ):
        yield "/v1/responses", body
        yield "/v1/responses", {**body, "stream": True}
    for given in (
        [USER, item, output],
        [USER, {**item, "type": "custom_tool_call", "input": "i"}, {**output, "type": "custom_tool_call_output"}],
        [{"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]}, USER],
        [{"role": "developer", "content": "d"}, {"role": "user", "content": [{"type": "input_text", "text": "t"}]}],
        [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t"}]}, USER],
        [{"role": "user", "content": [{"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"}]}],
    ):
        yield "/v1/responses", {"input": given}
    for more in (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
        {"tools": tools, "tool_choice": {"type": "function", "name": "f"}},
        {"tools": tools, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [tools[0]]}},
        {"truncation": "auto", "temperature": 0, "top_p": 0.5, "parallel_tool_calls": False},
    ):
        yield "/v1/responses", {"input": "a b", **more}


def messages() -> Iterator[Exchange]:
    tools = [{"name": "f", "description": "d", "input_schema": SCHEMA}]
    used = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"x": 1}}]}
    for body in (
        {"messages": says("one two")},
        {"messages": says("one two"), "stop_sequences": ["two"], "system": "s"},
        {"messages": says("one two"), "max_tokens": 1},
        {"messages": says(f"Well. {CALL}"), "tools": tools},
        {"messages": says("<think> a </think> b"), "thinking": {"type": "adaptive"}},
        {"messages": says("a !fault b")},
    ):
        yield "/v1/messages", {"max_tokens": 9, **body}
        yield "/v1/messages", {"max_tokens": 9, **body, "stream": True}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
    text = {"type": "text", "text": "t"}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text], "is_error": True}
    for given in (
        [USER, used, {"role": "user", "content": [result, text]}],
        [{"role": "user", "content": [text, image]}],
        [USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "r", "signature": "s"}, text]}, USER],
        [USER, {"role": "assistant", "content": "start"}],
    ):
        yield "/v1/messages", {"max_tokens": 9, "messages": given}
    for more in (
        {"tools": tools, "tool_choice": {"type": "tool", "name": "f"}},
        {"tools": tools, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        {"tools": tools, "tool_choice": {"type": "none"}},
        {
            "system": [text, text],
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"},
        },
    ):
        yield "/v1/messages", {"max_tokens": 9, "messages": [USER], **more}
        yield "/v1/messages/count_tokens", {"messages": [USER], **more}


def ollama() -> Iterator[Exchange]:
    base = {"model": "ReverseModel"}
    for body in (
        {"messages": says("one two"), "logprobs": True, "top_logprobs": 1},
        {"messages": says("one two"), "options": {"num_predict": 1}},
        {"messages": says(f"Well. {CALL}"), "tools": [TOOL]},
        {"messages": says("<think> a </think> b"), "think": True},
        {"messages": says("<think> a </think> b"), "think": "high"},
        {"messages": says("a !fault b")},
    ):
        yield "/api/chat", {**base, **body, "stream": False}
        yield "/api/chat", {**base, **body}
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    for messages in (
        [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, {**USER, "role": "tool", "tool_name": "f"}],
        [{"role": "system", "content": "s"}, {**USER, "images": [PIXEL]}],
        [USER, {"role": "assistant", "content": "c", "thinking": "r"}, USER],
    ):
        yield "/api/chat", {**base, "messages": messages, "stream": False}
    prompts: tuple[dict[str, Any], ...] = (
        {"prompt": "a b", "system": "s"},
        {"prompt": "a b", "raw": True, "logprobs": True},
        {"prompt": "a", "suffix": "b"},
        {"prompt": "a", "images": [PIXEL], "format": SCHEMA},
        {"prompt": ""},
        {"prompt": "", "keep_alive": 0},
    )
    for body in prompts:
        yield "/api/generate", {**base, **body, "stream": False}
        yield "/api/generate", {**base, **body}
    for inputs in ("a", ["a", "b"]):
        yield "/api/embed", {**base, "input": inputs}
    yield "/api/pull", base
    yield "/api/pull", {**base, "stream": False}


def tgi() -> Iterator[Exchange]:
    for parameters in (
        {"details": True, "top_n_tokens": 2},
        {"max_new_tokens": 1, "details": True, "do_sample": True, "seed": 5},
        {"stop": ["a"], "details": True, "return_full_text": True},
        {"grammar": {"type": "regex", "value": "[ab]+"}},
        {"grammar": {"type": "json", "value": SCHEMA}, "adapter_id": "pirate"},
    ):
        for path in ("/generate", "/generate_stream"):
            yield path, {"inputs": "a b", "parameters": parameters}
    more = {"details": True, "decoder_input_details": True, "best_of": 2, "do_sample": True, "max_new_tokens": 2}
    yield "/generate", {"inputs": "a b", "parameters": more}
    yield "/generate", {"inputs": "a !fault b"}
    yield "/generate_stream", {"inputs": "a !fault b"}
    yield "/", {"inputs": ["a b", "c"]}
    yield "/", {"inputs": "a b", "stream": True}
    yield "/chat_tokenize", {"messages": [USER]}
    yield "/tokenize", {"inputs": "a b"}
    for body in ({"inputs": "a"}, {"inputs": ["a", "b"], "normalize": False, "truncate": True}):
        yield "/embed", body


def scores() -> Iterator[Exchange]:
    of = {"model": "SharedWords"}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        yield path, {**of, "query": "a", "documents": ["b", "a b", "a"], "top_n": 2, "return_documents": True}
    yield "/rerank", {**of, "query": "a", "texts": ["b", "a b"], "raw_scores": True, "return_text": True}
    yield "/rerank", {**of, "query": "a", "documents": [{"text": "a"}, {"text": "!long"}]}
    yield "/rerank", {"model": "Angles", "query": "0", "documents": ["90", "60"]}
    for body in ({"text_1": "a", "text_2": ["a", "b"]}, {"queries": ["a", "b"], "documents": ["a", "b"]}):
        yield "/score", {**of, **body}
    yield "/score", {**of, "text_1": "a", "text_2": "!long"}


def lmi() -> Iterator[Exchange]:
    for parameters in (
        {"details": True, "top_n_tokens": 1, "decoder_input_details": True},
        {"details": True, "do_sample": True, "n": 2, "seed": 5, "max_new_tokens": 2},
        {"num_beams": 2, "max_new_tokens": 2},
        {"stop": ["a"], "return_full_text": True, "temperature": 0.5},
        {"logprobs": 1, "prompt_logprobs": 1, "details": True},
        {"output_formatter": "jsonlines", "max_new_tokens": 2},
        {"output_formatter": "sse", "max_new_tokens": 2},
    ):
        yield "/invocations", {"inputs": "a b", "parameters": parameters}
        yield "/invocations", {"inputs": "a b", "parameters": parameters, "stream": True}
    yield "/invocations", {"inputs": ["a b", "c"], "parameters": {"details": True}}
    yield "/invocations", {"inputs": "a !fault b"}
    yield "/invocations", {"inputs": "a !fault b", "stream": True}
    yield "/invocations", {"inputs": "!fault a", "stream": True}
    yield "/invocations", {"messages": [USER], "max_tokens": 2}
    yield "/invocations", {"messages": [USER], "max_tokens": 2, "stream": True}
    yield "/invocations", {"prompt": "a b", "max_tokens": 2}
    yield "/predictions/ReverseModel", {"inputs": "a"}
    yield "/models/ReverseModel/invoke", {"inputs": "a", "parameters": {"unknown": 1}}


EXCHANGES = (chats, completions, responses, messages, ollama, tgi, scores, lmi)


@pytest.mark.parametrize("exchanges", EXCHANGES, ids=lambda each: each.__name__)
async def test_exchanges(server: TextServer, exchanges: Callable[[], Iterator[Exchange]]) -> None:
    found = []
    for path, body in exchanges():
        for name in ("ReverseModel", "SharedWords", "Angles"):
            server.model(name).calls.clear()
        server.model().embedded = None
        response = await server.post(path, body)
        calls = [call for name in ("ReverseModel", "SharedWords", "Angles") for call in server.model(name).calls]
        seen = plain([*calls, *filter(None, [server.model().embedded])])
        headers = {name: response.headers.get(name, "") for name in ("content-type", "x-ignored-parameters")}
        found += [
            f"POST {path} {shortened(compact(body))}",
            f"  {response.status} {' '.join(filter(None, headers.values()))}",
        ]
        found += [f"  saw {compact(each)}" for each in seen]
        found += [f"  {line}" for line in without_variable(response.body).splitlines() if line]
    check(f"exchanges of {exchanges.__name__}", found)
