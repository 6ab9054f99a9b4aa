"""Whether a model could not be loaded because memory is short, in whichever library's words."""

import errno
import re
from collections.abc import Iterator

from dragoman.core.errors import ModelFailed, OutOfMemory

# What C++, PyTorch, ONNX Runtime, TensorFlow and JAX say; none of them has a class of error for it that all have.
_WORDS = re.compile(
    r"out of memory|bad.?alloc|RESOURCE_EXHAUSTED|(can't|cannot|could not|unable to|failed to) allocate memory",
    re.IGNORECASE,
)


def failure(fault: BaseException) -> type[ModelFailed]:
    """OutOfMemory where the fault, or what led to it, says so; else ModelFailed."""
    return OutOfMemory if any(map(_is_short, _with_causes(fault))) else ModelFailed


def _is_short(fault: BaseException) -> bool:
    if isinstance(fault, MemoryError | OutOfMemory):
        return True
    if isinstance(fault, OSError):
        return fault.errno == errno.ENOMEM
    return _WORDS.search(str(fault)) is not None


def _with_causes(fault: BaseException | None) -> Iterator[BaseException]:
    while fault is not None:
        yield fault
        fault = fault.__cause__ or fault.__context__
