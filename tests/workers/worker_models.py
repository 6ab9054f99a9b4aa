"""Models that behave well, badly and fatally, for the tests of the pools; worker processes load them from this file."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dragoman.core.calls import Infer, Inference
from dragoman.core.datatypes import BYTES, FP32, INT64
from dragoman.core.errors import InvalidInput
from dragoman.core.model import Model
from dragoman.core.signature import TensorSpec
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor, object_array


def number(call: Infer) -> int:
    return int(call.inputs["n"].data.flat[0])


def told(call: Infer, key: str) -> Path:
    return Path(str(call.parameters[key]))


def wait_for(path: Path) -> None:
    """Hold until a test makes the file."""
    while not path.exists():
        time.sleep(0.002)


class Echo(Model):
    def infer(self, call: Infer) -> Any:
        return dict(call.inputs)


class AsyncEcho(Model):
    async def infer(self, call: Infer) -> Any:
        await asyncio.sleep(0)
        return dict(call.inputs)


def _trace(path: str) -> None:
    """One byte more: whoever reads meanwhile finds a number of them, never half of one."""
    with Path(path).open("ab", buffering=0) as file:
        file.write(b".")


class Count(Model):
    """As many pieces as the input says; `trace` names a file that has a byte for each."""

    def infer(self, call: Infer) -> Iterator[Any]:
        trace = call.parameters.get("trace")
        made = 0
        try:
            for i in range(number(call)):
                made = i + 1
                if trace:
                    _trace(str(trace))
                yield {"i": np.array([i])}
        finally:
            if trace:
                Path(f"{trace}.closed").write_text(str(made))


class AsyncCount(Model):
    async def infer(self, call: Infer) -> AsyncIterator[Any]:
        trace = call.parameters.get("trace")
        made = 0
        try:
            for i in range(number(call)):
                made = i + 1
                if trace:
                    _trace(str(trace))
                yield {"i": np.array([i])}
        finally:
            if trace:
                Path(f"{trace}.closed").write_text(str(made))


def act(what: str, call: Infer) -> Any:
    match what:
        case "value":
            raise ValueError("seven is not allowed")
        case "input":
            raise InvalidInput("input 'x' is bad")
        case "own":
            raise OwnFault("mine")
        case "cancelled":
            raise asyncio.CancelledError
        case "none":
            return None
        case "wrong":
            return {"y": np.zeros(2, np.int64), "z": np.zeros(1)}
        case "lambda":
            return {"y": Tensor(object_array([lambda: 0], (1,)), BYTES)}
        case "pid":
            return {"pid": np.array([os.getpid()])}
        case "readonly":
            return {"writable": np.array([t.data.flags.writeable for t in call.inputs.values()])}
    return fatal(what, call)


def fatal(what: str, call: Infer) -> Any:
    match what:
        case "exit":
            sys.exit(3)
        case "os._exit":
            os._exit(7)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            ctypes.string_at(0)
        case "hold":
            told(call, "begun").touch()
            wait_for(told(call, "go"))
            return act(str(call.parameters.get("then", "pid")), call)
        case "hold the lock":
            _hold_the_lock(call)
            return act("pid", call)
        case "hold the lock afterwards":
            threading.Timer(0.05, _hold_the_lock, [call]).start()
            return act("pid", call)
        case "start":
            program = subprocess.Popen(["sleep", "600"])
            return {"pid": np.array([program.pid])}
    raise AssertionError(what)


def _hold_the_lock(call: Infer) -> None:
    """Compute in C without letting any other thread of the interpreter run."""
    ctypes.PyDLL(None).usleep(int(1e6 * float(call.parameters["for_s"])))


class OwnFault(InvalidInput):
    """An error whose class only the model's own module knows."""


class Acts(Model):
    """Does what the parameter `do` says."""

    def infer(self, call: Infer) -> Any:
        return act(str(call.parameters["do"]), call)


class AsyncActs(Model):
    async def infer(self, call: Infer) -> Any:
        what = str(call.parameters["do"])
        if what != "hold":
            return act(what, call)
        told(call, "begun").touch()
        try:
            while not told(call, "go").exists():
                await asyncio.sleep(0.002)
        except asyncio.CancelledError:
            told(call, "cancelled").touch()
            raise
        return act(str(call.parameters.get("then", "pid")), call)


class Writes(Model):
    """Writes a file by a relative path, as simulators read it, and reads it when three replicas have written it."""

    def infer(self, call: Infer) -> Any:
        Path("input.txt").write_text(str(number(call)))
        folder = told(call, "folder")
        (folder / f"written{number(call)}").touch()
        while len(list(folder.glob("written*"))) < 3:
            time.sleep(0.002)
        return {"read": np.array([int(Path("input.txt").read_text())])}


class Strict(Acts):
    """Tells its output, so that wrong ones are found."""

    outputs = (TensorSpec("y", FP32, (-1,)),)


class Unloadable(Model):
    def load(self) -> None:
        raise RuntimeError("no weights here")


class TellsTooMuch(Echo):
    """Its metadata hold what cannot leave a process."""

    def details(self) -> Any:
        return {"lock": threading.Lock()}


class DiesInLoad(Model):
    def load(self) -> None:
        os._exit(9)


class NeedsMemory(Model):
    def load(self) -> None:
        raise MemoryError

    def infer(self, call: Infer) -> Any:
        return {}


class KilledInLoad(Model):
    def load(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class HangsInLoad(Model):
    def load(self) -> None:
        Path(self.spec.parameters["begun"]).write_text(str(os.getpid()))
        while True:
            time.sleep(1)


class LoadsOnce(Acts):
    """The second load fails, unless the file `mended` exists."""

    def load(self) -> None:
        first, mended = (Path(self.spec.parameters[k]) for k in ("loaded", "mended"))
        if first.exists() and not mended.exists():
            raise RuntimeError("the weights are gone")
        first.touch()


class TellsClose(Echo):
    def close(self) -> None:
        Path(self.spec.parameters["closed"]).touch()


class Reuses(Model):
    """Answers with the same array each time; `how` says how it is handed over."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.how = str(spec.parameters.get("how", "array"))
        self.buffer = object_array([b""] * 4, (4,)) if self.how == "bytes" else np.zeros(4, np.int64)
        self.tensor = Tensor(self.buffer, BYTES if self.how == "bytes" else INT64)

    def write(self, value: int) -> Any:
        self.buffer[:] = b"%d" % value if self.how == "bytes" else value
        match self.how:
            case "view":
                return {"y": self.buffer[:2]}
            case "tensor":
                return {"y": self.tensor}
            case "inference":
                return Inference({"y": self.tensor})
        return {"y": self.buffer}

    def infer(self, call: Infer) -> Any:
        return self.write(number(call))


class ReusesInPieces(Reuses):
    def infer(self, call: Infer) -> Iterator[Any]:
        for n in range(number(call)):
            yield self.write(n)


class AsyncReuses(Reuses):
    async def infer(self, call: Infer) -> Any:
        return self.write(number(call))


class Threads(Model):
    """Tells how many threads its linear algebra takes, at most."""

    def infer(self, call: Infer) -> Any:
        from threadpoolctl import threadpool_info

        return {"n": np.array([max([library["num_threads"] for library in threadpool_info()], default=1)])}


class ClosesLate(LoadsOnce):
    """Begins to load, and loads when it is let; tells when it is closed."""

    def load(self) -> None:
        super().load()
        Path(self.spec.parameters["begun"]).touch()
        wait_for(Path(self.spec.parameters["go"]))

    def close(self) -> None:
        Path(self.spec.parameters["closed"]).touch()


class AsyncClosesLate(ClosesLate):
    async def close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        super().close()
