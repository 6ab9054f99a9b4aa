"""A step on another device: no operation mixes devices, and weights exist once."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from dragoman_text.generation import runner as runner_module
from dragoman_text.generation.cache import KeyValueCache
from dragoman_text.generation.fused import UnpackedLinear
from dragoman_text.generation.job import BatchRow
from dragoman_text.generation.pretrained import load_pretrained
from dragoman_text.generation.runner import Runner

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
# A model with full attention, and one with a sliding window of 24 tokens and norms of queries and keys.
MODELS = {
    "llama": ("Llama", {}),
    "qwen": ("Qwen3", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0}),
}


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


def cache_of(runner: Runner, slots: int = 8, length: int = 96) -> KeyValueCache:
    cache = KeyValueCache(runner.shape, 1 << 14, runner.dtype, runner.device)
    cache.reserve(slots, length)
    return cache


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_concatenated_weights_exist_once() -> None:
    parts = [torch.nn.Linear(8, size) for size in (4, 6, 2)]
    expected = [part.weight.detach().clone() for part in parts]
    with torch.no_grad():
        joined = UnpackedLinear(*parts)
    assert len({part.weight.untyped_storage().data_ptr() for part in parts}) == 1
    for part, weight in zip(parts, expected, strict=True):
        assert torch.equal(part.weight, weight)
    rows = torch.randn(3, 8)
    assert_same(joined.forward(rows), torch.cat([part(rows) for part in parts], 1))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [each for each in torch.utils._pytree.tree_leaves(tree) if isinstance(each, torch.Tensor)]


class DeviceCheck(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record operations on tensors of several devices, which fail on a GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mixed: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = _tensors((args, kwargs))
        if len({each.device.type for each in tensors if each.dim()}) > 1 and "copy" not in str(function):
            self.mixed.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", MODELS)
def test_all_of_a_step_is_on_the_models_device(name: str, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The device "meta" computes shapes alone, and the masks of transformers need values.
    monkeypatch.setattr(Runner, "agrees", lambda *_: True)
    monkeypatch.setattr(Runner, "_own_logits", lambda *_: None)
    monkeypatch.setattr(runner_module, "CHECKED", "unmasked")
    monkeypatch.setattr(transformers.AttentionMaskInterface, "register", lambda *_: None)
    with DeviceCheck() as device_check:
        runner = Runner(load_pretrained(folders / name, "float32", "meta"))
        cache = cache_of(runner)
        monkeypatch.setattr(torch.Tensor, "__float__", lambda _: 0.0)
        for position in range(4):
            assert runner.run(cache, [BatchRow(slot, position, [1]) for slot in range(3)]).device.type == "meta"
        assert runner.run(
            cache, [BatchRow(0, 4, [1]), BatchRow(1, 4, [1] * 9), BatchRow(2, 4, [1] * 9, wanted=9)]
        ).shape == (11, 96)
        assert runner.run(cache, [BatchRow(0, 5, [1]), BatchRow(6, 0, [1])]).shape == (2, 96)
    assert device_check.mixed == []
