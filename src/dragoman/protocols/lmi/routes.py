"""Endpoints of LMI's inference API and of the SageMaker contract."""

from collections.abc import Mapping

from dragoman.core.calls import Describe, Embed, Generate, Infer, ModelDescription, Request, Response
from dragoman.core.errors import DragomanError, InvalidInput, ServerError
from dragoman.core.text import Generation
from dragoman.protocols.lmi import control
from dragoman.protocols.lmi.address import addressed
from dragoman.protocols.lmi.arrays import parse_arrays_request
from dragoman.protocols.lmi.async_results import fetched, later
from dragoman.protocols.lmi.bedrock import parse_bedrock_request
from dragoman.protocols.lmi.chat import parse_openai_request
from dragoman.protocols.lmi.embeddings import parse_embeddings_request
from dragoman.protocols.lmi.errors import LmiErrors, codes, dynamic
from dragoman.protocols.lmi.formats import Formatter
from dragoman.protocols.lmi.model import lmi_model
from dragoman.protocols.lmi.request import LmiRequest, parse_request, versioned
from dragoman.protocols.text_common.parameters import inquiry
from dragoman.protocols.wire import (
    EndpointResult,
    EngineCall,
    HttpProtocol,
    HttpRequest,
    HttpResponse,
    HttpStream,
    Policy,
    PreliminaryCall,
    Route,
)

_PATHS = (
    "/invocations",
    "/predictions/{model}",
    "/predictions/{model}/{version}",
    "/models/{model}/invoke",
    "/models/{model}/invocations",
)


class Lmi:
    """The inference endpoints."""

    def __init__(self, policy: Policy, errors: LmiErrors) -> None:
        self._policy = policy
        self._faults = errors

    def invoke(self, http: HttpRequest) -> EndpointResult:
        """Run an inference, now or later, or return the response of an earlier one."""
        return fetched(http, self._faults.write) or later(http, self._infer(versioned(http)), self._faults.write)

    def _infer(self, http: HttpRequest) -> EndpointResult:
        """Run an inference. The model is described first: its settings decide how the body is parsed."""

        def then(response: Response[ModelDescription]) -> EndpointResult:
            described = response.answer
            if Generate not in described.calls and Infer in described.calls:
                able = Embed in described.calls
                vectors = parse_embeddings_request(http, described, self._policy, self._faults) if able else None
                return vectors or parse_arrays_request(http, described, self._policy)
            model = lmi_model(described)
            try:
                found = parse_request(http, model, self._policy)
            except (InvalidInput, ServerError) as error:
                if model.rolling:
                    raise
                return dynamic(error)
            if isinstance(found, Mapping):  # as TGI and vLLM take OpenAI's bodies at this path
                if model.bedrock and "messages" not in found:
                    return parse_bedrock_request(found, http, self._policy, model.name)
                return parse_openai_request(found, http, self._policy, self._faults, model)
            return self._generate(found, http, Formatter(found, model), model.name)

        def meant(name: str) -> PreliminaryCall[ModelDescription]:
            value = inquiry(Generate(prompts=()), http, self._policy, name)
            return PreliminaryCall(Request(Describe(Generate, Infer), value.model, value.version), then)

        return addressed(http, self._policy, meant)

    def _generate(self, found: LmiRequest, http: HttpRequest, formatter: Formatter, model: str) -> EndpointResult:
        # LMI: of several texts the best is known at the end, so a stream of it holds all back until then.
        stream = formatter.streams and not formatter.ranked
        call = Generate(prompts=found.inputs, sampling=found.sampling, stream=stream)
        request: Request[Generation] = inquiry(call, http, self._policy, model)

        def fault(error: DragomanError) -> HttpResponse:
            return self._faults.failed(error, found, formatter)

        if formatter.streams:
            return HttpStream(request, formatter.piece, formatter.error, b"", formatter.headers, fault)
        return EngineCall(request, formatter.whole, fault)


def protocol(policy: Policy) -> HttpProtocol:
    """Return the routes of the protocol."""
    errors = LmiErrors(codes(policy.lmi_http_codes))
    at = Lmi(policy, errors)
    routes = [Route("POST", path, at.invoke) for path in _PATHS]
    return HttpProtocol("LMI", (*routes, *control.routes(policy)), errors.write)
