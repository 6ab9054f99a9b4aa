"""Number of CPU threads: the fastest one by measurement, and one while other processes need the cores."""

import time
from collections.abc import Callable

import torch

# PyTorch's default, or OMP_NUM_THREADS, before a model sets another number.
MAX_THREADS = torch.get_num_threads()
# Doubling the threads must reduce the time to this share. Measurements are repeated _TURNS times, up to _ENOUGH_S.
_PAYS = 0.9
_TURNS, _ENOUGH_S = 3, 2.0
# With this much CPU time for two steps, two threads are always used.
_LONG_S = 0.02
# If the main thread ran for less than this share of a window, other processes use the cores, and threads that
# synchronize with each other wait for them.
_WINDOW_S, _CROWDED = 0.1, 0.75
# Duration of single-threaded computation afterwards: first, and maximum after repeated detection.
_ALONE_S, _ALONE_MOST_S = 1.0, 16.0


class AdaptiveThreads:
    """Context manager for computation that chooses between all threads and one.

    OpenMP threads spin while they wait for each other, which saves time on an idle machine but costs many times as much
    if other processes need the cores.
    """

    def __init__(
        self,
        threads: int,
        clock: Callable[[], float] = time.perf_counter,
        computed: Callable[[], float] = time.thread_time,
        use: Callable[[int], None] = torch.set_num_threads,
    ) -> None:
        self._threads, self._clock, self._compute, self._use = threads, clock, computed, use
        self._alone_s = _ALONE_S
        self._until_s: float | None = None
        self._wall_s = self._cpu_s = 0.0
        self._begun = (0.0, 0.0)
        use(threads)

    def __enter__(self) -> None:
        self._begun = self._clock(), self._compute()
        if self._until_s is not None and self._begun[0] >= self._until_s:
            self._until_s = None
            self._use(self._threads)

    def __exit__(self, *_: object) -> None:
        if self._until_s is not None:
            return
        now_s = self._clock()
        self._wall_s += now_s - self._begun[0]
        self._cpu_s += self._compute() - self._begun[1]
        if self._wall_s < _WINDOW_S:
            return
        if self._cpu_s < _CROWDED * self._wall_s:
            self._use(1)
            self._until_s = now_s + self._alone_s
            self._alone_s = min(2 * self._alone_s, _ALONE_MOST_S)
        else:
            self._alone_s = _ALONE_S
        self._wall_s = self._cpu_s = 0.0


def fastest_thread_count(work_s: Callable[[int], float], most: int) -> int:
    """Return the number of threads, 1, 2, 4, ... up to `most`, with the shortest time of `work_s(threads)`.

    More threads are chosen only if they are clearly faster: small models become slower with them. Long work uses at
    least two, whatever the load of the machine at the moment.
    """
    tried = [1 << i for i in range(most.bit_length())]
    begin_s = time.thread_time()
    work_s(1)
    if time.thread_time() - begin_s > _LONG_S:
        tried = tried[1:] or tried
    taken_s = dict.fromkeys(tried, float("inf"))
    for _ in range(_TURNS if len(tried) > 1 else 0):  # in turns, so that other load affects all candidates
        for threads in tried:
            taken_s[threads] = min(taken_s[threads], work_s(threads))
        if sum(taken_s.values()) > _ENOUGH_S:
            break
    best = tried[0]
    for threads in tried:
        if taken_s[threads] < taken_s[best] * _PAYS:
            best = threads
    return best
