"""OpenVINO GenAI in the text generation benchmark: its continuous batching, in this process.

usage, in an environment that has it and optimum-intel:
    python -m benchmarks.generation_openvino FOLDER DTYPE [WEIGHTS]
"""

import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.generation_side import GGUF, Engine, Text, config, threads

_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}
_WEIGHTS = "fp32"


def exported(folder: Path, weights: str) -> Path:
    """Export the model for OpenVINO with weights `fp32`, `int8` or `int4`, if that has not been done.

    Return the folder.
    """
    target = folder.with_name(f"{folder.name}-openvino-{weights}")
    if not target.exists():
        program = str(Path(sys.executable).with_name("optimum-cli"))
        arguments = ("export", "openvino", "--task", "text-generation-with-past", "--weight-format", weights)
        subprocess.run([program, *arguments, "--model", str(folder), str(target)], check=True)
    return target


def openvino(folder: str, dtype: str, weights: str = _WEIGHTS) -> Engine:
    """Return ContinuousBatchingPipeline with the KV cache in `dtype`; with a GGUF file, its own defaults."""
    import numpy as np
    from openvino import Tensor
    from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, GenerationStatus, SchedulerConfig

    schedule = SchedulerConfig()
    schedule.max_num_seqs = 32
    schedule.max_num_batched_tokens = 256
    schedule.cache_size = 1
    properties = {"INFERENCE_NUM_THREADS": str(threads())}
    if dtype != GGUF:
        precision = _PRECISIONS[dtype]
        properties |= {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
    source = folder if dtype == GGUF else str(exported(Path(folder), weights))
    pipeline = ContinuousBatchingPipeline(source, schedule, "CPU", properties)

    def generate(prompts: list[list[int]], new: int) -> list[Text]:
        config = GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.apply_chat_template = new, True, False
        began_s = time.perf_counter()
        handles: list[Any] = [
            pipeline.add_request(number, Tensor(np.array([prompt], np.int64)), config)
            for number, prompt in enumerate(prompts)
        ]
        found = [Text() for _ in prompts]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for handle, text in zip(handles, found, strict=True):
                while handle.can_read():
                    for each in handle.read().values():
                        text.add(each.generated_ids, began_s)
        assert all(handle.get_status() == GenerationStatus.FINISHED for handle in handles)
        return found

    return Engine(generate)


if __name__ == "__main__":
    config(partial(openvino, weights=sys.argv[3] if len(sys.argv) > 3 else _WEIGHTS), *sys.argv[1:3])
