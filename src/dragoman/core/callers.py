"""Who sent a request, and so owns what it leaves behind."""

from contextvars import ContextVar
from typing import Final, Literal

import msgspec

# The class of a key in queues: the highest priority that its requests may ask for, and its weight. "" limits nothing.
Priority = Literal["", "low", "normal", "high"]


class Caller(msgspec.Struct, frozen=True):
    """The sender of a request, as far as its key tells. What outlives the request belongs to the `owner`.

    `owner` is "" where requests need no key: all of them then share their state. `name` is that of the key, `address`
    that of the client; the audit log has both. `priority` is the class of the key.
    """

    owner: str = ""
    name: str = ""
    address: str = ""
    priority: Priority = ""


ANYONE: Final = Caller()

# The caller for whom the running model computes.
current_caller: Final[ContextVar[Caller]] = ContextVar("dragoman_caller", default=ANYONE)

# One owner leaves this part of a table to others: 1 / 8.
_RESERVED_PART = 8


def share_of(owner: str, limit: int) -> int:
    """Return how much of a limit one owner may use, so that no key alone fills what all keys share."""
    return limit - limit // _RESERVED_PART if owner else limit
