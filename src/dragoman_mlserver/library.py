"""Models of MLServer's classes for libraries: their files, and the rule about pickles."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from dragoman import plugins
from dragoman.core.errors import ModelFailed
from dragoman.core.spec import ModelSpec
from dragoman.runtimes.files import check_pickle, check_source, model_path, preflight_check
from dragoman_mlserver.files import RUNTIME_PACKAGES
from dragoman_mlserver.mlserver import runtimes

_PICKLED = ("sklearn", "mlflow")  # libraries whose files can run code when they are loaded


def check(spec: ModelSpec) -> None:
    """Raise ModelFailed if a file, a class or a package of a model is missing; no code of the model is run."""
    library = spec.parameters.get("library")
    if library is None:
        check_source(spec, ("mlserver", *RUNTIME_PACKAGES))
    else:
        if filenames := getattr(_runtime_class(spec), "filenames", ()):
            runtimes.check_is_file(spec.uri, filenames)
        preflight_check(replace(spec, runtime=str(library)))


def _runtime_class(spec: ModelSpec) -> type[Any]:
    found: type[Any] = getattr(runtimes, spec.parameters["model_settings"]["implementation"].rpartition(".")[2])
    return found


def library_class(spec: ModelSpec) -> type[Any]:
    """Return the class for the library of a model. Raises ModelFailed if a package is missing, or the file is not
    allowed."""
    library = str(spec.parameters["library"])
    if library == "huggingface" and not Path(spec.uri).is_dir():
        raise ModelFailed(f"'{spec.uri}' is not a folder: models are not downloaded; save the model to one")
    path = model_path(spec)
    if library in _PICKLED:
        check_pickle(path, spec)
    runtime = plugins.runtime(library)
    for package in runtime.packages:
        runtime.require(package)
    return _runtime_class(spec)


def library_settings(spec: ModelSpec) -> dict[str, Any]:
    """Return the settings of the model with the absolute path of its file."""
    settings = spec.parameters["model_settings"]
    return {**settings, "parameters": {**settings.get("parameters", {}), "uri": str(Path(spec.uri).resolve())}}
