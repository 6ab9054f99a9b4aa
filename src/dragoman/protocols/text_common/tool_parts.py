"""What becomes certain of a text that may call tools, piece by piece."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dragoman.protocols.text_common.tools import ToolCall


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of the arguments of the call at `index`; `opens` is that call, with its first piece."""

    index: int
    arguments: str
    opens: ToolCall | None = None

    def to_json(self) -> list[dict[str, Any]]:
        """OpenAI: a call's name comes first, with arguments that are empty, and then they do."""
        opened = [{"index": self.index, **replace(self.opens, arguments="").to_json()}] if self.opens else []
        return [
            *opened,
            *([{"index": self.index, "function": {"arguments": self.arguments}}] if self.arguments else []),
        ]


@dataclass(frozen=True, slots=True)
class ToolChunk:
    """What became certain: text for the reader, and pieces of calls."""

    content: str = ""
    deltas: Sequence[ToolCallDelta] = ()


def merged(deltas: Sequence[ToolCallDelta]) -> list[ToolCallDelta]:
    """The pieces of each call as one piece."""
    found: dict[int, ToolCallDelta] = {}
    for new in deltas:
        old = found.get(new.index)
        found[new.index] = new if old is None else replace(old, arguments=old.arguments + new.arguments)
    return list(found.values())


def gathered(part: ToolChunk) -> list[ToolCall]:
    """The calls that begin in one part, each with its arguments as far as they go."""
    return [replace(delta.opens, arguments=delta.arguments) for delta in merged(part.deltas) if delta.opens]
