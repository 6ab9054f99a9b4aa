"""The runtime of models in Python: classes, functions and typed callables."""

from dragoman.core.runtime import Runtime, lazy_function

RUNTIME = Runtime(
    load=lazy_function("dragoman.runtimes.python.model:load"),
    suffixes=(".py",),
    folder_files=("model.py",),
    priority=10,
    uri_is_path=False,  # it may be module:attribute
    check=lazy_function("dragoman.runtimes.files:check_source"),
    model_names=lazy_function("dragoman.runtimes.python.model:model_names"),
)
