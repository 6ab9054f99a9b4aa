"""Answers over gRPC whose elements go as bytes: what does not change from one to the next is written once.

A message of protobuf may be cut between its fields and put together again, so the fields that name the model and
describe an output are kept in their wire form, and the elements are put behind them.
"""

from collections.abc import Mapping, Sequence

from dragoman.core.calls import Inference, Response
from dragoman.core.tensor import Tensor
from dragoman.formats.oip_messages import ModelInferResponse, length_delimited
from dragoman.formats.policy import Buffer
from dragoman.formats.raw import raw_from_tensor
from dragoman.formats.small_answer import kept

# Bytes of elements that are sooner copied into one message than put behind it.
_SMALL = 1 << 12

_ID: int = ModelInferResponse.DESCRIPTOR.fields_by_name["id"].number
_RAW: int = ModelInferResponse.DESCRIPTOR.fields_by_name["raw_output_contents"].number
_starts: dict[tuple[str, str], bytes] = {}
_heads: dict[tuple[str, str, tuple[int, ...]], bytes] = {}


def write_raw(response: Response[Inference], id_: str) -> bytes | Sequence[Buffer] | None:
    """The ModelInferResponse; where its elements are many, in parts, of which they are views. None where it has
    parameters."""
    outputs = response.answer.outputs
    if response.answer.parameters:
        return None
    start = _starts.get((response.model, response.version)) or _start(response.model, response.version)
    parts: list[Buffer] = [start]
    if id_:
        parts += length_delimited(_ID, id_.encode())
    for name in outputs:
        tensor = outputs[name]
        if tensor.parameters:
            return None
        parts.append(_heads.get((name, tensor.datatype.name, tensor.shape)) or _head(name, tensor))
    return with_elements(parts, outputs)


def with_elements(parts: list[Buffer], outputs: Mapping[str, Tensor]) -> bytes | Sequence[Buffer]:
    """A message, all of it but the elements of its outputs, and these behind it: the field has the highest number."""
    size = 0
    for tensor in outputs.values():
        blob = raw_from_tensor(tensor)
        size += len(blob)
        parts += length_delimited(_RAW, blob)
    return b"".join(parts) if size <= _SMALL else parts


def _start(model: str, version: str) -> bytes:
    """What names a model."""
    named = ModelInferResponse(model_name=model, model_version=version)
    return kept(_starts, (model, version), named.SerializeToString())


def _head(name: str, tensor: Tensor) -> bytes:
    """What describes an output of a name, datatype and shape."""
    told = ModelInferResponse()
    told.outputs.add(name=name, datatype=tensor.datatype.name, shape=tensor.shape)
    return kept(_heads, (name, tensor.datatype.name, tensor.shape), told.SerializeToString())
