"""Inference over gRPC: a ModelInferRequest becomes an Infer call, and its answer a ModelInferResponse."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dragoman.core.calls import Infer, Inference, Request, Response
from dragoman.core.datatypes import Datatype, datatype
from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import Scalar, Tensor
from dragoman.formats.oip_answer import with_elements, write_raw
from dragoman.formats.oip_contents import FIELDS, tensor_from_contents, tensor_from_packed, write_contents
from dragoman.formats.oip_messages import (
    ModelInferRequest,
    ModelInferResponse,
    parsed,
    read_parameters,
    write_parameters,
)
from dragoman.formats.oip_raw import LARGE, contents_apart
from dragoman.formats.oip_typed import LARGE as TYPED_LARGE
from dragoman.formats.oip_typed import Packed, typed_apart
from dragoman.formats.raw import tensor_from_raw
from dragoman.formats.small import plain_raw
from dragoman.protocols.open_inference import extensions as oip
from dragoman.protocols.wire import Buffer, GrpcRequest, Policy

# Triton: asks a stream to mark its last response, and the mark.
WANTS_FINAL = "triton_enable_empty_final_response"
FINAL = "triton_final_response"


class Form(msgspec.Struct, frozen=True):
    """What an answer needs to know of its question: `raw` elements or typed ones, how many `classes` of which
    output, and whether the stream marks its `final` response."""

    id: str
    model: str
    version: str
    raw: bool
    classes: Mapping[str, int]
    final: bool


def read_infer(request: GrpcRequest, policy: Policy) -> tuple[Request[Inference], Form]:
    """The call in a ModelInferRequest and the form of its answer; InvalidInput naming what does not fit."""
    apart = contents_apart(request.body) if len(request.body) >= LARGE else None
    rest = request.body if apart is None else apart[0]
    typed = typed_apart(rest, policy) if len(rest) >= TYPED_LARGE else None
    message = parsed(ModelInferRequest, rest if typed is None else typed[0])
    packed = {} if typed is None else typed[1]
    raw = message.raw_input_contents if apart is None else apart[1]
    model = named(message.model_name)
    if message.parameters or message.outputs:
        parameters = read_parameters(message.parameters, "")
        final = _wants_final(parameters)
        names, classes, types = _outputs(message.outputs)
        call = Infer(_inputs(message, raw, packed, policy), names, parameters, content_types=types)
        deadline_s = oip.deadline_s(parameters, request.deadline_s)
    else:  # as most are
        call, final, classes = Infer(_inputs(message, raw, packed, policy)), False, {}
        deadline_s = request.deadline_s
    form = Form(
        id=message.id,
        model=model,
        version=message.model_version,
        raw=bool(raw) or not message.inputs,
        classes=classes,
        final=final,
    )
    metadata = policy.forwarded(request.metadata) if policy.forward_headers else {}
    if len(call.inputs) + len(call.outputs) > 1:
        oip.check_counts(call, policy)
    return Request(call, model, message.model_version, message.id, deadline_s, metadata), form


def write_infer(response: Response[Inference], form: Form) -> bytes:
    """The ModelInferResponse of an answer; raw elements are copied once, straight from their arrays."""
    written = write_parts(response, form)
    return written if isinstance(written, bytes) else b"".join(written)


def write_parts(response: Response[Inference], form: Form) -> bytes | Sequence[Buffer]:
    """The same; where its raw elements are many, in parts, of which they are views."""
    plain = None if form.final or form.classes or not form.raw else write_raw(response, form.id)
    return _written(response, form) if plain is None else plain


def _written(response: Response[Inference], form: Form) -> bytes | Sequence[Buffer]:
    answer = oip.classified(response.answer, form.classes)
    outputs = answer.outputs
    message = ModelInferResponse(model_name=response.model, model_version=response.version, id=form.id)
    if answer.parameters:
        write_parameters(answer.parameters, message.parameters)
    if form.final:
        message.parameters[FINAL].bool_param = False
    for name, tensor in outputs.items():
        output = message.outputs.add(name=name, datatype=tensor.datatype.name, shape=tensor.shape)
        if tensor.parameters:
            write_parameters(tensor.parameters, output.parameters)
    if not form.raw and all(t.datatype in FIELDS for t in outputs.values()):
        for tensor, output in zip(outputs.values(), message.outputs, strict=True):
            write_contents(tensor, output.contents)
        return bytes(message.SerializeToString())
    return with_elements([message.SerializeToString()], outputs)


def named(model: str) -> str:
    """The name of a model, if there is one."""
    if not model:
        raise InvalidInput("expected the name of a model, got none")
    return model


def _wants_final(parameters: dict[str, Scalar]) -> bool:
    """Whether the stream is to mark its end; the parameter is about the wire, so the model does not see it."""
    wanted = parameters.pop(WANTS_FINAL, False) if parameters else False
    if not isinstance(wanted, bool):
        raise InvalidInput(f"parameter '{WANTS_FINAL}': expected a bool, got {wanted!r}")
    return wanted


def _outputs(outputs: Sequence[Any]) -> tuple[tuple[str, ...], dict[str, int], dict[str, str]]:
    """The names of the requested outputs, how many of their best classes are wanted, and of which content types."""
    names: dict[str, None] = {}
    classes: dict[str, int] = {}
    types: dict[str, str] = {}
    for output in outputs:
        name = output.name
        if name in names:
            raise InvalidInput(f"output '{name}' already exists in request")
        names[name] = None
        parameters = read_parameters(output.parameters, f"output '{name}': ")
        if parameters:
            if count := oip.classes_wanted(parameters, name):
                classes[name] = count
            if content_type := oip.content_type_wanted(parameters, name):
                types[name] = content_type
    return tuple(names), classes, types


def _inputs(message: Any, raw: Sequence[Buffer], packed: Mapping[int, Packed], policy: Policy) -> dict[str, Tensor]:
    if raw and len(raw) != len(message.inputs):
        raise InvalidInput(f"expected {len(message.inputs)} 'raw_input_contents', one an input, got {len(raw)}")
    found: dict[str, Tensor] = {}
    for at, tensor in enumerate(message.inputs):
        name = tensor.name
        if raw and name not in found and not (tensor.parameters or at in packed or tensor.HasField("contents")):
            small = plain_raw(tensor.datatype, tensor.shape, raw[at], policy)
            if small is not None:
                found[name] = small
                continue
        where = f"input '{name}'"
        if name in found:
            raise InvalidInput(f"{where} already exists in request")
        if raw and (at in packed or tensor.HasField("contents")):
            raise InvalidInput(f"{where}: expected no 'contents' beside 'raw_input_contents'")
        parameters = read_parameters(tensor.parameters, f"{where}: ")
        kind, shape = _datatype(tensor.datatype, where), list(tensor.shape)
        if at in packed:
            found[name] = tensor_from_packed(where, kind, shape, packed[at], policy, parameters)
        elif raw:
            found[name] = tensor_from_raw(where, kind, shape, raw[at], policy, parameters)
        else:
            found[name] = tensor_from_contents(where, kind, shape, tensor.contents, policy, parameters)
    return found


def _datatype(name: str, where: str) -> Datatype:
    try:
        return datatype(name)
    except InvalidInput as fault:
        raise InvalidInput(f"{where}: {fault.message}") from fault
