"""Preflight check: errors of a model that its files show without loading it."""

import sys
from importlib.util import find_spec

from dragoman import plugins
from dragoman.core.errors import ModelFailed
from dragoman.core.spec import ModelSpec
from dragoman.runtimes.files import model_path


def check(spec: ModelSpec) -> None:
    """Raise ModelFailed if a model cannot be loaded because a file, a class or a package is missing, or a pickle is
    damaged. No code of the model is run."""
    if ":" in spec.runtime:
        return  # a runtime beside the model: finding it would run its code
    runtime = plugins.runtime(spec.runtime)
    if runtime.uri_is_path:
        model_path(spec)
    for package in runtime.packages:
        if not is_installed(package):
            raise ModelFailed(f"it needs the package '{package}', which is not installed; {runtime.install(package)}")
    if runtime.check is not None:
        runtime.check(spec)


def is_installed(package: str) -> bool:
    """Return whether a package can be imported, without importing it."""
    return package in sys.modules or find_spec(package) is not None


def check_installed(package: str, where: str) -> None:
    """Raise ModelFailed if a package is missing that the model itself imports in the file `where`."""
    if is_installed(package):
        return
    extras = [each.extra for each in plugins.built_in_runtimes().values() if package in each.packages[:1]]
    wanted = f"'dragoman[{extras[0]}]'" if extras else f"{package}, or the package that contains it"
    raise ModelFailed(f"'{where}' needs '{package}', which is not installed; pip install {wanted}")
