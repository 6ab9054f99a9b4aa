"""Clauses of the LMI text generation API: /invocations and /predictions/{model}."""

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
from dragoman_check.conformance.target import Target

PROMPT = "The weather is"
_REASONS = ("length", "eos_token", "stop_sequence")
CLAUSES = ClauseList("lmi")
_add = CLAUSES.add


@dataclass(slots=True)
class LmiContext:
    """The server and a path that generates text."""

    http: HttpTarget
    path: str

    def generate(self, stream: bool | None = None, inputs: Any = PROMPT, **parameters: Any) -> RecordedResponse:
        body: dict[str, Any] = {"inputs": inputs, "parameters": {"max_new_tokens": 6, **parameters}}
        return self.http.post(self.path, body if stream is None else body | {"stream": stream})

    def text(self, **parameters: Any) -> str:
        generated: str = field_of(self.generate(**parameters).ok().json(), "generated_text", str)
        return generated

    def lines(self, **parameters: Any) -> list[Any]:
        """Return the lines of a stream."""
        response = self.generate(stream=True, **parameters).ok()
        expect(response.media_type == "application/jsonlines", "application/jsonlines", response.media_type)
        values = response.json_lines()
        expect(values, "at least one line", response.body)
        return values


def _prepare(target: Target) -> LmiContext:
    paths = ["/invocations", *(f"/predictions/{quote(name, safe='')}" for name in target.listed_models())]
    reasons = []
    for path in paths:
        context = LmiContext(target.http, path)
        response = context.generate()
        try:
            if response.status == 200 and "generated_text" in response.json():
                return context
        except (ClauseFailed, TypeError):
            pass
        reasons.append(f"POST {path} gets status {response.status}")
    raise NotOffered("; ".join(reasons[:2]))


def last_word(text: str) -> str:
    """Return the last word of a generated text, whose beginning serves as a stop sequence."""
    return (text.split() or [""])[-1]


def _check_token(token: Any) -> None:
    field_of(token, "id", int, "a token")
    field_of(token, "text", str, "a token")
    expect(field_of(token, "log_prob", (int, float), "a token") <= 1e-6, "a log_prob of at most 0", token)


def _check_details(answer: Any) -> dict[str, Any]:
    details: dict[str, Any] = field_of(answer, "details", dict)
    reason = field_of(details, "finish_reason", str, "'details'")
    expect(reason in _REASONS, f"a finish_reason of {_REASONS}", reason)
    field_of(details, "generated_tokens", int, "'details'")
    return details


@_add("ping", "SageMaker container contract", level="should")
def _ping(c: LmiContext) -> None:
    """GET /ping of a server that answers requests gets status 200."""
    c.http.get("/ping").ok()


@_add("generate", "Rolling batch, Response Schema")
def _generate(c: LmiContext) -> None:
    """A request with 'inputs' returns 'generated_text' as application/json."""
    response = c.generate().ok()
    expect(response.media_type == "application/json", "application/json", response.media_type)
    field_of(response.json(), "generated_text", str)


@_add("stream-default", "Rolling batch, Request Schema")
def _stream_default(c: LmiContext) -> None:
    """Responses are not streamed by default, nor with 'stream' false."""
    for stream in (None, False):
        field_of(c.generate(stream=stream).ok().json(), "generated_text", str)


@_add("no-details", "Rolling batch, Response Schema")
def _no_details(c: LmiContext) -> None:
    """'details' is returned only if requested."""
    answer = c.generate().ok().json()
    expect("details" not in answer, "no 'details'", answer)


@_add("details", "Details")
def _details(c: LmiContext) -> None:
    """With 'details' the response has finish_reason, generated_tokens, inputs and tokens."""
    details = _check_details(c.generate(details=True).ok().json())
    expect(field_of(details, "inputs", str, "'details'") == PROMPT, f"inputs '{PROMPT}'", details["inputs"])
    tokens = field_of(details, "tokens", list, "'details'")
    expect(len(tokens) == details["generated_tokens"], f"{details['generated_tokens']} tokens", len(tokens))
    for token in tokens:
        _check_token(token)


@_add("max-new-tokens", "GenerationParameters")
def _max_new_tokens(c: LmiContext) -> None:
    """At most max_new_tokens tokens are generated."""
    for count in (1, 4):
        generated = _check_details(c.generate(details=True, max_new_tokens=count).ok().json())["generated_tokens"]
        expect(generated <= count, f"at most {count} tokens", generated)


@_add("return-full-text", "GenerationParameters")
def _return_full_text(c: LmiContext) -> None:
    """With return_full_text the text begins with the prompt."""
    text = c.text(return_full_text=True)
    expect(text.startswith(PROMPT), f"text that begins with '{PROMPT}'", text)


@_add("greedy", "GenerationParameters, do_sample")
def _greedy(c: LmiContext) -> None:
    """Without do_sample equal requests give equal texts."""
    first, second = c.text(), c.text()
    expect(first == second, f"'{first}'", second)


@_add("seed", "GenerationParameters, seed")
def _seed(c: LmiContext) -> None:
    """Samples of equal seed are equal."""
    first, second = (c.text(do_sample=True, seed=7, temperature=1.5) for _ in range(2))
    expect(first == second, f"'{first}'", second)


@_add("stop-sequences", "GenerationParameters, stop_sequences")
def _stop_sequences(c: LmiContext) -> None:
    """Generation ends at a stop sequence, with finish_reason stop_sequence."""
    text = c.text(max_new_tokens=8)
    stop = last_word(text)[:2]
    if not stop:
        raise NotTried("the model generates no text")
    answer = c.generate(max_new_tokens=8, stop_sequences=[stop], details=True).ok().json()
    generated = field_of(answer, "generated_text", str)
    expect(len(generated) < len(text) or text.endswith(stop), f"text that ends at '{stop}'", generated)
    reason = _check_details(answer)["finish_reason"]
    expect(reason == "stop_sequence", "finish_reason stop_sequence", reason)


@_add("stream", "Rolling batch, Response Schema, streaming")
def _stream(c: LmiContext) -> None:
    """With 'stream' each line of application/jsonlines has a token."""
    for line in c.lines():
        _check_token(field_of(line, "token", dict, "a line"))


@_add("stream-last-line", "Rolling batch, Response Schema, streaming")
def _stream_last_line(c: LmiContext) -> None:
    """Only the last line of a stream has generated_text and details."""
    lines = c.lines()
    field_of(lines[-1], "generated_text", str, "the last line")
    _check_details(lines[-1])
    early = [line for line in lines[:-1] if line.get("generated_text") or line.get("details")]
    expect(not early, "neither generated_text nor details in earlier lines", early[:1])


@_add("stream-text", "Rolling batch, Response Schema, streaming")
def _stream_text(c: LmiContext) -> None:
    """The texts of the tokens of a stream are its generated_text."""
    lines = c.lines()
    joined = "".join(field_of(line["token"], "text", str, "a token") for line in lines)
    text = field_of(lines[-1], "generated_text", str, "the last line")
    expect(joined == text, f"'{text}'", joined)


def _check_error(response: RecordedResponse, status: int | None = None) -> None:
    response.expect_rejected()
    if status:
        expect(response.status == status, f"status {status}", response.status)
    answer = response.json()
    field_of(answer, "error", str)
    code = field_of(answer, "code", int)
    expect(code == response.status, f"code {response.status}", code)


@_add("error-no-inputs", "Error Responses")
def _error_no_inputs(c: LmiContext) -> None:
    """A payload without 'inputs' gets status 424 with 'error' and 'code'."""
    _check_error(c.http.post(c.path, {"parameters": {}}), 424)


@_add("error-inputs-type", "Error Responses")
def _error_inputs_type(c: LmiContext) -> None:
    """'inputs' that is not text gets an error status with 'error' and 'code'."""
    _check_error(c.generate(inputs=7))


@_add("error-parameters-type", "Error Responses")
def _error_parameters_type(c: LmiContext) -> None:
    """'parameters' that is not an object gets an error status with 'error' and 'code'."""
    _check_error(c.http.post(c.path, {"inputs": PROMPT, "parameters": [1]}))


@_add("error-parameter-value", "Error Responses")
def _error_parameter_value(c: LmiContext) -> None:
    """A bad generation parameter gets an error status, or finish_reason error."""
    response = c.generate(temperature="hot", do_sample=True)
    if response.status == 200:
        reason = field_of(field_of(response.json(), "details", dict), "finish_reason", str, "'details'")
        expect(reason == "error", "an error", response.body)


@_add("error-malformed-json", "Error Responses")
def _error_malformed_json(c: LmiContext) -> None:
    """A body that is not JSON gets an error status."""
    c.http.post(c.path, b'{"inputs": ').expect_rejected()


PROTOCOL = Protocol("lmi", "LMI text generation", "LMI inference API schema, 0.31", _prepare, CLAUSES)
