"""Compile grammars outside the engine's thread: first in a helper process with limits, then for use; cache results."""

import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from dragoman.core.documents import parse_json
from dragoman.core.errors import DragomanError, InvalidInput, Overloaded
from dragoman.core.foreign_code import public_error
from dragoman.core.text import Grammar
from dragoman_text.generation.memory import release_memory

log = logging.getLogger("dragoman.generation")

Result = TypeVar("Result")

# Grammars that compile within this CPU time do not wait for slower ones.
QUICK_S = 0.1
# Maximum number of waiting grammars, and of slower ones. Any number of requests may wait for one grammar.
_MAX_WAITING, _MAX_WAITING_SLOW = 32, 8
# A helper process that is idle for this time ends.
_IDLE_S = 300.0
# Wall time of a compilation per second of CPU time, and in addition: other processes may use the cores.
_WALL, _WALL_S = 10.0, 2.0
# Time limits for starting the helper process, and for its response after the kernel's limits.
_START_S, _GRACE_S = 60.0, 10.0
# Threads that use grammars have a larger stack than the forks, which reject grammars that are nested too deeply.
_STACK_BYTES = 64 << 20
# With the server's module search path.
START = "import sys; sys.path[:] = sys.argv[1:]; from dragoman_text.generation.grammar_worker import main; main()"
_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarLimits:
    """Limits of grammars, set by the operator.

    grammar_max_chars: characters of one grammar.
    grammar_compile_s: seconds of CPU time for compiling one.
    grammar_memory: MiB for compiling one, and for the cache.
    grammar_step_s: seconds for computing a mask.
    grammar_cache: number of compiled grammars in the cache.
    compact_json: JSON has one form, without line breaks and with one space after commas and colons.
    """

    grammar_max_chars: int = 1 << 18
    grammar_compile_s: float = 1.0
    grammar_memory: int = 256
    grammar_step_s: float = 1.0
    grammar_cache: int = 64
    compact_json: bool = False


MINIMA = {
    "grammar_max_chars": 1,
    "grammar_compile_s": 0.01,
    "grammar_memory": 16,
    "grammar_step_s": 0.01,
    "grammar_cache": 1,
}


@dataclass(frozen=True, slots=True)
class GrammarVocabulary:
    """Vocabulary for llguidance: tokenizer as JSON, number of tokens, and end tokens."""

    tokenizer: str
    size: int
    ends: list[int]


class CompileTimeExceededError(Exception):
    """Compilation exceeded the CPU time."""


class CompilerProcess:
    """Helper process that compiles one grammar at a time. It is started on demand, also after it has ended."""

    def __init__(self, vocabulary: Callable[[], GrammarVocabulary]) -> None:
        self._vocabulary = vocabulary
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar, limits: GrammarLimits, cpu_s: float) -> tuple[str, int]:
        """Return the grammar in llguidance's format and its size in bytes when compiled.

        Raises InvalidInput if it is malformed or exceeds a limit, CompileTimeExceededError if it takes more CPU time
        than `cpu_s`, and Overloaded if the machine is too busy to compile it.
        """
        request: dict[str, Any] = {
            "kind": grammar.kind,
            "text": grammar.text,
            "cpu_s": cpu_s,
            "wall_s": _WALL * cpu_s + _WALL_S,
            "memory_bytes": limits.grammar_memory << 20,
            "compact": limits.compact_json,
        }
        with self._lock:
            response = self._answer(request, request["wall_s"] + _GRACE_S)
        match response:
            case {"grammar": text, "bytes": size}:
                return text, size
            case {"error": error}:
                raise InvalidInput(f"grammar: {error}")
            case {"killed": "cpu"}:
                raise CompileTimeExceededError
            case {"killed": "memory"}:
                raise InvalidInput(
                    f"grammar: too large: expected at most {limits.grammar_memory} MiB to compile it (grammar_memory)"
                )
            case {"killed": "depth"}:
                raise InvalidInput("grammar: too deeply nested: its rules or references refer to one another too often")
        raise Overloaded("grammar: could not be compiled in time, the machine is too busy")

    def kill(self) -> None:
        """End it permanently; waiting callers get Overloaded."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process; the next grammar starts another one. Must not be called during compilation."""
        self._process = None
        self._end()

    def _answer(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        try:
            try:
                return self._exchange(request, limit_s)
            except (BrokenPipeError, EOFError):  # it ended after its idle time, or was killed
                self.close()
                return self._exchange(request, limit_s)
        except (OSError, EOFError, ValueError):
            self.close()
            return {}

    def _exchange(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        process = self._ensure_running()
        self._send(process, request)
        return self._receive(process, limit_s)

    def _ensure_running(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        if self._closed:
            raise OSError("the model is being unloaded")
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        environment["OPENBLAS_NUM_THREADS"] = "1"  # a process that forks must not have threads
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-c", START, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            bufsize=0,
        )
        self._end = weakref.finalize(self, _kill, self._process)  # also if the model is not closed
        self._send(self._process, {**asdict(self._vocabulary()), "idle_s": _IDLE_S})
        self._receive(self._process, _START_S)
        return self._process

    @staticmethod
    def _send(process: "subprocess.Popen[bytes]", message: dict[str, Any]) -> None:
        assert process.stdin is not None
        rest = memoryview(json.dumps(message).encode() + b"\n")
        while rest:
            rest = rest[process.stdin.write(rest) or 0 :]

    @staticmethod
    def _receive(process: "subprocess.Popen[bytes]", limit_s: float) -> dict[str, Any]:
        """Return the response of the process. Raises TimeoutError, or EOFError if it has ended."""
        assert process.stdout is not None
        received, until_s = bytearray(), time.monotonic() + limit_s
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        while not received.endswith(b"\n"):
            if not poll.poll(max(0.0, until_s - time.monotonic()) * 1000):
                raise TimeoutError
            chunk = process.stdout.read(1 << 20)
            if not chunk:
                raise EOFError
            received += chunk
        response: dict[str, Any] = parse_json(received)
        return response


def _kill(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()


class _CompileQueue:
    """Compiles grammars with one limit of CPU time, one after another, in its own thread and helper process."""

    def __init__(self, vocabulary: Callable[[], GrammarVocabulary], cpu_s: float, name: str) -> None:
        self.cpu_s, self.helper, self._name = cpu_s, CompilerProcess(vocabulary), name
        self.waiting = 0
        self._executor: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[["_CompileQueue"], None]) -> None:
        if self._executor is None:
            self._executor = deep_threads(1, self._name)
        self._executor.submit(work, self)

    def close(self) -> None:
        self.helper.kill()
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
        self.helper.close()


@dataclass(frozen=True, slots=True)
class _CacheEntry(Generic[Result]):
    """Result of a grammar, or the message of its error."""

    result: Result | None
    error: str
    size: int


class GrammarCompiler(Generic[Result]):
    """Compiles grammars and caches the results, including errors.

    make: creates the result from a grammar in llguidance's format, in a thread of the compiler. Slow grammars have
    their own queue, so that others do not wait for them.
    """

    def __init__(
        self, vocabulary: Callable[[], GrammarVocabulary], limits: GrammarLimits, make: Callable[[str], Result]
    ) -> None:
        self._limits, self._make = limits, make
        self._quick = _CompileQueue(vocabulary, min(QUICK_S, limits.grammar_compile_s), "grammar")
        self._slow = _CompileQueue(vocabulary, limits.grammar_compile_s, "grammar-slow")
        self._lock = threading.Lock()
        self._cache: OrderedDict[Grammar, _CacheEntry[Result]] = OrderedDict()
        self._size = 0
        self._futures: dict[Grammar, Future[Result]] = {}
        self._closed = False

    def compile(self, grammar: Grammar) -> "Future[Result]":
        """Return the future result of a grammar, finished if it is cached; it may raise InvalidInput or Overloaded.

        Raises InvalidInput if the grammar is too long, Overloaded if too many are being compiled.
        """
        if len(grammar.text) > self._limits.grammar_max_chars:
            raise InvalidInput(
                f"grammar: expected at most {self._limits.grammar_max_chars} characters (grammar_max_chars), "
                f"got {len(grammar.text)}"
            )
        with self._lock:
            entry = self._cache.get(grammar)
            if entry is not None:
                self._cache.move_to_end(grammar)
                return _finished_future(entry)
            if grammar in self._futures:
                return self._futures[grammar]
            if self._closed or len(self._futures) - self._slow.waiting >= _MAX_WAITING:
                raise Overloaded(f"grammar: {_MAX_WAITING} other grammars are waiting to be compiled; try again later")
            future: Future[Result] = Future()
            future.set_running_or_notify_cancel()  # several callers may wait for it, so none can cancel it
            self._futures[grammar] = future
            self._quick.submit(lambda queue: self._work(queue, grammar, future))
        return future

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._quick.close()
        self._slow.close()
        with self._lock:
            futures, self._futures = self._futures, {}
            self._cache.clear()
        for future in futures.values():
            future.set_exception(Overloaded("grammar: the model is being unloaded"))

    def _work(self, queue: _CompileQueue, grammar: Grammar, future: "Future[Result]") -> None:
        try:
            text, size = queue.helper.compile(grammar, self._limits, queue.cpu_s)
            entry = _CacheEntry(self._make(text), "", size + len(grammar.text))
        except CompileTimeExceededError:
            if queue is self._quick and self._slow.cpu_s > queue.cpu_s:
                self._defer(grammar, future)
                return
            error = f"too complex: expected at most {queue.cpu_s:g} s of CPU time to compile it (grammar_compile_s)"
            entry = _CacheEntry(None, f"grammar: {error}", len(grammar.text))
        except InvalidInput as error:
            entry = _CacheEntry(None, str(error), len(grammar.text))
        except BaseException as error:  # also a panic of the library, which is written in Rust
            if not isinstance(error, DragomanError):
                log.exception("a grammar could not be compiled")
            self._fail(grammar, future, public_error(error, "grammar: it cannot be compiled"))
            return
        with self._lock:
            if self._futures.pop(grammar, None) is None:
                return  # closed meanwhile
            dropped = self._store(grammar, entry)
        _resolve(future, entry)
        if dropped:
            release_memory()

    def _defer(self, grammar: Grammar, future: "Future[Result]") -> None:
        """Compile a grammar in the slow queue."""

        def work(slow: _CompileQueue) -> None:
            self._work(slow, grammar, future)
            with self._lock:
                slow.waiting -= 1

        with self._lock:
            full = self._closed or self._slow.waiting >= _MAX_WAITING_SLOW
            if not full:
                self._slow.waiting += 1
                self._slow.submit(work)
        if full:
            error = f"grammar: {_MAX_WAITING_SLOW} other slow grammars are waiting to be compiled; try again later"
            self._fail(grammar, future, Overloaded(error))

    def _fail(self, grammar: Grammar, future: "Future[Result]", error: DragomanError) -> None:
        """Fail without caching: the grammar may be tried again."""
        with self._lock:
            if self._futures.pop(grammar, None) is None:
                return  # closed meanwhile
        future.set_exception(error)

    def _store(self, grammar: Grammar, entry: _CacheEntry[Result]) -> bool:
        """Cache an entry, evicting least recently used ones; return whether a result was evicted."""
        limit = self._limits.grammar_memory << 20
        dropped = False
        self._cache[grammar] = entry
        self._size += entry.size
        while len(self._cache) > self._limits.grammar_cache or self._size > limit:
            _, oldest = self._cache.popitem(last=False)
            self._size -= oldest.size
            dropped = dropped or oldest.result is not None
        return dropped


def _finished_future(entry: "_CacheEntry[Result]") -> "Future[Result]":
    future: Future[Result] = Future()
    _resolve(future, entry)
    return future


def _resolve(future: "Future[Result]", entry: "_CacheEntry[Result]") -> None:
    if entry.result is None:
        future.set_exception(InvalidInput(entry.error))
    else:
        future.set_result(entry.result)


def deep_threads(count: int, name: str) -> ThreadPoolExecutor:
    """Return threads with a large stack, for recursive work."""
    executor = ThreadPoolExecutor(count, name)
    before = threading.stack_size(_STACK_BYTES)
    try:
        started = threading.Barrier(count + 1)  # each thread is started by a task that finds no idle one
        for _ in range(count):
            executor.submit(started.wait)
        started.wait()
    finally:
        threading.stack_size(before)
    return executor
