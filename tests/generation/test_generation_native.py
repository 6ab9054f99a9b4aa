"""The step in machine code: its logits are transformers', and a row's are the same whatever is beside it."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("llvmlite")

import torch
import transformers

from dragoman.generation.adaptive_threads import MAX_THREADS, fastest_thread_count
from dragoman.generation.cache import KeyValueCache
from dragoman.generation.native.kernels import COLUMNS, KernelConfig, power, product
from dragoman.generation.native.step import ThreadTeam
from dragoman.generation.runner import Runner
from dragoman.generation.sequence import BatchRow
from dragoman.native.code import INT, LANES, POINTER, Code, Compiled, instructions, new_module

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif("avx512f" not in instructions(), reason="the machine has no AVX-512"),
]

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 150,
    "max_position_embeddings": 256,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-odd": ("Llama", {"intermediate_size": 170, "hidden_size": 48, "tie_word_embeddings": True}),
    "llama-biased": ("Llama", {"attention_bias": True, "num_key_value_heads": 4}),
    "llama-far": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "mistral-window": ("Mistral", {"sliding_window": 9}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"num_attention_heads": 6}),
    "heads-of-64": ("Llama", {"head_dim": 64, "mlp_bias": True}),
    "heads-of-128": ("Qwen3", {"head_dim": 128, "num_hidden_layers": 2}),
    "heads-of-256": ("Llama", {"head_dim": 256, "num_hidden_layers": 2}),
    "windows-of-some-layers": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "tiny-window": ("Mistral", {"sliding_window": 2}),
    "llama3-turns": (
        "Llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "yarn-turns": ("Qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each model, whose weights are drawn large enough for attention to matter."""
    folder = tmp_path_factory.mktemp("native")
    for name, (kind, options) in MODELS.items():
        torch.manual_seed(3)
        config = getattr(transformers, f"{kind}Config")(**{**SMALL, **options})
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 0.1 if parameter.dim() == 1 else 0.0, 0.2)
        model.save_pretrained(folder / name)
    return folder


def prompt(seed: int, length: int) -> list[int]:
    return list(np.random.default_rng(seed).integers(3, 150, length))


def opened(folder: Path, dtype: str = "float32") -> tuple[Runner, KeyValueCache]:
    runner = Runner(folder, dtype, "cpu")
    assert runner.native
    cache = KeyValueCache(runner.shape, 4096, runner.dtype, runner.device)
    cache.reserve(8, 96)
    return runner, cache


@pytest.fixture(scope="module")
def llamas(folders: Path) -> dict[str, tuple[Runner, KeyValueCache]]:
    kinds = ["float32", *(["bfloat16"] if "avx512bf16" in instructions() else [])]
    return {kind: opened(folders / "llama", kind) for kind in kinds}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(folders: Path, name: str) -> None:
    runner, cache = opened(folders / name)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folders / name, dtype=torch.float32).eval()
    texts = [prompt(i, length) for i, length in enumerate((21, 40, 33, 5, 64))]
    begun = [1, 17, 30, 2, 50]
    rows = [BatchRow(slot, 0, text[:count]) for slot, (text, count) in enumerate(zip(texts, begun, strict=True))]
    runner.run(cache, rows)
    found: list[list[Any]] = [[] for _ in texts]
    for step in range(20):
        rows = [
            BatchRow(slot, count + step, [text[count + step]])
            for slot, (text, count) in enumerate(zip(texts, begun, strict=True))
            if count + step < len(text)
        ]
        for row, logits in zip(rows, runner.run(cache, rows), strict=True):
            found[row.slot].append(logits.clone())
    with torch.inference_mode():
        for text, count, logits in zip(texts, begun, found, strict=True):
            expected = reference(torch.tensor([text])).logits[0, count : count + len(logits)]
            assert len(logits) >= 3
            torch.testing.assert_close(torch.stack(logits), expected, rtol=1e-4, atol=2e-4)


@pytest.mark.skipif("avx512bf16" not in instructions(), reason="the machine does not compute in BF16")
@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral-window"])
def test_bf16_is_as_near_to_fp32_as_transformers_is(folders: Path, name: str) -> None:
    runner, cache = opened(folders / name, "bfloat16")
    text = prompt(5, 40)
    runner.run(cache, [BatchRow(0, 0, text[:20])])
    found = torch.cat([runner.run(cache, [BatchRow(0, place, [text[place]])]) for place in range(20, 40)])
    load = transformers.AutoModelForCausalLM.from_pretrained
    with torch.inference_mode():
        saved = load(folders / name, dtype=torch.bfloat16).eval()
        theirs = saved(torch.tensor([text])).logits[0, 20:].float()
        exact = saved.float()(torch.tensor([text])).logits[0, 20:]
    assert (found - exact).abs().max() < 1.5 * (theirs - exact).abs().max() + 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_alone_in_a_crowd_and_with_any_number_of_threads(
    llamas: dict[str, tuple[Runner, KeyValueCache]], dtype: str
) -> None:
    if dtype not in llamas:
        pytest.skip("the machine does not compute in BF16")
    runner, cache = llamas[dtype]
    cache.reserve(30, 96)
    before = torch.get_num_threads()
    try:
        for slot in range(30):
            runner.run(cache, [BatchRow(slot, 0, prompt(slot, 10 + slot))])
        rows = [BatchRow(slot, 10 + slot, [slot + 5]) for slot in range(30)]
        crowd = runner.run(cache, rows)
        for threads in (1, 2, 5):
            runner.set_threads(threads)
            for count in (1, 2, 7, 13, 30):
                some = rows[-count:]
                assert torch.equal(runner.run(cache, some), crowd[-count:]), (threads, count)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@given(cuts=st.lists(st.integers(1, 219), max_size=8), others=st.integers(0, 3))
@settings(max_examples=15, deadline=None)
def test_a_text_has_the_same_bits_however_it_is_cut_into_steps(
    llamas: dict[str, tuple[Runner, KeyValueCache]], dtype: str, cuts: list[int], others: int
) -> None:
    if dtype not in llamas:
        return
    runner, cache = llamas[dtype]
    text = prompt(2, 220)
    cache.reserve(5, 256)
    whole = runner.run(cache, [BatchRow(0, 0, text, wanted=220)])
    found, stops = [], sorted({*cuts, 220})
    for start, stop in pairwise([0, *stops]):
        beside = [BatchRow(2 + i, 0, prompt(i, 5 + i), wanted=i % 2) for i in range(others)]
        mixed = [*beside, BatchRow(1, start, text[start:stop], wanted=stop - start)]
        found.append(runner.run(cache, mixed)[-(stop - start) :])
    assert torch.equal(torch.cat(found), whole)


def test_a_step_of_chunks_and_single_tokens_gives_the_logits_that_are_wanted(
    llamas: dict[str, tuple[Runner, KeyValueCache]],
) -> None:
    runner, cache = llamas["float32"]
    alone = runner.run(cache, [BatchRow(0, 0, [5])])
    chunk = runner.run(cache, [BatchRow(1, 0, prompt(1, 12), wanted=3)])
    mixed = runner.run(
        cache, [BatchRow(0, 0, [5]), BatchRow(2, 0, [9], wanted=0), BatchRow(1, 0, prompt(1, 12), wanted=3)]
    )
    assert torch.equal(mixed, torch.cat((alone, chunk)))
    assert runner.run(cache, [BatchRow(0, 1, [5, 6], wanted=0)]).shape == (0, 150)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"head_dim": 24}, "the size of heads"),
        ({"hidden_size": 60}, "the size of states"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "turns that depend on a text's length"),
    ],
)
def test_what_it_is_not_written_for_goes_the_other_way(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**{**SMALL, **options})
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    runner = Runner(tmp_path, "float32", "cpu")
    assert not runner.native, why
    cache = KeyValueCache(runner.shape, 256, runner.dtype, runner.device)
    cache.reserve(1, 32)
    assert runner.run(cache, [BatchRow(0, 0, [3])]).shape == (1, 150)


@pytest.mark.parametrize(
    "row",
    [BatchRow(0, 0, [150]), BatchRow(0, 0, [-1]), BatchRow(0, 999, [1]), BatchRow(99, 0, [1]), BatchRow(0, -1, [1, 2])],
)
def test_nothing_beyond_memory_is_touched(llamas: dict[str, tuple[Runner, KeyValueCache]], row: BatchRow) -> None:
    runner, cache = llamas["float32"]
    with pytest.raises(IndexError, match="within"):
        runner.run(cache, [BatchRow(1, 0, [3]), row])


def test_numbers_that_are_none_stay_in_their_row(llamas: dict[str, tuple[Runner, KeyValueCache]]) -> None:
    runner, cache = llamas["float32"]
    for slot in range(3):
        runner.run(cache, [BatchRow(slot, 0, prompt(slot, 10))])
    rows = [BatchRow(slot, 10, [7]) for slot in range(3)]
    before = runner.run(cache, rows)
    cache.keys[1, 1, 0, 4] = float("nan")
    after = runner.run(cache, rows)
    assert torch.isnan(after[1]).all()
    assert torch.equal(after[[0, 2]], before[[0, 2]])


def test_tokens_before_one_that_gives_no_number_have_theirs(folders: Path) -> None:
    runner, cache = opened(folders / "llama")
    text = prompt(3, 20)
    before = runner.run(cache, [BatchRow(0, 0, text, wanted=20)])
    with torch.inference_mode():
        runner._compact.embed[149] = float("nan")  # type: ignore[union-attr]
    for bad in (13, 14, 15):
        after = runner.run(cache, [BatchRow(0, 0, [*text[:bad], 149, *text[bad + 1 :]], wanted=20)])
        assert torch.equal(after[:bad], before[:bad])
        assert torch.isnan(after[bad:]).all()


def test_a_model_may_have_more_threads_than_one_that_came_before(folders: Path) -> None:
    before = torch.get_num_threads()
    try:
        first, second = Runner(folders / "llama", "float32", "cpu"), Runner(folders / "llama", "float32", "cpu")
        assert first.set_threads(1) == 1
        assert second.set_threads(3) == 3
        assert fastest_thread_count(lambda threads: 1.0 / threads, MAX_THREADS) == 1 << (MAX_THREADS.bit_length() - 1)
    finally:
        torch.set_num_threads(before)


# --- the parts ---------------------------------------------------------------------------------------------------


def built(halves: bool) -> KernelConfig:
    return KernelConfig(1, 64, 64, 2, 2, 32, 64, 1e-6, False, halves)


@pytest.fixture(scope="module")
def products() -> dict[bool, Any]:
    made: dict[bool, Any] = {}
    for halves in (False, True):
        if halves and "avx512bf16" not in instructions():
            continue
        module = new_module()
        product(module, built(halves))
        made[halves] = Compiled(module).function("product", 6)
    return made


@given(rows=st.integers(1, 40), steps=st.integers(1, 700), halves=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_a_product_is_the_product(products: dict[bool, Any], rows: int, steps: int, halves: bool, seed: int) -> None:
    if halves not in products:
        return
    torch.manual_seed(seed)
    pair = 2 if halves else 1
    kind = torch.bfloat16 if halves else torch.float32
    inputs, weights = torch.randn(rows, steps * pair).to(kind), torch.randn(COLUMNS, steps * pair).to(kind)
    block = weights.view(COLUMNS, steps, pair).transpose(0, 1).contiguous()
    sums = torch.full((rows, COLUMNS), float("nan"))
    products[halves](inputs.data_ptr(), 4 * steps, block.data_ptr(), sums.data_ptr(), rows, steps)
    expected = (inputs.double() @ weights.double().T).float()
    torch.testing.assert_close(sums, expected, rtol=1e-4, atol=1e-4)


def test_the_power_of_e_is_right_to_two_units_in_the_last_place() -> None:
    module = new_module()
    code = Code(module, "powers", (POINTER, INT))
    numbers, count = code.arguments
    with code.loop(code.integer(0), count, LANES) as i:
        numbers.put(power(numbers.vector(i * 4)), i * 4)
    code.finish()
    powers = Compiled(module).function("powers", 2)
    given_ = np.linspace(-86.9, 87.9, 160_000, dtype=np.float32)
    found = given_.copy()
    powers(found.ctypes.data, len(found))
    expected = np.exp(given_.astype(np.float64))
    assert (np.abs(found - expected) / np.spacing(expected.astype(np.float32))).max() < 2
    ends = np.full(LANES, -1e9, np.float32)
    ends[1], ends[2] = np.nan, 0
    powers(ends.ctypes.data, LANES)
    assert ends[0] < 1e-37
    assert np.isnan(ends[1])
    assert ends[2] == 1


def test_work_is_shared_by_whoever_comes_and_done_once() -> None:
    module = new_module()
    code = Code(module, "work", (POINTER, POINTER))
    counters, marks = code.arguments

    def mark(part: Any) -> None:
        marks.put(marks.integer(part * 8) + 1, part * 8)

    for turn in range(3):
        code.share(counters + 128 * turn, code.integer(50), lambda: None, mark)
    code.finish()
    work, team = Compiled(module).function("work", 2), ThreadTeam()
    for threads in (1, 2, 4, 1):
        for _ in range(200):
            counted, marked = np.zeros(3 * 16, np.int64), np.zeros(50, np.int64)
            calls = [(counted.ctypes.data, marked.ctypes.data)] * threads
            team.run(work, calls, (counted, marked))
            assert (marked == 3).all()


def test_memory_that_was_not_there_is_not_believed_in(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise RuntimeError("can't allocate memory")

    rows = [BatchRow(0, 0, prompt(1, 60))]
    runner, cache = opened(folders / "llama")
    expected = runner.run(cache, rows).clone()
    other, held = opened(folders / "llama")
    other.run(held, [BatchRow(0, 0, [5])])
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", full)
        with pytest.raises(RuntimeError, match="allocate"):
            other.run(held, rows)
    assert torch.equal(other.run(held, rows), expected)
