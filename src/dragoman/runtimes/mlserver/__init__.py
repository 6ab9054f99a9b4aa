"""The runtime of MLServer's custom models: classes derived from its MLModel."""

from dragoman.core.model import Model
from dragoman.core.runtime import Runtime
from dragoman.core.spec import ModelSpec


def _load(spec: ModelSpec) -> Model:
    from dragoman.runtimes.mlserver.model import load

    return load(spec)


def _check(spec: ModelSpec) -> None:
    from dragoman.runtimes.files import check_source

    check_source(spec)


RUNTIME = Runtime(load=_load, uri_is_path=False, check=_check)
