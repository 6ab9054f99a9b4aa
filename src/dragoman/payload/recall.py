"""Requests that differ from one before only in their ids and numbers: the rest of them is parsed once.

Clients send the same message again and again with other data. What stands before, between and behind the id and the
data is looked up as it is; where it came before, it means now what it meant then, for JSON text keeps its meaning when
one string or one array in it is replaced by another. Only these two are read. Each has to be the only thing that is
called "id" or "data", and no character may be escaped, so that what is found in the text is what the parser found.

Where the numbers stand behind the JSON as bytes, all of it but the id is looked up, and tells where which are.
"""

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from dragoman.core.datatypes import Array, Datatype
from dragoman.core.tensor import Tensor
from dragoman.payload.policy import Policy
from dragoman.payload.request import Around, RequestBody
from dragoman.payload.small import FAULTS, FORMS, numbers_in

_MOST = 512  # texts that are known
_DATA, _ID = b'"data"', b'"id"'
_QUOTE = b'"'


class _Text(Around, kw_only=True):
    """What stands around the one array of a JSON text, and how that is read.

    The text is `before`, the id and `between`, if there is one, the array and `behind`; where the id stands behind the
    array, there is no `before`. `start`, `gap` and `end` are their sizes, the last one counted backwards.
    """

    policy: Policy
    name: str
    shape: Sequence[int]
    kind: Datatype
    dtype: Any
    read: Any
    pack: Any
    before: bytes
    between: bytes
    behind: bytes
    start: int
    gap: int
    end: int


class _Head(Around, kw_only=True):
    """What the JSON before binary data says of it: the names, datatypes, shapes and places of tensors, in order."""

    policy: Policy
    tensors: Sequence[tuple[str, Datatype, Sequence[int], int, int]]
    size: int


_texts: dict[tuple[bytes, ...], _Text] = {}
_heads: dict[tuple[bytes, ...], _Head] = {}
_once: set[int] = set()  # what came once, by hashes
_last: _Text | None = None  # the text that was looked up last


def recalled(text: bytes, policy: Policy) -> RequestBody | None:
    """A request in JSON whose text around the id and the data is known; None of any other."""
    around, told, data = _last, None, b""
    if around is not None and text.startswith(around.before) and text.endswith(around.behind):  # like the last one
        start: int = around.start
        if around.between:
            closing = text.find(_QUOTE, start)
            told = text[start:closing]
            start = closing + around.gap if text.startswith(around.between, closing) else len(text)
        data = text[start : around.end]
    if not data:
        around, told, data = _looked_up(text)
    if around is None or around.policy is not policy:
        return None
    try:
        id_ = None if told is None else told.decode()
        array: Array = np.ndarray(around.shape, around.dtype, around.pack(*around.read(data)))
    except FAULTS:
        return None
    if id_ and ("\\" in id_ or not id_.isprintable()):  # something is escaped, or would have to be
        return None
    return RequestBody({around.name: Tensor(array, around.kind)}, around.outputs, {**around.parameters}, id_, around)


def _looked_up(text: bytes) -> tuple[_Text | None, bytes | None, bytes]:
    """What is known of a text, its id and its array; the next may be like it."""
    global _last
    start = text.find(b"[", text.find(_DATA))
    end = text.find(b"]", start) + 1
    told: bytes | None = None
    named = text.find(_ID)
    if named < 0:
        around = _texts.get((text[:start], text[end:]))
    else:
        opening = text.find(_QUOTE, named + 4) + 1
        closing = text.find(_QUOTE, opening)
        told = text[opening:closing]
        if named < start:
            around = _texts.get((text[:opening], text[closing:start], text[end:]))
        else:
            around = _texts.get((text[:start], text[end:opening], text[closing:]))
    if around is not None and around.before:
        _last = around
    return around, told, text[start:end]


def recalled_head(text: bytes, rest: memoryview, policy: Policy) -> RequestBody | None:
    """A request whose JSON is known but for the id, with the binary data behind it; None of any other."""
    told, key = None, _without_id(text)
    around = _heads.get(key)
    if around is None or around.policy is not policy or around.size != len(rest):
        return None
    if len(key) == 2:
        try:
            told = text[len(key[0]) : -len(key[1])].decode()
        except UnicodeDecodeError:
            return None
        if "\\" in told or not told.isprintable():
            return None
    inputs = {}
    for name, kind, shape, start, end in around.tensors:
        inputs[name] = Tensor(numbers_in(rest[start:end], shape, kind.dtype), kind)
    return RequestBody(inputs, around.outputs, {**around.parameters}, told, around)


def learn(text: bytes, policy: Policy, body: RequestBody) -> None:
    """Know the text around the id and the data of a request with one input, from the second time on."""
    start = text.find(b"[", text.find(_DATA))
    end = text.find(b"]", start) + 1
    if len(body.inputs) != 1 or text.count(_DATA) != 1 or not _is_found(text, body.id):
        return
    key = (*_without_id(text[:start]), *_without_id(text[end:]))
    ((name, tensor),) = body.inputs.items()
    kind, read, _, code = FORMS[tensor.datatype.name]
    try:
        count = len(read.decode(text[start:end]))
    except FAULTS:  # rows
        return
    if count != tensor.data.size or not _came_before(key):
        return
    before, behind, between = key[0], key[-1], b"".join(key[1:-1])
    if between and text.find(_ID) > start:
        before = b""
    _room(_texts)[key] = _Text(
        body.outputs,
        dict(body.parameters),
        policy=policy,
        name=name,
        shape=tensor.shape,
        kind=kind,
        dtype=kind.dtype,
        read=read.decode,
        pack=struct.Struct(f"<{count}{code}").pack,
        before=before,
        between=between,
        behind=behind,
        start=len(before),
        gap=len(between),
        end=-len(behind),
    )


def learn_head(text: bytes, rest: memoryview, policy: Policy, body: RequestBody) -> None:
    """Know the JSON of a request all of whose inputs are numbers in binary form, from the second time on."""
    key, size, tensors = _without_id(text), 0, []
    for name, tensor in body.inputs.items():
        tensors.append((name, tensor.datatype, tensor.shape, size, size + tensor.data.nbytes))
        size += tensor.data.nbytes
    if size == len(rest) and _is_found(text, body.id) and _came_before(key):
        _room(_heads)[key] = _Head(body.outputs, dict(body.parameters), policy=policy, tensors=tensors, size=size)


def _without_id(text: bytes) -> tuple[bytes, ...]:
    """The text before and behind what is quoted next after "id", or all of it."""
    named = text.find(_ID)
    if named < 0:
        return (text,)
    opening = text.find(_QUOTE, named + 4) + 1
    return text[:opening], text[text.find(_QUOTE, opening) :]


def _is_found(text: bytes, id_: str | None) -> bool:
    """Whether the id of a request is what is quoted after "id": nothing else is called so, and nothing is escaped."""
    return text.count(_ID) == (id_ is not None) and b"\\" not in text


def _came_before(key: tuple[bytes, ...]) -> bool:
    """Whether this was asked before, as far as that is remembered; it is from now on."""
    once = hash(key)
    if once in _once:
        return True
    if len(_once) >= _MOST:
        _once.clear()
    _once.add(once)
    return False


def _room(known: dict[tuple[bytes, ...], Any]) -> dict[tuple[bytes, ...], Any]:
    """The texts that are known, which are not too many for one more."""
    if len(known) >= _MOST:
        known.clear()
    return known
