"""The runtime of MLServer's models: custom classes derived from its MLModel, and its classes for libraries."""

from dragoman.compat.files import DIALECT
from dragoman.core.runtime import Runtime, lazy_function
from dragoman.core.spec import ModelSpec, Placement


def _placement(spec: ModelSpec) -> Placement:
    """Return where a model runs: the libraries release the GIL, custom code may hold it."""
    return "thread" if "library" in spec.parameters else "process"


RUNTIME = Runtime(
    load=lazy_function("dragoman.runtimes.mlserver.model:load"),
    uri_is_path=False,
    placement=_placement,
    dialect=DIALECT,
    check=lazy_function("dragoman.runtimes.mlserver.library:check"),
)
