"""LoRA adapters: each sequence uses its own, with the results of merged weights."""

import asyncio
import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from dragoman.core.errors import ModelFailed
from generation.helpers import Reference, generation, ids, load_model, prompts, text

pytestmark = pytest.mark.filterwarnings("ignore")

LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")


def save_adapter(folder: Path, model: Any, seed: int, **config: Any) -> dict[str, Any]:
    """Write an adapter of rank 4 as PEFT does; return the change of the weight of each layer."""
    import torch
    from safetensors.torch import save_file

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
    llama_folder: Path, tmp_path: Path, reference: Reference, config: dict[str, Any], message: str
) -> None:
    save_adapter(tmp_path / "bad", reference.model, 1, **config)
    with pytest.raises(ModelFailed, match=message):
        load_model(llama_folder, adapters={"bad": str(tmp_path / "bad")})


def test_a_missing_adapter_is_rejected(llama_folder: Path) -> None:
    with pytest.raises(ModelFailed, match="adapter 'missing' cannot be read"):
        load_model(llama_folder, adapters={"missing": "nowhere"})
