"""Calls of a Python model to other models, and the queue of its requests, as values."""

import json
from collections.abc import Iterator
from contextvars import ContextVar, copy_context
from typing import Any

import numpy as np
import pytest

from dragoman.core import errors
from dragoman.core.callers import Caller
from dragoman.core.calls import Infer, Inference, Request
from dragoman.core.schedule import ScheduleOptions
from dragoman.core.tensor import Tensor
from dragoman_triton import pb_utils
from dragoman_triton.bls import ERRORS, MODULES, ServerAccess, deadline, import_with_access, request_class
from dragoman_triton.request_queue import PendingRequest, RequestQueue

FLAGS = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START, pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
Error = pb_utils.TritonError
PLACE: ContextVar[str] = ContextVar("place", default="outside")


class Siblings:
    """The other models: they answer `answers` and keep the requests."""

    is_used = True

    def __init__(self, *answers: Any, streams: bool = False) -> None:
        self.answers, self._streams = answers, streams
        self.requests: list[Request[Any]] = []
        self.changes: list[Any] = []
        self.places: list[str] = []
        self.is_closed = False

    def call(self, request: Any) -> Any:
        self.places.append(PLACE.get())
        self.requests.append(request)
        (answer,) = self.answers
        if isinstance(answer, Exception):
            raise answer
        return answer

    def streams(self, name: str) -> bool:
        return self._streams

    def stream(self, request: Any) -> Any:
        self.requests.append(request)
        siblings = self

        class Stream:
            def __iter__(self) -> Iterator[Any]:
                for each in siblings.answers:
                    if isinstance(each, errors.WorkerLost):
                        raise each
                    yield each

            def close(self) -> None:
                siblings.is_closed = True

        return Stream()

    def load(self, name: str, config: str = "", files: Any = ()) -> None:
        self._change("load", name, config, dict(files))

    def unload(self, name: str) -> None:
        self._change("unload", name)

    def _change(self, *change: Any) -> None:
        self.changes.append(change)
        for answer in self.answers:
            raise answer

    def unavailable(self, name: str, version: str = "") -> str:
        return "" if (name, version) in (("up", ""), ("up", "2")) else "not ready"

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


def access(*answers: Any, streams: bool = False) -> tuple[ServerAccess, Siblings]:
    siblings = Siblings(*answers, streams=streams)
    found = ServerAccess("me", siblings)
    found.is_executing = True
    return found, siblings


def inference(number: int, **fields: Any) -> Inference:
    return Inference({"y": Tensor.of(np.array([number]))}, **fields)


def values(responses: Any) -> list[Any]:
    """Return the number of each response, the code of its error, or None if it is empty."""
    found: list[Any] = []
    for each in responses:
        tensors = each.output_tensors()
        empty = int(tensors[0].as_numpy()[0]) if tensors else None
        found.append(("error", each.error().code(), each.error().message()) if each.has_error() else empty)
    return found


def test_what_the_other_model_gets() -> None:
    me, siblings = access(inference(5, parameters={"k": "v"}))
    kind = request_class(me)
    tensor = pb_utils.Tensor("x", np.array([[1, 2]], np.int32))
    response = kind(
        request_id="i",
        correlation_id=7,
        inputs=[tensor],
        requested_output_names=["y", b"z"],  # type: ignore[list-item]
        model_name="other",
        model_version=3,
        flags=FLAGS[0],
        timeout=50,
        parameters={"own": 1},
    ).exec()
    (output,) = response.output_tensors()
    assert (output.name(), output.as_numpy().tolist(), json.loads(response.parameters())) == ("y", [5], {"k": "v"})
    (request,) = siblings.requests
    assert (request.model, request.version, request.id, request.deadline_s) == ("other", "3", "i", None)
    call: Any = request.call
    assert {name: each.data.tolist() for name, each in call.inputs.items()} == {"x": [[1, 2]]}
    assert call.outputs == ("y", "z")
    flags = {"sequence_start": True, "sequence_end": False}
    assert call.parameters == {"own": 1, "sequence_id": 7, **flags, "timeout": 50}
    kind(model_name="other", correlation_id="s", flags=FLAGS[1]).exec()
    call = siblings.requests[1].call
    assert call.parameters == {"sequence_id": "s", "sequence_start": False, "sequence_end": True}
    assert (call.inputs, call.outputs, siblings.requests[1].version) == ({}, (), "")
    kind(model_name="other", model_version=0, parameters='{"a": 2}').exec()
    assert (siblings.requests[2].version, siblings.requests[2].call.parameters) == ("0", {"a": 2})  # type: ignore[attr-defined]


async def test_calls_have_the_deadline_and_the_context_of_a_trace() -> None:
    me, siblings = access(inference(5))
    kind = request_class(me)
    PLACE.set("of the trace")
    trace = pb_utils.InferenceTrace(copy_context())
    PLACE.set("of the model")
    token = deadline.set(12.5)
    for given in (trace, None, pb_utils.InferenceTrace(), "text"):
        assert values([kind(model_name="other", trace=given).exec()]) == [5]
    assert values([await kind(model_name="other").async_exec()]) == [5]
    deadline.reset(token)
    assert siblings.places == ["of the trace", *["of the model"] * 4]
    assert [each.deadline_s for each in siblings.requests] == [12.5] * 5


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ModelNotFound("x"), Error.NOT_FOUND),
        (errors.AlreadyLoaded("x"), Error.ALREADY_EXISTS),
        (errors.InvalidInput("x"), Error.INVALID_ARG),
        (errors.TooLarge("x"), Error.INVALID_ARG),
        (errors.NotReady("x"), Error.UNAVAILABLE),
        (errors.NotSupported("x"), Error.UNSUPPORTED),
        (errors.NotImplementedByModel("x"), Error.UNSUPPORTED),
        (errors.CancelledByModel("x"), Error.CANCELLED),
        (errors.UnknownFailure("x"), Error.UNKNOWN),
        (errors.ModelFailed("x"), Error.INTERNAL),
        (errors.WorkerLost("x"), Error.INTERNAL),
    ],
)
def test_errors_of_other_models_are_responses(error: errors.DragomanError, code: int) -> None:
    me, _ = access(error)
    response = request_class(me)(model_name="other").exec()
    assert (response.has_error(), values([response])) == (True, [("error", code, "x")])
    # A model that answers with this code has the error of the same class, but for INTERNAL.
    assert (code in ERRORS) == (code != Error.INTERNAL)
    assert values(request_class(me)(model_name="other").exec(decoupled=True))[0] == ("error", code, "x")


def test_a_model_does_not_call_itself_and_only_calls_while_it_executes() -> None:
    me, _ = access()
    text = "model 'me' called itself, which would wait for its own instance"
    for response in (
        request_class(me)(model_name="me").exec(),
        *request_class(me)(model_name="me").exec(decoupled=True),
    ):
        assert values([response]) == [("error", Error.INTERNAL, text)]
    me.is_executing = False
    for kind in (request_class(me), pb_utils.InferenceRequest):
        with pytest.raises(pb_utils.TritonModelException) as error:
            kind(model_name="other").exec()
        assert str(error.value) == "BLS is only supported during the 'execute' function."


@pytest.mark.parametrize(
    ("answers", "streams", "expected"),
    [
        ((inference(1), inference(2)), True, [1, 2, None]),
        ((inference(1), inference(2, is_last=True)), True, [1, 2]),
        ((inference(1),), False, [1]),
        ((), True, [None]),
        ((inference(1), errors.InvalidInput("x"), inference(2)), True, [1, ("error", Error.INVALID_ARG, "x"), 2, None]),
        ((inference(1), errors.WorkerLost("gone")), True, [1, ("error", Error.INTERNAL, "gone")]),
    ],
)
def test_responses_of_a_decoupled_model(answers: Any, streams: bool, expected: list[Any]) -> None:
    me, siblings = access(*answers, streams=streams)
    responses = request_class(me)(model_name="other").exec(decoupled=True)
    assert iter(responses) is responses
    assert values(responses) == expected
    assert not siblings.is_closed


@pytest.mark.parametrize("answers", [(inference(1),), (inference(1), errors.WorkerLost("gone"))])
def test_a_cancelled_call_ends_with_an_error(answers: Any) -> None:
    me, siblings = access(*answers, streams=True)
    responses = request_class(me)(model_name="other").exec(decoupled=True)
    assert values([next(responses)]) == [1]
    responses.cancel()
    assert siblings.is_closed
    assert values(responses) == [("error", Error.CANCELLED, "request has been cancelled")]


def test_loading_and_unloading_other_models() -> None:
    change: Any
    me, siblings = access()
    me.load_model("other")
    me.unload_model("other", unload_dependents=True)
    assert siblings.changes == [("load", "other", "", {}), ("unload", "other")]
    assert [me.is_model_ready(*each) for each in (("up",), ("up", "2"), ("up", "3"), ("down",))] == [
        True,
        True,
        False,
        False,
    ]
    for change, text in (
        (lambda: me.load_model("me"), "failed to load 'me', a model cannot load itself"),
        (lambda: me.unload_model("me"), "failed to unload 'me', a model cannot unload itself"),
    ):
        with pytest.raises(pb_utils.TritonModelException) as error:
            change()
        assert str(error.value) == text
    missing, _ = access(errors.ModelNotFound("no model"))
    missing.unload_model("other")  # one that is not loaded is left alone
    failing, _ = access(errors.ModelFailed("broken"))
    for change, text in (
        (lambda: missing.load_model("other"), "no model"),
        (lambda: failing.load_model("other"), "broken"),
        (lambda: failing.unload_model("other"), "broken"),
    ):
        with pytest.raises(pb_utils.TritonModelException) as error:
            change()
        assert str(error.value) == text


def test_the_module_of_a_model_has_its_own_access(tmp_path: Any) -> None:
    (tmp_path / "model.py").write_text(
        "import c_python_backend_utils\nimport triton_python_backend_utils as pb_utils\n"
        "assert c_python_backend_utils is pb_utils\nready = pb_utils.is_model_ready\nload = pb_utils.load_model\n"
    )
    me, siblings = access()
    module: Any = import_with_access(tmp_path / "model.py", me)
    module.load("other")
    assert (module.ready("up"), siblings.changes) == (True, [("load", "other", "", {})])
    assert issubclass(module.pb_utils.InferenceRequest, pb_utils.InferenceRequest)
    assert (module.pb_utils.InferenceRequest.server, module.pb_utils.__name__) == (me, MODULES[0])
    assert module.pb_utils.Tensor is pb_utils.Tensor
    assert not hasattr(module.pb_utils, "_NO_SERVER")


def test_other_models_cannot_be_changed_from_other_processes() -> None:
    change: Any
    text = "only models that run in the process of the server can"
    for change, expected in (
        (lambda: pb_utils.load_model("m"), f"failed to load 'm', {text}"),
        (lambda: pb_utils.unload_model("m"), f"failed to unload 'm', {text}"),
        (lambda: pb_utils.is_model_ready("m"), f"the readiness of 'm' is not known: {text}"),
    ):
        with pytest.raises(pb_utils.TritonModelException) as error:
            change()
        assert str(error.value) == expected


# --- the queue of requests ---------------------------------------------------------------------------------------


class Waiting:
    """Requests in a queue, by name, and what each of them was answered."""

    def __init__(self, max_rows: int = 4, delay_s: float = 0.0, *, by_owner: bool = False, **options: Any) -> None:
        self.queue = RequestQueue(max_rows, delay_s, ScheduleOptions(**options), by_owner=by_owner)
        self.answers: dict[str, Any] = {}
        self._pending: dict[str, PendingRequest] = {}

    def put(self, name: str, rows: int = 1, width: int = 2, owner: str = "", **parameters: Any) -> float:
        call = Infer({"x": Tensor.of(np.zeros((rows, width)))}, parameters=parameters)
        request = Request(call, "m", id=name, caller=Caller(owner))
        self._pending[name] = PendingRequest(
            request, rows, lambda response, is_last: self.answers.update({name: (str(response), is_last)})
        )
        return self.queue.put(self._pending[name])

    def cancel(self, name: str) -> None:
        self._pending[name].cancelled.set()

    def expire(self, name: str) -> None:
        self.queue.expire(self._pending[name])

    def take(self) -> list[str]:
        return [each.request.id for each in self.queue.take()]


def test_requests_that_are_executed_together() -> None:
    waiting = Waiting(max_rows=4)
    for name, rows, width in (("a", 1, 2), ("b", 2, 2), ("c", 2, 2), ("d", 1, 3), ("e", 1, 2), ("f", 4, 2)):
        waiting.put(name, rows, width)
    waiting.cancel("e")
    # `c` would be a fifth row, `d` has another shape, `e` is cancelled, `f` has four rows.
    assert [waiting.take() for _ in range(4)] == [["a", "b"], ["c"], ["d"], ["f"]]
    waiting.put("g")
    waiting.cancel("g")
    waiting.put("h")
    assert waiting.queue.take(lambda: True) == []  # the thread that takes them has ended
    assert waiting.take() == ["h"]
    large = Waiting(max_rows=1)
    large.put("a", 3)
    large.put("b", 1)
    assert [large.take(), large.take()] == [["a"], ["b"]]


def test_requests_of_several_owners() -> None:
    for by_owner, expected in ((True, [["a", "b"], ["c"]]), (False, [["a", "b", "c"]])):
        waiting = Waiting(by_owner=by_owner)
        for name, owner in (("a", "x"), ("b", "x"), ("c", "y")):
            waiting.put(name, owner=owner)
        assert [waiting.take() for _ in expected] == expected


def test_a_full_batch_does_not_wait_for_others() -> None:
    waiting = Waiting(max_rows=2, delay_s=1e6)
    waiting.put("a")
    waiting.put("b")
    assert waiting.take() == ["a", "b"]
    waiting.put("c")
    waiting.put("d", width=3)  # no later one can join `c`
    assert waiting.take() == ["c"]


def test_a_batch_that_is_not_full_waits_for_the_delay() -> None:
    waiting = Waiting(max_rows=2, delay_s=0.01)
    waiting.put("a")
    assert waiting.take() == ["a"]


def test_limits_and_priorities_of_the_queue() -> None:
    waiting = Waiting(priority_levels=2, default_priority=2, max_queue_size=2, timeout_s=3.0)
    assert [waiting.put(name) for name in "ab"] == [3.0, 3.0]
    assert waiting.put("c", priority=1) == 3.0
    with pytest.raises(errors.Overloaded, match="Exceeds maximum queue size"):
        waiting.put("d")
    waiting.expire("a")
    assert waiting.answers == {"a": ("Request timeout expired", True)}
    assert waiting.take() == ["c", "b"]
    waiting.expire("b")  # it waits no longer
    assert list(waiting.answers) == ["a"]
    assert Waiting().put("a") == 0.0


def test_a_closed_queue() -> None:
    waiting = Waiting()
    waiting.put("a")
    states = [waiting.queue.is_closed]
    waiting.queue.close(errors.NotReady("the model is unloading"))
    assert [*states, waiting.queue.is_closed] == [False, True]
    assert waiting.answers == {"a": ("the model is unloading", True)}
    assert waiting.take() == []
    with pytest.raises(errors.NotReady, match=r"^the model is unloading$"):
        waiting.put("b")
