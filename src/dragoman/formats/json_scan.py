"""Check the limits of JSON text before it is parsed: its length, its number of values and its nesting.

Parsers hold the interpreter lock until they finish and take tens of bytes for a value of two bytes. The text is scanned
in blocks, each of which takes a few milliseconds at most.
"""

import re
from collections.abc import Iterator

import numpy as np

from dragoman.core.datatypes import Array, Buffer
from dragoman.core.errors import InvalidInput, TooLarge
from dragoman.formats.policy import Policy

_BINARY = "; send large tensors as binary data to /v2/models/{model}/infer"
_FILES = "; 'dragoman infer' sends pictures, sounds and tables from files"
_STARTS = frozenset(b' \t\r\n{["-0123456789tfnNI\xef')  # first bytes of JSON, of its extensions, of a byte order mark
_BLOCK = 1 << 18  # performance only: bytes scanned at a time

_SPACE = re.compile(rb"[ \t\r\n]*")
_MOST_MARKS = 200  # of a long object
_MOST_SPACE = 1000  # behind a value of a long object; with more it is not valid

_STEPS = np.zeros(256, np.int8)
_STEPS[[ord("["), ord("{")]] = 1
_STEPS[[ord("]"), ord("}")]] = -1
_LISTS = np.zeros(256, np.bool_)  # characters that begin a list or an object
_LISTS[[ord("["), ord("{")]] = True
_VALUES = _LISTS.copy()  # characters that come with one more value each
_VALUES[ord(",")] = True
_LISTS[ord(":")] = True  # a member of an object is no element
_QUOTE, _COLON, _COMMA = b'":,'
_DATA = re.compile(rb'(?<!\\)"data"[ \t\r\n]*:[ \t\r\n]*\[')
_MARKER = b"[[],"  # as no list of numbers or texts begins
_MOST_SCANS = 100  # of a text without long lists


def check_json(text: bytes, policy: Policy, *, elements: bool = True) -> None:
    """Check the size, the number of values and the nesting of JSON text.

    elements: whether each element counts as a value, or only lists, objects and members of objects, as in documents
    with long arrays of numbers. Raises TooLarge or InvalidInput.
    """
    check_size(text, policy, "" if elements else _BINARY)
    if len(text) > policy.max_json_values and count_values(text, elements=elements) > policy.max_json_values:
        raise InvalidInput(
            f"too many values in JSON: expected at most {policy.max_json_values} (max_json_values), got more"
        )
    check_depth(text, policy)


def check_size(text: bytes, policy: Policy, instead: str = "") -> None:
    """Raise TooLarge if JSON text is too long, and InvalidInput if it is a file of another kind, such as a picture.

    The first error ends with what to do `instead`. The parser would name a bracket in the file, or its nesting.
    """
    if text and text[0] not in _STARTS and (problem := explain_encoding(text)):
        raise InvalidInput(f"the request body is not valid JSON: {problem}{_FILES if instead else ''}")
    if len(text) > policy.max_json_bytes:
        raise TooLarge(
            f"too much JSON: expected at most {policy.max_json_bytes} bytes (max_json_bytes), got {len(text)}{instead}"
        )


def explain_encoding(text: bytes) -> str:
    """Return which byte is not UTF-8; "" for valid text."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return f"expected text in UTF-8, got the byte 0x{text[error.start]:02x} at offset {error.start}"
    return ""


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


def cut_lists(text: bytes, length: int) -> tuple[bytes, list[memoryview]]:
    """Cut the flat lists longer than `length` bytes that are members "data" of objects out of a JSON text.

    Return the text with a short list in the place of each one, and the lists; `find_cut_list` finds them again. The end
    of a list is the next bracket; its elements are not looked at. The text is valid JSON if the result and each list
    are. A list of texts with brackets may be left, or end too early, and then it is not valid.
    """
    parts: list[bytes] = []
    lists: list[memoryview] = []
    kept = at = 0
    for _ in range(_MOST_SCANS):
        at = text.find(b'"data"', at)
        if at < 0:
            break
        opening = _DATA.match(text, at)
        at += 1
        if opening is None:
            continue
        start = opening.end() - 1
        end = text.find(b"]", start) + 1
        is_long = end - start > length and text.find(b"[", start + 1, end) < 0
        # Texts that do not end with one: the bracket is within a text, or nothing follows the last comma.
        if is_long and (text[end - 2] == _QUOTE or text.find(b'"', start, end) < 0):
            parts += (text[kept:start], b"%b%d]" % (_MARKER, len(lists)))
            lists.append(memoryview(text)[start:end])
            kept = at = end
    if not lists or any(_MARKER in part for part in (*parts[::2], text[kept:])):
        return text, []
    return b"".join((*parts, text[kept:])), lists


def find_cut_list(value: memoryview, lists: list[memoryview]) -> memoryview | None:
    """Return the list in whose place `cut_lists` has put this JSON value; None if it has not."""
    return lists[int(value[len(_MARKER) : -1])] if bytes(value[: len(_MARKER)]) == _MARKER else None


def split_members(text: Buffer) -> list[tuple[bytes, memoryview]]:
    """Return the keys and values of a JSON object as they are in its text, found block by block.

    Only brackets and strings are looked at: keys and values may be invalid. Raises ValueError for a text that cannot be
    an object, or has a hundred members.
    """
    marks: list[tuple[int, int]] = []  # places of the colons and commas between members, and of the end of the object
    depth = at = 0
    for codes in _scan_blocks(text):
        steps = _STEPS[codes]
        depths = np.cumsum(steps, dtype=np.int32)
        depths += depth
        is_between = (depths == 1) & ((codes == _COLON) | (codes == _COMMA))
        found = np.flatnonzero(is_between | ((depths == 0) & (steps < 0)))
        if len(marks) + found.size > _MOST_MARKS:
            raise ValueError("too many members")
        marks += zip((found + at).tolist(), codes[found].tolist(), strict=True)
        depth, at = int(depths[-1]), at + codes.size
    whole = memoryview(text)
    start = skip_space(whole, 0)
    end = next((place for place, code in marks if code in b"}]"), -1)
    if (
        bytes(whole[start : start + 1]) != b"{"
        or bytes(whole[end : end + 1]) != b"}"
        or skip_space(whole, end + 1) < len(whole)
    ):
        raise ValueError("not a JSON object")
    members: list[tuple[bytes, memoryview]] = []
    begin, colon = start + 1, -1
    for place, code in marks:
        if code == _COLON and colon < 0:
            colon = place
        elif code != _COLON:
            if colon < 0:
                raise ValueError("a member without a value")
            members.append((bytes(whole[begin:colon]), _strip(whole[colon + 1 : place])))
            begin, colon = place + 1, -1
    return members


def skip_space(text: memoryview, at: int) -> int:
    """Return where the white space of JSON that begins at a place ends."""
    space = _SPACE.match(text, at)
    assert space is not None
    return space.end()


def _strip(text: memoryview) -> memoryview:
    first, end = skip_space(text, 0), len(text)
    while end > first and text[end - 1] in b" \t\r\n" and end > len(text) - _MOST_SPACE:
        end -= 1
    return text[first:end]


def count_values(text: bytes, *, elements: bool = True) -> int:
    """Count lists and objects, and commas or else colons, outside of strings: about the number of values in JSON."""
    counted = _VALUES if elements else _LISTS
    return sum(int(np.count_nonzero(counted[codes])) for codes in _scan_blocks(text))


def _scan_blocks(text: Buffer) -> Iterator[Array]:
    """Yield the bytes of the text in blocks, with 0 in strings."""
    inside, at = False, 0
    while at < len(text):
        block = bytes(text[at : at + _BLOCK])
        at += len(block)
        if b"\\" in block:
            if (len(block) - len(block.rstrip(b"\\"))) & 1:  # the escaped character is in the next block
                block += bytes(text[at : at + 1])
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
