"""The kernels for a GPU, if they can be used on this machine."""

import logging
from functools import cache
from typing import Any

import torch

log = logging.getLogger("dragoman.generation")


@cache
def kernels(device: torch.device, dtype: torch.dtype) -> Any:
    """Return the module `gpu_kernels`, None on a CPU or if its kernels do not run; log why not."""
    if device.type != "cuda":
        return None
    try:
        from dragoman_text.generation import gpu_kernels
    except ImportError as error:
        problem = str(error)
    else:
        problem = gpu_kernels.problem(device, dtype)
        if not problem:
            return gpu_kernels
    log.warning("kernels in Triton are not used, PyTorch's take longer: %s", problem)
    return None
