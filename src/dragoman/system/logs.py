"""Log formats of the server and its workers: text, or one JSON object per line."""

import json
import logging
import os
import sys
import time
from typing import Any, Literal

_KNOWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


# What may end a line or steer a terminal, but for tabs: C0, DEL, C1 and the two separators of Unicode.
_CONTROL = {n: f"\\x{n:02x}" for n in (*range(32), *range(127, 160)) if n != 9} | {0x2028: "\\u2028", 0x2029: "\\u2029"}
_CONTROL |= {10: "\\n", 13: "\\r"}
_ENDS_NO_LINE = {n: text for n, text in _CONTROL.items() if n != 10}


class TextFormatter(logging.Formatter):
    """One line per message, with line breaks escaped. Lines of a traceback follow, prefixed with a bar.

    Text of a client or a model cannot forge a log line, because each of those begins with the time.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s [%(process)d]: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (named by logging)
        return super().formatMessage(record).translate(_CONTROL)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return _barred(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        return _barred(super().formatStack(stack_info))


def _barred(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.translate(_ENDS_NO_LINE).split("\n"))


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, message, extra fields, and a traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
            **{k: v for k, v in vars(record).items() if k not in _KNOWN},
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up(style: Literal["text", "json"] | str, level: str = "info") -> None:
    """Log to standard error. Workers that this process starts do the same, by environment variables."""
    os.environ["DRAGOMAN_LOG_FORMAT"] = style
    os.environ["DRAGOMAN_LOG_LEVEL"] = level
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    # JAX tells at INFO of each accelerator that is not there.
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)


def set_up_from_environment() -> None:
    """Log as the process that started this one."""
    set_up(os.environ.get("DRAGOMAN_LOG_FORMAT", "text"), os.environ.get("DRAGOMAN_LOG_LEVEL", "info"))
