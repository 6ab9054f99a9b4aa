"""The runtime of remote models: those that UM-Bridge servers compute."""

from dragoman.core.model import Model
from dragoman.core.runtime import Runtime
from dragoman.core.spec import ModelSpec


def _load(spec: ModelSpec) -> Model:
    from dragoman.runtimes.umbridge.model import UmBridgeModel

    return UmBridgeModel(spec)


RUNTIME = Runtime(load=_load, uri_is_path=False, placement="inline")
