"""The module `mlserver` for custom models, implemented with Dragoman's types and codecs."""

from dragoman_mlserver.mlserver.metrics import log, register
from dragoman_mlserver.mlserver.model import MLModel
from dragoman_mlserver.mlserver.settings import ModelParameters, ModelSettings, Settings

# The release of MLServer with this interface.
__version__ = "1.7.1"

__all__ = ["MLModel", "ModelParameters", "ModelSettings", "Settings", "__version__", "log", "register"]
