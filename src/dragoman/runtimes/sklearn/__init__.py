"""The runtime of scikit-learn estimators and pipelines, saved by joblib or pickle."""

from dragoman.core.model import Model
from dragoman.core.runtime import Runtime
from dragoman.core.spec import ModelSpec


def _load(spec: ModelSpec) -> Model:
    from dragoman.runtimes.sklearn.model import SklearnModel

    return SklearnModel(spec)


def _check(spec: ModelSpec) -> None:
    from dragoman.runtimes.sklearn.model import check_pickle_modules

    check_pickle_modules(spec)


RUNTIME = Runtime(
    load=_load,
    packages=("sklearn", "joblib"),
    extra="sklearn",
    suffixes=(".joblib", ".pkl", ".pickle"),
    placement="thread",
    check=_check,
)
