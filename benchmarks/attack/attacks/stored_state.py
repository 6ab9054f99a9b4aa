"""Clients that fill what the server keeps between requests: stored responses, asynchronous results, LoRA adapters."""

import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks.attack.attack import AimMissedError, Attack, Target
from benchmarks.attack.attacks.grammars import texts_beside
from benchmarks.attack.keys import KEYS, bearer, key_flags
from benchmarks.attack.server import LLAMA

_MODEL = "tiny-llama"
_RESPONSES = 1200  # more than `max_stored_responses`
_RESULTS = 1024  # that the server keeps
_LOADS = 60


def _call(
    connection: HTTPConnection, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
) -> tuple[int, bytes, Mapping[str, str]]:
    connection.request(method, path, None if body is None else json.dumps(body), dict(headers or {}))
    response = connection.getresponse()
    return response.status, response.read(), {name.lower(): value for name, value in response.getheaders()}


def _open(target: Target) -> HTTPConnection:
    return HTTPConnection(target.host, target.http_port, timeout=120)


def _store_responses(target: Target) -> str:
    """Store responses beyond the limit; the one that another key has stored stays, and is its own."""
    connection = _open(target)
    request = {"model": _MODEL, "input": "a " * 40, "max_output_tokens": 1}
    status, text, _ = _call(connection, "POST", "/v1/responses", request, bearer("honest"))
    own = json.loads(text)["id"]
    answers: Counter[int] = Counter()
    for _ in range(_RESPONSES):
        status, text, _ = _call(connection, "POST", "/v1/responses", request, bearer("hostile"))
        answers[status] += 1
    if set(answers) != {200}:
        raise AimMissedError(f"expected 200 for each response, got {dict(answers)} {text[:100]!r}")
    found = {name: _call(connection, "GET", f"/v1/responses/{own}", None, bearer(name))[0] for name in KEYS}
    if found != {"honest": 200, "hostile": 404}:
        raise AimMissedError(f"the response of the honest client: expected 200, and 404 for another, got {found}")
    return f"{_RESPONSES:,} responses; the one of another key is still there"


def _start_results(target: Target) -> str:
    """Start asynchronous calls until the server keeps no more; another key can still start one and fetch it."""
    connection = _open(target)
    body = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
    answers: Counter[int] = Counter()
    for _ in range(_RESULTS):
        headers = {**bearer("hostile"), "x-synchronous": "false"}
        status, text, received = _call(connection, "POST", f"/predictions/{_MODEL}", body, headers)
        answers[status] += 1
        if status != 200 and (status != 503 or "retry-after" not in received):
            raise AimMissedError(f"expected 200 or 503 with Retry-After, got {status} {text[:100]!r}")
    if dict(answers) != {200: _RESULTS * 7 // 8, 503: _RESULTS // 8}:
        raise AimMissedError(f"expected 7/8 of {_RESULTS} for a key, got {dict(answers)}")
    headers = {**bearer("honest"), "x-synchronous": "false"}
    status, text, received = _call(connection, "POST", f"/predictions/{_MODEL}", body, headers)
    token = received.get("x-next-token", "")
    while status in (200, 202) and not text:
        headers = {**bearer("honest"), "x-starting-token": token}
        status, text, _ = _call(connection, "POST", f"/predictions/{_MODEL}", None, headers)
        text = b"" if status == 202 else text
    if status != 200 or b"generated_text" not in text:
        raise AimMissedError(f"the result of the honest client: got {status} {text[:100]!r}")
    return f"{answers[200]} results were kept, then 503; another key got its own"


# --- LoRA adapters -------------------------------------------------------------------------------------------------


def _prepare_adapters(folder: Path) -> Sequence[str]:
    """Write adapters beside the model, most of them hostile, and return the flags."""
    adapters = LLAMA / "adapters"
    shutil.rmtree(adapters, ignore_errors=True)
    config = json.loads((LLAMA / "config.json").read_text())
    size = int(config["hidden_size"])
    good = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    heads = int(config["num_attention_heads"]) * int(config.get("head_dim") or size // config["num_attention_heads"])
    weights = {
        f"{prefix}.lora_A.weight": np.zeros((4, size), np.float32),
        f"{prefix}.lora_B.weight": np.zeros((heads, 4), np.float32),
    }
    hostile: Mapping[str, tuple[Any, Any]] = {
        "good": (good, weights),
        "rank": ({**good, "r": 10**9}, weights),
        "scale": ({**good, "lora_alpha": 1e308}, weights),
        "shape": (good, {name: np.zeros((4, 4), np.float32) for name in weights}),
        "pattern": ({**good, "r": 8, "target_modules": "(a+)+$", "rank_pattern": {"(a|a)*b": 2}}, weights),
        "layers": (good, {f"{prefix.replace('.0.', f'.{n}.')}.lora_A.weight": np.zeros((4, 4)) for n in range(5000)}),
        "config": ([[]] * 100_000, weights),
    }
    for name, (settings, tensors) in hostile.items():
        (adapters / name).mkdir(parents=True)
        (adapters / name / "adapter_config.json").write_text(json.dumps(settings))
        save_file(tensors, adapters / name / "adapter_model.safetensors")
    (adapters / "header").mkdir()
    (adapters / "header" / "adapter_config.json").write_text(json.dumps(good))
    (adapters / "header" / "adapter_model.safetensors").write_bytes(b"\xff" * 7 + b"\x7f" + b"{" * 100)
    return key_flags(folder)


def _load_adapters(target: Target) -> str:
    """Load hostile adapters, and a good one under many names, beside a client of the base model."""
    connection = _open(target)
    paths = ["rank", "scale", "shape", "pattern", "layers", "config", "header", "..", "../../..", "/etc", "missing", ""]
    answers: Counter[str] = Counter()
    with texts_beside(target, bearer("honest")) as waits:
        for number in range(_LOADS):
            path = paths[number // 2 % len(paths)] if number % 2 else "good"
            body = {"lora_name": f"adapter-{number}", "lora_path": path}
            status, text, _ = _call(connection, "POST", "/v1/load_lora_adapter", body, bearer("hostile"))
            is_right = (status == 200) if path == "good" else (400 <= status < 500 and b'"message"' in text)
            if not is_right:
                raise AimMissedError(f"adapter {path!r}: got {status} {text[:200]!r}")
            answers[f"{status}"] += 1
    status, text, _ = _call(connection, "GET", "/v1/models", None, bearer("honest"))
    if status != 200 or b"adapter-0" not in text:
        raise AimMissedError(f"the list of models: got {status} {text[:100]!r}")
    return f"{_LOADS} loads ({dict(answers)}); completions of the base model took up to {max(waits):.0f} ms"


# `body_bytes` is a quarter of what stored responses may take.
_kept = partial(Attack, models=("doubled", _MODEL), token=KEYS["honest"], body_bytes=16 << 20)
ATTACKS = (
    _kept(
        name="stored-responses",
        about=f"{_RESPONSES:,} responses that are stored, of one key",
        run=_store_responses,
        prepare=key_flags,
    ),
    _kept(
        name="stored-results",
        about=f"{_RESULTS:,} asynchronous calls of one key, of which no result is fetched",
        run=_start_results,
        prepare=key_flags,
    ),
    _kept(
        name="stored-adapters",
        about=f"{_LOADS} loads of LoRA adapters, a good one under many names and broken ones",
        run=_load_adapters,
        prepare=_prepare_adapters,
    ),
)
