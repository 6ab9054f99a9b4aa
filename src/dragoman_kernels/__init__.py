"""Inner loops in C, compiled when the project is installed and called by `ctypes`: see docs/why/kernels.md.

The C sources are in `c/`. Each kernel is compiled in several forms, for the instructions of different CPUs; functions
are chosen here by name and form. Nothing here depends on the rest of the project.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dragoman_kernels.build import library_name

# In the order of the bits that `cpu_forms` of cpu.c returns. `portable` is for any CPU.
FORMS = ("portable", "avx2", "avx512", "avx512_bf16", "amx", "neon")
# Names a form for all kernels, for tests: `KERNELS_FORM=portable`. `none`: as if there were no library.
FORM_VARIABLE = "KERNELS_FORM"
# The path of another library, for tests: scripts/test-kernels.
LIBRARY_VARIABLE = "KERNELS_LIBRARY"


class NoKernels(Exception):
    """The kernels cannot be used in this installation or on this CPU; the message says why."""


@functools.cache
def _library() -> ctypes.CDLL:
    path = Path(os.environ.get(LIBRARY_VARIABLE) or Path(__file__).with_name(library_name()))
    if not path.exists():
        raise NoKernels(
            f"the kernels were not compiled when Dragoman was installed: {path} is missing (docs/why/kernels.md)"
        )
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NoKernels(f"the compiled kernels cannot be loaded: {error}") from error


@functools.cache
def available_forms() -> tuple[str, ...]:
    """Return the forms that this CPU can run and the library has, the fastest last. Raises NoKernels."""
    library = _library()
    cpu_forms = library.cpu_forms
    cpu_forms.restype = ctypes.c_int64
    bits = cpu_forms()
    return tuple(form for number, form in enumerate(FORMS) if bits >> number & 1 and hasattr(library, f"step_{form}"))


def best_form() -> str:
    """Return the fastest form of this CPU, or the one that `KERNELS_FORM` names. Raises NoKernels."""
    wanted = os.environ.get(FORM_VARIABLE, "")
    if wanted == "none":
        raise NoKernels(f"{FORM_VARIABLE} is none")
    forms = available_forms()
    if wanted and wanted not in forms:
        raise NoKernels(f"{FORM_VARIABLE}: expected {', '.join(forms)} or none, got {wanted}")
    return wanted or forms[-1]


def function(name: str, form: str, *types: Any) -> Callable[..., None]:
    """Return a function of a kernel in a form; it returns nothing, and runs without the interpreter lock.

    types: of its arguments, of `ctypes`. Raises NoKernels for a form that this CPU cannot run.
    """
    if form not in available_forms():
        raise NoKernels(f"form of the kernels: expected one of {', '.join(available_forms())}, got {form}")
    # A prototype of our own: attributes of the library's function would be shared by all callers.
    prototype = ctypes.CFUNCTYPE(None, *types)
    return prototype((f"{name}_{form}", _library()))
