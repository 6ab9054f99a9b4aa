"""Ids of the request that the running code works for: taken from the client or generated, and in every log line."""

import itertools
import re
import secrets
import threading
from collections.abc import Mapping
from contextvars import Context as Variables
from contextvars import ContextVar, copy_context
from typing import Any, Final

HEADER: Final = "x-request-id"
# Names in log lines of the first values of a context. Trace flags and state follow those of a traced request.
FIELDS: Final = ("request_id", "trace_id", "span_id")
# A client's id: printable ASCII without spaces. Others are ignored, because they would not be one word of a log line.
_VALID: Final = re.compile(r"[!-~]{1,128}")

# A generated id is this prefix, which differs between processes, and a number. The first 9e9 numbers have this length.
PREFIX: Final = f"{secrets.token_hex(8)}-".encode()
NUMBER_DIGITS: Final = 10
# A number, the request id and perhaps the trace (five values), or the contexts of a batch.
Context = int | tuple[str, ...] | list[Any]

# A request without an id of the client gets a number, which is formatted when it is needed.
new_number: Final = itertools.count(10 ** (NUMBER_DIGITS - 1)).__next__
_current: Final[ContextVar[Context]] = ContextVar("dragoman_request", default=())
set_context: Final = _current.set


class Running:
    """The context of the request whose first step a thread runs now, () if it runs none.

    Setting it costs 0.02 us. Setting a context variable for each request costs 0.9 us, as it slows down later lookups.
    """

    __slots__ = ("context",)

    def __init__(self) -> None:
        self.context: Context = ()


_running: Final[dict[int, Running]] = {}  # by thread, one for each that runs an event loop


def running_in_thread() -> Running:
    """Return the object for this thread."""
    thread = threading.get_ident()
    running = _running.get(thread)
    if running is None:
        running = _running[thread] = Running()
    return running


def get_context() -> Context:
    """Return the context of the request that the running code works for, () outside of any."""
    running = _running.get(threading.get_ident())
    return (running is not None and running.context) or _current.get()


def variables_of(context: Context) -> Variables:
    """Return a copy of the current context variables for code that works for a request.

    Never set the context where code of several requests runs, as in callbacks of a connection: the next one would find
    the id of a request of another client.
    """
    copied = copy_context()
    copied.run(set_context, context)
    return copied


def client_request_id(headers: Mapping[str, str]) -> str:
    """Return the request id that the client sent, "" if it sent none or an invalid one."""
    sent = headers.get(HEADER, "")
    return sent if sent and _VALID.fullmatch(sent) else ""


def new_context(client_id: str) -> Context:
    """Return the context of a new request, with the client's id or a new one."""
    return (client_id,) if client_id else new_number()


def values(context: Context) -> tuple[str, ...]:
    """Return the request id of a context, and the values of its trace if there is one.

    For a batch the ids of all requests, and the trace flags and state only if one request is traced.
    """
    if isinstance(context, int):
        return (f"{PREFIX.decode()}{context}",)
    if isinstance(context, tuple):
        return context
    members = [*map(values, context)]
    ids = ",".join(filter(None, (member[0] for member in members if member)))
    traces = [member[1:] for member in members if len(member) > 1]
    if len(traces) > 1:
        return (ids, *(",".join(trace[i] for trace in traces) for i in range(2)))
    return (ids, *traces[0]) if traces else (ids,)


def request_id(context: Context | None = None) -> str:
    """Return the id of a context, by default of the current one; "" outside of any request.

    Give the context where the request is known.
    """
    return next(iter(values(get_context() if context is None else context)), "")


def log_fields() -> dict[str, str]:
    """Return the fields of a log line of the current request; none outside of any."""
    return {name: value for name, value in zip(FIELDS, values(get_context()), strict=False) if value}
