"""Metrics of text generation: durations and token counts of each deployment."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self, get_args

from dragoman.core.calls import Call, Generate
from dragoman.core.metrics import SECONDS, TOKENS, Family, Histogram, Labels, Sample
from dragoman.core.text import Chat, FinishReason, Generation, PromptInfo
from dragoman.system.call_times import CallTimes, TokenUsage

_DURATION = "dragoman_text_duration_seconds"
_VALIDATION = "dragoman_text_validation_seconds"
_QUEUE = "dragoman_text_queue_seconds"
_INFERENCE = "dragoman_text_inference_seconds"
_EACH_TOKEN = "dragoman_text_token_seconds"  # noqa: S105 - no secret
_FIRST_TOKEN = "dragoman_text_time_to_first_token_seconds"  # noqa: S105 - no secret
_FINISHED = "dragoman_text_finished_total"
_PROMPT = "dragoman_text_prompt_tokens"
_GENERATED = "dragoman_text_generated_tokens"
_MAX_NEW_TOKENS = "dragoman_text_max_new_tokens"
_FIRST_TOKEN_SECONDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.4, 0.6, 0.8, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
_REASONS = tuple(reason for reason in get_args(FinishReason) if reason)
_METRICS: Mapping[str, tuple[str, Sequence[float]]] = {
    _DURATION: ("Seconds from the arrival of a successful call to its end.", SECONDS),
    _VALIDATION: ("Seconds to validate and tokenize the prompts of a call.", SECONDS),
    _QUEUE: ("Seconds that the prompts of a call waited in the queue of the text engine.", SECONDS),
    _INFERENCE: ("Seconds of prefill and decoding: the duration without validation and queue.", SECONDS),
    _FIRST_TOKEN: ("Seconds from the arrival of a successful call to its first token.", _FIRST_TOKEN_SECONDS),
    _EACH_TOKEN: ("Seconds of inference per token of the longest completion of a call.", SECONDS),
    _PROMPT: ("Tokens of a prompt.", TOKENS),
    _GENERATED: ("Tokens of a completion.", TOKENS),
    _MAX_NEW_TOKENS: ("Limit of new tokens of a prompt's completions.", TOKENS),
}


class GenerationUsage:
    """Tokens and times of one Generate call, summed up over its chunks."""

    __slots__ = ("prompts", "texts")

    def __init__(self) -> None:
        self.prompts: Sequence[PromptInfo] = ()
        self.texts: dict[tuple[int, int], tuple[int, str]] = {}  # by prompt and choice: tokens, and why it ended

    @classmethod
    def of(cls, generation: Generation) -> Self:
        usage = cls()
        usage.add(generation)
        return usage

    def add(self, chunk: Any) -> None:
        """Add one chunk, a Generation."""
        assert isinstance(chunk, Generation)
        if chunk.prompts:
            self.prompts = chunk.prompts
        for text in chunk.texts:
            self.texts[text.prompt, text.choice] = text.generated, text.finish

    @property
    def generated(self) -> list[int]:
        """Tokens of each completion that has ended."""
        return [generated for generated, finish in self.texts.values() if finish]

    def tokens(self, call: Call[Any], times: CallTimes) -> TokenUsage:
        """Return the tokens of the call so far."""
        assert isinstance(call, Generate)
        infos, texts = self.prompts, [self.texts[key] for key in sorted(self.texts)]
        first, sampling = infos[0] if infos else None, call.sampling
        temperature, top_p = (sampling.temperature, sampling.top_p) if sampling.do_sample else (None, None)
        if first is not None and first.temperature is not None:  # with the model's defaults
            temperature, top_p = first.temperature, first.top_p
        return TokenUsage(
            "chat" if any(isinstance(prompt, Chat) for prompt in call.prompts) else "completion",
            input=sum(info.tokens for info in infos),
            cached=sum(info.cached for info in infos),
            output=sum(generated for generated, _ in texts),
            longest=max((generated for generated, _ in texts), default=0),
            finish_reasons=tuple(finish for _, finish in texts),
            max_tokens=sampling.max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            stream=call.stream,
            first_token_s=_first_token_s(infos, times),
        )


class GenerationCounters:
    """Histograms of the successful Generate calls of one deployment, and why their completions ended."""

    __slots__ = ("_finished", "_histograms")

    def __init__(self) -> None:
        self._histograms: dict[str, Histogram] = {}
        self._finished = dict.fromkeys(_REASONS, 0)

    def count(self, usage: GenerationUsage, duration_s: float, first_token_s: float | None) -> None:
        """Count one call."""
        self._observe(_DURATION, duration_s)
        for _, reason in usage.texts.values():
            if reason in self._finished:
                self._finished[reason] += 1
        if first_token_s is not None:
            self._observe(_FIRST_TOKEN, min(first_token_s, duration_s))
        for generated in usage.generated:
            self._observe(_GENERATED, generated)
        for info in usage.prompts:
            self._observe(_PROMPT, info.tokens)
            if info.max_new is not None:
                self._observe(_MAX_NEW_TOKENS, info.max_new)
        waits = [info.waited_s for info in usage.prompts if info.waited_s is not None]
        checks = [info.checked_s for info in usage.prompts if info.checked_s is not None]
        if checks:
            self._observe(_VALIDATION, max(checks))
        if waits and checks:  # an engine that does not report queueing has no inference time either
            inference_s = max(0.0, duration_s - max(waits) - max(checks))
            self._observe(_QUEUE, max(waits))
            self._observe(_INFERENCE, inference_s)
            self._observe(_EACH_TOKEN, inference_s / max([1, *usage.generated]))

    def _observe(self, name: str, value: float) -> None:
        histogram = self._histograms.get(name)
        if histogram is None:
            histogram = self._histograms[name] = Histogram(_METRICS[name][1])
        histogram.observe(value)

    def families(self, labels: Labels) -> Iterable[Family]:
        """Return the metrics of a deployment with these labels: histograms, if they have counted anything."""
        finished = tuple(Sample(_FINISHED, {**labels, "reason": r}, n) for r, n in self._finished.items())
        yield Family(_FINISHED, "counter", "Completions of successful calls by the reason of their end.", finished)
        for name, histogram in self._histograms.items():
            yield Family(name, "histogram", _METRICS[name][0], distributions=(histogram.distribution(name, labels),))


def _first_token_s(prompts: Sequence[PromptInfo], times: CallTimes) -> float | None:
    """Return the seconds from the arrival of a call until its first token, None if they are unknown.

    A stream has its first chunk then. Of another call the text engine knows how long its prompts waited, were checked
    and were computed; the queue before that is in `times`, which may count the engine's too.
    """
    if times.first_chunk_s:
        return times.first_chunk_s - times.arrived_s
    first = [
        max(info.waited_s, times.queue_s) + (info.checked_s or 0.0) + info.read_s
        for info in prompts
        if info.waited_s is not None and info.read_s is not None
    ]
    return min(first, default=None)
