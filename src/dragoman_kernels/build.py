"""Compiles the kernels to a shared library, with the system's C compiler or with the one in the package `ziglang`.

usage: python src/dragoman_kernels/build.py [--target TARGET] [--sanitize] [--output FILE]

The installation of the project does it (setup.py). This module needs the standard library alone, and is also executed
by its path, before the project is installed.
"""

import argparse
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "c"
# Flags of each form, by the architecture of the CPU. Other architectures have the portable form alone.
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl")
_AVX512_BF16 = (*_AVX512, "-mavx512vbmi", "-mavx512vnni", "-mavx512bf16")
FORM_FLAGS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "portable": (),
        "avx2": _AVX2,
        "avx512": _AVX512,
        "avx512_bf16": _AVX512_BF16,
        "amx": (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    },
    "aarch64": {"portable": (), "neon": ()},
}
# Forms of Linux alone, and only if the compiler knows their instructions.
_LINUX_FORMS = ("amx",)
# Sources that are compiled once, not for each form.
_ONCE = ("cpu",)
# `-ffp-contract=off`: sums and products are rounded as they are written, by any compiler.
_FLAGS = ("-std=c11", "-O3", "-g0", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra")
# Ziglang compiles a C library for each target before it links with it: half a minute. The process has one with the few
# functions that kernels need. Windows and macOS want theirs to be named.
_ZIG_LINK = ("-nostdlib",)
_SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g", "-O1")


class NoCompiler(Exception):
    """There is no C compiler, or it failed; the message says what was tried."""


def library_name(target: str = "") -> str:
    """Return the name of the library file for a target such as `aarch64-macos`; empty: this machine."""
    system = target or sys.platform
    ending = ".dll" if "win32" in system or "windows" in system else ".dylib" if _is_mac(system) else ".so"
    return f"libkernels{ending}"


def _is_mac(system: str) -> bool:
    return "darwin" in system or "macos" in system


def system_compiler() -> list[str] | None:
    """Return the command of a C compiler of this machine that works, or None. `CC` names one, with its arguments."""
    for name in [os.environ["CC"]] if os.environ.get("CC") else ["cc", "clang", "gcc"]:
        command = name.split()
        if shutil.which(command[0]) and _compiles(command):
            return command
    return None


def _compiles(command: Sequence[str], form: str = "avx512_bf16") -> bool:
    """Return whether a compiler makes a shared library with the instructions of a form."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    source = "#include <immintrin.h>\n" if x86 else "#include <stdint.h>\n"
    flags = FORM_FLAGS["x86_64"][form] if x86 else ()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "try.c")
        path.write_text(source + "int number(void) { return 1; }\n")
        arguments = [*command, "-shared", "-fPIC", *_FLAGS, *flags, "-o", str(Path(folder, "try.so")), str(path)]
        return subprocess.run(arguments, capture_output=True, check=False).returncode == 0  # noqa: S603


def compiler(target: str = "") -> list[str]:
    """Return the command of the compiler: `CC`, the system's, or ziglang's, which compiles for any target."""
    if not target and (command := system_compiler()):
        return command
    if importlib.util.find_spec("ziglang") is None:
        raise NoCompiler("no C compiler: expected cc, clang or gcc, or the package ziglang (pip install ziglang)")
    zig = [sys.executable, "-m", "ziglang", "cc"]
    # An old version, as wheels for Linux have it; the default is "this CPU and this glibc", which ziglang may not know.
    old_glibc = sys.platform == "linux" and platform.libc_ver()[0] == "glibc" and not target
    return [*zig, "-target", target or f"{_machine()}-linux-gnu.2.17"] if target or old_glibc else zig


def _machine() -> str:
    name = platform.machine()
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(name, name)


def _forms(command: Sequence[str], target: str) -> dict[str, tuple[str, ...]]:
    """Return the forms that a compiler makes for a target, with their flags."""
    machine = target.partition("-")[0] or _machine()
    linux = "linux" in (target or sys.platform)
    return {
        form: flags
        for form, flags in FORM_FLAGS.get(machine, {"portable": ()}).items()
        if form not in _LINUX_FORMS or (linux and ("ziglang" in command or _compiles(command, form)))
    }


def build(output: Path, objects: Path, *, target: str = "", sanitize: bool = False) -> bool:
    """Compile the library unless `output` is up to date; return whether it was compiled. Raises NoCompiler.

    objects: a folder for intermediate files. What is compiled again after a change is the files whose text, or whose
    headers, changed.
    """
    ours = compiler(target)
    headers = "".join(path.read_text() for path in sorted(SOURCES.glob("*.h")))
    # Code of Windows is always independent of its position, and compilers reject the flag.
    pic = [] if library_name(target).endswith(".dll") else ["-fPIC"]
    flags = [*_FLAGS, *pic, *(_SANITIZE if sanitize else ())]
    objects.mkdir(parents=True, exist_ok=True)
    all_forms = _forms(ours, target)
    compiled: list[Path] = []
    jobs: list[list[str]] = []
    for source in sorted(SOURCES.glob("*.c")):
        forms = {"": ()} if source.stem in _ONCE else all_forms
        for form, form_flags in forms.items():
            defines = [f"-DFORM={form}", f"-DFORM_{form}"] if form else []
            arguments = [*ours, *flags, *form_flags, *defines, "-c", str(source)]
            key = hashlib.sha256("\0".join((*arguments, headers, source.read_text())).encode()).hexdigest()[:16]
            file = objects / f"{source.stem}-{form or 'once'}-{key}.o"
            compiled.append(file)
            if not file.exists():
                jobs.append([*arguments, "-o", str(file)])
    stamp = output.with_name(output.name + ".made-from")
    made_from = "\n".join(file.name for file in compiled)
    if not jobs and output.exists() and stamp.exists() and stamp.read_text() == made_from:
        return False
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(_run, jobs))
    output.parent.mkdir(parents=True, exist_ok=True)
    sanitizers = _SANITIZE[:1] if sanitize else ()
    own = _ZIG_LINK if "ziglang" in ours and library_name(target).endswith(".so") else ()
    # Elsewhere first: a process may have the present library in memory, and linkers for Windows write other files too.
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        fresh = Path(folder, output.name)
        _link([*ours, "-shared", *own, *sanitizers, "-o", str(fresh), *map(str, compiled)])
        os.replace(fresh, output)
    stamp.write_text(made_from)
    return True


def _run(arguments: list[str]) -> None:
    """Compile one file, under another name first, so that an interrupted compiler leaves none."""
    final = Path(arguments[-1])
    partial = final.with_name(f"{final.name}.{os.getpid()}.o")
    _link([*arguments[:-1], str(partial)])
    os.replace(partial, final)


def _link(arguments: list[str]) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise NoCompiler(f"the C compiler failed: {' '.join(arguments)}\n{done.stderr[-4000:]}")
    if done.stderr:
        print(done.stderr, file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="", help="as ziglang names it, such as aarch64-linux-gnu.2.17")
    parser.add_argument(
        "--sanitize", action="store_true", help="with the sanitizers of addresses and undefined behaviour"
    )
    parser.add_argument("--output", type=Path, default=None, help="the library; in the package by default")
    options = parser.parse_args()
    output = options.output or SOURCES.parent / library_name(options.target)
    objects = Path(__file__).parents[2] / "build" / "kernels"
    done = build(output, objects, target=options.target, sanitize=options.sanitize)
    print(f"{output}: {'compiled' if done else 'up to date'}")


if __name__ == "__main__":
    main()
