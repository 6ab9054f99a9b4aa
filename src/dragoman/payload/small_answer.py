"""Answers of few numbers as JSON, written in a few steps: what does not change from one to the next is written once.

Whatever is not plain is left to `body`, which writes the same and tells what is wrong with the rest.
"""

from typing import Any

import orjson

from dragoman.core.calls import Inference
from dragoman.core.datatypes import BF16, BYTES
from dragoman.core.tensor import Tensor

SMALL = 64  # numbers up to which it pays

_KNOWN = 512
_starts: dict[tuple[str, str], bytes] = {}
_heads: dict[tuple[str, str, tuple[int, ...]], bytes] = {}


def write_answer(answer: Inference, model: str, version: str, id_: str | None) -> bytes | None:
    """The answer to a request as JSON; None where anything else is to be said than its small outputs of numbers."""
    if answer.parameters or answer.metadata:
        return None
    outputs = []
    for name, tensor in answer.outputs.items():
        datatype, data = tensor.datatype, tensor.data if type(tensor) is Tensor else None
        if data is None or datatype is BYTES or datatype is BF16 or tensor.parameters or data.size > SMALL:
            return None
        text = orjson.dumps(data.reshape(-1), option=orjson.OPT_SERIALIZE_NUMPY)
        if b"null" in text:  # what JSON has no number for
            return None
        head = _heads.get((name, datatype.name, data.shape)) or _head(name, tensor)
        outputs.append(b"".join((head, text, b"}")))
    start = _starts.get((model, version)) or _start(model, version)
    told = b"{" if id_ is None else b'{"id":%b,' % orjson.dumps(id_)
    return b"".join((told, start, outputs[0] if len(outputs) == 1 else b",".join(outputs), b"]}"))


def _start(model: str, version: str) -> bytes:
    """What an answer of a model begins with, up to its outputs."""
    named = {"model_name": model, "model_version": version} if version else {"model_name": model}
    return kept(_starts, (model, version), orjson.dumps({**named, "outputs": []})[1:-2])


def _head(name: str, tensor: Tensor) -> bytes:
    """What an output of a name, datatype and shape begins with, up to its data."""
    told = {"name": name, "datatype": tensor.datatype.name, "shape": tensor.shape, "data": None}
    return kept(_heads, (name, tensor.datatype.name, tensor.shape), orjson.dumps(told).removesuffix(b"null}"))


def kept(known: dict[Any, bytes], key: Any, text: bytes) -> bytes:
    """The text, known by its key from now on, with so many others at most."""
    if len(known) >= _KNOWN:
        known.clear()
    known[key] = text
    return text
