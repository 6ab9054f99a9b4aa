"""Options of the engine."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class AsyncEngineArgs:
    model: str
    dtype: str
    max_num_seqs: int
    max_logprobs: int
    enable_prefix_caching: bool
    generation_config: str
    structured_outputs_config: dict[str, Any] = field(default_factory=dict)
    disable_log_stats: bool = True
    trust_remote_code: bool = False
    kv_cache_memory_bytes: int | None = None  # else nearly all memory of the machine
