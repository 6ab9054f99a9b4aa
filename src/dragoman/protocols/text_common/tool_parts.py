"""Chunks of a completion that may call tools."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dragoman.protocols.text_common.tools import ToolCall


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A chunk of the arguments of the call at `index`; `opens` is that call, in its first chunk."""

    index: int
    arguments: str
    opens: ToolCall | None = None

    def to_json(self) -> list[dict[str, Any]]:
        """Format as OpenAI does: the name of a call first, with empty arguments, then the arguments."""
        opened = [{"index": self.index, **replace(self.opens, arguments="").to_json()}] if self.opens else []
        return [
            *opened,
            *([{"index": self.index, "function": {"arguments": self.arguments}}] if self.arguments else []),
        ]


@dataclass(frozen=True, slots=True)
class ToolChunk:
    """Text for the user, and chunks of tool calls."""

    content: str = ""
    deltas: Sequence[ToolCallDelta] = ()


def merged(deltas: Sequence[ToolCallDelta]) -> list[ToolCallDelta]:
    """Join the chunks of each call."""
    found: dict[int, ToolCallDelta] = {}
    for new in deltas:
        old = found.get(new.index)
        found[new.index] = new if old is None else replace(old, arguments=old.arguments + new.arguments)
    return list(found.values())


def gathered(part: ToolChunk) -> list[ToolCall]:
    """Return the calls that begin in a chunk, with their arguments so far."""
    return [replace(delta.opens, arguments=delta.arguments) for delta in merged(part.deltas) if delta.opens]
