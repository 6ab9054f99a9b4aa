"""Models for the tests of worker pools, which worker processes load from this file."""

import asyncio
import ctypes
import gc
import math
import os
import signal
import stat
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
from dragoman.core.errors import InvalidInput, NotReady
from dragoman.core.metrics import Family, Sample
from dragoman.core.model import Model
from dragoman.core.signature import TensorSpec
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor, object_array


def number(call: Infer) -> int:
    return int(call.inputs["n"].data.flat[0])


def path_parameter(call: Infer, key: str) -> Path:
    return Path(str(call.parameters[key]))


def wait_for(path: Path) -> None:
    """Block until the test creates the file."""
    while not path.exists():
        time.sleep(0.002)


class Echo(Model):
    def infer(self, call: Infer) -> Any:
        return dict(call.inputs)


class ReportsMetrics(Model):
    """Reports a gauge with NumPy values; after a call, as many samples as its input, or an invalid name for 0."""

    samples = 1

    def infer(self, call: Infer) -> Any:
        self.samples = number(call)
        return dict(call.inputs)

    def measurements(self) -> list[Family]:
        name = "gauge" if self.samples else "no name"
        samples = (Sample(name, {"i": str(i)}, np.float32(0.5)) for i in range(self.samples or 1))  # type: ignore[arg-type]
        return [Family(name, "gauge", "A gauge.", tuple(samples))]


class ForksAtLoad(Model):
    """Forks when it is loaded, and returns the exit code of the child."""

    def load(self) -> None:
        child = os.fork()
        self.code = _exit_code(child) if child else 0

    def infer(self, call: Infer) -> Any:
        return {"code": np.array([self.code])}


class AsyncEcho(Model):
    async def infer(self, call: Infer) -> Any:
        await asyncio.sleep(0)
        return dict(call.inputs)


def _trace(path: str) -> None:
    """Append one byte, so that the size of the file is the number of chunks."""
    with Path(path).open("ab", buffering=0) as file:
        file.write(b".")


class Count(Model):
    """Yields as many chunks as the input says and appends a byte to the file `trace` for each."""

    def infer(self, call: Infer) -> Iterator[Any]:
        trace = call.parameters.get("trace")
        count = 0
        try:
            for i in range(number(call)):
                count = i + 1
                if trace:
                    _trace(str(trace))
                yield {"i": np.array([i])}
        finally:
            if trace:
                Path(f"{trace}.closed").write_text(str(count))


class AsyncCount(Model):
    async def infer(self, call: Infer) -> AsyncIterator[Any]:
        trace = call.parameters.get("trace")
        count = 0
        try:
            for i in range(number(call)):
                count = i + 1
                if trace:
                    _trace(str(trace))
                yield {"i": np.array([i])}
        finally:
            if trace:
                Path(f"{trace}.closed").write_text(str(count))


def _own_error(call: Infer) -> InvalidInput:
    if "full_collection" in call.parameters:
        gc.collect()
    return OwnError("mine")


def perform(action: str, call: Infer) -> Any:
    match action:
        case "value":
            raise ValueError("seven is not allowed")
        case "input":
            raise InvalidInput("input 'x' is bad")
        case "own":
            raise _own_error(call)
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
    return perform_fatal(action, call)


def perform_fatal(action: str, call: Infer) -> Any:
    match action:
        case "exit":
            sys.exit(3)
        case "panic":
            raise PanicException("index out of bounds")
        case "os._exit":
            os._exit(7)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            ctypes.string_at(0)
        case "hold":
            path_parameter(call, "begun").touch()
            wait_for(path_parameter(call, "go"))
            return perform(str(call.parameters.get("then", "pid")), call)
        case "hold the lock":
            _hold_the_lock(call)
            return perform("pid", call)
        case "hold the lock afterwards":
            threading.Timer(0.05, _hold_the_lock, [call]).start()
            return perform("pid", call)
        case "fork":
            return _fork(call)
        case "start":
            program = subprocess.Popen(["sleep", "600"])
            return {"pid": np.array([program.pid])}
    raise AssertionError(action)


def _fork(call: Infer) -> Any:
    """Fork; the child counts its sockets, or raises or returns. Return its exit code and the sockets of this process.

    If it returns later, return its process id and an array at once.
    """
    how, child = call.parameters["child"], os.fork()
    if child and how == "return later":
        return {"pid": np.array([child]), "array": np.zeros(100_000)}
    if child == 0:
        match how:
            case "count":
                os._exit(_count_sockets())
            case "raise":
                raise ValueError("in the child")
            case "return later":
                wait_for(path_parameter(call, "go"))
        return {"code": np.array([0]), "array": np.ones(100_000)}
    return {"code": np.array([_exit_code(child)]), "sockets": np.array([_count_sockets()])}


def _exit_code(child: int) -> int:
    """Return the exit code of a process, which is killed if it does not end within ten seconds."""
    end_s = time.monotonic() + 10.0
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > end_s:
            os.kill(child, signal.SIGKILL)
            end_s = math.inf
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(ended[1])


def _count_sockets() -> int:
    """Return the number of sockets of this process."""
    return sum(stat.S_ISSOCK(Path(entry).stat().st_mode) for entry in Path("/proc/self/fd").iterdir() if entry.exists())


def _hold_the_lock(call: Infer) -> None:
    """Hold the interpreter lock while computing in C."""
    ctypes.PyDLL(None).usleep(int(1e6 * float(call.parameters["for_s"])))


class OwnError(InvalidInput):
    """An error class that only the model's module defines."""


class PanicException(BaseException):
    """What libraries in Rust raise (pyo3)."""


class Actions(Model):
    """Performs the action in the parameter `do`."""

    def infer(self, call: Infer) -> Any:
        return perform(str(call.parameters["do"]), call)


class AsyncActions(Model):
    async def infer(self, call: Infer) -> Any:
        action = str(call.parameters["do"])
        if action != "hold":
            return perform(action, call)
        path_parameter(call, "begun").touch()
        try:
            while not path_parameter(call, "go").exists():
                await asyncio.sleep(0.002)
        except asyncio.CancelledError:
            path_parameter(call, "cancelled").touch()
            raise
        return perform(str(call.parameters.get("then", "pid")), call)


class WritesFile(Model):
    """Writes a file by a relative path, and reads it after three replicas have written it."""

    def infer(self, call: Infer) -> Any:
        Path("input.txt").write_text(str(number(call)))
        folder = path_parameter(call, "folder")
        (folder / f"written{number(call)}").touch()
        while len(list(folder.glob("written*"))) < 3:
            time.sleep(0.002)
        return {"read": np.array([int(Path("input.txt").read_text())])}


class Strict(Actions):
    """Declares its output, so that it is checked."""

    outputs = (TensorSpec("y", FP32, (-1,)),)


class Unloadable(Model):
    def load(self) -> None:
        raise RuntimeError("no weights here")


class UnpicklableDetails(Echo):
    """Its metadata cannot be pickled."""

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


class LoopsInLoad(Model):
    def load(self) -> None:
        while True:
            pass


class LoadsOnce(Actions):
    """The second load fails, unless the file `repaired` exists."""

    def load(self) -> None:
        first, repaired = (Path(self.spec.parameters[k]) for k in ("loaded", "repaired"))
        if first.exists() and not repaired.exists():
            raise (NotReady if "not_ready" in self.spec.parameters else RuntimeError)("the weights are gone")
        first.touch()


class OnDevice(Model):
    """Returns the GPU that it may use, in as many seconds as the parameter with that number says."""

    def infer(self, call: Infer) -> Any:
        device = os.environ.get("CUDA_VISIBLE_DEVICES", "-1")
        time.sleep(float(str(call.parameters.get(device, 0))))
        return {"device": np.array([int(device)])}


class SecondsLeft(Model):
    """Returns the seconds until the deadline of the call, by the clock of its process."""

    takes_request = True

    def infer(self, request: Any) -> Any:
        return {"left_s": np.array([request.deadline_s - time.monotonic()])}


class RecordsClose(Echo):
    def close(self) -> None:
        Path(self.spec.parameters["closed"]).touch()


class Reuses(Model):
    """Returns the same array each time, in the form that the parameter `how` of the call names."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        texts, numbers = object_array([b""] * 4, (4,)), np.zeros(4, np.int64)
        self.texts, self.numbers = Tensor(texts, BYTES), Tensor(numbers, INT64)

    def write(self, call: Infer, value: int) -> Any:
        how = call.parameters["how"]
        tensor = self.texts if how == "bytes" else self.numbers
        tensor.data[:] = b"%d" % value if how == "bytes" else value
        match how:
            case "view":
                return {"y": tensor.data[:2]}
            case "tensor":
                return {"y": tensor}
            case "inference":
                return Inference({"y": tensor})
        return {"y": tensor.data}

    def infer(self, call: Infer) -> Any:
        return self.write(call, number(call))


class ReusesInChunks(Reuses):
    def infer(self, call: Infer) -> Iterator[Any]:
        for n in range(number(call)):
            yield self.write(call, n)


class AsyncReuses(Reuses):
    async def infer(self, call: Infer) -> Any:
        return self.write(call, number(call))


class Threads(Model):
    """Returns the maximum number of threads of its linear algebra libraries."""

    def infer(self, call: Infer) -> Any:
        from threadpoolctl import threadpool_info

        return {"n": np.array([max([library["num_threads"] for library in threadpool_info()], default=1)])}


class LoadsSlowly(LoadsOnce):
    """Creates the file `begun`, loads when the file `go` exists, and creates the file `closed` when it is closed."""

    def load(self) -> None:
        super().load()
        Path(self.spec.parameters["begun"]).touch()
        wait_for(Path(self.spec.parameters["go"]))

    def close(self) -> None:
        Path(self.spec.parameters["closed"]).touch()


class AsyncLoadsSlowly(LoadsSlowly):
    async def close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        super().close()
