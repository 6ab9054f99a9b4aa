"""Sequences of requests to a stateful model: the options of a model, and a request's place in its sequence."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from dragoman.core.errors import InvalidInput
from dragoman.core.options import Option

# Hexadecimal digits of a derived id: 60 bits, which fit into every datatype of 64.
_ID_DIGITS = 15


@dataclass(frozen=True, kw_only=True)
class SequenceOptions:
    """How a stateful model serves sequences: the attribute `sequences` of its class, or the table `[model.sequences]`.

    Each sequence has a slot of one replica until it ends. Requests of different sequences are merged into batches.
    """

    strategy: Annotated[
        Literal["oldest", "direct"],
        Option("oldest: max_candidates slots per replica; direct: one per row of a batch; others wait for a slot"),
    ] = "oldest"
    max_candidates: Annotated[int, Option("slots per replica with the strategy oldest", minimum=1)] = 1024
    max_sequences: Annotated[
        int, Option("live sequences, also those that wait for a slot; others get 503; one key may have 7/8", minimum=1)
    ] = 1024
    idle_s: Annotated[float, Option("seconds without a request after which a sequence ends", minimum=0.001)] = 60.0
    ids: Annotated[
        Literal["any", "integer", "text"], Option("type of sequence_id that requests need; others are rejected")
    ] = "any"


class SequenceStep(msgspec.Struct):
    """One request of a sequence: its client's `id`, and whether it is the first (`start`) and the last (`end`).

    `state` lasts as long as the sequence: a dictionary for the model. `slot` and `number` locate it in the replica.
    `owner` is that of the request: sequences of two owners are different ones, also with equal ids.
    """

    id: int | str
    start: bool = False
    end: bool = False
    slot: int = 0
    number: int = 0
    state: dict[str, Any] | None = None
    owner: str = ""

    @property
    def correlation_id(self) -> int | str:
        """The id for models that keep states by it themselves: the client's, or with an owner one derived from both."""
        if not self.owner or not self.id:
            return self.id
        digest = hashlib.sha256(f"{type(self.id).__name__} {self.id} {self.owner}".encode()).hexdigest()
        return digest if isinstance(self.id, str) else int(digest[:_ID_DIGITS], 16) or 1


def parse_id(value: object) -> int | str:
    """Return the parameter `sequence_id`. Raises InvalidInput unless it is an unsigned number of 64 bits or text."""
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 64):
        return value
    raise InvalidInput(f"parameter 'sequence_id': expected a positive integer below 2^64 or text, got {value!r:.64}")


def parse_flag(parameters: Mapping[str, object], name: str) -> bool:
    """Return `sequence_start` or `sequence_end`, False by default. Raises InvalidInput unless it is a boolean."""
    value = parameters.get(name, False)
    if not isinstance(value, bool):
        raise InvalidInput(f"parameter '{name}': expected true or false, got {value!r:.64}")
    return value


def check_id_type(id_: object, model: str, ids: str) -> None:
    """Raise InvalidInput unless a `sequence_id` has the type `ids`: `any`, `integer` or `text`."""
    if ids != "any" and isinstance(id_, str) != (ids == "text"):
        got = "text" if isinstance(id_, str) else "an integer"
        expected = "text" if ids == "text" else "an integer"
        raise InvalidInput(f"parameter 'sequence_id': expected {expected} for model '{model}', got {got}")
