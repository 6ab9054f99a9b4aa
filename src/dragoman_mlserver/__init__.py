"""The runtime of MLServer's models: custom classes derived from its MLModel, and its classes for libraries."""

from dragoman.core.runtime import Runtime, lazy_function
from dragoman.core.spec import ModelSpec, Placement
from dragoman_mlserver.files import DIALECT


def _placement(spec: ModelSpec) -> Placement:
    """Return where a model runs: the libraries release the GIL, custom code may hold it."""
    return "thread" if "library" in spec.parameters else "process"


RUNTIME = Runtime(
    load=lazy_function("dragoman_mlserver.model:load"),
    uri_is_path=False,
    placement=_placement,
    dialect=DIALECT,
    check=lazy_function("dragoman_mlserver.library:check"),
)
