"""Steps that are captured once and run again, with a stand-in for CUDA's graphs that computes on the CPU."""

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as some
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from dragoman.generation.cache import KeyValueCache
from dragoman.generation.cuda_graphs import Capture, Compute
from dragoman.generation.fused import UnpackedLinear
from dragoman.generation.runner import Runner
from dragoman.generation.sequence import BatchRow

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
# A model that sees all before it, and one that sees 24 tokens back, with norms of queries and keys.
MODELS = {
    "llama": ("Llama", {}),
    "qwen": ("Qwen3", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0}),
}


class StandIn:
    """Runs the same work again, on the same memory, and gives the same tensor, as a captured graph does."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, compute: Compute) -> Compute:
        compute()
        result = compute()
        self.captured += 1

        def replay() -> torch.Tensor:
            self.replayed += 1
            result.copy_(compute())
            return result

        return replay


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graphs")
    for name, (kind, options) in MODELS.items():
        torch.manual_seed(3)
        model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**SMALL, **options))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 0.1 if parameter.dim() == 1 else 0.0, 0.2)
        model.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def plain(folders: Path) -> dict[str, Runner]:
    return {name: Runner(folders / name, "float32", "cpu", packed=False) for name in MODELS}


def captured(folder: Path, capture: Capture) -> Runner:
    return Runner(folder, "float32", "cpu", packed=False, capture=capture)


def cache_of(runner: Runner, slots: int = 8, length: int = 96) -> KeyValueCache:
    cache = KeyValueCache(runner.shape, 1 << 14, runner.dtype, runner.device)
    cache.reserve(slots, length)
    return cache


def tokens(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 96, count)]


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
@settings(deadline=None, max_examples=6)
@given(data=some.data())
def test_any_texts_in_any_order_are_as_without_graphs(
    name: str, folders: Path, plain: dict[str, Runner], data: some.DataObject
) -> None:
    capture = StandIn()
    runners = plain[name], captured(folders / name, capture)
    caches = [cache_of(runner, slots=6, length=32) for runner in runners]
    lengths = [0] * 6
    for seed in range(data.draw(some.integers(8, 20), label="steps")):
        slots = sorted(data.draw(some.sets(some.integers(0, 5), min_size=1), label="slots"))
        prompts = data.draw(some.booleans(), label="prompts") and not seed % 4
        counts = {slot: 7 if prompts or not lengths[slot] else 1 for slot in slots}
        wanted = data.draw(some.lists(some.booleans(), min_size=6, max_size=6), label="wanted")
        rows = [BatchRow(slot, lengths[slot], tokens(seed + slot, counts[slot]), int(wanted[slot])) for slot in slots]
        rows.sort(key=lambda row: len(row.tokens) > 1)
        for cache in caches:
            cache.reserve(6, max(lengths) + 7)
        expected, found = (runner.run(cache, rows) for runner, cache in zip(runners, caches, strict=True))
        assert_same(found, expected)
        for slot in slots:
            lengths[slot] += counts[slot]
    for slot, length in enumerate(lengths):  # nothing that another text holds was mark_updated
        for mine, other in zip(*(cache.read(slot, 0, length) for cache in caches), strict=True):
            assert_same(mine, other)


def test_weights_side_by_side_are_not_there_twice() -> None:
    parts = [torch.nn.Linear(8, size) for size in (4, 6, 2)]
    expected = [part.weight.detach().clone() for part in parts]
    with torch.no_grad():
        joined = UnpackedLinear(*parts)
    assert len({part.weight.untyped_storage().data_ptr() for part in parts}) == 1
    for part, weight in zip(parts, expected, strict=True):
        assert torch.equal(part.weight, weight)
    rows = torch.randn(3, 8)
    assert_same(joined.forward(rows), torch.cat([part(rows) for part in parts], 1))


def test_a_shape_is_captured_when_it_comes_again_and_then_replayed(folders: Path, plain: dict[str, Runner]) -> None:
    capture = StandIn()
    runner, other = captured(folders / "llama", capture), plain["llama"]
    mine, cache = cache_of(runner), cache_of(other)
    done = []
    for place in range(6):
        rows = [BatchRow(slot, place, [place + slot]) for slot in range(3)]
        found, kept = runner.run(mine, rows), other.run(cache, rows)
        assert_same(found, kept)
        done.append((found, kept))
    assert (capture.captured, capture.replayed) == (1, 6)  # one more, to compare it
    for found, kept in done:  # what was given stays, whatever ran on the same memory afterwards
        assert_same(found, kept)
    rows = [BatchRow(slot, 6, [1]) for slot in range(4)]  # as many slots as three are rounded to
    assert_same(runner.run(mine, rows), other.run(cache, rows))
    assert (capture.captured, capture.replayed) == (1, 7)


def test_graphs_of_memory_that_has_moved_are_not_used(folders: Path, plain: dict[str, Runner]) -> None:
    capture = StandIn()
    runner, other = captured(folders / "llama", capture), plain["llama"]
    mine, cache = cache_of(runner, 2, 32), cache_of(other, 2, 32)
    for place in range(90):
        rows = [BatchRow(slot, place, [(place * 7 + slot) % 96]) for slot in range(2)]
        for each in (mine, cache):
            each.reserve(2, place + 1)
        assert_same(runner.run(mine, rows), other.run(cache, rows))
    assert capture.captured > 1
    mine.release()
    cache.release()
    for each in (mine, cache):
        each.reserve(2, 32)
    for place, count in ((0, 5), (5, 1), (6, 1), (7, 1)):
        rows = [BatchRow(slot, place, tokens(slot, count)) for slot in range(2)]
        assert_same(runner.run(mine, rows), other.run(cache, rows))


def _wrong(compute: Compute) -> Compute:
    return lambda: compute() + 1


def _refused(compute: Compute) -> Compute:
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize(
    ("capture", "told"), [(_wrong, "differ by"), (_refused, "not permitted when stream is capturing")]
)
def test_what_cannot_be_captured_is_computed_as_before(
    capture: Callable[..., Any], told: str, folders: Path, plain: dict[str, Runner], caplog: pytest.LogCaptureFixture
) -> None:
    runner, other = captured(folders / "llama", capture), plain["llama"]
    mine, cache = cache_of(runner), cache_of(other)
    with caplog.at_level(logging.WARNING, "dragoman.generation"):
        for place in range(5):
            rows = [BatchRow(slot, place, [place]) for slot in range(2)]
            assert_same(runner.run(mine, rows), other.run(cache, rows))
    assert sum(told in record.getMessage() for record in caplog.records) == 1


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the memory that is read and was not made meanwhile: a graph reads it again at the same addresses."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[torch.Tensor] = []
        self.outside: list[StorageWeakRef] = []

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        own = {each.untyped_storage().data_ptr() for each in self.made}
        for each in _tensors((given, named)):
            if each.untyped_storage().data_ptr() not in own:
                self.outside.append(StorageWeakRef(each.untyped_storage()))  # type: ignore[no-untyped-call]
        found = function(*given, **(named or {}))
        self.made += _tensors(found)
        return found


def _tensors(found: Any) -> list[torch.Tensor]:
    return [each for each in torch.utils._pytree.tree_leaves(found) if isinstance(each, torch.Tensor)]


@pytest.mark.parametrize("name", MODELS)
def test_what_a_graph_reads_is_there_as_long_as_the_graph(name: str, folders: Path) -> None:
    read: list[StorageWeakRef] = []

    def capture(compute: Compute) -> Compute:
        with Reads() as reads:
            result = compute()
        read.extend(reads.outside)
        return lambda: result  # a graph of CUDA holds on to nothing of Python's

    runner = captured(folders / name, capture)
    cache = cache_of(runner)
    for place in range(3):
        runner.run(cache, [BatchRow(slot, place, [1]) for slot in range(3)])
    gc.collect()
    assert len(read) > 20
    assert not any(each.expired() for each in read)  # type: ignore[no-untyped-call]


def test_what_idle_slots_hold_does_not_count(folders: Path, caplog: pytest.LogCaptureFixture) -> None:
    capture = StandIn()
    runner = captured(folders / "llama", capture)
    cache = cache_of(runner)
    cache.keys[:, 3] = float("nan")
    with caplog.at_level(logging.WARNING, "dragoman.generation"):
        for place in range(3):
            assert runner.run(cache, [BatchRow(slot, place, [1]) for slot in range(3)]).isfinite().all()
    assert (capture.captured, caplog.records) == (1, [])


class Devices(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operations that take tensors of several devices, which a GPU's kernels refuse."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mixed: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        held = _tensors((given, named))
        if len({each.device.type for each in held if each.dim()}) > 1 and "copy" not in str(function):
            self.mixed.append(str(function))
        return function(*given, **(named or {}))


@pytest.mark.parametrize("name", MODELS)
def test_all_of_a_step_is_on_the_models_device(name: str, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "_agrees", lambda *_: True)  # the device "meta" computes shapes alone
    with Devices() as devices:
        runner = Runner(folders / name, "float32", "meta", capture=lambda compute: compute)
        cache = cache_of(runner)
        monkeypatch.setattr(torch.Tensor, "__float__", lambda _: 0.0)
        for place in range(4):
            assert runner.run(cache, [BatchRow(slot, place, [1]) for slot in range(3)]).device.type == "meta"
        assert runner.run(
            cache, [BatchRow(0, 4, [1]), BatchRow(1, 4, [1] * 9), BatchRow(2, 4, [1] * 9, wanted=9)]
        ).shape == (11, 96)
        assert runner.run(cache, [BatchRow(0, 5, [1]), BatchRow(6, 0, [1])]).shape == (2, 96)
    assert devices.mixed == []
