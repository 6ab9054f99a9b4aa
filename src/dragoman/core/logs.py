"""How log lines look, in the server and in its workers: for people, or as one JSON object a line."""

import json
import logging
import os
import sys
import time
from typing import Literal

_KNOWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, what a caller adds, and a traceback if any."""

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
    """Send the log of this process to standard error; the workers that it starts do the same by the environment."""
    os.environ["DRAGOMAN_LOG_FORMAT"] = style
    os.environ["DRAGOMAN_LOG_LEVEL"] = level
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s [%(process)d]: %(message)s")
    handler.setFormatter(JsonFormatter() if style == "json" else plain)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    # JAX tells at INFO of each accelerator that is not there.
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)


def set_up_from_environment() -> None:
    """What `set_up` was told in the process that started this one."""
    set_up(os.environ.get("DRAGOMAN_LOG_FORMAT", "text"), os.environ.get("DRAGOMAN_LOG_LEVEL", "info"))
