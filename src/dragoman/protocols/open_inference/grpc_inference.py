"""Parse ModelInferRequest and format ModelInferResponse."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dragoman.core.calls import Infer, Inference, Request, Response
from dragoman.core.datatypes import BYTES, DATATYPES, Datatype, datatype
from dragoman.core.errors import InvalidInput
from dragoman.core.sizes import SHARED, THREAD
from dragoman.core.tensor import NONE, Scalar, Tensor
from dragoman.formats.grpc_messages import (
    PackedContents,
    format_raw_response,
    format_typed_response,
    message_class,
    parameters_from_proto,
    parameters_to_proto,
    parse_message,
    split_raw_contents,
    split_typed_contents,
    tensor_from_contents,
)
from dragoman.formats.raw import raw_from_tensor, tensor_from_raw
from dragoman.formats.shared_regions import REGION, SIZE, Region, RegionSlice, pop_slice, require_regions, write_output
from dragoman.protocols.open_inference import extensions as oip
from dragoman.protocols.open_inference.classification import parse_class_count
from dragoman.protocols.wire import Buffer, GrpcRequest, Policy

# Metadata of a request: how its response has its tensors, as the setting `grpc_output_contents`.
OUTPUT_CONTENTS = "dragoman-output-contents"
_NOT_PACKED: Mapping[int, PackedContents] = {}


class GrpcOutputOptions(msgspec.Struct, frozen=True):
    """Fields of the request that determine the format of the response.

    `raw` selects raw contents, and `classes` the outputs to replace by how many of their top classes. `final`: whether
    an empty response ends a stream, None if the request does not say it. `has_raw`: the inputs have raw contents, or
    there are none. `has_content_type`: the request or one of its inputs has a content type, as those of MLServer's
    clients have. `region_slices` are the outputs to write to shared memory. `held` are the regions of all tensors of
    the request.
    """

    id: str
    model: str
    version: str
    raw: bool
    classes: Mapping[str, int]
    final: bool | None
    has_raw: bool = False
    has_content_type: bool = False
    region_slices: Mapping[str, RegionSlice] = {}
    held: tuple[Region, ...] = ()


class _RequestedOutputs(msgspec.Struct, frozen=True):
    """Names of the requested outputs, and by name their class counts, content types and regions."""

    names: tuple[str, ...] = ()
    classes: Mapping[str, int] = {}
    content_types: Mapping[str, str] = {}
    region_slices: Mapping[str, RegionSlice] = {}


_NO_OUTPUTS = _RequestedOutputs()


def parse_infer_request(request: GrpcRequest, policy: Policy) -> tuple[Request[Inference], GrpcOutputOptions]:
    """Return the inference request and the options of its response. Raises InvalidInput naming the invalid field."""
    body, owner = request.body, request.caller.owner
    if owner:
        policy = policy.of(owner)
    if len(body) < SHARED:
        message = parse_message(message_class("ModelInferRequest"), body)
        raw, packed = message.raw_input_contents, _NOT_PACKED
    else:
        message, raw, packed = _parse_large(body, policy)
    # Each attribute of a message is a lookup of 0.1 us, so they are read once.
    model, version, id_ = message.model_name or require_model_name(""), message.model_version, message.id
    inputs, requested = message.inputs, message.outputs
    parameters: dict[str, Scalar] = {}
    final = None
    if message.parameters:
        parameters = parameters_from_proto(message.parameters, "")
        final = _pop_wants_final(parameters)
        oip.restore_unsigned(parameters)
    outputs = _parse_outputs(requested, policy) if requested else _NO_OUTPUTS
    has_content_type = "content_type" in parameters
    if raw and len(raw) != len(inputs):
        _check_raw_count(message, len(raw))
    held: tuple[Region, ...] = ()
    if policy.regions is not None:
        policy.regions.check_total([t.parameters[SIZE].int64_param for t in inputs if SIZE in t.parameters])
    tensors: dict[str, Tensor] = {}
    in_regions = 0
    for index, tensor in enumerate(inputs):
        name = tensor.name
        where = f"input '{name}'"
        if name in tensors:
            raise InvalidInput(f"{where} already exists in request")
        if raw and (index in packed or tensor.HasField("contents")):
            raise InvalidInput(f"{where}: expected no 'contents' beside 'raw_input_contents'")
        kind, shape = DATATYPES.get(tensor.datatype) or _parse_datatype(tensor.datatype, where), tensor.shape[:]
        its_parameters = NONE
        if tensor.parameters:
            its_parameters = parameters_from_proto(tensor.parameters, f"{where}: ")
            has_content_type |= "content_type" in its_parameters
            if (region_slice := pop_slice(its_parameters, where)) is not None:
                in_regions += 1
                contents = require_regions(policy.regions, where).read(region_slice, where)
                tensors[name] = tensor_from_raw(where, kind, shape, contents, policy, its_parameters)
                continue
        if raw:
            tensors[name] = tensor_from_raw(where, kind, shape, raw[index - in_regions], policy, its_parameters)
            continue
        if kind is BYTES and policy.dialect.length_shapes and index not in packed:
            shape = _text_shape(shape, tensor.contents.bytes_contents)
        typed = packed.get(index, tensor.contents)
        tensors[name] = tensor_from_contents(where, kind, shape, typed, policy, its_parameters)
    call = Infer(tensors, outputs.names, parameters or NONE, content_types=outputs.content_types)
    is_raw = bool(raw) or not inputs
    choice = request.metadata.get(OUTPUT_CONTENTS) or policy.grpc_output_contents
    if choice not in ("raw", "typed", "as-request"):
        text = f"metadata '{OUTPUT_CONTENTS}': expected raw, typed or as-request, got {choice[:32]!r}"
        raise InvalidInput(text)
    # Typed requests with content types come from clients of MLServer, some of which read typed contents only; the
    # clients of Triton and KServe read raw contents.
    wants_raw = choice != "typed" and (is_raw or (choice == "raw" and not has_content_type))
    if policy.regions is not None:
        in_memory = (tensor.parameters for tensor in (*inputs, *requested) if REGION in tensor.parameters)
        held = policy.regions.hold([parameters[REGION].string_param for parameters in in_memory])
    options = GrpcOutputOptions(
        id_, model, version, wants_raw, outputs.classes, final, is_raw, has_content_type,
        outputs.region_slices, held,
    )  # fmt: skip
    metadata = policy.forwarded_headers(request.metadata) if policy.forward_headers else {}
    oip.check_call(call, policy)
    return Request(call, model, version, id_, request.deadline_s, metadata), options


def _parse_large(body: Buffer, policy: Policy) -> tuple[Any, Sequence[Buffer], Mapping[int, PackedContents]]:
    """Return the message, its raw contents, and its typed contents that were split off before it was parsed."""
    apart = split_raw_contents(body)
    rest = body if apart is None else apart[0]
    typed = split_typed_contents(rest, policy) if len(rest) >= THREAD else None
    message = parse_message(message_class("ModelInferRequest"), rest if typed is None else typed[0])
    raw = message.raw_input_contents if apart is None else apart[1]
    return message, raw, _NOT_PACKED if typed is None else typed[1]


def format_infer_response(response: Response[Inference], options: GrpcOutputOptions) -> bytes:
    """Return the serialized ModelInferResponse."""
    message = format_infer_buffers(response, options)
    return message if isinstance(message, bytes) else b"".join(message)


def format_infer_buffers(response: Response[Inference], options: GrpcOutputOptions) -> bytes | Sequence[Buffer]:
    """Return the serialized ModelInferResponse; large raw contents are not copied but follow as views."""
    inference = response.answer
    outputs = inference.outputs
    if options.raw and not (options.region_slices or inference.parameters):
        for tensor in outputs.values():
            if tensor.parameters:
                break
        else:
            return format_raw_response(response, options.id)
    create = message_class("ModelInferResponse")
    message = create(model_name=response.model, model_version=response.version, id=options.id)
    if inference.parameters:
        parameters_to_proto(inference.parameters, message.parameters)
    for name, tensor in outputs.items():
        output = message.outputs.add(name=name, datatype=tensor.datatype.name, shape=tensor.shape)
        if tensor.parameters:
            parameters_to_proto(tensor.parameters, output.parameters)
    if options.region_slices:
        return _format_shared(message, outputs, options)
    if not options.raw and all(t.datatype.contents_field for t in outputs.values()):
        return format_typed_response(message, outputs.values())
    return format_raw_response(response, options.id, message)


def _format_shared(message: Any, outputs: Mapping[str, Tensor], options: GrpcOutputOptions) -> bytes:
    """Write the outputs that have a region of shared memory into it; their raw contents are empty."""
    for name, tensor in outputs.items():
        raw = raw_from_tensor(tensor)
        if name in options.region_slices:
            write_output(options.region_slices[name], name, raw, options.held)
            raw = b""
        message.raw_output_contents.append(bytes(raw))
    return bytes(message.SerializeToString())


def require_model_name(model: str) -> str:
    """Return the name of a model. Raises InvalidInput if it is empty."""
    if not model:
        raise InvalidInput("expected the name of a model, got none")
    return model


def _pop_wants_final(parameters: dict[str, Scalar]) -> bool | None:
    """Remove and return the parameter for an empty last response of a stream; models must not see it."""
    final = parameters.pop(oip.WANTS_FINAL, None) if parameters else None
    if not isinstance(final, bool | None):
        raise InvalidInput(f"parameter '{oip.WANTS_FINAL}': expected a bool, got {final!r}")
    return final


def _parse_outputs(outputs: Sequence[Any], policy: Policy) -> "_RequestedOutputs":
    names: dict[str, None] = {}
    classes: dict[str, int] = {}
    content_types: dict[str, str] = {}
    region_slices: dict[str, RegionSlice] = {}
    for output in outputs:
        name = output.name
        if name in names:
            raise InvalidInput(f"output '{name}' already exists in request")
        names[name] = None
        parameters = parameters_from_proto(output.parameters, f"output '{name}': ")
        if parameters:
            if count := parse_class_count(parameters, name):
                classes[name] = count
            if content_type := oip.parse_content_type(parameters, name):
                content_types[name] = content_type
            if region_slice := oip.parse_output_region(parameters, name, policy, "output can't set both"):
                region_slices[name] = region_slice
    return _RequestedOutputs(tuple(names), classes, content_types, region_slices)


def _text_shape(shape: list[int], texts: Sequence[bytes]) -> list[int]:
    """Return [1] for one text that has its length as its shape, as in MLServer's example custom-json; else shape."""
    return [1] if len(texts) == 1 and shape == [len(texts[0])] else shape


def _check_raw_count(message: Any, count: int) -> None:
    """Raise InvalidInput unless each input that is not in shared memory has raw contents."""
    expected = sum(REGION not in tensor.parameters for tensor in message.inputs)
    if count != expected:
        raise InvalidInput(f"expected {expected} 'raw_input_contents', one for each input, got {count}")


def _parse_datatype(name: str, where: str) -> Datatype:
    try:
        return datatype(name)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error.message}") from error
