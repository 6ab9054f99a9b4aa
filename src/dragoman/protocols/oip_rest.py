"""Open Inference Protocol over REST, with the binary tensor data extension."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from dragoman.core.calls import (
    Describe,
    DescribeServer,
    Index,
    Infer,
    Inference,
    ListModels,
    Live,
    Load,
    Ready,
    Request,
    Response,
    Unload,
)
from dragoman.core.datatypes import datatype
from dragoman.core.errors import (
    DeadlineExceeded,
    DragomanError,
    Forbidden,
    InvalidInput,
    ModelNotFound,
    NotReady,
    NotSupported,
    Overloaded,
    ServerError,
    Unauthorized,
)
from dragoman.core.signature import TensorSpec
from dragoman.core.tensor import Parameters, Tensor
from dragoman.protocols.oip import (
    check_counts,
    classes_wanted,
    classified,
    deadline_s,
    raw_from_tensor,
    tensor_from_raw,
)
from dragoman.protocols.oip_json import PARSER_FAULTS, array_from_json, json_from_tensor, told
from dragoman.protocols.wire import (
    JSON_TYPE,
    Buffer,
    Exchange,
    Headers,
    HttpFault,
    HttpProtocol,
    HttpRequest,
    HttpResponse,
    HttpStream,
    Policy,
    Route,
    json_response,
)

HEADER_LENGTH = "inference-header-content-length"

_STATUS: Sequence[tuple[type[DragomanError], int]] = (
    (InvalidInput, 400),
    (NotSupported, 400),
    (ModelNotFound, 404),
    (Unauthorized, 401),
    (Forbidden, 403),
    (NotReady, 503),
    (Overloaded, 503),
    (DeadlineExceeded, 504),
    (ServerError, 500),
)


# --- the envelope, as it stands on the wire ------------------------------------------------------------------

_Parameters = dict[str, str | bool | int | float]


class _Input(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    parameters: _Parameters | None = None
    data: Any = msgspec.UNSET


class _RawInput(_Input):
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # parsed once its datatype is known


class _Output(msgspec.Struct):
    name: str
    parameters: _Parameters | None = None


class _Body(msgspec.Struct):
    inputs: list[_RawInput]
    id: str | None = None
    parameters: _Parameters | None = None
    outputs: list[_Output] | None = None


class _LiteralBody(_Body):
    inputs: list[_Input]  # type: ignore[assignment]


class _Control(msgspec.Struct):
    ready: bool = False
    parameters: _Parameters | None = None


_BODY = msgspec.json.Decoder(_Body)
_CONTROL = msgspec.json.Decoder(_Control | None)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """How a caller wants the answer: its id, which outputs in binary form, and which as best classes."""

    id: str | None
    binary: bool
    outputs: Mapping[str, bool]
    classes: Mapping[str, int]

    def is_binary(self, name: str) -> bool:
        return self.outputs.get(name, self.binary)


class OpenInferenceRest:
    """The endpoints. Each is a pure function of the request."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    # --- inference ---------------------------------------------------------------------------------------

    def infer(self, http: HttpRequest) -> Exchange[Inference, HttpResponse]:
        request, wanted = self._read(http)

        def reply(response: Response[Inference]) -> HttpResponse:
            return self._write(response, wanted)

        return Exchange(request, reply)

    def infer_stream(self, http: HttpRequest) -> HttpStream[Inference]:
        """Not in the specification: the answers of a streaming model as server-sent events."""
        request, wanted = self._read(http)
        if wanted.binary or any(wanted.outputs.values()):
            raise InvalidInput("a stream of events carries JSON; expected no binary outputs")

        def piece(response: Response[Inference]) -> bytes:
            return b"data: " + b"".join(self._write(response, wanted).body) + b"\n\n"

        def error(fault: DragomanError) -> bytes:
            return b"data: " + orjson.dumps({"error": fault.message}) + b"\n\n"

        headers = (("content-type", "text/event-stream"), ("cache-control", "no-cache"))
        return HttpStream(request, piece, error, headers=headers)

    def _read(self, http: HttpRequest) -> tuple[Request[Inference], _Wanted]:
        head, rest = _divide(http)
        if not len(head) and rest is not None:
            raw = Infer({}, raw=bytes(rest))
            return Request(raw, *_address(http)), _Wanted(None, True, {}, {})
        body = self._parse(head)
        parameters = dict(body.parameters or {})
        binary = _flag(parameters.pop("binary_data_output", False), "binary_data_output")
        outputs = body.outputs or []
        wanted = _Wanted(
            body.id,
            binary,
            {
                o.name: _flag((o.parameters or {})["binary_data"], "binary_data")
                for o in outputs
                if "binary_data" in (o.parameters or {})
            },
            {o.name: n for o in outputs if (n := classes_wanted(o.parameters or {}, o.name))},
        )
        call = Infer(self._tensors(body.inputs, rest), tuple(o.name for o in outputs), parameters)
        deadline = deadline_s(parameters)
        return Request(check_counts(call, self._policy), *_address(http), body.id or "", deadline), wanted

    def _parse(self, head: Buffer) -> _Body:
        if bytes(head[:3]) == b"\xef\xbb\xbf":
            head = head[3:]
        try:
            body = _BODY.decode(head)
        except PARSER_FAULTS as fault:
            literal = _with_literals(head) if self._policy.nonfinite == "literal" else None
            if literal is None:
                raise InvalidInput(f"the request is not an inference request: {told(fault)}") from fault
            return literal
        _check_depth(head, [i.data for i in body.inputs if isinstance(i.data, msgspec.Raw)], self._policy)
        return body

    def _tensors(self, inputs: Sequence[_Input], rest: Buffer | None) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        at, left = 0, memoryview(rest or b"")
        for given in inputs:
            if given.name in tensors:
                raise InvalidInput(f"input '{given.name}' already exists in request")
            parameters = dict(given.parameters or {})
            size = parameters.pop("binary_data_size", None)
            if "shared_memory_region" in parameters:
                raise NotSupported(f"input '{given.name}': shared memory is not supported; send 'data' or binary data")
            if size is None:
                tensors[given.name] = self._from_json(given, parameters)
                continue
            raw = _slice(given, size, left[at:])
            at += len(raw)
            kind = _named_datatype(given)
            tensors[given.name] = tensor_from_raw(given.name, kind, given.shape, raw, self._policy, parameters)
        if at != len(left):
            raise InvalidInput(f"unexpected additional input data: {len(left) - at} bytes are left after all inputs")
        return tensors

    def _from_json(self, given: _Input, parameters: Parameters) -> Tensor:
        if given.data is msgspec.UNSET:
            raise InvalidInput(f"input '{given.name}': expected 'data', or 'binary_data_size' in 'parameters'")
        kind = _named_datatype(given)
        return Tensor(array_from_json(given.name, kind, given.shape, given.data, self._policy), kind, parameters)

    def _write(self, response: Response[Inference], wanted: _Wanted) -> HttpResponse:
        answer = classified(response.answer, wanted.classes)
        blobs: list[Buffer] = []
        outputs = []
        for name, tensor in answer.outputs.items():
            output: dict[str, Any] = {"name": name, "datatype": tensor.datatype.name, "shape": tensor.data.shape}
            parameters: dict[str, Any] = dict(tensor.parameters)
            raw = raw_from_tensor(tensor) if wanted.is_binary(name) else b""
            if len(raw):  # an empty output has no binary form and goes as `"data": []`
                parameters["binary_data_size"] = len(raw)
                blobs.append(raw)
            if parameters:
                output["parameters"] = parameters
            if not len(raw):
                output["data"] = json_from_tensor(name, tensor, self._policy)
            outputs.append(output)
        head = orjson.dumps(_envelope(response, wanted.id, outputs), option=orjson.OPT_SERIALIZE_NUMPY)
        if not blobs:
            return HttpResponse(200, (head,), (JSON_TYPE,))
        headers: Headers = (("content-type", "application/octet-stream"), (HEADER_LENGTH, str(len(head))))
        return HttpResponse(200, (head, *blobs), headers)

    # --- health and metadata -------------------------------------------------------------------------------

    def live(self, http: HttpRequest) -> Exchange[bool, HttpResponse]:
        return Exchange(Request(Live()), lambda r: self._health(r.answer, {"live": r.answer}))

    def ready(self, http: HttpRequest) -> Exchange[bool, HttpResponse]:
        def reply(response: Response[bool]) -> HttpResponse:
            name = {"name": response.model} if response.model else {}
            return self._health(response.answer, {**name, "ready": response.answer})

        return Exchange(Request(Ready(), *_address(http)), reply)

    def _health(self, answer: bool, body: object) -> HttpResponse:
        # OIP: 200 is true, 4xx is false, and the body should be empty.
        status = 200 if answer else 400
        return json_response(body, status) if self._policy.health_json else HttpResponse(status)

    def server(self, http: HttpRequest) -> Exchange[Any, HttpResponse]:
        return Exchange(
            Request(DescribeServer()),
            lambda r: json_response(
                {"name": r.answer.name, "version": r.answer.version, "extensions": r.answer.extensions}
            ),
        )

    def models(self, http: HttpRequest) -> Exchange[tuple[str, ...], HttpResponse]:
        return Exchange(Request(ListModels()), lambda r: json_response({"models": r.answer}))

    def model(self, http: HttpRequest) -> Exchange[Any, HttpResponse]:
        def reply(response: Response[Any]) -> HttpResponse:
            found = response.answer
            return json_response(
                {
                    "name": found.name,
                    **({"versions": found.versions} if found.versions else {}),
                    "platform": found.platform,
                    "inputs": _metadata(found.signature.inputs),
                    "outputs": _metadata(found.signature.outputs),
                }
            )

        return Exchange(Request(Describe(), *_address(http)), reply)

    # --- model control ---------------------------------------------------------------------------------------

    def index(self, http: HttpRequest) -> Exchange[Any, HttpResponse]:
        call = Index(_token(http), _control(http).ready)
        return Exchange(
            Request(call),
            lambda r: json_response(
                [{"name": e.name, "version": e.version, "state": e.state, "reason": e.reason} for e in r.answer]
            ),
        )

    def load(self, http: HttpRequest) -> Exchange[None, HttpResponse]:
        for key in _control(http).parameters or {}:
            if key == "config" or key.startswith("file:"):
                raise NotSupported(f"parameter '{key}': models are loaded from the server's own disk as they lie there")
        return Exchange(Request(Load(_token(http)), http.params["model"]), lambda r: HttpResponse(200))

    def unload(self, http: HttpRequest) -> Exchange[None, HttpResponse]:
        _control(http)
        return Exchange(Request(Unload(_token(http)), http.params["model"]), lambda r: HttpResponse(200))


def protocol(policy: Policy) -> HttpProtocol:
    """The protocol's table."""
    at = OpenInferenceRest(policy)
    routes = [
        Route("GET", "/v2", at.server),
        Route("GET", "/v2/health/live", at.live),
        Route("GET", "/v2/health/ready", at.ready),
        Route("GET", "/v2/models", at.models),
        Route("POST", "/v2/repository/index", at.index),
        Route("POST", "/v2/repository/models/{model}/load", at.load),
        Route("POST", "/v2/repository/models/{model}/unload", at.unload),
    ]
    for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        routes += [
            Route("GET", model, at.model),
            Route("GET", f"{model}/ready", at.ready),
            Route("POST", f"{model}/infer", at.infer),
            Route("POST", f"{model}/infer_stream", at.infer_stream),
        ]
    return HttpProtocol("Open Inference (V2)", tuple(routes), write_error)


def write_error(fault: DragomanError | HttpFault) -> HttpResponse:
    """OIP: a 4xx or 5xx status and the body `{"error": message}`, on every path."""
    if isinstance(fault, HttpFault):
        return json_response({"error": fault.message}, fault.status, fault.headers)
    status = next((s for kind, s in _STATUS if isinstance(fault, kind)), 500)
    headers: Headers = ()
    if fault.retry_after_s is not None:
        headers = (("retry-after", str(math.ceil(fault.retry_after_s))),)
    if status == 401:
        headers = (("www-authenticate", "Bearer"),)
    return json_response({"error": fault.message}, status, headers)


# --- small readers ---------------------------------------------------------------------------------------------


def _address(http: HttpRequest) -> tuple[str, str]:
    return http.params.get("model", ""), http.params.get("version", "")


def _token(http: HttpRequest) -> str:
    scheme, _, token = http.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _control(http: HttpRequest) -> _Control:
    if not len(http.body):
        return _Control()
    try:
        return _CONTROL.decode(http.body) or _Control()
    except PARSER_FAULTS as fault:
        raise InvalidInput(f"the request is not valid: {told(fault)}") from fault


def _divide(http: HttpRequest) -> tuple[Buffer, Buffer | None]:
    """The JSON and the binary data behind it, None where the request has no binary form."""
    given = http.headers.get(HEADER_LENGTH)
    body = memoryview(http.body)
    if given is None:
        if not len(body):
            raise InvalidInput("the request body is empty; expected an inference request")
        return body, None
    if not given.strip().isascii() or not given.strip().isdecimal():
        raise InvalidInput(f"Unable to parse Inference-Header-Content-Length, got: {given}")
    length = int(given)
    if length > len(body):
        raise InvalidInput(f"inference header size should be in range (0, {len(body)}), got: {length}")
    return body[:length], body[length:]


def _with_literals(head: Buffer) -> _Body | None:
    """The request with NaN, Infinity and -Infinity written as bare words, which only Python's own parser reads."""
    try:
        return msgspec.convert(json.loads(bytes(head)), _LiteralBody)
    except (ValueError, RecursionError):
        return None


def _check_depth(head: Buffer, data: Sequence[msgspec.Raw], policy: Policy) -> None:
    """Refuse what nests too deep outside of tensor data, whose depth its rank bounds."""
    text = bytes(head)
    openings = text.count(b"[") + text.count(b"{")
    if openings <= policy.max_json_depth:
        return
    for raw in data:
        text = text.replace(bytes(raw), b"0", 1) if len(raw) > policy.max_json_depth else text
    depth = deepest = 0
    in_text = escaped = False
    for byte in text if text.count(b"[") + text.count(b"{") > policy.max_json_depth else b"":
        if in_text:
            in_text = escaped or byte != 0x22
            escaped = not escaped and byte == 0x5C
        elif byte == 0x22:
            in_text = True
        elif byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b"]}":
            depth -= 1
    if deepest > policy.max_json_depth:
        raise InvalidInput(f"JSON nests {deepest} deep; the limit is {policy.max_json_depth}")


def _flag(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(f"parameter '{name}': expected true or false, got {value!r}")
    return value


def _named_datatype(given: _Input) -> Any:
    try:
        return datatype(given.datatype)
    except InvalidInput as fault:
        raise InvalidInput(f"input '{given.name}': {fault.message}") from fault


def _slice(given: _Input, size: object, left: memoryview) -> memoryview:
    if given.data is not msgspec.UNSET:
        raise InvalidInput(
            f"input '{given.name}': Input must set only one of the following fields: 'data', 'binary_data_size' in "
            "'parameters'"
        )
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise InvalidInput(f"input '{given.name}': 'binary_data_size' expects a number of bytes, got {size!r}")
    if size > len(left):
        raise InvalidInput(f"input '{given.name}': expecting {size - len(left)} additional bytes of binary data")
    return left[:size]


def _envelope(response: Response[Inference], id_: str | None, outputs: list[Any]) -> dict[str, Any]:
    parameters = dict(response.answer.parameters)
    return {
        **({"id": id_} if id_ is not None else {}),
        "model_name": response.model,
        **({"model_version": response.version} if response.version else {}),
        **({"parameters": parameters} if parameters else {}),
        "outputs": outputs,
    }


def _metadata(specs: tuple[TensorSpec, ...]) -> list[dict[str, Any]]:
    return [
        {"name": s.name, "datatype": s.datatype.name, "shape": s.shape}
        for s in specs
        if s.datatype is not None and s.shape is not None
    ]
