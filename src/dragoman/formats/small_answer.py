"""Answers of few numbers, or of any in binary form, in a few steps: what does not change is written once.

Whatever is not plain is left to `body`, which writes the same and tells what is wrong with the rest.
"""

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from dragoman.core.calls import Inference
from dragoman.core.datatypes import BF16, BYTES
from dragoman.core.tensor import Tensor
from dragoman.formats.policy import Buffer
from dragoman.formats.raw import raw_from_tensor

SMALL = 64  # performance only: numbers in JSON up to which the short way is faster
_JOINED = 1024  # performance only: bytes of binary data up to which one buffer is sent sooner than several

_KNOWN = 512
_starts: dict[tuple[str, str], bytes] = {}
# By an output's name, datatype and shape what it begins with, up to its data. Only those are known that may go so.
_heads: dict[tuple[str, str, tuple[int, ...]], bytes] = {}
_raw_heads: dict[tuple[str, str, tuple[int, ...]], bytes] = {}  # and all that JSON tells of one in binary form


def write_answer(answer: Inference, model: str, version: str, id_: str | None) -> bytes | None:
    """The answer to a request as JSON; None where anything else is to be said than its small outputs of numbers."""
    if answer.parameters or answer.metadata:
        return None
    start = _starts.get((model, version)) or _start(model, version)
    parts = [b"{", start] if id_ is None else [b'{"id":', orjson.dumps(id_), b",", start]
    outputs, end = answer.outputs, b""
    for name in outputs:
        tensor = outputs[name]
        if type(tensor) is not Tensor or tensor.parameters:
            return None
        data = tensor.data
        head = _heads.get((name, tensor.datatype.name, data.shape)) or _head(name, tensor)
        text = orjson.dumps(data.reshape(-1), option=orjson.OPT_SERIALIZE_NUMPY) if head else b"null"
        if b"null" in text:  # what JSON has no number for
            return None
        parts += (end, head, text)
        end = b"},"
    parts.append(b"}]}" if end else b"]}")
    return b"".join(parts)


def write_binary(
    answer: Inference, model: str, version: str, id_: str | None, binary: Callable[[str], bool]
) -> tuple[Sequence[Buffer], int] | None:
    """The answer as JSON with the binary data of all outputs behind it, in parts, and how long that JSON is; None where
    an output is not wanted so, or anything else is to be said than its outputs of numbers."""
    if answer.parameters or answer.metadata or not answer.outputs:
        return None
    start = _starts.get((model, version)) or _start(model, version)
    id_text = b"" if id_ is None else b'"id":%b,' % orjson.dumps(id_)
    told, outputs = [], answer.outputs
    blobs: list[Buffer] = []
    size = 0
    for name in outputs:
        tensor = outputs[name]
        if type(tensor) is not Tensor or tensor.parameters or not binary(name):
            return None
        head = _raw_heads.get((name, tensor.datatype.name, tensor.data.shape)) or _raw_head(name, tensor)
        if not head:
            return None
        told.append(head)
        blobs.append(raw_from_tensor(tensor))
        size += tensor.data.nbytes
    text = b"{%b%b%b]}" % (id_text, start, told[0] if len(told) == 1 else b",".join(told))
    return ((b"".join((text, *blobs)),) if size <= _JOINED else (text, *blobs)), len(text)


def _start(model: str, version: str) -> bytes:
    """What an answer of a model begins with behind its id, up to its outputs."""
    named = {"model_name": model, "model_version": version} if version else {"model_name": model}
    return kept(_starts, (model, version), orjson.dumps({**named, "outputs": []})[1:-2])


def _head(name: str, tensor: Tensor) -> bytes:
    """What an output of a name, datatype and shape begins with, up to its data; nothing where it may not go so."""
    if tensor.datatype is BYTES or tensor.datatype is BF16 or tensor.data.size > SMALL:
        return b""
    told = {"name": name, "datatype": tensor.datatype.name, "shape": tensor.shape, "data": None}
    return kept(_heads, (name, tensor.datatype.name, tensor.shape), orjson.dumps(told).removesuffix(b"null}"))


def _raw_head(name: str, tensor: Tensor) -> bytes:
    """What is told of an output in binary form; nothing where it may not go so. An empty one has no such form."""
    if tensor.datatype is BYTES or not tensor.data.nbytes:
        return b""
    size = {"binary_data_size": tensor.data.nbytes}
    told = {"name": name, "datatype": tensor.datatype.name, "shape": tensor.shape, "parameters": size}
    return kept(_raw_heads, (name, tensor.datatype.name, tensor.shape), orjson.dumps(told))


def kept(known: dict[Any, bytes], key: Any, text: bytes) -> bytes:
    """The text, known by its key from now on, with so many others at most."""
    if len(known) >= _KNOWN:
        known.clear()
    known[key] = text
    return text
