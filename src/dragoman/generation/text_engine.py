"""What an engine for texts promises the server: ours keeps it, and so does another one behind an adapter."""

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any, Protocol

from dragoman.core.calls import Generate
from dragoman.core.metrics import Family
from dragoman.core.text import Generation, Prompt, TokenSpan
from dragoman.generation.job import PromptRequest


class TextEngine(Protocol):
    """One model at work. `details` is what it tells of itself: its context, its numbers, its end tokens."""

    @property
    def details(self) -> Mapping[str, Any]: ...

    @property
    def active(self) -> int:
        """How many prompts wait or are worked on."""

    async def prepare(self, call: Generate) -> None:
        """Do for a call what takes long and may be done aside: compile its grammar. `asked` would wait for it.

        Raises InvalidInput or Overloaded.
        """

    def split_call(self, call: Generate) -> list[PromptRequest]:
        """A call, checked and cut into tokens: one for each prompt.

        Raises InvalidInput naming the parameter that does not fit, or that this engine does not have; nothing has been
        computed then. May be called in any thread.
        """

    def generate(self, prompts: Sequence[PromptRequest]) -> AsyncGenerator[Generation, None]:
        """Pieces as they come, the first with what became of the prompts; closing the generator cancels them.

        Raises Overloaded where too many wait, WorkerLost where the engine is no more, and what went wrong in a text.
        """

    def spans(self, prompt: Prompt) -> tuple[str, tuple[TokenSpan, ...]]:
        """A prompt's text, and its tokens with the characters that each of them covers."""

    def measurements(self) -> Iterable[Family]:
        """What is known of its steps and its queue. From any thread."""

    async def close(self) -> None:
        """Stop; calls that are open fail with WorkerLost."""
