"""Check the limits of JSON text before it is parsed: its length, its number of values and its nesting.

Parsers hold the interpreter lock until they finish and take tens of bytes for a value of two bytes. The text is scanned
in blocks, each of which takes a few milliseconds at most.
"""

from collections.abc import Iterator

import numpy as np

from dragoman.core.datatypes import Array
from dragoman.core.errors import InvalidInput, TooLarge
from dragoman.formats.policy import Policy

BINARY = "; send large tensors as binary data to /v2/models/{model}/infer"
_BLOCK = 1 << 18  # performance only: bytes scanned at a time

_STEPS = np.zeros(256, np.int8)
_STEPS[[ord("["), ord("{")]] = 1
_STEPS[[ord("]"), ord("}")]] = -1
_LISTS = np.zeros(256, np.bool_)  # characters that begin a list or an object
_LISTS[[ord("["), ord("{")]] = True
_VALUES = _LISTS.copy()  # characters that come with one more value each
_VALUES[ord(",")] = True
_LISTS[ord(":")] = True  # a member of an object is no element
_QUOTE = ord('"')


def check_json(text: bytes, policy: Policy, *, elements: bool = True) -> None:
    """Check the size, the number of values and the nesting of JSON text.

    elements: whether each element counts as a value, or only lists, objects and members of objects, as in documents
    with long arrays of numbers. Raises TooLarge or InvalidInput.
    """
    check_size(text, policy, "" if elements else BINARY)
    if len(text) > policy.max_json_values and count_values(text, elements=elements) > policy.max_json_values:
        raise InvalidInput(
            f"too many values in JSON: expected at most {policy.max_json_values} (max_json_values), got more"
        )
    check_depth(text, policy)


def check_size(text: bytes, policy: Policy, instead: str = "") -> None:
    """Raise TooLarge if JSON text is too long. The error ends with what to do `instead`."""
    if len(text) > policy.max_json_bytes:
        raise TooLarge(
            f"too much JSON: expected at most {policy.max_json_bytes} bytes (max_json_bytes), got {len(text)}{instead}"
        )


def check_depth(text: bytes, policy: Policy) -> None:
    """Raise InvalidInput if JSON text nests too deep."""
    if nests_deeper(text, policy.max_json_depth):
        raise InvalidInput(f"JSON nests too deep; the limit is {policy.max_json_depth}")


def nests_deeper(text: bytes, limit: int) -> bool:
    """Return whether JSON text nests deeper than `limit`."""
    if text.count(b"[") + text.count(b"{") <= limit:
        return False
    depth = 0
    for codes in _scan_blocks(text):
        steps = _STEPS[codes]
        depths = depth + np.cumsum(steps[steps != 0], dtype=np.int64)
        if depths.size:
            if depths.max() > limit:
                return True
            depth = int(depths[-1])
    return False


def count_values(text: bytes, *, elements: bool = True) -> int:
    """Count lists and objects, and commas or else colons, outside of strings: about the number of values in JSON."""
    counted = _VALUES if elements else _LISTS
    return sum(int(np.count_nonzero(counted[codes])) for codes in _scan_blocks(text))


def _scan_blocks(text: bytes) -> Iterator[Array]:
    """Yield the bytes of the text in blocks, with 0 in strings."""
    inside, at = False, 0
    while at < len(text):
        block = text[at : at + _BLOCK]
        at += len(block)
        if b"\\" in block:
            if (len(block) - len(block.rstrip(b"\\"))) & 1:  # the escaped character is in the next block
                block += text[at : at + 1]
                at += 1
            block = block.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        codes = np.frombuffer(block, np.uint8)
        if inside or b'"' in block:
            within = np.cumsum(codes == _QUOTE, dtype=np.uint8)  # it overflows, but stays odd or even
            within += inside
            within &= 1
            codes = np.where(within, np.uint8(0), codes)
            inside = bool(within[-1])
        yield codes
