"""Clauses of the OpenAI API: models, chat completions, completions, embeddings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from dragoman_check.conformance.clauses import (
    ClauseFailed,
    ClauseList,
    NotOffered,
    NotTried,
    Protocol,
    expect,
    field_of,
)
from dragoman_check.conformance.http import HttpTarget, RecordedResponse
from dragoman_check.conformance.lmi import PROMPT, last_word
from dragoman_check.conformance.target import Target

_UNKNOWN = "dragoman-check-unknown"
_MESSAGES = [{"role": "user", "content": "Say hello."}]
# By the field of the context that holds a model: path and body of requests.
_REQUESTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "completion_model": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 1}),
    "chat_model": ("/v1/chat/completions", {"messages": _MESSAGES, "max_tokens": 1}),
    "embedding_model": ("/v1/embeddings", {"input": PROMPT}),
}
CLAUSES = ClauseList("openai")
_add = CLAUSES.add


@dataclass(slots=True)
class OpenAIContext:
    """The server and models for chat, completions and embeddings, each empty if there is none."""

    http: HttpTarget
    chat_model: str
    completion_model: str
    embedding_model: str

    def chat(self, **changes: Any) -> RecordedResponse:
        if not self.chat_model:
            raise NotOffered("no listed model answers POST v1/chat/completions")
        body = {"model": self.chat_model, "messages": _MESSAGES, "max_tokens": 6, **changes}
        return self.http.post("/v1/chat/completions", body)

    def completion(self, **changes: Any) -> RecordedResponse:
        if not self.completion_model:
            raise NotOffered("no listed model answers POST v1/completions")
        body = {"model": self.completion_model, "prompt": PROMPT, "max_tokens": 6, **changes}
        return self.http.post("/v1/completions", body)

    def available(self) -> tuple[str, Mapping[str, Any]]:
        """Return path and body of requests that a model answers. Raises NotTried if there is none."""
        for field, request in _REQUESTS.items():
            if getattr(self, field):
                return request
        raise NotTried("no listed model answers requests")


def _prepare(target: Target) -> OpenAIContext:
    response = target.http.get("/v1/models")
    try:
        listed = [each["id"] for each in response.json()["data"]] if response.status == 200 else []
    except (ClauseFailed, LookupError, TypeError):
        listed = []
    names = [name for name in listed if name in target.models] if target.models else listed
    names = names or ([] if listed else list(target.models))
    if not names:
        raise NotOffered(f"GET v1/models gets status {response.status}" + (" and no models" if not listed else ""))
    context = OpenAIContext(target.http, "", "", "")
    for name in names[:10]:
        for field, (path, body) in _REQUESTS.items():
            if getattr(context, field) == "" and target.http.post(path, {"model": name, **body}).status == 200:
                setattr(context, field, name)
    return context


def _choice(answer: Any, kind: str) -> dict[str, Any]:
    """Return the first choice of a response, whose other fields are checked.

    The model of a response may have another name than that of the request, which may be an alias.
    """
    field_of(answer, "id", str)
    expect(field_of(answer, "object", str) == kind, f"object '{kind}'", answer["object"])
    field_of(answer, "created", int)
    expect(field_of(answer, "model", str), "the name of a model", answer)
    choices = field_of(answer, "choices", list)
    expect(choices, "at least one choice", answer)
    expect(field_of(choices[0], "index", int, "a choice") == 0, "index 0", choices[0])
    choice: dict[str, Any] = choices[0]
    return choice


def _check_usage(usage: Any, most: int) -> None:
    prompt, new = (field_of(usage, f"{name}_tokens", int, "'usage'") for name in ("prompt", "completion"))
    total = field_of(usage, "total_tokens", int, "'usage'")
    expect(prompt > 0 and total == prompt + new, "total_tokens of prompt_tokens and completion_tokens", usage)
    expect(new <= most, f"at most {most} completion_tokens", new)


def _check_error(response: RecordedResponse, *statuses: int) -> None:
    expect(response.status in statuses, f"status {' or '.join(map(str, statuses))}", response.status)
    error = field_of(response.json(), "error", dict)
    expect(field_of(error, "message", str, "'error'").strip(), "a message", error)
    field_of(error, "type", str, "'error'")


# --- models ------------------------------------------------------------------------------------------------------


@_add("models", "Models, List")
def _models(c: OpenAIContext) -> None:
    """GET v1/models returns a list of cards with id, object, created and owned_by."""
    answer = c.http.get("/v1/models").ok().json()
    expect(field_of(answer, "object", str) == "list", "object 'list'", answer)
    for card in field_of(answer, "data", list):
        _check_card(card)


@_add("model", "Models, Retrieve")
def _model(c: OpenAIContext) -> None:
    """GET v1/models/{model} returns the card of a model."""
    name = c.chat_model or c.completion_model or c.embedding_model
    if not name:
        raise NotTried("no listed model answers requests")
    card = c.http.get(f"/v1/models/{quote(name)}").ok().json()
    _check_card(card)
    expect(card["id"] == name, f"the id '{name}'", card["id"])


def _check_card(card: Any) -> None:
    field_of(card, "id", str, "a card")
    expect(field_of(card, "object", str, "a card") == "model", "object 'model'", card)
    field_of(card, "created", int, "a card")
    field_of(card, "owned_by", str, "a card")


@_add("model-unknown", "Models, Retrieve")
def _model_unknown(c: OpenAIContext) -> None:
    """The card of an unknown model gets status 404 and an error object."""
    _check_error(c.http.get(f"/v1/models/{_UNKNOWN}"), 404)


# --- chat --------------------------------------------------------------------------------------------------------


@_add("chat", "Chat completions, The chat completion object")
def _chat(c: OpenAIContext) -> None:
    """A chat completion has a message of the assistant, a finish_reason and usage."""
    answer = c.chat().ok().json()
    choice = _choice(answer, "chat.completion")
    message = field_of(choice, "message", dict, "a choice")
    expect(field_of(message, "role", str, "the message") == "assistant", "role assistant", message)
    field_of(message, "content", str, "the message")
    expect(choice.get("finish_reason") in ("stop", "length"), "finish_reason stop or length", choice)
    _check_usage(field_of(answer, "usage", dict), 6)


@_add("chat-max-tokens", "Chat completions, max_tokens")
def _chat_max_tokens(c: OpenAIContext) -> None:
    """max_tokens and max_completion_tokens limit the completion."""
    for name in ("max_tokens", "max_completion_tokens"):
        changes: dict[str, Any] = {"max_tokens": None} | {name: 1}
        _check_usage(field_of(c.chat(**changes).ok().json(), "usage", dict), 1)


@_add("chat-n", "Chat completions, n")
def _chat_n(c: OpenAIContext) -> None:
    """n choices are returned, with their indexes."""
    answer = c.chat(n=2, temperature=1.0).ok().json()
    indexes = sorted(field_of(choice, "index", int, "a choice") for choice in field_of(answer, "choices", list))
    expect(indexes == [0, 1], "choices 0 and 1", indexes)


@_add("chat-logprobs", "Chat completions, logprobs")
def _chat_logprobs(c: OpenAIContext) -> None:
    """With logprobs each token has a logprob and top_logprobs."""
    choice = _choice(c.chat(logprobs=True, top_logprobs=2).ok().json(), "chat.completion")
    content = field_of(field_of(choice, "logprobs", dict, "a choice"), "content", list, "'logprobs'")
    expect(content, "tokens in 'logprobs'", choice)
    for token in content:
        field_of(token, "token", str, "a token")
        expect(field_of(token, "logprob", (int, float), "a token") <= 1e-6, "a logprob of at most 0", token)
        expect(len(field_of(token, "top_logprobs", list, "a token")) <= 2, "at most 2 top_logprobs", token)
    expect(len(content[0]["top_logprobs"]) == 2, "2 top_logprobs of the first token", content[0])


def _chunks(response: RecordedResponse) -> list[Any]:
    """Return the chunks of a stream, which must end with [DONE]."""
    response.ok()
    expect(response.media_type == "text/event-stream", "text/event-stream", response.media_type)
    events = response.events()
    expect(events and events[-1] == "[DONE]", "a last event [DONE]", events[-1:] or "no events")
    return response.json_events()


@_add("chat-stream", "Chat completions, streaming")
def _chat_stream(c: OpenAIContext) -> None:
    """A stream has chunks of one id with deltas, and ends with a finish_reason and [DONE]."""
    chunks = _chunks(c.chat(stream=True))
    choices = [_choice(chunk, "chat.completion.chunk") for chunk in chunks if chunk.get("choices")]
    deltas = [field_of(choice, "delta", dict, "a choice") for choice in choices]
    expect(deltas and deltas[0].get("role") == "assistant", "role assistant in the first delta", deltas[:1])
    expect(len({chunk["id"] for chunk in chunks}) == 1, "one id", [chunk["id"] for chunk in chunks][:3])
    reasons = [choice.get("finish_reason") for choice in choices]
    expect(reasons[-1] in ("stop", "length"), "finish_reason stop or length in the last chunk", reasons)
    expect(not any(reasons[:-1]), "no finish_reason before the last chunk", reasons)


@_add("chat-stream-text", "Chat completions, streaming")
def _chat_stream_text(c: OpenAIContext) -> None:
    """The deltas of a stream are the text of the same request without streaming."""
    plain = [c.chat(temperature=0).ok().json() for _ in range(2)]
    texts = [_choice(answer, "chat.completion")["message"]["content"] for answer in plain]
    if texts[0] != texts[1]:
        raise NotTried("the model gives other texts for equal requests")
    chunks = _chunks(c.chat(temperature=0, stream=True))
    joined = "".join(d.get("content") or "" for chunk in chunks for d in [_delta(chunk)])
    expect(joined == texts[0], f"'{texts[0]}'", joined)


def _delta(chunk: Any) -> dict[str, Any]:
    choices = field_of(chunk, "choices", list, "a chunk")
    delta: dict[str, Any] = field_of(choices[0], "delta", dict, "a choice") if choices else {}
    return delta


@_add("chat-stream-usage", "Chat completions, stream_options")
def _chat_stream_usage(c: OpenAIContext) -> None:
    """With include_usage a last chunk without choices has usage."""
    chunks = _chunks(c.chat(stream=True, stream_options={"include_usage": True}))
    expect(chunks[-1].get("choices") == [], "no choices in the last chunk", chunks[-1])
    _check_usage(field_of(chunks[-1], "usage", dict, "the last chunk"), 6)


# --- completions and embeddings ----------------------------------------------------------------------------------


@_add("completion", "Completions")
def _completion(c: OpenAIContext) -> None:
    """A completion has a text, a finish_reason and usage."""
    answer = c.completion().ok().json()
    choice = _choice(answer, "text_completion")
    field_of(choice, "text", str, "a choice")
    expect(choice.get("finish_reason") in ("stop", "length"), "finish_reason stop or length", choice)
    _check_usage(field_of(answer, "usage", dict), 6)


@_add("completion-prompts", "Completions, prompt")
def _completion_prompts(c: OpenAIContext) -> None:
    """A list of prompts gets a choice for each."""
    answer = c.completion(prompt=[PROMPT, "Hello"]).ok().json()
    indexes = sorted(field_of(choice, "index", int, "a choice") for choice in field_of(answer, "choices", list))
    expect(indexes == [0, 1], "choices 0 and 1", indexes)


@_add("completion-stop", "Completions, stop")
def _completion_stop(c: OpenAIContext) -> None:
    """The text ends before a stop sequence, with finish_reason stop."""
    text = _choice(c.completion(temperature=0).ok().json(), "text_completion")["text"]
    stop = last_word(text)[:2]
    if not stop:
        raise NotTried("the model generates no text")
    choice = _choice(c.completion(temperature=0, stop=stop).ok().json(), "text_completion")
    expect(stop not in choice["text"], f"text without '{stop}'", choice["text"])
    expect(choice.get("finish_reason") == "stop", "finish_reason stop", choice)


@_add("completion-echo", "Completions, echo")
def _completion_echo(c: OpenAIContext) -> None:
    """With echo the text begins with the prompt."""
    text = _choice(c.completion(echo=True).ok().json(), "text_completion")["text"]
    expect(text.startswith(PROMPT), f"text that begins with '{PROMPT}'", text)


@_add("completion-stream", "Completions, streaming")
def _completion_stream(c: OpenAIContext) -> None:
    """A stream of completions has chunks with texts and ends with [DONE]."""
    for chunk in _chunks(c.completion(stream=True)):
        if field_of(chunk, "choices", list, "a chunk"):
            field_of(_choice(chunk, "text_completion"), "text", str, "a choice")


@_add("embeddings", "Embeddings")
def _embeddings(c: OpenAIContext) -> None:
    """Embeddings of a list of texts have an index and a vector each."""
    if not c.embedding_model:
        raise NotOffered("no listed model answers POST v1/embeddings")
    body = {"model": c.embedding_model, "input": [PROMPT, "Hello"]}
    data = field_of(c.http.post("/v1/embeddings", body).ok().json(), "data", list)
    expect([field_of(one, "index", int, "an embedding") for one in data] == [0, 1], "indexes 0 and 1", data)
    lengths = {len(field_of(one, "embedding", list, "an embedding")) for one in data}
    expect(len(lengths) == 1 and min(lengths) > 0, "vectors of one length", lengths)


# --- errors ------------------------------------------------------------------------------------------------------


@_add("error-unknown-model", "Errors")
def _error_unknown_model(c: OpenAIContext) -> None:
    """An unknown model gets status 404 and an error object."""
    path, body = c.available()
    _check_error(c.http.post(path, {**body, "model": _UNKNOWN}), 404)


@_add("error-no-messages", "Errors")
def _error_no_messages(c: OpenAIContext) -> None:
    """A chat without messages gets status 400 or 422 and an error object."""
    _check_error(c.chat(messages=None), 400, 422)


@_add("error-temperature", "Errors")
def _error_temperature(c: OpenAIContext) -> None:
    """A negative temperature gets status 400 or 422 and an error object."""
    _check_error(c.completion(temperature=-1), 400, 422)


@_add("error-malformed-json", "Errors")
def _error_malformed_json(c: OpenAIContext) -> None:
    """A body that is not JSON gets status 400 or 422 and an error object."""
    _check_error(c.http.post(c.available()[0], b'{"model": '), 400, 422)


PROTOCOL = Protocol("openai", "OpenAI API", "OpenAI API reference", _prepare, CLAUSES)
