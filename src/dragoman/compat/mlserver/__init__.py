"""The module `mlserver` for custom models, implemented with Dragoman's types and codecs."""

from dragoman.compat.mlserver.metrics import log, register
from dragoman.compat.mlserver.model import MLModel
from dragoman.compat.mlserver.settings import ModelParameters, ModelSettings, Settings

# The release of MLServer with this interface.
__version__ = "1.7.1"

__all__ = ["MLModel", "ModelParameters", "ModelSettings", "Settings", "__version__", "log", "register"]
