"""Compiles grammars away from the engine: first in a helper process with limits, then for use, and keeps them."""

import contextlib
import json
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

from dragoman.core.errors import InvalidInput, Overloaded
from dragoman.core.text import Grammar

Made = TypeVar("Made")

# Grammars of at most so much CPU time do not wait for those that take more.
_QUICK_S = 0.1
# So many grammars may wait for being compiled, of those that take more than that at most so many. A grammar is known by
# its text: any number of requests may wait for it.
_WAITING, _WAITING_SLOW = 32, 8
# A helper process that nobody needs for so long ends; the first one after that takes as long as the very first.
_IDLE_S = 300.0
# To start the helper process, and to wait for it beyond the time in which the kernel ends what it does.
_START_S, _PATIENCE_S = 60.0, 10.0
# Threads that work on grammars have a stack many times that of the helper's forks, in which too deep ones have ended.
_STACK_BYTES = 64 << 20
# The path is the server's, so that the process finds the same modules.
_START = "import sys; sys.path[:] = sys.argv[1:]; from dragoman.generation.grammar_worker import main; main()"
_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarLimits:
    """What an operator may say of grammars.

    grammar_max_chars: characters of one grammar.
    grammar_compile_s: seconds of CPU time for compiling one.
    grammar_memory: MiB that compiling one may take, and that those kept may take together.
    grammar_step_s: seconds for finding the tokens that may come next, once.
    grammar_cache: grammars that are kept compiled.
    """

    grammar_max_chars: int = 1 << 18
    grammar_compile_s: float = 1.0
    grammar_memory: int = 256
    grammar_step_s: float = 1.0
    grammar_cache: int = 64


LEAST = {
    "grammar_max_chars": 1,
    "grammar_compile_s": 0.01,
    "grammar_memory": 16,
    "grammar_step_s": 0.01,
    "grammar_cache": 1,
}


@dataclass(frozen=True, slots=True)
class GrammarVocabulary:
    """What llguidance needs of a vocabulary: its tokenizer as JSON, how many tokens, and those that end a text."""

    tokenizer: str
    size: int
    ends: list[int]


class CompileTimeExceededError(Exception):
    """The CPU time was not enough."""


class CompilerProcess:
    """A process that compiles one grammar at a time. It is started when it is needed, and again when it has ended."""

    def __init__(self, vocabulary: Callable[[], GrammarVocabulary]) -> None:
        self._vocabulary = vocabulary
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None
        self._lock = threading.Lock()

    def checked(self, grammar: Grammar, limits: GrammarLimits, cpu_s: float) -> tuple[str, int]:
        """Return the grammar in llguidance's format and its size in bytes when compiled.

        Raises InvalidInput if it is malformed or exceeds a limit, CompileTimeExceededError if it takes more CPU time
        than `cpu_s`, and Overloaded if the machine is too busy to compile it.
        """
        request = {
            "kind": grammar.kind,
            "text": grammar.text,
            "cpu_s": cpu_s,
            "memory_bytes": limits.grammar_memory << 20,
        }
        with self._lock:
            answer = self._answer(request, 20 * cpu_s + _PATIENCE_S)
        match answer:
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
        """End it for good; whoever waits for it gets Overloaded."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process, if there is one; the next grammar starts another one. Not while one is being compiled."""
        self._process = None
        self._end()

    def _answer(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        try:
            try:
                return self._exchange(request, limit_s)
            except (BrokenPipeError, EOFError):  # it has ended, having been idle, or was killed
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
        environment["OPENBLAS_NUM_THREADS"] = "1"  # it forks, and must have no threads
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-c", _START, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            bufsize=0,
        )
        self._end = weakref.finalize(self, _ended, self._process)  # also where nobody closes the model
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
        """A line of the process. Raises TimeoutError, or EOFError if it has ended."""
        assert process.stdout is not None
        found, until_s = bytearray(), time.monotonic() + limit_s
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        while not found.endswith(b"\n"):
            if not poll.poll(max(0.0, until_s - time.monotonic()) * 1000):
                raise TimeoutError
            piece = process.stdout.read(1 << 20)
            if not piece:
                raise EOFError
            found += piece
        answer: dict[str, Any] = json.loads(found)
        return answer


def _ended(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()


class _Lane:
    """Grammars of at most so much CPU time, one after another, in a thread and a helper process of their own."""

    def __init__(self, vocabulary: Callable[[], GrammarVocabulary], cpu_s: float, name: str) -> None:
        self.cpu_s, self.helper, self._name = cpu_s, CompilerProcess(vocabulary), name
        self.waiting = 0
        self._executor: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[["_Lane"], None]) -> None:
        if self._executor is None:
            self._executor = deep_threads(1, self._name)
        self._executor.submit(work, self)

    def close(self) -> None:
        self.helper.kill()
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
        self.helper.close()


@dataclass(frozen=True, slots=True)
class _Kept(Generic[Made]):
    """What a grammar has come to: what was made of it, or the error's text."""

    made: Made | None
    error: str
    size: int


class GrammarCompiler(Generic[Made]):
    """Compiles grammars and keeps the results, errors too.

    `make` makes of a grammar in llguidance's form what is kept; it runs in a thread of the compiler. Grammars that take
    long have a lane of their own, so that others do not wait for them.
    """

    def __init__(
        self, vocabulary: Callable[[], GrammarVocabulary], limits: GrammarLimits, make: Callable[[str], Made]
    ) -> None:
        self._limits, self._make = limits, make
        self._quick = _Lane(vocabulary, min(_QUICK_S, limits.grammar_compile_s), "grammar")
        self._slow = _Lane(vocabulary, limits.grammar_compile_s, "grammar-slow")
        self._lock = threading.Lock()
        self._kept: OrderedDict[Grammar, _Kept[Made]] = OrderedDict()
        self._size = 0
        self._begun: dict[Grammar, Future[Made]] = {}
        self._closed = False

    def compiled(self, grammar: Grammar) -> "Future[Made]":
        """What is made of the grammar; at once where it is known. Its errors: InvalidInput, Overloaded.

        Raises InvalidInput if it is too long, Overloaded if too many are being compiled.
        """
        if len(grammar.text) > self._limits.grammar_max_chars:
            raise InvalidInput(
                f"grammar: expected at most {self._limits.grammar_max_chars} characters (grammar_max_chars), "
                f"got {len(grammar.text)}"
            )
        with self._lock:
            kept = self._kept.get(grammar)
            if kept is not None:
                self._kept.move_to_end(grammar)
                return _known(kept)
            if grammar in self._begun:
                return self._begun[grammar]
            if self._closed or len(self._begun) - self._slow.waiting >= _WAITING:
                raise Overloaded(f"grammar: {_WAITING} other grammars wait for being compiled; try again later")
            future: Future[Made] = Future()
            future.set_running_or_notify_cancel()  # several may wait for it: none of them cancels it
            self._begun[grammar] = future
            self._quick.submit(lambda lane: self._work(lane, grammar, future))
        return future

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._quick.close()
        self._slow.close()
        with self._lock:
            begun, self._begun = self._begun, {}
            self._kept.clear()
        for future in begun.values():
            future.set_exception(Overloaded("grammar: the model is being unloaded"))

    def _work(self, lane: _Lane, grammar: Grammar, future: "Future[Made]") -> None:
        try:
            text, size = lane.helper.checked(grammar, self._limits, lane.cpu_s)
            kept = _Kept(self._make(text), "", size + len(grammar.text))
        except CompileTimeExceededError:
            if lane is self._quick and self._slow.cpu_s > lane.cpu_s:
                self._defer(grammar, future)
                return
            error = f"too complex: expected at most {lane.cpu_s:g} s of CPU time to compile it (grammar_compile_s)"
            kept = _Kept(None, f"grammar: {error}", len(grammar.text))
        except InvalidInput as error:
            kept = _Kept(None, str(error), len(grammar.text))
        except Exception as error:
            self._fail(grammar, future, error)
            return
        with self._lock:
            if self._begun.pop(grammar, None) is None:
                return  # closed meanwhile
            dropped = self._keep(grammar, kept)
        _resolve(future, kept)
        if dropped:
            release_memory()

    def _defer(self, grammar: Grammar, future: "Future[Made]") -> None:
        """Compile it among those that take long."""

        def work(slow: _Lane) -> None:
            self._work(slow, grammar, future)
            with self._lock:
                slow.waiting -= 1

        with self._lock:
            full = self._closed or self._slow.waiting >= _WAITING_SLOW
            if not full:
                self._slow.waiting += 1
                self._slow.submit(work)
        if full:
            error = f"grammar: {_WAITING_SLOW} other grammars that take long wait for being compiled; try again later"
            self._fail(grammar, future, Overloaded(error))

    def _fail(self, grammar: Grammar, future: "Future[Made]", error: Exception) -> None:
        """Nothing is known of the grammar: it may be tried again."""
        with self._lock:
            if self._begun.pop(grammar, None) is None:
                return  # closed meanwhile
        future.set_exception(error)

    def _keep(self, grammar: Grammar, kept: _Kept[Made]) -> bool:
        """Keep it in place of those that were asked for longest ago. Gives whether any was dropped."""
        most = self._limits.grammar_memory << 20
        dropped = False
        self._kept[grammar] = kept
        self._size += kept.size
        while len(self._kept) > self._limits.grammar_cache or self._size > most:
            _, oldest = self._kept.popitem(last=False)
            self._size -= oldest.size
            dropped = dropped or oldest.made is not None
        return dropped


def _known(kept: "_Kept[Made]") -> "Future[Made]":
    future: Future[Made] = Future()
    _resolve(future, kept)
    return future


def _resolve(future: "Future[Made]", kept: "_Kept[Made]") -> None:
    if kept.made is None:
        future.set_exception(InvalidInput(kept.error))
    else:
        future.set_result(kept.made)


def deep_threads(count: int, name: str) -> ThreadPoolExecutor:
    """Threads with a stack for work that recurses."""
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


def release_memory() -> None:
    """Give freed memory back to the system; only glibc can."""
    import ctypes

    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
