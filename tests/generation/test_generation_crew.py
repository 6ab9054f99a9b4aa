"""How many threads compute: fewer while others keep the cores busy, and all of them again afterwards."""

import pytest

pytest.importorskip("torch")

from dragoman.generation.adaptive_threads import AdaptiveThreads


class Machine:
    """A clock, and the part of it that the thread that leads has computed."""

    def __init__(self) -> None:
        self.now_s = self.computed_s = 100.0
        self.threads: list[int] = []

    def crew(self, threads: int) -> AdaptiveThreads:
        return AdaptiveThreads(threads, lambda: self.now_s, lambda: self.computed_s, self.threads.append)

    def steps(self, crew: AdaptiveThreads, seconds: float, share: float) -> None:
        """Steps of 10 ms, of which it computes that share."""
        for _ in range(round(seconds * 100)):
            with crew:
                self.now_s += 0.01
                self.computed_s += 0.01 * share


def test_all_threads_compute_while_nobody_else_does() -> None:
    machine = Machine()
    machine.steps(machine.crew(4), 5.0, 0.95)
    assert machine.threads == [4]


def test_one_thread_computes_while_others_keep_the_cores_busy_and_tries_again_ever_more_seldom() -> None:
    machine = Machine()
    crew = machine.crew(4)
    machine.steps(crew, 8.0, 0.4)
    assert machine.threads == [4, 1, 4, 1, 4, 1, 4, 1], "after 1, 2 and 4 seconds alone"
    machine.steps(crew, 9.0, 0.95)
    assert machine.threads[8:] == [4], "and goes on with all of them when it is quiet"


def test_it_tries_soon_again_when_it_has_been_quiet_between() -> None:
    machine = Machine()
    crew = machine.crew(2)
    machine.steps(crew, 0.2, 0.4)
    machine.steps(crew, 2.0, 0.95)
    machine.steps(crew, 0.2, 0.4)
    machine.steps(crew, 1.2, 0.95)
    assert machine.threads == [2, 1, 2, 1, 2]


def test_time_between_steps_does_not_count() -> None:
    machine = Machine()
    crew = machine.crew(2)
    for _ in range(100):
        machine.steps(crew, 0.01, 0.95)
        machine.now_s += 0.5
    assert machine.threads == [2]


def test_a_step_that_fails_counts_as_another() -> None:
    machine = Machine()
    crew = machine.crew(2)
    for _ in range(20):
        with pytest.raises(ValueError, match="broken"), crew:
            machine.now_s += 0.01
            raise ValueError("broken")
    assert machine.threads == [2, 1]
