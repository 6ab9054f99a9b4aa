"""The runtime of remote models: those that UM-Bridge servers compute."""

from dragoman.core.runtime import Runtime, lazy_function

RUNTIME = Runtime(
    load=lazy_function("dragoman.runtimes.umbridge.model:UmBridgeModel"), uri_is_path=False, placement="inline"
)
