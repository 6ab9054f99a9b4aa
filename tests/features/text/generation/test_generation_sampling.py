"""Sampling: distribution, seeds, rules and grammars."""

import asyncio
import json
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from dragoman.core.errors import InvalidInput
from dragoman.core.text import Chat, Grammar, RawPrompt
from dragoman_text.generation import token_sampler
from dragoman_text.generation.grammar import GrammarService
from dragoman_text.runtimes.llm.model import LanguageModel
from features.text.generation.helpers import Reference, generation, ids, load_model, prompts, text, text_engine

pytestmark = pytest.mark.filterwarnings("ignore")


async def test_tokens_follow_the_distribution(llama: LanguageModel, reference: Reference) -> None:
    prompt, temperature, top_k, count = "The value of the", 0.7, 12, 1500
    logits = reference.logprobs(reference.tokenizer(prompt).input_ids)[-1].numpy() / temperature
    top_tokens = np.argsort(-logits)[:top_k]
    shares = np.exp(logits[top_tokens] - logits[top_tokens].max())
    shares /= shares.sum()
    counts: Counter[int] = Counter()
    for first in range(0, count, 300):
        result = await asyncio.gather(
            *(
                generation(
                    llama,
                    prompt,
                    max_new_tokens=1,
                    do_sample=True,
                    seed=seed,
                    temperature=temperature,
                    top_k=top_k,
                    n=10,
                )
                for seed in range(first, first + 300, 10)
            )
        )
        counts.update(ids(each)[0] for one in result for each in one.texts)
    assert set(counts) <= set(top_tokens.tolist())
    expected = shares * count
    chi_square = sum((counts[int(token)] - mean) ** 2 / mean for token, mean in zip(top_tokens, expected, strict=True))
    # 99.99 % of a chi-square distribution with 11 degrees of freedom lie below 37.4; the seeds are fixed.
    assert chi_square < 37.4


async def test_a_seed_gives_the_same_completion_alone_and_in_a_batch(llama: LanguageModel) -> None:
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": True, "temperature": 1.2, "top_p": 0.95, "seed": 11}
    prompts_ = prompts(10, 20, seed=6)
    single = [await text(llama, prompt, **options) for prompt in prompts_]
    batch = await asyncio.gather(
        *(text(llama, prompt, **options) for prompt in prompts_),
        *(text(llama, prompt, **{**options, "seed": i}) for i, prompt in enumerate(prompts(30, 40, seed=7))),
    )
    assert [ids(each) for each in single] == [ids(each) for each in batch[:10]]
    assert all(each.seed == 11 for each in single)


async def test_logits_do_not_depend_on_the_batch_in_bfloat16(llama_folder: Path) -> None:
    model = load_model(llama_folder, dtype="bfloat16", prefill_chunk=32, prefix_cache=0)
    prompts_ = prompts(8, 50, seed=12)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": True, "seed": 5}
    single = [await text(model, prompt, **options) for prompt in prompts_]
    batch = await asyncio.gather(
        *(text(model, prompt, max_new_tokens=30) for prompt in prompts(20, 50, seed=13)),
        *(text(model, prompt, **options) for prompt in prompts_),
    )
    for one, other in zip(single, batch[20:], strict=True):
        assert ids(one) == ids(other)
        assert [token.logprob for token in one.tokens] == pytest.approx([token.logprob for token in other.tokens])
    await model.close()


async def test_a_missing_seed_is_generated_and_returned(llama: LanguageModel) -> None:
    first = await text(llama, "The", max_new_tokens=12, do_sample=True)
    assert first.seed is not None
    again = await text(llama, "The", max_new_tokens=12, do_sample=True, seed=first.seed)
    assert ids(first) == ids(again)
    assert (await text(llama, "The", max_new_tokens=2)).seed is None


async def test_each_of_several_completions_is_reproducible_by_its_seed(llama: LanguageModel) -> None:
    result = await generation(llama, "An object", max_new_tokens=10, do_sample=True, seed=2**64 - 1, n=3)
    assert [each.choice for each in result.texts] == [0, 1, 2]
    assert [each.seed for each in result.texts] == [2**64 - 1, 0, 1]
    for each in result.texts:
        assert ids(await text(llama, "An object", max_new_tokens=10, do_sample=True, seed=each.seed)) == ids(each)


async def test_best_of_returns_the_best_in_order(llama: LanguageModel) -> None:
    result = await generation(llama, "An object", max_new_tokens=8, do_sample=True, seed=1, n=6)
    best = await generation(llama, "An object", max_new_tokens=8, do_sample=True, seed=1, n=2, best_of=6)
    means = sorted((sum(t.logprob or 0 for t in each.tokens) / len(each.tokens) for each in result.texts), reverse=True)
    scores = [sum(t.logprob or 0 for t in each.tokens) / len(each.tokens) for each in best.texts]
    assert scores == pytest.approx(means[:2])
    assert [each.choice for each in best.texts] == [0, 1]


PROCESSORS: list[tuple[str, dict[str, Any], Any]] = [
    ("TopKLogitsWarper", {"top_k": 7}, lambda row: token_sampler.top_k(row, 7)),
    ("TopPLogitsWarper", {"top_p": 0.8}, lambda row: token_sampler.top_p(row, 0.8)),
    ("TopPLogitsWarper", {"top_p": 0.05}, lambda row: token_sampler.top_p(row, 0.05)),
    ("MinPLogitsWarper", {"min_p": 0.1}, lambda row: token_sampler.min_p(row, 0.1)),
    ("TypicalLogitsWarper", {"mass": 0.6}, lambda row: token_sampler.typical_p(row, 0.6)),
    ("TemperatureLogitsWarper", {"temperature": 0.3}, lambda row: token_sampler.temperature(row, 0.3)),
]


@pytest.mark.parametrize(
    ("name", "options", "rule"), PROCESSORS, ids=lambda value: None if callable(value) else str(value)
)
@pytest.mark.parametrize("size", [50, 5000])
def test_rules_equal_the_processors_of_transformers(name: str, options: dict[str, Any], rule: Any, size: int) -> None:
    import torch
    import transformers

    for seed in range(5):
        row = (np.random.default_rng(seed).normal(size=size) * 2).astype(np.float32)
        expected: Any = getattr(transformers, name)(**options)(
            torch.zeros(1, 1, dtype=torch.long), torch.tensor(row[None])
        )
        rule(row)
        np.testing.assert_allclose(row, expected[0].numpy(), rtol=1e-6)


def test_penalties_equal_openais_formula() -> None:
    row = np.zeros(5, np.float32)
    token_sampler.count_penalties(row, {1: 3, 4: 1}, presence=0.5, frequency=0.25)
    assert row.tolist() == [0, -1.25, 0, 0, -0.75]


async def test_bias_bad_words_and_penalties_change_texts(llama: LanguageModel) -> None:
    plain = ids(await text(llama, "The", max_new_tokens=6))
    forbidden = await text(llama, "The", max_new_tokens=6, logit_bias={plain[0]: -100.0})
    assert plain[0] not in ids(forbidden)
    forced = await text(llama, "The", max_new_tokens=3, logit_bias={42: 1000.0})
    assert ids(forced) == [42, 42, 42]
    allowed = (7, 42, 43, 77)
    for method in ({"do_sample": True, "seed": 5, "temperature": 3.0}, {"num_beams": 3}, {}):
        limited = await text(llama, "The", max_new_tokens=9, allowed_token_ids=allowed, **method)
        assert set(ids(limited)) <= set(allowed)
        assert len(ids(limited)) == 9
    penalised = await text(llama, "The", max_new_tokens=12, frequency_penalty=2.0, presence_penalty=2.0)
    assert len(set(ids(penalised))) > len(set(ids(await text(llama, "The", max_new_tokens=12))))
    filtered = await text(llama, "The", max_new_tokens=30, bad_words=("the", "class"), do_sample=True, seed=3)
    assert not {" the", "the", " class", "class"} & {token.text for token in filtered.tokens}


async def test_a_limit_within_a_character(llama: LanguageModel, reference: Reference) -> None:
    first = reference.tokenizer.convert_tokens_to_ids("\u00c3")  # the byte C3, which begins a character
    last = reference.tokenizer.convert_tokens_to_ids("\u00a9")  # A9, which ends it: C3 A9 is an e with an acute accent
    limited = await text(llama, "Caf", max_new_tokens=1, logit_bias={first: 1000.0})
    assert (limited.text, limited.finish, ids(limited), limited.tokens[0].data) == ("", "length", [first], b"\xc3")
    grammar = Grammar("regex", "\u00e9")
    whole = await text(llama, "Caf", max_new_tokens=2, grammar=grammar, ignore_eos=True)
    assert (whole.text, ids(whole)) == ("\u00e9", [first, last])
    stopped = await text(
        llama, "Caf", max_new_tokens=2, logit_bias={first: 1000.0}, stop_token_ids=(first,), include_stop=True
    )
    assert (stopped.text, stopped.finish) == ("\ufffd", "stop_sequence")


async def test_end_conditions(llama: LanguageModel) -> None:
    full = await text(llama, "The import", max_new_tokens=20, do_sample=True, seed=9)
    assert full.finish == "length"
    stop = full.whole[8:11]
    stopped = await text(llama, "The import", max_new_tokens=20, do_sample=True, seed=9, stop=("§§", stop))
    assert (stopped.finish, stopped.stop) == ("stop_sequence", stop)
    assert stopped.whole == full.whole[: full.whole.index(stop)]
    included = await text(
        llama, "The import", max_new_tokens=20, do_sample=True, seed=9, stop=(stop,), include_stop=True
    )
    assert included.whole == stopped.whole + stop
    token = ids(full)[4]
    ended = await text(llama, "The import", max_new_tokens=20, do_sample=True, seed=9, stop_token_ids=(token,))
    assert (ended.finish, ended.stop) == ("stop_sequence", token)
    assert ids(ended) == ids(full)[: ids(full).index(token) + 1]
    end = await text(llama, "The import", max_new_tokens=20, logit_bias={1: 1000.0}, min_new_tokens=3)
    assert (end.finish, end.generated, end.stop) == ("eos_token", 4, 1)
    ignoring = await text(llama, "The import", max_new_tokens=5, logit_bias={1: 1000.0}, ignore_eos=True)
    assert (ignoring.finish, ids(ignoring)) == ("length", [1] * 5)
    assert (ignoring.whole, all(token.special for token in ignoring.tokens)) == ("", True)
    with_special = await text(
        llama, "The import", max_new_tokens=2, logit_bias={1: 1000.0}, ignore_eos=True, skip_special_tokens=False
    )
    assert with_special.whole == "<|end|><|end|>"


@pytest.mark.parametrize(
    ("grammar", "matches"),
    [
        (Grammar("regex", "[a-c]{5}"), lambda result: len(result) == 5 and set(result) <= set("abc")),
        (Grammar("choice", '["grün", "blau"]'), lambda result: result in ("grün", "blau")),
        (Grammar("lark", 'start: "x" "y" "z"'), lambda result: result == "xyz"),
        (
            Grammar(
                "json_schema",
                '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],'
                '"additionalProperties": false, "x-guidance": {"whitespace_flexible": false}}',
            ),
            lambda result: json.loads(result)["a"] in (1, 2),
        ),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
async def test_grammars(llama: LanguageModel, grammar: Grammar, matches: Any) -> None:
    for options in ({"do_sample": True, "seed": 3}, {}, {"num_beams": 2}):
        result = await text(llama, "Say", max_new_tokens=60, grammar=grammar, **options)
        assert matches(result.whole), (options, result.whole)


async def test_white_space_in_a_schema_is_limited(llama: LanguageModel) -> None:
    vocabulary = text_engine(llama).intake.vocabulary
    texts = {t: vocabulary.token(t, None).text for t in range(vocabulary.size)}
    space = {t: 100.0 for t, letters in texts.items() if letters and not letters.strip(" \t\r\n")}
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"type": "array", "maxItems": 2, "items": {"enum": [2]}}},
    }
    for each in (schema | {"required": ["a", "b"], "additionalProperties": False}, {"enum": [{"c": None}]}):
        grammar = Grammar("json_schema", json.dumps(each))
        result = await text(llama, "Say", max_new_tokens=250, grammar=grammar, logit_bias=space)
        assert result.finish == "eos_token"
        assert json.loads(result.whole)
        assert "\n\n" not in result.whole


def test_json_may_be_indented(llama: LanguageModel, grammars: GrammarService) -> None:
    value = {"a": [1, {"b": "x y"}], "c": {}}
    for indent in (None, 2, 4, "\t"):
        guide = grammars.guide(Grammar("json_object"))
        for token in text_engine(llama).intake.vocabulary.tokenize(json.dumps(value, indent=indent)):
            assert guide.next_mask()[token]
            guide.accept(token)
        assert guide.is_ended


_LETTERS = st.characters(exclude_categories=["Cs"]) | st.sampled_from('\x00\x01\x7f"\\\n\u2028/%')


@settings(max_examples=60)
@example("\x7f")
@given(st.text(_LETTERS, min_size=1, max_size=8))
def test_any_text_may_be_a_choice(llama: LanguageModel, grammars: GrammarService, choice: str) -> None:
    guide = grammars.guide(Grammar("choice", json.dumps([choice])))
    tokens = list[int]()
    while not guide.is_ended and (allowed := set(np.flatnonzero(guide.next_mask()).tolist()) - {1}):
        tokens.append(max(allowed))
        guide.accept(tokens[-1])
    assert text_engine(llama).intake.vocabulary.decode(tokens, skip_special=False) == choice


async def test_unsupported_grammars_are_rejected(llama: LanguageModel) -> None:
    grammar = Grammar("regex", "((a{1,100}){1,100}){1,100}")
    with pytest.raises(InvalidInput, match=r"^grammar: too complex to follow: lexer error"):
        await text(llama, "Say", max_new_tokens=200, grammar=grammar)
    assert (await text(llama, "Say", max_new_tokens=2)).generated == 2


async def test_chats_and_truncation(llama: LanguageModel, reference: Reference) -> None:
    chat = Chat(({"role": "user", "content": "hi"},), tools=({"name": "f"},))
    result = await generation(llama, chat, max_new_tokens=3)
    prompt = result.prompts[0].text
    assert prompt == '<|start|><|system|>Tools: [{"name": "f"}]\n<|user|>hi\n<|assistant|>'
    assert result.prompts[0].tokens == len(reference.tokenizer(prompt, add_special_tokens=False).input_ids)
    known = "developer, system, user, assistant, tool, function, or a role that the model's chat template names"
    with pytest.raises(InvalidInput, match=rf'^`messages\[1\]\.role` must be {known}; got "usr"$'):
        await generation(llama, replace(chat, messages=(*chat.messages, {"role": "usr", "content": "a"})))
    with pytest.raises(InvalidInput, match="unknown role function"):
        await generation(llama, Chat(({"role": "function", "content": ""},)), max_new_tokens=3)
    tokens = tuple(reference.tokenizer(prompts(1)[0]).input_ids)
    stopped = await generation(llama, tokens, max_new_tokens=6, truncate=5)
    assert stopped.prompts[0].tokens == 5
    assert stopped.prompts[0].token_ids == ()
    assert ids(stopped.texts[0]) == ids(await text(llama, tokens[-5:], max_new_tokens=6))


async def test_the_side_of_a_truncation_and_the_ids_of_the_prompt(llama: LanguageModel, reference: Reference) -> None:
    tokens = tuple(reference.tokenizer(prompts(1)[0]).input_ids)
    options: dict[str, Any] = {"max_new_tokens": 2, "prompt_token_ids": True, "truncate": 5}
    for side, kept in (("left", tokens[-5:]), ("right", tokens[:5])):
        result = await generation(llama, tokens, truncation_side=side, **options)
        assert result.prompts[0].token_ids == kept
        assert ids(result.texts[0]) == ids(await text(llama, kept, max_new_tokens=2))
    with pytest.raises(InvalidInput, match=r"^truncation_side: expected 'left' or 'right', got 'top'"):
        await generation(llama, tokens, truncation_side="top", **options)


@pytest.mark.parametrize("ends", [False, True])
async def test_special_tokens_stay_as_in_transformers(llama_folder: Path, tmp_path: Path, ends: bool) -> None:
    folder = shutil.copytree(llama_folder, tmp_path / "m")
    if ends:
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        processor = tokenizer["post_processor"]
        processor["single"].append({"SpecialToken": {"id": "<|end|>", "type_id": 0}})
        processor["special_tokens"]["<|end|>"] = {"id": "<|end|>", "ids": [1], "tokens": ["<|end|>"]}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    from transformers import AutoTokenizer

    model, reference, prompt = load_model(folder), AutoTokenizer.from_pretrained(folder), prompts(1)[0]
    options: dict[str, Any] = {"max_new_tokens": 1, "prompt_token_ids": True}
    try:
        least = 2 if ends else 1
        for side in ("left", "right"):
            reference.truncation_side = side
            for count in (*range(least, 8), 10_000):
                result = await generation(model, prompt, truncate=count, truncation_side=side, **options)
                expected = reference(prompt, truncation=True, max_length=count).input_ids
                assert list(result.prompts[0].token_ids) == expected
        if ends:
            with pytest.raises(InvalidInput, match=r"^truncate: expected at least 2, the number of special tokens"):
                await generation(model, prompt, truncate=1, **options)
        whole = reference(prompt, add_special_tokens=False).input_ids
        bare = await generation(model, RawPrompt(prompt), truncate=3, **options)
        assert list(bare.prompts[0].token_ids) == whole[-3:]
        chat = Chat(({"role": "user", "content": prompt},))
        full = (await generation(model, chat, **options)).prompts[0].token_ids
        cut = (await generation(model, chat, truncate=4, **options)).prompts[0].token_ids
        assert cut == (full[0], *full[-3:])
        assert full[0] == reference.bos_token_id
    finally:
        await model.close()


async def test_a_truncation_to_what_fits_leaves_room_for_the_new_tokens(llama: LanguageModel) -> None:
    context = text_engine(llama).intake.vocabulary.context
    long = tuple(2 + i % 50 for i in range(context + 9))
    for new in (1, 3):
        result = await generation(llama, long, max_new_tokens=new, truncate=0, prompt_token_ids=True)
        assert result.prompts[0].token_ids == long[-(context - new) :]
    short = await generation(llama, long[:4], max_new_tokens=1, truncate=0, prompt_token_ids=True)
    assert short.prompts[0].token_ids == long[:4]


async def test_log_probabilities_do_not_depend_on_sampling(llama: LanguageModel) -> None:
    plain = (await text(llama, "The", max_new_tokens=1)).tokens[0]
    sampled = await text(llama, "The", max_new_tokens=1, do_sample=True, temperature=0.01, seed=1, top_logprobs=1)
    assert sampled.tokens[0].logprob == pytest.approx(plain.logprob)
    assert sampled.tokens[0].top[0].logprob == pytest.approx(plain.logprob)
    assert plain.logprob is not None
    assert math.exp(plain.logprob) < 1
