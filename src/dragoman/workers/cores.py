"""The processor's cores, shared among the replicas of a model: libraries start a thread for every core in each."""

import os
import sys
from contextlib import suppress


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def share(replicas: int) -> int:
    """How many threads one of several replicas computes with."""
    return max(1, cores() // replicas)


def keep_to_share(replicas: int, *, of_thread: bool = False) -> None:
    """Have the linear algebra of this process keep to its share; needs threadpoolctl, which scikit-learn brings.

    OpenMP counts by thread, so each thread that computes asks for itself; OpenBLAS listens to one thread alone.
    """
    if replicas > 1:
        with suppress(ImportError):
            from threadpoolctl import threadpool_limits

            threadpool_limits(limits=share(replicas), user_api="openmp" if of_thread else None)
