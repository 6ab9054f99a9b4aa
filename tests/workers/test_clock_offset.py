"""Times of a worker on another machine, by our clock."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from dragoman.system.call_times import ClockOffset

MS = st.floats(0.01, 50)


@given(offset_s=st.floats(-1e4, 1e4), calls=st.lists(st.tuples(MS, MS, MS, MS), min_size=2, max_size=10))
def test_computations_of_one_worker_do_not_overlap(
    offset_s: float, calls: list[tuple[float, float, float, float]]
) -> None:
    """The estimate of the offset changes from call to call; the next call is sent before the last one is answered."""
    clock, at_s, now_s, reported = ClockOffset(), 100.0, 0.0, []
    for there, compute, back, idle in calls:
        started_s = at_s + idle / 1000
        computed_s = started_s + compute / 1000
        # Answers of one connection arrive in their order.
        sent_s, now_s = started_s - there / 1000, max(now_s, computed_s + back / 1000)
        theirs = started_s + offset_s, computed_s + offset_s
        clock.measure(sent_s, (theirs[0], *theirs, theirs[1]), now_s)
        found = clock.convert(*theirs, sent_s, now_s)
        assert sent_s <= found[0] <= found[1] <= now_s
        assert found[1] - found[0] <= compute / 1000 + 1e-9
        reported.append(found)
        at_s = computed_s
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(reported))


def test_the_duration_is_kept_and_a_call_that_goes_on_has_no_end() -> None:
    clock = ClockOffset()
    clock.measure(100.0, (1000.001, 1000.001, 1000.061, 1000.061), 100.062)
    started_s, computed_s = clock.convert(1000.001, 1000.061, 100.0, 100.062)
    assert abs(started_s - 100.001) < 1e-9
    assert abs(computed_s - started_s - 0.06) < 1e-9
    assert clock.convert(1000.07, 0.0, 100.0, 100.08)[1] == 0.0
