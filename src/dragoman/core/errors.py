"""Errors of calls, named by who must act.

    DragomanError
    ├── CallerError           the client
    │   ├── InvalidInput          the request does not match the model
    │   │   ├── TooLong               prompt and completion exceed the context length
    │   │   ├── Unaddressed           no model name, and no default model
    │   │   └── AlreadyLoaded         a model with this name exists
    │   ├── ModelNotFound         unknown model or version
    │   │   └── PathNotFound      no model has a handler for this path
    │   ├── NotSupported          the model does not support the call or the form of its response
    │   ├── NotReady              the model is not ready; retry later
    │   ├── Overloaded            the queue is full; retry later
    │   ├── DeadlineExceeded      the request timed out
    │   ├── Unauthorized          missing or wrong token
    │   └── Forbidden             not enabled by the operator
    └── ServerError           the server or the model
        ├── InvalidOutput         the model returned an invalid output
        ├── ModelFailed           the model raised, or could not be loaded
        │   └── OutOfMemory           not enough memory to load it
        └── WorkerLost            the worker process exited during the call

Each protocol maps these to its status in one table. Errors are pickled between processes, so each consists of its
message alone; `retry_after_s` is an attribute of the class.
"""


class DragomanError(Exception):
    """Base of all errors whose message is sent to clients.

    `retry_after_s`: seconds after which the client may retry; None if retrying is useless.
    """

    retry_after_s: float | None = None

    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else type(self).__name__


class CallerError(DragomanError):
    """An error of the request."""


class InvalidInput(CallerError):
    """The request does not match the model. The message names the field, what was expected and what was sent."""


class TooLong(InvalidInput):
    """The prompt, or prompt and requested completion, exceed the context length."""


class Unaddressed(InvalidInput):
    """The call names no model, and there is no default model and not exactly one that can answer it."""


class AlreadyLoaded(InvalidInput):
    """A model was to be registered under a name that is in use."""


class ModelNotFound(CallerError):
    """Unknown model or version."""


class PathNotFound(ModelNotFound):
    """No model has a handler for this path."""


class NotSupported(CallerError):
    """The model does not support the call or the form of its response."""


class NotReady(CallerError):
    """The model exists but cannot answer now."""

    retry_after_s = 1.0


class Overloaded(CallerError):
    """The queue is full."""

    retry_after_s = 1.0


class DeadlineExceeded(CallerError):
    """The request timed out."""


class Unauthorized(CallerError):
    """The call needs a token, which is missing or wrong."""


class Forbidden(CallerError):
    """The operator has not enabled this call."""


class ServerError(DragomanError):
    """An error of the server or of a model."""


class InvalidOutput(ServerError):
    """The model returned something that its signature or the call does not allow."""


class ModelFailed(ServerError):
    """The model raised, or could not be loaded."""


class OutOfMemory(ModelFailed):
    """There is not enough memory to load the model."""


class WorkerLost(ServerError):
    """The worker process exited during the call."""
