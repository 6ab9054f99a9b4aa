"""The runtime of model folders of Triton: a `config.pbtxt` and the model file of another runtime in each version."""

from pathlib import Path

from dragoman import plugins
from dragoman.core.dialect import Dialect
from dragoman.core.errors import ModelFailed
from dragoman.core.model import Model
from dragoman.core.runtime import Runtime, lazy_function
from dragoman.core.spec import ModelSpec, Placement
from dragoman.runtimes.files import is_installed
from dragoman_triton.backends import CONFIG_FILE, ENSEMBLE, PYTHON, is_version_folder

# Found in the source of a model that calls, loads or checks other models. Only the server's process can do that.
_CALLS_OTHERS = (b".exec(", b".async_exec(", b"load_model(", b"is_model_ready(")


def model_file(spec: ModelSpec) -> Path:
    """Return the model file or folder of a version. Raises ModelFailed if there is none."""
    folder, name = Path(spec.uri), str(spec.parameters["file"])
    path = folder / name
    if not path.exists():
        raise ModelFailed(f"'{folder.name}/{name}' not found: expected the model file that '{CONFIG_FILE}' describes")
    return path


def _placement(spec: ModelSpec) -> Placement:
    runtime = str(spec.parameters["backend"])
    if runtime == ENSEMBLE:
        return "inline"
    if runtime != PYTHON:
        return plugins.runtime(runtime).placement_for(spec)
    try:
        source = model_file(spec).read_bytes()
    except (ModelFailed, OSError):  # loading it reports the error
        return "process"
    return "inline" if any(mark in source for mark in _CALLS_OTHERS) else "process"


def _check(spec: ModelSpec) -> None:
    runtime = str(spec.parameters["backend"])
    if runtime == ENSEMBLE:
        return
    path = model_file(spec)
    declared = plugins.runtime(runtime)
    for package in declared.packages if runtime != PYTHON else ():
        if not is_installed(package):
            raise ModelFailed(f"'{path.name}' needs the package '{package}'; {declared.install(package)}")


def _load(spec: ModelSpec) -> Model:
    if "backend" not in spec.parameters:
        raise ModelFailed(f"expected a folder with '{CONFIG_FILE}', got '{spec.uri}'")
    return _LOADERS.get(str(spec.parameters["backend"]), _LOADERS[""])(spec)  # type: ignore[no-any-return]


_LOADERS = {
    PYTHON: lazy_function("dragoman_triton.python_backend:PythonBackendModel"),
    ENSEMBLE: lazy_function("dragoman_triton.ensemble:EnsembleModel"),
    "": lazy_function("dragoman_triton.model:ConfiguredModel"),
}

RUNTIME = Runtime(
    load=_load,
    dialect=Dialect(timeout="queue"),
    folder_files=(CONFIG_FILE,),
    calls_models=True,
    config_file=CONFIG_FILE,
    is_model_folder=is_version_folder,
    priority=100,
    placement=_placement,
    check=_check,
)
