"""Log formats of the server and its workers: text, or one JSON object per line."""

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from dragoman.system.load_steps import loading_model
from dragoman.system.request_context import log_fields

# The logger of audit lines, which are logged at any level, also if a client switches INFO off.
AUDIT = "dragoman.audit"
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

_MAX_CHARACTERS = 1 << 16  # of a message, and of a traceback

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
        self.has_iso_times = False

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        if self.has_iso_times:
            return _iso_time(record)
        offset = time.strftime("%z", time.localtime(record.created))
        return f"{super().formatTime(record, datefmt)}{offset[:3]}:{offset[3:]}"

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (named by logging)
        ids = "".join(f" {name}={value}" for name, value in _context_fields(record).items())
        return f"{_bounded(super().formatMessage(record))}{ids}".translate(_CONTROL)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return _with_bars(_bounded(super().formatException(ei)))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        return _with_bars(super().formatStack(stack_info))


def _bounded(text: str) -> str:
    """Return a text without its middle if it is long: it may quote a request of many MB, compressed to a few KB."""
    half = _MAX_CHARACTERS // 2
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:half]} ... {text[-half:]}"


def _with_bars(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.translate(_CONTROL_IN_LINE).split("\n"))


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, message, extra fields, and a traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _iso_time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": _bounded(record.getMessage()),
            **_context_fields(record),
            **extra_fields(record),
        }
        if record.exc_info:
            line["traceback"] = _bounded(self.formatException(record.exc_info))
        return json.dumps(line, default=str)


def extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields that a record has besides those of every record."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}


def _context_fields(record: logging.LogRecord) -> Mapping[str, Any]:
    """Return the ids of the request, and the model that is loaded if a library of others has logged the record."""
    fields = log_fields()
    model = "" if record.name.partition(".")[0] == "dragoman" else loading_model()
    return {**fields, "model": model} if model else fields


def _iso_time(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


class _LevelFilter(logging.Filter):
    """Drops records of single levels; `debug` is the number that a client has set for them."""

    def __init__(self, dropped: frozenset[int], debug: int) -> None:
        super().__init__()
        self.dropped = dropped
        self.debug = debug

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno not in self.dropped or record.name == AUDIT


class LogOptions(msgspec.Struct, frozen=True):
    """Which records are logged, by level; `debug` is Triton's `log_verbose_level`, 0 for none. `has_iso_times`: times
    are in UTC as ISO 8601 says."""

    info: bool
    warning: bool
    error: bool
    debug: int
    has_iso_times: bool


_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


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
    logging.getLogger(AUDIT).setLevel(logging.INFO)
    # JAX logs each missing accelerator at INFO, watchfiles each change, and TensorFlow that it restores parameters.
    for name in ("jax._src.xla_bridge", "tensorflow", "watchfiles"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # Warnings of Python are lines of the log, too. scikit-learn warns for each part of a pipeline that another version
    # has saved, which its runtime reports once.
    logging.captureWarnings(True)
    warnings.filterwarnings("ignore", message="Trying to unpickle estimator")
    # TensorFlow writes to standard error itself: errors only, unless the operator wants more.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def set_level(level: str, levels: Mapping[str, int]) -> None:
    """Change the level of a log that `set_up` has set up, and of worker processes that start later.

    The log of a program that has its own handlers is left alone.
    """
    handler = _own_handler()
    if handler is None:
        return
    handler.filters.clear()
    os.environ["DRAGOMAN_LOG_LEVEL"] = level
    logging.getLogger().setLevel(level.upper())
    for name, each in levels.items():
        logging.getLogger(name).setLevel(each)


def log_options() -> LogOptions | None:
    """Return which records are logged; None for the log of a program that has its own handlers."""
    handler = _own_handler()
    if handler is None:
        return None
    level = logging.getLogger().level
    level_filter = next(
        (each for each in handler.filters if isinstance(each, _LevelFilter)), _LevelFilter(frozenset(), 1)
    )
    shown = {name: level <= each and each not in level_filter.dropped for name, each in _LEVELS.items()}
    formatter = handler.formatter
    has_iso_times = not isinstance(formatter, TextFormatter) or formatter.has_iso_times
    return LogOptions(**shown, debug=level_filter.debug * (level <= logging.DEBUG), has_iso_times=has_iso_times)


def set_log_options(options: LogOptions) -> None:
    """Change which records are logged, and the level of worker processes that start later.

    Raises ValueError if the format of times cannot change, as that of a log in JSON.
    """
    handler = _own_handler()
    assert handler is not None, "the log has our handler if it has options"
    if isinstance(handler.formatter, TextFormatter):
        handler.formatter.has_iso_times = options.has_iso_times
    elif not options.has_iso_times:
        raise ValueError("the times of a log in JSON are in ISO 8601")
    shown = [each for name, each in _LEVELS.items() if getattr(options, name)]
    level = min([logging.DEBUG] * (options.debug > 0) + shown, default=logging.CRITICAL)
    set_level(logging.getLevelName(level).lower(), {})
    handler.addFilter(_LevelFilter(frozenset(_LEVELS.values()) - {*shown}, options.debug))


def _own_handler() -> logging.Handler | None:
    """Return the handler of `set_up`; None if the program has its own."""
    handlers = logging.getLogger().handlers
    return next((each for each in handlers if isinstance(each.formatter, TextFormatter | JsonFormatter)), None)


def set_up_from_environment() -> None:
    """Log as the process that started this one."""
    set_up(os.environ.get("DRAGOMAN_LOG_FORMAT", "text"), os.environ.get("DRAGOMAN_LOG_LEVEL", "info"))
