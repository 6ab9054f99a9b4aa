"""LMI's inference API, as its containers promise it, and the contract of SageMaker."""

from collections.abc import Mapping, Sequence
from typing import Any

from dragoman.core.calls import Describe, Generate, Infer, ModelDescription, Request, Response
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
    Unaddressed,
    Unauthorized,
)
from dragoman.core.text import Generation
from dragoman.protocols import lmi_control
from dragoman.protocols.lmi_arrays import arrays_asked
from dragoman.protocols.lmi_formats import Formatter, dynamic_fault, to_json
from dragoman.protocols.lmi_model import lmi_model
from dragoman.protocols.lmi_request import Asked, asked, model_name
from dragoman.protocols.text import inquiry
from dragoman.protocols.text_chat import chat_asked
from dragoman.protocols.text_completions import completion_asked
from dragoman.protocols.wire import (
    JSON_TYPE,
    Exchange,
    Headers,
    HttpFault,
    HttpProtocol,
    HttpRequest,
    HttpResponse,
    HttpStream,
    Inquiry,
    Policy,
    Route,
    retry_after,
    row_of,
)
from dragoman.protocols.wire import Asked as Answered

# Faults that are about the request's way, in the shape of the server below LMI; the rest is LMI's own 424.
_TYPES: Sequence[tuple[type[DragomanError], int, str]] = (
    (Unaddressed, 400, "BadRequestException"),
    (NotSupported, 400, "BadRequestException"),
    (ModelNotFound, 404, "ModelNotFoundException"),
    (Unauthorized, 401, "UnauthorizedException"),
    (Forbidden, 403, "ForbiddenException"),
    (NotReady, 503, "ServiceUnavailableException"),
    (Overloaded, 503, "WlmCapacityException"),
    (DeadlineExceeded, 504, "TimeoutException"),
)
_HTTP_TYPES: Mapping[int, str] = {404: "ResourceNotFoundException", 405: "MethodNotAllowedException"}
_PATHS = (
    "/invocations",
    "/predictions/{model}",
    "/predictions/{model}/{version}",
    "/models/{model}/invoke",
    "/models/{model}/invocations",
)


class Lmi:
    """The endpoints of inference."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def invoke(self, http: HttpRequest) -> Inquiry[ModelDescription]:
        """An inference: the model is asked for first, since it has a say in what the body and the answer look like."""

        def then(response: Response[ModelDescription]) -> Answered:
            if Generate not in response.answer.calls and Infer in response.answer.calls:
                return arrays_asked(http, response.answer, self._policy)
            model = lmi_model(response.answer)
            found = asked(http, model, self._policy)
            if isinstance(found, Mapping):  # as TGI and vLLM take OpenAI's bodies at this path
                answers = chat_asked if "messages" in found else completion_asked
                return answers(found, http, self._policy, model.name)
            return self._generate(found, http, Formatter(found, model), model.name)

        told = inquiry(Generate(prompts=()), http, self._policy, model_name(http))
        return Inquiry(Request(Describe(Generate, Infer), told.model, told.version), then)

    def _generate(self, found: Asked, http: HttpRequest, formatter: Formatter, model: str) -> Answered:
        # LMI: of several texts the best is known at the end, so a stream of it holds all back until then.
        stream = formatter.streams and not formatter.ranked
        call = Generate(prompts=found.inputs, sampling=found.sampling, stream=stream)
        request: Request[Generation] = inquiry(call, http, self._policy, model)

        def fault(error: DragomanError) -> HttpResponse:
            return _failed(error, found, formatter)

        if formatter.streams:
            return HttpStream(request, formatter.piece, formatter.error, b"", formatter.headers, fault)
        return Exchange(request, formatter.whole, fault)


def _failed(error: DragomanError, found: Asked, formatter: Formatter) -> HttpResponse:
    """The answer to a request that went wrong before anything was sent."""
    headers = (JSON_TYPE, *found.given.headers)
    if isinstance(error, ServerError | InvalidInput) and not found.rolling:
        return HttpResponse(424, (to_json(dynamic_fault(error)),), headers)
    if isinstance(error, ServerError) and not formatter.streams:
        return HttpResponse(424, (formatter.failed(),), headers)
    return write_error(error)


def protocol(policy: Policy) -> HttpProtocol:
    """The protocol's table."""
    at = Lmi(policy)
    routes = [Route("POST", path, at.invoke) for path in _PATHS]
    return HttpProtocol("LMI", (*routes, *lmi_control.routes(policy)), write_error)


def write_error(fault: DragomanError | HttpFault) -> HttpResponse:
    """LMI: `{"error": ..., "code": 424}` for what was asked wrongly; code, type and message for what got nowhere."""
    if isinstance(fault, HttpFault):
        kind = _HTTP_TYPES.get(fault.status, "BadRequestException" if fault.status < 500 else "InternalServerException")
        return _json({"code": fault.status, "type": kind, "message": fault.message}, fault.status, fault.headers)
    row = row_of(fault, _TYPES)
    if row is None:
        return _json({"error": fault.message, "code": 424}, 424)
    status, name = row
    return _json({"code": status, "type": name, "message": fault.message}, status, retry_after(fault))


def _json(value: Any, status: int, headers: Headers = ()) -> HttpResponse:
    return HttpResponse(status, (to_json(value),), (JSON_TYPE, *headers))
