"""The runtime of scikit-learn estimators and pipelines, saved by joblib or pickle."""

from dragoman.core.runtime import Runtime, lazy_function

RUNTIME = Runtime(
    load=lazy_function("dragoman.runtimes.sklearn.model:SklearnModel"),
    packages=("sklearn", "joblib"),
    extra="sklearn",
    suffixes=(".joblib", ".pkl", ".pickle"),
    placement="thread",
    check=lazy_function("dragoman.runtimes.sklearn.model:check_pickle_modules"),
)
