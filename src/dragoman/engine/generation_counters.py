"""Metrics of text generation: durations and token counts of each deployment."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from dragoman.core.calls import Call, Generate
from dragoman.core.metrics import SECONDS, TOKENS, Family, Histogram, Labels
from dragoman.core.text import Chat, Generation, PromptInfo
from dragoman.system.call_times import TokenUsage

_DURATION = "dragoman_text_duration_seconds"
_VALIDATION = "dragoman_text_validation_seconds"
_QUEUE = "dragoman_text_queue_seconds"
_INFERENCE = "dragoman_text_inference_seconds"
_EACH_TOKEN = "dragoman_text_token_seconds"  # noqa: S105 - no secret
_PROMPT = "dragoman_text_prompt_tokens"
_GENERATED = "dragoman_text_generated_tokens"
_MAX_NEW_TOKENS = "dragoman_text_max_new_tokens"
_METRICS: Mapping[str, tuple[str, Sequence[float]]] = {
    _DURATION: ("Seconds from the arrival of a successful call to its end.", SECONDS),
    _VALIDATION: ("Seconds to validate and tokenize the prompts of a call.", SECONDS),
    _QUEUE: ("Seconds that the prompts of a call waited in the queue of the text engine.", SECONDS),
    _INFERENCE: ("Seconds of prefill and decoding: the duration without validation and queue.", SECONDS),
    _EACH_TOKEN: ("Seconds of inference per token of the longest completion of a call.", SECONDS),
    _PROMPT: ("Tokens of a prompt.", TOKENS),
    _GENERATED: ("Tokens of a completion.", TOKENS),
    _MAX_NEW_TOKENS: ("Limit of new tokens of a prompt's completions.", TOKENS),
}


class GenerationUsage:
    """Tokens and times of one Generate call, summed up over its chunks."""

    __slots__ = ("generated", "prompts", "texts")

    def __init__(self) -> None:
        self.prompts: Sequence[PromptInfo] = ()
        self.generated: list[int] = []
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
            if text.finish:
                self.generated.append(text.generated)

    def tokens(self, call: Call[Any]) -> TokenUsage:
        """Return the tokens of the call so far."""
        assert isinstance(call, Generate)
        infos, texts = self.prompts, [self.texts[key] for key in sorted(self.texts)]
        first, sampling = infos[0] if infos else None, call.sampling
        temperature, top_p = (sampling.temperature, sampling.top_p) if sampling.do_sample else (None, None)
        if first is not None and first.temperature is not None:  # with the model's defaults
            temperature, top_p = first.temperature, first.top_p
        parts = (first.checked_s, first.waited_s, first.read_s) if first is not None and len(infos) == 1 else (None,)
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
            first_token_s=None if None in parts else sum(filter(None, parts)),
        )


class GenerationCounters:
    """Histograms of the successful Generate calls of one deployment."""

    __slots__ = ("_histograms",)

    def __init__(self) -> None:
        self._histograms: dict[str, Histogram] = {}

    def count(self, usage: GenerationUsage, duration_s: float) -> None:
        """Count one call."""
        self._observe(_DURATION, duration_s)
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
        for name, histogram in self._histograms.items():
            yield Family(name, "histogram", _METRICS[name][0], distributions=(histogram.distribution(name, labels),))
