"""Clauses of Text Generation Inference (TGI)."""

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

_REASONS = ("length", "eos_token", "stop_sequence")
CLAUSES = ClauseList("tgi")
_add = CLAUSES.add


@dataclass(slots=True)
class TgiContext:
    """The server and the path before `/generate`."""

    http: HttpTarget
    base: str

    def post(self, path: str, stream: bool | None = None, inputs: Any = PROMPT, **parameters: Any) -> RecordedResponse:
        body: dict[str, Any] = {"inputs": inputs, "parameters": {"max_new_tokens": 6, **parameters}}
        return self.http.post(self.base + path, body if stream is None else body | {"stream": stream})

    def generate(self, **parameters: Any) -> Any:
        return self.post("/generate", **parameters).ok().json()

    def events(self, path: str = "/generate_stream", **parameters: Any) -> list[Any]:
        """Return the events of a stream."""
        response = self.post(path, **parameters).ok()
        expect(response.media_type == "text/event-stream", "text/event-stream", response.media_type)
        values = response.json_events()
        expect(values, "at least one event", response.body)
        return values


def _prepare(target: Target) -> TgiContext:
    bases = ["", *(f"/models/{quote(name, safe='')}" for name in target.listed_models())]
    reasons = []
    for base in bases:
        context = TgiContext(target.http, base)
        response = context.post("/generate")
        try:
            if response.status == 200 and "generated_text" in response.json():
                return context
        except (ClauseFailed, TypeError):
            pass
        reasons.append(f"POST {base}/generate gets status {response.status}")
    raise NotOffered("; ".join(reasons[:2]))


def _check_token(token: Any) -> None:
    field_of(token, "id", int, "a token")
    field_of(token, "text", str, "a token")
    expect(field_of(token, "logprob", (int, float), "a token") <= 1e-6, "a logprob of at most 0", token)
    field_of(token, "special", bool, "a token")


def _check_details(answer: Any) -> dict[str, Any]:
    details: dict[str, Any] = field_of(answer, "details", dict)
    reason = field_of(details, "finish_reason", str, "'details'")
    expect(reason in _REASONS, f"a finish_reason of {_REASONS}", reason)
    field_of(details, "generated_tokens", int, "'details'")
    expect("seed" in details, "'seed' in 'details'", details)
    return details


@_add("health", "GET /health")
def _health(c: TgiContext) -> None:
    """GET /health of a server that answers requests gets status 200."""
    c.http.get(f"{c.base}/health").ok()


@_add("info", "GET /info")
def _info(c: TgiContext) -> None:
    """GET /info returns model_id, max_total_tokens and version."""
    answer = c.http.get(f"{c.base}/info").ok().json()
    field_of(answer, "model_id", str)
    field_of(answer, "max_total_tokens", int)
    field_of(answer, "version", str)


@_add("generate", "POST /generate")
def _generate(c: TgiContext) -> None:
    """POST /generate returns an object with generated_text."""
    field_of(c.generate(), "generated_text", str)


@_add("details", "POST /generate, details")
def _details(c: TgiContext) -> None:
    """With 'details' the response has finish_reason, generated_tokens, seed, prefill and tokens."""
    details = _check_details(c.generate(details=True))
    field_of(details, "prefill", list, "'details'")
    tokens = field_of(details, "tokens", list, "'details'")
    expect(len(tokens) == details["generated_tokens"], f"{details['generated_tokens']} tokens", len(tokens))
    for token in tokens:
        _check_token(token)


@_add("max-new-tokens", "POST /generate, max_new_tokens")
def _max_new_tokens(c: TgiContext) -> None:
    """At most max_new_tokens tokens are generated."""
    for count in (1, 4):
        generated = _check_details(c.generate(details=True, max_new_tokens=count))["generated_tokens"]
        expect(generated <= count, f"at most {count} tokens", generated)


@_add("decoder-input-details", "POST /generate, decoder_input_details")
def _decoder_input_details(c: TgiContext) -> None:
    """With decoder_input_details 'prefill' has the tokens of the prompt."""
    details = _check_details(c.generate(details=True, decoder_input_details=True))
    prefill = field_of(details, "prefill", list, "'details'")
    expect(prefill, "tokens in 'prefill'", prefill)
    for token in prefill:
        field_of(token, "id", int, "a token of 'prefill'")
        field_of(token, "text", str, "a token of 'prefill'")


@_add("return-full-text", "POST /generate, return_full_text")
def _return_full_text(c: TgiContext) -> None:
    """With return_full_text the text begins with the prompt."""
    text = field_of(c.generate(return_full_text=True), "generated_text", str)
    expect(text.startswith(PROMPT), f"text that begins with '{PROMPT}'", text)


@_add("seed", "POST /generate, seed")
def _seed(c: TgiContext) -> None:
    """Samples of equal seed are equal, and the seed is returned."""
    first, second = (c.generate(do_sample=True, seed=7, temperature=1.5, details=True) for _ in range(2))
    texts = [field_of(answer, "generated_text", str) for answer in (first, second)]
    expect(texts[0] == texts[1], f"'{texts[0]}'", texts[1])
    expect(_check_details(first)["seed"] == 7, "the seed 7", first["details"]["seed"])


@_add("stop", "POST /generate, stop")
def _stop(c: TgiContext) -> None:
    """Generation ends at a stop sequence, with finish_reason stop_sequence."""
    stop = last_word(field_of(c.generate(max_new_tokens=8), "generated_text", str))[:2]
    if not stop:
        raise NotTried("the model generates no text")
    reason = _check_details(c.generate(max_new_tokens=8, stop=[stop], details=True))["finish_reason"]
    expect(reason == "stop_sequence", "finish_reason stop_sequence", reason)


@_add("compatible-root", "POST /")
def _compatible_root(c: TgiContext) -> None:
    """POST / returns a list with one object, or events with 'stream' true."""
    path = "" if c.base else "/"
    answer = c.post(path).ok().json()
    expect(isinstance(answer, list) and len(answer) == 1, "a list of one object", answer)
    field_of(answer[0], "generated_text", str)
    c.events(path, stream=True)


@_add("stream", "POST /generate_stream")
def _stream(c: TgiContext) -> None:
    """Each event of POST /generate_stream has an index and a token."""
    for event in c.events():
        field_of(event, "index", int, "an event")
        _check_token(field_of(event, "token", dict, "an event"))


@_add("stream-last-event", "POST /generate_stream")
def _stream_last_event(c: TgiContext) -> None:
    """Only the last event has generated_text; with 'details' it has details."""
    events = c.events(details=True)
    field_of(events[-1], "generated_text", str, "the last event")
    _check_details(events[-1])
    early = [event for event in events[:-1] if event.get("generated_text") is not None]
    expect(not early, "no generated_text in earlier events", early[:1])


@_add("stream-text", "POST /generate_stream")
def _stream_text(c: TgiContext) -> None:
    """The texts of the tokens of a stream are its generated_text."""
    events = c.events()
    tokens = [field_of(event, "token", dict, "an event") for event in events]
    joined = "".join(field_of(token, "text", str, "a token") for token in tokens if not token.get("special"))
    text = field_of(events[-1], "generated_text", str, "the last event")
    expect(joined == text, f"'{text}'", joined)


@_add("tokenize", "POST /tokenize")
def _tokenize(c: TgiContext) -> None:
    """POST /tokenize returns id, text, start and stop of each token."""
    answer = c.http.post(f"{c.base}/tokenize", {"inputs": PROMPT}).expect_offered("POST /tokenize").json()
    expect(isinstance(answer, list) and answer, "a list of tokens", answer)
    for token in answer:
        field_of(token, "id", int, "a token")
        field_of(token, "text", str, "a token")
        start, stop = field_of(token, "start", int, "a token"), field_of(token, "stop", int, "a token")
        expect(0 <= start <= stop <= len(PROMPT), f"positions within {len(PROMPT)} characters", token)


def _error(name: str, requirement: str, **changes: Any) -> None:
    """Add a clause: the request with these changes gets status 422 and an error of type validation."""

    def check(c: TgiContext) -> None:
        response = c.post("/generate", **changes)
        expect(response.status == 422, "status 422", f"{response.status} {response.body[:160]!r}")
        answer = response.json()
        field_of(answer, "error", str)
        expect(field_of(answer, "error_type", str) == "validation", "error_type validation", answer)

    check.__doc__ = requirement
    _add(name, "POST /generate, 422 Input validation error")(check)


_error("error-temperature", "A temperature of 0 is rejected with 422 and error_type validation.", temperature=0.0)
_error("error-top-p", "A top_p above 1 is rejected with 422 and error_type validation.", top_p=1.5)
_error("error-max-new-tokens", "max_new_tokens of 0 is rejected with 422 and error_type validation.", max_new_tokens=0)
_error("error-empty-inputs", "Empty inputs are rejected with 422 and error_type validation.", inputs="")


@_add("error-malformed", "POST /generate")
def _error_malformed(c: TgiContext) -> None:
    """A body without 'inputs' gets an error status."""
    c.http.post(f"{c.base}/generate", {"parameters": {}}).expect_rejected(400, 499)


PROTOCOL = Protocol("tgi", "Text Generation Inference", "TGI API, 3.0", _prepare, CLAUSES)
