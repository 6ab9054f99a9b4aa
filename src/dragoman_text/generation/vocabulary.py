"""Tokenizer of a model: prompts to tokens, and tokens incrementally to text that never ends within a character."""

import codecs
import importlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from tokenizers import decoders

from dragoman.core.errors import InvalidInput, ModelFailed, TooLong
from dragoman.core.text import Chat, InfillPrompt, Prompt, RawPrompt, Token, TokenSpan
from dragoman.system.load_steps import report_step
from dragoman_text.generation.byte_alphabet import as_bytes
from dragoman_text.generation.chat_template import EVERYTHING, NOTHING, PROMPT_S, TOOL_RESULTS, ChatTemplate, Piece
from dragoman_text.generation.gguf_conversion import require_conversion
from dragoman_text.generation.gguf_file import open_file
from dragoman_text.generation.gguf_tokenizer import read_tokenizer
from dragoman_text.generation.memory import release_memory
from dragoman_text.generation.vision import NO_FEATURES, Features, VisionProcessor

# Replacement character for bytes that are not (yet) a character.
UNKNOWN = "\ufffd"
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


class TokenBytes(dict[int, bytes]):
    """UTF-8 bytes of the tokens of a byte-level tokenizer, b"" for those without text and for the skipped ones.

    Each is converted when it is first used, so that the first completion does not wait for all of them.
    """

    def __init__(self, fast: Any, skipped: Collection[int] = ()) -> None:
        super().__init__()
        self._fast, self._skipped = fast, skipped

    def __missing__(self, token: int) -> bytes:
        word = None if token in self._skipped else self._fast.id_to_token(token)
        found = self[token] = b"" if word is None else as_bytes(word)
        return found


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
        text = self._decoder.decode(self._table[token])
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
        if full_text.endswith(UNKNOWN) or len(full_text) <= len(self._text):
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


# Tokenization takes some 90 bytes a character, which the C library would keep: more is returned to the system.
_LARGE = 1 << 18
# Texts longer than this multiple of the model's context are rejected before tokenization.
_SPARE = 4
# Token ids of the tokenizer that the model may lack, such as added tokens without weights.
_MAX_EXTRA_IDS = 4096
# Tokens of gpt-oss that separate the messages of its answer, which chats parse.
_HARMONY = frozenset({"<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>"})
# Tokens around the texts before and after a gap, and the one after which the model writes what is between them:
# Qwen and CodeGemma; StarCoder and Granite; DeepSeek; Code Llama.
_INFILL = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
# Number of prompt tokens on which the first characters of a completion may depend.
_BEFORE = 6


# Classes of the tokenizers in GGUF files by architecture. AutoTokenizer finds the same ones, but reads each string of
# the file several times for that, which takes seconds.
_GGUF_TOKENIZERS: Mapping[str, str] = {
    "llama": "PreTrainedTokenizerFast",
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
}


class Vocabulary:
    """Tokenizer of one model. size: number of logits. context: maximum number of tokens, 0 if not set.
    vision: the processor of images, None if the model has no vision.
    sanitized: where control tokens in chats are encoded as text. prompt_s: seconds for examples that the
    chat template writes. template: a chat template instead of the model's own.

    A GGUF file contains its tokenizer; a `tokenizer.json` beside it is used instead. Raises ModelFailed if the ids of
    the tokenizer are not those of the model.
    """

    def __init__(
        self,
        folder: Path,
        size: int,
        vision: VisionProcessor | None = None,
        *,
        sanitized: str = TOOL_RESULTS,
        prompt_s: float = PROMPT_S,
        template: str | None = None,
    ) -> None:
        self.tokenizer: Any = load_tokenizer(folder)
        self.vision = vision
        self.size = size
        self.context = 0
        self._fast: Any = getattr(self.tokenizer, "backend_tokenizer", None)
        self.special = frozenset(self.tokenizer.all_special_ids)
        vocabulary = self.tokenizer.get_vocab()
        self.longest = max(map(len, vocabulary), default=1)  # characters of a token
        self._check_ids(vocabulary.values())
        if sanitized == EVERYTHING and self._fast is None:
            raise ModelFailed("parameter 'sanitize_control_tokens': needs a fast tokenizer, a tokenizer.json")
        if template is None:
            template = self.tokenizer.chat_template if vision is None else vision.chat_template
        self.template = ChatTemplate(
            template,
            self.tokenizer.special_tokens_map,
            () if sanitized == NOTHING or self._fast is None else self._control_tokens(),
            sanitized=sanitized,
            limit_s=prompt_s,
        )
        self._tokens: dict[int, tuple[str, bool, bytes]] = {}  # text, whether it is special, and data of Token
        self._texts: dict[bool, dict[int, str]] = {False: {}, True: {}}  # by `skip_special`, of `BytesDetokenizer`

    # --- prompts -----------------------------------------------------------------------------------------

    def encode(self, prompt: Prompt, *, bounded: bool = False) -> tuple[str, list[int], Features]:
        """Return the text of a prompt, after the chat template, its tokens, and the features of its images.

        Raises InvalidInput for unknown token ids and for messages that the template rejects; with `bounded` TooLong for
        a text that is far longer than the context, before tokenization.
        """
        if isinstance(prompt, tuple):
            self._check_range(prompt)
            return self.decode(list(prompt), skip_special=False), list(prompt), NO_FEATURES
        if isinstance(prompt, InfillPrompt):
            ids = self._tokenize_infill(prompt, bounded=bounded)
            return self.decode(ids, skip_special=False), ids, NO_FEATURES
        pieces = self._pieces(prompt, bounded=bounded)
        text, special = "".join(pieces), _adds_special_tokens(prompt)
        if self.vision is not None and isinstance(prompt, Chat) and prompt.images:
            literal = next((piece for piece in pieces if isinstance(piece, Piece)), None)
            if literal is not None:
                raise InvalidInput(
                    f"messages: expected no control token {str(literal)!r} in texts beside images; "
                    "the model's parameter 'sanitize_control_tokens' says in which texts"
                )
            return text, *self.vision.encode(text, prompt.images, special=special)
        if len(pieces) > 1:
            before, after = self.added_tokens if special else ((), ())
            ids = [*before, *(token for token, _, _ in self._spans_of(pieces)), *after]
        else:
            ids = self.tokenize(text, special=special)
        self._check_range(ids)
        return text, ids, NO_FEATURES

    def spans(self, prompt: Prompt) -> tuple[str, tuple[TokenSpan, ...]]:
        """Return the text of a prompt and its tokens with their character offsets.

        Raises the errors of `encode`, and TooLong for more tokens than are returned.
        """
        has_images = isinstance(prompt, Chat) and bool(prompt.images)
        if isinstance(prompt, tuple | InfillPrompt) or self._fast is None or has_images:
            text, ids, features = self.encode(prompt, bounded=True)
            if features:  # an image is many tokens
                text = self.decode(ids, skip_special=False)
            spans = [(token, *span) for token, span in zip(ids, self._estimate_spans(ids), strict=True)]
        else:
            pieces, special = self._pieces(prompt, bounded=True), _adds_special_tokens(prompt)
            text = "".join(pieces)
            if len(pieces) > 1:
                before, after = self.added_tokens if special else ((), ())
                inner = self._spans_of(pieces)
                spans = [*((token, 0, 0) for token in before), *inner, *((token, 0, 0) for token in after)]
            else:
                encoding = self._encode(text, special=special, offsets=True)
                spans = [(token, *span) for token, span in zip(encoding.ids, encoding.offsets, strict=True)]
        if len(spans) > self.context * _SPARE > 0:
            raise TooLong(f"prompt: expected at most {self.context * _SPARE} tokens, got {len(spans)}")
        return text, tuple(TokenSpan(token, text[start:stop], start, stop) for token, start, stop in spans)

    @cached_property
    def added_tokens(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The special tokens that the tokenizer adds before and after a prompt."""
        plain, ids = self.tokenize("a"), self.tokenize("a", special=True)
        for start in range(len(ids) - len(plain) + 1):
            if ids[start : start + len(plain)] == plain:
                return tuple(ids[:start]), tuple(ids[start + len(plain) :])
        return (), ()

    def special_tokens_around(self, prompt: Prompt, tokens: Sequence[int]) -> tuple[int, int]:
        """Return how many special tokens the tokenizer, or a chat template, has put before and after a prompt."""
        if isinstance(prompt, tuple | InfillPrompt):
            return 0, 0
        if _adds_special_tokens(prompt):
            before, after = map(len, self.added_tokens)
            return before, after
        starts = isinstance(prompt, Chat) and tokens[:1] == [self.tokenizer.bos_token_id]
        return int(starts), 0

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Return the tokens of a text; `special`: with the special tokens that the tokenizer adds."""
        if self._fast is None:
            slow: list[int] = self.tokenizer.encode(text, add_special_tokens=special)
            return slow
        encoding = self._encode(text, special=special)
        ids: list[int] = list(encoding.ids)
        if len(text) > _LARGE:
            del encoding
            release_memory()
        return ids

    def _encode(self, text: str, *, special: bool = False, offsets: bool = False) -> Any:
        """Return the encoding of a text by the fast tokenizer, whose method for one text keeps the interpreter lock."""
        method = self._fast.encode_batch if offsets else self._fast.encode_batch_fast
        (encoding,) = method([text], add_special_tokens=special)
        return encoding

    def _pieces(self, prompt: str | Chat, *, bounded: bool) -> Sequence[str]:
        """Return the text of a prompt, in pieces if some of them are control tokens to encode as text."""
        pieces = (str(prompt),) if isinstance(prompt, str) else self._apply_template(prompt)
        if bounded or (isinstance(prompt, Chat) and prompt.template):
            self._check_size(pieces)
        return pieces

    def _apply_template(self, prompt: Chat) -> Sequence[str]:
        if not (self.template or prompt.template):
            raise InvalidInput("messages: this model has no chat template; send a plain prompt")
        if self.vision is None and prompt.images:
            at, part = prompt.image_positions[0]
            raise InvalidInput(
                f"`messages[{at}].content[{part}]` is an image: this model has no vision; send text alone"
            )
        messages = prompt.messages if self.vision is None else self.vision.messages(prompt)
        return self.template.pieces(prompt, messages)

    def _spans_of(self, pieces: Sequence[str]) -> list[tuple[int, int, int]]:
        """Return the tokens of a text in pieces with their character offsets."""
        spans: list[tuple[int, int, int]] = []
        start = 0
        for piece in pieces:
            if isinstance(piece, Piece):
                literal = self._tokenize_literally(piece)
                spans += [(token, start + first, start + last) for token, first, last in literal]
            else:
                # After a line break, since SentencePiece adds a space at the start of a text.
                prefix = "\n" if start else ""
                encoding = self._encode(prefix + piece, offsets=True)
                spans += [
                    (token, start + first - len(prefix), start + last - len(prefix))
                    for token, (first, last) in zip(encoding.ids, encoding.offsets, strict=True)
                    if last > len(prefix) or not prefix
                ]
            start += len(piece)
        return spans

    def _tokenize_infill(self, prompt: InfillPrompt, *, bounded: bool) -> list[int]:
        """Return the tokens of a prompt with a gap. Raises InvalidInput if the model has no tokens for it."""
        vocabulary = self.tokenizer.get_vocab()
        signs = next((signs for signs in _INFILL if all(sign in vocabulary for sign in signs)), None)
        if signs is None:
            raise InvalidInput("suffix: this model has no tokens for infilling; expected none")
        if bounded:
            self._check_size((prompt.prefix, prompt.suffix))
        before, after, gap = (vocabulary[sign] for sign in signs)
        starts, _ = self.added_tokens
        return [*starts, before, *self.tokenize(prompt.prefix), after, *self.tokenize(prompt.suffix), gap]

    def _tokenize_literally(self, text: str) -> list[tuple[int, int, int]]:
        """Return the tokens of a control token as text, without the control token itself, with their offsets."""
        fast = self._fast
        normal = text if fast.normalizer is None else fast.normalizer.normalize_str(text)
        parts = [(normal, (0, len(normal)))]
        if fast.pre_tokenizer is not None:
            parts = fast.pre_tokenizer.pre_tokenize_str(normal)
        tokens = [(token, start) for part, (start, _) in parts for token in fast.model.tokenize(part)]
        own = fast.token_to_id(text)
        if any(token.id == own for token, _ in tokens):  # a part of the model's own vocabulary too
            tokens = [
                (token, start + i)
                for part, (start, _) in parts
                for i, character in enumerate(part)
                for token in fast.model.tokenize(character)
            ]
        return [(token.id, start + token.offsets[0], start + token.offsets[1]) for token, start in tokens]

    def _control_tokens(self) -> list[str]:
        """Return the special tokens, and other added tokens that the chat template writes."""
        templates = str(self.tokenizer.chat_template if self.vision is None else self.vision.chat_template)
        added = self._fast.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special or token.content in templates]

    def _check_ids(self, ids: Collection[int]) -> None:
        """Raise ModelFailed for ids far beyond those of the model: tables of tokens are as long as the largest id."""
        largest = max(ids, default=0)
        if largest >= self.size + _MAX_EXTRA_IDS:
            raise ModelFailed(
                f"the tokenizer has the token id {largest}, but the model has {self.size} tokens (vocab_size); "
                "copy the tokenizer of this model"
            )

    def _check_range(self, ids: Sequence[int]) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self.size:
            invalid = next(token for token in ids if not 0 <= token < self.size)
            raise InvalidInput(f"prompt: expected token ids from 0 to {self.size - 1}, got {invalid}")

    def _check_size(self, pieces: Sequence[str]) -> None:
        """Raise TooLong for a text that cannot fit, without the time of tokenization."""
        length = sum(map(len, pieces))
        least = length // self.longest
        if least > self.context * _SPARE > 0:
            raise TooLong(
                f"prompt: expected less than {self.context} tokens, the model's maximum context limit, got {length} "
                f"characters, at least {least // _SPARE} tokens"
            )

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
            data = self._data(token) if UNKNOWN in text else b""
            cached = self._tokens[token] = text, token in self.special, data
        return cached

    def _data(self, token: int) -> bytes:
        """Return the bytes of a token that is a part of a character, b"" if they are unknown."""
        if self._bytes is not None:
            return self._bytes[token]
        byte = _BYTE_TOKEN.fullmatch(str(self.tokenizer.convert_ids_to_tokens(token)))
        return bytes.fromhex(byte[1]) if byte else b""

    def _read(self, token: int) -> str:
        if self._bytes is not None:
            return self._bytes[token].decode("utf-8", "replace")
        writer = self.detokenizer(self._anchor, skip_special=False, spaces=False)
        return writer.add(token) or writer.rest()

    @cached_property
    def _anchor(self) -> list[int]:
        """A token to put before others, so that they are not at the start of a text."""
        return self.tokenize("a")[-1:]

    @cached_property
    def _bytes(self) -> TokenBytes | None:
        """Bytes of every token, None if the decoder is not byte-level."""
        is_byte_level = self._fast is not None and isinstance(self._fast.decoder, decoders.ByteLevel)
        return TokenBytes(self._fast) if is_byte_level else None

    @cached_property
    def _plain_bytes(self) -> TokenBytes:
        """The same without special tokens."""
        return TokenBytes(self._fast, self._special_tokens)

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


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder, or of a GGUF file."""
    report_step("reading the tokenizer")
    name, inside = "AutoTokenizer", dict[str, str]()
    if folder.is_file():
        file, folder = folder, folder.parent
        if not (folder / "tokenizer.json").is_file():
            metadata = open_file(file).metadata
            if (found := read_tokenizer(metadata)) is not None:
                return found
            inside = {"gguf_file": file.name}
            name = _GGUF_TOKENIZERS.get(str(metadata.get("general.architecture")), name)
        require_conversion()
    loader: Any = getattr(importlib.import_module("transformers"), name)  # takes seconds
    return loader.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **inside)
