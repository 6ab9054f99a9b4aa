"""Detokenization and stop strings."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.generation.completion_writer import StopStrings
from dragoman.generation.vocabulary import BytesDetokenizer, Detokenizer, WindowDetokenizer

BYTES = {token: bytes([token]) for token in range(256)}
texts = st.text(max_size=30) | st.sampled_from(["🙂🌍🎉 naïve café", "こんにちは、世界。", "\ufffd", ""])


def lossy(tokens: list[int]) -> str:
    return bytes(tokens).decode("utf-8", "replace")


def metaspace() -> Any:
    """A tokenizer as those of Llama 2 are: words begin with ▁, unknown characters are bytes, the first space goes."""
    import tokenizers

    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁wor", "ld", "é"]
    made: Any = tokenizers.Tokenizer(
        tokenizers.models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    parts = tokenizers.decoders
    made.decoder = parts.Sequence(
        [parts.Replace("▁", " "), parts.ByteFallback(), parts.Fuse(), parts.Strip(content=" ", left=1)]
    )
    return made


MAKERS: list[tuple[Callable[[list[int]], Detokenizer], Callable[[list[int]], str], int]] = [
    (lambda before: BytesDetokenizer(BYTES, before), lossy, 256),
    (lambda before: WindowDetokenizer(lossy, before), lossy, 256),
    (lambda before: WindowDetokenizer(metaspace().decode, before), metaspace().decode, 262),
]


@pytest.mark.parametrize(("make", "decode", "size"), MAKERS, ids=["bytes", "window", "metaspace"])
@given(data=st.data())
def test_chunks_join_to_the_whole(
    make: Callable[[list[int]], Detokenizer], decode: Callable[[list[int]], str], size: int, data: st.DataObject
) -> None:
    if data.draw(st.booleans()):
        tokens = [byte + (1 if size > 256 else 0) for byte in data.draw(texts).encode()]
    else:
        tokens = data.draw(st.lists(st.integers(0, size - 1), max_size=12))
    writer = make([])
    generate_chunks = [writer.add(token) for token in tokens]
    generate_chunks.append(writer.rest())
    if size == 256 or "\ufffd" not in decode(tokens):  # a broken byte takes back characters before it, in this one
        assert "".join(generate_chunks) == decode(tokens)


@pytest.mark.parametrize(("make", "decode", "size"), MAKERS, ids=["bytes", "window", "metaspace"])
@given(before=texts, after=texts)
def test_a_completion_continues_a_character_of_the_prompt(
    make: Callable[[list[int]], Detokenizer], decode: Callable[[list[int]], str], size: int, before: str, after: str
) -> None:
    shift = 1 if size > 256 else 0
    first, then = ([byte + shift for byte in part.encode()] for part in ("x" + before, after))
    writer = make(first)
    assert "".join([*map(writer.add, then), writer.rest()]) == after


def test_chunks_contain_no_partial_characters() -> None:
    for make, _, size in MAKERS:
        writer = make([])
        shown = [writer.add(byte + (1 if size > 256 else 0)) for byte in "🙂é".encode()]
        assert [piece for piece in shown if piece] == ["🙂", "é"]


def test_leading_spaces_of_words_are_kept() -> None:
    made = metaspace()
    writer = WindowDetokenizer(made.decode, [258])
    assert [writer.add(token) for token in (258, 259, 260)] == [" Hello", " wor", "ld"]


@given(st.lists(st.text("abc", max_size=3), max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_stop_strings_are_found_and_removed(generate_chunks: list[str], stops: list[str]) -> None:
    watch = StopStrings(stops, keep=False)
    shown, fed = "", ""
    for piece in generate_chunks:
        fed += piece
        shown += watch.add(piece)
        assert not any(stop in shown for stop in stops)
        if watch.found:
            break
    found = [fed.index(stop) for stop in stops if stop in fed]
    if found:
        assert watch.found in stops
        assert shown == fed[: min(found)]
    else:
        assert not watch.found
        assert shown + watch.rest() == "".join(generate_chunks)


@given(st.lists(st.text("abc", max_size=3), max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_included_stop_strings_are_not_held_back(generate_chunks: list[str], stops: list[str]) -> None:
    kept, taken = StopStrings(stops, keep=True), StopStrings(stops, keep=False)
    shown, without, fed = "", "", ""
    for piece in generate_chunks:
        fed += piece
        shown += kept.add(piece)
        without += taken.add(piece)
        assert kept.found == taken.found
        if kept.found:
            break
        assert shown == fed
    assert kept.rest() == ""
    assert shown == without + kept.found + taken.rest()
    assert fed.startswith(shown)


def test_only_prefixes_of_stop_strings_are_held_back() -> None:
    generate_chunks = ("Hi", "\n", "Us", "ual", "\nUser", ": x")
    watch = StopStrings(["\nUser:"], keep=False)
    assert [watch.add(piece) for piece in generate_chunks] == ["Hi", "", "", "\nUsual", "", ""]
    watch = StopStrings(["\nUser:"], keep=True)
    assert [watch.add(piece) for piece in generate_chunks] == ["Hi", "\n", "Us", "ual", "\nUser", ":"]
