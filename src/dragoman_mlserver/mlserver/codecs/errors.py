"""Errors of codecs."""

from collections.abc import Mapping, Sequence
from typing import Any

from dragoman_mlserver.mlserver.errors import MLServerError


class CodecError(MLServerError):
    """A payload cannot be encoded or decoded."""

    def __init__(self, msg: str) -> None:
        super().__init__(f"There was an error encoding / decoding the payload: {msg}")


class CodecNotFound(MLServerError):
    """There is no codec for a content type, a name or a type of value."""

    def __init__(
        self, name: str | None = None, payload_type: str | None = None, is_input: bool = False, is_request: bool = False
    ) -> None:
        place = "request" if is_request and is_input else "response" if is_request else "field"
        message = f"Codec not found for {'input' if is_input else 'output'} {place}"
        message += f" with name '{name}'" if name else ""
        message += (" and" if name else " with") + f" type {payload_type}" if payload_type else ""
        super().__init__(message)


class OutputNotFound(MLServerError):
    """No codec can encode a result."""

    def __init__(self, output_idx: int, output_type: type, output_hints: Sequence[Any]) -> None:
        hints = ", ".join(f"'{h}'" for h in output_hints)
        super().__init__(
            f"Unexpected output value at position '{output_idx}' ({output_type}). Expected outputs are {hints} outputs."
        )


class InputsNotFound(MLServerError):
    """A request has inputs that the method does not take."""

    def __init__(self, inputs: Sequence[Any], input_hints: Mapping[str, Any]) -> None:
        got, known = (", ".join(f"'{n}'" for n in names) for names in ([i.name for i in inputs], input_hints))
        verb = "was" if len(inputs) == 1 else "were"
        super().__init__(f"Input {got} {verb} not found. Available inputs are {known}.")
