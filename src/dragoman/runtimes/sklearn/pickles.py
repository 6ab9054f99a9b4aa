"""Check a pickled model without unpickling it."""

import pickletools
from _compat_pickle import IMPORT_MAPPING
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from dragoman.core.errors import ModelFailed
from dragoman.core.spec import ModelSpec
from dragoman.runtimes.preflight import check_installed

# The first bytes of compressed files: zlib, gzip, bz2, lzma, xz, lz4.
_COMPRESSED = (b"x", b"\x1f\x8b", b"BZ", b"]\x00", b"\xfd7zXZ", b"\x04\x22\x4d\x18")
# joblib writes the bytes of an array, which are no pickle, behind an object of this module.
_ARRAYS = "joblib.numpy_pickle"
_MAX_OPCODES = 1_000_000  # some seconds of reading


def check_pickle_modules(spec: ModelSpec) -> None:
    """Raise ModelFailed if a file is not a pickle, or names a package that is not installed.

    A compressed file is not checked.
    """
    path = Path(spec.uri)
    with path.open("rb") as file:
        if file.read(8).startswith(_COMPRESSED):
            return
    try:
        for module in _modules(path):
            check_installed(module.partition(".")[0], path.name)
    except (ValueError, MemoryError, OverflowError) as error:  # such as a negative length
        reason = str(error) or type(error).__name__
        raise ModelFailed(f"'{path.name}' cannot be read as a pickle: {reason}") from error


def _modules(path: Path) -> Iterator[str]:
    """Yield the modules of the classes and functions that a pickle names, up to its first array."""
    memo: list[str] = []
    before = top = ""  # the last two strings on the stack, "" for anything else
    with path.open("rb") as file:
        for opcode, operand, _ in islice(pickletools.genops(file), _MAX_OPCODES):
            argument: Any = operand
            module = ""
            match opcode.name:
                case "MEMOIZE":
                    memo.append(top)
                    continue
                case "BINGET" | "LONG_BINGET":
                    before, top = top, memo[argument] if argument < len(memo) else ""
                case "SHORT_BINUNICODE" | "BINUNICODE" | "BINUNICODE8":
                    before, top = top, argument
                case "STACK_GLOBAL":
                    module, before, top = before, "", ""
                case "GLOBAL":
                    module, before, top = _python3_name(argument.partition(" ")[0]), "", ""
                case _:
                    before, top = "", ""
            if module == _ARRAYS:
                return
            if module:
                yield module


def _python3_name(module: str) -> str:
    """Return the name in Python 3 of a module that pickles of old protocols name as in Python 2."""
    return IMPORT_MAPPING.get(module, module)
