"""A tokenizer as the engine needs it: prompts become tokens, tokens become text."""

import inspect
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dragoman.core.errors import InvalidInput, TooLong
from dragoman.core.text import Bare, Chat, Prompt, TokenSpan
from dragoman.generation.detokenizer import BytesDetokenizer, Detokenizer, WindowDetokenizer

# A text of more characters is cut by what lets other threads go on, and knows no places in the text.
_LONG = 1000
# So many times the model's context is more than anybody can mean: such a text is not cut, nor are its tokens told.
_SPARE = 4
# What the library takes beside a template's variables, but for what a chat says of itself.
_NO_VARIABLES = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {
    "documents",
    "continue_final_message",
}
# How many of a prompt's last tokens a text's first characters may depend on.
_BEFORE = 6


class Vocabulary:
    """The tokens of one model. `size` counts them, as the model's logits do; `context` is how many the model can read,
    0 while nobody has said so."""

    def __init__(self, folder: Path, size: int) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        self.size = size
        self.context = 0
        self._fast: Any = getattr(self.tokenizer, "backend_tokenizer", None)
        self.special = frozenset(self.tokenizer.all_special_ids)
        self._texts: dict[int, str] = {}

    # --- prompts -----------------------------------------------------------------------------------------

    def encode(self, prompt: Prompt, *, bounded: bool = False) -> tuple[str, list[int]]:
        """A prompt's text, of a conversation after the template, and its tokens.

        Raises InvalidInput for token ids that there are not, and for conversations that the template refuses; with
        `bounded` TooLong for a text that is too long for the context by far, before it is cut.
        """
        if isinstance(prompt, str | Chat):
            text = str(prompt) if isinstance(prompt, str) else self._apply_template(prompt)
            if bounded or (isinstance(prompt, Chat) and prompt.template):
                self._check_size(text)
            return text, self.cut(text, special=_adds_special_tokens(prompt))
        strange = [token for token in prompt if not 0 <= token < self.size]
        if strange:
            raise InvalidInput(f"prompt: expected token ids from 0 to {self.size - 1}, got {strange[0]}")
        return self.decode(list(prompt), skip_special=False), list(prompt)

    def spans(self, prompt: Prompt) -> tuple[str, tuple[TokenSpan, ...]]:
        """A prompt's text, and its tokens with the characters that each of them covers.

        Raises what `encode` does, and TooLong where there are too many tokens to tell them all.
        """
        text, ids = self.encode(prompt, bounded=True)
        if len(ids) > self.context * _SPARE > 0:
            raise TooLong(f"prompt: expected at most {self.context * _SPARE} tokens to be told, got {len(ids)}")
        if self._fast is not None and not isinstance(prompt, tuple):
            (found,) = self._fast.encode_batch([text], add_special_tokens=_adds_special_tokens(prompt))
            places = found.offsets
        else:
            places = self._estimate_spans(ids)
        return text, tuple(
            TokenSpan(token, text[start:stop], start, stop) for token, (start, stop) in zip(ids, places, strict=True)
        )

    @property
    def has_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    def cut(self, text: str, *, special: bool = False) -> list[int]:
        if self._fast is not None and len(text) > _LONG:
            (long,) = self._fast.encode_batch_fast([text], add_special_tokens=special)
            return list(long.ids)
        if self._fast is not None:
            fast: list[int] = self._fast.encode(text, add_special_tokens=special).ids
            return fast
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special)
        return ids

    def _check_size(self, text: str) -> None:
        """Raises TooLong where a text cannot fit, which to cut it into tokens first would take long to tell."""
        least = len(text) // self.longest
        if least > self.context * _SPARE > 0:
            raise TooLong(
                f"prompt: expected less than {self.context} tokens, the context of the model, got {len(text)} "
                f"characters, at least {least // _SPARE} tokens"
            )

    def _apply_template(self, chat: Chat) -> str:
        if not (self.has_template or chat.template):
            raise InvalidInput("messages: this model has no chat template; send a plain prompt")
        strange = sorted(_NO_VARIABLES & chat.options.keys())
        if strange:
            raise InvalidInput(f"chat_template_kwargs: expected variables of the template, got {', '.join(strange)}")
        try:
            text: str = self.tokenizer.apply_chat_template(
                [dict(message) for message in chat.messages],
                tools=[dict(tool) for tool in chat.tools] or None,
                chat_template=chat.template or None,
                add_generation_prompt=chat.add_generation_prompt,
                tokenize=False,
                **chat.options,
            )
        except Exception as error:  # a template raises what it likes
            if chat.template:
                raise InvalidInput(f"chat_template: it refuses these messages: {error}") from error
            raise InvalidInput(f"messages: the model's chat template refuses them: {error}") from error
        return text

    def _estimate_spans(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        """Where each token's characters end up, for tokenizers that do not tell."""
        writer, places, stop = self.detokenizer((), skip_special=False, spaces=False), [], 0
        for token in ids:
            start, stop = stop, stop + len(writer.add(token))
            places.append((start, stop))
        return places

    # --- texts -------------------------------------------------------------------------------------------

    def decode(self, ids: list[int], *, skip_special: bool, spaces: bool = True) -> str:
        """The text of tokens; `spaces` sets special tokens apart, in tokenizers that know of that."""
        if self._fast is not None:
            text: str = self._fast.decode(ids, skip_special_tokens=skip_special)
            return text
        slow: str = self.tokenizer.decode(
            ids,
            skip_special_tokens=skip_special,
            spaces_between_special_tokens=spaces,
            clean_up_tokenization_spaces=False,
        )
        return slow

    def detokenizer(self, before: Sequence[int], *, skip_special: bool, spaces: bool) -> Detokenizer:
        """What writes the text that follows the prompt's tokens `before`."""
        before = list(before[-_BEFORE:])
        if self._bytes is not None:
            table = self._plain_bytes if skip_special else self._bytes
            assert table is not None
            return BytesDetokenizer(table, before)
        return WindowDetokenizer(lambda ids: self.decode(ids, skip_special=skip_special, spaces=spaces), before)

    def text(self, token: int) -> str:
        """What a token alone reads, with the space that it may begin with."""
        known = self._texts.get(token)
        if known is None:
            known = self._texts[token] = self._read(token)
        return known

    def _read(self, token: int) -> str:
        if self._bytes is not None:
            return self._bytes.get(token, b"").decode("utf-8", "replace")
        writer = self.detokenizer(self._anchor, skip_special=False, spaces=False)
        return writer.add(token) or writer.rest()

    @cached_property
    def longest(self) -> int:
        """How many characters of a text a token can stand for."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    @cached_property
    def _anchor(self) -> list[int]:
        """A token before others, so that they do not stand at the start of a text."""
        return self.cut("a", special=False)[-1:]

    @cached_property
    def _bytes(self) -> Mapping[int, bytes] | None:
        """The bytes of every token, where the decoder is byte-level."""
        if self._fast is None or not _is_byte_level(self._fast):
            return None
        return {token: _as_bytes(word) for word, token in self._fast.get_vocab(with_added_tokens=True).items()}

    @cached_property
    def _plain_bytes(self) -> Mapping[int, bytes] | None:
        return self._bytes and {token: part for token, part in self._bytes.items() if token not in self._skipped}

    @cached_property
    def _skipped(self) -> frozenset[int]:
        """The tokens that skipping special ones leaves out."""
        added = self._fast.get_added_tokens_decoder()
        return frozenset(token for token, word in added.items() if word.special)


def _adds_special_tokens(prompt: str | Chat) -> bool:
    """Whether the tokenizer puts its special tokens around a prompt."""
    return prompt.special_tokens if isinstance(prompt, Chat) else not isinstance(prompt, Bare)


def _is_byte_level(fast: Any) -> bool:
    decoder = json.loads(fast.to_str())["decoder"]
    return isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"


def _characters() -> Mapping[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: printable ones for themselves, and the
    others for those from 256 on, as GPT-2 began."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _characters()


def _as_bytes(word: str) -> bytes:
    """A token's bytes; a word that is not written in that alphabet stands for itself."""
    if all(character in _BYTES for character in word):
        return bytes(_BYTES[character] for character in word)
    return word.encode()
