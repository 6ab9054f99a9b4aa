"""Detection of errors of libraries that mean that memory is short."""

import errno
import re
from collections.abc import Iterator

from dragoman.core.errors import ModelFailed, OutOfMemory

# Messages of C++, PyTorch, ONNX Runtime, TensorFlow and JAX, which share no exception class for it.
_WORDS = re.compile(
    r"out of memory|bad.?alloc|RESOURCE_EXHAUSTED|(can't|cannot|could not|unable to|failed to) allocate memory",
    re.IGNORECASE,
)


def failure(error: BaseException) -> type[ModelFailed]:
    """Return OutOfMemory if the error or one of its causes means that memory is short, otherwise ModelFailed."""
    return OutOfMemory if any(map(_is_short, _with_causes(error))) else ModelFailed


def _is_short(error: BaseException) -> bool:
    if isinstance(error, MemoryError | OutOfMemory):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return _WORDS.search(str(error)) is not None


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
