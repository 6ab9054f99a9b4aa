"""Complex arrays that raise an error for operations that are not analytic."""

from collections.abc import Callable
from typing import Any

import numpy as np


class NotAnalyticError(Exception):
    """An operation has no complex derivative, or another one than the real derivative; the message names it."""


# Not analytic, piecewise, comparing values, or splitting complex numbers.
_REJECTED_UFUNCS = frozenset(
    (
        *("absolute", "fabs", "conjugate", "sign", "heaviside", "hypot", "arctan2", "copysign", "signbit"),
        *("maximum", "minimum", "fmax", "fmin", "clip", "greater", "greater_equal", "less", "less_equal"),
        *("equal", "not_equal", "logical_and", "logical_or", "logical_xor", "logical_not"),
        *("floor", "ceil", "trunc", "rint", "floor_divide", "remainder", "fmod", "divmod", "modf", "vecdot", "vecmat"),
    )
)
_REJECTED_FUNCTIONS = frozenset(
    (
        *("real", "imag", "angle", "real_if_close", "norm", "vdot", "correlate", "cov", "corrcoef", "var", "std"),
        *("sort", "argsort", "argmax", "argmin", "partition", "argpartition", "searchsorted", "unique", "histogram"),
        *("max", "min", "amax", "amin", "ptp", "median", "percentile", "quantile", "nanmax", "nanmin", "nanvar"),
        *("nanstd", "round", "around", "fix", "clip", "interp", "digitize", "allclose", "isclose", "array_equal"),
        *("eigh", "eigvalsh", "cholesky", "svd", "svdvals", "qr", "pinv", "lstsq", "slogdet", "matrix_rank", "cond"),
        *("iscomplex", "isreal", "i0"),
    )
)
_REJECTED_METHODS = (
    *("conj", "conjugate", "argmax", "argmin", "sort", "argsort", "partition", "argpartition", "searchsorted"),
    *("var", "std", "round"),
)
# Predicates that do not influence derivatives; their boolean results are returned.
_PREDICATES = frozenset(("isfinite", "isnan", "isinf"))
_POWERS = frozenset(("power", "float_power"))


def _reject(name: str) -> Any:
    raise NotAnalyticError(f"it uses {name}")


def _rejected_method(name: str) -> Callable[..., Any]:
    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        return _reject(name)

    return method


class AnalyticArray(np.ndarray[Any, np.dtype[np.complex128]]):
    """A complex128 array whose NumPy results, scalars too, are again `AnalyticArray`.

    Raises NotAnalyticError, naming the operation, for comparisons, rounding, conjugates, absolute values and casts to
    real numbers.
    """

    __array_priority__ = 100

    def __array_ufunc__(self, ufunc: np.ufunc, method: Any, *inputs: Any, **options: Any) -> Any:
        name = ufunc.__name__
        if name in _REJECTED_UFUNCS:
            _reject(f"np.{name}")
        if options.get("out") is not None:
            options["out"] = tuple(map(_as_ndarray, options["out"]))
        if name in _POWERS and method == "__call__" and not options and (power := _real_power(*inputs)) is not None:
            return as_analytic(power)
        try:
            result = getattr(ufunc, method)(*map(_as_ndarray, inputs), **options)
        except TypeError as error:
            raise NotAnalyticError(f"it uses {name}, which takes no complex numbers: {error}") from error
        if name in _PREDICATES or result is None:
            return result
        return (
            tuple(_require_complex(each, name) for each in result)
            if isinstance(result, tuple)
            else _require_complex(result, name)
        )

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        if function.__name__ in _REJECTED_FUNCTIONS:
            _reject(f"{function.__module__}.{function.__name__}".replace("numpy", "np", 1))
        result = super().__array_function__(function, types, arguments, options)
        return as_analytic(result) if isinstance(result, np.ndarray | np.complexfloating) else result

    def __getitem__(self, key: Any) -> Any:
        return as_analytic(super().__getitem__(key))

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def astype(self, dtype: Any, *arguments: Any, **options: Any) -> Any:
        if np.dtype(dtype).kind != "c":
            _reject(f"astype({np.dtype(dtype).name})")
        return as_analytic(super().astype(dtype, *arguments, **options))


for _name in _REJECTED_METHODS:
    setattr(AnalyticArray, _name, _rejected_method(_name))
for _name in ("float", "int", "bool", "index"):
    setattr(AnalyticArray, f"__{_name}__", _rejected_method(f"a number as {_name}"))
for _name in ("real", "imag"):
    setattr(AnalyticArray, _name, property(_rejected_method(_name)))


def as_analytic(value: Any) -> Any:
    """Return a complex value as an `AnalyticArray`, any other value unchanged."""
    array = np.asarray(value)
    return array.view(AnalyticArray) if array.dtype.kind == "c" else value


def _real_power(base: Any, exponent: Any) -> Any:
    """Return a complex number to a real power, to first order in its imaginary part; None for other operands.

    NumPy computes powers of 100 and more by complex logarithms, whose rounding errors are far above a complex step.
    """
    z, n = np.asarray(_as_ndarray(base)), np.asarray(_as_ndarray(exponent))
    if z.dtype.kind != "c" or n.dtype.kind not in "iuf":
        return None
    n = n.astype(np.float64)
    slope = np.where(n == 0, 0.0, n * z.real ** np.where(n == 0, 1.0, n - 1))
    return z.real**n + 1j * (slope * z.imag)


def _as_ndarray(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, AnalyticArray) else value


def _require_complex(value: Any, name: str) -> Any:
    if np.asarray(value).dtype.kind != "c":
        _reject(f"{name}, which returns real numbers")
    return as_analytic(value)
