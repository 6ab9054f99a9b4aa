"""Values of the module `mlserver` and its runtime: declarations, defaults of every type, and small functions."""

import asyncio
import contextvars
import importlib
import inspect
import json
import logging
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from prometheus_client import REGISTRY
from typing_extensions import TypeAliasType

from dragoman import plugins
from dragoman.codecs.codec import CODECS, RequestCodec
from dragoman.core.bytes_tensor import BytesTensor
from dragoman.core.calls import Infer, Request
from dragoman.core.datatypes import BYTES, FP64
from dragoman.core.dialect import Dialect
from dragoman.core.errors import InvalidInput, InvalidOutput, ModelFailed
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor, object_array
from dragoman_mlserver import files, library
from dragoman_mlserver.__main__ import main
from dragoman_mlserver.mlserver import MLModel, ModelSettings, codecs, errors, metrics, raw, runtimes, types
from dragoman_mlserver.mlserver.cloudevents import EventHeaders
from dragoman_mlserver.mlserver.codecs import json as json_codec
from dragoman_mlserver.mlserver.codecs.errors import CodecNotFound
from dragoman_mlserver.mlserver.handlers import CustomHandler, custom_handler, get_custom_handlers
from dragoman_mlserver.mlserver.runtimes import SKLearnModel
from dragoman_mlserver.model import LibraryModel, MLServerModel, install, load
from features.triton.repository import write

# --- declarations ----------------------------------------------------------------------------------------------------


def test_the_runtime() -> None:
    runtime = plugins.runtime("mlserver")
    assert (runtime.uri_is_path, runtime.dialect, runtime.suffixes, runtime.packages) == (False, files.DIALECT, (), ())
    assert callable(runtime.placement)
    custom = ModelSpec(name="m", runtime="mlserver")
    assert runtime.placement(custom) == "process"
    assert runtime.placement(ModelSpec(name="m", runtime="mlserver", parameters={"library": "sklearn"})) == "thread"
    assert [(each.__module__, each.__qualname__) for each in (runtime.load, runtime.check) if each] == [
        ("dragoman_mlserver.model", "load"),
        ("dragoman_mlserver.library", "check"),
    ]


def test_the_model_files() -> None:
    found = files.MODEL_FILES
    assert (found.file, found.is_nested, found.dialect) == ("model-settings.json", True, files.DIALECT)
    own = {name: getattr(files.DIALECT, name) for name in Dialect.__dataclass_fields__ if "unknown" not in name}
    assert own == {"timeout": "none", "handlers_first": True, "bare_streams": True, "length_shapes": True}
    assert files.DIALECT.unloads_unknown is False


def test_the_names_of_the_module_are_found_by_importlib() -> None:
    install()
    finders = len(sys.meta_path)
    install()
    assert len(sys.meta_path) == finders
    for name, whole in (("mlserver", ""), ("mlserver.types", ".types"), ("mlserver.codecs.string", ".codecs.adapted")):
        module = importlib.import_module(name)
        spec = module.__spec__
        assert spec is not None
        assert (spec.name, module.__name__) == (f"dragoman_mlserver.mlserver{whole}",) * 2
        found = importlib.util.find_spec(name)
        assert found is not None
        assert (found.submodule_search_locations is not None) is hasattr(module, "__path__")
    assert importlib.util.find_spec("mlserver.types.other") is None


# --- fields and settings ---------------------------------------------------------------------------------------------


def test_ignored_fields_of_a_model_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = {"implementation": "mine.Model", "warm_workers": True, "own": 1, "parameters": {"format": "f", "own": 2}}
    with caplog.at_level(logging.INFO, "dragoman.compat"):
        files.model_table(given, tmp_path / "model-settings.json")
    where = f"{tmp_path / 'model-settings.json'}: "
    texts = [record.getMessage() for record in caplog.records]
    assert [text.partition("' is ignored: ")[0] for text in texts] == [
        f"{where}'warm_workers",
        f"{where}'own",
        f"{where}'parameters.format",
    ]
    assert texts[0].endswith("worker processes are always warm")
    caplog.clear()
    files.server_table({"debug": False, "http_port": None, "metrics_port": 1, "own": 2}, tmp_path)
    assert [record.getMessage().partition("' is ignored")[0] for record in caplog.records] == [
        f"{tmp_path / 'settings.json'}: '{name}" for name in ("debug", "own")
    ]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"platform": "", "versions": []}),
        ({"platform": "p", "versions": ["1", "2"]}, {"platform": "p", "versions": ["1", "2"]}),
        ({"platform": None, "versions": None}, {"platform": "", "versions": []}),
    ],
)
def test_metadata_from_the_settings(tmp_path: Path, fields: Mapping[str, Any], expected: dict[str, Any]) -> None:
    model = loaded(tmp_path, fields)
    assert list(model.details().values()) == [expected]


MINE = """
from mlserver import MLModel


class Mine(MLModel):
    async def load(self):
        assert not self.ready
        return None

    async def unload(self):
        self.unloaded = self.ready
        return True


class Waiting(MLModel):
    async def predict(self, payload):
        import asyncio

        await asyncio.sleep(0)
"""


def loaded(folder: Path, fields: Mapping[str, Any], name: str = "Mine", **more: Any) -> Any:
    write(folder / "mine.py", MINE)
    parameters = {"model_settings": {"name": "m", "implementation": f"mine.{name}", **fields}, "source": f"{folder}/s"}
    return load(
        ModelSpec(
            name="m",
            runtime="mlserver",
            uri=f"{folder}/mine.py:{name}",
            placement="thread",
            parameters=parameters,
            **more,
        )
    )


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_signatures(tmp_path: Path, rows: int) -> None:
    tensor = {"name": "x", "datatype": "FP64", "shape": [-1, 2], "parameters": {"content_type": "np"}}
    fields = {"inputs": [tensor], "outputs": [{**tensor, "name": "y", "parameters": None}]}
    model = loaded(tmp_path, {**fields, "parameters": {"content_type": "pd"}}, max_batch_size=rows)
    assert model.signature() == Signature(
        inputs=(TensorSpec("x", FP64, (-1, 2), content_type="np"),),
        outputs=(TensorSpec("y", FP64, (-1, 2)),),
        open_inputs=True,
        open_outputs=True,
        batched=rows == 2,
        content_type="pd",
        unchecked=True,
    )
    assert (model.takes_request, model.merges, model.handlers) == (True, 0, ())


def test_states_of_a_model(tmp_path: Path) -> None:
    model = loaded(tmp_path, {})
    mine = model._mlserver_model
    assert not mine.ready
    asyncio.run(model.load())  # None is not False
    assert mine.ready
    asyncio.run(model.close())
    assert (mine.ready, mine.unloaded) == (False, False)


@pytest.mark.parametrize(
    ("uri", "expected"),
    [(None, ""), ("", ""), ("beside", "beside"), ("missing", None), ("ABSOLUTE", None)],
)
def test_the_uri_that_a_model_sees(tmp_path: Path, uri: str | None, expected: str | None) -> None:
    """It is absolute where its file exists beside the settings, and unchanged otherwise."""
    (tmp_path / "beside").touch()
    given = str(tmp_path / "beside") if uri == "ABSOLUTE" else uri
    model = loaded(tmp_path, {"parameters": {"uri": given, "own": 1}})
    parameters = model._mlserver_model.settings.parameters
    assert parameters.uri == (given if expected is None else str(tmp_path / expected))
    assert parameters.own == 1
    assert model._mlserver_model.settings._source == f"{tmp_path}/s"
    assert model._mlserver_model.settings.implementation == "mine.Mine"


def test_a_class_for_a_library_must_not_wait(tmp_path: Path) -> None:
    kind: Any = type(loaded(tmp_path, {}, "Waiting")._mlserver_model)
    spec = ModelSpec(name="m", runtime="mlserver", parameters={"library": "sklearn"})
    model: Any = LibraryModel(spec, kind, {"name": "m"})
    assert isinstance(model, MLServerModel)
    assert model.platform == "sklearn"
    assert model.load() is None
    with pytest.raises(RuntimeError, match=r"^the model waits for the event loop$"):
        _ = model.infer(Request(Infer({}), "m"))


def test_classes_and_settings_of_libraries(tmp_path: Path) -> None:
    def spec(implementation: str, library_name: str, uri: str, **fields: Any) -> ModelSpec:
        settings = {"name": "m", "implementation": implementation, **fields}
        parameters = {"library": library_name, "model_settings": settings}
        return ModelSpec(name="m", runtime="mlserver", uri=uri, parameters=parameters)

    bare = spec("mlserver_xgboost.XGBoostModel", "xgboost", str(tmp_path / "m.ubj"))
    assert library.library_settings(bare) == {
        "name": "m",
        "implementation": "mlserver_xgboost.XGBoostModel",
        "parameters": {"uri": str(tmp_path / "m.ubj")},
    }
    (tmp_path / "flow").mkdir()
    (tmp_path / "flow" / "MLmodel").write_text("flavors: {}\n")
    for name, implementation, uri in (
        ("mlflow", "mlserver_mlflow.MLflowRuntime", tmp_path / "flow"),
        ("sklearn", "mlserver_sklearn.SKLearnModel", tmp_path / "m.joblib"),
    ):
        (tmp_path / "m.joblib").write_bytes(b"\x80\x04N.")
        with pytest.raises(ModelFailed, match="start with --allow-pickle"):
            library.library_class(spec(implementation, name, str(uri)))
    for named in ("mine.Model", "mlserver_sklearn.SKLearnModel"):
        (tmp_path / "mine.py").write_text("import mlserver_sklearn.sklearn, mlserver.codecs\nclass Model: ...\n")
        custom = ModelSpec(name="m", runtime="mlserver", uri=f"{tmp_path}/mine.py:Model", parameters={"source": named})
        library.check(custom)
    (tmp_path / "mine.py").write_text("import not_there_at_all\nclass Model: ...\n")
    with pytest.raises(ModelFailed, match="not_there_at_all"):
        library.check(ModelSpec(name="m", runtime="mlserver", uri=f"{tmp_path}/mine.py:Model"))


# --- types -----------------------------------------------------------------------------------------------------------

TENSOR = {"name": "x", "shape": [1], "datatype": "FP32"}
# By type: the fields that it needs, and the others with their defaults.
TYPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Parameters": ({}, {"content_type": None, "headers": None}),
    "RequestInput": ({**TENSOR, "data": [1]}, {"parameters": None}),
    "ResponseOutput": ({**TENSOR, "data": [1]}, {"parameters": None}),
    "RequestOutput": ({"name": "x"}, {"parameters": None}),
    "InferenceRequest": ({"inputs": []}, {"id": None, "parameters": None, "outputs": None}),
    "InferenceResponse": (
        {"model_name": "m", "outputs": []},
        {"model_version": None, "id": None, "parameters": None},
    ),
    "MetadataTensor": (TENSOR, {"parameters": None}),
    "MetadataModelResponse": (
        {"name": "m", "platform": "p"},
        {"versions": None, "inputs": None, "outputs": None, "parameters": None},
    ),
    "MetadataServerResponse": ({"name": "s", "version": "1", "extensions": ["a"]}, {}),
    "RepositoryIndexRequest": ({}, {"ready": None}),
    "RepositoryIndexResponseItem": ({"name": "m", "state": "LOADING", "reason": ""}, {"version": None}),
    "MetadataServerErrorResponse": ({}, {"error": None}),
    "MetadataModelErrorResponse": ({}, {"error": None}),
    "InferenceErrorResponse": ({}, {"error": None}),
    "RepositoryLoadErrorResponse": ({}, {"error": None}),
    "RepositoryUnloadErrorResponse": ({}, {"error": None}),
}


@pytest.mark.parametrize("name", TYPES)
def test_fields_of_types(name: str) -> None:
    kind, (needed, defaults) = getattr(types, name), TYPES[name]
    value = kind(**needed)
    assert value.model_dump(exclude_none=False) == {**needed, **defaults}
    assert value.model_dump() == needed
    assert {each: getattr(value, each) for each in defaults} == defaults
    for missing in needed:
        with pytest.raises(ValueError, match=f"^{name}: field '{missing}' is missing$"):
            kind(**{each: given for each, given in needed.items() if each != missing})
    own = kind(**needed, own=1)
    assert own.model_extra == ({"own": 1} if name == "Parameters" else {})
    own._hidden = 1
    assert "_hidden" not in repr(own)
    assert "_hidden" not in own.model_dump()
    assert "_hidden" not in own.model_extra


def test_names_of_states() -> None:
    names = ["UNKNOWN", "READY", "UNAVAILABLE", "LOADING", "UNLOADING"]
    assert [(each.name, each.value) for each in types.State] == [(name, name) for name in names]
    index = types.RepositoryIndexResponse([types.RepositoryIndexResponseItem(name="m", state="READY", reason="")])
    assert [each.state for each in index] == [types.State.READY]
    assert types.State("UNLOADING") in types.State


def test_nested_fields_are_converted_once() -> None:
    parameters = types.Parameters(content_type="np", own=1)
    request = types.InferenceRequest(
        inputs=[{**TENSOR, "data": types.TensorData([1]), "parameters": parameters}],
        outputs=[types.RequestOutput(name="y")],
        parameters={"headers": {"a": "b"}},
    )
    assert request.inputs[0].parameters is parameters
    assert type(request.inputs[0]) is types.RequestInput
    assert type(request.parameters) is types.Parameters
    assert request.model_dump() == {
        "parameters": {"headers": {"a": "b"}},
        "inputs": [{**TENSOR, "parameters": {"content_type": "np", "own": 1}, "data": [1]}],
        "outputs": [{"name": "y"}],
    }
    assert request.model_dump_json(indent=2).startswith('{\n  "parameters": {\n    "headers"')
    assert types.TensorData.model_validate(request.inputs[0].data) is request.inputs[0].data
    assert types.TensorData.model_validate([1, 2]).model_dump() == [1, 2]
    assert [*types.TensorData(["a", "b"])] == ["a", "b"]
    assert types.TensorData(np.array([[1, 2]])).plain() == [[1, 2]]
    assert types.TensorData((b"a", b"\xff")).plain() == ["a", b"\xff"]
    assert types.TensorData("abc").plain() == "abc"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"content_type": "np"}, {"content_type": "np"}),
        ({"headers": {"a": "b"}}, {}),
        ({"content_type": "np", "headers": {"a": "b"}, "own": 1, "none": None}, {"content_type": "np", "own": 1}),
        ({"content_type": types.Datatype.BYTES}, {"content_type": "BYTES"}),
    ],
)
def test_scalar_parameters(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert types.Parameters(**given).scalars() == expected


def test_a_tensor_has_the_shape_and_the_datatype_that_its_fields_say() -> None:
    numbers = Tensor.of(np.array([[1.0, 2.0]]), parameters={"content_type": "np"})
    for fields, shape, name in (
        ({}, (1, 2), "FP64"),
        ({"shape": [2]}, (2,), "FP64"),
        ({"datatype": "INT8"}, (1, 2), "INT8"),
    ):
        tensor = types.ResponseOutput.from_tensor("y", numbers)
        vars(tensor).update(fields)
        found = tensor.to_tensor()
        assert (found.shape, found.datatype.name, found.parameters) == (shape, name, {"content_type": "np"})
        assert (found.data is numbers.data) is (not fields)
        tensor.parameters = None
        assert not tensor.to_tensor().parameters
    tensor = types.ResponseOutput.from_tensor("y", numbers)
    vars(tensor).update(shape=[3])
    with pytest.raises(InvalidOutput, match=r"^'y': expected FP64 data of shape \[3\]: got 2 elements$"):
        tensor.to_tensor()


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "expected"),
    [
        ("BYTES", [1], "abc", [b"abc"]),
        ("BYTES", [3], ["abc"], [b"abc"]),
        ("BYTES", [3], ["a\u00e9"], [b"a\xc3\xa9"]),
        ("BYTES", [2], ["a\u00e9"], [b"a\xc3\xa9"]),
        ("BYTES", [1, 1], ["abc"], [[b"abc"]]),
        ("BYTES", [2], [bytearray(b"a"), memoryview(b"b")], [b"a", b"b"]),
        ("BYTES", [2, 2], [["a", "b"], ("c", "d")], [[b"a", b"b"], [b"c", b"d"]]),
        ("BYTES", [0], [], []),
        ("FP16", [2], [1, None], [1.0, "nan"]),
        ("FP64", [2], np.array([True, False]), [1.0, 0.0]),
        ("INT64", [2], ["1", "2"], [1, 2]),
        ("UINT8", [2], [255, 0.0], [255, 0]),
        ("BOOL", [2], [1, 0], [True, False]),
        ("BOOL", [1], [2], None),
        ("BYTES", [4], ["abc"], None),
        ("BYTES", [1, 3], ["abc"], None),
        ("BYTES", [3], [None], None),
        ("INT8", [1], [128], None),
    ],
)
def test_data_of_outputs(datatype: str, shape: list[int], data: Any, expected: Any) -> None:
    output = types.ResponseOutput(name="y", datatype=datatype, shape=shape, data=data)
    if expected is None:
        with pytest.raises(InvalidOutput, match=rf"^'y': expected {datatype} data of shape "):
            output.to_tensor()
    else:
        found = output.to_tensor()
        assert [["nan" if each != each else each for each in np.ravel(found.data).tolist()]] == [
            np.ravel(np.array(expected, object)).tolist()
        ]
        assert found.shape == np.array(expected, object).shape


def test_elements_of_bytes() -> None:
    assert types.RequestInput.from_tensor("x", Tensor(object_array([b"a", b"\xff"], (2,)), BYTES)).data.root == [
        b"a",
        b"\xff",
    ]
    mixed = types.RequestInput.from_tensor("x", Tensor(object_array([b"a", None], (2,)), BYTES)).data.root
    assert mixed == ["a", None]
    assert mixed[0].decode("latin-1") == "a"
    text = types.RequestInput.from_tensor("x", BytesTensor.of_any_texts(["\u00e9", "b"], (2,), {}))
    assert (len(text.data), text.data.root, len(text.data)) == (2, ["\u00e9", "b"], 2)


# --- codecs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "payload", "data", "value"),
    [
        (codecs.NumpyCodec, np.array([[1, 2]]), [1, 2], [[1, 2]]),
        (codecs.NumpyCodec, np.float32(0.5), [0.5], [0.5]),
        (codecs.StringCodec, ["a", "\u00e9"], ["a", "\u00e9"], ["a", "\u00e9"]),
        (codecs.Base64Codec, [b"a", "b"], ["YQ==", "Yg=="], [b"a", b"b"]),
        (codecs.DatetimeCodec, ["2020-01-02"], ["2020-01-02T00:00:00"], None),
    ],
)
def test_inputs_are_encoded_as_outputs_are(codec: Any, payload: Any, data: list[Any], value: Any) -> None:
    sent = codec.encode_input("x", payload)
    assert type(sent) is types.RequestInput
    assert vars(codec.encode_output("x", payload)).keys() == vars(sent).keys()
    assert sent.model_dump() == codec.encode_output("x", payload).model_dump()
    assert (sent.name, sent.model_dump()["data"]) == ("x", data)
    if value is not None:
        found = codec.decode_input(sent)
        assert (found.tolist() if isinstance(found, np.ndarray) else found) == value
    assert codec.encode_output("x", payload, use_bytes=False).model_dump()["data"] == data


def test_decoded_arrays_can_be_written() -> None:
    numbers = np.array([1.0, 2.0])
    numbers.flags.writeable = False
    tensor = types.RequestInput.from_tensor("x", Tensor.of(numbers))
    found = codecs.NumpyCodec.decode_input(tensor)
    found[0] = 5
    assert (found.tolist(), numbers.tolist()) == ([5.0, 2.0], [1.0, 2.0])
    own = np.array([1.0])
    assert codecs.NumpyCodec.decode_input(types.RequestInput.from_tensor("x", Tensor.of(own))) is own


def test_errors_of_encoding_name_the_output() -> None:
    with pytest.raises(InvalidOutput, match=r"^output 'y': "):
        codecs.NumpyCodec.encode_output("y", np.array([object()]))
    with pytest.raises(InvalidInput):
        codecs.NumpyCodec.encode_input("y", np.array([object()]))


def test_null_is_rejected_with_its_place() -> None:
    tensor = types.RequestInput(name="x", datatype="BYTES", shape=[3], data=["YQ==", "Yg==", None])
    with pytest.raises(InvalidInput, match=r"^input 'x': .*base64.*expected no null, got one at element 2"):
        codecs.Base64Codec.decode_input(tensor)


def test_a_custom_codec_is_one_of_dragoman() -> None:
    @codecs.register_input_codec
    class Detailed(codecs.InputCodec):
        ContentType = "detailed"

        @classmethod
        def encode_output(cls, name: str, payload: Any, more: str = "", **_: Any) -> types.ResponseOutput:
            return types.ResponseOutput(name=name, datatype="BYTES", shape=[1], data=[payload + more])

        @classmethod
        def decode_input(cls, request_input: types.RequestInput) -> Any:
            return [request_input.name, *request_input.data]

    found = CODECS.input("detailed")
    assert found.content_type == "detailed"
    tensor = found.to_tensor("a", more="b")
    assert tensor.data.tolist() == [b"ab"]
    assert found.to_value(tensor, "input 'z'") == ["input 'z'", "ab"]


@pytest.mark.parametrize(
    ("shape", "expected"), [([3], [3, 1]), ([3, 2], [3, 2]), ([1, 2, 3], [1, 2, 3]), ([1], [1, 1])]
)
def test_batch_dimensions(shape: list[int], expected: list[int]) -> None:
    assert codecs.utils.inject_batch_dimension(shape) == expected


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "Codec not found for output field"),
        ({"name": "n"}, "Codec not found for output field with name 'n'"),
        ({"payload_type": "t"}, "Codec not found for output field with type t"),
        (
            {"name": "n", "payload_type": "t", "is_input": True},
            "Codec not found for input field with name 'n' and type t",
        ),
        ({"is_request": True}, "Codec not found for output response"),
    ],
)
def test_codecs_that_are_not_found(fields: dict[str, Any], text: str) -> None:
    assert str(CodecNotFound(**fields)) == text


def test_lists_of_json() -> None:
    assert [*json_codec.as_list("a")] == [*json_codec.as_list(["a"])] == ["a"]
    assert [json_codec.is_list_of(each, str) for each in (["a"], [], ["a", 1], ("a",), "a")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_codec.encode_to_json(float("nan"))
    assert json_codec.encode_to_json({"\u00e9": [1]}, use_bytes=False) == '{"\u00e9":[1]}'
    with pytest.raises(TypeError, match=r"not JSON|not serializable"):
        json_codec.encode_to_json(object())


def test_requests_with_a_content_type_of_dragoman_alone() -> None:
    """Codecs that the module does not name are found by their content type."""
    mine: Any = MLModel(ModelSettings(name="m"))
    tensor = types.RequestInput(
        name="x", datatype="BYTES", shape=[1], data=['{"a": 1}'], parameters={"content_type": "json"}
    )
    assert mine.decode(tensor) == [{"a": 1}]
    output = mine.encode([{"a": 1}], types.RequestOutput(name="y", parameters={"content_type": "json"}))
    assert (output.name, output.parameters.content_type, output.data.root) == ("y", "json", [b'{"a":1}'])


# --- headers, handlers, metrics, raw contents -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("id_", "is_sent"), [("7", True), ("a b", True), ("", True), ("\u00e9", False), ("a\nb", False), ("\x7f", False)]
)
def test_ids_that_a_header_can_have(id_: str, is_sent: bool) -> None:
    events = EventHeaders("m", "s")
    for found, kind in ((events.request(id_), "request"), (events.response(id_), "response")):
        assert found == {
            "Ce-Specversion": "0.3",
            "Ce-Source": "io.seldon.serving.deployment.s",
            "Ce-Modelid": "m",
            "Ce-Inferenceservicename": "s",
            "Ce-Endpoint": "m",
            "Ce-Type": f"io.seldon.serving.inference.{kind}",
            **({"Ce-Id": id_, "Ce-Requestid": id_} if is_sent else {}),
        }


def test_handlers_are_marked() -> None:
    class Mine:
        value = 5

        @custom_handler("/a")
        def first(self) -> None: ...

        @custom_handler(rest_path="/b", rest_method="GET")
        def second(self) -> None: ...

    found = get_custom_handlers(Mine())
    assert [(handler, method.__name__) for handler, method in found] == [
        (CustomHandler("/a", "POST"), "first"),
        (CustomHandler("/b", "GET"), "second"),
    ]
    assert CustomHandler("/c").rest_method == "POST"


def test_metrics_outside_of_a_model_have_empty_labels() -> None:
    metric = metrics.register("details_of_mine", "")
    contextvars.Context().run(metric.observe, 2.0)
    labels = {"model_name": "", "model_version": ""}
    assert REGISTRY.get_sample_value("details_of_mine_sum", labels) == 2.0
    assert REGISTRY.get_sample_value("details_of_mine_count", labels) == 1.0


def test_raw_contents_are_for_tensors_without_elements() -> None:
    def tensors() -> list[types.RequestInput]:
        return [
            types.RequestInput(name="a", datatype="INT8", shape=[1], data=[1]),
            types.RequestInput(name="b", datatype="INT8", shape=[2], data=[]),
        ]

    assert [each.data.root for each in raw.inject_raw(tensors(), [b"\2\3", b"\4"])] == [[1], [2, 3]]
    with pytest.raises(InvalidInput, match=r"^'b': expected typed or raw contents, got none$"):
        raw.inject_raw(tensors(), [])
    assert raw.pack(tensors()[0]) == b"\1"
    many = types.RequestInput(name="c", datatype="BYTES", shape=[3], data=[])
    assert raw.unpack(many, b"\1\0\0\0a" * 3) == [b"a"] * 3


# --- scripts ---------------------------------------------------------------------------------------------------------

SCRIPT = """
import pathlib, sys
import mlserver.types
import beside_the_script

text = f"{__name__} {sys.argv[1:]} {beside_the_script.VALUE} {mlserver.types.State.READY}"
pathlib.Path(sys.argv[1]).write_text(text)
"""


def test_scripts_run_as_with_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "client.py").write_text(SCRIPT)
    (tmp_path / "beside_the_script.py").write_text("VALUE = 5\n")
    out = str(tmp_path / "out.txt")
    monkeypatch.setattr(sys, "path", ["first", *sys.path])
    monkeypatch.setattr(sys, "argv", ["dragoman_mlserver", str(tmp_path / "client.py"), out, "-x"])
    monkeypatch.delitem(sys.modules, "beside_the_script", raising=False)
    main()
    assert Path(out).read_text() == f"__main__ {[out, '-x']} 5 READY"
    assert sys.argv == [str(tmp_path / "client.py"), out, "-x"]
    assert sys.path[0] == str(tmp_path)
    assert "first" not in sys.path
    sys.modules.pop("beside_the_script", None)


def test_methods_of_models_are_coroutines_as_in_mlserver() -> None:
    for name in ("load", "predict", "unload", "metadata"):
        assert inspect.iscoroutinefunction(getattr(MLModel, name))


# --- values that few models use --------------------------------------------------------------------------------------


def predicted(method: Any, *inputs: types.RequestInput, **settings: Any) -> types.InferenceResponse:
    kind = type("Mine", (MLModel,), {"predict": codecs.decode_args(method)})
    model: Any = kind(ModelSettings(name="m", **settings))
    response: types.InferenceResponse = asyncio.run(model.predict(types.InferenceRequest(inputs=list(inputs))))
    return response


def test_arguments_and_results_without_a_codec() -> None:
    numbers = types.RequestInput(name="a", datatype="INT32", shape=[2], data=[1, 2])
    output = types.ResponseOutput(name="y", datatype="INT32", shape=[1], data=[5])
    whole = types.InferenceResponse(model_name="other", outputs=[output])
    seen: list[Any] = []

    async def optional(self: Any, a: np.ndarray, b: list[str] | None) -> types.InferenceResponse:
        seen.append(b)
        return whole

    assert predicted(optional, numbers.model_copy()) is whole
    assert seen == [None]

    def one(self: Any, a: np.ndarray) -> types.ResponseOutput:
        return output

    def several(self: Any, a: np.ndarray) -> Any:
        return [output, output]

    def mixed(self: Any, a: np.ndarray) -> Any:
        return output, ["x"]

    assert predicted(one, numbers.model_copy()).outputs == [output]
    assert predicted(several, numbers.model_copy()).outputs == [output, output]
    found = predicted(mixed, numbers.model_copy(), parameters={"version": "2"})
    assert [(each.name, list(each.data)) for each in found.outputs] == [("y", [5]), ("output-1", ["x"])]
    assert (found.model_name, found.model_version) == ("m", "2")


Words = TypeAliasType("Words", list[str])


def test_annotations_that_are_aliases() -> None:
    def joined(self: Any, a: Words) -> Words:
        return ["".join(a)]

    given = types.RequestInput(name="a", datatype="BYTES", shape=[2], data=["x", "y"])
    (output,) = predicted(joined, given).outputs
    assert (output.name, output.parameters, list(output.data)) == (
        "output-0",
        types.Parameters(content_type="str"),
        ["xy"],
    )


@pytest.mark.parametrize(
    "payload", ["2020-01-02T03:04:05", datetime(2020, 1, 2, 3, 4, 5), [datetime(2020, 1, 2, 3, 4, 5)]]
)
def test_one_datetime(payload: Any) -> None:
    output = codecs.DatetimeCodec.encode_output("x", payload)
    assert (output.shape, output.model_dump()["data"]) == ([1, 1], ["2020-01-02T03:04:05"])


def test_cells_with_arrays_inside() -> None:
    frame = pd.DataFrame({"a": [[np.arange(2), np.int8(3)], {"b": [np.float64(0.5)]}, "text"]})
    (cells,) = codecs.PandasCodec.encode_outputs(frame)
    assert [json.loads(each) for each in cells.data.root] == [[[0, 1], 3], {"b": [0.5]}, "text"]
    assert isinstance(frame["a"][0][0], np.ndarray)  # the model keeps its own


def test_null_in_a_column_of_numbers() -> None:
    column = types.RequestInput(
        name="a", datatype="BYTES", shape=[2], data=["1", None], parameters={"pandas_dtype": "category"}
    )
    with pytest.raises(InvalidInput, match=r"^input 'a': .*pd of dtype category.*null, got one at element 1"):
        codecs.PandasCodec.decode_request(types.InferenceRequest(inputs=[column]))


def test_classes_of_the_installed_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A class that is not derived from ours gets the settings and the types of its own package."""
    made: list[dict[str, Any]] = []

    class Settings:
        parameters = None
        platform = ""
        versions = ()
        _source = None

        def __init__(self, **fields: Any) -> None:
            made.append(fields)

    class Theirs:
        def __init__(self, settings: Any) -> None:
            self.settings: Any = settings
            self.inputs: list[Any] = []
            self.outputs = None

        async def predict(self, payload: Any) -> Any: ...

        async def predict_stream(self, payloads: Any) -> Any: ...

    own: Any = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "mlserver.settings", SimpleNamespace(ModelSettings=Settings))
    monkeypatch.setitem(sys.modules, "mlserver.types", own)
    model = MLServerModel(
        ModelSpec(name="m", runtime="mlserver", parameters={"source": f"{tmp_path}/s"}), Theirs, {"name": "m"}
    )
    assert made == [{"name": "m", "parameters": {"uri": str(tmp_path)}}]
    assert model._mlserver_model.settings._source == f"{tmp_path}/s"
    assert model._types is own
    assert (model.signature().content_type, model.signature().inputs, model.signature().outputs) == ("", (), ())


def test_errors_of_libraries(tmp_path: Path) -> None:
    """Errors about the values of a request are those of the client; others are those of the model."""

    class Failing(SKLearnModel):
        value_errors = ("OwnError",)

    class OwnError(Exception): ...

    model: Any = Failing(ModelSettings(name="m"))
    for error, expected in (
        (ValueError("v"), errors.InferenceError),
        (OwnError("v"), errors.InferenceError),
        (OSError("v"), OSError),
    ):

        def fail(_: Any, error: Exception = error) -> Any:
            raise error

        model._model = SimpleNamespace(predict=fail)
        request = types.InferenceRequest(inputs=[types.RequestInput(name="x", datatype="FP32", shape=[1], data=[1])])
        with pytest.raises(expected, match=r"^(SimpleNamespace: )?v$"):
            asyncio.run(model.predict(request))
    with pytest.raises(NotImplementedError):
        runtimes._LibraryModel(ModelSettings(name="m"))._read("x")


def test_a_class_of_xgboost_that_is_not_supported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        def load_model(self, path: str) -> None:
            raise TypeError(path)

    kinds = dict.fromkeys(("XGBRegressor", "XGBClassifier", "XGBRanker"), Other)
    monkeypatch.setitem(sys.modules, "xgboost", SimpleNamespace(**kinds))
    (tmp_path / "model.ubj").touch()
    model = runtimes.XGBoostModel(ModelSettings(name="m", parameters={"uri": str(tmp_path)}))
    with pytest.raises(ModelFailed, match=r"^'model\.ubj' was saved by a class of XGBoost that is not supported$"):
        asyncio.run(model.load())


@pytest.mark.parametrize(
    ("code", "expected"),
    [("INVALID_PARAMETER_VALUE", "MLflow rejects the inputs: too wide"), ("OTHER", "all data Error: too wide")],
)
def test_errors_of_mlflow(code: str, expected: str) -> None:
    class MlflowError(Exception):
        error_code = code

    def predict(value: Any, params: Any) -> Any:
        seen.append((value.shape, params))
        raise MlflowError("all data Error: too wide")

    seen: list[Any] = []
    model: Any = runtimes.MLflowRuntime(ModelSettings(name="m", parameters={"content_type": "np"}))
    model._model, model._error = SimpleNamespace(predict=predict), MlflowError
    tensor = types.RequestInput(name="x", datatype="FP32", shape=[1, 2], data=[1, 2])
    for parameters, params in ((None, None), ({"content_type": "np"}, None), ({"own": 1}, {"own": 1})):
        request = types.InferenceRequest(inputs=[tensor.model_copy()], parameters=parameters)
        with pytest.raises(errors.InferenceError if code != "OTHER" else MlflowError, match=f"^{expected}$"):
            asyncio.run(model.predict(request))
        assert seen.pop() == ((1, 2), params)


def test_a_codec_of_dragoman_for_a_whole_request() -> None:
    class Names(RequestCodec):
        content_type = "names-of-mine"

        @classmethod
        def to_value(cls, tensors: Mapping[str, Tensor], noun: str = "input") -> Any:
            return noun, [*tensors]

    CODECS.add(Names)
    try:
        mine: Any = MLModel(ModelSettings(name="m"))
        tensors = [types.RequestInput(name=name, datatype="INT8", shape=[1], data=[1]) for name in "ba"]
        request = types.InferenceRequest(inputs=tensors, parameters={"content_type": "names-of-mine"})
        assert mine.decode_request(request) == ("input", ["b", "a"])
    finally:
        CODECS.remove("names-of-mine")
