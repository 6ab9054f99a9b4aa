"""The audit log: who changed a model or the server, and which requests were refused, with key and address.

Each line is a record of the logger `dragoman.audit`. An `AuditWriter` among its handlers keeps the lines in a file: the
hook `dragoman.audit` makes it.
"""

import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from dragoman.core.callers import ANYONE, Caller
from dragoman.core.errors import NotReady
from dragoman.core.metrics import Family
from dragoman.system.logs import AUDIT, extra_fields
from dragoman.system.request_context import log_fields

log = logging.getLogger(AUDIT)
# The entry point of what keeps the lines: dragoman.audit, file.
HOOK = "audit", "file"
# A value that is one word of a line.
_WORD = re.compile(r"[!#-~]+")
_MAX_CHARACTERS = 2000  # of a field
# The user and the password in a URL.
_USER_OF_URL = re.compile(r"(?<=://)[^/?#\s@]+@")


class AuditWriter(logging.Handler):
    """Keeps the audit lines of this process from `attach` to `close`.

    A program with several servers has one audit log: each of their files gets all lines.
    """

    problem = ""  # why lines cannot be kept now

    def attach(self) -> None:
        log.setLevel(logging.INFO)  # whatever the level of the program's log is
        log.addHandler(self)

    def close(self) -> None:
        log.removeHandler(self)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.write(_timed(extra_fields(record)))
        except Exception:
            self.handleError(record)

    def write(self, line: Mapping[str, object]) -> None:
        """Keep a line. A line that cannot be kept is a `problem`, not an error."""
        raise NotImplementedError

    def admit(self, line: Mapping[str, object]) -> None:
        """Decide about a change that is about to be made. Raises NotReady if its line could not be kept."""

    def families(self) -> Iterable[Family]:
        return ()


def writers() -> list[AuditWriter]:
    """Return what keeps the audit lines of this process."""
    return [each for each in log.handlers if isinstance(each, AuditWriter)]


def write_line(line: Mapping[str, object]) -> None:
    """Keep a line of another process, which has logged it."""
    for each in writers():
        each.write(line)


@contextmanager
def audited(
    action: str, caller: Caller, fields: Mapping[str, object], state: Callable[[], object] | None = None
) -> Iterator[None]:
    """Log the change that the block makes, or its failure, once it has ended. Raises NotReady if it must not be made.

    state: returns what is changed, for the fields `before` and `after`.
    """
    before = {} if state is None else {"before": state()}
    if kept_by := writers():
        line = _timed(_bounded({"action": action, **fields, **_sender(caller), **before, "outcome": "begun"}))
        try:
            for each in kept_by:
                each.admit(line)
        except NotReady as error:
            log_change(action, caller, {**fields, **before}, error)
            raise
    try:
        yield
    except BaseException as error:
        log_change(action, caller, {**fields, **before}, error)
        raise
    log_change(action, caller, {**fields, **before, **({} if state is None else {"after": state()})})


def log_change(action: str, caller: Caller, fields: Mapping[str, object], error: BaseException | None = None) -> None:
    """Log a change of a model or of the server, or with an `error` the attempt."""
    outcome = {"outcome": "done"} if error is None else {"outcome": "failed", "reason": str(error) or "cancelled"}
    log_event(action, {**fields, **_sender(caller), **outcome})


def log_reload(what: str, cause: str, fields: Mapping[str, object], error: BaseException | None = None) -> None:
    """Log that the server has read something again, such as the file of its keys."""
    log_change(f"reload {what}", ANYONE, {"cause": cause, **fields}, error)


def log_event(action: str, fields: Mapping[str, object]) -> None:
    """Log a line with these fields, which a log in JSON has as fields too; those that are None are left out."""
    named = _bounded({"action": action, **fields})
    text = " ".join(f"{name}={_format(value)}" for name, value in named.items() if name != "action")
    log.info("%s: %s", action, text, extra=named)


def _sender(caller: Caller) -> dict[str, object]:
    return {"key": caller.name, "client": caller.address}


def _bounded(fields: Mapping[str, object]) -> dict[str, object]:
    """Return the fields that are not None: texts are cut, have no passwords in URLs, and are JSON for what is neither
    text nor a number."""
    return {name: _bounded_value(value) for name, value in fields.items() if value is not None}


def _bounded_value(value: object) -> object:
    if isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return _USER_OF_URL.sub("***@", text)[:_MAX_CHARACTERS]


def _timed(fields: Mapping[str, object]) -> dict[str, object]:
    """Return a line with the time (UTC) and the ids of the current request."""
    now_s = time.time()
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_s)) + f".{int(now_s * 1000) % 1000:03d}Z"
    return {"time": moment, **fields, **log_fields()}


def _format(value: object) -> str:
    text = str(value)
    return text if _WORD.fullmatch(text) else json.dumps(text, ensure_ascii=False)
