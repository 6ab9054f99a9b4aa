"""Servers of the text generation benchmark: `dragoman serve` and llama.cpp's `llama-server`, with streaming clients."""

import asyncio
import atexit
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.generation_side import PROMPT, Engine, Text, threads
from benchmarks.processes import Process, dragoman, free_port, http_ready

# Sequences at the same time, and the tokens of each that llama.cpp has room for.
_SEQUENCES, _CONTEXT = 32, 256


@dataclass(frozen=True, slots=True)
class _Api:
    """Where a server is asked whether it is ready and for texts, with which request, and the tokens of an event."""

    health: str
    path: str
    request: Callable[[list[int], int], dict[str, Any]]
    tokens: Callable[[dict[str, Any]], list[int]]


_OPENAI = _Api(
    "/v2/health/ready",
    "/v1/completions",
    lambda prompt, new: {
        "model": "m",
        "prompt": prompt,
        "max_tokens": new,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    },
    lambda event: [token for choice in event["choices"] for token in choice.get("token_ids") or ()],
)
_LLAMA_CPP = _Api(
    "/health",
    "/completion",
    lambda prompt, new: {
        "prompt": prompt,
        "n_predict": new,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_tokens": True,
    },
    lambda event: event["tokens"],
)


def dragoman_serve(model: str, parameters: dict[str, Any]) -> Engine:
    """Start our server with a model, and wait until it is ready."""
    home = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    (home / "m").mkdir()
    lines = [f"{name} = {json.dumps(value)}" for name, value in parameters.items()]
    settings = [f"[model]\nuri = {json.dumps(model)}\nruntime = 'llm'", "[model.parameters]", *lines]
    (home / "m" / "dragoman.toml").write_text("\n".join(settings) + "\n")
    port = free_port()
    return _start(dragoman([str(home)], port, free_port()), port, _OPENAI)


def llama_server_program() -> str | None:
    """Return the path of `llama-server`: that of the environment variable LLAMA_SERVER, or the one in PATH."""
    return os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")


def llama_server(model: str) -> Engine:
    """Start llama.cpp's server with a GGUF file, and wait until it is ready."""
    program, port = llama_server_program(), free_port()
    assert program is not None
    assert PROMPT < _CONTEXT
    count = str(threads())
    command = [program, "--model", model, "--port", str(port), "--threads", count, "--threads-batch", count]
    command += ["--parallel", str(_SEQUENCES), "--ctx-size", str(_SEQUENCES * _CONTEXT), "--no-webui"]
    return _start(command, port, _LLAMA_CPP)


def _start(command: Sequence[str], port: int, api: _Api) -> Engine:
    child = subprocess.Popen(command)
    atexit.register(child.terminate)
    process = Process(child, Path(os.devnull))
    ready_s = process.wait_until(lambda: http_ready(port, api.health), limit_s=300)
    return Engine(lambda prompts, new: asyncio.run(_together(port, api, prompts, new)), child.pid, ready_s)


async def _together(port: int, api: _Api, prompts: list[list[int]], new: int) -> list[Text]:
    began_s = time.perf_counter()
    clients = (_client(port, api, json.dumps(api.request(prompt, new)).encode(), began_s) for prompt in prompts)
    return list(await asyncio.gather(*clients))


async def _client(port: int, api: _Api, body: bytes, began_s: float) -> Text:
    """Return the text of one streamed answer. Raises RuntimeError with the answer if it is an error."""
    text = Text()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST {api.path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError((status + await reader.read()).decode(errors="replace"))
        # The lines between events, such as those of the lengths of chunks, are passed over.
        async for line in reader:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(event["error"])
                text.add(api.tokens(event), began_s)
    finally:
        writer.close()
    return text
