"""`ModelServer`, which scripts start with their models, and the parser of the arguments of such scripts.

The runtime `kserve` runs a script and takes the models that it starts.
"""

import argparse
from collections.abc import Iterable
from typing import Any, NoReturn

from dragoman.compat.kserve.logging import logger
from dragoman.compat.kserve.model import BaseKServeModel
from dragoman.compat.kserve.model_repository import ModelRepository
from dragoman.compat.kserve.predictor_config import PredictorConfig, set_predictor_config
from dragoman.compat.kserve.utils import strtobool

_FLAGS: tuple[tuple[str, Any, Any], ...] = (
    ("http_port", 8080, int),
    ("grpc_port", 8081, int),
    ("workers", 1, int),
    ("max_threads", 4, int),
    ("max_asyncio_workers", None, int),
    ("enable_grpc", True, strtobool),
    ("enable_docs_url", False, strtobool),
    ("enable_latency_logging", True, strtobool),
    ("configure_logging", True, strtobool),
    ("log_config_file", None, str),
    ("access_log_format", None, str),
    ("model_name", "model", str),
    ("predictor_host", None, str),
    ("protocol", "v1", str),
    ("predictor_protocol", "v1", str),
    ("predictor_use_ssl", False, strtobool),
    ("predictor_request_timeout_seconds", 600, int),
    ("predictor_request_retries", 0, int),
    ("grpc_max_send_message_length", -1, int),
    ("grpc_max_receive_message_length", -1, int),
    ("ssl_certfile", None, str),
    ("ssl_keyfile", None, str),
)

# A script may declare an argument again with another default.
parser = argparse.ArgumentParser(add_help=False, conflict_handler="resolve")
for _name, _default, _type in _FLAGS:
    parser.add_argument(f"--{_name}", default=_default, type=_type)
parser.add_argument("--enable_predictor_health_check", action="store_true")


class UnusedApplication:
    """The FastAPI application of KServe's server, which is not used here."""

    def add_middleware(self, middleware: Any, **_: Any) -> None:
        logger.warning("middleware not used: name=%s", getattr(middleware, "__name__", middleware))


app = UnusedApplication()


class ModelServer:
    """The server that a script starts. Ports, workers and logging are settings of Dragoman."""

    def __init__(
        self,
        *_: Any,
        registered_models: ModelRepository | None = None,
        predictor_config: PredictorConfig | None = None,
        **__: Any,
    ) -> None:
        args, _rest = parser.parse_known_args()
        self.registered_models = registered_models or ModelRepository()
        set_predictor_config(
            predictor_config
            or PredictorConfig(
                args.predictor_host,
                args.predictor_protocol if args.predictor_protocol != "v1" else args.protocol,
                args.predictor_use_ssl,
                args.predictor_request_timeout_seconds,
                args.predictor_request_retries,
                args.enable_predictor_health_check,
            )
        )

    def register_model(self, model: BaseKServeModel, name: str | None = None) -> None:
        """Add a model, under its own or another name."""
        self.registered_models.update(model, name)

    def register_exception_handler(self, handler: Any) -> None:
        logger.warning("exception handler of the event loop not used: name=%s", getattr(handler, "__name__", handler))

    def start(self, models: Iterable[BaseKServeModel]) -> NoReturn:
        raise RuntimeError("this server is started by `dragoman serve FILE`, which runs the script")
