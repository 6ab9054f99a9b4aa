"""The runtime of MLServer's custom models: classes derived from its MLModel."""

from dragoman.core.runtime import Runtime, lazy_function

RUNTIME = Runtime(
    load=lazy_function("dragoman.runtimes.mlserver.model:load"),
    uri_is_path=False,
    check=lazy_function("dragoman.runtimes.files:check_source"),
)
