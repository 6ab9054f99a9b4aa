"""Detokenization and stop strings."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman_text.generation.completion_writer import StopStrings
from dragoman_text.generation.vocabulary import BytesDetokenizer, Detokenizer, Vocabulary, WindowDetokenizer

BYTES = {token: bytes([token]) for token in range(256)}
texts = st.text(max_size=30) | st.sampled_from(["🙂🌍🎉 naïve café", "こんにちは、世界。", "\ufffd", ""])


def lossy(tokens: list[int]) -> str:
    return bytes(tokens).decode("utf-8", "replace")


def metaspace() -> Any:
    """A tokenizer like that of Llama 2: words begin with ▁, unknown characters are bytes."""
    import tokenizers

    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁wor", "ld", "é"]
    tokenizer: Any = tokenizers.Tokenizer(
        tokenizers.models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    return tokenizer


def test_tokens_within_a_character_have_their_bytes(tmp_path: Path) -> None:
    import tokenizers
    import transformers

    letters = "ðŁĻĤa"
    byte_level = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    byte_level.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    byte_level.decoder = tokenizers.decoders.ByteLevel()
    for name, tokenizer in (("bytes", byte_level), ("metaspace", metaspace())):
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / name)
        vocabulary = Vocabulary(tmp_path / name, 300)
        tokens = [vocabulary.token(id_, -1.0, [(id_, -1.0)]) for id_ in vocabulary.tokenize("🙂")]
        assert [token.data for token in tokens] == [bytes([byte]) for byte in "🙂".encode()], name
        assert [token.top[0].data for token in tokens] == [token.data for token in tokens]
        whole = vocabulary.token(vocabulary.tokenizer.convert_tokens_to_ids("a" if name == "bytes" else "é"), -1.0)
        assert (whole.text, whole.data) == ("a" if name == "bytes" else "é", b"")


def test_tokens_without_text(tmp_path: Path) -> None:
    import tokenizers
    import transformers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({"Ġ": 0, "a": 1}, []))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    vocabulary = Vocabulary(tmp_path, 300)
    texts = {skips: vocabulary.detokenizer((), skip_special=skips, spaces=False) for skips in (False, True)}
    for skips, expected in ((False, [" ", "a", "<end>", ""]), (True, [" ", "a", "", ""])):
        assert [texts[skips].add(token) for token in (0, 1, 2, 299)] == expected  # the model alone has token 299
    assert vocabulary.token(2, None).text == "<end>"
    assert vocabulary.longest == len("<end>")


WHOLE: dict[int, str] = {}
DETOKENIZERS: list[tuple[Callable[[list[int]], Detokenizer], Callable[[list[int]], str], int]] = [
    (lambda before: BytesDetokenizer(BYTES, before, WHOLE), lossy, 256),
    (lambda before: WindowDetokenizer(lossy, before), lossy, 256),
    (lambda before: WindowDetokenizer(metaspace().decode, before), metaspace().decode, 262),
]


@pytest.mark.parametrize(("make", "decode", "size"), DETOKENIZERS, ids=["bytes", "window", "metaspace"])
@given(data=st.data())
def test_chunks_join_to_the_whole(
    make: Callable[[list[int]], Detokenizer], decode: Callable[[list[int]], str], size: int, data: st.DataObject
) -> None:
    if data.draw(st.booleans()):
        tokens = [byte + (1 if size > 256 else 0) for byte in data.draw(texts).encode()]
    else:
        tokens = data.draw(st.lists(st.integers(0, size - 1), max_size=12))
    writer = make([])
    chunks = [writer.add(token) for token in tokens]
    chunks.append(writer.rest())
    if size == 256 or "\ufffd" not in decode(tokens):  # with metaspace, an invalid byte replaces characters before it
        assert "".join(chunks) == decode(tokens)


@pytest.mark.parametrize(("make", "decode", "size"), DETOKENIZERS, ids=["bytes", "window", "metaspace"])
@given(before=texts, after=texts)
def test_a_completion_continues_a_character_of_the_prompt(
    make: Callable[[list[int]], Detokenizer], decode: Callable[[list[int]], str], size: int, before: str, after: str
) -> None:
    shift = 1 if size > 256 else 0
    first, following = ([byte + shift for byte in part.encode()] for part in ("x" + before, after))
    writer = make(first)
    assert "".join([*map(writer.add, following), writer.rest()]) == after


def test_chunks_contain_no_partial_characters() -> None:
    for make, _, size in DETOKENIZERS:
        writer = make([])
        output = [writer.add(byte + (1 if size > 256 else 0)) for byte in "🙂é".encode()]
        assert [chunk for chunk in output if chunk] == ["🙂", "é"]


def test_copies_continue_a_character() -> None:
    for make, _, size in DETOKENIZERS:
        first, *rest = [byte + (1 if size > 256 else 0) for byte in "é".encode() * 2]
        writer = make([])
        writer.add(first)
        twin = writer.copy()
        assert ["".join(map(each.add, rest)) for each in (writer, twin)] == ["éé"] * 2


def test_leading_spaces_of_words_are_kept() -> None:
    tokenizer = metaspace()
    writer = WindowDetokenizer(tokenizer.decode, [258])
    assert [writer.add(token) for token in (258, 259, 260)] == [" Hello", " wor", "ld"]


@given(st.lists(st.text("abc", max_size=3), max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_stop_strings_are_found_and_removed(chunks: list[str], stops: list[str]) -> None:
    stop_strings = StopStrings(stops, keep=False)
    output, text = "", ""
    for chunk in chunks:
        text += chunk
        output += stop_strings.add(chunk)
        assert not any(stop in output for stop in stops)
        if stop_strings.found:
            break
    positions = [text.index(stop) for stop in stops if stop in text]
    if positions:
        assert stop_strings.found in stops
        assert output == text[: min(positions)]
    else:
        assert not stop_strings.found
        assert output + stop_strings.rest() == "".join(chunks)


@given(st.lists(st.text("abc", max_size=3), max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_included_stop_strings_are_not_held_back(chunks: list[str], stops: list[str]) -> None:
    including, removing = StopStrings(stops, keep=True), StopStrings(stops, keep=False)
    output, output_without, text = "", "", ""
    for chunk in chunks:
        text += chunk
        output += including.add(chunk)
        output_without += removing.add(chunk)
        assert including.found == removing.found
        if including.found:
            break
        assert output == text
    assert including.rest() == ""
    assert output == output_without + including.found + removing.rest()
    assert text.startswith(output)


def test_only_prefixes_of_stop_strings_are_held_back() -> None:
    chunks = ("Hi", "\n", "Us", "ual", "\nUser", ": x")
    stop_strings = StopStrings(["\nUser:"], keep=False)
    assert [stop_strings.add(chunk) for chunk in chunks] == ["Hi", "", "", "\nUsual", "", ""]
    stop_strings = StopStrings(["\nUser:"], keep=True)
    assert [stop_strings.add(chunk) for chunk in chunks] == ["Hi", "\n", "Us", "ual", "\nUser", ":"]
