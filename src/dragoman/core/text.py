"""Text generation: prompts, sampling parameters and results."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import Struct, structs
from msgspec.structs import replace

# Name of a detail of text models: their chat template. It is too long for the metadata of Open Inference.
TEMPLATE_TEXT = "chat_template_text"
# Why a text ends; "" while it goes on. "stop_sequence": a stop string, or a stop token that is not the model's own.
FinishReason = Literal["", "length", "eos_token", "stop_sequence"]


class Chat(msgspec.Struct, frozen=True):
    """A conversation for the model's chat template.

    `messages` and `tools` are those of OpenAI's chats: a message has `role` and `content`, optionally `tool_calls`
    (whose arguments are JSON text), `tool_call_id`, `name` and `reasoning_content`. Content is a text, a `PartsText` if
    it was sent in several parts, and None in a message of the assistant without one. With images it is a list of
    parts, {"type": "text", "text": ...} and {"type": "image", "base64": the file in base64}.

    `options` are further template variables. `special_tokens`: the tokenizer adds its special tokens to the text that
    the template writes. `template` replaces the model's template; "" uses the model's. `drops_turns`: if prompt and new
    tokens do not fit into the context, the oldest turns are removed.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    options: Mapping[str, Any] = msgspec.field(default_factory=dict)
    add_generation_prompt: bool = True
    special_tokens: bool = False
    template: str = ""
    drops_turns: bool = False

    @property
    def turns(self) -> list[int]:
        """The indices of the user's messages, with which turns begin."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "user"]

    def without_turns(self, count: int) -> "Chat":
        """Return the conversation without what comes before the turn of this index; messages of the system stay."""
        first = self.turns[count]
        messages = [each for i, each in enumerate(self.messages) if i >= first or each["role"] == "system"]
        return replace(self, messages=tuple(messages))

    @property
    def images(self) -> list[str]:
        """The files of all images, in base64."""
        return [self.messages[i]["content"][j]["base64"] for i, j in self.image_positions]

    @property
    def image_positions(self) -> list[tuple[int, int]]:
        """Of each image, the index of its message and that of its part."""
        return [
            (i, j)
            for i, message in enumerate(self.messages)
            if isinstance(message.get("content"), list)
            for j, part in enumerate(message["content"])
            if part["type"] == "image"
        ]


class RawPrompt(str):
    """Text that is tokenized without special tokens around it."""

    __slots__ = ()


class InfillPrompt(msgspec.Struct, frozen=True):
    """Texts before and after a gap that the completion fills."""

    prefix: str
    suffix: str


class PartsText(str):
    """Content of a message that was sent in several parts: their texts, joined by line breaks.

    parts: the texts, for chat templates that take them apart.
    """

    parts: tuple[str, ...]

    @classmethod
    def of(cls, parts: Sequence[str]) -> str:
        """Return the content for some texts; one text alone is a plain string."""
        if len(parts) < 2:
            return "".join(parts)
        content = cls("\n".join(parts))
        content.parts = tuple(parts)
        return content


# Text, token ids, a conversation, or a text with a gap.
Prompt = str | tuple[int, ...] | Chat | InfillPrompt


class Grammar(msgspec.Struct, frozen=True):
    """A constraint on a completion; `kind` is the format of `text`.

    "json_schema": a JSON schema. "json_object": any JSON object (`text` is empty). "regex": a regular expression.
    "lark", "gbnf": a grammar in the format of Lark, or of llama.cpp. "choice": a JSON list of allowed texts.
    "structural_tag": JSON of vLLM's structural tags, text in which some parts follow a schema.
    """

    kind: Literal["json_schema", "json_object", "regex", "lark", "gbnf", "choice", "structural_tag"]
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters. The defaults are neutral: greedy decoding without constraints.

    max_new_tokens: None for the rest of the context. Larger values are rejected, or reduced if `shorten` is set.
    min_new_tokens: no end-of-text token before this number of tokens.
    do_sample: sample from the distribution after temperature, top_k (0: all), top_p, min_p and typical_p; otherwise
        argmax.
    seed: if None, one is generated and returned.
    repetition_penalty: divides positive and multiplies negative logits of tokens in prompt and completion (1: off).
    presence_penalty, frequency_penalty: subtracted from the logits of tokens in the completion, once or per occurrence.
    n: completions per prompt.
    best_of: number of candidates, ranked by mean log-probability (0: n).
    num_beams: beam search; length_penalty is the exponent of the length that divides a beam's score, early_stopping as
        in the transformers library (False, True or "never").
    stop: strings that end the completion; include_stop keeps them in the text.
    stop_token_ids: tokens that end it.
    ignore_eos: continue after the end-of-text token.
    bad_words: strings whose token sequences are forbidden.
    logit_bias: added to the logits, by token id.
    allowed_token_ids: only these tokens are chosen (empty: any).
    top_logprobs: number of top tokens returned per token.
    prompt_logprobs: log-probabilities of the prompt's tokens with this number of top tokens each (None: off).
    truncate: keep only this number of the prompt's tokens (None: all, 0: those that fit into the context together with
        max_new_tokens), the last ones for the truncation_side "left", the first ones for "right". They include the
        special tokens that the tokenizer adds, which stay.
    prompt_token_ids: return the ids of the prompt's tokens.
    skip_special_tokens, spaces_between_special_tokens: how tokens are decoded.
    grammar: constraint on the completion.
    adapter: name of a LoRA adapter ("" for none).
    adapters: those of the prompts, one each, instead of `adapter`.
    cache_salt: prompts share the prefix cache only with those of the same salt.
    model_defaults: names of fields that the request leaves to the model, whose own defaults then replace these.
    """

    max_new_tokens: int | None = None
    shorten: bool = False
    min_new_tokens: int = 0
    do_sample: bool = False
    seed: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    n: int = 1
    best_of: int = 0
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    bad_words: tuple[str, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    truncate: int | None = None
    truncation_side: Literal["left", "right"] = "left"
    prompt_token_ids: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    grammar: Grammar | None = None
    adapter: str = ""
    model_defaults: frozenset[str] = frozenset()
    adapters: tuple[str, ...] = ()
    cache_salt: str = ""


class Token(Struct, frozen=True):
    """One token: its id, text, and log-probability (None for the first token of a prompt).

    `text` is the token decoded alone; if characters span several tokens, these do not add up to the completion.
    `top` are the top tokens at this position, if requested. `data`: its bytes, if they are no text alone.
    """

    id: int
    text: str
    logprob: float | None = None
    special: bool = False
    top: tuple["Token", ...] = ()
    data: bytes = b""


class Text(Struct, frozen=True):
    """A chunk of one completion, or all of it.

    `prompt` is the index of the prompt in the call, `choice` is 0 to n - 1. `text` never ends in an incomplete
    character or in what may become a stop string, so it may lag behind `tokens`. `generated` is the number of
    tokens so far. The last chunk has `finish`, `whole`, the entire completion, and `stop`, the stop string or
    token id that ended it, if any. `seed` is the seed that was used, or None without sampling. `took_s`: the seconds
    from the arrival of the prompt in the engine to the end, in the last chunk, if the engine knows them; texts that
    differ in it alone are equal.
    """

    prompt: int = 0
    choice: int = 0
    text: str = ""
    tokens: tuple[Token, ...] = ()
    generated: int = 0
    finish: FinishReason = ""
    stop: str | int | None = None
    whole: str = ""
    seed: int | None = None
    took_s: float | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Text):
            return NotImplemented
        names = self.__struct_fields__
        return all(getattr(self, name) == getattr(other, name) for name in names if name != "took_s")

    def __hash__(self) -> int:
        return hash((self.prompt, self.choice, self.generated, self.whole, self.text))


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """A processed prompt: its text (of a conversation: after the template), its number of tokens, how many of those
    were in the prefix cache, its tokens if `prompt_logprobs` was set, and their ids if `prompt_token_ids` was set.

    If the engine knows them: `checked_s`, seconds to validate and tokenize the call's prompts; `waited_s`,
    seconds in the queue; `read_s`, seconds to compute the prompt; `max_new`, the limit of new tokens; `temperature` (0:
    greedy decoding) and `top_p` with the model's defaults. Infos that differ in these seconds alone are equal.
    """

    text: str
    tokens: int
    cached: int = 0
    prefill: tuple[Token, ...] = ()
    waited_s: float | None = field(default=None, compare=False)
    checked_s: float | None = field(default=None, compare=False)
    max_new: int | None = None
    token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    read_s: float | None = field(default=None, compare=False)


class Generation(Struct, frozen=True):
    """One chunk of a generation, or all of it if the call does not stream.

    `prompts`, one per prompt of the call, is in the first chunk only.
    """

    texts: tuple[Text, ...]
    prompts: tuple[PromptInfo, ...] = ()


def merge_chunks(chunks: Iterable[Generation]) -> Generation:
    """Return the whole generation from its chunks, ordered by prompt and choice."""
    texts: dict[tuple[int, int], Text] = {}
    prompts: tuple[PromptInfo, ...] = ()
    for chunk in chunks:
        prompts = prompts or chunk.prompts
        for new in chunk.texts:
            key = (new.prompt, new.choice)
            old = texts.get(key)
            if old is not None:
                new = structs.replace(new, text=old.text + new.text, tokens=old.tokens + new.tokens)
            texts[key] = new
    return Generation(tuple(texts[key] for key in sorted(texts)), prompts)


class TokenSpan(msgspec.Struct, frozen=True):
    """One token of a tokenized text; `start` and `stop` are character offsets."""

    id: int
    text: str
    start: int
    stop: int


class Tokenized(msgspec.Struct, frozen=True):
    """A text (of a conversation: after the template) and its tokens."""

    text: str
    tokens: tuple[TokenSpan, ...]
