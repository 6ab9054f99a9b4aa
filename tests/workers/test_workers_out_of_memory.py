"""Lack of memory while a model is loaded is distinguished from other errors."""

import errno
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dragoman
from dragoman.core.calls import Infer
from dragoman.core.errors import ModelFailed, OutOfMemory
from dragoman.core.spec import ModelSpec
from dragoman.workers.local import ThreadPool
from workers.workers_harness import children, forget_children, pool_of, processes  # noqa: F401 - a fixture


def numpy_array() -> None:
    np.zeros(1 << 56, np.uint8)


def torch_tensor() -> None:
    import torch

    torch.zeros(1 << 45)


def memory_error_as_cause() -> None:
    """Raise an error whose cause is lack of memory."""
    try:
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
    except RuntimeError as error:
        raise dragoman.errors.ModelFailed("the folder cannot be loaded") from error


def no_memory_for_process() -> None:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def missing_file() -> None:
    raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))


def missing_key() -> None:
    raise KeyError("memory")


async def load_model(error: Callable[[], None]) -> None:
    class Loads(dragoman.Model):
        def load(self) -> None:
            error()

        def infer(self, call: Infer) -> Any:
            return {}

    await ThreadPool(ModelSpec(name="m", runtime="python", target=Loads), lambda: None).start()


@pytest.mark.parametrize("error", [numpy_array, torch_tensor, memory_error_as_cause, no_memory_for_process])
async def test_lack_of_memory_raises_out_of_memory(error: Callable[[], None]) -> None:
    with pytest.raises(OutOfMemory, match=r"^failed to load 'm', "):
        await load_model(error)


@pytest.mark.parametrize("error", [missing_file, missing_key])
async def test_other_errors_raise_model_failed(error: Callable[[], None]) -> None:
    with pytest.raises(ModelFailed, match=r"^failed to load 'm', ") as caught:
        await load_model(error)
    assert type(caught.value) is ModelFailed


async def test_out_of_memory_is_reported_from_a_worker_process() -> None:
    with pytest.raises(OutOfMemory, match="failed to load 'm', MemoryError"):
        async with pool_of("process", "NeedsMemory"):
            pass
    assert not children()


async def test_a_process_killed_while_loading_counts_as_out_of_memory() -> None:
    with pytest.raises(OutOfMemory, match=r"died \(signal SIGKILL\) while it loaded, probably out of memory"):
        async with processes("KilledInLoad"):
            pass
    assert not children()
