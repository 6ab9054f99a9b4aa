"""A quiet key beside one with 64 clients: how much later its answers come.

usage: python -m benchmarks.fairness [--requests 200] [--clients 64] [--text]

Steps of the text engine's scheduler and batches of a tensor model are counted, not seconds, so other load does not
matter. With --text a small Llama with random weights generates texts instead, and the CPU time of the engine's thread
is the clock: run it with OMP_NUM_THREADS=1. Each key is a closed loop: a client sends its next request when it has its
answer. Without keys means that both share one owner, in the order of arrival.
"""

import argparse
import asyncio
import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.processes import RESULTS, ROOT
from dragoman.core.callers import ANYONE, Caller
from dragoman.core.calls import Generate, Infer, Inference, Request
from dragoman.core.metrics import Family
from dragoman.core.tensor import Tensor
from dragoman.core.text import Sampling
from dragoman.core.worker_status import WorkerStatus
from dragoman.engine.batching import Batcher
from dragoman.engine_setup import open_engine
from dragoman.plugins import import_file
from dragoman_text.generation import job
from dragoman_text.generation.scheduler import Scheduler

NOISY, QUIET = Caller("key:noisy", "noisy"), Caller("key:quiet", "quiet")
_SLOTS, _CHUNK, _MEMORY = 16, 256, 1 << 20


class Prompt:
    """A prompt of the scheduler, with a number of tokens to generate."""

    def __init__(self, length: int, tokens: int, caller: Caller, step: int) -> None:
        self.caller, self.width, self.uses_prefix_cache = caller, 1, False
        self.spare: list[int] = []
        self.sequences = [job.Sequence([1] * length, length)]
        self.tokens, self.since = tokens, step

    def restart(self) -> None:
        """Its tokens stay, and are computed again."""


class Memory:
    """As much memory as the scheduler asks for."""

    budget = _MEMORY

    def fits(self, slots: int, length: int) -> bool:
        return slots * length <= _MEMORY

    def reserve(self, slots: int, length: int) -> None: ...
    def move(self, source: int, target: int, length: int) -> None: ...
    def clear(self, slot: int, length: int) -> None: ...
    def load_prefix(self, sequence: job.Sequence) -> int:
        return 0


def first_tokens(clients: int, requests: int, *, keys: bool) -> list[int]:
    """Return after how many steps each request of the quiet key has its first token, beside so many noisy clients."""
    scheduler, rng, waits = Scheduler(Memory(), _SLOTS, _CHUNK), random.Random(1), list[int]()
    noisy, quiet = (NOISY, QUIET) if keys else (ANYONE, ANYONE)
    mine: set[Prompt] = set()

    def send(caller: Caller, step: int, *, is_quiet: bool) -> None:
        prompt = Prompt(rng.randint(64, 512), rng.randint(32, 128), caller, step)
        if is_quiet:
            mine.add(prompt)
        scheduler.add(prompt)

    for _ in range(clients):
        send(noisy, 0, is_quiet=False)
    step = 0
    while len(waits) < requests:
        step += 1
        if not mine and step > 200:  # the other one is busy by then
            send(quiet, step, is_quiet=True)
        for work in scheduler.plan():
            work.sequence.computed += work.count
            if work.sequence.pending:
                continue
            prompt: Any = work.task
            work.sequence.tokens.append(1)
            generated = len(work.sequence.tokens) - work.sequence.prompt
            if prompt in mine and generated == 1:
                waits.append(step - prompt.since + 1)
            if generated >= prompt.tokens:
                scheduler.remove(prompt)
                if prompt in mine:
                    mine.discard(prompt)
                else:
                    send(noisy, step, is_quiet=False)
    return waits


class Pool:
    """One worker that computes a batch of any size in one turn, and counts the batches."""

    capacity = 1
    is_replicated = False
    on_capacity: Any = None

    def __init__(self) -> None:
        self.batches = 0

    async def call(self, request: Request[Any]) -> Any:
        request.times.started_s = 1.0
        for _ in range(8):  # clients of the last batch send their next requests
            await asyncio.sleep(0)
        self.batches += 1
        call: Any = request.call
        request.times.computed_s = 1.0 + 0.001 * call.inputs["x"].shape[0]
        return Inference(dict(call.inputs))

    def measurements(self) -> Sequence[Family]:
        return ()

    def workers(self) -> Sequence[WorkerStatus]:
        return ()


async def batches(clients: int, requests: int, *, keys: bool) -> list[int]:
    """Return for how many batches each request of the quiet key waits, its own one included."""
    pool: Any = Pool()
    batcher = Batcher(pool, 8, 0.0)
    noisy, quiet = (NOISY, QUIET) if keys else (ANYONE, ANYONE)
    call = Infer({"x": Tensor.of(np.ones((1, 4), np.float32))})
    waits: deque[int] = deque()

    async def send(caller: Caller) -> int:
        before = pool.batches
        answer: Any = batcher.begin(Request(call, "m", caller=caller))
        await answer
        return int(pool.batches - before)

    async def run(caller: Caller) -> None:
        while True:
            await send(caller)

    others = [asyncio.create_task(run(noisy)) for _ in range(clients)]
    for _ in range(50):
        await asyncio.sleep(0)
    while len(waits) < requests:
        waits.append(await send(quiet))
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    return [*waits]


def text_model() -> Path:
    """Return the folder of a Llama of 2.5 million random weights, which is made once."""
    folder = RESULTS / "models" / "small"
    if not folder.exists():
        training: Any = import_file(ROOT / "examples" / "text" / "train_models.py")
        training.train(folder, "llama", training.Size(), steps=1)
    return folder


async def first_token_times_ms(folder: Path, clients: int, requests: int, *, keys: bool) -> list[float]:
    """Return the CPU time of the engine's thread until each request of the quiet key has its first token, beside so
    many noisy clients.
    """
    rng, times_ms = random.Random(1), list[float]()
    noisy, quiet = (NOISY, QUIET) if keys else (ANYONE, ANYONE)

    async with open_engine(str(folder), max_queue=2 * clients + 8) as engine:
        (thread,) = [each for each in threading.enumerate() if each.name == f"text-{folder.name}"]
        assert thread.ident is not None
        clock = time.pthread_getcpuclockid(thread.ident)

        async def send(caller: Caller) -> float:
            prompt = tuple(rng.randrange(7, 1900) for _ in range(rng.randint(64, 512)))
            sampling = Sampling(max_new_tokens=rng.randint(32, 128), ignore_eos=True)
            call = Generate(prompts=(prompt,), sampling=sampling, stream=True)
            began_s, first_s = time.clock_gettime(clock), 0.0
            async for _ in engine.stream(Request(call, folder.name, caller=caller)):
                first_s = first_s or time.clock_gettime(clock)
            return 1000 * (first_s - began_s)

        async def run(caller: Caller) -> None:
            while True:
                await send(caller)

        others = [asyncio.create_task(run(noisy)) for _ in range(clients)]
        for _ in range(8):  # to be warm, and busy
            await send(quiet)
        while len(times_ms) < requests:
            times_ms.append(await send(quiet))
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    return times_ms


def measure_text(clients: int, requests: int) -> list[list[float]]:
    """Return the times alone, beside others of the same owner, and beside another key."""
    folder = text_model()
    sides = ((0, True, requests), (clients, False, max(10, requests // 10)), (clients, True, requests))
    return [asyncio.run(first_token_times_ms(folder, n, count, keys=k)) for n, k, count in sides]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fairness", description=__doc__)
    parser.add_argument("--requests", type=int, default=200, help="of the quiet key (default 200)")
    parser.add_argument("--clients", type=int, default=64, help="of the noisy key (default 64)")
    parser.add_argument("--text", action="store_true", help="with a model that generates, in CPU time")
    arguments = parser.parse_args()
    print("| the quiet key waits for | alone | beside it, one owner | beside it, keys |")
    print("|---|---:|---:|---:|")
    if arguments.text:
        times = measure_text(arguments.clients, arguments.requests)
        for part in (50, 99):
            values = [np.percentile(each, part) for each in times]
            print(f"| CPU ms until the first token, p{part} | " + " | ".join(f"{value:.1f}" for value in values) + " |")
        print(f"p99 beside a key to p99 alone: {np.percentile(times[2], 99) / np.percentile(times[0], 99):.2f}")
        return
    text = [first_tokens(n, arguments.requests, keys=k) for n, k in ((0, True), (arguments.clients, False))]
    text.append(first_tokens(arguments.clients, arguments.requests, keys=True))
    tensors = [asyncio.run(batches(n, arguments.requests, keys=k)) for n, k in ((0, True), (arguments.clients, False))]
    tensors.append(asyncio.run(batches(arguments.clients, arguments.requests, keys=True)))
    for name, found in (("steps until the first token", text), ("batches until the answer", tensors)):
        for part in (50, 99):
            print(f"| {name}, p{part} | " + " | ".join(f"{np.percentile(each, part):.0f}" for each in found) + " |")


if __name__ == "__main__":
    main()
