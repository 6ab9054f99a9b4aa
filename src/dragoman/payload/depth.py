"""How deep JSON nests, seen before any parser goes down into it."""

import re

import numpy as np

from dragoman.core.errors import InvalidInput
from dragoman.payload.policy import Policy
from dragoman.payload.simd import LONG

_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_STRING = re.compile(rb'"[^"]*"')
_WITHOUT_STRUCTURE = bytes(set(range(256)) - set(b'"[]{}'))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_BLOCK = 1 << 20


def check_depth(text: bytes, policy: Policy) -> None:
    """Raises InvalidInput where it is deeper than the policy allows."""
    if len(text) < LONG:
        count = text.count(b"[") + text.count(b"{")
    else:
        codes = np.frombuffer(text, np.uint8)
        count = int(np.count_nonzero(codes == ord("[")) + np.count_nonzero(codes == ord("{")))
    if count <= policy.max_json_depth:
        return
    brackets = _STRING.sub(b"", _ESCAPE.sub(b"", text).translate(None, _WITHOUT_STRUCTURE))
    steps = np.frombuffer(brackets.translate(_STEPS), np.int8)
    depth = 0
    for start in range(0, steps.size, _BLOCK):
        depths = depth + np.cumsum(steps[start : start + _BLOCK], dtype=np.int64)
        if depths.max() > policy.max_json_depth:
            raise InvalidInput(f"JSON nests too deep; the limit is {policy.max_json_depth}")
        depth = int(depths[-1])
