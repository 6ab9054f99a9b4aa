"""Clauses of text generation in the Open Inference Protocol: generate and generate_stream."""

from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from dragoman_check.conformance.clauses import ClauseList, NotOffered, NotTried, Protocol, expect, field_of
from dragoman_check.conformance.http import HttpTarget, RecordedResponse
from dragoman_check.conformance.lmi import PROMPT
from dragoman_check.conformance.open_inference_rest import UNKNOWN, check_error
from dragoman_check.conformance.target import Target

_REASONS = ("length", "eos_token", "stop_sequence")
CLAUSES = ClauseList("generate")
_add = CLAUSES.add


@dataclass(slots=True)
class GenerateContext:
    """The server and a model that generates text."""

    http: HttpTarget
    model: str

    def post(self, action: str = "generate", text: Any = PROMPT, **parameters: Any) -> RecordedResponse:
        body = {"text_input": text, "parameters": {"max_tokens": 6, "temperature": 0, **parameters}}
        return self.http.post(f"/v2/models/{quote(self.model, safe='')}/{action}", body)

    def text(self, **parameters: Any) -> str:
        generated: str = field_of(self.post(**parameters).ok().json(), "text_output", str)
        return generated

    def events(self, **parameters: Any) -> list[Any]:
        """Return the events of a stream."""
        response = self.post("generate_stream", **parameters).ok()
        expect(response.media_type == "text/event-stream", "text/event-stream", response.media_type)
        values = response.json_events()
        expect(values, "at least one event", response.body)
        return values


def _prepare(target: Target) -> GenerateContext:
    names = target.listed_models()
    if not names:
        raise NotTried("no model is listed; name one with --model NAME")
    for name in names:
        context = GenerateContext(target.http, name)
        response = context.post()
        if response.status == 200 and b'"text_output"' in response.body:
            return context
    raise NotOffered(f"no model answers POST generate with text_output; the last one gets status {response.status}")


def _check_details(answer: Any) -> list[Any]:
    """Return the tokens of a response's details."""
    details = field_of(answer, "details", dict)
    reason = field_of(details, "finish_reason", str, "'details'")
    expect(reason in _REASONS, f"a finish_reason of {_REASONS}", reason)
    tokens: list[Any] = field_of(details, "logprobs", list, "'details'")
    return tokens


@_add("text", "Generate, Generate Response JSON Object")
def _text(c: GenerateContext) -> None:
    """POST generate returns model_name and text_output."""
    answer = c.post().ok().json()
    expect(field_of(answer, "model_name", str) == c.model, f"model_name '{c.model}'", answer["model_name"])
    field_of(answer, "text_output", str)


@_add("details", "Generate, details")
def _details(c: GenerateContext) -> None:
    """With 'details' the response has finish_reason and logprobs of each token."""
    tokens = _check_details(c.post(details=True).ok().json())
    expect(tokens, "tokens in 'logprobs'", tokens)
    for token in tokens:
        field_of(token, "id", int, "a token")
        field_of(token, "text", str, "a token")
        field_of(token, "special", bool, "a token")
        expect(field_of(token, "logprob", (int, float), "a token") <= 1e-6, "a logprob of at most 0", token)


@_add("max-tokens", "Generate, max_tokens")
def _max_tokens(c: GenerateContext) -> None:
    """At most max_tokens tokens are generated; finish_reason is length if there would be more."""
    answer = c.post(max_tokens=1, details=True).ok().json()
    expect(len(_check_details(answer)) <= 1, "at most 1 token", answer)
    if len(c.text(max_tokens=2)) > len(field_of(answer, "text_output", str)):
        reason = answer["details"]["finish_reason"]
        expect(reason == "length", "finish_reason length", reason)


@_add("stream", "Generate, Generate Stream Response")
def _stream(c: GenerateContext) -> None:
    """Each event of POST generate_stream has model_name and text_output."""
    for event in c.events():
        field_of(event, "text_output", str, "an event")
        expect(field_of(event, "model_name", str, "an event") == c.model, f"model_name '{c.model}'", event)


@_add("stream-text", "Generate, Generate Stream Response")
def _stream_text(c: GenerateContext) -> None:
    """The texts of a stream are the text of the same request without streaming."""
    first, second = c.text(), c.text()
    if first != second:
        raise NotTried("the model gives other texts for equal requests")
    joined = "".join(field_of(event, "text_output", str, "an event") for event in c.events())
    expect(joined == first, f"'{first}'", joined)


@_add("error-no-text", "Generate, Generate Response JSON Error Object")
def _error_no_text(c: GenerateContext) -> None:
    """A request without text_input is rejected with an error object."""
    check_error(c.http.post(f"/v2/models/{quote(c.model, safe='')}/generate", {"parameters": {}}))


@_add("error-text-type", "Generate, Generate Response JSON Error Object")
def _error_text_type(c: GenerateContext) -> None:
    """A text_input that is not text is rejected with an error object."""
    check_error(c.post(text=7))


@_add("error-unknown-model", "Generate, Generate Response JSON Error Object")
def _error_unknown_model(c: GenerateContext) -> None:
    """Generation with an unknown model is rejected with an error object."""
    check_error(c.http.post(f"/v2/models/{UNKNOWN}/generate", {"text_input": PROMPT}))


@_add("error-malformed-json", "Generate, Generate Response JSON Error Object")
def _error_malformed_json(c: GenerateContext) -> None:
    """A body that is not JSON is rejected with an error object."""
    check_error(c.http.post(f"/v2/models/{quote(c.model, safe='')}/generate", b'{"text_input": '))


PROTOCOL = Protocol(
    "open-inference-generate",
    "Open Inference Protocol, generate",
    "Open Inference Protocol, generate_rest.yaml",
    _prepare,
    CLAUSES,
)
