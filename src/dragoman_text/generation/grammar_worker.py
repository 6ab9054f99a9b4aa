"""Helper process that compiles grammars, each in a fork of its own with limits on CPU time, time and memory.

llguidance has no cancellation, some of its work is bounded by no limit of its own (`multipleOf`, patterns that must be
disjoint), and a chain of 5,000 references overflows the stack. A fork can be killed, and gives all its memory back.

The helper reads a line of JSON with the tokenizer, then one for each grammar, and writes a line for each. It ends with
its standard input, or when nothing has come for `idle_s`.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from dragoman_text.generation.gbnf import literal, to_lark
from dragoman_text.generation.json_schema import json_grammar
from dragoman_text.generation.structural_tags import to_grammars

# Limits of llguidance. With its default lexer fuel of 1,000,000, nested repetitions take a second and 60 MiB; 300,000
# suffices for 20,000 alternatives. A lexer state takes 1 to 2 KB. Tokens are consumed with the interpreter lock held,
# for up to 30 ms with 30,000 items, which suffice for 490 properties.
LIMITS: Mapping[str, Any] = {
    "initial_lexer_fuel": 300_000,
    "max_lexer_states": 50_000,
    "step_max_items": 30_000,
    "verbose_errors": False,
}
# Stack of a fork. Threads of the server that use grammars have more (`grammar_compiler`).
_STACK_BYTES = 4 << 20

# prctl(2): the signal sent to a process when its parent ends.
_PR_SET_PDEATHSIG = 1

# Compilation has a lower priority than generation.
_NICE = 5

# Of a grammar without continuation. It may be satisfiable: llguidance finds no text for some combinations of rules.
UNSATISFIABLE = (
    "no text was found that satisfies the grammar: it contradicts itself, or combines rules that cannot be followed "
    'here, such as overlapping "patternProperties"'
)

# Reason why the kernel killed a fork, by signal.
SIGNAL_REASONS: Mapping[int, str] = {
    signal.SIGPROF: "cpu",
    signal.SIGALRM: "wall",
    signal.SIGABRT: "memory",
    signal.SIGKILL: "memory",
    signal.SIGSEGV: "depth",
    signal.SIGBUS: "depth",
}


def grammar_text(kind: str, text: str, *, compact: bool = False) -> str:
    """Return a grammar in llguidance's format; `compact`: JSON has one form. Raises ValueError if it is invalid."""
    from llguidance import LLMatcher as Matcher

    match kind:
        case "json_schema" | "json_object":
            form, text = json_grammar(text or '{"type": "object"}', compact=compact)
            write = Matcher.grammar_from_lark if form == "lark" else Matcher.grammar_from_json_schema
            result: str = write(text)
        case "regex":
            result = Matcher.grammar_from_regex(text)
        case "lark":
            result = Matcher.grammar_from_lark(text)
        case "gbnf":
            result = Matcher.grammar_from_lark(to_lark(text))
        case "choice":
            result = Matcher.grammar_from_lark(_choice(text))
        case "structural_tag":
            result = to_grammars(text, compact=compact)
        case _:
            raise ValueError(f"unknown kind of grammar: {kind!r}")
    return result


def _choice(text: str) -> str:
    options = json.loads(text)
    if not isinstance(options, list) or not options or not all(isinstance(each, str) and each for each in options):
        raise ValueError("expected a list of non-empty strings")
    return "start: " + " | ".join(map(literal, options))


def matcher(tokenizer: Any, text: str) -> Any:
    """Return llguidance's matcher of a compiled grammar. Raises ValueError if it is invalid or too large."""
    from llguidance import LLMatcher, LLParserLimits

    result = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(**LIMITS))
    if result.is_error():
        raise ValueError(first_line(result.get_error()))
    return result


def allowed_tokens(matcher: Any, size: int) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Return the mask of tokens that may come next, [size].

    Raises ValueError if a limit is exceeded or no continuation satisfies the grammar.
    """
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:size]
    if matcher.is_error():
        raise ValueError(first_line(matcher.get_error()))
    mask = np.zeros(size, np.bool_)
    mask[: len(bits)] = bits
    return mask


def first_line(error: str) -> str:
    """Return an error of llguidance without its internal state and source locations.

    The reason of an error in a regular expression is in a later line.
    """
    line, *others = error.split("\n")
    if line.startswith("NoExtension"):
        return UNSATISFIABLE
    if line.startswith("panic"):
        return "too large to compile"
    reason = next((each.partition(" ")[2] for each in others if each.startswith("error: ")), "")
    return " ".join(filter(None, (line[:300], reason[:300])))


def compile_and_check(
    kind: str, text: str, tokenizer: Any, size: int, ends: list[int], *, compact: bool = False
) -> tuple[str, Any]:
    """Compile a grammar and try its first step; return it in llguidance's format and as a matcher.

    Raises ValueError if it is invalid, too large or unsatisfiable (for JSON, by a non-empty text).
    """
    compiled = grammar_text(kind, text, compact=compact)
    compiled_matcher = matcher(tokenizer, compiled)
    accepts_empty = compiled_matcher.is_accepting()
    tokens = np.setdiff1d(np.flatnonzero(allowed_tokens(compiled_matcher, size)), ends)
    if not len(tokens) and (kind.startswith("json") or not accepts_empty):
        raise ValueError(UNSATISFIABLE)
    for token in {int(each) for each in tokens[:1]} | {int(each) for each in tokens[-1:]}:
        # An exceeded limit of the first mask is only reported when a token is consumed.
        tried = compiled_matcher.deep_copy()
        if not tried.consume_token(token):
            raise ValueError(first_line(tried.get_error()))
    return compiled, compiled_matcher


def main() -> None:
    from llguidance import LLTokenizer

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal: the server ends this process
    stdin = os.fdopen(os.dup(0), "rb", buffering=0)
    setup = json.loads(_read_line(stdin))
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    tokenizer = LLTokenizer(setup["tokenizer"], n_vocab=setup["size"], eos_token=setup["ends"] or None)
    _write_line({"ready": True})
    while select.select([stdin], [], [], setup["idle_s"])[0]:
        line = _read_line(stdin)
        if not line:
            return
        _write_line(_compile_in_fork(json.loads(line), tokenizer, setup["size"], setup["ends"]))


def _read_line(stream: Any) -> bytes:
    line = bytearray()
    while not line.endswith(b"\n"):
        chunk = stream.read(1 << 20)
        if not chunk:
            return b""
        line += chunk
    return bytes(line)


def _write_line(response: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(response) + "\n")
    sys.stdout.flush()


def _compile_in_fork(request: Mapping[str, Any], tokenizer: Any, size: int, ends: list[int]) -> Mapping[str, Any]:
    """Return the result of a fork: {"grammar", "bytes"}, {"error"}, or {"killed"} with the reason."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            _limit(request["cpu_s"], request["wall_s"], request["memory_bytes"])
            response = _answer(request, tokenizer, size, ends)
            with os.fdopen(writing, "wb") as stream:
                stream.write(json.dumps(response).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        output = stream.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return {"killed": SIGNAL_REASONS.get(os.WTERMSIG(status), "depth")}
    return json.loads(output) if output else {"killed": "memory"}


def _answer(request: Mapping[str, Any], tokenizer: Any, size: int, ends: list[int]) -> Mapping[str, Any]:
    before = _allocated_bytes()
    try:
        kind, compact = request["kind"], request["compact"]
        text, compiled_matcher = compile_and_check(kind, request["text"], tokenizer, size, ends, compact=compact)
    except MemoryError:
        return {"killed": "memory"}
    except ValueError as error:
        return {"error": str(error)}
    except BaseException as error:  # panics of Rust
        return {"error": f"cannot be compiled ({type(error).__name__})"}
    size = max(_allocated_bytes() - before, 0)
    del compiled_matcher  # kept alive until it was measured
    return {"grammar": text, "bytes": max(size, 4 * len(text))}


def _limit(cpu_s: float, wall_s: float, memory_bytes: int) -> None:
    """Set limits of this process: the kernel kills it if it exceeds one, or when the helper has ended.

    A fork that outlived the helper would keep its output open, and unloading the model would wait for it.
    """
    with contextlib.suppress(AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    with contextlib.suppress(ValueError, OSError):
        with open("/proc/self/statm") as stream:
            limit = int(stream.read().split()[0]) * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and later."""

    _fields_ = [
        ("before", ctypes.c_size_t * 4),
        ("hblkhd", ctypes.c_size_t),
        ("between", ctypes.c_size_t * 2),
        ("uordblks", ctypes.c_size_t),
        ("after", ctypes.c_size_t * 2),
    ]


def _allocated_bytes() -> int:
    """Return the allocated bytes of this process; 0 if the C library does not provide the number."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    mallinfo.restype = _MallInfo
    info = mallinfo()
    return int(info.uordblks) + int(info.hblkhd)


if __name__ == "__main__":
    main()
