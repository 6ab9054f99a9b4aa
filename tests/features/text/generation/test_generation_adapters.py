"""LoRA adapters: each sequence uses its own, with the results of merged weights."""

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dragoman.core.calls import Generate
from dragoman.core.errors import (
    AdapterNotFound,
    AlreadyLoaded,
    InvalidInput,
    ModelFailed,
    NotSupported,
    Overloaded,
    PathNotFound,
)
from dragoman.core.spec import ModelSpec
from dragoman.core.text import Sampling, merge_chunks
from dragoman.core.text_engine_calls import LoadAdapter, UnloadAdapter
from dragoman_text.generation.adapters import read_adapter
from dragoman_text.runtimes.llm.model import LanguageModel
from features.text.generation.helpers import (
    Reference,
    engine_metrics,
    generation,
    ids,
    load_model,
    prompts,
    text,
    text_engine,
)

pytestmark = pytest.mark.filterwarnings("ignore")

LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")


def save_adapter(folder: Path, model: Any, seed: int, **config: Any) -> dict[str, Any]:
    """Write an adapter of rank 4 as PEFT does; return the change of the weight of each layer."""
    torch.manual_seed(seed)
    folder.mkdir(parents=True)
    adapter_config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config))
    weights, changes = {}, {}
    for layer in LAYERS:
        out_features, in_features = model.get_submodule(layer).weight.shape
        lora_a, lora_b = torch.randn(4, in_features) * 0.6, torch.randn(out_features, 4) * 0.6
        weights[f"base_model.model.{layer}.lora_A.weight"] = lora_a
        weights[f"base_model.model.{layer}.lora_B.weight"] = lora_b
        changes[layer] = lora_b @ lora_a * (8 / 4)
    save_file(weights, folder / "adapter_model.safetensors")
    return changes


def merge_adapter(folder: Path, changes: dict[str, Any]) -> Reference:
    reference = Reference(folder)
    for layer, change in changes.items():
        reference.model.get_submodule(layer).weight.data += change
    return reference


async def test_each_completion_uses_its_own_adapter(llama_folder: Path, tmp_path: Path, reference: Reference) -> None:
    folder = tmp_path / "llama"
    copytree(llama_folder, folder)
    first = merge_adapter(folder, save_adapter(folder / "adapters" / "first", reference.model, 1))
    second = merge_adapter(folder, save_adapter(tmp_path / "other", reference.model, 2))
    model = load_model(folder, adapters={"second": "../other"}, prefill_chunk=32)
    assert model.details()["adapters"] == ["first", "second"]
    references = {"": reference, "first": first, "second": second}
    requests = [(prompt, name) for prompt in prompts(4, 20, seed=2) for name in references]
    completions = await asyncio.gather(
        *(text(model, prompt, max_new_tokens=10, adapter=name) for prompt, name in requests)
    )
    for (prompt, name), each in zip(requests, completions, strict=True):
        assert ids(each) == references[name].generate(prompt, 10)[0][0]
    tokens_by_adapter = {
        name: [ids(each) for (_, used), each in zip(requests, completions, strict=True) if used == name]
        for name in references
    }
    assert tokens_by_adapter[""] != tokens_by_adapter["first"] != tokens_by_adapter["second"] != tokens_by_adapter[""]
    long = prompts(2, 60)[1] + " and more of it"
    await generation(model, long, max_new_tokens=1, adapter="first")
    assert (await generation(model, long, max_new_tokens=1, adapter="first")).prompts[0].cached
    assert not (await generation(model, long, max_new_tokens=1, adapter="second")).prompts[0].cached
    await model.close()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora is True; expected plain LoRA"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
    ],
    ids=["dora", "ia3", "modules"],
)
def test_adapters_other_than_plain_lora_are_rejected(
    tmp_path: Path, reference: Reference, config: dict[str, Any], message: str
) -> None:
    save_adapter(tmp_path / "bad", reference.model, 1, **config)
    with pytest.raises(ModelFailed, match=message):
        read_adapter("bad", tmp_path / "bad")


async def test_adapters_that_do_not_fit_leave_the_model_and_the_others(
    llama_folder: Path, tmp_path: Path, reference: Reference
) -> None:
    folder = tmp_path / "llama"
    copytree(llama_folder, folder)
    merged = merge_adapter(folder, save_adapter(folder / "adapters" / "good", reference.model, 1))
    for name, config in (("dora", {"use_dora": True}), ("junk", {}), ("shape", {}), ("wide", {})):
        save_adapter(folder / "adapters" / name, reference.model, 2, **config)
    (folder / "adapters" / "junk" / "adapter_model.safetensors").write_bytes(b"junk")
    for name, rank, size in (("shape", 4, 63), ("wide", 300, 64)):
        layer = "base_model.model.model.layers.0.self_attn.q_proj"
        weights = {f"{layer}.lora_A.weight": torch.ones(rank, size), f"{layer}.lora_B.weight": torch.ones(64, rank)}
        save_file(weights, folder / "adapters" / name / "adapter_model.safetensors")
    model = load_model(folder, adapters={"missing": "nowhere"})
    reasons = model.details()["skipped_adapters"]
    assert (model.details()["adapters"], sorted(reasons)) == (["good"], ["dora", "junk", "missing", "shape", "wide"])
    for name, message in (
        ("dora", "use_dora is True; expected plain LoRA"),
        ("junk", "adapter 'junk' cannot be read"),
        ("missing", "adapter 'missing' cannot be read"),
        ("shape", "adapter 'shape' does not fit the layer"),
        ("wide", "expected a rank of at most 256 (max_adapter_rank), got 300"),
    ):
        assert message in reasons[name]
        with pytest.raises(AdapterNotFound, match=f"adapter: '{name}' is not loaded: {re.escape(reasons[name])}"):
            await _tokens(model, "one two", name)
    prompt = prompts(2, 30)[1]
    assert await _tokens(model, prompt) == reference.generate(prompt, 8)[0][0]
    assert await _tokens(model, prompt, "good") == merged.generate(prompt, 8)[0][0]
    save_adapter(folder / "adapters" / "fixed", reference.model, 3)
    await _load(model, "dora", "fixed")
    assert "dora" not in model.details()["skipped_adapters"]
    assert await _tokens(model, prompt, "dora")
    await model.close()


# --- at run time -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter_folder(llama_folder: Path, reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with three adapters that are not loaded at the start."""
    folder = tmp_path_factory.mktemp("adapters") / "llama"
    copytree(llama_folder, folder)
    for seed, name in enumerate("abc", 1):
        save_adapter(folder / "later" / name, reference.model, seed)
    return folder


@contextmanager
def _adaptable(folder: Path, **parameters: Any) -> Iterator[LanguageModel]:
    model = load_model(folder, adapter_folder="later", **parameters)
    try:
        yield model
    finally:
        asyncio.run(model.close())


async def _load(model: LanguageModel, name: str, path: str = "", **options: Any) -> None:
    await model.load_adapter(LoadAdapter(name, path or name, **options))


async def _tokens(model: LanguageModel, prompt: str, adapter: str = "", count: int = 8) -> list[int]:
    return ids(await text(model, prompt, max_new_tokens=count, adapter=adapter))


def _weights_in_memory(model: LanguageModel) -> list[str]:
    """Return the names of the adapters in memory, between two steps."""
    engine = text_engine(model)
    engine.service.execute(lambda _: None).result(60)
    return sorted(key.partition(":")[0] for key in engine.engine._runner.adapters.keys)


@pytest.fixture
def adaptable(adapter_folder: Path) -> Iterator[LanguageModel]:
    with _adaptable(adapter_folder, max_adapters=2) as model:
        yield model


async def test_adapters_are_loaded_and_unloaded_while_the_model_generates(
    adaptable: LanguageModel, reference: Reference, tmp_path: Path
) -> None:
    merged = merge_adapter(Path(adaptable.spec.uri), save_adapter(tmp_path / "a", reference.model, 1))
    prompt = prompts(2, 30)[1]
    plain = await _tokens(adaptable, prompt)
    running = asyncio.create_task(_tokens(adaptable, prompt, count=60))
    await _load(adaptable, "mine", "a")
    assert adaptable.details()["adapters"] == ["mine"]
    assert await _tokens(adaptable, prompt, "mine") == merged.generate(prompt, 8)[0][0] != plain
    assert await _tokens(adaptable, prompt) == plain
    assert (await running)[:8] == plain
    with pytest.raises(AlreadyLoaded, match="'mine' is already loaded"):
        await _load(adaptable, "mine", "b")
    long = prompt * 3
    await _tokens(adaptable, long, "mine")
    await _load(adaptable, "mine", "b", replaces=True)
    assert not (await generation(adaptable, long, max_new_tokens=1, adapter="mine")).prompts[0].cached
    await adaptable.unload_adapter(UnloadAdapter("mine"))
    assert (adaptable.details()["adapters"], _weights_in_memory(adaptable)) == ([], [])
    with pytest.raises(AdapterNotFound, match="adapter: unknown adapter 'mine', expected one of none"):
        await _tokens(adaptable, prompt, "mine")
    with pytest.raises(PathNotFound, match="'mine' is not loaded"):
        await adaptable.unload_adapter(UnloadAdapter("mine"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_completions_with_adapters_are_the_same_alone_and_in_a_crowd(adapter_folder: Path, dtype: str) -> None:
    model = load_model(adapter_folder, adapter_folder="later", dtype=dtype)
    for name in "abc":
        await _load(model, name)
    requests = [(prompt, name) for prompt in prompts(5, 20, seed=3) for name in ("", "a", "b", "c")]
    alone = [await text(model, prompt, max_new_tokens=9, adapter=name) for prompt, name in requests]
    crowd = await asyncio.gather(*(text(model, prompt, max_new_tokens=9, adapter=name) for prompt, name in requests))
    metrics, dtype_name = engine_metrics(model), model.details()["dtype"]
    await model.close()
    assert dtype_name == dtype
    assert metrics["steps_total", "prefill", "failed"] == metrics["steps_total", "decode", "failed"] == 0
    assert [ids(each) for each in crowd] == [ids(each) for each in alone]
    by_adapter = {
        name: [ids(each) for (_, used), each in zip(requests, alone, strict=True) if used == name] for name in "abc"
    }
    assert by_adapter["a"] != by_adapter["b"] != by_adapter["c"] != by_adapter["a"]


async def test_each_prompt_of_a_call_has_its_own_adapter(adaptable: LanguageModel) -> None:
    prompt = prompts(2, 30)[1]
    for name in "ab":
        await _load(adaptable, name)
    expected = [await _tokens(adaptable, prompt, name) for name in ("a", "", "b")]
    sampling = Sampling(max_new_tokens=8, adapters=("a", "", "b"))
    chunks = [chunk async for chunk in adaptable.generate(Generate(prompts=(prompt,) * 3, sampling=sampling))]
    assert [ids(each) for each in merge_chunks(chunks).texts] == expected
    with pytest.raises(InvalidInput, match="expected one adapter for each of 2 prompts, got 3"):
        await anext(adaptable.generate(Generate(prompts=(prompt,) * 2, sampling=sampling)))


async def test_the_least_recently_used_adapter_makes_room(adaptable: LanguageModel) -> None:
    prompt = prompts(2, 30)[1]
    first = {name: await _load_and_generate(adaptable, name, prompt) for name in "ab"}
    await _tokens(adaptable, prompt, "a")
    first["c"] = await _load_and_generate(adaptable, "c", prompt)
    assert _weights_in_memory(adaptable) == ["a", "c"]
    assert adaptable.details()["adapters"] == ["a", "b", "c"]
    assert await _tokens(adaptable, prompt, "b") == first["b"]  # loaded again
    assert _weights_in_memory(adaptable) == ["b", "c"]


async def _load_and_generate(model: LanguageModel, name: str, prompt: str) -> list[int]:
    await _load(model, name)
    return await _tokens(model, prompt, name)


async def test_adapters_in_use_and_pinned_ones_stay_in_memory(adaptable: LanguageModel) -> None:
    prompt = prompts(2, 30)[1]
    await _load(adaptable, "a", pinned=True)
    await _load(adaptable, "b")
    expected = await _tokens(adaptable, prompt, "b", 60)
    call = Generate(prompts=(prompt,), sampling=Sampling(max_new_tokens=60, adapter="b"), stream=True)
    async with aclosing(adaptable.generate(call)) as chunks:
        received = [await anext(chunks)]
        with pytest.raises(Overloaded, match="no room for the adapter 'c': all 2 in memory are pinned or in use"):
            await _load(adaptable, "c")
        await adaptable.unload_adapter(UnloadAdapter("b"))  # the call is completed all the same
        received += [chunk async for chunk in chunks]
    assert ids(merge_chunks(received).texts[0]) == expected
    assert _weights_in_memory(adaptable) == ["a"]
    await _load(adaptable, "c")
    assert _weights_in_memory(adaptable) == ["a", "c"]
    await _load(adaptable, "a", "b", replaces=True)  # although there is no room for another one
    assert _weights_in_memory(adaptable) == ["a", "c"]
    assert await _tokens(adaptable, prompt, "a", 60) == expected


async def test_calls_wait_for_a_place_of_an_adapter(adapter_folder: Path) -> None:
    names, prompt = [f"a{i}" for i in range(7)], prompts(2, 30)[1]
    model = load_model(adapter_folder, adapter_folder="later", max_adapters=2)
    expected = {}
    for i, name in enumerate(names):
        await _load(model, name, "abc"[i % 3])
        expected[name] = await _tokens(model, prompt, name)
    calls = [name for _ in range(6) for name in names]
    found = await asyncio.gather(*(_tokens(model, prompt, name) for name in calls))
    assert found == [expected[name] for name in calls]
    assert len(_weights_in_memory(model)) == 2
    await model.close()


async def test_a_busy_adapter_makes_room_for_another(adaptable: LanguageModel) -> None:
    """A call for an adapter that is not in memory is answered although the others always have calls."""
    prompt = prompts(2, 30)[1]
    for name in "abc":
        await _load(adaptable, name)
    stopped = False

    async def repeat(name: str) -> None:
        while not stopped:
            await _tokens(adaptable, prompt, name, 4)

    # Two of each, one after the other, so that there is no moment without a call.
    busy = [asyncio.create_task(repeat(name)) for name in "bcbc"]
    try:
        for _ in range(3):
            assert await asyncio.wait_for(_tokens(adaptable, prompt, "a"), 60)
    finally:
        stopped = True
        await asyncio.gather(*busy)


async def test_pinned_adapters_are_not_removed_for_calls(adaptable: LanguageModel) -> None:
    prompt = prompts(2, 30)[1]
    await _load(adaptable, "a", pinned=True)
    await _load(adaptable, "b")
    await _load(adaptable, "c")
    assert await _tokens(adaptable, prompt, "b")
    assert _weights_in_memory(adaptable) == ["a", "b"]
    await _load(adaptable, "b", "b", pinned=True, replaces=True)
    with pytest.raises(Overloaded, match="no room for the adapter 'c': all 2 in memory are pinned or in use"):
        await _tokens(adaptable, prompt, "c")
    sampling = Sampling(max_new_tokens=2, adapters=("a", "b", "c"))
    with pytest.raises(InvalidInput, match=r"expected at most 2 adapters \(max_adapters\) in a request, got 3"):
        await anext(adaptable.generate(Generate(prompts=(prompt,) * 3, sampling=sampling)))


async def test_calls_for_several_adapters_do_not_wait_for_each_other(adaptable: LanguageModel) -> None:
    prompt = prompts(2, 30)[1]
    for name in "abc":
        await _load(adaptable, name)
    pairs = [("a", "b"), ("b", "c"), ("c", "a"), ("a", "c")] * 3

    async def both(one: str, other: str) -> list[list[int]]:
        call = Generate(prompts=(prompt, prompt), sampling=Sampling(max_new_tokens=8, adapters=(one, other)))
        return [ids(each) for each in merge_chunks([chunk async for chunk in adaptable.generate(call)]).texts]

    found = await asyncio.wait_for(asyncio.gather(*(both(*pair) for pair in pairs)), 120)
    expected = {name: await _tokens(adaptable, prompt, name) for name in "abc"}
    assert found == [[expected[one], expected[other]] for one, other in pairs]


async def test_a_waiting_call_that_is_cancelled_leaves_the_queue(adaptable: LanguageModel) -> None:
    prompt = prompts(2, 30)[1]
    for name in "abc":
        await _load(adaptable, name)
    for name in "ab":
        await _tokens(adaptable, prompt, name)
    streams = []
    for name in "ab":
        call = Generate(prompts=(prompt,), sampling=Sampling(max_new_tokens=60, adapter=name), stream=True)
        streams.append(adaptable.generate(call))
        await anext(streams[-1])
    waiting = asyncio.create_task(_tokens(adaptable, prompt, "c"))
    behind = asyncio.create_task(_tokens(adaptable, prompt, "a"))
    while not any(each.is_leaving for each in text_engine(adaptable).adapters._in_memory.values()):
        await asyncio.sleep(0.001)
    waiting.cancel()
    assert await behind  # `a` is in memory and no longer leaves
    for stream in streams:
        await stream.aclose()
    assert await _tokens(adaptable, prompt, "c")
    assert not any(each.uses for each in text_engine(adaptable).adapters._in_memory.values())


async def test_a_call_that_is_cancelled_while_its_adapter_is_loaded_does_not_keep_it(
    adaptable: LanguageModel,
) -> None:
    prompt = prompts(2, 30)[1]
    for name in "abc":
        await _load(adaptable, name)
    call = Generate(prompts=(prompt,), sampling=Sampling(max_new_tokens=8, adapter="a"))
    cancelled = asyncio.create_task(anext(adaptable.generate(call)))
    loading = text_engine(adaptable).adapters._loading
    while not (loading.locked() or cancelled.done()):  # until a thread loads the adapter
        await asyncio.sleep(0)
    cancelled.cancel()
    async with asyncio.timeout(60):
        while "a" not in _weights_in_memory(adaptable):
            await asyncio.sleep(0.001)
    for name in "bcb":
        await _tokens(adaptable, prompt, name)
    assert _weights_in_memory(adaptable) == ["b", "c"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": b"not safetensors"}, "adapter 'x' cannot be read"),
        ({"config": b"[]"}, "expected adapter_config.json to be an object"),
        ({"config": b"{"}, "adapter 'x' cannot be read"),
        ({"config": b'{"peft_type": "LORA", "lora_alpha": "much"}'}, "expected lora_alpha and alpha_pattern as finite"),
        ({"config": b'{"peft_type": "LORA", "lora_alpha": 1e308}'}, "are not finite"),
        ({"config": b'{"peft_type": "LORA", "r": 8, "rank_pattern": {"k": 2}}'}, "weights of rank 8 .r. for .* got 4"),
        ({"config": b'{"peft_type": "LORA", "alora_invocation_tokens": [1]}'}, "alora_invocation_tokens is"),
        ({"tensors": {"lora_A": [4, 64]}}, "lacks lora_B"),
        ({"tensors": {"lora_B": [64, 4]}}, "lacks lora_A for .model.layers.0.self_attn.q_proj."),
        ({"tensors": {"lora_A": [4, 64], "lora_B": [64, 5]}}, "expected weights .rank, in. and .out, rank."),
        ({"tensors": {"lora_A": [4, 63], "lora_B": [64, 4]}}, "does not fit the layer"),
        ({"tensors": {"lora_A": [40, 64], "lora_B": [64, 40]}}, "a rank of at most 32 .max_adapter_rank., got 40"),
        ({"tensors": {"lora_A": [4, 64], "lora_B": [64, 4]}, "nan": True}, "are not finite"),
        ({"tensors": {"lora_A": [4, 64], "lora_B": [64, 4]}, "layer": "lm_head"}, "cannot be adapted"),
        ({"tensors": {"lora_A": [4, 64], "lora_B": [64, 4]}, "layer": "model.layers.9.self_attn.q_proj"}, "cannot be"),
        ({"tensors": {}}, "has no weights"),
        ({"size": 2 << 20}, "is too large: expected at most 1 MiB .adapter_memory., got 2 MiB"),
        ({"missing": True}, "no adapter_model.safetensors"),
    ],
)
async def test_broken_adapters_leave_the_model_as_it_was(
    broken: LanguageModel, change: dict[str, Any], message: str
) -> None:
    folder = Path(broken.spec.uri) / "later" / "x"
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_bytes(change.get("config", b'{"peft_type": "LORA"}'))
    weights = folder / "adapter_model.safetensors"
    layer = change.get("layer", "model.layers.0.self_attn.q_proj")
    tensors = {
        f"base_model.model.{layer}.{kind}.weight": torch.full(shape, float("nan") if change.get("nan") else 1.0)
        for kind, shape in change.get("tensors", {"lora_A": [4, 64], "lora_B": [64, 4]}).items()
    }
    save_file(tensors, weights)
    if "weights" in change or "size" in change:
        weights.write_bytes(change.get("weights", bytes(change.get("size", 0))))
    if "missing" in change:
        weights.unlink()
    plain = await _tokens(broken, "one two three")
    with pytest.raises(InvalidInput, match=message):
        await _load(broken, "x")
    assert (broken.details()["adapters"], _weights_in_memory(broken)) == ([], [])
    assert await _tokens(broken, "one two three") == plain


@pytest.fixture(scope="module")
def broken(adapter_folder: Path) -> Iterator[LanguageModel]:
    with _adaptable(adapter_folder, max_adapter_rank=32, adapter_memory=1) as model:
        yield model


@pytest.mark.parametrize(
    ("name", "path", "error", "message"),
    [
        ("a:b", "a", InvalidInput, "`lora_name` must be 1 to 128 letters"),
        ("", "a", InvalidInput, "`lora_name` must be"),
        ("a" * 129, "a", InvalidInput, "`lora_name` must be"),
        ("x", "../adapters", InvalidInput, "must be a folder in the folder of adapters"),
        ("x", "..", InvalidInput, "must be a folder in the folder of adapters"),
        ("x", "link", InvalidInput, "must be a folder in the folder of adapters"),
        ("x", "/etc", InvalidInput, "must be a folder in the folder of adapters"),
        ("x", "nowhere", PathNotFound, "folder not found"),
        ("x", "a\0b", InvalidInput, "must be the path of a folder"),
    ],
)
async def test_names_and_paths_of_adapters_are_checked(
    broken: LanguageModel, name: str, path: str, error: type[Exception], message: str
) -> None:
    link = Path(broken.spec.uri) / "later" / "link"
    if not link.is_symlink():
        link.symlink_to(Path(broken.spec.uri).parent)
    with pytest.raises(error, match=message):
        await _load(broken, name, path)


@pytest.mark.parametrize("options", [{"replicas": 2}, {"placement": "process"}])
async def test_adapters_of_models_in_other_processes_do_not_change(options: dict[str, Any]) -> None:
    model = LanguageModel(ModelSpec(name="m", **options))
    with pytest.raises(NotSupported, match="only for a model with one replica in the server's process"):
        await _load(model, "a")
    with pytest.raises(NotSupported, match="only for a model with one replica"):
        await model.unload_adapter(UnloadAdapter("a"))
