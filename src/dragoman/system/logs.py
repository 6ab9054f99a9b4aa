"""Log formats of the server and its workers: text, or one JSON object per line."""

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from dragoman.system.request_context import log_fields

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

# Characters that may end a line or control a terminal, except tabs: C0, DEL, C1 and two separators of Unicode.
_CONTROL = {n: f"\\x{n:02x}" for n in (*range(32), *range(127, 160)) if n != 9} | {0x2028: "\\u2028", 0x2029: "\\u2029"}
_CONTROL |= {10: "\\n", 13: "\\r"}
_CONTROL_IN_LINE = {n: text for n, text in _CONTROL.items() if n != 10}


class TextFormatter(logging.Formatter):
    """One line per message, with line breaks escaped and ids of the request. Lines of a traceback follow, after a bar.

    So text of a client or a model cannot forge a log line.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s [%(process)d]: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (named by logging)
        ids = "".join(f" {name}={value}" for name, value in log_fields().items())
        return f"{super().formatMessage(record)}{ids}".translate(_CONTROL)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return _with_bars(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        return _with_bars(super().formatStack(stack_info))


def _with_bars(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.translate(_CONTROL_IN_LINE).split("\n"))


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, message, extra fields, and a traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
            **log_fields(),
            **{k: v for k, v in vars(record).items() if k not in _STANDARD_FIELDS},
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up(
    style: Literal["text", "json"] | str, level: str = "info", levels: Mapping[str, int] = MappingProxyType({})
) -> None:
    """Log to standard error; `levels` are those of single loggers.

    Workers that this process starts do the same, by environment variables.
    """
    os.environ["DRAGOMAN_LOG_FORMAT"] = style
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    logging.getLogger().handlers = [handler]
    set_level(level, levels)
    # JAX logs each missing accelerator at INFO, and watchfiles each change.
    for name in ("jax._src.xla_bridge", "watchfiles"):
        logging.getLogger(name).setLevel(logging.WARNING)


def set_level(level: str, levels: Mapping[str, int]) -> None:
    """Change the level of a log that `set_up` has set up, and of worker processes that start later.

    The log of a program that has its own handlers is left alone.
    """
    root = logging.getLogger()
    if not any(isinstance(handler.formatter, TextFormatter | JsonFormatter) for handler in root.handlers):
        return
    os.environ["DRAGOMAN_LOG_LEVEL"] = level
    root.setLevel(level.upper())
    for name, each in levels.items():
        logging.getLogger(name).setLevel(each)


def set_up_from_environment() -> None:
    """Log as the process that started this one."""
    set_up(os.environ.get("DRAGOMAN_LOG_FORMAT", "text"), os.environ.get("DRAGOMAN_LOG_LEVEL", "info"))
