"""Compiles the kernels when the project is installed, or a wheel of it is built; the rest is in pyproject.toml.

KERNELS_TARGET=TARGET[:PLATFORM] compiles for another machine, and names the platform of the wheel (scripts/wheels).
Without a C compiler the package `ziglang` is a build requirement. If nothing can be compiled, a pure wheel is built.
"""

import os
import runpy
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

_ROOT = Path(__file__).parent
_KERNELS = runpy.run_path(str(_ROOT / "src" / "dragoman_kernels" / "build.py"))
_TARGET, _, _PLATFORM = os.environ.get("KERNELS_TARGET", "").partition(":")


class BuildWithKernels(build_py):
    """Copies the modules, then compiles the library beside them: in the source folder for an editable installation."""

    compiled = False

    def run(self) -> None:
        super().run()
        folder = _ROOT / "src" if self.editable_mode else Path(self.build_lib)
        package = folder / "dragoman_kernels"
        if not self.editable_mode:
            # A library of the source folder may be for another machine; C sources are for the source archive alone.
            for stale in (*package.glob("libkernels*"), *(package / "c").glob("*")):
                stale.unlink()
        try:
            name = _KERNELS["library_name"](_TARGET)
            _KERNELS["build"](package / name, _ROOT / "build" / "kernels", target=_TARGET)
        except (_KERNELS["NoCompiler"], OSError) as error:
            if _TARGET:
                raise
            print(f"warning: installing without kernels, texts will be slower: {error}", file=sys.stderr)
            return
        (package / f"{name}.made-from").unlink() if not self.editable_mode else None
        type(self).compiled = True


class WheelOfPlatform(bdist_wheel):
    """The library does not depend on the Python version: one wheel per platform, `py3-none-PLATFORM`."""

    def get_tag(self) -> tuple[str, str, str]:
        platform = super().get_tag()[2]
        if not BuildWithKernels.compiled and not self.distribution.get_command_obj("build_py").editable_mode:
            return "py3", "none", "any"
        return "py3", "none", _PLATFORM or platform


class DistributionOfPlatform(Distribution):
    def has_ext_modules(self) -> bool:
        return True


# Frontends ask for the build requirements by this command; the answer depends on the machine.
asked = "egg_info" in sys.argv
# Other systems have no wheel of it, and an installation without kernels is better than none.
_ZIGLANG = "ziglang>=0.13; sys_platform in 'linux darwin win32'"
setup(
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelOfPlatform},
    distclass=DistributionOfPlatform,
    setup_requires=[_ZIGLANG] if asked and (_TARGET or not _KERNELS["system_compiler"]()) else [],
)
