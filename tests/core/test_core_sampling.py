"""Each field of a sampling request: the values that are accepted, and the messages for those that are not."""

import math
from typing import Any

import pytest

from dragoman.core.errors import InvalidInput
from dragoman.core.sampling import KINDS, check_value, format_value, number, sampling
from dragoman.core.text_limits import MAX_BIASES

MAX_INTEGER = 2**31 - 1
TEXTS = "non-empty strings, of at most 4096 characters each"

ACCEPTED: list[tuple[str, Any, Any]] = [
    ("max_new_tokens", 1, 1),
    ("max_new_tokens", 5.0, 5),
    ("max_new_tokens", MAX_INTEGER, MAX_INTEGER),
    ("min_new_tokens", 0, 0),
    ("do_sample", True, True),
    ("do_sample", False, False),
    ("seed", 0, 0),
    ("seed", 2**64 - 1, 2**64 - 1),
    ("temperature", 0, 0.0),
    ("temperature", 1e6, 1e6),
    ("top_k", -1, 0),
    ("top_k", 0, 0),
    ("top_k", 7, 7),
    ("top_p", 0, 0.0),
    ("top_p", 1, 1.0),
    ("min_p", 0.5, 0.5),
    ("typical_p", 1, 1.0),
    ("repetition_penalty", 1e-4, 1e-4),
    ("repetition_penalty", 1e4, 1e4),
    ("presence_penalty", -2, -2.0),
    ("frequency_penalty", 2, 2.0),
    ("n", 1, 1),
    ("best_of", 1, 1),
    ("num_beams", 1, 1),
    ("length_penalty", -100, -100.0),
    ("length_penalty", 100, 100.0),
    ("early_stopping", True, True),
    ("early_stopping", False, False),
    ("early_stopping", "never", "never"),
    ("stop", "one", ("one",)),
    ("stop", [], ()),
    ("stop", ["a", "b" * 4096], ("a", "b" * 4096)),
    ("stop", ["a"] * 64, ("a",) * 64),
    ("stop_token_ids", [], ()),
    ("stop_token_ids", [3, 5.0], (3, 5)),
    ("stop_token_ids", (0,) * 256, (0,) * 256),
    ("include_stop", True, True),
    ("ignore_eos", False, False),
    ("bad_words", ["x"] * 256, ("x",) * 256),
    ("logit_bias", {"0": 100, "2147483647": -100, 17: 0.5}, {0: 100.0, MAX_INTEGER: -100.0, 17: 0.5}),
    ("logit_bias", {str(i): 1 for i in range(MAX_BIASES)}, dict.fromkeys(range(MAX_BIASES), 1.0)),
    ("allowed_token_ids", [4], (4,)),
    ("top_logprobs", 0, 0),
    ("top_logprobs", 20, 20),
    ("prompt_logprobs", 20, 20),
    ("truncate", 1, 1),
    ("truncation_side", "right", "right"),
    ("prompt_token_ids", True, True),
    ("skip_special_tokens", True, True),
    ("spaces_between_special_tokens", False, False),
    ("adapter", "", ""),
    ("cache_salt", "of one user", "of one user"),
    ("adapter", "poet", "poet"),
]

POSITIVE = "an integer that is strictly positive"
LOGPROBS = "an integer >= 0 and <= 20"
REJECTED: list[tuple[str, list[Any], str]] = [
    ("max_new_tokens", [0, MAX_INTEGER + 1, True, 1.5, "1", None], POSITIVE),
    ("min_new_tokens", [-1, False, 0.5], "an integer >= 0"),
    ("do_sample", [1, 0, "true", None], "true or false"),
    ("seed", [-1, 2**64, True], "an integer >= 0"),
    ("temperature", [-0.1, 1.1e6, True, "1", math.nan, math.inf], "a number >= 0.0 and <= 1000000.0"),
    ("top_k", [-2, 1.5, True], "an integer >= -1 (-1 and 0: all)"),
    ("top_p", [-0.1, 1.1], "a number >= 0.0 and <= 1.0"),
    ("min_p", [-0.1, 1.1], "a number >= 0.0 and <= 1.0"),
    ("typical_p", [0, 1.1], "a number > 0.0 and <= 1.0"),
    ("repetition_penalty", [0, 9e-5, 1.1e4], "a number that is strictly positive, from 0.0001 to 10000"),
    ("presence_penalty", [-2.1, 2.1], "a number >= -2.0 and <= 2.0"),
    ("frequency_penalty", [-2.1, 2.1], "a number >= -2.0 and <= 2.0"),
    ("n", [0], POSITIVE),
    ("best_of", [0], POSITIVE),
    ("num_beams", [0], POSITIVE),
    ("length_penalty", [-101, 101], "a number >= -100.0 and <= 100.0"),
    ("early_stopping", ["always", 1, None], 'true, false or "never"'),
    (
        "stop",
        ["", [""], [1], ["a"] * 65, ["a" * 4097], {"a": 1}],
        f"a list of at most 64 {TEXTS}",
    ),
    ("stop_token_ids", [[-1], [True], [0] * 257, "1", 1], "a list of at most 256 token ids"),
    ("include_stop", ["yes"], "true or false"),
    ("ignore_eos", ["yes"], "true or false"),
    (
        "bad_words",
        [["a"] * 257, [None]],
        f"a list of at most 256 {TEXTS}",
    ),
    (
        "logit_bias",
        [
            [],
            {"01": 1},
            {"-1": 1},
            {"x": 1},
            {"": 1},
            {"2147483648": 1},
            {"1": 101},
            {"1": -101},
            {"1": "1"},
            {str(i): 1 for i in range(MAX_BIASES + 1)},
        ],
        "an object of at most 1024 token ids, each with a number from -100 to 100",
    ),
    ("allowed_token_ids", [[], [1] * 257, [1.5]], "a list of 1 to 256 token ids"),
    ("top_logprobs", [-1, 21], LOGPROBS),
    ("prompt_logprobs", [-1, 21], LOGPROBS),
    ("truncate", [0], POSITIVE),
    ("truncation_side", ["middle", 1, [], None], '"left" or "right"'),
    ("prompt_token_ids", [1], "true or false"),
    ("skip_special_tokens", ["x"], "true or false"),
    ("spaces_between_special_tokens", ["x"], "true or false"),
    ("adapter", [1, None], "a string"),
    ("cache_salt", [1, None], "a string of 1 to 1024 characters"),
]


@pytest.mark.parametrize(("name", "value", "expected"), ACCEPTED, ids=lambda v: str(v)[:30])
def test_values_are_accepted(name: str, value: Any, expected: Any) -> None:
    converted = check_value("field", value, KINDS[name])
    assert converted == expected
    assert type(converted) is type(expected)


# Limits that only the errors of larger values name.
LIMITS = {"max_new_tokens": MAX_INTEGER, "seed": 2**64 - 1}


@pytest.mark.parametrize(("name", "values", "description"), REJECTED, ids=[name for name, _, _ in REJECTED])
def test_values_are_rejected_with_the_expected_values(name: str, values: list[Any], description: str) -> None:
    for value in values:
        with pytest.raises(InvalidInput) as caught:
            check_value("field", value, KINDS[name])
        is_large = name in LIMITS and isinstance(value, int) and value > LIMITS[name]
        limit = f" and <= {LIMITS[name]}" if is_large else ""
        assert caught.value.message == f"`field` must be {description}{limit}; got {format_value(value)}"


def test_every_kind_is_tested() -> None:
    assert {name for name, _, _ in ACCEPTED} == set(KINDS) == {name for name, _, _ in REJECTED}


@pytest.mark.parametrize(
    ("kind", "description", "outside"),
    [
        (number(0, above=True), "a number that is strictly positive", [0, -1]),
        (number(-math.inf, 3.0, below=True), "a number < 3.0", [3]),
        (number(0, 1, above=True), "a number > 0 and <= 1", [0]),
        (number(1, 1e7, above=True), "a number > 1 and <= 10000000.0", [1]),
        (number(-math.inf), "a number", [math.inf]),
    ],
)
def test_exclusive_bounds(kind: Any, description: str, outside: list[float]) -> None:
    assert kind.description == description
    assert kind.convert(2.0 if description != "a number > 0 and <= 1" else 1) in (1.0, 2.0)
    for value in outside:
        with pytest.raises(ValueError):
            kind.convert(value)


def test_long_values_are_truncated_in_messages() -> None:
    assert format_value("é" * 78) == '"' + "é" * 78 + '"'
    assert format_value("é" * 79) == '"' + "é" * 79 + "..."
    assert format_value({1}) == '"{1}"'
    assert format_value(["é" * 90, 1]) == '["' + "é" * 78 + "..."


def test_what_an_error_does_not_show_is_not_formatted() -> None:
    """A body of many MB would take seconds, in which no other thread runs."""

    class Endless:
        def __repr__(self) -> str:
            raise AssertionError("it was formatted")

    assert format_value({"a": [*range(40), Endless()]}).startswith('{"a": [0, 1, 2')


def test_a_temperature_or_top_p_near_zero_is_greedy() -> None:
    for field in ({"temperature": 0.9e-5}, {"temperature": 0.0}, {"top_p": 0.0}):
        parsed = sampling({**field, "do_sample": True, "seed": 3}, {}, 1)
        assert (parsed.do_sample, parsed.temperature, parsed.top_p, parsed.seed) == (False, 1.0, 1.0, 3)
    parsed = sampling({"temperature": 1e-5, "top_p": 0.1, "do_sample": True}, {}, 1)
    assert (parsed.do_sample, parsed.temperature, parsed.top_p) == (True, 1e-5, 0.1)


NAMES = {"n": "N", "best_of": "B", "num_beams": "W", "min_new_tokens": "least", "max_new_tokens": "most"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 5}, "`N` must be <= 4; got 5"),
        ({"best_of": 5}, "`B` must be <= 4; got 5"),
        ({"num_beams": 5}, "`W` must be <= 4; got 5"),
        ({"n": 3, "best_of": 2}, "`B` must be >= `N`; got 2 and 3"),
        ({"num_beams": 2, "do_sample": True}, "`W` > 1 is a beam search, which does not sample"),
        ({"num_beams": 2, "n": 3}, "`N` must be <= `W`; got 3 and 2"),
        ({"num_beams": 2, "best_of": 3}, "`B` must be <= `W`; got 3 and 2"),
        ({"min_new_tokens": 3, "max_new_tokens": 2}, "`least` must be <= `most`; got 3 and 2"),
    ],
)
def test_fields_that_contradict_each_other_are_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        sampling(fields, NAMES, 4)
    assert caught.value.message == message
    with pytest.raises(InvalidInput) as caught:
        sampling(fields, {}, 4)
    assert all(
        f"`{name}`" in caught.value.message for name in fields if name != "do_sample" and f"`{NAMES[name]}`" in message
    )


def test_consistent_fields_are_accepted() -> None:
    parsed = sampling({"n": 4, "best_of": 4, "num_beams": 4, "min_new_tokens": 2, "max_new_tokens": 2}, {}, 4)
    assert (parsed.n, parsed.best_of, parsed.num_beams, parsed.min_new_tokens) == (4, 4, 4, 2)
    assert sampling({"n": 3}, {}, 4).n == 3
    assert sampling({"do_sample": True, "n": 2, "best_of": 0}, {}, 4).do_sample
    assert sampling({"min_new_tokens": 9}, {}, 1).max_new_tokens is None
