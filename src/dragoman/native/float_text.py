"""Long float arrays to decimal text and back by compiled kernels, if Numba is installed.

The kernels take seconds to compile. When the first long array comes, a child process compiles them into Numba's cache;
when it has finished they are loaded and used from then on. See docs/why/float-text.md.
"""

import atexit
import functools
import hashlib
import importlib.util
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger("dragoman.native")

Array = NDArray[Any]

COMPILE_CODE = "from dragoman.native import float_text; float_text.fill_cache()"
_COMPILE_TIMEOUT_S = 300
CHUNK_NUMBERS = 1 << 13  # numbers whose text fits into a core's cache
_CHECKED = b"[0.0,-0.0,1.0,-2.5,0.1,1234567.0,1e-7,0.000030517578,1e+20,-6.125e-9,8388608.5,0.3,77.0,16777216.0,null]"


class FloatText:
    """Format and parse arrays of float32 and float64 as the elements of a JSON array. Releases the interpreter lock."""

    def __init__(self) -> None:
        """Raise ImportError or RuntimeError if the kernels cannot be loaded or fail a short test."""
        from dragoman.native import float_kernels

        self._kernels = float_kernels
        self._formatters: dict[Any, tuple[Any, Any]] = {
            np.dtype(np.float32): (np.uint32, float_kernels.format_float32),
            np.dtype(np.float64): (np.uint64, float_kernels.format_float64),
        }
        for dtype in self._formatters:
            expected = np.array([np.nan if v is None else v for v in json.loads(_CHECKED)], dtype)
            parsed = np.empty(expected.size - 1, dtype)
            count = self.parse(_CHECKED[1 : -len(",null]")], parsed)
            text = b"".join(self.format(expected))
            if count != parsed.size or parsed.tobytes() != expected[:-1].tobytes() or not _is_equal(text, expected):
                raise RuntimeError("compiled kernels for numbers give wrong results")

    def parse(self, text: bytes | bytearray | memoryview, numbers: Array) -> int:
        """Parse the text between the brackets of a JSON array into an array; return the number of elements.

        Return -1, for a general parser to decide, if there are more than fit, none, or anything but plain numbers.
        """
        padded = np.frombuffer(b"".join((text, self._kernels.END)), np.uint8)
        return int(self._kernels.parse_floats(padded, numbers))

    def format(self, numbers: Array) -> list[bytes]:
        """Format a flat array as the text of a JSON array, in chunks; NaN and infinities as null.

        The text is orjson's: the fewest digits that give the same number of this dtype.
        """
        unsigned, format_floats = self._formatters[numbers.dtype]
        bits = numbers.view(unsigned)
        text = np.empty(CHUNK_NUMBERS * self._kernels.MAX_BYTES + self._kernels.SPARE_BYTES, np.uint8)
        chunks = [b"["]
        for at in range(0, bits.size, CHUNK_NUMBERS):
            size = int(format_floats(bits[at : at + CHUNK_NUMBERS], text))
            is_last = at + CHUNK_NUMBERS >= bits.size
            chunks.append(text[: size - is_last].tobytes())
        chunks.append(b"]")
        return chunks


def _is_equal(text: bytes, expected: Array) -> bool:
    parsed = np.array([np.nan if v is None else v for v in json.loads(text)], expected.dtype)
    return parsed.tobytes() == expected.tobytes()


_DTYPES = frozenset((np.dtype(np.float32), np.dtype(np.float64)))


def float_text(dtype: Any) -> FloatText | None:
    """Return the formatter and parser for a dtype, None if there is none or none yet. The first call starts loading."""
    if dtype not in _DTYPES:
        return None
    loading = start_loading()
    return loading.result() if loading.done() else None


@functools.cache
def start_loading() -> "Future[FloatText | None]":
    """Start to load the kernels, once; return the future of the result, which is None if they cannot be used."""
    future: Future[FloatText | None] = Future()
    if importlib.util.find_spec("numba") is None:
        future.set_result(None)
    else:
        _start(_prepare, future, daemon=True)  # may wait for a child process, and end with the interpreter
    return future


def _start(target: Callable[..., None], future: "Future[FloatText | None]", *, daemon: bool) -> None:
    try:
        threading.Thread(target=target, args=(future,), name="dragoman-float-text", daemon=daemon).start()
    except RuntimeError:  # too many threads, or the interpreter is shutting down
        future.set_result(None)


def has_wide_vectors() -> bool:
    """Whether this processor has AVX-512. Without it orjson and simdjson are as fast as the kernels."""
    from llvmlite import binding

    return bool(binding.get_host_cpu_features().get("avx512f"))


def _prepare(future: "Future[FloatText | None]") -> None:
    """Fill Numba's cache in a child process unless it is filled, then load from it."""
    try:
        is_ready = has_wide_vectors() and (cache_marker().exists() or _compile())
    except Exception:  # Numba does not import, say, or finds no folder for its cache
        log.debug("numbers are parsed and formatted without compiled kernels", exc_info=True)
        is_ready = False
    if is_ready:
        # Not a daemon: the interpreter would take LLVM down while this thread uses it.
        _start(load_kernels, future, daemon=False)
    else:
        future.set_result(None)


def _compile() -> bool:
    """Fill Numba's cache in a child process; return whether it could."""
    child = subprocess.Popen(  # noqa: S603 - our own code
        [sys.executable, "-P", "-c", COMPILE_CODE],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    atexit.register(child.kill)
    try:
        return child.wait(_COMPILE_TIMEOUT_S) == 0
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        return False
    finally:
        atexit.unregister(child.kill)


def cache_marker() -> Path:
    """The file in Numba's cache folder that says that the kernels of this source, compiler and processor are there."""
    import numba
    from llvmlite import binding

    from dragoman.native import float_kernels

    source = Path(float_kernels.__file__)
    parts = source.read_bytes(), source.stat().st_mtime, sys.version, numba.__version__, binding.get_host_cpu_name()
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    return Path(float_kernels.parse_floats.stats.cache_path) / f"float_kernels-{digest}.ready"


def fill_cache(compile_kernels: Callable[[], None] | None = None) -> None:
    """Compile the kernels into Numba's cache and record it, unless another process has done so, or does at the moment.

    Processes that write the index of the cache at the same time lose entries. A server would then compile these kernels
    itself, and answer nothing for seconds.
    """
    import fcntl

    if compile_kernels is None:
        from dragoman.native import float_kernels

        compile_kernels = float_kernels.fill_cache
    marker = cache_marker()
    marker.parent.mkdir(parents=True, exist_ok=True)
    with marker.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not marker.exists():
            compile_kernels()
            marker.touch()


def load_kernels(future: "Future[FloatText | None]", make: Callable[[], FloatText] = FloatText) -> None:
    try:
        future.set_result(make())
    except Exception:
        log.warning("compiled kernels for numbers cannot be loaded; orjson and simdjson are used", exc_info=True)
        future.set_result(None)
