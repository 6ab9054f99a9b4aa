"""Errors of calls, named by who must act.

    DragomanError
    ├── CallerError           the client
    │   ├── InvalidInput          the request does not match the model
    │   │   ├── TooLarge              a payload exceeds a limit of the server
    │   │   ├── TooLong               prompt and completion exceed the context length
    │   │   ├── ModelNameMissing      no model name, and no default model
    │   │   └── AlreadyLoaded         the name is in use
    │   ├── ModelNotFound         unknown model or version
    │   │   └── PathNotFound      no model has a handler for this path
    │   ├── NotSupported          the model does not support the call or the form of its response
    │   │   └── NotImplementedByModel the model says so itself
    │   ├── NotReady              the model is not ready; retry later
    │   ├── Overloaded            the queue is full; retry later
    │   ├── RateLimited           the caller has reached its limit; retry later
    │   ├── DeadlineExceeded      the request timed out
    │   ├── Unauthorized          missing or wrong token
    │   └── Forbidden             not enabled by the operator
    └── ServerError           the server or the model
        ├── InvalidOutput         the model returned an invalid output
        ├── ModelFailed           the model raised, or could not be loaded
        │   ├── CancelledByModel      the model has cancelled the request
        │   ├── UnknownFailure        the model reports an error of unknown kind
        │   └── OutOfMemory           not enough memory to load it
        └── WorkerLost            the worker process exited during the call

Each class has its status in HTTP; the table of a protocol lists those that differ there. Errors are pickled between
processes, so each consists of its message and `retry_after_s`, which is an attribute of the class except for NotReady
and RateLimited.
"""

import re
from pathlib import Path

_MAX_OF_CALLER = 2000  # characters of a message


class DragomanError(Exception):
    """Base of all errors whose message is sent to clients.

    `status`: of a response in HTTP, unless the protocol has another one.
    `retry_after_s`: seconds after which the client may retry; None if retrying is useless.
    """

    status = 500
    retry_after_s: float | None = None

    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else type(self).__name__


class CallerError(DragomanError):
    """An error of the request. Its message may quote what was sent, which may be long: the middle is left out then."""

    status = 400

    @property
    def message(self) -> str:
        text = super().message
        return text if len(text) <= _MAX_OF_CALLER else f"{text[: _MAX_OF_CALLER - 500]} ... {text[-500:]}"


class InvalidInput(CallerError):
    """The request does not match the model. The message names the field, what was expected and what was sent."""


class TooLarge(InvalidInput):
    """A payload exceeds a limit of the server in bytes. The message names the setting."""

    status = 413


class TooLong(InvalidInput):
    """The prompt, or prompt and requested completion, exceed the context length."""


class ModelNameMissing(InvalidInput):
    """The call names no model, and there is no default model and not exactly one that can answer it."""


class AlreadyLoaded(InvalidInput):
    """A model, an adapter or a region was to be registered under a name that is in use."""


class AdapterNotFound(InvalidInput):
    """The model has no adapter of this name."""


class ModelNotFound(CallerError):
    """Unknown model or version."""

    status = 404


class PathNotFound(ModelNotFound):
    """No model has a handler for this path."""


class SequenceLost(InvalidInput):
    """The state of a sequence is gone with the worker that had it."""


class NotSupported(CallerError):
    """The model does not support the call or the form of its response."""


class NotImplementedByModel(NotSupported):
    """The model itself reports that it does not support the request."""

    status = 501


class NotReady(CallerError):
    """The model exists but cannot answer now."""

    status = 503

    def __init__(self, message: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(*([message] if message else []))
        self.retry_after_s = retry_after_s


class Overloaded(CallerError):
    """The queue is full."""

    status = 503
    retry_after_s = 1.0


class RateLimited(CallerError):
    """The caller has reached a limit of its key or its address. limits: the `RateLimits` of the key, if it has any."""

    status = 429

    def __init__(self, message: str, retry_after_s: float = 1.0, limits: object = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.limits = limits


class DeadlineExceeded(CallerError):
    """The request timed out."""

    status = 504


class Unauthorized(CallerError):
    """The call needs a token, which is missing or wrong."""

    status = 401


class Forbidden(CallerError):
    """The operator has not enabled this call."""

    status = 403


class ServerError(DragomanError):
    """An error of the server or of a model."""


class InvalidOutput(ServerError):
    """The model returned something that its signature or the call does not allow."""


class ModelFailed(ServerError):
    """The model raised, or could not be loaded."""


class CancelledByModel(ModelFailed):
    """The model has cancelled the request."""


class UnknownFailure(ModelFailed):
    """The model reports an error whose kind is unknown."""


class OutOfMemory(ModelFailed):
    """There is not enough memory to load the model."""


class WorkerLost(ServerError):
    """The worker process exited during the call."""


# Those that calls of every protocol may raise; `ServerError` stands for its kinds.
OF_CALLS = (
    InvalidInput,
    TooLarge,
    ModelNotFound,
    NotSupported,
    NotReady,
    Overloaded,
    RateLimited,
    DeadlineExceeded,
    Unauthorized,
    Forbidden,
    ServerError,
)


# --- the text of exceptions for clients -------------------------------------------------------------------

MAX_CHARACTERS = 1000

# The last line of a traceback: `ValueError: ...`.
_ERROR_LINE = re.compile(r"[A-Za-z_][\w.]*(: |$)")
# An absolute path of at least two parts, not after a word, as in m/s, or a scheme, as in http://.
_PART = r"[^\s/:'\"()\[\],;<>]"
_PATH = re.compile(rf"(?:file://|(?<![\w/:.~-]))(/{_PART}+)((?:/{_PART}+)*)/({_PART}*)")
_FILE_NAME = re.compile(r".*\.[A-Za-z]\w{0,4}", re.ASCII)


def public_text(error: BaseException) -> str:
    """Return `Type: message` of an exception, as `public_message` has it."""
    return public_message(f"{type(error).__name__}: {error_text(error)}")


def error_text(error: BaseException) -> str:
    """Return the text of an exception of any class, whose `__str__` may fail."""
    try:
        return str(error)
    except BaseException as failure:
        return f"its text cannot be read ({type(failure).__name__})"


def public_message(text: str) -> str:
    """Return a message without the tracebacks in it and with paths shortened to the names of files, bounded in length.

    Frameworks put tracebacks of their own into messages, TorchScript for example.
    """
    if "Traceback " in text:
        text = _without_tracebacks(text)
    bounded = text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + " ..."
    return _PATH.sub(_short, bounded) if "/" in bounded else bounded


def _without_tracebacks(text: str) -> str:
    """Drop each traceback up to the line that names its error."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        before, traceback, _ = line.partition("Traceback ")
        if traceback:
            inside = True
            lines.append(before)
        elif not inside or _ERROR_LINE.match(line):
            inside = False
            lines.append(line)
    return "\n".join(filter(str.strip, lines))


def _short(path: re.Match[str]) -> str:
    """Return the name of a file or folder for its path, if it exists here or looks like a file."""
    root, between, name = path.groups()
    if _FILE_NAME.fullmatch(name) or Path(root).exists():
        return name or (root + between).rpartition("/")[2]
    return path[0]
