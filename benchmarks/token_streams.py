"""Many token streams at once (server-sent events, OpenAI completions) with a stub engine: CPU per token, gaps."""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks import load, peers
from benchmarks.identity import Cores
from benchmarks.peers import PeerConfig
from benchmarks.processes import ROOT, pin
from benchmarks.subjects import OURS, Subject, our_server
from benchmarks.token_ticks import TOKENS_PER_S
from benchmarks.turns import Plan, Row

PEER = "fastapi"
MODEL = f"{ROOT / 'benchmarks' / 'token_models.py'}:TokenStream"
_NAMES = {PEER: "FastAPI in the style of vLLM"}
_STREAMS = (1000, 5000)


def measure(plan: Plan, peer_names: Sequence[str]) -> list[Row]:
    """W12: a row for each number of streams and server, with medians of the rounds, and the spread of CPU per token."""
    cores = Cores.of_this_machine()
    tokens = round(TOKENS_PER_S * (1 if plan.quick else max(4.0, plan.seconds)))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        found = [stack.enter_context(our_server(cores.server, folder / "log", [MODEL, "--max-queue", "0"]))]
        if PEER in peer_names:
            found.append(stack.enter_context(peers.run_peer(PEER, PeerConfig(folder / PEER, ()), cores.server)))
        rows = []
        for count in (20,) if plan.quick else _STREAMS:
            turns = [{s.name: _run(s, count, tokens, folder) for s in found} for _ in range(plan.rounds)]
            rows += [_summary(s.name, count, turns) for s in found]
        return rows


def _run(subject: Subject, count: int, tokens: int, folder: Path) -> Row:
    """Open all streams at once, and read them to their end."""
    body = json.dumps({"model": "TokenStream", "prompt": "Once", "max_tokens": tokens, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    (folder / "request").write_bytes(head.encode() + b"\r\n\r\n" + body)
    limit_s = 4 * tokens / TOKENS_PER_S + 5
    command = [str(load.build_generator("stream_load")), str(subject.ports["http"]), str(count), str(tokens)]
    before_s = subject.process.cpu_s()
    pinned = pin(Cores.of_this_machine().load)
    run = subprocess.run(
        [*command, str(limit_s), str(folder)], preexec_fn=pinned, capture_output=True, text=True, timeout=limit_s + 60
    )
    if run.returncode:
        raise RuntimeError(f"{subject.name}: {run.stderr}")
    found = json.loads(run.stdout)
    if found["ended"] != found["correct"]:
        raise RuntimeError(f"{subject.name}: {found['ended'] - found['correct']} of {count} streams were wrong")
    cpu_us = (subject.process.cpu_s() - before_s) * 1e6
    row: Row = {"token_us": cpu_us / found["tokens"], "event_us": cpu_us / found["events"], **found}
    print(f"{count} streams, {subject.name}: {row}", file=sys.stderr, flush=True)
    return row


def _summary(name: str, count: int, turns: Sequence[dict[str, Row]]) -> Row:
    def middle(key: str) -> float:
        return float(f"{statistics.median(turn[name][key] for turn in turns):.4g}")

    row: Row = {"workload": "token streams", "streams": count, "server": _NAMES.get(name, name)}
    row |= {key: middle(key) for key in ("token_us", "event_us", "gap_p50_ms", "gap_p99_ms", "gap_max_ms")}
    row["tokens_per_s"] = float(f"{statistics.median(t[name]['tokens'] / t[name]['seconds'] for t in turns):.4g}")
    row["token_us_spread"] = [float(f"{end(t[name]['token_us'] for t in turns):.4g}") for end in (min, max)]
    row["ratios"] = {
        _NAMES.get(other, other): _ratio(turns, name, other) for other in turns[0] if other != name
    }  # of CPU time
    row["cpu_ratios"] = row["ratios"]
    return row


def _ratio(turns: Sequence[dict[str, Row]], name: str, other: str) -> float:
    return float(f"{statistics.median(t[other]['token_us'] / t[name]['token_us'] for t in turns):.4g}")


if __name__ == "__main__":
    sys.exit(f"run `python -m benchmarks w12` ({OURS} and {PEER})")
