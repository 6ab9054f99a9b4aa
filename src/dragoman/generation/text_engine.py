"""Interface of text engines, implemented by our engine and by adapters of external ones."""

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any, Protocol

from dragoman.core.calls import Generate
from dragoman.core.metrics import Family
from dragoman.core.text import Generation, Prompt, TokenSpan
from dragoman.generation.job import PromptRequest


class TextEngine(Protocol):
    """Text engine of one model. `details`: metadata such as context length, dtype and end tokens."""

    @property
    def details(self) -> Mapping[str, Any]: ...

    @property
    def active(self) -> int:
        """Number of waiting and running prompts."""

    async def prepare(self, call: Generate) -> None:
        """Do the slow preparation of a call, compiling its grammar, for which `split_call` would block.

        Raises InvalidInput or Overloaded.
        """

    def split_call(self, call: Generate) -> list[PromptRequest]:
        """Validate and tokenize a call; return one request for each prompt. Thread-safe.

        Raises InvalidInput for a parameter that is invalid or not supported by this engine.
        """

    def generate(self, prompts: Sequence[PromptRequest]) -> AsyncGenerator[Generation, None]:
        """Yield chunks as they are generated, the first with information on the prompts; closing cancels them.

        Raises Overloaded if the queue is full, WorkerLost if the engine has ended, and errors of the generation.
        """

    def spans(self, prompt: Prompt) -> tuple[str, tuple[TokenSpan, ...]]:
        """Return the text of a prompt and its tokens with their character offsets."""

    def measurements(self) -> Iterable[Family]:
        """Return metrics of steps and queue. Thread-safe."""

    async def close(self) -> None:
        """Stop the engine; open calls fail with WorkerLost."""
