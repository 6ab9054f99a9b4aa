"""The root mean square norm in each form."""

import ctypes

import ml_dtypes
import numpy as np
import pytest

import dragoman_kernels
from features.kernels.forms import forms

_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64
_TYPES = (_POINTER, _INTEGER, _POINTER, _POINTER, _INTEGER, _INTEGER, ctypes.c_float, _INTEGER)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("form", forms())
def test_norm_equals_its_reference(form: str, bf16: bool) -> None:
    rows, hidden, eps = 7, 80, 1e-6
    random = np.random.default_rng(1)
    states, weight = random.normal(size=(rows, 128)).astype(np.float32), random.normal(size=hidden).astype(np.float32)
    output = np.zeros((rows + 1, hidden), ml_dtypes.bfloat16 if bf16 else np.float32)
    norm = dragoman_kernels.function("norm", form, *_TYPES)
    norm(states.ctypes.data, 128, weight.ctypes.data, output.ctypes.data, rows, hidden, eps, bf16)
    used = states[:, :hidden].astype(np.float64)
    expected = used / np.sqrt((used**2).mean(-1, keepdims=True) + eps) * weight
    np.testing.assert_allclose(output[:rows].astype(np.float64), expected, rtol=4e-3 if bf16 else 1e-6)
    assert not output[rows].astype(np.float32).any(), "written beyond the rows"
