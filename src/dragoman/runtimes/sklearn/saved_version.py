"""The version of scikit-learn that has saved an estimator, and what to do if another one is installed."""

import bz2
import gzip
import lzma
import mmap
import re
import zlib
from collections.abc import Callable
from pathlib import Path

# The key of the version in the state of an estimator, the opcodes between them, and the version.
_VERSION = re.compile(rb"_sklearn_version.{1,16}?(\d+\.\d+(?:\.(?:dev|post)?\d+)*(?:(?:a|b|rc)\d+)?)", re.DOTALL)
# Functions that decompress what joblib compresses, by the first bytes.
_DECOMPRESS: dict[bytes, Callable[[bytes], bytes]] = {
    b"x": zlib.decompress,
    b"\x1f\x8b": gzip.decompress,
    b"BZ": bz2.decompress,
    b"]\x00": lzma.decompress,
    b"\xfd7zXZ": lzma.decompress,
}
_MAX_COMPRESSED = 16 << 20  # bytes of a file that is decompressed only to find out its version: about a second
_MAX_REASON = 120  # characters


def saved_version(path: Path) -> str:
    """Return the version of scikit-learn that has saved a file, "" if it is unknown. The file is not unpickled."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            method = next((each for start, each in _DECOMPRESS.items() if content[: len(start)] == start), None)
            if method is not None and len(content) > _MAX_COMPRESSED:
                return ""
            found = _VERSION.search(content if method is None else method(content[:]))
            return found[1].decode() if found else ""
    except (OSError, ValueError, EOFError, zlib.error, lzma.LZMAError):
        return ""


def explain_version(file: str, saved: str, installed: str) -> str:
    """Return what to do about another version; "" if it is the same or unknown."""
    if saved in ("", installed):
        return ""
    return (
        f"'{file}' was saved by scikit-learn {saved}, and {installed} is installed: pip install "
        f"scikit-learn=={saved}, or save it again, or as ONNX"
    )


def describe(error: BaseException) -> str:
    """Return the type and the first line of an error, shortened: those of NumPy list whole dtypes."""
    line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {line[:_MAX_REASON]}{'...' if len(line) > _MAX_REASON else ''}"
