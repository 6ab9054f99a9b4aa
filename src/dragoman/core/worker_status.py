"""The status of a worker process, as operators see it."""

import msgspec

# What clients see of a reason that only operators may see.
HIDDEN_REASON = "in the log of the server; shown here with --control-open, a control token or API keys"


# States of worker processes. `waiting`: it is being started, or a launcher has to bring it.
WORKER_STATES = ("busy", "idle", "hung", "unavailable", "waiting")


class WorkerStatus(msgspec.Struct, frozen=True):
    """A worker process of a model, or one that is awaited.

    host: its machine, "" for the server's.
    state: one of `WORKER_STATES`, for a `reason`.
    calls: number of calls that it has.
    mean_s: running estimate of the time per call in seconds, 0 while unknown.
    """

    host: str
    process: str
    state: str
    reason: str = ""
    calls: int = 0
    mean_s: float = 0.0
