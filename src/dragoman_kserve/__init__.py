"""Custom models of KServe: scripts that start a ModelServer with classes derived from its Model."""

from dragoman.core.dialect import Dialect
from dragoman.core.runtime import Runtime, lazy_function

RUNTIME = Runtime(
    load=lazy_function("dragoman_kserve.model:load"),
    shared_suffixes=(".py",),
    is_model_file=lazy_function("dragoman_kserve.source:is_script"),
    is_model_folder=lazy_function("dragoman_kserve.source:is_folder"),
    priority=20,
    own_name=lazy_function("dragoman_kserve.source:own_name"),
    model_names=lazy_function("dragoman_kserve.source:model_names"),
    uri_is_path=False,  # it may be file.py:attribute
    packages=("kserve",),
    extra="kserve",
    dialect=Dialect(timeout="none"),
    check=lazy_function("dragoman.runtimes.files:check_source"),
)
