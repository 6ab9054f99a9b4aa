"""Decoding steps of fixed shapes: their logits are those of ordinary steps. A CPU computes them without CUDA graphs."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dragoman_text.generation import fused
from dragoman_text.generation.cache import KeyValueCache
from dragoman_text.generation.job import BatchRow
from dragoman_text.generation.pretrained import load_pretrained
from dragoman_text.generation.runner import Runner
from dragoman_text.generation.step_graphs import StepGraphs

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
# The fused forward pass with full attention; one with norms of queries and keys and a sliding window; and a model's own
# code, with a sliding window in every other layer and a soft cap.
MODELS = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0}),
    "gemma2": ("Gemma2", {"sliding_window": 24}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fixed")
    for name, (kind, options) in MODELS.items():
        torch.manual_seed(3)
        model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**SMALL, **options))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 0.1 if parameter.dim() == 1 else 0.0, 0.2)
        model.save_pretrained(folder / name)
    return folder


def make_runner(folder: Path) -> Runner:
    return Runner(load_pretrained(folder, "float32", "cpu"), packed=False)


def make_cache(runner: Runner, slots: int = 6, length: int = 96) -> KeyValueCache:
    cache = KeyValueCache(runner.shape, 1 << 14, runner.dtype, runner.device)
    cache.reserve(slots, length)
    return cache


def repeat(compute: Callable[[], None]) -> Callable[[], None]:
    """Record nothing, and compute the step each time."""
    return compute


def count_graph_steps(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list with an element for each step from now on: whether it was computed with fixed shapes."""
    assert runner._graphs is not None
    run, used = runner._graphs.run, list[bool]()

    def counted(*arguments: Any) -> torch.Tensor | None:
        logits = run(*arguments)
        used.append(logits is not None)
        return logits

    monkeypatch.setattr(runner._graphs, "run", counted)
    return used


def steps() -> list[list[BatchRow]]:
    """Prompts of five slots, then single tokens: of all, of some in any order, and beyond a power of two in length."""
    draw = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        found: list[int] = torch.randint(3, 96, (count,), generator=draw).tolist()
        return found

    lengths = [3, 40, 7, 29, 126]
    planned = [[BatchRow(slot, 0, tokens(length)) for slot, length in enumerate(lengths)]]
    for used in ((0, 1, 2, 3, 4), (0, 1, 2, 3, 4), (1, 3), (4, 0), (2,), (0, 1, 2, 4), (4,), (0, 1)):
        planned.append([BatchRow(slot, lengths[slot], tokens(1)) for slot in used])
        for slot in used:
            lengths[slot] += 1
    return planned


@pytest.mark.parametrize("name", MODELS)
def test_steps_of_fixed_shapes_have_the_same_logits(name: str, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fixed = make_runner(folders / name), make_runner(folders / name)
    fixed.use_graphs(repeat)
    used = count_graph_steps(fixed, monkeypatch)
    caches = make_cache(plain, 6, 200), make_cache(fixed, 6, 200)
    for rows in steps():
        expected, actual = plain.run(caches[0], rows), fixed.run(caches[1], rows)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert used == [False, *[True] * 8]
    torch.testing.assert_close(caches[1].keys, caches[0].keys, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(caches[1].values, caches[0].values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_operations_for_a_gpu_give_the_same_logits(
    name: str, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_runner(folders / name)
    monkeypatch.setattr(fused, "is_cpu", lambda _: False)
    runner = make_runner(folders / name)
    assert runner.fused is not None
    assert len(runner.fused._table) == 512
    caches = make_cache(plain, 6, 200), make_cache(runner, 6, 200)
    for rows in steps():
        torch.testing.assert_close(runner.run(caches[1], rows), plain.run(caches[0], rows), rtol=1e-4, atol=1e-4)


def test_logits_stay_after_the_next_step(folders: Path) -> None:
    runner = make_runner(folders / "llama")
    runner.use_graphs(repeat)
    cache = make_cache(runner)
    first = runner.run(cache, [BatchRow(0, 0, [5])])
    before = first.clone()
    runner.run(cache, [BatchRow(0, 1, [7])])
    assert torch.equal(first, before)


def test_steps_are_recorded_once_for_each_shape_and_cache_memory(folders: Path) -> None:
    runner, recorded = make_runner(folders / "llama"), list[int]()

    def record(compute: Callable[[], None]) -> Callable[[], None]:
        recorded.append(1)
        return compute

    runner.use_graphs(record)
    cache = make_cache(runner)
    for position in range(3):
        runner.run(cache, [BatchRow(slot, position, [5 + slot]) for slot in range(3)])
    assert len(recorded) == 1
    runner.run(cache, [BatchRow(0, 3, [5])])
    assert len(recorded) == 2
    cache.reserve(12, 300)  # the addresses of keys and values change
    plain, again = make_runner(folders / "llama"), make_cache(runner)
    for position in range(4):
        plain.run(again, [BatchRow(0, position, [5])])
    expected = plain.run(again, [BatchRow(0, 4, [6])])
    torch.testing.assert_close(runner.run(cache, [BatchRow(0, 4, [6])]), expected, rtol=1e-4, atol=1e-4)
    assert len(recorded) == 3


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (lambda _: lambda: None, "differ by"),  # replays nothing
        (lambda _: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_step_that_cannot_be_recorded_is_computed_without_a_graph(
    record: Any, reason: str, folders: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner, plain = make_runner(folders / "llama"), make_runner(folders / "llama")
    runner.use_graphs(record)
    before, caches = runner.graphs, (make_cache(runner), make_cache(plain))
    with caplog.at_level(logging.WARNING):
        for position in range(3):
            rows = [BatchRow(0, position, [5 + position])]
            torch.testing.assert_close(runner.run(caches[0], rows), plain.run(caches[1], rows))
    assert (before, runner.graphs) == (True, False)
    assert [record.getMessage() for record in caplog.records if reason in record.getMessage()]


def test_a_step_whose_logits_are_all_zero_is_recorded(folders: Path) -> None:
    """As the first step after loading can be: the embedding of a padding token is zero."""
    runner = make_runner(folders / "llama")
    assert runner.fused is not None
    with torch.inference_mode():
        runner.fused.embed.weight[0] = 0
    runner.use_graphs(repeat)
    assert not runner.run(make_cache(runner), [BatchRow(0, 0, [0])]).any()
    assert runner.graphs


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [BatchRow(0, 4, [5, 6])],
        [BatchRow(0, 4, [5], wanted=0)],
        [BatchRow(0, 4, [5], adapter="a")],
        [BatchRow(0, 4, [5], drafts=1)],
        [BatchRow(0, 4, [5]), BatchRow(0, 5, [6])],
    ],
    ids=["nothing", "chunk", "no logits", "adapter", "drafts", "one slot twice"],
)
def test_other_steps_have_no_fixed_shape(rows: list[BatchRow], folders: Path) -> None:
    runner = make_runner(folders / "llama")
    graphs = StepGraphs(lambda *_: pytest.fail("it was computed"), 1e-3, repeat)
    assert graphs.run(make_cache(runner), rows) is None
    assert graphs.works
