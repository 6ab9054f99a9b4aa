"""The predictor that a transformer calls."""

from contextvars import ContextVar
from enum import Enum


class PredictorProtocol(Enum):
    """The protocols of predictors."""

    REST_V1 = "v1"
    REST_V2 = "v2"
    GRPC_V2 = "grpc-v2"


class PredictorConfig:
    """Address and protocol of the predictor, and how it is called; `timeout`, `retries` and so on are short names."""

    def __init__(
        self,
        predictor_host: str | None,
        predictor_protocol: str = PredictorProtocol.REST_V1.value,
        predictor_use_ssl: bool = False,
        predictor_request_timeout_seconds: int = 600,
        predictor_request_retries: int = 0,
        predictor_health_check: bool = False,
    ) -> None:
        self.predictor_host = predictor_host
        self.predictor_protocol = self.protocol = predictor_protocol
        self.predictor_use_ssl = self.use_ssl = predictor_use_ssl
        self.predictor_request_timeout_seconds = self.timeout = predictor_request_timeout_seconds
        self.predictor_request_retries = self.retries = predictor_request_retries
        self.predictor_health_check = predictor_health_check

    @property
    def predictor_base_url(self) -> str:
        return f"http{'s' if self.use_ssl else ''}://{self.predictor_host}"


_current: ContextVar[PredictorConfig | None] = ContextVar("predictor_config", default=None)


def set_predictor_config(config: PredictorConfig | None) -> None:
    """Set the predictor of the model that this context runs."""
    _current.set(config)


def get_predictor_config() -> PredictorConfig | None:
    return _current.get()
