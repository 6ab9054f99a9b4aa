"""Tokenizer of a model: prompts to tokens, and tokens incrementally to text that never ends within a character."""

import codecs
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dragoman.core.errors import InvalidInput, TooLong
from dragoman.core.text import Chat, Prompt, RawPrompt, Token, TokenSpan
from dragoman.generation.memory import release_memory
from dragoman.generation.vision import NO_FEATURES, Features, VisionProcessor

# Replacement character for bytes that are not (yet) a character.
_UNKNOWN = "\ufffd"
# A token of SentencePiece that is one byte.
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


class Detokenizer(Protocol):
    """Converts the tokens of one completion to text."""

    def add(self, token: int) -> str:
        """Add a token; return the characters that are now certain."""

    def rest(self) -> str:
        """Return the remaining text after the last token, with replacement characters for incomplete ones."""

    def copy(self) -> "Detokenizer":
        """Return an independent copy."""


class BytesDetokenizer:
    """Detokenizer of byte-level vocabularies; `table` contains the UTF-8 bytes of each token.

    before: last tokens of the prompt. If they end within a character, its remaining bytes belong to the completion.
    texts: shared by the detokenizers of a table; they add the texts of tokens that begin and end between characters.
    """

    def __init__(self, table: Mapping[int, bytes], before: Sequence[int], texts: dict[int, str]) -> None:
        self._table, self._texts = table, texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_between = True  # whether no bytes of an incomplete character wait
        for token in before:
            self.add(token)

    def add(self, token: int) -> str:
        begins_between = self._is_between
        if begins_between and (text := self._texts.get(token)) is not None:
            return text
        text = self._decoder.decode(self._table.get(token, b""))
        self._is_between = not self._decoder.getstate()[0]
        if begins_between and self._is_between:
            self._texts[token] = text
        return text

    def rest(self) -> str:
        return self._decoder.decode(b"", True)

    def copy(self) -> "BytesDetokenizer":
        twin = BytesDetokenizer(self._table, (), self._texts)
        twin._decoder.setstate(self._decoder.getstate())
        twin._is_between = self._is_between
        return twin


class WindowDetokenizer:
    """Detokenizer of other vocabularies: decodes the last tokens with and without the new ones.

    The window begins where the text was last certain, so that special treatment of the start of a text, such as
    removing a space, cancels out. Text ending in a replacement character may be incomplete and is held back.
    """

    def __init__(self, decode: Callable[[list[int]], str], before: Sequence[int]) -> None:
        self._decode = decode
        self._known = list(before)
        self._waiting: list[int] = []
        self._text = decode(self._known) if self._known else ""

    def add(self, token: int) -> str:
        self._waiting.append(token)
        full_text = self._decode(self._known + self._waiting)
        if full_text.endswith(_UNKNOWN) or len(full_text) <= len(self._text):
            return ""
        return self._emit(full_text)

    def rest(self) -> str:
        return self._emit(self._decode(self._known + self._waiting)) if self._waiting else ""

    def copy(self) -> "WindowDetokenizer":
        twin = copy(self)
        twin._waiting = list(self._waiting)
        return twin

    def _emit(self, full_text: str) -> str:
        new = full_text[len(self._text) :]
        self._known, self._waiting = self._waiting, []
        self._text = self._decode(self._known)
        return new


# Longer texts are tokenized by the method that releases the interpreter lock but returns no offsets.
_LONG = 1000
# Tokenization takes some 90 bytes a character, which the C library would keep: more is returned to the system.
_LARGE = 1 << 18
# Texts longer than this multiple of the model's context are rejected before tokenization.
_SPARE = 4
# Arguments of apply_chat_template that are not variables of the template.
_NO_VARIABLES = {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {
    "documents",
    "continue_final_message",
}
# Tokens of gpt-oss that separate the messages of its answer, which chats parse.
_HARMONY = frozenset({"<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>"})
# Number of prompt tokens on which the first characters of a completion may depend.
_BEFORE = 6


class Vocabulary:
    """Tokenizer of one model. size: number of logits. context: maximum number of tokens, 0 if not set.
    vision: the processor of images, None if the model has no vision.

    A GGUF file contains its tokenizer; a `tokenizer.json` beside it is used instead.
    """

    def __init__(self, folder: Path, size: int, vision: VisionProcessor | None = None) -> None:
        folder, inside = (folder.parent, {"gguf_file": folder.name}) if folder.is_file() else (folder, {})
        if (folder / "tokenizer.json").is_file():
            inside = {}
        self.tokenizer: Any = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **inside
        )
        self.vision = vision
        if vision is not None:
            self.tokenizer.chat_template = vision.chat_template
        self.size = size
        self.context = 0
        self._fast: Any = getattr(self.tokenizer, "backend_tokenizer", None)
        self.special = frozenset(self.tokenizer.all_special_ids)
        self._tokens: dict[int, tuple[str, bool, bytes]] = {}  # text, whether it is special, and data of Token
        self._texts: dict[bool, dict[int, str]] = {False: {}, True: {}}  # by `skip_special`, of `BytesDetokenizer`

    # --- prompts -----------------------------------------------------------------------------------------

    def encode(self, prompt: Prompt, *, bounded: bool = False) -> tuple[str, list[int], Features]:
        """Return the text of a prompt, after the chat template, its tokens, and the features of its images.

        Raises InvalidInput for unknown token ids and for messages that the template rejects; with `bounded` TooLong for
        a text that is far longer than the context, before tokenization.
        """
        if isinstance(prompt, str | Chat):
            text = str(prompt) if isinstance(prompt, str) else self._apply_template(prompt)
            if bounded or (isinstance(prompt, Chat) and prompt.template):
                self._check_size(text)
            special = _adds_special_tokens(prompt)
            if self.vision is not None and isinstance(prompt, Chat) and prompt.images:
                return text, *self.vision.encode(text, prompt.images, special=special)
            return text, self.tokenize(text, special=special), NO_FEATURES
        invalid = [token for token in prompt if not 0 <= token < self.size]
        if invalid:
            raise InvalidInput(f"prompt: expected token ids from 0 to {self.size - 1}, got {invalid[0]}")
        return self.decode(list(prompt), skip_special=False), list(prompt), NO_FEATURES

    def spans(self, prompt: Prompt) -> tuple[str, tuple[TokenSpan, ...]]:
        """Return the text of a prompt and its tokens with their character offsets.

        Raises the errors of `encode`, and TooLong for more tokens than are returned.
        """
        text, ids, features = self.encode(prompt, bounded=True)
        if features:  # an image is many tokens
            text = self.decode(ids, skip_special=False)
        if len(ids) > self.context * _SPARE > 0:
            raise TooLong(f"prompt: expected at most {self.context * _SPARE} tokens, got {len(ids)}")
        if self._fast is not None and not isinstance(prompt, tuple) and not features:
            (encoding,) = self._fast.encode_batch([text], add_special_tokens=_adds_special_tokens(prompt))
            offsets = encoding.offsets
        else:
            offsets = self._estimate_spans(ids)
        return text, tuple(
            TokenSpan(token, text[start:stop], start, stop) for token, (start, stop) in zip(ids, offsets, strict=True)
        )

    @property
    def has_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    @property
    def template_text(self) -> str:
        """The chat template, "" for none; of several by name, the default one."""
        found = self.tokenizer.chat_template or ""
        return found if isinstance(found, str) else str(found.get("default", ""))

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        if self._fast is not None and len(text) > _LONG:
            (long,) = self._fast.encode_batch_fast([text], add_special_tokens=special)
            ids: list[int] = list(long.ids)
            if len(text) > _LARGE:
                del long
                release_memory()
            return ids
        if self._fast is not None:
            fast: list[int] = self._fast.encode(text, add_special_tokens=special).ids
            return fast
        slow: list[int] = self.tokenizer.encode(text, add_special_tokens=special)
        return slow

    def _check_size(self, text: str) -> None:
        """Raise TooLong for a text that cannot fit, without the time of tokenization."""
        least = len(text) // self.longest
        if least > self.context * _SPARE > 0:
            raise TooLong(
                f"prompt: expected less than {self.context} tokens, the model's maximum context limit, got {len(text)} "
                f"characters, at least {least // _SPARE} tokens"
            )

    def _apply_template(self, chat: Chat) -> str:
        if not (self.has_template or chat.template):
            raise InvalidInput("messages: this model has no chat template; send a plain prompt")
        reserved = sorted(_NO_VARIABLES & chat.options.keys())
        if reserved:
            raise InvalidInput(f"chat_template_kwargs: expected variables of the template, got {', '.join(reserved)}")
        if self.vision is None and chat.images:
            raise InvalidInput("images: this model has no vision; send text alone")
        messages = [dict(each) for each in chat.messages] if self.vision is None else self.vision.messages(chat)
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages,
                tools=[dict(tool) for tool in chat.tools] or None,
                chat_template=chat.template or None,
                add_generation_prompt=chat.add_generation_prompt,
                tokenize=False,
                **chat.options,
            )
        except Exception as error:  # templates can raise any exception
            if chat.template:
                raise InvalidInput(f"chat_template: it rejects these messages: {error}") from error
            raise InvalidInput(f"messages: the model's chat template rejects them: {error}") from error
        return text

    def _estimate_spans(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        """Return the offsets of tokens for tokenizers that do not provide them."""
        writer, offsets, stop = self.detokenizer((), skip_special=False, spaces=False), [], 0
        for token in ids:
            start, stop = stop, stop + len(writer.add(token))
            offsets.append((start, stop))
        return offsets

    # --- text --------------------------------------------------------------------------------------------

    def decode(self, ids: list[int], *, skip_special: bool, spaces: bool = True) -> str:
        """Return the text of tokens; `spaces`: separate special tokens by spaces, if the tokenizer supports it."""
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
        """Return a detokenizer for a completion after the prompt tokens `before`."""
        before = list(before[-_BEFORE:])
        if self._bytes is not None:
            table = self._plain_bytes if skip_special else self._bytes
            assert table is not None
            return BytesDetokenizer(table, before, self._texts[skip_special])
        return WindowDetokenizer(lambda ids: self.decode(ids, skip_special=skip_special, spaces=spaces), before)

    def token(self, token: int, logprob: float | None, top: Iterable[tuple[int, float]] = ()) -> Token:
        """Return a token with its text, including a leading space, and with the top tokens at its position."""
        text, is_special, data = self._tokens.get(token) or self._described(token)
        others = tuple([self.token(*each) for each in top]) if top else ()
        return Token(token, text, logprob, is_special, others, data)

    def _described(self, token: int) -> tuple[str, bool, bytes]:
        """Return the text, whether the token is special, and the data of a `Token`."""
        cached = self._tokens.get(token)
        if cached is None:
            text = self._read(token)
            data = self._data(token) if _UNKNOWN in text else b""
            cached = self._tokens[token] = text, token in self.special, data
        return cached

    def _data(self, token: int) -> bytes:
        """Return the bytes of a token that is a part of a character, b"" if they are unknown."""
        if self._bytes is not None:
            return self._bytes.get(token, b"")
        byte = _BYTE_TOKEN.fullmatch(str(self.tokenizer.convert_ids_to_tokens(token)))
        return bytes.fromhex(byte[1]) if byte else b""

    def _read(self, token: int) -> str:
        if self._bytes is not None:
            return self._bytes.get(token, b"").decode("utf-8", "replace")
        writer = self.detokenizer(self._anchor, skip_special=False, spaces=False)
        return writer.add(token) or writer.rest()

    @cached_property
    def longest(self) -> int:
        """Length of the longest token in characters."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    @cached_property
    def _anchor(self) -> list[int]:
        """A token to put before others, so that they are not at the start of a text."""
        return self.tokenize("a", special=False)[-1:]

    @cached_property
    def _bytes(self) -> Mapping[int, bytes] | None:
        """Bytes of every token, None if the decoder is not byte-level."""
        if self._fast is None or not _is_byte_level(self._fast):
            return None
        return {token: _as_bytes(word) for word, token in self._fast.get_vocab(with_added_tokens=True).items()}

    @cached_property
    def _plain_bytes(self) -> Mapping[int, bytes] | None:
        return self._bytes and {token: part for token, part in self._bytes.items() if token not in self._special_tokens}

    @cached_property
    def _special_tokens(self) -> frozenset[int]:
        """Tokens that are omitted when special tokens are skipped; those of harmony are part of the text."""
        added = self._fast.get_added_tokens_decoder()
        texts = {word.content for word in added.values()}
        harmony = _HARMONY if texts >= _HARMONY else frozenset()
        return frozenset(token for token, word in added.items() if word.special and word.content not in harmony)


def _adds_special_tokens(prompt: str | Chat) -> bool:
    """Whether the tokenizer adds its special tokens to a prompt."""
    return prompt.special_tokens if isinstance(prompt, Chat) else not isinstance(prompt, RawPrompt)


def _is_byte_level(fast: Any) -> bool:
    decoder = json.loads(fast.to_str())["decoder"]
    return isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"


def _characters() -> Mapping[str, int]:
    """Return the byte of each character in a byte-level vocabulary (GPT-2).

    Printable bytes represent themselves, the others are numbered from 256.
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _characters()


def _as_bytes(word: str) -> bytes:
    """Return the bytes of a token; a word outside of that alphabet represents itself."""
    if all(character in _BYTES for character in word):
        return bytes(_BYTES[character] for character in word)
    return word.encode()
