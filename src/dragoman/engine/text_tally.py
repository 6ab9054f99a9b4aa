"""What the texts that a model version has written took: time, and tokens."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dragoman.core.histogram import SECONDS, TOKENS, Histogram
from dragoman.core.metrics import Family, Sample
from dragoman.core.text import Generation, PromptInfo

_DURATION = "dragoman_text_duration_seconds"
_VALIDATION = "dragoman_text_validation_seconds"
_QUEUE = "dragoman_text_queue_seconds"
_INFERENCE = "dragoman_text_inference_seconds"
_EACH_TOKEN = "dragoman_text_token_seconds"  # noqa: S105 - no secret
_PROMPT = "dragoman_text_prompt_tokens"
_GENERATED = "dragoman_text_generated_tokens"
_MOST = "dragoman_text_max_new_tokens"
_MEASURED: Mapping[str, tuple[str, Sequence[float]]] = {
    _DURATION: ("Seconds from the arrival of a call that went well to its end.", SECONDS),
    _VALIDATION: ("Seconds in which the prompts of a call were checked and cut into tokens.", SECONDS),
    _QUEUE: ("Seconds that a call's prompts then waited for the text engine.", SECONDS),
    _INFERENCE: ("Seconds of a call beside those two: its prompts were read, and its texts written.", SECONDS),
    _EACH_TOKEN: ("Seconds of a call's inference for each token of its longest text.", SECONDS),
    _PROMPT: ("Tokens of a prompt.", TOKENS),
    _GENERATED: ("Tokens of a text.", TOKENS),
    _MOST: ("How many new tokens a prompt's texts might have.", TOKENS),
}


class Written:
    """What is to be counted of one call, gathered from its pieces."""

    __slots__ = ("generated", "prompts")

    def __init__(self) -> None:
        self.prompts: Sequence[PromptInfo] = ()
        self.generated: list[int] = []

    def take(self, piece: Any) -> None:
        """A piece of what answers a Generate: a Generation."""
        assert isinstance(piece, Generation)
        if piece.prompts:
            self.prompts = piece.prompts
        for text in piece.texts:
            if text.finish:
                self.generated.append(text.generated)


class TextTally:
    """The measurements of one deployment: a few additions for each call that went well."""

    __slots__ = ("_measured",)

    def __init__(self) -> None:
        self._measured: dict[str, Histogram] = {}

    def add(self, written: Written, took_s: float) -> None:
        """One call more, which took so long."""
        self._observe(_DURATION, took_s)
        for generated in written.generated:
            self._observe(_GENERATED, generated)
        for info in written.prompts:
            self._observe(_PROMPT, info.tokens)
            if info.most_new is not None:
                self._observe(_MOST, info.most_new)
        waits = [info.waited_s for info in written.prompts if info.waited_s is not None]
        checks = [info.checked_s for info in written.prompts if info.checked_s is not None]
        if checks:
            self._observe(_VALIDATION, max(checks))
        if waits and checks:  # of an engine that does not tell how long a prompt waited, the rest is not known either
            inference_s = max(0.0, took_s - max(waits) - max(checks))
            self._observe(_QUEUE, max(waits))
            self._observe(_INFERENCE, inference_s)
            self._observe(_EACH_TOKEN, inference_s / max([1, *written.generated]))

    def _observe(self, name: str, value: float) -> None:
        histogram = self._measured.get(name)
        if histogram is None:
            histogram = self._measured[name] = Histogram(_MEASURED[name][1])
        histogram.observe(value)

    def samples(self, name: str, labels: Mapping[str, str]) -> Iterable[Sample]:
        return self._measured[name].samples(name, labels) if name in self._measured else ()


def families(told: Sequence[tuple[Mapping[str, str], TextTally]]) -> Iterable[Family]:
    """What was measured of deployments, by their labels."""
    for name, (line, _) in _MEASURED.items():
        samples = tuple(sample for labels, tally in told for sample in tally.samples(name, labels))
        if samples:
            yield Family(name, "histogram", line, samples)
