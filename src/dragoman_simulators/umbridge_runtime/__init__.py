"""The runtime of remote models: those that UM-Bridge servers compute."""

from dragoman.core.runtime import Runtime, lazy_function

RUNTIME = Runtime(
    load=lazy_function("dragoman_simulators.umbridge_runtime.model:UmBridgeModel"),
    uri_is_path=False,
    placement="inline",
)
