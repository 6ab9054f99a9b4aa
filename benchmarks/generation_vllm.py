"""vLLM in the text generation benchmark: its asynchronous engine on all cores, as its manual recommends.

usage, in an environment that has vLLM: python -m benchmarks.generation_vllm FOLDER DTYPE
"""

import asyncio
import atexit
import itertools
import os
import sys
import time
from pathlib import Path

from benchmarks.generation_side import Engine, Text, config


def vllm(folder: str, dtype: str) -> Engine:
    """Return AsyncLLM, which computes in its own process and needs one event loop."""
    os.environ.update(_environment())
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=folder,
        dtype=dtype,
        max_num_seqs=32,
        kv_cache_memory_bytes=1 << 30,
        generation_config="vllm",
        disable_log_stats=True,
    )
    engine, loop, names = AsyncLLM.from_engine_args(arguments), asyncio.new_event_loop(), itertools.count()
    atexit.register(engine.shutdown)

    async def client(prompt: list[int], new: int, began_s: float) -> Text:
        delta = RequestOutputKind.DELTA
        sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, output_kind=delta)
        text = Text()
        async for chunk in engine.generate({"prompt_token_ids": prompt}, sampling, str(next(names))):
            text.add(chunk.outputs[0].token_ids, began_s)
        return text

    async def together(prompts: list[list[int]], new: int) -> list[Text]:
        began_s = time.perf_counter()
        return list(await asyncio.gather(*(client(prompt, new, began_s) for prompt in prompts)))

    return Engine(lambda prompts, new: loop.run_until_complete(together(prompts, new)))


def _environment() -> dict[str, str]:
    """Return the environment of its processes. By default vLLM leaves one core free."""
    found = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_CACHE_ROOT": str(Path(sys.prefix) / "compiled"),
    }
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    return found | ({"LD_PRELOAD": str(openmp)} if openmp.exists() else {})


if __name__ == "__main__":
    config(vllm, *sys.argv[1:])
