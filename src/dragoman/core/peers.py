"""What a model may ask of the other models of its server."""

from typing import Protocol, TypeVar

from dragoman.core.calls import ModelDescription, Request

A = TypeVar("A")


class Peers(Protocol):
    """The server's other models, for one that runs in the server's process. Both methods wait, so they are for threads
    of the model's own, never for the event loop."""

    def describe(self, name: str) -> ModelDescription:
        """What a model is, once it is loaded. Raises ModelNotFound, NotReady where it could not be loaded, and
        InvalidInput where it waits for the one that asks."""

    def unavailable(self, name: str) -> str:
        """Why a model is not ready; "" while it is. For any thread; returns at once."""

    def call(self, request: Request[A]) -> A:
        """The answer of the model that the request names: queued, limited and counted as any other call."""
