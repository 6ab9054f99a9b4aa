"""Text: a prompt, how to sample, and what a text model gives back."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

# Why a text ends; "" while it goes on. "stop_sequence": a stop string, or a stop token that is not the model's own.
FinishReason = Literal["", "length", "eos_token", "stop_sequence"]


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, for the model's chat template.

    `messages` and `tools` are the objects that chat templates take: a message has `role` and `content`, and maybe
    `tool_calls`, `tool_call_id` and `name`. `options` are further variables of the template. `special_tokens`: the
    tokenizer adds those that it puts around a text, on top of what the template writes. `template` is the caller's own
    template, in place of the model's; "" where there is none.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    special_tokens: bool = False
    template: str = ""


class Bare(str):
    """A text around which the tokenizer puts no special tokens, as one for the beginning of a text."""

    __slots__ = ()


# Text (a `Bare` one as it is), token ids, or a conversation.
Prompt = str | tuple[int, ...] | Chat


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text must be: `kind` says how to read `text`.

    "json_schema": a JSON schema as JSON text. "json_object": any JSON object (`text` is empty). "regex": a regular
    expression. "lark": a grammar in the Lark format. "choice": a JSON list of the texts allowed.
    """

    kind: Literal["json_schema", "json_object", "regex", "lark", "choice"]
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to choose the tokens of a text. Every default is neutral: greedy, and nothing is forbidden.

    max_new_tokens: None is what is left of the context; more is refused, or with `shorten` taken down to that.
    min_new_tokens: no end of text before so many.
    do_sample: draw from the distribution that temperature, top_k (0: all), top_p, min_p and typical_p leave; else
        take the likeliest token. seed: None draws one, which is reported.
    repetition_penalty: divides the logits > 0, and multiplies those < 0, of tokens in prompt and text (1: off).
    presence_penalty, frequency_penalty: taken off the logits of tokens in the text, once and per occurrence.
    n: how many texts per prompt. best_of: out of how many, by mean log-probability (0: n). num_beams: beam search
        over so many; length_penalty is the exponent of the length that a beam's score is divided by, early_stopping as
        in the transformers library (False, True or "never").
    stop: texts that end it; include_stop keeps them in the text. stop_token_ids: tokens that end it. ignore_eos: the
        model's own end of text does not end it. bad_words: texts that must not occur as tokens in a row.
    logit_bias: added to the logits of token ids. allowed_token_ids: no other token is chosen (empty: any may be).
    top_logprobs: so many likeliest tokens beside each token. prompt_logprobs: log-probabilities of the prompt's tokens,
        with so many likeliest beside each (None: not asked for).
    truncate: keep so many of the prompt's last tokens (None: all).
    skip_special_tokens, spaces_between_special_tokens: how tokens become text.
    grammar: what the text must be. adapter: the name of the LoRA adapter to use ("" for none).
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
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    grammar: Grammar | None = None
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Token:
    """One token: its id, its text alone, and its log-probability (None for the first of a prompt).

    `text` is what the token alone decodes to; where characters are split over tokens these do not add up to the text.
    `top` are the likeliest tokens at its place, where they were asked for.
    """

    id: int
    text: str
    logprob: float | None = None
    special: bool = False
    top: tuple["Token", ...] = ()


@dataclass(frozen=True, slots=True)
class Text:
    """What one text has got since the piece before, or all of it.

    `prompt` and `choice` say which: the position of the prompt in the call, and 0 to n - 1. `text` is what is certain
    by now: never half a character, nor what may yet become a stop string, so it may lag behind `tokens`. `generated`
    counts all its tokens so far. With `finish` comes `whole`, the entire text, and `stop`, the stop string or the token
    id that ended it where one did. `seed` is the one that was used; None where nothing was drawn.
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


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """What became of a prompt: its text (of a conversation: after the template), how many tokens it has, how many of
    those were in the prefix cache, and the tokens themselves where `prompt_logprobs` asked for them.

    As far as the engine knows: for how long the call's prompts were checked and cut into tokens, for how long this one
    then waited until it was looked at, and how many new tokens its texts might have at most.
    """

    text: str
    tokens: int
    cached: int = 0
    prefill: tuple[Token, ...] = ()
    waited_s: float | None = None
    checked_s: float | None = None
    most_new: int | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """What has been generated since the piece before; of a call that does not stream, all of it.

    `prompts`, one for each prompt of the call, comes with the first piece alone.
    """

    texts: tuple[Text, ...]
    prompts: tuple[PromptInfo, ...] = ()


def joined(pieces: Iterable[Generation]) -> Generation:
    """The whole generation from its pieces, in the order of prompts and choices."""
    texts: dict[tuple[int, int], Text] = {}
    prompts: tuple[PromptInfo, ...] = ()
    for piece in pieces:
        prompts = prompts or piece.prompts
        for new in piece.texts:
            key = (new.prompt, new.choice)
            old = texts.get(key)
            texts[key] = new if old is None else replace(new, text=old.text + new.text, tokens=old.tokens + new.tokens)
    return Generation(tuple(texts[key] for key in sorted(texts)), prompts)


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """One token of a text that was only cut into tokens: `start` and `stop` count characters of the text."""

    id: int
    text: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Tokenized:
    """A text (of a conversation: after the template) and its tokens."""

    text: str
    tokens: tuple[TokenSpan, ...]
