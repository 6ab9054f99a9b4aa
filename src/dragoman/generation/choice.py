"""One choice of a token, as every engine tells it to the writer of a text."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """A token, its log-probability under the model, and the likeliest ones with theirs. `fault` in place of a token."""

    token: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    fault: Exception | None = None
