"""What a batch is: its state, as the row of its job has it."""

from collections.abc import Mapping
from typing import Literal

import msgspec

Api = Literal["openai", "anthropic"]
Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"]
ENDED: frozenset[Status] = frozenset(("completed", "failed", "expired", "cancelled"))


class BatchProblem(msgspec.Struct, frozen=True):
    """Why a batch failed. line: of the input, from 1, if the reason is there."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Batch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A batch. Times are Unix times; times_s has those of the states that it has reached, besides its creation.

    total: lines of the input, 0 until they are checked. completed, failed: lines with a status below or from 400.
    expired, cancelled: lines that were not sent.
    """

    id: str
    api: Api
    created_s: float
    expires_s: float
    input_file_id: str = ""
    endpoint: str = ""
    window: str = ""
    metadata: Mapping[str, str] | None = None
    output_expires_after_s: int | None = None
    status: Status = "validating"
    times_s: Mapping[str, float] = {}
    problems: tuple[BatchProblem, ...] = ()
    total: int = 0
    completed: int = 0
    failed: int = 0
    expired: int = 0
    cancelled: int = 0
    output_file_id: str = ""
    error_file_id: str = ""

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED
