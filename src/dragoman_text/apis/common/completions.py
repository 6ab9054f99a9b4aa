"""OpenAI completions: prompts as text or token ids."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from dragoman.core.calls import Generate, Response
from dragoman.core.errors import InvalidInput
from dragoman.core.sampling import flag, format_value, integer
from dragoman.core.sampling import text as string
from dragoman.core.text import Generation, InfillPrompt, Prompt, PromptInfo, RawPrompt, Text, Token
from dragoman.formats import fast_json
from dragoman.protocols.parameters import (
    Parameter,
    anything,
    build_request,
    is_token_id,
    option,
    parse_parameters,
    sets,
)
from dragoman.protocols.wire import (
    EVENT_STREAM_HEADERS,
    EndpointResult,
    EngineCall,
    Headers,
    HttpRequest,
    HttpResponse,
    HttpStream,
    Policy,
    json_response,
)
from dragoman_text.apis.common.openai_format import (
    COMMON,
    DONE,
    REASONS,
    Envelope,
    FormatError,
    TokenUsage,
    error_event,
    format_prompt_logprobs,
    format_prompt_token_ids,
    format_token_ids,
    resolve_model,
    resolve_options,
    stop_reason,
    token_name,
)
from dragoman_text.limits import MAX_PROMPT_IDS, MAX_PROMPTS

# After this many successive tokens that were not found in the text, the search for offsets ends.
_MAX_LOST = 64
_HALF = "\N{REPLACEMENT CHARACTER}"


class Offsets:
    """Counts the characters before each token of one text, from `at` on.

    A text in pieces has the same offsets as the whole: text lags behind its tokens where it may yet become a stop
    string, and so a token's own text stands for what is not known yet. It never leads, so that no token stands before
    what was known when it came.
    """

    def __init__(self, at: int = 0) -> None:
        self._at = at  # the end of the last token that was found
        self._text = ""  # what is known of the text behind it
        self._lost: list[Token] = []  # the tokens behind it

    def of(self, text: str, tokens: Sequence[Token], *, last: bool) -> list[int]:
        """Return the offsets of the tokens of a chunk; the last chunk holds nothing back."""
        sent = self._at + len(self._text)
        self._text += text
        old, behind = len(self._lost), [*self._lost, *tokens]
        offsets: list[int] = []
        at = ahead = first = 0
        uncertain = False
        for i, token in enumerate(behind):
            start = self._text.find(token.text, at) if token.text and not uncertain else -1
            if start < 0:
                offsets.append(self._at + at if last else max(sent, self._at + at + ahead))
                complete = not token.special and _HALF not in token.text
                ahead += len(token.text) if complete else 0
                uncertain |= complete and token.text.startswith(self._text[at:])  # what follows is not known either
                continue
            # A character that is split over tokens is that of the last of them.
            split = i > first and not behind[i - 1].special
            offsets.append(self._at + (start if split else at))
            at, ahead, first = start + len(token.text), 0, i + 1
        self._at, self._text, self._lost = self._at + at, self._text[at:], behind[first:]
        if len(self._lost) > _MAX_LOST:
            self._at, self._text, self._lost = self._at + len(self._text), "", []
        return offsets[old:]


def prefill_offset(text: str, tokens: Sequence[Token]) -> int:
    """Return the offset of the last tokens of a completion."""
    at = len(text)
    for token in reversed(tokens):
        start = text.rfind(token.text, 0, at) if token.text else -1
        at = at if start < 0 else start
    return at


_MAX_NEW = 16  # OpenAI: unless the request says otherwise
PARAMETERS: Mapping[str, Parameter] = {
    **COMMON,
    "prompt": option("prompt", anything()),
    "best_of": sets("best_of"),
    "max_tokens": sets("max_new_tokens", integer(0)),
    "logprobs": sets("top_logprobs"),
    "echo": option("echo", flag()),
    "suffix": option("suffix", string()),
}


def parse_completion_request(
    body: Mapping[str, Any], http: HttpRequest, policy: Policy, format_error: FormatError, model: str = ""
) -> EndpointResult:
    """Parse a completion request; `model` is the one that the path names."""
    return resolve_model(body, http, lambda name: _completion(body, http, policy, format_error, name), model)


def _completion(
    body: Mapping[str, Any], http: HttpRequest, policy: Policy, format_error: FormatError, model: str
) -> EndpointResult:
    parameters = parse_parameters(body, PARAMETERS, policy)
    fields, options = parameters.fields, parameters.options
    prompts = _prompts(options.get("prompt"))
    if not options.get("add_special_tokens", True):
        prompts = tuple(RawPrompt(prompt) if isinstance(prompt, str) else prompt for prompt in prompts)
    if options.get("suffix"):
        prompts = _with_suffix(prompts, options)
    resolve_options(fields, options)
    options["read"] = "prompt_logprobs" in fields
    options["token_ids"] = fields.get("prompt_token_ids", False)
    options["keeps_start"] = fields.get("truncation_side") == "right"
    options["nothing_new"] = parameters.requests_no_tokens()
    if options["nothing_new"] and not options.get("echo"):
        raise InvalidInput("`max_tokens` must be strictly positive unless `echo` is true; got 0")
    logprobs = "top_logprobs" in fields
    if options.get("echo") and logprobs:
        fields["prompt_logprobs"] = max(fields["top_logprobs"], fields.get("prompt_logprobs", 0))
    sampling = parameters.sampling(policy, max_new_tokens=_MAX_NEW, shorten="max_new_tokens" not in fields)
    stream = options.get("stream", False)
    if stream and max(sampling.best_of, 1) > sampling.n:
        raise InvalidInput("`best_of` must not be greater than `n` in a stream, where each choice is sent as it comes")
    call = Generate(prompts=prompts, sampling=sampling, stream=stream)
    formatter = CompletionFormatter(prompts, sampling.n, options, logprobs=logprobs)
    request, format_failure = build_request(call, http, policy, model), parameters.error_formatter(format_error)
    if stream:
        headers = (*EVENT_STREAM_HEADERS, *parameters.headers)
        return HttpStream(
            request, formatter.format_chunk, error_event, DONE, headers, format_failure, formatter.format_last_chunk
        )
    return EngineCall(request, lambda response: formatter.format_complete(response, parameters.headers), format_failure)


def _with_suffix(prompts: Sequence[Prompt], options: Mapping[str, Any]) -> tuple[Prompt, ...]:
    """Return the prompts with the text that follows the gap. Raises InvalidInput for token ids, and with `echo`."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise InvalidInput("`suffix` must only be given with a `prompt` that is text; got token ids")
    if options.get("echo"):
        raise InvalidInput("`suffix` must not be given with `echo`")
    return tuple(InfillPrompt(str(prompt), options["suffix"]) for prompt in texts)


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """Parse one prompt or several, each a string or a list of token ids."""
    match value:
        case str():
            return (value,)
        case [*items] if items and len(items) <= MAX_PROMPT_IDS:
            if all(isinstance(item, str) for item in items) and len(items) <= MAX_PROMPTS:
                return tuple(items)
            if all(is_token_id(item) for item in items):
                return (tuple(items),)
            if len(items) <= MAX_PROMPTS and all(
                isinstance(item, list) and item and all(map(is_token_id, item)) for item in items
            ):
                return tuple(tuple(item) for item in items)
    raise InvalidInput(
        f"`prompt` must be a string, a list of at most {MAX_PROMPTS} strings or lists of token ids, "
        f"or a list of at most {MAX_PROMPT_IDS} token ids; "
        f"got {format_value(value)}"
    )


class CompletionFormatter:
    """Formats the response to several prompts with `n` choices each, complete or in chunks."""

    def __init__(self, prompts: Sequence[Prompt], n: int, options: Mapping[str, Any], *, logprobs: bool) -> None:
        self._n = n
        self._prompts = prompts
        self._echo = options.get("echo", False)
        self._read = options.get("read", False)
        self._token_ids = options.get("token_ids", False)
        self._tokens_as_ids = options.get("tokens_as_ids", False)
        self._keeps_start = options.get("keeps_start", False)
        self._nothing_new = options.get("nothing_new", False)
        self._logprobs = logprobs
        value = options.get("stream_options", {})
        self._ends_with_usage = value.get("include_usage", False)
        self._always_usage = self._ends_with_usage and value.get("continuous_usage_stats", False)
        self._more: dict[str, Any] = {"usage": None} if self._ends_with_usage else {}  # in each chunk
        self._usage = TokenUsage()
        self._envelope = Envelope.new("cmpl", "text_completion")
        self._infos: tuple[PromptInfo, ...] = ()
        self._offsets: dict[int, Offsets] = {}
        self._model = ""
        # Chunks that differ in their text only, after the first one of each choice, by their indices.
        details = (logprobs, self._token_ids, self._nothing_new, self._always_usage)
        self._frames: dict[tuple[int, int], tuple[bytes, bytes]] | None = None if any(details) else {}

    def format_complete(self, response: Response[Generation], headers: Headers) -> HttpResponse:
        texts = self._record(response.answer)
        choices = [{"prompt_logprobs": None, **self._choice(text, text.whole)} for text in texts]
        return json_response(self._envelope.around(response.model, choices, usage=self._usage.to_json()), 200, headers)

    def format_chunk(self, response: Response[Generation]) -> bytes:
        answer, frames = response.answer, self._frames
        if frames and len(answer.texts) == 1:
            (only,) = answer.texts
            key = only.prompt, only.choice
            if not only.finish and only.text and (frame := frames.get(key)) is not None:
                self._usage.generated[key] = only.generated
                return b"%b%b%b" % (frame[0], fast_json.dumps(only.text), frame[1])
        self._model = model = response.model
        chunks = b""
        for text in self._record(response.answer):
            if text.text or text.finish or ((self._logprobs or self._token_ids) and text.tokens):
                more = {"usage": self._usage.to_json()} if self._always_usage else self._more
                chunks += self._envelope.event(model, self._choice(text, text.text), more)
                if frames is not None and (text.prompt, text.choice) not in frames:
                    mark = Text(text.prompt, text.choice, "x")  # has no quotation marks, unlike all around it
                    start, _, end = self._envelope.event(model, self._choice(mark, "x"), more).rpartition(b'"x"')
                    frames[text.prompt, text.choice] = start, end
        return chunks

    def format_last_chunk(self) -> bytes:
        """Format the chunk after the last step: the usage, if it was requested."""
        return self._envelope.ending(self._model, self._usage) if self._ends_with_usage else b""

    def _record(self, generation: Generation) -> Sequence[Text]:
        """Return the completions of a step, once their details are known."""
        if self._nothing_new:
            bare = (Text(text.prompt, text.choice, finish="length" if text.finish else "") for text in generation.texts)
            generation = Generation(tuple(bare), generation.prompts)
        self._usage.add(generation)
        self._infos = self._infos or generation.prompts
        return generation.texts

    def _choice(self, text: Text, content: str) -> dict[str, Any]:
        index = text.prompt * self._n + text.choice
        prompt, first = "", index not in self._offsets
        if first:
            prompt = self._prompt(text.prompt) if self._echo else ""
            self._offsets[index] = Offsets(len(prompt))
        value: dict[str, Any] = {
            "index": index,
            "text": prompt + content,
            "logprobs": self._logprobs_of(text, content, prompt) if self._logprobs else None,
            "finish_reason": REASONS[text.finish],
        }
        if text.finish:
            value["stop_reason"] = stop_reason(text)
        if first and self._read and self._infos:
            value["prompt_logprobs"] = format_prompt_logprobs(self._infos[text.prompt].prefill)
        if self._token_ids:
            value |= format_token_ids(text.tokens)
            if first and self._infos:
                value |= format_prompt_token_ids(self._infos[text.prompt])
        return value

    def _logprobs_of(self, text: Text, content: str, prompt: str) -> dict[str, Any]:
        """Return the four lists for the tokens of a step, after those of an echoed prompt."""
        offsets = self._offsets[text.prompt * self._n + text.choice]
        positions = offsets.of(content, text.tokens, last=bool(text.finish))
        prefill = self._infos[text.prompt].prefill if prompt and self._infos else ()
        begin = 0 if self._keeps_start else prefill_offset(prompt, prefill)  # where the kept tokens of the prompt begin
        before = Offsets(begin).of(prompt[begin:], prefill, last=True)
        return _format_logprobs((*prefill, *text.tokens), [*before, *positions], as_ids=self._tokens_as_ids)

    def _prompt(self, at: int) -> str:
        prompt = self._prompts[at]
        if isinstance(prompt, str):
            return prompt
        return self._infos[at].text if self._infos else ""


def _format_logprobs(tokens: Sequence[Token], offsets: Sequence[int], *, as_ids: bool) -> dict[str, Any]:
    """Return the four lists of a completion's log-probabilities; as_ids: with ids of tokens instead of their texts."""
    name = partial(token_name, as_ids=as_ids)
    return {
        "text_offset": offsets,
        "token_logprobs": [token.logprob for token in tokens],
        "tokens": [*map(name, tokens)],
        "top_logprobs": [
            {name(top): top.logprob for top in (*reversed(token.top), token)} if token.logprob is not None else None
            for token in tokens
        ],
    }
