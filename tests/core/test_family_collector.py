"""Families of many sources become one of each name."""

from dragoman.core.metrics import Family, FamilyCollector, Histogram, Sample


def family(*values: float) -> Family:
    histogram = Histogram((1.0,))
    histogram.observe(2.0)
    samples = tuple(Sample("calls", {"model": str(number)}, value) for number, value in enumerate(values))
    return Family("calls", "counter", "Calls.", samples, (histogram.distribution("s", {"model": "0"}),))


def test_a_collector_is_forgotten_in_pieces_and_its_families_stay() -> None:
    collector = FamilyCollector()
    for values in ((1.0, 2.0), (10.0, 20.0, 30.0)):
        collector.add([family(*values)])
    (merged,) = collector.families()
    assert len([*collector.forget(2)]) == 3  # two and one samples, and a histogram
    assert [sample.value for sample in merged.samples] == [11.0, 22.0, 30.0]
    assert [each.counts for each in merged.distributions] == [(0, 2)]
    assert collector.families() == ()
