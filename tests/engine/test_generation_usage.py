"""What is counted of a call that generates text."""

from dragoman.core.calls import Generate
from dragoman.core.text import Generation, PromptInfo, Text
from dragoman.engine.generation_counters import GenerationUsage
from dragoman.system.call_times import CallTimes

CALL = Generate(prompts=("a", "b"))


def usage() -> GenerationUsage:
    prompts = (
        PromptInfo("a", 1, waited_s=0.5, checked_s=0.25, read_s=2.0),
        PromptInfo("b", 2, waited_s=0.0, checked_s=0.25, read_s=1.0),
    )
    return GenerationUsage.of(Generation((Text(0, 0, generated=3, finish="length"), Text(1, 0, generated=4)), prompts))


def test_the_first_token_comes_after_the_queues_of_the_call_and_of_the_engine() -> None:
    """Of several prompts the first one counts; the queue before the call is part of its arrival."""
    waited = CallTimes(arrived_s=100.0, started_s=101.0, computed_s=104.0, ended_s=104.0)
    assert waited.queue_s == 1.0
    assert usage().tokens(CALL, waited).first_token_s == 1.0 + 0.25 + 1.0
    at_once = CallTimes(arrived_s=100.0, started_s=100.0, computed_s=104.0, ended_s=104.0)
    assert usage().tokens(CALL, at_once).first_token_s == 0.0 + 0.25 + 1.0


def test_the_first_token_of_a_stream_comes_with_its_first_chunk() -> None:
    times = CallTimes(arrived_s=100.0, started_s=101.0, computed_s=104.0, ended_s=104.0, first_chunk_s=102.5)
    assert usage().tokens(CALL, times).first_token_s == 2.5


def test_the_first_token_of_an_engine_that_reports_no_times_is_unknown() -> None:
    whole = GenerationUsage.of(Generation((Text(generated=3, finish="length"),), (PromptInfo("a", 1),)))
    assert whole.tokens(CALL, CallTimes(arrived_s=100.0, started_s=101.0)).first_token_s is None


def test_tokens_count_once_for_each_completion_that_has_ended() -> None:
    counted = usage()
    counted.add(Generation((Text(0, 0, generated=3, finish="length"),)))
    assert counted.generated == [3]
    assert counted.tokens(CALL, CallTimes()).output == 7
