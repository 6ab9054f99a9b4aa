"""Complex arrays that refuse every operation under which a function of them would not be analytic."""

from collections.abc import Callable
from typing import Any

import numpy as np


class NotAnalytic(Exception):
    """A function did something whose complex derivative is not its real one; the message says what."""


# Analytic nowhere, or piecewise; or that numbers are compared or taken apart by.
_REFUSED = frozenset(
    (
        *("absolute", "fabs", "conjugate", "sign", "heaviside", "hypot", "arctan2", "copysign", "signbit"),
        *("maximum", "minimum", "fmax", "fmin", "clip", "greater", "greater_equal", "less", "less_equal"),
        *("equal", "not_equal", "logical_and", "logical_or", "logical_xor", "logical_not"),
        *("floor", "ceil", "trunc", "rint", "floor_divide", "remainder", "fmod", "divmod", "modf", "vecdot", "vecmat"),
    )
)
_REFUSED_FUNCTIONS = frozenset(
    (
        *("real", "imag", "angle", "real_if_close", "norm", "vdot", "correlate", "cov", "corrcoef", "var", "std"),
        *("sort", "argsort", "argmax", "argmin", "partition", "argpartition", "searchsorted", "unique", "histogram"),
        *("max", "min", "amax", "amin", "ptp", "median", "percentile", "quantile", "nanmax", "nanmin", "nanvar"),
        *("nanstd", "round", "around", "fix", "clip", "interp", "digitize", "allclose", "isclose", "array_equal"),
        *("eigh", "eigvalsh", "cholesky", "svd", "svdvals", "qr", "pinv", "lstsq", "slogdet", "matrix_rank", "cond"),
        *("iscomplex", "isreal", "i0"),
    )
)
_REFUSED_METHODS = (
    *("conj", "conjugate", "argmax", "argmin", "sort", "argsort", "partition", "argpartition", "searchsorted"),
    *("var", "std", "round"),
)
# Questions about a number that change nothing.
_ASKED = frozenset(("isfinite", "isnan", "isinf"))
_POWERS = frozenset(("power", "float_power"))


def _refuse(name: str) -> Any:
    raise NotAnalytic(f"it uses {name}")


def _refused(name: str) -> Callable[..., Any]:
    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        return _refuse(name)

    return method


class Analytic(np.ndarray[Any, np.dtype[np.complex128]]):
    """A complex128 array. Whatever is computed of it by NumPy is one too, single numbers as well.

    Raises NotAnalytic, naming the operation, where it is compared, rounded, cast to a real number or conjugated, or
    where its absolute value is taken.
    """

    __array_priority__ = 100

    def __array_ufunc__(self, ufunc: np.ufunc, method: Any, *inputs: Any, **options: Any) -> Any:
        name = ufunc.__name__
        if name in _REFUSED:
            _refuse(f"np.{name}")
        if options.get("out") is not None:
            options["out"] = tuple(_plain(each) for each in options["out"])
        if name in _POWERS and method == "__call__" and not options and (found := _power(*inputs)) is not None:
            return watched(found)
        try:
            found = getattr(ufunc, method)(*map(_plain, inputs), **options)
        except TypeError as fault:
            raise NotAnalytic(f"it uses {name}, which takes no complex numbers: {fault}") from fault
        if name in _ASKED or found is None:
            return found
        return tuple(_checked(each, name) for each in found) if isinstance(found, tuple) else _checked(found, name)

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        if function.__name__ in _REFUSED_FUNCTIONS:
            _refuse(f"{function.__module__}.{function.__name__}".replace("numpy", "np", 1))
        found = super().__array_function__(function, types, arguments, options)
        return watched(found) if isinstance(found, np.ndarray | np.complexfloating) else found

    def __getitem__(self, key: Any) -> Any:
        return watched(super().__getitem__(key))

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def astype(self, dtype: Any, *arguments: Any, **options: Any) -> Any:
        if np.dtype(dtype).kind != "c":
            _refuse(f"astype({np.dtype(dtype).name})")
        return watched(super().astype(dtype, *arguments, **options))


for _name in _REFUSED_METHODS:
    setattr(Analytic, _name, _refused(_name))
for _name in ("float", "int", "bool", "index"):
    setattr(Analytic, f"__{_name}__", _refused(f"a number as {_name}"))
for _name in ("real", "imag"):
    setattr(Analytic, _name, property(_refused(_name)))


def watched(value: Any) -> Any:
    """The same numbers as an `Analytic` array, if they are complex."""
    array = np.asarray(value)
    return array.view(Analytic) if array.dtype.kind == "c" else value


def _power(base: Any, exponent: Any) -> Any:
    """A complex number to a real power, to first order in its imaginary part; None for other powers.

    NumPy computes powers of 100 and more by logarithms, whose rounding errors are far above a complex step.
    """
    z, n = np.asarray(_plain(base)), np.asarray(_plain(exponent))
    if z.dtype.kind != "c" or n.dtype.kind not in "iuf":
        return None
    n = n.astype(np.float64)
    slope = np.where(n == 0, 0.0, n * z.real ** np.where(n == 0, 1.0, n - 1))
    return z.real**n + 1j * (slope * z.imag)


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, Analytic) else value


def _checked(value: Any, name: str) -> Any:
    if np.asarray(value).dtype.kind != "c":
        _refuse(f"{name}, which gives real numbers")
    return watched(value)
