"""UM-Bridge over HTTP: simulators as functions of vectors, with their derivatives."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

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
    ServerError,
    Unauthorized,
)
from dragoman.core.signature import Signature
from dragoman.core.tensor import NONE, Tensor
from dragoman.core.vector_binding import VectorSignature, vector_signature
from dragoman.formats.umbridge import InvalidUmBridgeRequest, UmBridgeRequest, parse_umbridge_request
from dragoman.formats.umbridge_answer import written_derivative, written_evaluation
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
    find_error_row,
    json_response,
    replace_surrogates,
    retry_after,
)

PROTOCOL_VERSION = 1.0
_JSON_HEADERS: Headers = (JSON_TYPE,)

# What each verb asks, and the fields that a request needs for it.
VERBS: Mapping[str, tuple[type[Call[Any]], tuple[str, ...]]] = {
    "Evaluate": (Infer, ("input",)),
    "Gradient": (Gradient, ("outWrt", "inWrt", "input", "sens")),
    "ApplyJacobian": (ApplyJacobian, ("outWrt", "inWrt", "input", "vec")),
    "ApplyHessian": (ApplyHessian, ("outWrt", "inWrt1", "inWrt2", "input", "sens", "vec")),
}

_POINT = VERBS["Evaluate"][1]

# The first class that fits decides. UM-Bridge has names for four faults; the others are ours.
_FAULTS: Sequence[tuple[type[DragomanError], int, str]] = (
    (ModelNotFound, 400, "ModelNotFound"),
    (NotSupported, 400, "UnsupportedFeature"),
    (InvalidInput, 400, "InvalidInput"),
    (Unauthorized, 401, "Unauthorized"),
    (Forbidden, 403, "Forbidden"),
    (NotReady, 503, "NotReady"),
    (Overloaded, 503, "Overloaded"),
    (DeadlineExceeded, 504, "DeadlineExceeded"),
    (InvalidOutput, 500, "InvalidOutput"),
    (ServerError, 500, "ModelError"),
)


@dataclass(frozen=True, slots=True)
class UmBridge:
    """The endpoints. Each is a pure function of the request."""

    policy: Policy

    def info(self, http: HttpRequest) -> EndpointResult:
        """The models, once all have been tried: UM-Bridge's load balancer reads this list when the port opens, and
        never again."""

        def reply(response: Response[tuple[ModelDescription, ...]]) -> HttpResponse:
            names = [model.name for model in response.answer if any(support(model).values())]
            return json_response({"protocolVersion": PROTOCOL_VERSION, "models": names})

        return EngineCall(Request(DescribeModels(after_start=True)), reply)

    def model_info(self, http: HttpRequest) -> EndpointResult:
        question = self.question(http, ())
        if isinstance(question, PreliminaryCall):
            return question
        return EngineCall(
            Request(Describe(), question.name), lambda response: json_response({"support": support(response.answer)})
        )

    def sizes(self, key: str, of: Callable[[VectorSignature], list[int]], http: HttpRequest) -> EndpointResult:
        """The sizes of a model's inputs or outputs under the request's config."""
        question = self.question(http, ())
        if isinstance(question, PreliminaryCall):
            return question

        def reply(response: Response[Signature]) -> HttpResponse:
            found = vector_signature(response.answer)
            if found is None:
                raise NotSupported(f"model '{response.model}': not all its tensors are float vectors of known sizes")
            return json_response({key: of(found)})

        return EngineCall(Request(SignatureFor(question.config or NONE), question.name), reply)

    def evaluate(self, http: HttpRequest) -> EndpointResult:
        question = self.question(http, _POINT, "Evaluate")
        if isinstance(question, PreliminaryCall):
            return question
        call = Infer({}, (), NONE, None, positional(question), question.config or NONE)
        return EngineCall(self.request(call, question, http), self._evaluated, _NO_EVALUATE)

    def derivative(self, verb: str, http: HttpRequest) -> EndpointResult:
        question = self.question(http, VERBS[verb][1], verb)
        if isinstance(question, PreliminaryCall):
            return question
        request = self.request(derivative_call(verb, question), question, http)
        return EngineCall(request, self._derived, partial(_unsupported, verb))

    # --- reading -------------------------------------------------------------------------------------------

    def question(
        self, http: HttpRequest, needed: Sequence[str], verb: str = ""
    ) -> UmBridgeRequest | PreliminaryCall[Any]:
        """What the body asks; or, where something is wrong with it besides its name, first whether there is such a
        model that can answer such calls."""
        if not len(http.body):
            raise InvalidInput("the request body is empty; expected a JSON object")
        question = parse_umbridge_request(bytes(http.body), self.policy)
        if isinstance(question, InvalidUmBridgeRequest):
            return refusal(question.name, verb, question.fault)
        if not question.name:
            raise ModelNotFound("Request for unknown model: '' is not found")
        for key in needed:
            if getattr(question, key) is msgspec.UNSET:
                fault = InvalidInput(f"'{key}' is missing; a request to /{verb} needs {', '.join(needed)}")
                return refusal(question.name, verb, fault)
        return question

    def request(self, call: ModelCall[Any], question: UmBridgeRequest, http: HttpRequest) -> Request[Any]:
        if not self.policy.forward_headers:
            return Request(call, question.name)
        return Request(call, question.name, metadata=self.policy.forwarded(http.headers))

    # --- writing -------------------------------------------------------------------------------------------

    def _evaluated(self, response: Response[Inference]) -> HttpResponse:
        return HttpResponse(200, (written_evaluation(response.answer.outputs, self.policy),), _JSON_HEADERS)

    def _derived(self, response: Response[Tensor]) -> HttpResponse:
        return HttpResponse(200, (written_derivative(response.answer.data, self.policy),), _JSON_HEADERS)


def positional(question: UmBridgeRequest) -> tuple[Tensor, ...]:
    return tuple([Tensor(vector, FP64) for vector in question.input or ()])


def derivative_call(verb: str, question: UmBridgeRequest) -> ModelCall[Tensor]:
    """The call for a derivative whose fields are all there."""
    found: Any = question
    at, config, output = positional(question), found.config or NONE, found.outWrt
    match verb:
        case "Gradient":
            sens = Tensor(found.sens, FP64)
            return Gradient(positional=at, output=output, config=config, input=found.inWrt, sens=sens)
        case "ApplyJacobian":
            vec = Tensor(found.vec, FP64)
            return ApplyJacobian(positional=at, output=output, config=config, input=found.inWrt, vec=vec)
    return ApplyHessian(
        positional=at,
        output=output,
        config=config,
        input1=found.inWrt1,
        input2=found.inWrt2,
        sens=Tensor(found.sens, FP64),
        vec=Tensor(found.vec, FP64),
    )


def refusal(name: str, verb: str, fault: InvalidInput) -> PreliminaryCall[ModelDescription]:
    """The fault, unless there is no such model, or it does not support the verb: UM-Bridge's servers say that first."""
    if not name:
        raise ModelNotFound("Request for unknown model: '' is not found")

    def then(response: Response[ModelDescription]) -> EndpointResult:
        if verb and not support(response.answer)[verb]:
            return _unsupported(verb, NotSupported(f"model '{name}' does not support {verb}"))
        raise fault

    return PreliminaryCall(Request(Describe(), name), then)


def support(model: ModelDescription) -> dict[str, bool]:
    """Which verbs a model answers: none where it is no function of vectors."""
    # One that answers SignatureFor may have sizes under some config only.
    known = SignatureFor in model.calls or vector_signature(model.signature) is not None
    return {verb: known and call in model.calls for verb, (call, _) in VERBS.items()}


def write_error(fault: DragomanError | HttpError) -> HttpResponse:
    """UM-Bridge: 400 for the caller's faults and 500 for the model's, with type and message."""
    if isinstance(fault, HttpError):
        kind = "InvalidInput" if fault.status < 500 else "ServerError"
        return _error(kind, fault.message, fault.status, fault.headers)
    status, kind = find_error_row(fault, _FAULTS) or (500, "ServerError")
    return _error(kind, fault.message, status, retry_after(fault))


def _unsupported(verb: str, fault: DragomanError) -> HttpResponse:
    """The fault, in the protocol's own word for what the model cannot do."""
    if isinstance(fault, NotSupported):
        return _error("UnsupportedFeature", f"{verb} not supported by model! {fault.message}", 400)
    return write_error(fault)


_NO_EVALUATE = partial(_unsupported, "Evaluate")


def _error(kind: str, message: str, status: int, headers: Headers = ()) -> HttpResponse:
    return json_response({"error": {"type": kind, "message": replace_surrogates(message)}}, status, headers)


def protocol(policy: Policy) -> HttpProtocol:
    """The protocol's table."""
    at = UmBridge(policy)
    routes = [
        Route("GET", "/Info", at.info),
        Route("POST", "/ModelInfo", at.model_info),
        Route("POST", "/InputSizes", partial(at.sizes, "inputSizes", lambda f: [s.size for s in f.inputs])),
        Route("POST", "/OutputSizes", partial(at.sizes, "outputSizes", lambda f: [s.size for s in f.outputs])),
        Route("POST", "/Evaluate", at.evaluate),
        *(Route("POST", f"/{verb}", partial(at.derivative, verb)) for verb in VERBS if verb != "Evaluate"),
    ]
    return HttpProtocol("UM-Bridge", tuple(routes), write_error)
