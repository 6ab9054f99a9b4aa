"""Texts of several architectures, compared with those of transformers on the same device."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.architectures import expected_text, generated_texts
from benchmarks.gpu.models import ARCHITECTURES, VOCABULARY, save_architecture
from dragoman.core.spec import ModelSpec
from dragoman_text.generation.pretrained import TOLERANCE
from dragoman_text.runtimes.llm.model import LanguageModel

PROMPTS = [
    [3 + (7 * i * i + 13 * i + 5 * length) % (VOCABULARY - 3) for i in range(length)] for length in (5, 60, 17, 33)
]


def check(
    folder: Path, dtype: str, device: str, new: int, names: Sequence[str] = tuple(ARCHITECTURES)
) -> dict[str, Any]:
    """Return by architecture how many texts are those of transformers, alone and in a batch."""
    rows = {}
    for name in names:
        try:
            rows[name] = _check(folder / name, name, dtype, device, new)
        except Exception as error:  # the others go on
            rows[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
    wrong = [name for name, row in rows.items() if row.get("error") or row["wrong"]]
    return {"texts": rows, **({"failed": f"wrong texts: {', '.join(wrong)}"} if wrong else {})}


def _check(folder: Path, name: str, dtype: str, device: str, new: int) -> dict[str, Any]:
    save_architecture(folder, name)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device).eval()
    expected = [expected_text(reference, prompt, new) for prompt in PROMPTS]
    # On a CPU, as on a GPU, PyTorch computes with the weights as they are.
    options = {"dtype": dtype, "device": device, "cache_memory": 0.5, "packed": False, "threads": 1}
    model = LanguageModel(ModelSpec(name="m", uri=str(folder), parameters=options))
    model.load()
    found = asyncio.run(generated_texts(model, PROMPTS, new))
    details = {key: model.details()[key] for key in ("forward", "device", "dtype", "cuda_graphs")}
    row: dict[str, Any] = {"equal": 0, "rounding": 0, "wrong": 0}
    for number, tokens in enumerate(found):
        row[_judge(reference, PROMPTS[number % len(PROMPTS)], tokens, expected[number % len(PROMPTS)])] += 1
    different = {tuple(tokens) for tokens in expected}
    used = {token for tokens in expected for token in tokens}
    return {**row, "different_texts": len(different), "different_tokens": len(used), **details}


def _judge(model: Any, prompt: Sequence[int], found: list[int], expected: list[int]) -> str:
    """Return "equal", or "rounding" if at the first other token the logits of both are equal up to rounding."""
    if found == expected:
        return "equal"
    first = next((i for i, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), -1)
    if first < 0:
        return "wrong"  # of another length
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *expected[:first]]], device=model.device)).logits[0, -1].float()
    difference = float((logits[found[first]] - logits[expected[first]]).abs() / logits.abs().max())
    return "rounding" if difference < TOLERANCE[model.dtype] else "wrong"
