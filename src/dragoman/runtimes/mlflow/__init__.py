"""The runtime of MLflow models of any flavor."""

from dragoman.core.model import Model
from dragoman.core.runtime import Runtime
from dragoman.core.spec import ModelSpec


def _load(spec: ModelSpec) -> Model:
    from dragoman.runtimes.mlflow.model import MlflowModel

    return MlflowModel(spec)


RUNTIME = Runtime(
    load=_load,
    packages=("mlflow", "pandas"),
    extra="mlflow",
    folder_files=("MLmodel",),
    priority=40,  # an MLflow model may hold files of any other kind, such as a model.py
)
