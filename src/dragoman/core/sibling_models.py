"""Access of a model to the other models of its server."""

from typing import Protocol, TypeVar

from dragoman.core.calls import ModelDescription, Request

A = TypeVar("A")


class SiblingModels(Protocol):
    """The other models of the server, for a model in the server's process.

    `describe` and `call` block: use them in threads of the model, never on the event loop.
    """

    def describe(self, name: str) -> ModelDescription:
        """Return the metadata of a model, once it is loaded.

        Raises ModelNotFound, NotReady if it could not be loaded, and InvalidInput if it waits for the model that
        asks.
        """

    def unavailable(self, name: str) -> str:
        """Return why a model is not ready, or "". Returns at once, in any thread."""

    def call(self, request: Request[A]) -> A:
        """Return the answer of the model of the request. It is queued, limited and counted like any other call."""
