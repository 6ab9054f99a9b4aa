"""What can go wrong with a call, named by whose fault it is.

    DragomanError
    ├── CallerError           the caller, or the moment
    │   ├── InvalidInput          what was asked does not fit the model
    │   │   ├── TooLong               prompt and text do not fit into the model's context
    │   │   ├── Unaddressed           no model is named, and it is not plain which one is meant
    │   │   └── AlreadyLoaded         a model of that name is there, where a new one was to come
    │   ├── ModelNotFound         no such model or version
    │   │   └── PathNotFound      no model has such a path of its own
    │   ├── NotSupported          the model, or this form of answer, cannot do that
    │   ├── NotReady              the model is not ready (yet); try again later
    │   ├── Overloaded            the queue is full; try again later
    │   ├── DeadlineExceeded      the caller's time is over
    │   ├── Unauthorized          no token, or a wrong one
    │   └── Forbidden             the operator has not enabled this
    └── ServerError           ours
        ├── InvalidOutput         the model answered something it should not
        ├── ModelFailed           the model raised, or could not be loaded
        │   └── OutOfMemory           there is no memory to load it into
        └── WorkerLost            the process that computed the answer died

Each protocol has one table from these to its own status. An error crosses process borders by pickle, so
each is made of its message alone; `retry_after_s` is a property of the class.
"""


class DragomanError(Exception):
    """The root of every error that a caller may be told about.

    `retry_after_s` is how many seconds a caller should wait before trying the same again; None where trying
    again is of no use.
    """

    retry_after_s: float | None = None

    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else type(self).__name__


class CallerError(DragomanError):
    """The caller, or the moment, is at fault."""


class InvalidInput(CallerError):
    """What was asked does not fit: the message names the field, what was expected and what came."""


class TooLong(InvalidInput):
    """A prompt, or it and the text that was asked for, is longer than the model's context."""


class Unaddressed(InvalidInput):
    """The call names no model, and there is no default nor only one that can answer it."""


class AlreadyLoaded(InvalidInput):
    """A model was to be registered by a name that another one has."""


class ModelNotFound(CallerError):
    """There is no such model, or no such version of it."""


class PathNotFound(ModelNotFound):
    """No model has a path of its own that is called so."""


class NotSupported(CallerError):
    """The model, or this form of answer, cannot do what was asked."""


class NotReady(CallerError):
    """The model exists but cannot answer now."""

    retry_after_s = 1.0


class Overloaded(CallerError):
    """More calls wait than the operator allows."""

    retry_after_s = 1.0


class DeadlineExceeded(CallerError):
    """The time that the caller gave is over."""


class Unauthorized(CallerError):
    """The call needs a token, and none or a wrong one came."""


class Forbidden(CallerError):
    """The operator has not enabled this call."""


class ServerError(DragomanError):
    """We, or the model that we hold, are at fault."""


class InvalidOutput(ServerError):
    """The model answered something that its signature or the call does not allow."""


class ModelFailed(ServerError):
    """The model raised, or could not be loaded."""


class OutOfMemory(ModelFailed):
    """There is not enough memory to load the model; there may be when others are unloaded."""


class WorkerLost(ServerError):
    """The process that computed the answer died before it was done."""
