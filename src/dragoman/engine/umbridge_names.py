"""Names of the models of the `umbridge` package in a Python file, found by importing it in another process."""

import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

from dragoman import plugins
from dragoman.core.errors import ModelFailed
from dragoman.workers.probe import probe

log = logging.getLogger("dragoman.engine")

# As long as a model may take to load.
_TIMEOUT_S = 600.0
# A file without either of these holds no model of the `umbridge` package.
_MARKS = (b"umbridge", b"get_input_sizes")


def umbridge_names(file: Path, attribute: str = "") -> dict[str, str]:
    """The models of the `umbridge` package that a Python file serves: their attributes by their own names.

    The file is imported once, in a process of its own, and again only after it has changed. With an `attribute` that
    model alone. Empty for any other file, and for one that cannot be imported: loading it reports the error.
    """
    try:
        text, stat = file.read_bytes(), file.stat()
    except OSError:
        return {}
    if not any(mark in text for mark in _MARKS):
        return {}
    known = str(file.resolve()), stat.st_mtime_ns, stat.st_size
    try:
        found = _inspected(*known, attribute if "." in attribute else "")
        if attribute in found["classes"]:
            found = _inspected(*known, attribute)
    except ModelFailed as error:
        log.debug("names of models unknown: file=%s error=%s", file, error.message)
        return {}
    if attribute in found["instances"]:
        return {found["instances"][attribute]: attribute}
    served: dict[str, str] = found["served"]
    return served if not attribute else {name: a for name, a in served.items() if a == attribute}


@lru_cache(256)
def _inspected(file: str, _changed_ns: int, _size: int, attribute: str) -> dict[str, Any]:
    log.info("importing a file for the names of its models: file=%s", file)
    model_names = plugins.runtime("python").model_names
    assert model_names is not None
    found: dict[str, Any] = probe(model_names, [file, attribute], _TIMEOUT_S)
    return found
