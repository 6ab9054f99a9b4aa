"""The class that models of KServe derive from, and its call to a predictor."""

import inspect
import time
from collections.abc import Mapping, MutableMapping
from enum import Enum
from typing import Any

from dragoman.compat.kserve.errors import InvalidInput
from dragoman.compat.kserve.infer_type import InferRequest
from dragoman.compat.kserve.inference_client import InferenceGRPCClient, InferenceRESTClient, RESTConfig
from dragoman.compat.kserve.logging import trace_logger
from dragoman.compat.kserve.predictor_config import PredictorConfig, get_predictor_config
from dragoman.compat.kserve.predictor_config import PredictorProtocol as PredictorProtocol

# The headers of a request that its predictor receives.
_FORWARDED = ("x-request-id", "x-b3-traceid", "authorization")


class InferenceVerb(Enum):
    """The methods of a model that answer requests."""

    EXPLAIN = 1
    PREDICT = 2


class BaseKServeModel:
    """A model with a name; it is `ready` once it is loaded."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ready = False
        self.engine = False

    async def healthy(self) -> bool:
        """Return whether the model can answer."""
        return self.ready

    def load(self) -> Any:
        """Load the model and set `ready`."""
        self.ready = True
        return self.ready

    def start(self) -> None:
        """Prepare the model when the server starts."""
        self.ready = True

    async def start_engine(self) -> None:
        """Run the engine of a model whose `engine` is true."""
        self.ready = True

    def stop(self) -> None:
        """Release the resources of the model."""
        self.ready = False

    def stop_engine(self) -> None:
        """Stop the engine of the model."""
        self.ready = False


class InferenceModel(BaseKServeModel):
    """A model that answers inference requests."""

    def get_input_types(self) -> Any:
        """Return name, datatype and shape of each input, for metadata."""
        return []

    def get_output_types(self) -> Any:
        """Return name, datatype and shape of each output, for metadata."""
        return []


class Model(InferenceModel):
    """A model: `preprocess`, then `predict` or `explain`, then `postprocess`; each may be async.

    Payloads are JSON objects (V1) or an InferRequest (V2). With `return_response_headers` the last two methods get a
    dict
    for headers of the response. A model without a `predict` of its own is a transformer: it calls the predictor.
    """

    def __init__(self, name: str, return_response_headers: bool = False) -> None:
        super().__init__(name)
        self.explainer_host: str | None = None
        self.enable_latency_logging = False
        self.required_response_headers = return_response_headers
        self._http_client: InferenceRESTClient | None = None
        self._grpc_client: InferenceGRPCClient | None = None

    @property
    def predictor_config(self) -> PredictorConfig | None:
        """The predictor in the arguments of the script, or in attributes that older code sets."""
        own = vars(self)
        if not own.get("predictor_host"):
            return get_predictor_config()
        return PredictorConfig(own["predictor_host"], own.get("protocol") or "v1", bool(own.get("use_ssl")))

    async def __call__(
        self,
        body: Any,
        headers: MutableMapping[str, str] | None = None,
        verb: InferenceVerb = InferenceVerb.PREDICT,
    ) -> tuple[Any, dict[str, str]]:
        """Return the result for a payload, and headers of the response."""
        response_headers: dict[str, str] = {}
        more = (response_headers,) if self.required_response_headers else ()
        began_s = time.monotonic()
        payload = self.validate(await _result(self.preprocess(body, headers)))
        if verb is InferenceVerb.EXPLAIN:
            response = await _result(self.explain(payload, headers))
        else:
            response = await _result(self.predict(payload, headers, *more))
        response = await _result(self.postprocess(response, headers, *more))
        if self.enable_latency_logging:
            trace_logger.info("request: model=%s duration_ms=%.3f", self.name, (time.monotonic() - began_s) * 1e3)
        return response, response_headers

    def validate(self, payload: Any) -> Any:
        """Return the payload. Raises InvalidInput if its `instances` or `inputs` are not a list."""
        config = self.predictor_config
        field = {"v1": "instances", "v2": "inputs"}.get(config.protocol) if config is not None else None
        if isinstance(payload, Mapping) and field in payload and not isinstance(payload[field], list):
            raise InvalidInput(f'Expected "{field}" to be a list')
        return payload

    async def preprocess(self, payload: Any, headers: Any = None) -> Any:
        return payload

    async def postprocess(self, result: Any, headers: Any = None, response_headers: Any = None) -> Any:
        return result

    async def predict(self, payload: Any, headers: Any = None, response_headers: Any = None) -> Any:
        """Return the response of the predictor. Raises NotImplementedError without one, and InferenceError."""
        config = self.predictor_config
        if config is None or not config.predictor_host:
            raise NotImplementedError("Could not find predictor_host.")
        forwarded = {name: headers[name] for name in _FORWARDED if headers and name in headers}
        if config.protocol == PredictorProtocol.GRPC_V2.value:
            if self._grpc_client is None:
                self._grpc_client = InferenceGRPCClient(
                    config.predictor_host, use_ssl=config.use_ssl, timeout=config.timeout, retries=config.retries
                )
            metadata = [("request_type", "grpc_v2"), ("response_type", "grpc_v2"), *forwarded.items()]
            return await self._grpc_client.infer(_as_request(payload), headers=metadata)
        return await self._rest_client(config).infer(
            config.predictor_base_url, payload, self.name, forwarded, response_headers
        )

    async def explain(self, payload: Any, headers: Any = None) -> Any:
        """Return the response of the explainer at `explainer_host`. Raises NotImplementedError without one."""
        if self.explainer_host is None:
            raise NotImplementedError("Could not find explainer_host.")
        config = self.predictor_config or PredictorConfig(None)
        forwarded = {name: headers[name] for name in _FORWARDED if headers and name in headers}
        scheme = "https" if config.use_ssl else "http"
        client = self._rest_client(config)
        return await client.explain(f"{scheme}://{self.explainer_host}", self.name, payload, forwarded)

    def _rest_client(self, config: PredictorConfig) -> InferenceRESTClient:
        if self._http_client is None:
            self._http_client = InferenceRESTClient(
                RESTConfig(protocol=config.protocol, retries=config.retries, timeout=config.timeout)
            )
        return self._http_client


def _as_request(payload: Any) -> InferRequest:
    return payload if isinstance(payload, InferRequest) else InferRequest.from_grpc(payload)


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
