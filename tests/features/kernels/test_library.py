"""The library of kernels: its forms, how one is chosen, and an installation without it."""

import ctypes
import platform
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import dragoman_kernels
from dragoman_kernels import NoKernels
from dragoman_kernels.build import build, library_name
from features.kernels.forms import forms

FORMS = forms()


def test_every_cpu_has_the_portable_form_and_that_of_its_architecture() -> None:
    assert FORMS[0] == "portable"
    assert ("neon" in FORMS) == (platform.machine() in ("aarch64", "arm64"))


def test_forms_of_this_cpu_are_those_that_linux_reports() -> None:
    path = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not path.exists():
        pytest.skip("needs Linux on x86-64")
    flags = set(path.read_text().partition("flags")[2].partition("\n")[0].split())
    avx2 = {"avx2", "fma", "f16c"}
    avx512 = avx2 | {"avx512f", "avx512dq", "avx512bw", "avx512vl"}
    avx512_bf16 = avx512 | {"avx512vbmi", "avx512_vnni", "avx512_bf16"}
    amx = avx512_bf16 | {"amx_tile", "amx_bf16", "amx_int8"}
    needed = {"avx2": avx2, "avx512": avx512, "avx512_bf16": avx512_bf16, "amx": amx}
    expected = ["portable", *(form for form, each in needed.items() if each <= flags)]
    if "amx" in expected and not may_use_amx():
        expected.remove("amx")
    assert tuple(expected) == FORMS


def may_use_amx() -> bool:
    """Ask Linux for the registers of AMX: `arch_prctl(ARCH_REQ_XCOMP_PERM, 18)`."""
    return bool(ctypes.CDLL(None).syscall(158, ctypes.c_long(0x1023), ctypes.c_long(18)) == 0)


def test_a_form_that_the_compiler_could_not_build_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    library = dragoman_kernels._library()
    without = SimpleNamespace(cpu_forms=library.cpu_forms, **{f"step_{form}": None for form in FORMS[:-1]})
    monkeypatch.setattr(dragoman_kernels, "_library", lambda: without)
    assert dragoman_kernels.available_forms.__wrapped__() == FORMS[:-1]


def test_the_best_form_is_the_last_and_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KERNELS_FORM", raising=False)
    assert dragoman_kernels.best_form() == FORMS[-1]
    monkeypatch.setenv("KERNELS_FORM", "portable")
    assert dragoman_kernels.best_form() == "portable"
    monkeypatch.setenv("KERNELS_FORM", "sse2")
    with pytest.raises(NoKernels, match=r"KERNELS_FORM: expected portable, .*got sse2"):
        dragoman_kernels.best_form()
    monkeypatch.setenv("KERNELS_FORM", "none")
    with pytest.raises(NoKernels, match="is none"):
        dragoman_kernels.best_form()


def test_a_form_of_another_cpu_is_not_called() -> None:
    with pytest.raises(NoKernels, match="form of the kernels: expected one of portable"):
        dragoman_kernels.function("norm", "neon" if platform.machine() == "x86_64" else "avx2", ctypes.c_void_p)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KERNELS_LIBRARY", raising=False)
    monkeypatch.setattr(dragoman_kernels, "library_name", lambda: "libmissing.so")
    dragoman_kernels._library.cache_clear()
    try:
        with pytest.raises(NoKernels, match=r"not compiled when Dragoman was installed: .*libmissing\.so"):
            dragoman_kernels._library()
    finally:
        dragoman_kernels._library.cache_clear()


# Links as linkers for Windows do: with files beside the library.
_LINKER = """
import sys
from pathlib import Path
output = Path(sys.argv[sys.argv.index("-o") + 1])
output.write_text("compiled")
if "-shared" in sys.argv:
    output.with_suffix(".pdb").write_text("")
    output.with_name("import.lib").write_text("")
"""


def test_a_build_leaves_the_library_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "linker.py").write_text(_LINKER)
    monkeypatch.setenv("CC", f"{sys.executable} {tmp_path / 'linker.py'}")
    output = tmp_path / "package" / library_name()
    assert build(output, tmp_path / "objects")
    assert output.read_text() == "compiled"
    assert sorted(path.name for path in output.parent.iterdir()) == [output.name, f"{output.name}.made-from"]
