"""JSON text scanned in blocks before it is parsed: its values are counted, its depth is measured, arrays are located.

Parsers hold the interpreter lock for as long as they run, and take tens of bytes for each value of two bytes. So what
is parsed is bounded first. Each step here looks at one block and takes a few milliseconds at most.
"""

from collections.abc import Iterator

import numpy as np

from dragoman.core.datatypes import Array
from dragoman.core.errors import InvalidInput
from dragoman.formats.policy import Buffer, Policy

BLOCK = 1 << 18  # performance only: bytes scanned at a time
_FIRST_BLOCK = 1 << 12  # performance only: bytes of an array, most of which are short
_MAX_ARRAY_DEPTH = 33

_STEPS = np.zeros(256, np.int8)
_STEPS[[ord("["), ord("{")]] = 1
_STEPS[[ord("]"), ord("}")]] = -1
_VALUES = np.zeros(256, np.bool_)  # each of these brings one more value
_VALUES[[ord("["), ord("{"), ord(",")]] = True
_BACKSLASH = ord("\\")
_QUOTE, _BRACE, _COMMA = b'"{,'


def blocks(text: Buffer, start: int = 0, size: int = 0) -> Iterator[tuple[int, Array]]:
    """The text from `start`, which is in no string, in blocks: where each starts, and its bytes, 0 within strings."""
    view, inside, at, size = memoryview(text), False, start, size or BLOCK
    while at < len(view):
        block = bytes(view[at : at + size])
        if b"\\" in block:
            if (len(block) - len(block.rstrip(b"\\"))) & 1:  # what is escaped is in the next block
                block = bytes(view[at : at + len(block) + 1])
            block = block.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        codes = np.frombuffer(block, np.uint8)
        if inside or b'"' in block:
            within = np.cumsum(codes == _QUOTE, dtype=np.uint8)  # it overflows, but stays odd or even
            within += inside
            within &= 1
            codes = np.where(within, np.uint8(0), codes)
            inside = bool(within[-1])
        yield at, codes
        at += len(block)
        size = min(size * 4, BLOCK)


def check_json(text: bytes, policy: Policy) -> None:
    """Check that JSON text may be parsed: its size, the number of its values and how deep it nests.

    What is data of tensors has been taken out before, since it has limits of its own. Raises InvalidInput.
    """
    if len(text) > policy.max_json_bytes:
        raise InvalidInput(
            f"too much JSON: expected at most {policy.max_json_bytes} bytes outside of tensor data (max_json_bytes), "
            f"got {len(text)}"
        )
    few = len(text) <= policy.max_json_values
    if few and text.count(b"[") + text.count(b"{") <= policy.max_json_depth:
        return
    count = depth = 0
    for _, codes in blocks(text):
        count += 0 if few else int(np.count_nonzero(_VALUES[codes]))
        if count > policy.max_json_values:
            raise InvalidInput(
                f"too many values in JSON: expected at most {policy.max_json_values} outside of tensor data "
                "(max_json_values), got more"
            )
        steps = _STEPS[codes]
        depths = depth + np.cumsum(steps[steps != 0], dtype=np.int64)
        if depths.size:
            if depths.max() > policy.max_json_depth:
                raise InvalidInput(f"JSON nests too deep; the limit is {policy.max_json_depth}")
            depth = int(depths[-1])


def values_in(text: bytes) -> int:
    """About how many values a JSON text has: one for each list, object and comma that is in no string."""
    return sum(int(np.count_nonzero(_VALUES[codes])) for _, codes in blocks(text))


def find_array_end(text: Buffer, start: int) -> int | None:
    """Where the array that begins at `start` ends; None where it holds an object, does not end or nests too deep."""
    depth = 0
    for at, codes in blocks(text, start, _FIRST_BLOCK):
        steps = _STEPS[codes]
        places = np.flatnonzero(steps)
        if not places.size:
            continue
        depths = depth + np.cumsum(steps[places], dtype=np.int64)
        closed = int(np.argmax(depths == 0))
        found = depths[closed] == 0
        if found:
            places, depths = places[: closed + 1], depths[: closed + 1]
        if depths.max() > _MAX_ARRAY_DEPTH or (codes[places] == _BRACE).any():
            return None
        if found:
            return at + int(places[closed]) + 1
        depth = int(depths[-1])
    return None


def find_string_end(text: bytes, quote: int, most: int) -> int:
    """Return the index behind the string that begins at a quote; -1 if it does not end or has `most` escaped quotes."""
    end = quote
    for _ in range(most):
        end = text.find(b'"', end + 1)
        if end < 0:
            return -1
        at = end
        while text[at - 1] == _BACKSLASH:
            at -= 1
        if not (end - at) & 1:
            return end + 1
    return -1


def structure(array: Buffer) -> tuple[list[int], int]:
    """How many lists an array has at each depth, and how many commas, those in strings aside."""
    lists, depth, commas = np.zeros(_MAX_ARRAY_DEPTH + 1, np.int64), 0, 0
    for _, codes in blocks(array):
        commas += int(np.count_nonzero(codes == _COMMA))
        steps = _STEPS[codes]
        steps = steps[steps != 0]
        if not steps.size:
            continue
        depths = depth + np.cumsum(steps, dtype=np.int64)
        opened = np.clip(depths[steps > 0] - 1, 0, _MAX_ARRAY_DEPTH)
        lists += np.bincount(opened, minlength=lists.size)
        depth = int(depths[-1])
    return [int(count) for count in lists if count], commas


def split_texts(inner: Buffer) -> Iterator[tuple[bytes, Array]]:
    """What stands between the brackets of an array, in portions that end at commas which are in no string.

    Each portion comes with its bytes as an array, in which those within strings are 0. There is at least one portion,
    and an empty one where nothing stands between two commas.
    """
    view, done, tail = memoryview(inner), 0, [np.empty(0, np.uint8)]
    for at, codes in blocks(inner):
        commas = np.flatnonzero(codes == _COMMA)
        if not commas.size:
            tail.append(codes)
            continue
        last = int(commas[-1])
        yield bytes(view[done : at + last]), np.concatenate((*tail, codes[:last]))
        done, tail = at + last + 1, [codes[last + 1 :]]
    yield bytes(view[done:]), np.concatenate(tail)
