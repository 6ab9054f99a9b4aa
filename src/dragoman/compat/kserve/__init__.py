"""The module `kserve` for custom models and clients, implemented with Dragoman's types."""

from dragoman.compat.kserve import errors, logging, model_server, utils
from dragoman.compat.kserve.infer_type import InferInput, InferOutput, InferRequest, InferResponse
from dragoman.compat.kserve.inference_client import InferenceGRPCClient, InferenceRESTClient, RESTConfig
from dragoman.compat.kserve.model import Model
from dragoman.compat.kserve.model_repository import ModelRepository
from dragoman.compat.kserve.model_server import ModelServer
from dragoman.compat.kserve.predictor_config import PredictorConfig

# The release of KServe with this interface.
__version__ = "0.21.0"

__all__ = [
    "InferInput",
    "InferOutput",
    "InferRequest",
    "InferResponse",
    "InferenceGRPCClient",
    "InferenceRESTClient",
    "Model",
    "ModelRepository",
    "ModelServer",
    "PredictorConfig",
    "RESTConfig",
    "__version__",
    "errors",
    "logging",
    "model_server",
    "utils",
]
