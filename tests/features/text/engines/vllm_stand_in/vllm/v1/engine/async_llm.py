"""The engine: see the package."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

FATAL = 7  # the token of `!`


class AsyncLLM:
    def __init__(self, arguments: AsyncEngineArgs) -> None:
        self._order = Path(arguments.model, "die")
        self._order.unlink(missing_ok=True)
        self._is_dead = False
        config = SimpleNamespace(
            get_vocab_size=lambda: 700,
            max_model_len=512,
            dtype="torch.float32",
            hf_config=SimpleNamespace(model_type="llama"),
        )
        self.vllm_config = SimpleNamespace(model_config=config, device_config=SimpleNamespace(device_type="cpu"))

    @classmethod
    def from_engine_args(cls, arguments: AsyncEngineArgs) -> "AsyncLLM":
        if not 0 < (arguments.kv_cache_memory_bytes or 0) < 1 << 40:
            raise RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")
        return cls(arguments)

    @property
    def errored(self) -> bool:
        self._is_dead = self._is_dead or self._order.exists()
        return self._is_dead

    async def generate(
        self, prompt: dict[str, list[int]], params: Any, name: str, *, lora_request: Any
    ) -> AsyncGenerator[Any, None]:
        tokens = prompt["prompt_token_ids"]
        self._is_dead = self._is_dead or FATAL in tokens
        found: list[int] = []
        for number in range(params.max_tokens):
            await asyncio.sleep(0.001)
            if self.errored:
                raise EngineDeadError
            found.append(tokens[number % len(tokens)])
            if params.output_kind is RequestOutputKind.DELTA or len(found) == params.max_tokens:
                text = SimpleNamespace(token_ids=found, logprobs=[_choices(token) for token in found])
                yield SimpleNamespace(outputs=[text], prompt_logprobs=None, num_cached_tokens=0)
                found = []

    def shutdown(self) -> None:
        self._is_dead = True


def _choices(token: int) -> dict[int, Any]:
    return {token: SimpleNamespace(logprob=-1.0, rank=1)}
