"""UM-Bridge over HTTP: simulators as functions of vectors, with their derivatives."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from dragoman.core import error_texts
from dragoman.core.calls import (
    ApplyHessian,
    ApplyJacobian,
    Call,
    Describe,
    DescribeModels,
    Gradient,
    Infer,
    Inference,
    ModelCall,
    ModelDescription,
    Request,
    Response,
    SignatureFor,
)
from dragoman.core.datatypes import FP64
from dragoman.core.errors import (
    DeadlineExceeded,
    DragomanError,
    Forbidden,
    InvalidInput,
    InvalidOutput,
    ModelNotFound,
    NotReady,
    NotSupported,
    Overloaded,
    RateLimited,
    ServerError,
    Unauthorized,
)
from dragoman.core.signature import Signature
from dragoman.core.tensor import NONE, Tensor
from dragoman.core.vector_binding import VectorSignature, missing_reason, vector_signature
from dragoman.protocols.wire import (
    JSON_TYPE,
    EndpointResult,
    EngineCall,
    Headers,
    HttpError,
    HttpProtocol,
    HttpRequest,
    HttpResponse,
    Policy,
    PreliminaryCall,
    Route,
    error_headers,
    find_error_row,
    message_response,
    replace_surrogates,
)
from dragoman_simulators.umbridge import messages
from dragoman_simulators.umbridge.requests import InvalidUmBridgeRequest, UmBridgeRequest, parse_umbridge_request
from dragoman_simulators.umbridge.responses import serialize_derivative, serialize_evaluation

PROTOCOL_VERSION = 1.0
_JSON_HEADERS: Headers = (JSON_TYPE,)

# For each verb: its call, and the fields that a request needs.
VERBS: Mapping[str, tuple[type[Call[Any]], tuple[str, ...]]] = {
    "Evaluate": (Infer, ("input",)),
    "Gradient": (Gradient, ("outWrt", "inWrt", "input", "sens")),
    "ApplyJacobian": (ApplyJacobian, ("outWrt", "inWrt", "input", "vec")),
    "ApplyHessian": (ApplyHessian, ("outWrt", "inWrt1", "inWrt2", "input", "sens", "vec")),
}

_POINT = VERBS["Evaluate"][1]

# The first matching class decides. UM-Bridge names four types of errors; the other names are ours.
_ERRORS: Sequence[tuple[type[DragomanError], int, str]] = (
    (ModelNotFound, 400, "ModelNotFound"),
    (NotSupported, 400, "UnsupportedFeature"),
    (InvalidInput, 400, "InvalidInput"),
    (Unauthorized, 401, "Unauthorized"),
    (Forbidden, 403, "Forbidden"),
    (NotReady, 503, "NotReady"),
    (Overloaded, 503, "Overloaded"),
    (RateLimited, 429, "RateLimited"),
    (DeadlineExceeded, 504, "DeadlineExceeded"),
    (InvalidOutput, 500, "InvalidOutput"),
    (ServerError, 500, "ModelError"),
)


class UmBridge(msgspec.Struct, frozen=True):
    """The endpoints. Each is a pure function of the request."""

    policy: Policy

    def info(self, http: HttpRequest) -> EndpointResult:
        """List the models once all are loaded or failed: UM-Bridge's load balancer reads the list only once."""

        def format_response(response: Response[tuple[ModelDescription, ...]]) -> HttpResponse:
            names = [model.name for model in response.answer if any(support(model).values())]
            return message_response(messages.SimulatorNames(PROTOCOL_VERSION, names))

        return EngineCall(Request(DescribeModels(after_start=True)), format_response)

    def model_info(self, http: HttpRequest) -> EndpointResult:
        message = self.parse(http, ())
        if isinstance(message, PreliminaryCall):
            return message
        return EngineCall(
            Request(Describe(), message.name),
            lambda response: message_response(messages.Support(support(response.answer))),
        )

    def sizes(self, sizes_of: Callable[[VectorSignature], msgspec.Struct], http: HttpRequest) -> EndpointResult:
        """Return the sizes of a model's inputs or outputs for the config of the request."""
        message = self.parse(http, ())
        if isinstance(message, PreliminaryCall):
            return message

        def format_response(response: Response[Signature]) -> HttpResponse:
            signature = vector_signature(response.answer)
            if signature is None:
                raise NotSupported(f"model '{response.model}': not all its tensors are float vectors of known sizes")
            return message_response(sizes_of(signature))

        return EngineCall(Request(SignatureFor(message.config or NONE), message.name), format_response)

    def evaluate(self, http: HttpRequest) -> EndpointResult:
        message = self.parse(http, _POINT, "Evaluate")
        if isinstance(message, PreliminaryCall):
            return message
        call = Infer({}, (), NONE, None, positional_inputs(message), message.config or NONE)
        return EngineCall(self.request(call, message, http), self._format_evaluation, _format_evaluate_error)

    def derivative(self, verb: str, http: HttpRequest) -> EndpointResult:
        message = self.parse(http, VERBS[verb][1], verb)
        if isinstance(message, PreliminaryCall):
            return message
        request = self.request(derivative_call(verb, message), message, http)
        return EngineCall(request, self._format_derivative, partial(_format_verb_error, verb))

    # --- requests ------------------------------------------------------------------------------------------

    def parse(
        self, http: HttpRequest, required: Sequence[str], verb: str = ""
    ) -> UmBridgeRequest | PreliminaryCall[Any]:
        """Return the request in a body; if it is invalid, a call that first checks that the model supports the verb."""
        if not len(http.body):
            raise InvalidInput("the request body is empty; expected a JSON object")
        message = parse_umbridge_request(http.body, self.policy)
        if isinstance(message, InvalidUmBridgeRequest):
            return invalid_request(message.name, verb, message.error)
        if not message.name:
            raise ModelNotFound(error_texts.unknown_model(""))
        for key in required:
            if getattr(message, key) is msgspec.UNSET:
                error = InvalidInput(f"'{key}' is missing; a request to /{verb} needs {', '.join(required)}")
                return invalid_request(message.name, verb, error)
        return message

    def request(self, call: ModelCall[Any], message: UmBridgeRequest, http: HttpRequest) -> Request[Any]:
        if not self.policy.forward_headers:
            return Request(call, message.name)
        return Request(call, message.name, metadata=self.policy.forwarded_headers(http.headers))

    # --- responses -----------------------------------------------------------------------------------------

    def _format_evaluation(self, response: Response[Inference]) -> HttpResponse:
        return HttpResponse(200, (serialize_evaluation(response.answer.outputs, self.policy),), _JSON_HEADERS)

    def _format_derivative(self, response: Response[Tensor]) -> HttpResponse:
        return HttpResponse(200, (serialize_derivative(response.answer.data, self.policy),), _JSON_HEADERS)


def positional_inputs(message: UmBridgeRequest) -> tuple[Tensor, ...]:
    return tuple([Tensor(vector, FP64) for vector in message.input or ()])


def derivative_call(verb: str, message: UmBridgeRequest) -> ModelCall[Tensor]:
    """Return the derivative call of a request that has the fields of its verb."""
    fields: Any = message
    inputs, config, output = positional_inputs(message), fields.config or NONE, fields.outWrt
    match verb:
        case "Gradient":
            sens = Tensor(fields.sens, FP64)
            return Gradient(positional=inputs, output=output, config=config, input=fields.inWrt, sens=sens)
        case "ApplyJacobian":
            vec = Tensor(fields.vec, FP64)
            return ApplyJacobian(positional=inputs, output=output, config=config, input=fields.inWrt, vec=vec)
    return ApplyHessian(
        positional=inputs,
        output=output,
        config=config,
        input1=fields.inWrt1,
        input2=fields.inWrt2,
        sens=Tensor(fields.sens, FP64),
        vec=Tensor(fields.vec, FP64),
    )


def invalid_request(name: str, verb: str, error: InvalidInput) -> PreliminaryCall[ModelDescription]:
    """Return a call that fails with `error`, unless the model is unknown or does not support the verb.

    UM-Bridge's servers check these first.
    """
    if not name:
        raise ModelNotFound(error_texts.unknown_model(""))

    def then(response: Response[ModelDescription]) -> EndpointResult:
        if verb and not support(response.answer)[verb]:
            reason = missing_reason(response.answer.details, VERBS[verb][0])
            return _format_verb_error(verb, NotSupported(f"model '{name}' does not support {verb}{reason}"))
        raise error

    return PreliminaryCall(Request(Describe(), name), then)


def support(model: ModelDescription) -> dict[str, bool]:
    """Return which verbs a model supports: none unless it is a function of vectors."""
    # A model that supports SignatureFor may have sizes for some configs only.
    is_vector_function = SignatureFor in model.calls or vector_signature(model.signature) is not None
    return {verb: is_vector_function and call in model.calls for verb, (call, _) in VERBS.items()}


def format_error(error: DragomanError | HttpError, _request_id: str = "") -> HttpResponse:
    """UM-Bridge: status 400 for an invalid request and 500 for a failure of the model, with type and message."""
    if isinstance(error, HttpError):
        kind = "InvalidInput" if error.status < 500 else "ServerError"
        return _error_response(kind, error.message, error.status, error.headers)
    status, kind = find_error_row(error, _ERRORS) or (500, "ServerError")
    return _error_response(kind, error.message, status, error_headers(error))


def _format_verb_error(verb: str, error: DragomanError) -> HttpResponse:
    """Return an error response; NotSupported as UM-Bridge's UnsupportedFeature with the verb."""
    if isinstance(error, NotSupported):
        return _error_response("UnsupportedFeature", f"{verb} not supported by model! {error.message}", 400)
    return format_error(error)


_format_evaluate_error = partial(_format_verb_error, "Evaluate")


def _error_response(kind: str, message: str, status: int, headers: Headers = ()) -> HttpResponse:
    error = messages.UmBridgeError(kind, replace_surrogates(message))
    return message_response(messages.UmBridgeErrorMessage(error), status, headers)


def protocol(policy: Policy) -> HttpProtocol:
    """Return the routes of the protocol."""
    endpoints = UmBridge(policy)
    routes = [
        Route("GET", "/Info", endpoints.info, role="read", operation=messages.INFO),
        Route("POST", "/ModelInfo", endpoints.model_info, role="read", operation=messages.MODEL_INFO),
        Route(
            "POST",
            "/InputSizes",
            partial(endpoints.sizes, lambda v: messages.InputSizes([s.size for s in v.inputs])),
            role="read",
            operation=messages.INPUT_SIZES,
        ),
        Route(
            "POST",
            "/OutputSizes",
            partial(endpoints.sizes, lambda v: messages.OutputSizes([s.size for s in v.outputs])),
            role="read",
            operation=messages.OUTPUT_SIZES,
        ),
        Route("POST", "/Evaluate", endpoints.evaluate, role="infer", operation=messages.EVALUATE),
        *(
            Route("POST", f"/{verb}", partial(endpoints.derivative, verb), role="infer", operation=operation)
            for verb, operation in messages.DERIVATIVES.items()
        ),
    ]
    errors = messages.errors([status for _, status, _ in _ERRORS])
    return HttpProtocol("UM-Bridge", tuple(routes), format_error, errors=errors)
