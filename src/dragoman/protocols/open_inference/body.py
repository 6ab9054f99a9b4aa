"""What a REST request of the Open Inference Protocol asks: its body becomes a Request, and the form of its answer."""

from collections.abc import Mapping, Sequence

import msgspec

from dragoman.core.calls import Infer, Inference, Request
from dragoman.core.errors import InvalidInput
from dragoman.formats.body import HEADER_LENGTH, divide, read_request
from dragoman.formats.json_data import PARSER_FAULTS, told
from dragoman.formats.json_scan import check_json
from dragoman.formats.request import JsonParameters, RequestBody, Requested, told_parameters
from dragoman.protocols.open_inference.extensions import check_counts, classes_wanted, content_type_wanted, deadline_s
from dragoman.protocols.wire import HttpRequest, Policy


class ControlBody(msgspec.Struct):
    """What the index and the loading and unloading of models are told."""

    ready: bool | None = None
    parameters: JsonParameters | None = None


_CONTROL = msgspec.json.Decoder(ControlBody | None)


class Wanted(msgspec.Struct, frozen=True):
    """How a caller wants the answer: the names of its outputs, and of these which in binary form, which as best classes
    and which as of a content type."""

    binary: bool
    names: tuple[str, ...] = ()
    outputs: Mapping[str, bool] = {}
    classes: Mapping[str, int] = {}
    content_types: Mapping[str, str] = {}

    def is_binary(self, name: str) -> bool:
        return self.outputs.get(name, self.binary)


_AS_JSON = Wanted(False)


def address(http: HttpRequest) -> tuple[str, str]:
    """The model and version in the path, "" where there is none."""
    return http.params.get("model", ""), http.params.get("version", "")


def read_infer(http: HttpRequest, policy: Policy) -> tuple[Request[Inference], Wanted, str | None]:
    """The request for inference, how its answer is wanted, and its id; InvalidInput or NotSupported names what is
    wrong."""
    header, head, rest = http.headers.get(HEADER_LENGTH), http.body, None
    if header is not None:
        head, rest = divide(head, header)
        if not len(head) and rest is not None:  # OIP, binary extension: the body is the one input's bytes
            return Request(Infer({}, raw=bytes(rest)), *address(http)), Wanted(True), None
    elif not len(head):
        raise InvalidInput("the request body is empty; expected an inference request")
    try:
        body = read_request(head, rest, policy)
    except InvalidInput as fault:
        if header is None and "octet-stream" in http.headers.get("content-type", ""):
            hint = "binary tensor data needs the header Inference-Header-Content-Length"
            raise InvalidInput(f"{fault.message}; {hint}") from fault
        raise
    metadata = policy.forwarded(http.headers) if policy.forward_headers else {}
    call, wanted, deadline = Infer(body.inputs), _AS_JSON, None
    if body.parameters or body.outputs or len(body.inputs) != 1:
        call, wanted = _asked(body, policy)
        deadline = deadline_s(body.parameters) if body.parameters else None
    return Request(call, *address(http), body.id or "", deadline, metadata), wanted, body.id


def _asked(body: RequestBody, policy: Policy) -> tuple[Infer, Wanted]:
    """The call that a request makes, and how its answer is wanted."""
    binary = body.parameters.pop("binary_data_output", False) if body.parameters else False
    wanted = _wanted(binary, body.outputs)
    call = Infer(body.inputs, wanted.names, body.parameters, content_types=wanted.content_types)
    check_counts(call, policy)
    return call, wanted


def read_control(http: HttpRequest, policy: Policy) -> ControlBody:
    """The body of a request about the repository, which may be left out."""
    if not len(http.body):
        return ControlBody()
    body = bytes(http.body)
    check_json(body, policy)
    try:
        return _CONTROL.decode(body) or ControlBody()
    except PARSER_FAULTS as fault:
        raise InvalidInput(f"the request is not valid: {told(fault)}") from fault


def _wanted(binary: object, outputs: Sequence[Requested]) -> Wanted:
    forms: dict[str, bool] = {}
    classes: dict[str, int] = {}
    types: dict[str, str] = {}
    for output in outputs:
        if not output.parameters:
            continue
        name, flag = output.name, output.parameters.get("binary_data")
        if len(output.parameters) == 1 and type(flag) is bool:  # as in most requests
            forms[name] = flag
            continue
        parameters = told_parameters(output.parameters)
        if "binary_data" in parameters:
            forms[name] = _flag(parameters["binary_data"], f"output '{name}': parameter 'binary_data'")
        if count := classes_wanted(parameters, name):
            classes[name] = count
        if content_type := content_type_wanted(parameters, name):
            types[name] = content_type
    names = tuple([output.name for output in outputs])
    every = _flag(binary, "parameter 'binary_data_output'")
    some = every or True in forms.values()  # forms that all say JSON say nothing
    return Wanted(every, names, forms if some else {}, classes, types)


def _flag(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(f"{what}: expected true or false, got {value!r}")
    return value
