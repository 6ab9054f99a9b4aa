"""The audit log: who changed a model or the server, and which requests were refused, with key and address."""

import json
import logging
import re
from collections.abc import Mapping

from dragoman.core.callers import Caller
from dragoman.system.logs import AUDIT

log = logging.getLogger(AUDIT)
# A value that is one word of a line.
_WORD = re.compile(r"[!#-~]+")
_MAX_CHARACTERS = 2000  # of a field


def log_change(action: str, caller: Caller, fields: Mapping[str, object], error: BaseException | None = None) -> None:
    """Log a change of a model or of the server, or with an `error` the attempt."""
    outcome = {"outcome": "done"} if error is None else {"outcome": "failed", "reason": str(error) or "cancelled"}
    log_event(action, {**fields, "key": caller.name, "client": caller.address, **outcome})


def log_event(action: str, fields: Mapping[str, object]) -> None:
    """Log a line with these fields, which a log in JSON has as fields too; those that are None are left out."""
    named = {
        name: value[:_MAX_CHARACTERS] if isinstance(value, str) else value
        for name, value in fields.items()
        if value is not None
    }
    text = " ".join(f"{name}={_format(value)}" for name, value in named.items())
    log.info("%s: %s", action, text, extra={"action": action, **named})


def _format(value: object) -> str:
    text = str(value)
    return text if _WORD.fullmatch(text) else json.dumps(text, ensure_ascii=False)
