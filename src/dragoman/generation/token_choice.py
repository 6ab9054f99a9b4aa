"""A chosen token, as every engine passes it to the completion writer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """A token, its log-probability under the model and the top tokens with theirs; or `error` instead of a token."""

    token: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    error: Exception | None = None
