"""OpenVINO GenAI in the text generation benchmark: its continuous batching, in this process.

usage, in an environment that has it and optimum-intel: python -m benchmarks.generation_openvino FOLDER DTYPE
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.generation_side import Generate, Times, config

_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}


def exported(folder: Path) -> Path:
    """Export the model for OpenVINO with FP32 weights, if that has not been done, and return the folder."""
    target = folder.with_name(f"{folder.name}-openvino")
    if not target.exists():
        program = str(Path(sys.executable).with_name("optimum-cli"))
        arguments = ("export", "openvino", "--task", "text-generation-with-past", "--weight-format", "fp32")
        subprocess.run([program, *arguments, "--model", str(folder), str(target)], check=True)
    return target


def openvino(folder: str, dtype: str) -> Generate:
    """Return a function that generates with ContinuousBatchingPipeline, one thread per core, KV cache in `dtype`."""
    import numpy as np
    from openvino import Tensor
    from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, GenerationStatus, SchedulerConfig

    schedule = SchedulerConfig()
    schedule.max_num_seqs = 32
    schedule.max_num_batched_tokens = 256
    schedule.cache_size = 1
    precision = _PRECISIONS[dtype]
    properties = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
    properties["INFERENCE_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
    pipeline = ContinuousBatchingPipeline(str(exported(Path(folder))), schedule, "CPU", properties)

    def generate(prompts: list[list[int]], new: int) -> Times:
        config = GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.apply_chat_template = new, True, False
        began_s = time.perf_counter()
        handles: list[Any] = [
            pipeline.add_request(number, Tensor(np.array([prompt], np.int64)), config)
            for number, prompt in enumerate(prompts)
        ]
        found: Times = [[] for _ in prompts]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for handle, times in zip(handles, found, strict=True):
                while handle.can_read():
                    tokens = sum(len(each.generated_ids) for each in handle.read().values())
                    times += [time.perf_counter() - began_s] * tokens
        assert all(handle.get_status() == GenerationStatus.FINISHED for handle in handles)
        return found

    return generate


if __name__ == "__main__":
    config(openvino, *sys.argv[1:])
