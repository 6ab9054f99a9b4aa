"""Tokens per second and time to the first token through the server, and of transformers' continuous batching."""

import asyncio
import json
import random
import re
import statistics
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT, Process, dragoman, free_port, http_ready, run_process

PROMPT = 64


def prompts(clients: int, vocabulary: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(7, vocabulary) for _ in range(PROMPT)] for _ in range(clients)]


# --- the server ------------------------------------------------------------------------------------------


@contextmanager
def serving(
    models: Sequence[Path | str], log: Path, *more: str, limit_s: float = 100.0
) -> Iterator[tuple[Process, int, int]]:
    """Run a server; yield its process and its ports for HTTP and gRPC."""
    http, grpc = free_port(), free_port()
    with run_process(dragoman(list(map(str, models)), http, grpc, *more), log, cwd=ROOT) as process:
        process.wait_until(lambda: http_ready(http), limit_s)
        yield process, http, grpc


def measure_server(
    folder: Path, log: Path, clients: Sequence[int], new: int, rounds: int, limit_s: float
) -> dict[str, Any]:
    """Return a row per number of clients. No further round begins after `limit_s` seconds."""
    began_s, rows = time.monotonic(), []
    with serving([folder], log) as (_, port, _):
        ready_s = time.monotonic() - began_s
        details = json.loads(_get(port, f"/v2/models/{folder.name}"))
        for count in clients:
            found, before = [], (0.0, 0.0)
            # The first round warms up: its shapes are recorded.
            for turn in range(rounds + 1):
                if turn > 1 and time.monotonic() - began_s > limit_s:
                    break
                if turn == 1:
                    before = _decode_steps(port)
                texts = prompts(count, details["details"]["vocabulary"], 1000 * count + turn)
                found.append(asyncio.run(_round(port, folder.name, texts, new)))
            steps = [after - first for first, after in zip(before, _decode_steps(port), strict=True)]
            step_ms = round(1e3 * steps[0] / max(1.0, steps[1]), 3)
            rows.append({"clients": count, **_summary(found[1:], new), "engine_step_ms": step_ms})
    return {"ready_s": round(ready_s, 1), "model": details, "rows": rows}


def _summary(found: Sequence[Sequence[Sequence[tuple[float, int]]]], new: int) -> dict[str, float]:
    """Return medians over rounds. found: by round and client, moments in seconds and tokens until then."""
    rows = [_round_summary(each, new) for each in found]
    names = rows[0].keys()
    return {name: round(statistics.median(row[name] for row in rows), 3) for name in names}


def _round_summary(clients: Sequence[Sequence[tuple[float, int]]], new: int) -> dict[str, float]:
    tokens = [each[-1][1] for each in clients]
    assert tokens == [new] * len(clients), f"expected {new} tokens of each client, got {sorted(set(tokens))}"
    end_s = max(each[-1][0] for each in clients)
    firsts = [each[0][0] for each in clients]
    # Of the time in which all generate, without prompts.
    gaps = [(each[-1][0] - each[0][0]) / max(1, new - each[0][1]) for each in clients]
    return {
        "tokens_per_s": len(clients) * new / end_s,
        "first_ms": 1e3 * statistics.median(firsts),
        "last_first_ms": 1e3 * max(firsts),
        "gap_ms": 1e3 * statistics.median(gaps),
        "decode_tokens_per_s": len(clients) / statistics.median(gaps),
    }


async def _round(port: int, name: str, texts: Sequence[Sequence[int]], new: int) -> list[list[tuple[float, int]]]:
    began_s = time.perf_counter()
    return list(await asyncio.gather(*(_client(port, name, text, new, began_s) for text in texts)))


async def _client(port: int, name: str, prompt: Sequence[int], new: int, began_s: float) -> list[tuple[float, int]]:
    """Stream a completion; return the moments at which tokens came, and the number of tokens until then."""
    options = {"stream": True, "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}}
    body = json.dumps({"model": name, "prompt": list(prompt), "max_tokens": new, **options}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
    writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
    moments: list[tuple[float, int]] = []
    used = 0
    try:
        while line := await reader.readline():
            if line.startswith(b"data: [DONE]"):
                break
            if not line.startswith(b"data: "):
                if line.startswith(b"HTTP/1.1") and b" 200 " not in line:
                    raise RuntimeError((line + await reader.read(2000)).decode(errors="replace"))
                continue
            event = json.loads(line[6:])
            if event.get("error"):
                raise RuntimeError(str(event["error"]))
            if event.get("usage"):
                used = event["usage"]["completion_tokens"]
            if event.get("choices"):
                text = event["choices"][0]["text"]
                moments.append((time.perf_counter() - began_s, (moments[-1][1] if moments else 0) + text.count("w")))
    finally:
        writer.close()
    assert used == new, f"expected {new} tokens, got {used}"
    # The last chunk has the rest, also of tokens that are no words.
    moments[-1] = moments[-1][0], used
    return moments


def _decode_steps(port: int) -> tuple[float, float]:
    """Return the seconds and the number of the engine's steps without prompts so far."""
    text = _get(port, "/metrics")
    name = "dragoman_text_step_seconds"
    found = [
        re.search(rf'^{name}_{part}{{[^}}]*method="decode"[^}}]*}} (\S+)', text, re.M) for part in ("sum", "count")
    ]
    first, second = (float(each[1]) if each else 0.0 for each in found)
    return first, second


def _get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as response:
        text: str = response.read().decode()
    return text


# --- transformers ----------------------------------------------------------------------------------------


# Settings of continuous batching that are tried with one short text; the fastest is measured.
_BLOCKS = {"num_blocks": 1024, "max_batch_tokens": 4096}
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "defaults": {},
    "1024 blocks": _BLOCKS,
    "1024 blocks, CUDA graphs": {**_BLOCKS, "use_cuda_graph": True},
}
_TRIED = 16  # tokens


def measure_transformers(folder: Path, device: str, clients: Sequence[int], new: int, limit_s: float) -> dict[str, Any]:
    """Return a row per number of clients of `generate_batch`, from the moment at which its manager is ready."""
    import torch
    import transformers

    began_s = time.monotonic()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    vocabulary, tried, errors = int(model.config.vocab_size), dict[str, float](), dict[str, str]()
    for name, settings in _SETTINGS.items():
        try:
            first = [_batch(model, prompts(1, vocabulary, turn), min(new, _TRIED), settings) for turn in (0, 1)]
            tried[name] = _summary(first[1:], min(new, _TRIED))["gap_ms"]
        except Exception as error:  # what a version or a GPU does not support
            errors[name] = f"{type(error).__name__}: {error}"[:1000]
    if not tried:
        raise RuntimeError(f"continuous batching generates nothing: {errors}")
    best, rows = min(tried, key=lambda name: tried[name]), list[dict[str, float]]()
    for count in clients:
        if rows and time.monotonic() - began_s > limit_s:
            break
        found = [
            _batch(model, prompts(count, vocabulary, 1000 * count + turn), new, _SETTINGS[best]) for turn in (0, 1)
        ]
        rows.append({"clients": count, **_summary(found[1:], new)})
    return {"rows": rows, "settings": best, "tried_gap_ms": tried, "errors": errors}


def _batch(model: Any, texts: list[list[int]], new: int, settings: Mapping[str, Any]) -> list[list[tuple[float, int]]]:
    import transformers

    results = list(
        model.generate_batch(
            texts,
            generation_config=transformers.GenerationConfig(
                max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=transformers.ContinuousBatchingConfig(**settings),
            record_timestamps=True,
        ).values()
    )
    wrong = [each for each in results if len(each.generated_tokens) != new]
    if wrong or len(results) < len(texts):
        raise RuntimeError(f"{len(results)} of {len(texts)} texts, errors {[each.error for each in wrong][:1]}")
    created_s = min(each.created_time for each in results)
    return [[(moment - created_s, i + 1) for i, moment in enumerate(each.timestamps)] for each in results]
