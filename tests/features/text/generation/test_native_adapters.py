"""LoRA adapters in the kernels: logits of merged weights, the kernel against its reference, independent rows."""

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import dragoman_kernels
from dragoman.core.errors import ModelFailed
from dragoman_text.generation.adapters import LoraWeights
from dragoman_text.generation.cache import KeyValueCache
from dragoman_text.generation.job import BatchRow
from dragoman_text.generation.native.adapters import pack_adapter
from dragoman_text.generation.native.structures import AdapterLayer, AdapterPart
from dragoman_text.generation.pretrained import QUANTIZATIONS, load_pretrained
from dragoman_text.generation.runner import Runner
from features.kernels.forms import forms

pytestmark = pytest.mark.filterwarnings("ignore")

_SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 150,
    "max_position_embeddings": 256,
}
# Sizes of the MLP: no multiple of a vector, and one that weights in blocks can have.
ODD, BLOCKED = 170, 160
# Ranks of the adapters "a" and "b" of each layer: less and more than what the kernel keeps at once.
_RANKS = {"q_proj": (1, 7), "k_proj": (4, 70), "v_proj": (5, 0), "o_proj": (3, 8), "gate_proj": (16, 2)}
_RANKS |= {"up_proj": (64, 65), "down_proj": (6, 9)}
FORMS = [f"{form}-{dtype}" for form in forms() for dtype in ("float32", "bfloat16")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for each size of the MLP, named by it."""
    path = tmp_path_factory.mktemp("adapted")
    for mlp in (ODD, BLOCKED):
        torch.manual_seed(5)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES, intermediate_size=mlp))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 0.1 if parameter.dim() == 1 else 0.0, 0.2)
        model.save_pretrained(path / str(mlp))
    return path


def load(folders: Path, form: str, quantization: str = "none") -> tuple[Runner, KeyValueCache]:
    """Load the model, and both adapters as "a" and "b"."""
    (name, _, dtype), mlp = form.partition("-"), ODD if quantization == "none" else BLOCKED
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERNELS_FORM", name)
        runner = Runner(load_pretrained(folders / str(mlp), dtype, "cpu", bits=QUANTIZATIONS[quantization]))
    assert runner.native
    for number, key in enumerate("ab"):
        runner.adapters.add(key, adapter(number, mlp), key)
    cache = KeyValueCache(runner.shape, 4096, runner.dtype, runner.device)
    cache.reserve(12, 96)
    return runner, cache


def adapter(number: int, mlp: int = ODD) -> dict[str, LoraWeights]:
    """Return the weights of adapter "a" or "b" for all linear layers."""
    torch.manual_seed(11 + number)
    heads, hidden = _SIZES["num_attention_heads"] * _SIZES["head_dim"], _SIZES["hidden_size"]
    sizes = {
        "self_attn.q_proj": (hidden, heads),
        "self_attn.k_proj": (hidden, heads // 2),
        "self_attn.v_proj": (hidden, heads // 2),
        "self_attn.o_proj": (heads, hidden),
        "mlp.gate_proj": (hidden, mlp),
        "mlp.up_proj": (hidden, mlp),
        "mlp.down_proj": (mlp, hidden),
    }
    weights = {}
    for layer in range(_SIZES["num_hidden_layers"]):
        for name, (inputs, outputs) in sizes.items():
            if rank := _RANKS[name.partition(".")[2]][number]:
                down, up = torch.randn(rank, inputs) * 0.3, torch.randn(outputs, rank) * 0.3 / rank**0.5
                weights[f"model.layers.{layer}.{name}"] = LoraWeights(down, up)
    return weights


def merged(folders: Path, key: str) -> Any:
    """Return a model of transformers with the weights of an adapter added to its own."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folders / str(ODD), dtype=torch.float32).eval()
    for path, lora in (adapter("ab".index(key)) if key else {}).items():
        model.get_submodule(path).weight.data += lora.up @ lora.down
    return model


def rows(start: int, count: int, keys: str) -> list[BatchRow]:
    """Return rows of sequences with `count` tokens each from `start` on; a key of " " is no adapter."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 150, (64,), generator=generator).tolist()
    return [BatchRow(slot, start, tokens[start : start + count], count, key.strip()) for slot, key in enumerate(keys)]


@pytest.mark.parametrize("form", FORMS[::2])
def test_logits_equal_those_of_merged_weights(folders: Path, form: str) -> None:
    runner, cache = load(folders, form)
    keys = "a bba"
    first = runner.run(cache, rows(0, 11, keys)).view(len(keys), 11, -1)
    second = runner.run(cache, rows(11, 1, keys)).view(len(keys), 1, -1)
    tokens = torch.tensor([rows(0, 12, "a")[0].tokens])
    with torch.inference_mode():
        for key, logits in zip(keys, torch.cat((first, second), 1), strict=True):
            expected = merged(folders, key.strip())(tokens).logits[0]
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("form", FORMS[1::2])
def test_bf16_is_near_merged_weights(folders: Path, form: str) -> None:
    runner, cache = load(folders, form)
    tokens = torch.tensor([rows(0, 12, "a")[0].tokens])
    with torch.inference_mode():
        expected = [merged(folders, key)(tokens).logits[0] for key in ("a", "b", "")]
    for key, logits in zip("ab", runner.run(cache, rows(0, 12, "ab")).view(2, 12, -1), strict=True):
        errors = [float((logits - each).norm() / each.norm()) for each in expected]
        assert errors["ab".index(key)] < 0.03
        assert min(error for i, error in enumerate(errors) if i != "ab".index(key)) > 0.2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_rows_do_not_depend_on_the_batch_or_the_number_of_threads(folders: Path, form: str, quantization: str) -> None:
    runner, cache = load(folders, form, quantization)
    keys = "ab a bbbbb a"
    before = torch.get_num_threads()
    try:
        prompts = torch.cat([runner.run(cache, [row]) for row in rows(0, 9, keys)])
        steps = torch.cat([runner.run(cache, [row]) for row in rows(9, 1, keys)])
        for threads in (1, 2, 5):
            runner.set_threads(threads)
            assert torch.equal(runner.run(cache, rows(0, 9, keys)), prompts)
            assert torch.equal(runner.run(cache, rows(9, 1, keys)), steps)
            assert torch.equal(runner.run(cache, rows(9, 1, keys)[3:8]), steps[3:8])
    finally:
        torch.set_num_threads(before)


def test_rows_without_an_adapter_have_the_bits_of_a_model_without_adapters(folders: Path) -> None:
    runner, cache = load(folders, f"{forms()[-1]}-float32")
    alone = runner.run(cache, rows(0, 9, " "))
    assert torch.equal(runner.run(cache, rows(0, 9, " ab "))[:9], alone)
    for key in "ab":
        runner.adapters.remove(key)
    assert torch.equal(runner.run(cache, rows(0, 9, " ")), alone)
    with pytest.raises(ModelFailed, match="adapter 'b' is not in memory"):
        runner.run(cache, rows(0, 9, " b"))


@pytest.mark.parametrize("form", FORMS)
@given(
    count=st.integers(1, 4),
    rank=st.sampled_from([1, 3, 4, 8, 63, 64, 65, 130]),
    size=st.sampled_from([16, 48, 64]),
    outputs=st.integers(1, 90),
    first=st.integers(0, 20),
)
@settings(max_examples=20, deadline=None)
def test_the_kernel_equals_its_reference(form: str, count: int, rank: int, size: int, outputs: int, first: int) -> None:
    name, _, dtype_name = form.partition("-")
    dtype = getattr(torch, dtype_name)
    torch.manual_seed(rank * size + outputs)
    inputs = torch.randn(count, size).to(dtype)
    lora = LoraWeights(torch.randn(rank, size).to(dtype).float(), torch.randn(outputs, rank).to(dtype).float())
    down, up = pack_adapter(lora, dtype)
    output, sums = torch.randn(count, first + outputs + 5), torch.full((count, 64), float("nan"))
    expected = output.double()
    expected[:, first : first + outputs] += inputs.double() @ lora.down.double().T @ lora.up.double().T
    part = AdapterPart(down.data_ptr(), up.data_ptr(), up.shape[1], size, first, outputs)
    layer = AdapterLayer(ctypes.addressof(part), 1)
    address, integer = ctypes.c_void_p, ctypes.c_int64
    types = (address, address, integer, integer, integer, address, address, integer)
    dragoman_kernels.function("adapt", name, *types)(
        ctypes.addressof(layer),
        inputs.data_ptr(),
        inputs.itemsize * size,
        count,
        dtype is torch.bfloat16,
        sums.data_ptr(),
        output.data_ptr(),
        output.shape[1],
    )
    scale = float(expected.abs().max())
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=2e-6 * scale)
    untouched = [*range(first), *range(first + outputs, first + outputs + 5)]
    assert torch.equal(output[:, untouched].double(), expected[:, untouched])
