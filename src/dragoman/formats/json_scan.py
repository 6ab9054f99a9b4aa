"""Scan JSON text in blocks before it is parsed: count values, measure nesting, find the ends of arrays.

Parsers hold the interpreter lock until they finish and take tens of bytes for a value of two bytes, so the limits are
checked first. Each step here scans one block and takes a few milliseconds at most.
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
_VALUES = np.zeros(256, np.bool_)  # characters that come with one more value each
_VALUES[[ord("["), ord("{"), ord(",")]] = True
_BACKSLASH = ord("\\")
_QUOTE, _BRACE, _COMMA = b'"{,'


def scan_blocks(text: Buffer, start: int = 0, size: int = 0) -> Iterator[tuple[int, Array]]:
    """Yield blocks of the text from `start`, outside of strings: the index of each, and its bytes with 0 in strings."""
    view, inside, at, size = memoryview(text), False, start, size or BLOCK
    while at < len(view):
        block = bytes(view[at : at + size])
        if b"\\" in block:
            if (len(block) - len(block.rstrip(b"\\"))) & 1:  # the escaped character is in the next block
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
    """Check the size, the number of values and the nesting of JSON text. Raises InvalidInput.

    Long data of tensors has been cut out before; it has limits of its own.
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
    for _, codes in scan_blocks(text):
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


def count_values(text: bytes) -> int:
    """Count lists, objects and commas outside of strings: about the number of values in a JSON text."""
    return sum(int(np.count_nonzero(_VALUES[codes])) for _, codes in scan_blocks(text))


def find_array_end(text: Buffer, start: int) -> int | None:
    """Return the end of the array that begins at `start`; None if it contains objects, has no end or is too deep."""
    depth = 0
    for at, codes in scan_blocks(text, start, _FIRST_BLOCK):
        steps = _STEPS[codes]
        brackets = np.flatnonzero(steps)
        if not brackets.size:
            continue
        depths = depth + np.cumsum(steps[brackets], dtype=np.int64)
        closed = int(np.argmax(depths == 0))
        found = depths[closed] == 0
        if found:
            brackets, depths = brackets[: closed + 1], depths[: closed + 1]
        if depths.max() > _MAX_ARRAY_DEPTH or (codes[brackets] == _BRACE).any():
            return None
        if found:
            return at + int(brackets[closed]) + 1
        depth = int(depths[-1])
    return None


def find_string_end(text: bytes, quote: int, max_escaped: int) -> int:
    """Return the index after the string that begins at a quote; -1 without an end, or with too many escaped quotes."""
    end = quote
    for _ in range(max_escaped):
        end = text.find(b'"', end + 1)
        if end < 0:
            return -1
        at = end
        while text[at - 1] == _BACKSLASH:
            at -= 1
        if not (end - at) & 1:
            return end + 1
    return -1


def count_lists(array: Buffer) -> tuple[list[int], int]:
    """Count the lists of an array at each depth, and its commas outside of strings."""
    lists, depth, commas = np.zeros(_MAX_ARRAY_DEPTH + 1, np.int64), 0, 0
    for _, codes in scan_blocks(array):
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
    """Split the text between the brackets of an array into chunks at commas outside of strings.

    Each chunk comes with its bytes as an array, with 0 in strings. There is at least one chunk; a chunk is empty if
    nothing is between two commas.
    """
    view, done, tail = memoryview(inner), 0, [np.empty(0, np.uint8)]
    for at, codes in scan_blocks(inner):
        commas = np.flatnonzero(codes == _COMMA)
        if not commas.size:
            tail.append(codes)
            continue
        last = int(commas[-1])
        yield bytes(view[done : at + last]), np.concatenate((*tail, codes[:last]))
        done, tail = at + last + 1, [codes[last + 1 :]]
    yield bytes(view[done:]), np.concatenate(tail)
