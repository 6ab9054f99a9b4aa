"""Parameters that a protocol knows and that have no effect."""

from collections.abc import Sequence

from dragoman.core.errors import InvalidInput
from dragoman.protocols.wire import Policy


def refuse_unused(names: Sequence[str], policy: Policy) -> None:
    """Raise InvalidInput in strict mode if there are such names."""
    if names and policy.strict_parameters:
        value = ", ".join(f"`{name}`" for name in names)
        raise InvalidInput(f"parameters that have no effect here: {value}; expected none of them")
