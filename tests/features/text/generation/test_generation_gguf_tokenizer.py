"""Tokenizers in GGUF files, built without transformers: equal to those that transformers builds, or to llama.cpp's."""

import json
import subprocess
import sys
from typing import Any

import pytest

from dragoman_text.generation.byte_alphabet import BYTES, as_word
from dragoman_text.generation.gguf_tokenizer import FileTokenizer, read_tokenizer

MERGES = ["t h", "th e", "Ġ the", "Ġ Ġ", "1 2", "12 3", "i n", "l l", "' ll", "Ġ 4", "Ċ Ċ", "Ã ¤"]
SPECIAL = ["<|endoftext|>", "<s>", "</s>"]
WORDS = [*SPECIAL, *BYTES, *(merge.replace(" ", "") for merge in MERGES), "<think>"]
TEXTS = [
    "the  the\n\n  in 123 12 4 x4",
    "<s>we'll THE'LL ä\u00a0ö  1234</s><think>",
    "line\r\n\r\n\tend  ",
    "中文 ١٢٣ e\u0301 <|endoftext|>",
]


def metadata(pre: str | None, **more: Any) -> dict[str, Any]:
    """Return the metadata of a vocabulary of bytes with a few merges."""
    values = {
        "ggml.model": "gpt2",
        "ggml.tokens": WORDS,
        "ggml.token_type": [3] * 3 + [1] * (len(WORDS) - 4) + [4],
        "ggml.merges": MERGES,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
        "chat_template": "{{ messages }}",
        **({} if pre is None else {"ggml.pre": pre}),
        **{f"ggml.{name}": value for name, value in more.items()},
    }
    return {f"tokenizer.{key}": value for key, value in values.items() if value is not None}


def read(values: dict[str, Any]) -> FileTokenizer:
    tokenizer = read_tokenizer(values)
    assert tokenizer is not None
    return tokenizer


def tokens(tokenizer: FileTokenizer, text: str, *, special: bool = False) -> list[str]:
    found: list[str] = tokenizer.backend_tokenizer.encode(text, add_special_tokens=special).tokens
    return found


@pytest.mark.parametrize("pre", [None, "gpt-2", "qwen2", "deepseek-r1-qwen", "llama-bpe", "llama3"])
def test_the_same_as_in_transformers(pre: str | None) -> None:
    pytest.importorskip("gguf")
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    values = metadata(pre)
    own = read(values).backend_tokenizer
    names = {"ggml.model": "tokenizer_type", "ggml.pre": "pre_tokenizer_type"}
    theirs, _ = convert_gguf_tokenizer(
        "llama",
        {
            names.get(key := name.removeprefix("tokenizer."), key.removeprefix("ggml.")): value
            for name, value in values.items()
        },
    )
    assert own.get_vocab() == theirs.get_vocab()
    for text in TEXTS:
        mine, expected = (each.encode(text, add_special_tokens=False) for each in (own, theirs))
        assert (mine.ids, mine.offsets) == (expected.ids, expected.offsets)
        assert own.decode(mine.ids, skip_special_tokens=False) == theirs.decode(expected.ids, skip_special_tokens=False)
        assert own.decode(mine.ids) == theirs.decode(expected.ids)


def test_digits_are_cut_before_spaces() -> None:
    """As the tokenizer.json of SmolLM does, and llama.cpp; transformers cuts as GPT-2 does."""
    assert tokens(read(metadata("smollm")), "in  123") == ["in", "ĠĠ", "1", "2", "3"]
    assert tokens(read(metadata("gpt-2")), "in  123") == ["in", "Ġ", "Ġ", "123"]


def test_words_that_are_tokens_are_not_merged() -> None:
    words = [*WORDS, "abc"]
    values = {"tokens": words, "token_type": [1] * len(words)}
    assert tokens(read(metadata("llama-bpe", **values)), "abc") == ["abc"]
    assert tokens(read(metadata("qwen2", **values)), "abc") == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("pre", "more", "expected"),
    [
        ("qwen2", {}, ["in"]),
        ("llama-bpe", {}, ["<s>", "in"]),
        ("llama-bpe", {"add_bos_token": False}, ["in"]),
        ("qwen2", {"add_bos_token": True}, ["<s>", "in"]),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, ["<s>", "in", "</s>"]),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True, "eos_token_id": 1}, ["<s>", "in", "<s>"]),
        ("qwen2", {"add_bos_token": True, "bos_token_id": None}, ["in"]),
    ],
)
def test_tokens_around_a_prompt(pre: str, more: dict[str, Any], expected: list[str]) -> None:
    assert tokens(read(metadata(pre, **more)), "in", special=True) == expected


def test_named_and_control_tokens() -> None:
    """Control tokens are whole in texts, whatever characters they have."""
    words = [*WORDS, "<｜User｜>", "日"]  # noqa: RUF001
    tokenizer = read(
        metadata("qwen2", tokens=words, token_type=[3, 1, 3, *[1] * (len(WORDS) - 3), 3, 1], eos_token_id=2)
    )
    assert tokenizer.special_tokens_map == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<|endoftext|>"}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.chat_template) == (1, 2, "{{ messages }}")
    assert sorted(tokenizer.all_special_ids) == [0, 1, 2, len(WORDS)]
    assert tokens(tokenizer, "in<｜User｜>in") == ["in", "<｜User｜>", "in"]  # noqa: RUF001
    assert len(tokenizer.get_vocab()) == len(words)
    assert tokenizer.convert_ids_to_tokens(len(words) - 1) == as_word("日".encode())
    assert tokenizer.convert_ids_to_tokens(10**6) is None
    without = read(metadata("qwen2", bos_token_id=None, eos_token_id=None))
    assert (without.bos_token_id, without.eos_token_id) == (None, None)


@pytest.mark.parametrize("more", [{"ggml.model": "llama"}, {"ggml.model": "t5"}, {"ggml.pre": "jais"}])
def test_kinds_that_transformers_builds(more: dict[str, Any]) -> None:
    assert read_tokenizer({**metadata("gpt-2"), **{f"tokenizer.{name}": value for name, value in more.items()}}) is None


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tokens": None}, "key 'tokenizer.ggml.tokens': expected an array of strings, got None"),
        ({"tokens": [1]}, "key 'tokenizer.ggml.tokens': expected an array of strings, got [1]"),
        ({"merges": "a b"}, "key 'tokenizer.ggml.merges': expected an array of strings, got a b"),
        ({"merges": ["ab"]}, "key 'tokenizer.ggml.merges': expected two words separated by a space, got 'ab'"),
        (
            {"bos_token_id": 9999},
            f"key 'tokenizer.ggml.bos_token_id': expected a token from 0 to {len(WORDS) - 1}, got 9999",
        ),
        (
            {"eos_token_id": -1},
            f"key 'tokenizer.ggml.eos_token_id': expected a token from 0 to {len(WORDS) - 1}, got -1",
        ),
        (
            {"eos_token_id": "x"},
            f"key 'tokenizer.ggml.eos_token_id': expected a token from 0 to {len(WORDS) - 1}, got x",
        ),
    ],
)
def test_invalid_metadata(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="tokenizer") as caught:
        read_tokenizer(metadata("qwen2", **more))
    assert str(caught.value) == message


def test_what_is_imported() -> None:
    """The modules of text generation do not import transformers, which takes seconds, until a model needs it."""
    code = (
        "import json, sys; import dragoman_text.runtimes.llm.model, dragoman_text.generation.loading; "
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    names = json.loads(output)
    assert "torch" in names
    assert "transformers" not in names
