"""How many threads compute: as many as prove quickest, and one alone while others keep the cores busy."""

import time
from collections.abc import Callable

import torch

# What PyTorch takes of itself, or was told by OMP_NUM_THREADS, before a model sets another number for what comes later.
MOST = torch.get_num_threads()
# Twice the threads have to take less than this share of the time, which is taken so often, unless it is long.
_PAYS = 0.9
_TURNS, _ENOUGH_S = 3, 2.0
# Two steps of so much CPU time are worth a second thread.
_LONG_S = 0.02
# Of so much time the thread that leads has computed less than that share: others are on the cores, and threads that
# wait for each other wait for them.
_WINDOW_S, _CROWDED = 0.1, 0.75
# How long it then works alone: at first, and at most, where it is found so again and again.
_ALONE_S, _ALONE_MOST_S = 1.0, 16.0


class Crew:
    """What the thread that computes does is done `with` this.

    Threads that wait for each other spin for a while. On a machine of their own that saves time; where others need the
    cores, it costs them and everybody many times what it saves. One thread waits for nobody.
    """

    def __init__(
        self,
        threads: int,
        clock: Callable[[], float] = time.perf_counter,
        computed: Callable[[], float] = time.thread_time,
        use: Callable[[int], None] = torch.set_num_threads,
    ) -> None:
        self._threads, self._clock, self._computed, self._use = threads, clock, computed, use
        self._alone_s = _ALONE_S
        self._until_s: float | None = None
        self._wall_s = self._cpu_s = 0.0
        self._begun = (0.0, 0.0)
        use(threads)

    def __enter__(self) -> None:
        self._begun = self._clock(), self._computed()
        if self._until_s is not None and self._begun[0] >= self._until_s:
            self._until_s = None
            self._use(self._threads)

    def __exit__(self, *_: object) -> None:
        if self._until_s is not None:
            return
        now_s = self._clock()
        self._wall_s += now_s - self._begun[0]
        self._cpu_s += self._computed() - self._begun[1]
        if self._wall_s < _WINDOW_S:
            return
        if self._cpu_s < _CROWDED * self._wall_s:
            self._use(1)
            self._until_s = now_s + self._alone_s
            self._alone_s = min(2 * self._alone_s, _ALONE_MOST_S)
        else:
            self._alone_s = _ALONE_S
        self._wall_s = self._cpu_s = 0.0


def quickest(work_s: Callable[[int], float], most: int) -> int:
    """With how many threads, 1, 2, 4 and so on to `most`, work is done soonest that tells how long so many took.

    More threads are taken only where they pay: small models lose by them. Work that takes long pays with two in any
    case, however a busy machine looks at the moment.
    """
    tried = [1 << i for i in range(most.bit_length())]
    begin_s = time.thread_time()
    work_s(1)
    if time.thread_time() - begin_s > _LONG_S:
        tried = tried[1:] or tried
    taken_s = dict.fromkeys(tried, float("inf"))
    for _ in range(_TURNS if len(tried) > 1 else 0):  # by turns, so that what else runs falls on all alike
        for threads in tried:
            taken_s[threads] = min(taken_s[threads], work_s(threads))
        if sum(taken_s.values()) > _ENOUGH_S:
            break
    best = tried[0]
    for threads in tried:
        if taken_s[threads] < taken_s[best] * _PAYS:
            best = threads
    return best
