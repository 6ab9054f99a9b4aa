"""The tokenizer in a GGUF file, built from its metadata without transformers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from dragoman_text.generation.byte_alphabet import BYTES, as_word

# Types of tokens in files (llama.h, `llama_token_type`).
_CONTROL, _USER_DEFINED = 3, 4
_NAMED: Mapping[str, str] = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


@dataclass(frozen=True, slots=True)
class _Split:
    """How a text is cut before merges. pattern: of the pieces, "" for that of GPT-2. digits: each is a piece.

    adds_bos: a prompt begins with the first token unless the file says otherwise. whole: a piece that is a token is not
    merged.
    """

    pattern: str = ""
    digits: bool = False
    adds_bos: bool = False
    whole: bool = False


_LLAMA3 = _Split(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    adds_bos=True,
    whole=True,
)
_QWEN2 = _Split(_LLAMA3.pattern.replace(r"\p{N}{1,3}", r"\p{N}"))
# Names of `tokenizer.ggml.pre`: llama-vocab.cpp of llama.cpp has the patterns of all.
_SPLITS: Mapping[str, _Split] = {
    "": _Split(),
    "gpt-2": _Split(),
    "smollm": _Split(digits=True),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


class FileTokenizer:
    """A tokenizer with the members of those of transformers that `Vocabulary` uses.

    special_tokens_map: the named tokens. all_special_ids: theirs and those of all control tokens.
    """

    def __init__(self, backend: Tokenizer, named: Mapping[str, str], template: str | None) -> None:
        self.backend_tokenizer, self.special_tokens_map, self.chat_template = backend, dict(named), template

    @cached_property
    def all_special_ids(self) -> list[int]:
        return [token for token, each in self.backend_tokenizer.get_added_tokens_decoder().items() if each.special]

    @property
    def bos_token_id(self) -> int | None:
        return self._id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id("eos_token")

    def _id(self, name: str) -> int | None:
        text = self.special_tokens_map.get(name)
        token: int | None = None if text is None else self.backend_tokenizer.token_to_id(text)
        return token

    def get_vocab(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    def convert_ids_to_tokens(self, token: int) -> str | None:
        text: str | None = self.backend_tokenizer.id_to_token(token)
        return text


def read_tokenizer(metadata: Mapping[str, Any]) -> FileTokenizer | None:
    """Return the tokenizer that the metadata of a file describe, None for a kind that is not built here.

    Byte-level vocabularies with merges (GPT-2, Llama 3, Qwen) are. Raises ValueError for metadata that are not valid.
    """
    prefix = "tokenizer.ggml."
    split = _SPLITS.get(str(metadata.get(f"{prefix}pre", "")))
    if metadata.get(f"{prefix}model") != "gpt2" or split is None or f"{prefix}merges" not in metadata:
        return None
    words = _strings(metadata, f"{prefix}tokens")
    merges = [_pair(merge) for merge in _strings(metadata, f"{prefix}merges")]
    types = metadata.get(f"{prefix}token_type", [])
    added = [(word, kind) for word, kind in zip(words, types, strict=False) if kind in (_CONTROL, _USER_DEFINED)]
    own = {word for word, _ in added}
    # Tokens of the text are written in the alphabet of bytes; others are as they are in texts. Few files have other
    # characters, so these are found in all words at once.
    foreign = set("".join(words)) - BYTES.keys()
    vocabulary = {
        word if word in own or foreign.isdisjoint(word) else as_word(word.encode()): token
        for token, word in enumerate(words)
    }
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split.whole))
    backend.pre_tokenizer = _pre_tokenizer(split)
    backend.decoder = decoders.ByteLevel()
    named = {name: words[token] for name, key in _NAMED.items() if (token := _token(metadata, key, words)) is not None}
    backend.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in _control(added, named)])
    backend.add_tokens([AddedToken(word, normalized=False) for word, kind in added if kind == _USER_DEFINED])
    tokenizer = FileTokenizer(backend, named, metadata.get("tokenizer.chat_template"))
    begins = metadata.get(f"{prefix}add_bos_token", split.adds_bos) is True
    ends = metadata.get(f"{prefix}add_eos_token") is True
    _add_template(tokenizer, "bos_token" if begins else "", "eos_token" if ends else "")
    return tokenizer


def _control(added: Sequence[tuple[str, int]], named: Mapping[str, str]) -> list[str]:
    """Return the control tokens and the named ones, once each."""
    return list(dict.fromkeys([*(word for word, kind in added if kind == _CONTROL), *named.values()]))


def _pre_tokenizer(split: _Split) -> Any:
    parts: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    if split.pattern:
        parts.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split.pattern))
    return pre_tokenizers.Sequence(parts)


def _add_template(tokenizer: FileTokenizer, *names: str) -> None:
    """Let the tokenizer put these named tokens, first and last, around a prompt; "" for none."""
    texts = tokenizer.special_tokens_map
    first, last = (texts.get(name) for name in names)
    around = [each for each in (first, last) if each is not None]
    if around:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=[*([first] if first else []), "$A", *([last] if last else [])],
            special_tokens=[(each, tokenizer.backend_tokenizer.token_to_id(each)) for each in dict.fromkeys(around)],
        )


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = metadata.get(key)
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        raise ValueError(f"key '{key}': expected an array of strings, got {str(values)[:40]}")
    return values


def _pair(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise ValueError(f"key 'tokenizer.ggml.merges': expected two words separated by a space, got {merge[:40]!r}")
    return left, right


def _token(metadata: Mapping[str, Any], name: str, words: Sequence[str]) -> int | None:
    """Return the token of a key, None without it."""
    key = f"tokenizer.ggml.{name}"
    token = metadata.get(key)
    if token is not None and (not isinstance(token, int) or not 0 <= token < len(words)):
        raise ValueError(f"key '{key}': expected a token from 0 to {len(words) - 1}, got {str(token)[:40]}")
    return token
