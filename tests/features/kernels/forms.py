"""Forms of the kernels that this CPU can run."""

import pytest

import dragoman_kernels


def forms() -> tuple[str, ...]:
    try:
        return dragoman_kernels.available_forms()
    except dragoman_kernels.NoKernels as error:
        pytest.skip(str(error), allow_module_level=True)
