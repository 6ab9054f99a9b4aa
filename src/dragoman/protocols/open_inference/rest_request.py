"""Parse REST requests of the Open Inference Protocol."""

from collections.abc import Mapping, Sequence

import msgspec

from dragoman.core.calls import Infer, Inference, Request
from dragoman.core.errors import InvalidInput
from dragoman.formats.body import (
    HEADER_LENGTH,
    JsonParameters,
    RequestedOutput,
    parse_parameters,
    parse_request,
    split_body,
)
from dragoman.formats.json_numbers import PARSER_ERRORS, describe_parser_error
from dragoman.formats.json_scan import check_json
from dragoman.formats.shared_regions import Region, RegionSlice
from dragoman.protocols.open_inference.classification import parse_class_count
from dragoman.protocols.open_inference.extensions import check_call, parse_content_type, parse_output_region
from dragoman.protocols.wire import HttpRequest, Policy


class ControlBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a request to list, load or unload models."""

    ready: bool | None = None
    parameters: JsonParameters | None = None


_CONTROL = msgspec.json.Decoder(ControlBody | None)


class RestOutputOptions(msgspec.Struct, frozen=True):
    """Options of the outputs of a response.

    `names` are the requested outputs. By name, `outputs` overrides `binary`, `classes` is the number of top classes to
    return, `content_types` the content type to encode, and `regions` the shared memory to write to. `held` are the
    regions of all tensors of the request.
    """

    binary: bool
    names: tuple[str, ...] = ()
    outputs: Mapping[str, bool] = {}
    classes: Mapping[str, int] = {}
    content_types: Mapping[str, str] = {}
    regions: Mapping[str, RegionSlice] = {}
    held: tuple[Region, ...] = ()

    def is_binary(self, name: str) -> bool:
        return self.outputs.get(name, self.binary)


_JSON_OUTPUTS = RestOutputOptions(False)


def path_model(http: HttpRequest) -> tuple[str, str]:
    """Return the model and version in the path, "" if it has none."""
    return http.params.get("model", ""), http.params.get("version", "")


def parse_infer_request(http: HttpRequest, policy: Policy) -> tuple[Request[Inference], RestOutputOptions, str | None]:
    """Return the inference request, the options of its outputs and its id.

    Raises InvalidInput or NotSupported naming the field that is wrong.
    """
    header, head, rest = http.headers.get(HEADER_LENGTH), http.body, None
    if header is not None:
        head, rest = split_body(head, header)
        if not len(head) and rest is not None:  # OIP, binary extension: the body is the one input's bytes
            return Request(Infer({}, raw=bytes(rest)), *path_model(http)), RestOutputOptions(True), None
    elif not len(head):
        raise InvalidInput("the request body is empty; expected an inference request")
    try:
        owner = http.caller.owner
        body = parse_request(head, rest, policy.of(owner) if owner else policy)
    except InvalidInput as error:
        if header is None and "octet-stream" in http.headers.get("content-type", ""):
            hint = "binary tensor data needs the header Inference-Header-Content-Length"
            raise InvalidInput(f"{error.message}; {hint}") from error
        raise
    metadata = policy.forwarded_headers(http.headers) if policy.forward_headers else {}
    if not (body.parameters or body.outputs):
        call, options = Infer(body.inputs), _JSON_OUTPUTS
    else:
        binary = body.parameters.pop("binary_data_output", False) if body.parameters else False
        options = _parse_outputs(binary, body.outputs, policy)
        call = Infer(body.inputs, options.names, body.parameters, content_types=options.content_types)
    check_call(call, policy)
    if body.regions:
        options = msgspec.structs.replace(options, held=body.regions)
    model, version = http.params.get("model", ""), http.params.get("version", "")
    return Request(call, model, version, body.id or "", None, metadata), options, body.id


def parse_control_request(http: HttpRequest, policy: Policy) -> ControlBody:
    """Return the body of a request to list, load or unload models, which may be empty."""
    if not len(http.body):
        return ControlBody()
    body = bytes(http.body)
    check_json(body, policy)
    try:
        return _CONTROL.decode(body) or ControlBody()
    except PARSER_ERRORS as error:
        raise InvalidInput(f"the request is not valid: {describe_parser_error(error)}") from error


def _parse_outputs(binary: object, outputs: Sequence[RequestedOutput], policy: Policy) -> RestOutputOptions:
    binary_outputs: dict[str, bool] = {}
    classes: dict[str, int] = {}
    content_types: dict[str, str] = {}
    regions: dict[str, RegionSlice] = {}
    names: list[str] = []
    for output in outputs:
        name = output.name
        names.append(name)
        if not output.parameters:
            continue
        flag = output.parameters.get("binary_data")
        if len(output.parameters) == 1 and type(flag) is bool:  # as in most requests
            binary_outputs[name] = flag
            continue
        parameters = parse_parameters(output.parameters)
        if "binary_data" in parameters:
            binary_outputs[name] = _parse_flag(parameters["binary_data"], f"output '{name}': parameter 'binary_data'")
        if count := parse_class_count(parameters, name):
            classes[name] = count
        if region_slice := parse_output_region(parameters, name, policy, "Output can't set both"):
            regions[name] = region_slice
        if content_type := parse_content_type(parameters, name):
            content_types[name] = content_type
    default = binary if type(binary) is bool else _parse_flag(binary, "parameter 'binary_data_output'")
    has_binary = default or True in binary_outputs.values()
    return RestOutputOptions(
        default, tuple(names), binary_outputs if has_binary else {}, classes, content_types, regions
    )


def _parse_flag(value: object, field: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(f"{field}: expected true or false, got {value!r}")
    return value
