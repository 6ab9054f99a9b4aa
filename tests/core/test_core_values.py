"""Small parts of the core: histograms, paths, log lines, vectors, text chunks, names, shared memory."""

import fcntl
import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dragoman.core.bytes_tensor import BytesTensor, flatten, raw_of, texts_of, with_parameters
from dragoman.core.datatypes import BYTES, DATATYPES, FP64, datatype, datatype_of
from dragoman.core.errors import DragomanError, InvalidInput, InvalidOutput, Overloaded
from dragoman.core.metrics import SECONDS, TOKENS, Histogram, Sample
from dragoman.core.options import child_environment, forget_secrets
from dragoman.core.paths import match_handler
from dragoman.core.signature import TensorSpec
from dragoman.core.spec import check_load_name, check_name
from dragoman.core.tensor import NONE, Tensor
from dragoman.core.text import Generation, PromptInfo, Text, Token, merge_chunks
from dragoman.core.vectors import (
    MARK,
    VectorFunction,
    as_vector,
    as_vectors,
    find_vector_function,
    replace_item,
    split_outputs,
)
from dragoman.system import logs
from dragoman.system.shared_memory import SharedBuffer
from dragoman.system.threads import DaemonThreads, cancellation_check, run_cancellable


def test_histogram_buckets_are_cumulative() -> None:
    histogram = Histogram((0.5, 1, 2.0))
    for value in (0.25, 1.0, 1.5, 4.0, 8.0):
        histogram.observe(value)
    assert list(histogram.samples("latency", {"model": "m"})) == [
        Sample("latency_bucket", {"model": "m", "le": "0.5"}, 1),
        Sample("latency_bucket", {"model": "m", "le": "1.0"}, 2),
        Sample("latency_bucket", {"model": "m", "le": "2.0"}, 3),
        Sample("latency_bucket", {"model": "m", "le": "+Inf"}, 5),
        Sample("latency_sum", {"model": "m"}, 14.75),
        Sample("latency_count", {"model": "m"}, 5),
    ]


def test_bucket_bounds_increase() -> None:
    assert list(SECONDS) == sorted(set(SECONDS))
    assert (SECONDS[0], SECONDS[-1]) == (0.0005, 43200.0)
    assert (TOKENS[:4], TOKENS[-1]) == ((1.0, 2.0, 4.0, 8.0), 131072.0)


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("POST", "/scores/a%20b", ("POST /scores/{name}", {"name": "a b"})),
        ("POST", "scores/a/", ("POST /scores/{name}", {"name": "a"})),
        ("GET", "/scores/a", ("GET /scores/a", {})),
        ("GET", "/scores/b", ("GET scores/{other}/", {"other": "b"})),
        ("GET", "/x/1/y/2", ("GET /x/{a}/y/{b}", {"a": "1", "b": "2"})),
        ("GET", "/x/1/z/2", None),
        ("GET", "/x/1/y", None),
        ("PUT", "/scores/a", None),
        ("GET", "/{half", ("GET /{half", {})),
        ("GET", "/other", None),
        ("GET", "/half}", ("GET /half}", {})),
    ],
)
def test_paths_match_the_first_pattern_that_fits(method: str, path: str, expected: Any) -> None:
    handlers = [
        "POST /scores/{name}",
        "GET /scores/a",
        "GET scores/{other}/",
        "GET /x/{a}/y/{b}",
        "GET /{half",
        "GET /half}",
    ]
    assert match_handler(handlers, method, path) == expected


@pytest.fixture
def restored_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    root, jax = logging.getLogger(), logging.getLogger("jax._src.xla_bridge")
    before = root.handlers, root.level, jax.level
    for name in ("DRAGOMAN_LOG_FORMAT", "DRAGOMAN_LOG_LEVEL"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield
    root.handlers, _, _ = before
    root.setLevel(before[1])
    jax.setLevel(before[2])


@pytest.mark.usefixtures("restored_logging")
def test_log_lines_are_json_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    logs.set_up("json", "debug")
    assert (os.environ["DRAGOMAN_LOG_FORMAT"], os.environ["DRAGOMAN_LOG_LEVEL"]) == ("json", "debug")
    log = logging.getLogger("some.name")
    log.debug("hello %s", "there", extra={"model": "m", "path": os.sep})
    record = logging.LogRecord("some.name", logging.ERROR, __file__, 1, "failed", None, None)
    record.created, record.msecs = 0.0, 7.9
    try:
        raise ZeroDivisionError("deliberate")
    except ZeroDivisionError:
        record.exc_info = sys.exc_info()
    log.handle(record)
    first, second = (json.loads(line) for line in written.getvalue().splitlines())
    assert list(first) == ["time", "level", "logger", "pid", "message", "model", "path"]
    expected = {"level": "debug", "logger": "some.name", "pid": os.getpid(), "message": "hello there", "model": "m"}
    assert expected.items() <= first.items()
    assert second["time"] == "1970-01-01T00:00:00.007Z"
    assert second["level"] == "error"
    assert second["traceback"].endswith("ZeroDivisionError: deliberate")


def test_control_characters_cannot_forge_log_lines() -> None:
    text = "one\ntwo\rthree\ttab\x00\x1b\x1f\x7f\x80\x9f\xa0\u2028\u2029\u202aend"
    record = logging.LogRecord("a", logging.INFO, __file__, 1, text, None, None)
    escaped = "one\\ntwo\\rthree\ttab\\x00\\x1b\\x1f\\x7f\\x80\\x9f\xa0\\u2028\\u2029\u202aend"
    assert logs.TextFormatter().format(record).endswith(f" INFO    a [{os.getpid()}]: {escaped}")
    try:
        raise ValueError("first\nsecond\rthird")
    except ValueError:
        record.exc_info = sys.exc_info()
    record.stack_info = "Stack:\n  here"
    lines = logs.TextFormatter().format(record).split("\n")
    assert lines[1] == "  | Traceback (most recent call last):"
    assert lines[-4:] == ["  | ValueError: first", "  | second\\rthird", "  | Stack:", "  |   here"]


@pytest.mark.usefixtures("restored_logging")
def test_a_worker_logs_as_the_process_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    logs.set_up_from_environment()
    logging.getLogger("a").debug("hidden")
    logging.getLogger("a").info("plain")
    assert written.getvalue().endswith(f" INFO    a [{os.getpid()}]: plain\n")
    assert len(written.getvalue().splitlines()) == 1
    assert logging.getLogger("jax._src.xla_bridge").level == logging.WARNING
    logs.set_up("json", "warning")
    logs.set_up_from_environment()
    logging.getLogger("a").info("hidden")
    logging.getLogger("a").warning("shown")
    assert json.loads(written.getvalue().splitlines()[-1])["message"] == "shown"


def test_cancellation_check_reports_cancellation() -> None:
    cancelled = threading.Event()
    is_cancelled = run_cancellable(cancelled, lambda _: cancellation_check(), None)
    assert not is_cancelled()
    cancelled.set()
    assert is_cancelled()
    assert not cancellation_check()()
    with pytest.raises(KeyError):
        run_cancellable(cancelled, dict[str, int]().__getitem__, "x")
    assert not cancellation_check()()


@pytest.mark.parametrize("name", ["a", "A_0.b-c", "_", "9", "x" * 256])
def test_valid_names_are_accepted(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", ".a", "-a", "a/b", "a b", "é", "x" * 257, "a\n"])
def test_invalid_names_are_rejected(name: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_name(name, "version")
    assert caught.value.message == (
        f"version {name!r} is not allowed; expected 1 to 256 letters, digits, '_', '-' and '.', not beginning "
        "with '.' or '-'"
    )
    with pytest.raises(InvalidInput, match=r"^model name .* is not allowed"):
        check_name(name)
    with pytest.raises(InvalidInput, match=r"^(invalid model name|failed to load|Model name cannot be empty)"):
        check_load_name(name)


def test_errors_have_a_message_and_a_retry_delay() -> None:
    assert DragomanError("why", "else").message == "why"
    assert DragomanError().message == "DragomanError"
    assert (InvalidInput("x").retry_after_s, Overloaded("x").retry_after_s) == (None, 1.0)


# --- return values of vector functions ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "sizes", "expected"),
    [
        (([1, 2], 3.0), (2, 1), [[1, 2], [3]]),
        ([[1, 2], [3]], (2, 1), [[1, 2], [3]]),
        ([(1, 2), np.array([3])], (2, 1), [[1, 2], [3]]),
        (np.array([[1, 2], [3, 4]]), (2, 2), [[1, 2], [3, 4]]),
        ([1, 2], (2,), [[1, 2]]),
        (np.array([1, 2], np.float32), (2,), [[1, 2]]),
        (5, (1,), [[5]]),
        (np.float64(5), (1,), [[5]]),
        (True, (1,), None),
        ([], (0,), [[]]),
        (np.array([], object), (0,), [[]]),
        ((), (), []),
    ],
)
def test_return_values_become_vectors(value: Any, sizes: tuple[int, ...], expected: Any) -> None:
    if expected is None:
        with pytest.raises(InvalidOutput, match="output 0: expected real numbers, got bool of bool"):
            as_vectors(value, sizes)
        return
    vectors = as_vectors(value, sizes)
    assert [each.tolist() for each in vectors] == expected
    assert {each.dtype for each in vectors} <= {np.dtype(np.float64)}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (([1, 2],), "expected 2 output vectors, got 1"),
        (([1, 2], [1, 2]), "output 1: expected 3 numbers, got 2"),
        (([1, 2], [[1, 2, 3]]), "output 1: expected a vector of 3 numbers, got shape [1, 3]"),
        ((["a", "b"], [1, 2, 3]), "output 0: expected real numbers, got list of str32"),
        (
            ([1j, 2], [1, 2, 3]),
            "output 0: expected real numbers, got list of complex128; return its real part (.real) if the imaginary "
            "part is zero",
        ),
    ],
)
def test_invalid_return_values_are_rejected(value: Any, expected: str) -> None:
    with pytest.raises(InvalidOutput) as caught:
        as_vectors(value, (2, 3))
    assert caught.value.message == expected


def test_a_ragged_list_is_rejected() -> None:
    with pytest.raises(InvalidOutput, match=r"^here: expected numbers, got list: "):
        as_vector([[1, 2], [3]], 2, "here")


def test_a_vector_that_fits_is_not_copied() -> None:
    vector = np.zeros(3)
    assert as_vector(vector, 3, "here") is vector
    assert split_outputs(vector) == (vector,)
    (member,) = split_outputs([vector])
    assert member is vector
    assert split_outputs([]) == ([],)
    assert split_outputs([[1], 2]) == ([[1], 2],)


class Twice(VectorFunction):
    def evaluate(self, inputs: Any, config: Any) -> Any:
        return 2 * inputs[0]


def test_sources_lists_overridden_methods() -> None:
    function = Twice()
    assert function.sources() == {"evaluate": "author"}
    function.gradient = lambda *_: None  # type: ignore[method-assign]
    assert function.sources() == {"evaluate": "author", "gradient": "author"}
    assert function.notes() == {}
    for method, count in (("input_sizes", 1), ("gradient", 5), ("apply_jacobian", 5), ("apply_hessian", 7)):
        with pytest.raises(NotImplementedError):
            getattr(VectorFunction(), method)(*[None] * count)


def test_find_vector_function() -> None:
    function = Twice()

    def plain() -> None: ...

    assert find_vector_function(function) is function
    assert find_vector_function(plain) is None
    setattr(plain, MARK, function)
    assert find_vector_function(plain) is function
    setattr(plain, MARK, "something else")
    assert find_vector_function(plain) is None
    assert find_vector_function(3) is None


def test_vector_functions_have_defaults() -> None:
    function = VectorFunction()
    assert (function.input_names, function.output_names) == ((), ())
    assert (function.vectorised, function.concurrency) == (False, 1)
    options = function.derivatives, function.verify, function.evaluate_at_load, function.max_evaluations
    assert options == (None, None, True, 10_000)
    assert function.unavailable() == ""


def test_pytorch_tensors_become_vectors() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.tensor([1.0, 2.0], requires_grad=True)
    assert as_vector(tensor, 2, "here").tolist() == [1.0, 2.0]


def test_replace_item() -> None:
    assert replace_item([1, 2, 3], 0, 9) == (9, 2, 3)
    assert replace_item([1, 2, 3], 2, 9) == (1, 2, 9)


# --- text ------------------------------------------------------------------------------------------------


def test_chunks_of_completions_are_merged_in_order() -> None:
    info = (PromptInfo("p", 1), PromptInfo("q", 2))
    one, two = Token(1, "a"), Token(2, "b")
    chunks = [
        Generation((Text(1, 0, "B", (two,)),), info),
        Generation((Text(0, 1, "x"), Text(0, 0, "a", (one,), 1))),
        Generation((Text(0, 0, "b", (two,), 2, "length"),), (PromptInfo("late", 0),)),
    ]
    assert merge_chunks(chunks) == Generation(
        (Text(0, 0, "ab", (one, two), 2, "length"), Text(0, 1, "x"), Text(1, 0, "B", (two,))), info
    )


def texts_in_every_form(*texts: str) -> list[Tensor]:
    shape = (len(texts),)
    elements = [text.encode() for text in texts]
    starts = np.cumsum([0, *(len(each) + 4 for each in elements)], dtype=np.int64)[:-1]
    raw = BytesTensor.of_raw(raw_encoding(elements), starts, shape, {"a": 1})
    return [
        BytesTensor.of_texts(list(texts), shape, {"a": 1}),
        BytesTensor.of_any_texts(list(texts), shape, {"a": 1}),
        Tensor(np.array(elements, object), BYTES, {"a": 1}),
        *([] if "\0" in "".join(texts) else [raw]),
    ]


def raw_encoding(elements: list[bytes]) -> bytes:
    return b"".join(len(each).to_bytes(4, "little") + each for each in elements)


@pytest.mark.parametrize("more", [[], ["four"], ["fo\0r"], ["n" * 300, *map(str, range(30))], ["\0\0\0\0"] * 30])
def test_texts_are_equal_in_every_form(more: list[str]) -> None:
    texts = ["é", "", "b", *more, "b"] if len(more) < 2 else ["é", "b", *more]
    expected = [each.encode() for each in texts]
    half = (2, len(texts) // 2)
    for tensor in texts_in_every_form(*texts)[: 3 if "n" * 300 in texts else None]:
        assert bytes(raw_of(tensor)) == raw_encoding(expected)
        assert texts_of(tensor) == texts
        assert tensor.data.tolist() == expected
        assert {*map(type, tensor.data.tolist())} == {bytes}
        assert (tensor.shape, tensor.datatype, tensor.parameters) == ((len(texts),), BYTES, {"a": 1})
        assert bytes(raw_of(tensor)) == raw_encoding(expected)  # with elements that exist
        assert texts_of(tensor) == texts
        assert tensor.data is tensor.data
        assert type(tensor) is Tensor or not tensor.data.flags.writeable
        assert (flatten(tensor).shape, flatten(tensor).parameters) == ((len(texts),), {"a": 1})
        if isinstance(tensor, BytesTensor) and len(texts) % 2 == 0:
            tensor = tensor.replace(half, {"b": 2})
            assert (tensor.shape, tensor.data.tolist()) == (half, [expected[: half[1]], expected[half[1] :]])
            assert (tensor.datatype, tensor.parameters) == (BYTES, {"b": 2})
            assert (flatten(tensor).shape, flatten(tensor).parameters) == ((len(texts),), {"b": 2})
        assert with_parameters(tensor, NONE).parameters is NONE
        assert with_parameters(tensor, NONE).shape == tensor.shape


def test_no_text_in_every_form() -> None:
    for tensor in texts_in_every_form():
        assert (tensor.data.tolist(), texts_of(tensor), bytes(raw_of(tensor))) == ([], [], b"")


def test_texts_of_plain_tensors() -> None:
    plain = Tensor(np.array([[b"a", b"b"], [b"c", b"d"]], object), BYTES, {"a": 1})
    assert texts_of(plain) == ["a", "b", "c", "d"]
    assert (flatten(plain).shape, flatten(plain).parameters) == ((4,), {"a": 1})
    numbers = with_parameters(Tensor.of(np.zeros((2, 3))), {"b": 2})
    assert (numbers.shape, numbers.datatype, numbers.parameters) == ((2, 3), FP64, {"b": 2})


def test_unknown_datatypes_are_rejected() -> None:
    with pytest.raises(InvalidInput) as caught:
        datatype_of(np.dtype("datetime64[s]"))
    assert caught.value.message == (
        "arrays of dtype datetime64[s] have no datatype in the protocol; convert them first"
    )
    with pytest.raises(InvalidInput) as caught:
        datatype("FP31")
    assert caught.value.message == (
        "unknown datatype 'FP31': expected one of BOOL, UINT8, UINT16, UINT32, UINT64, INT8, INT16, INT32, INT64, "
        "FP16, BF16, FP32, FP64, BYTES"
    )


def test_datatypes_have_their_sizes() -> None:
    assert {name: (each.size, each.kind) for name, each in DATATYPES.items()} == {
        "BOOL": (1, "bool"),
        "UINT8": (1, "uint"),
        "UINT16": (2, "uint"),
        "UINT32": (4, "uint"),
        "UINT64": (8, "uint"),
        "INT8": (1, "int"),
        "INT16": (2, "int"),
        "INT32": (4, "int"),
        "INT64": (8, "int"),
        "FP16": (2, "float"),
        "BF16": (2, "float"),
        "FP32": (4, "float"),
        "FP64": (8, "float"),
        "BYTES": (0, "bytes"),
    }
    assert all(each.dtype.itemsize == each.size for name, each in DATATYPES.items() if name != "BYTES")


def test_shared_buffers_without_memory_files_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    with pytest.raises(OSError, match=r"^memory files need Linux$"):
        SharedBuffer.create(1)


def test_shared_buffer_that_cannot_be_created_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.listdir("/proc/self/fd")

    def fail(*_: Any) -> None:
        raise OSError("no seals")

    monkeypatch.setattr(fcntl, "fcntl", fail)
    with pytest.raises(OSError, match=r"^no seals$"):
        SharedBuffer.create(1)
    assert os.listdir("/proc/self/fd") == before


def test_child_processes_do_not_inherit_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAGOMAN_CONTROL_TOKEN", "secret")
    assert child_environment(runs_models=True) == {
        name: value for name, value in os.environ.items() if value != "secret"
    }
    forget_secrets()
    assert "DRAGOMAN_CONTROL_TOKEN" not in os.environ
    forget_secrets()


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_other_processes_do_not_see_secrets_in_the_environment_of_the_server() -> None:
    code = (
        "import os; from dragoman.core.options import collector_headers, forget_secrets; forget_secrets(); "
        "print(open('/proc/self/environ').read().split(chr(0)), collector_headers('traces'), os.environ['KEPT'])"
    )
    secrets = {"DRAGOMAN_API_KEY": "sesame", "DRAGOMAN_WORKER_SECRET": "", "OTEL_EXPORTER_OTLP_HEADERS": "k=tulip"}
    others = {"KEPT": "DRAGOMAN_API_KEY=1", "DRAGOMAN_API_KEYS": "file"}
    found = subprocess.run([sys.executable, "-c", code], env={**secrets, **others}, capture_output=True, text=True)
    shown, _, rest = found.stdout.rpartition("] ")
    assert rest == "k=tulip DRAGOMAN_API_KEY=1\n", found.stderr
    assert "'KEPT=DRAGOMAN_API_KEY=1', 'DRAGOMAN_API_KEYS=file'" in shown
    assert "'DRAGOMAN_API_KEY=******', 'DRAGOMAN_WORKER_SECRET=', 'OTEL_EXPORTER_OTLP_HEADERS=*******'" in shown


@pytest.mark.parametrize(
    "name", [f"OTEL_EXPORTER_OTLP_{signal}HEADERS" for signal in ("", "TRACES_", "METRICS_", "LOGS_")]
)
def test_only_child_processes_without_models_get_the_headers_for_a_collector(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "api-key=secret")
    assert "api-key=secret" not in child_environment(runs_models=True).values()
    assert child_environment(runs_models=False)[name] == "api-key=secret"


def test_thread_pools_reject_jobs_after_shutdown() -> None:
    threads = DaemonThreads(1, "done")
    threads.shutdown()
    with pytest.raises(RuntimeError, match=r"^cannot schedule new futures after shutdown$"):
        threads.submit(int)


@pytest.mark.parametrize(("of", "hint"), [("FP32", "FP32"), (np.float32, "FP32"), ("INT8", "INT8")])
def test_a_datatype_that_is_a_text_or_of_numpy_is_rejected(of: Any, hint: str) -> None:
    with pytest.raises(TypeError, match=f"'x': expected a datatype such as dragoman.{hint}, got"):
        TensorSpec("x", of)


@pytest.mark.parametrize(("zone", "expected"), [("Asia/Kolkata", "06:04:59,000+05:30"), ("UTC", "00:34:59,000+00:00")])
def test_times_of_the_text_log_have_an_offset(zone: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    record = logging.LogRecord("a", logging.INFO, "", 0, "text", (), None)
    record.created, record.msecs = 1_700_008_499.0, 0.0
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert logs.TextFormatter().format(record).split(" ")[1] == expected
    finally:
        monkeypatch.undo()
        time.tzset()
