"""Number of threads: fewer while other processes use the cores."""

import pytest

pytest.importorskip("torch")

from dragoman_text.generation.threads import AdaptiveThreads


class FakeMachine:
    """A fake clock, and the CPU time of the main thread."""

    def __init__(self) -> None:
        self.now_s = self.computed_s = 100.0
        self.threads: list[int] = []

    def adaptive(self, threads: int) -> AdaptiveThreads:
        return AdaptiveThreads(threads, lambda: self.now_s, lambda: self.computed_s, self.threads.append)

    def steps(self, adaptive: AdaptiveThreads, seconds: float, share: float) -> None:
        """Run steps of 10 ms with this share of CPU time."""
        for _ in range(round(seconds * 100)):
            with adaptive:
                self.now_s += 0.01
                self.computed_s += 0.01 * share


def test_all_threads_compute_on_an_idle_machine() -> None:
    machine = FakeMachine()
    machine.steps(machine.adaptive(4), 5.0, 0.95)
    assert machine.threads == [4]


def test_one_thread_computes_while_others_use_the_cores_with_growing_retry_delays() -> None:
    machine = FakeMachine()
    adaptive = machine.adaptive(4)
    machine.steps(adaptive, 8.0, 0.4)
    assert machine.threads == [4, 1, 4, 1, 4, 1, 4, 1], "retries after 1, 2 and 4 seconds"
    machine.steps(adaptive, 9.0, 0.95)
    assert machine.threads[8:] == [4], "all threads again on an idle machine"


def test_the_retry_delay_is_reset_after_a_quiet_period() -> None:
    machine = FakeMachine()
    adaptive = machine.adaptive(2)
    machine.steps(adaptive, 0.2, 0.4)
    machine.steps(adaptive, 2.0, 0.95)
    machine.steps(adaptive, 0.2, 0.4)
    machine.steps(adaptive, 1.2, 0.95)
    assert machine.threads == [2, 1, 2, 1, 2]


def test_time_between_steps_does_not_count() -> None:
    machine = FakeMachine()
    adaptive = machine.adaptive(2)
    for _ in range(100):
        machine.steps(adaptive, 0.01, 0.95)
        machine.now_s += 0.5
    assert machine.threads == [2]


def test_failed_steps_count() -> None:
    machine = FakeMachine()
    adaptive = machine.adaptive(2)
    for _ in range(20):
        with pytest.raises(ValueError, match="broken"), adaptive:
            machine.now_s += 0.01
            raise ValueError("broken")
    assert machine.threads == [2, 1]
