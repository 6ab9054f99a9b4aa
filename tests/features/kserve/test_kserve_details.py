"""Values, headers, names and remarks of KServe's models, without a server."""

import math
from pathlib import Path
from typing import Any

import kserve_messages  # noqa: F401 (before kserve)
import numpy as np
import pytest
from kserve import InferOutput, InferResponse
from kserve.errors import InferenceError, ModelNotFound, ServerNotReady

from dragoman.core.bytes_tensor import BytesTensor
from dragoman.core.calls import Handled
from dragoman.core.datatypes import BYTES, FP32, datatype
from dragoman.core.errors import InvalidInput, InvalidOutput, ModelFailed, NotReady, NotSupported
from dragoman.core.errors import ModelNotFound as NoSuchModel
from dragoman.core.tensor import Tensor, object_array
from dragoman.formats.grpc_messages import InferParameter
from dragoman_kserve.cloud_events import CloudEvent, binary_event, binary_payload, event_response, structured_event
from dragoman_kserve.model import dragoman_error, to_inference
from dragoman_kserve.source import is_folder, is_script, model_names, own_name
from dragoman_kserve.survey import survey
from dragoman_kserve.tensors import elements, output_tensor, plain_parameters

# --- tensors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "name", "expected"),
    [
        ([1, 2.5, None], "FP32", [1.0, 2.5, math.nan]),
        ([[1, 2], (3,)], "INT32", [1, 2, 3]),
        (np.array([[1, 2, 3]]), "UINT8", [1, 2, 3]),
        ([1.0, 2, 3], "INT64", [1, 2, 3]),
        ([2**63, 0, 1], "UINT64", [2**63, 0, 1]),
        ([True, 0, 1], "BOOL", [True, False, True]),
        (["a", "é", ""], "BYTES", [b"a", "é".encode(), b""]),
        (["a", b"\xff", bytearray(b"c")], "BYTES", [b"a", b"\xff", b"c"]),
    ],
)
def test_data_of_outputs(data: Any, name: str, expected: list[Any]) -> None:
    tensor = output_tensor("output 'y'", data, name, [3.0, 1], {"p": 1})  # type: ignore[list-item]
    assert (tensor.shape, tensor.datatype, tensor.parameters) == ((3, 1), datatype(name), {"p": 1})
    np.testing.assert_array_equal(np.asarray(tensor.data).reshape(-1), np.asarray(expected, tensor.data.dtype))


@pytest.mark.parametrize(
    ("data", "name", "shape", "message"),
    [
        ([1, 2], "FP32", [3], "expected FP32 data of shape [3]: got 2 elements"),
        ([1.5], "INT32", [1], "1.5 does not fit into INT32"),
        ([300], "UINT8", [1], "expected UINT8 data of shape [1]: "),
        ([2], "BOOL", [1], "2 does not fit into BOOL"),
        (["a"], "FP32", [1], "could not convert string to float"),
        ([5], "BYTES", [1], "expected bytes or text, got int"),
        ([1], "FP31", [1], "expected FP31 data of shape [1]"),
    ],
)
def test_data_that_does_not_fit_is_named(data: Any, name: str, shape: list[int], message: str) -> None:
    with pytest.raises(InvalidOutput, match=r"^output 'y': expected ") as found:
        output_tensor("output 'y'", data, name, shape, {})
    assert message in found.value.message


def test_elements_of_inputs() -> None:
    assert elements(Tensor(np.array([[1.5], [2.0]], np.float32), FP32)) == [1.5, 2.0]
    assert elements(BytesTensor.of_any_texts(["a", "é"], (2,), {})) == ["a", "é"]
    assert elements(Tensor(object_array([b"a", b"\xff"], (1, 2)), BYTES)) == [b"a", b"\xff"]


def test_parameters_that_describe_an_encoding_are_left_out() -> None:
    assert plain_parameters(None) == {}
    assert plain_parameters({"binary_data_size": 8, "a": "b", "none": None}) == {"a": "b"}
    grpc = {"n": InferParameter(int64_param=3), "s": InferParameter(string_param="t")}
    assert plain_parameters(grpc) == {"n": 3, "s": "t"}


def test_outputs_of_responses() -> None:
    output = InferOutput("y", [2], "FP32", data=[1.5, 2.5], parameters={"p": "q"})
    mapping = {"name": "z", "datatype": "BYTES", "shape": [1], "data": np.array(["a"]), "parameters": {"r": 1}}
    found = to_inference(InferResponse("1", "m", [output], parameters={"n": 2}))
    assert (
        found.parameters,
        {name: (each.parameters, each.data.tolist()) for name, each in found.outputs.items()},
    ) == (
        {"n": 2},
        {"y": ({"p": "q"}, [1.5, 2.5])},
    )
    found = to_inference({"outputs": [mapping], "parameters": {"n": 3}})
    tensor = found.outputs["z"]
    assert (found.parameters, tensor.parameters, list(np.asarray(tensor.data))) == ({"n": 3}, {"r": 1}, [b"a"])
    raw = InferOutput("y", [2], "INT32")
    raw.set_data_from_numpy(np.array([3, 4], np.int32), binary_data=True)
    assert to_inference({"outputs": [raw]}).outputs["y"].data.tolist() == [3, 4]
    assert to_inference({"outputs": []}) == to_inference(InferResponse("1", "m", []))
    wrong: Any
    for wrong in ({"predictions": []}, None, [1]):
        with pytest.raises(
            InvalidOutput, match=f"expected an InferResponse for a V2 request, got {type(wrong).__name__}"
        ):
            to_inference(wrong)


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (InferenceError("a"), ModelFailed, "a"),
        (ModelNotFound("m"), NoSuchModel, "Model with name m does not exist."),
        (ServerNotReady("s"), NotReady, "s"),
        (NotImplementedError(), NotSupported, "the model does not implement this call"),
        (NotImplementedError("b"), NotSupported, "b"),
        (InvalidInput("c"), InvalidInput, "c"),
        (KeyError("d"), KeyError, "'d'"),
    ],
)
def test_errors_of_models(error: Exception, expected: type[Exception], message: str) -> None:
    found = dragoman_error(error)
    assert (type(found), message in str(found)) == (expected, True)
    assert (found is error) is isinstance(error, InvalidInput | KeyError)


# --- events ----------------------------------------------------------------------------------------------------------

ATTRIBUTES = {"specversion": "1.0", "id": "1", "source": "s", "type": "t"}
BINARY = {f"ce-{name}": value for name, value in ATTRIBUTES.items()}


def test_an_event_has_all_required_attributes() -> None:
    assert binary_event({**BINARY, "accept": "x"}) == CloudEvent(ATTRIBUTES, is_binary=True)
    whole = {**ATTRIBUTES, "time": "now", "data": [1]}
    assert structured_event(whole) == CloudEvent({**ATTRIBUTES, "time": "now"}, is_binary=False)
    assert structured_event([1]) is None
    for name in ATTRIBUTES:
        assert binary_event({key: value for key, value in BINARY.items() if key != f"ce-{name}"}) is None
    for name in whole:
        assert structured_event({key: value for key, value in whole.items() if key != name}) is None


def test_the_payload_of_a_binary_event() -> None:
    event = CloudEvent({}, is_binary=True)
    assert binary_payload(event, b'{"a": [1]}') == {"a": [1]}
    assert binary_payload(event, b"text") == b"text"
    for kind in ("application/json", "application/cloudevents+json"):
        with pytest.raises(InvalidInput, match=r"^Failed to decode or parse binary json cloudevent: "):
            binary_payload(CloudEvent({"content-type": kind}, is_binary=True), b"text")


def test_responses_to_events(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {**ATTRIBUTES, "datacontenttype": "text/x", "own": "x"}
    response = Handled(b"[1]", metadata={"x-a": "b"})
    found = event_response(CloudEvent(given, is_binary=False), "m", response)
    assert (found.content_type, found.metadata) == ("application/cloudevents+json", {"x-a": "b"})
    assert b'"data":[1]' in found.content
    assert b"own" not in found.content
    monkeypatch.setenv("CE_MERGE", "True")
    found = event_response(CloudEvent(given, is_binary=True), "m", response)
    changing = ("ce-id", "ce-time")
    assert (found.content, found.content_type) == (b"[1]", "application/json")
    assert {name: value for name, value in found.metadata.items() if name not in changing} == {
        "x-a": "b",
        "ce-own": "x",
        "ce-specversion": "1.0",
        "ce-source": "io.kserve.inference.m",
        "ce-type": "io.kserve.inference.response",
    }


# --- sources ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "is_model"),
    [
        ("import kserve\nclass A(kserve.Model): pass", True),
        ("import kserve.model\nclass A(kserve.model.Model): pass", True),
        ("from kserve import Model\nclass A(Model): pass", True),
        ("from kserve.model import Model\nclass B(Model): pass\nclass A(B): pass", True),
        ("import kserve\nkserve.ModelServer().start([])", True),
        ("from kserve import ModelServer\nModelServer().start([])", True),
        ("import kserve", False),
        ("import kserver as kserve\nclass A(kserve.Model): pass", False),
        ("from .kserve import Model\nclass A(Model): pass", False),
        ("from . import Model  # kserve\nclass A(Model): pass", False),
        ("import kserve\nclass A(Other): pass", False),
        ("import kserve\nclass A(kserve.Model): (", False),
    ],
)
def test_scripts_are_recognised_by_their_source(tmp_path: Path, text: str, is_model: bool) -> None:
    file = tmp_path / "model.py"
    file.write_text(text)
    assert (is_script(file), is_folder(tmp_path)) == (is_model, is_model)
    assert not is_script(tmp_path / "missing.py")


ARGUMENTS = "p.add_argument('--other', default='x')\np.add_argument('--model_name', {})\n"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("A('a')\nA(name='b')\nA(model_name='c')\nA('a')", ["a", "b", "c"]),
        ("A('a', name='b')", ["a"]),
        ("A(5)\nA()\nA(other.name)", []),
        ("A(args.model_name)", ["model"]),
        (ARGUMENTS.format("default='d'") + "A(args.model_name)", ["d"]),
        (ARGUMENTS.format("default=5") + "A(args.model_name)", []),
        (ARGUMENTS.format("type=str") + "A(args.model_name)", []),
        ("B('b')\nOther('c')", ["b"]),
    ],
)
def test_names_of_models_are_read_from_their_calls(tmp_path: Path, text: str, names: list[str]) -> None:
    file = tmp_path / "a.py"
    file.write_text(f"import kserve\nclass A(kserve.Model): pass\nclass B(A): pass\n{text}\n")
    assert model_names(str(file)) == {name: name for name in names}
    assert own_name(file) == (names[0] if len(names) == 1 else "")
    assert model_names(str(file), "b") == ({"b": "b"} if "b" in names else {})


SURVEYED = """
import kserve
from kserve import Model, ModelRepository

class Mine(kserve.Model):
    def predict(self, payload, headers=None):
        return headers
    async def explain(self, payload, headers=None):
        yield payload
    def helper(self, headers):
        yield headers

class Other:
    def predict(self, payload, headers=None):
        yield headers

class Models(ModelRepository):
    def load(self, name): ...

class Rest(ModelRepository):
    def unload(self, name): ...

kserve.ModelServer(workers=2, predictor_config=None, registered_models=Models())
kserve.model_server.app.add_middleware(object)
"""
REMARKS = [
    ("Mine.predict, headers", "different", "has content-type, ce-*"),
    ("Mine.explain", "different", "the chunks of a V1 response are sent together at their end"),
    ("Models.load", "missing", "the server loads models itself"),
    ("ModelServer(workers)", "unused", "see the settings of `dragoman serve`"),
    ("add_middleware", "unused", "for CORS see --cors-origins"),
]


def test_remarks_on_scripts(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "script.py").write_text(SURVEYED)
    (tmp_path / "client.py").write_text(SURVEYED.replace("kserve", "other"))
    for path, location in ((tmp_path, "sub/script.py"), (tmp_path / "sub" / "script.py", "script.py")):
        found = survey(path)
        assert {remark.location for remark in found} == {location}
        assert sorted((remark.subject, remark.effect) for remark in found) == sorted((a, b) for a, b, _ in REMARKS)
        notes = {remark.subject: remark.note for remark in found}
        assert [subject for subject, _, note in REMARKS if note not in notes[subject]] == []
