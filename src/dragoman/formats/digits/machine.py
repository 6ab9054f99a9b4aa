"""Long arrays of floats in JSON, read and printed by machine code as soon as it is compiled, in a thread of its own.

It is compiled when the first long array comes, and from then on reads two and prints two to three times as many numbers
in the same time as the libraries that do so till then, and instead where it is not to be had. Other threads run
meanwhile.
"""

import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from dragoman.core.datatypes import Array
from dragoman.formats.digits.powers import powers, small_powers
from dragoman.formats.policy import Buffer

log = logging.getLogger("dragoman.formats")

_AT_ONCE = 1 << 18  # performance only: numbers that memory is taken for at a time
# What a few numbers of each kind have to be read from, and printed as.
_CHECKED = (
    b"[0.0,-0.0,1.0,-2.5,0.1,1234567.0,1e-7,3.0517578e-5,0.00001,1e+20,-6.125e-9,8388608.5,0.3,77.0,5e-5,16777216.0]"
)


class Digits:
    """Numbers as text and back."""

    def __init__(self) -> None:
        """Takes a good part of a second. Raises ImportError where llvmlite is not installed, NotImplementedError where
        this machine cannot do what pays."""
        from llvmlite import ir

        from dragoman.formats.digits import floats, printing, reading
        from dragoman.native.code import Compiled, cpu_features

        if "avx2" not in cpu_features():
            raise NotImplementedError("it needs vectors of four integers")
        module = ir.Module()
        for kind in (floats.FP32, floats.FP64):
            printing.write_printer(module, kind)
            reading.write_reader(module, kind)
        compiled = Compiled(module)
        self._end, self._most_bytes, self._more_bytes = reading.END, printing.MOST_BYTES, printing.MORE_BYTES
        self._group = printing.AT_ONCE
        self._read, self._print = (
            {
                np.dtype(dtype): compiled.function(f"{verb}_{name}", 5, returns_int=True)
                for dtype, name in ((np.float32, "fp32"), (np.float64, "fp64"))
            }
            for verb in ("read", "print")
        )
        self._tables = powers(), small_powers()
        self._places = tuple(table.ctypes.data for table in self._tables)
        self._check()

    def read(self, text: Buffer, into: Array) -> int:
        """Read what stands between the brackets of an array into an array of float32 or float64; gives how many numbers
        there are. Less than 0 where these are more than have room, none, or where anything else is to be said."""
        padded = np.frombuffer(b"".join((text, self._end)), np.uint8)
        found: int = self._read[into.dtype](padded.ctypes.data, into.ctypes.data, into.size, *self._places)
        return found

    def printed(self, flat: Array) -> bytes:
        """A flat array of float32 or float64 as JSON, in the fewest digits that tell the numbers apart; null for NaN
        and infinities."""
        chunks = self.chunks(flat)
        return b"".join(chunks) if len(chunks) > 1 else bytes(chunks[0])

    def chunks(self, flat: Array) -> list[Buffer]:
        """The same text as buffers that follow one another; one where the array is short."""
        if flat.size <= _AT_ONCE:
            return [self._part(flat)]
        chunks: list[Buffer] = [b"["]
        for at in range(0, flat.size, _AT_ONCE):
            chunks += (memoryview(self._part(flat[at : at + _AT_ONCE]))[1:-1], b",")
        chunks[-1] = b"]"
        return chunks

    def _part(self, numbers: Array) -> bytes:
        beyond = -numbers.size % self._group  # numbers are read in groups
        given = np.concatenate((numbers, np.zeros(beyond, numbers.dtype))) if beyond else numbers
        room = np.empty(numbers.size * self._most_bytes + self._more_bytes, np.uint8)
        room[0] = ord("[")
        size = self._print[numbers.dtype](given.ctypes.data, numbers.size, room.ctypes.data + 1, *self._places)
        room[size] = ord("]")
        return room[: size + 1].tobytes()

    def _check(self) -> None:
        for dtype in self._read:
            expected = np.array([float(text) for text in _CHECKED[1:-1].split(b",")], dtype)
            found = np.empty_like(expected)
            again = np.empty_like(expected)
            whole = self.read(_CHECKED[1:-1], found) == self.read(self.printed(expected)[1:-1], again) == expected.size
            if not whole or found.tobytes() != expected.tobytes() or again.tobytes() != expected.tobytes():
                raise NotImplementedError("it does not compute what it should")


_KINDS = frozenset((np.dtype(np.float32), np.dtype(np.float64)))


def digits(dtype: Any) -> Digits | None:
    """What reads and prints numbers of this kind; None where nothing does, or nothing yet."""
    if dtype not in _KINDS:
        return None
    made = _made()
    return made.result() if made.done() else None


@functools.cache
def _made() -> "Future[Digits | None]":
    made: Future[Digits | None] = Future()
    # The interpreter waits for it where it ends: LLVM is taken down then, and would crash in the middle of its work.
    thread = threading.Thread(target=_make, args=(Digits, made), name="dragoman-digits", daemon=False)
    try:
        thread.start()
    except RuntimeError:  # there are too many, or the interpreter ends
        made.set_result(None)
    return made


def _make(what: Callable[[], Digits], made: "Future[Digits | None]") -> None:
    try:
        made.set_result(what())
    except (ImportError, NotImplementedError) as fault:
        log.debug("numbers are read and printed without machine code: %s", fault)
        made.set_result(None)
    except Exception:
        log.warning("machine code for numbers could not be made; they are read and printed without", exc_info=True)
        made.set_result(None)
