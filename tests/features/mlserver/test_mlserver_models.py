"""Models of MLServer in the test's process: requests, responses, errors, metadata and settings of custom classes."""

import asyncio
import importlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import dragoman
from dragoman.core.bytes_tensor import BytesTensor
from dragoman.core.calls import Describe, Infer, Inference, Request
from dragoman.core.datatypes import BYTES
from dragoman.core.errors import DragomanError, InvalidInput, InvalidOutput, ModelFailed, ModelNotFound, NotSupported
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor
from dragoman.engine.engine import Engine
from dragoman_mlserver import library
from dragoman_mlserver.mlserver import ModelSettings, metrics, types
from dragoman_mlserver.mlserver.cloudevents import EventHeaders
from dragoman_mlserver.mlserver.runtimes import (
    CatboostModel,
    LightGBMModel,
    MLflowRuntime,
    SKLearnModel,
    TensorDictCodec,
    XGBoostModel,
)
from dragoman_mlserver.model import dragoman_error, load, to_inference, to_inference_request
from features.triton.repository import write

MODELS = '''
import json

import dragoman
import numpy as np
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.errors import ModelNotFound
from mlserver.types import InferenceResponse, ResponseOutput


def response(model, value, **fields):
    output = ResponseOutput(name="y", datatype="FP64", shape=[1], data=[value])
    return InferenceResponse(model_name=model.name, outputs=[output], **fields)


class Seen(MLModel):
    """Answer what the request, the settings and the model say."""

    def load(self):
        self.was_ready = self.ready
        return True

    def predict(self, payload):
        settings = self.settings
        texts = [payload.id, str(payload.parameters.k), settings.parameters.uri, str(settings._source)]
        texts += [self.name, str(self.version), str(self.was_ready), str(self.ready)]
        texts += [f"{each.name}:{each.parameters and each.parameters.content_type}" for each in payload.outputs or ()]
        data = ResponseOutput(name="y", datatype="BYTES", shape=[len(texts)], data=texts)
        return InferenceResponse(model_name=self.name, outputs=[data], parameters={"kept": 1, "none": None})


class Refusing(MLModel):
    async def load(self):
        return False


class Streaming(MLModel):
    """It has no `predict`."""

    async def predict_stream(self, payloads):
        async for payload in payloads:
            for value in payload.inputs[0].data:
                if value < 0:
                    raise ModelNotFound("of theirs")
                yield response(self, value)


class Wrong(MLModel):
    async def predict(self, payload):
        match payload.parameters.k:
            case "type":
                return {"outputs": []}
            case "twice":
                answer = response(self, 1.0)
                return InferenceResponse(model_name="m", outputs=answer.outputs * 2)
            case "theirs":
                raise ModelNotFound("of theirs")
            case "headers":
                return response(self, 1.0, parameters={"headers": {"x-n": 5}, "k": "v"})
        raise KeyError("mine")


class Plain(dragoman.Model):
    """A class for Dragoman: it gets the parameters of the settings, with those of `extra` among them."""

    placement = "inline"

    def infer(self, call):
        return {"y": dragoman.Tensor.of(np.array([json.dumps(self.spec.parameters)], dtype=object))}
'''
FIELDS = {
    "seen": '"name": "seen", "platform": "p", "versions": ["v"], "parameters": {"version": "3", "content_type": "np"}',
    "refusing": '"name": "refusing"',
    "streaming": '"name": "streaming", "inputs": [{"name": "x", "datatype": "FP64", "shape": [-1], '
    '"parameters": {"content_type": "np"}}], "outputs": [{"name": "y", "datatype": "FP64", "shape": [1]}]',
    "wrong": '"name": "wrong"',
    "plain": '"name": "plain", "parameters": {"uri": "u", "format": "f", "extra": {"factor": 2.5, "format": "g"}}',
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    folder = tmp_path_factory.mktemp("models")
    for name, fields in FIELDS.items():
        implementation = f'"implementation": "mine.{name.title()}", "parallel_workers": 0'
        write(folder / name / "model-settings.json", f"{{{implementation}, {fields}}}")
        write(folder / name / "mine.py", MODELS)
    async with dragoman.open_engine(str(folder)) as engine:
        yield engine


async def ask(engine: Engine, model: str, *values: float, outputs: Any = (), types: Any = None, **k: Any) -> Inference:
    call = Infer({"x": Tensor.of(np.array(values or [1.0]))}, tuple(outputs), k, content_types=types or {})
    return (await engine.call(Request(call, model, id="7"))).answer


@pytest.mark.asyncio(loop_scope="module")
async def test_what_a_model_sees(engine: Engine) -> None:
    answer = await ask(engine, "seen", outputs=["y"], types={"y": "str"}, k=5)
    (id_, k, uri, source, *rest) = [each.decode() for each in answer.outputs["y"].data.tolist()]
    assert (id_, k, Path(source).name, uri) == ("7", "5", "model-settings.json", str(Path(source).parent))
    assert rest == ["seen", "3", "False", "True", "y:str"]
    assert answer.parameters == {"kept": 1}
    answer = await ask(engine, "seen", k=None)
    assert len(answer.outputs["y"].data) == 8  # no outputs were asked for
    assert {name: answer.metadata[name] for name in ("Ce-Id", "Ce-Modelid", "Ce-Type")} == {
        "Ce-Id": "7",
        "Ce-Modelid": "seen",
        "Ce-Type": "io.seldon.serving.inference.response",
    }


@pytest.mark.asyncio(loop_scope="module")
async def test_a_class_for_dragoman_gets_the_parameters(engine: Engine) -> None:
    (output,) = (await ask(engine, "plain")).outputs.values()
    found = json.loads(output.data.item())
    assert found == {"uri": found["uri"], "factor": 2.5, "format": "g"}
    assert found["uri"].endswith("u")


@pytest.mark.asyncio(loop_scope="module")
async def test_metadata_of_models(engine: Engine) -> None:
    found = (await engine.call(Request(Describe(), "streaming"))).answer
    assert [(each.name, str(each.datatype), each.shape, each.content_type) for each in found.signature.inputs] == [
        ("x", "FP64", (-1,), "np")
    ]
    assert [(each.name, each.shape, each.content_type) for each in found.signature.outputs] == [("y", (1,), "")]
    assert (found.signature.open_inputs, found.signature.content_type) == (True, "")
    assert (await engine.call(Request(Describe(), "seen"))).answer.signature.content_type == "np"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_model_without_predict_streams(engine: Engine) -> None:
    async def streamed(*values: float) -> list[Any]:
        call = Infer({"x": Tensor.of(np.array(values))})
        stream = engine.stream(Request(call, "streaming"))
        return [each.answer.outputs["y"].data.tolist() async for each in stream]

    assert await streamed(1.0, 2.0) == [[1.0], [2.0]]
    with pytest.raises(ModelNotFound, match="Model of theirs not found"):
        await streamed(1.0, -1.0)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("model", "k", "error", "message"),
    [
        ("wrong", "type", InvalidOutput, "expected an InferenceResponse, got dict"),
        ("wrong", "twice", InvalidOutput, "output 'y': expected unique names, got it twice"),
        ("wrong", "theirs", ModelNotFound, "Model of theirs not found"),
        ("wrong", "other", ModelFailed, "KeyError: 'mine'"),
        ("refusing", "", DragomanError, "refusing"),
    ],
)
async def test_errors_of_models(engine: Engine, model: str, k: str, error: type[DragomanError], message: str) -> None:
    with pytest.raises(error) as found:
        await ask(engine, model, k=k)
    assert message in found.value.message


@pytest.mark.asyncio(loop_scope="module")
async def test_headers_of_a_response_are_text(engine: Engine) -> None:
    answer = await ask(engine, "wrong", k="headers")
    assert (answer.metadata["x-n"], answer.parameters) == ("5", {"k": "v"})


def test_a_model_that_is_not_ready_after_its_load_failed(tmp_path: Path) -> None:
    write(tmp_path / "mine.py", MODELS)
    spec = ModelSpec(name="m", runtime="mlserver", uri=f"{tmp_path}/mine.py:Refusing")
    model: Any = load(spec)
    with pytest.raises(ModelFailed, match=r"Refusing\.load\(\) gave False"):
        asyncio.run(model.load())
    assert not model._mlserver_model.ready
    assert model.details() == {}  # the model is in no folder of MLServer
    assert not hasattr(model, "infer_stream") or model.infer_stream is None


@pytest.mark.parametrize(
    ("status", "kind"),
    [(404, ModelNotFound), (400, InvalidInput), (499, InvalidInput), (500, ModelFailed), (399, ModelFailed)],
)
def test_statuses_of_errors(status: int, kind: type[Exception]) -> None:
    error = ValueError("in their words")
    error.status_code = status  # type: ignore[attr-defined]
    found = dragoman_error(error)
    assert (type(found), str(found)) == (kind, "in their words")


def test_other_errors_stay_as_they_are() -> None:
    ours, theirs = NotSupported("x"), ValueError("x")
    theirs.status_code = "400"  # type: ignore[attr-defined]
    assert [dragoman_error(each) for each in (ours, theirs)] == [ours, theirs]


# --- the types of the real package, which has lists for data ---------------------------------------------------


def _types_of_the_package() -> Any:
    kinds = ("Parameters", "RequestInput", "RequestOutput", "InferenceRequest")
    return SimpleNamespace(**dict.fromkeys(kinds, SimpleNamespace), TensorData=list)


def test_requests_for_classes_of_the_real_package() -> None:
    text: Tensor = BytesTensor.of_any_texts(["a"], (1,), {"content_type": "str"})
    numbers = Tensor.of(np.array([[1.5, 2.5]], np.float32))
    call = Infer({"t": text, "n": numbers}, ("y", "z"), {"k": 1}, content_types={"z": "np"})
    events = EventHeaders("m", "server")
    found = to_inference_request(Request(call, "m", id="7", metadata={"x-a": "b"}), _types_of_the_package(), events)
    assert (found.id, found.parameters.k, found.parameters.headers) == ("7", 1, {"x-a": "b", **events.request("7")})
    assert [vars(each) for each in found.inputs] == [
        {"name": "t", "shape": [1], "datatype": "BYTES", "parameters": {"content_type": "str"}, "data": ["a"]},
        {"name": "n", "shape": [1, 2], "datatype": "FP32", "parameters": None, "data": [1.5, 2.5]},
    ]
    (y, z) = found.outputs
    assert (vars(y), z.name, vars(z.parameters)) == ({"name": "y"}, "z", {"content_type": "np"})
    found = to_inference_request(Request(Infer({}), "m"), _types_of_the_package(), events)
    assert (len(found.id), found.outputs) == (36, None)


def test_responses_of_classes_of_the_real_package() -> None:
    parameters = SimpleNamespace(
        headers={"x-a": 1}, model_dump=lambda: {"headers": {"x-a": 1}, "content_type": None, "k": 2}
    )
    outputs = [
        SimpleNamespace(name="a", shape=[2], datatype=SimpleNamespace(value="INT8"), parameters=None, data=[1, 2]),
        SimpleNamespace(
            name="b", shape=[1], datatype="BYTES", parameters={"content_type": "str"}, data=SimpleNamespace(root=["x"])
        ),
    ]
    found = to_inference(SimpleNamespace(outputs=outputs, parameters=parameters), {"Ce-Id": "7"})
    assert (found.parameters, found.metadata) == ({"k": 2}, {"x-a": "1", "Ce-Id": "7"})
    a, b = found.outputs["a"], found.outputs["b"]
    assert (a.datatype.name, a.data.tolist(), a.parameters) == ("INT8", [1, 2], {})
    assert (b.datatype, b.data.tolist(), b.parameters) == (BYTES, [b"x"], {"content_type": "str"})
    wrong = SimpleNamespace(name="c", shape=[3], datatype="INT8", parameters=None, data=[1, 2])
    with pytest.raises(InvalidOutput, match=r"output 'c': expected INT8 data of shape \[3\]: got 2 elements"):
        to_inference(SimpleNamespace(outputs=[wrong], parameters=None))


# --- headers, metrics and types ----------------------------------------------------------------------------------


def test_events_name_the_namespace_of_kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cloudevents: Any = importlib.import_module("dragoman_mlserver.mlserver.cloudevents")
    file = tmp_path / "namespace"
    file.write_text("ours\n")
    monkeypatch.setattr(cloudevents, "_NAMESPACE_FILE", file)
    cloudevents._namespace.cache_clear()
    found = EventHeaders("m", "server").request("7")
    cloudevents._namespace.cache_clear()
    assert found == {
        "Ce-Specversion": "0.3",
        "Ce-Source": "io.seldon.serving.deployment.server.ours",
        "Ce-Type": "io.seldon.serving.inference.request",
        "Ce-Modelid": "m",
        "Ce-Inferenceservicename": "server",
        "Ce-Endpoint": "m",
        "Ce-Namespace": "ours",
        "Ce-Id": "7",
        "Ce-Requestid": "7",
    }


def test_metrics_have_the_labels_of_the_running_model() -> None:
    from prometheus_client import REGISTRY

    metrics.set_running_model("m", "2")
    metric = metrics.register("a_size_of_mine", "How large it is")
    assert metrics.register("a_size_of_mine", "other words") is metric is metric.labels("x", model="y")
    assert (metric.name, metric.description) == ("a_size_of_mine", "How large it is")
    metric.observe(3)
    metrics.log(a_size_of_mine=4, another_of_mine=5)
    labels = {"model_name": "m", "model_version": "2"}
    values = [REGISTRY.get_sample_value(f"{name}_of_mine_sum", labels) for name in ("a_size", "another")]
    assert values == [7.0, 5.0]
    metrics.set_running_model("", "")


def test_metrics_without_the_package_are_not_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    metrics.register("unexported_of_mine", "").observe(1)


def test_types_compare_copy_and_print_as_in_pydantic() -> None:
    request = types.InferenceRequest(inputs=[{"name": "a", "datatype": "INT32", "shape": [1], "data": [1]}])
    assert request.model_copy().inputs is request.inputs
    deep = request.model_copy(deep=True, update={"id": "7"})
    assert (deep.id, request.id, deep.inputs == request.inputs, deep.inputs is request.inputs) == (
        "7",
        None,
        True,
        False,
    )
    assert request != deep
    assert request.inputs[0] != types.ResponseOutput(**vars(request.inputs[0]))  # another class
    assert request.inputs[0].data == [1] == types.TensorData([1])
    assert request.inputs[0].data != [2]
    assert repr(request.inputs[0].data) == "TensorData(root=[1])"
    assert repr(types.RequestOutput(name="x")) == "RequestOutput(name='x', parameters=None)"
    assert request.model_dump(exclude_none=False) == {
        "id": None,
        "parameters": None,
        "inputs": [{"name": "a", "shape": [1], "datatype": "INT32", "parameters": None, "data": [1]}],
        "outputs": None,
    }
    assert request.model_dump_json(indent=1, include={"id": True}) == "{}"
    named = types.RequestOutput(name="é")
    assert named.model_dump_json(indent=1) == '{\n "name": "é"\n}'
    assert types.RequestOutput.model_validate({"name": "é"}) == named
    assert types.RequestOutput.model_validate(named) is named
    assert types.RequestInput(name="a", datatype=types.Datatype.FP32, shape=(1,), data=[1]).datatype == "FP32"
    item = types.RepositoryIndexResponseItem(name="m", state="READY", reason="")
    assert (item.state, item.model_dump()) == (types.State.READY, {"name": "m", "state": "READY", "reason": ""})
    with pytest.raises(ValueError, match="NEVER"):
        types.RepositoryIndexResponseItem(name="m", state="NEVER", reason="")
    assert types.MetadataServerErrorResponse(error="x").model_dump() == {"error": "x"}
    with pytest.raises(TypeError, match="unhashable"):
        hash(named)


# --- classes for libraries ---------------------------------------------------------------------------------------

X = np.array([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]] * 8, np.float32)
Y = X[:, 0] * 2 + X[:, 1]


def answers(kind: Any, path: Path, *outputs: str, rows: Any = X[:4], **fields: Any) -> list[types.ResponseOutput]:
    model = kind(ModelSettings(name="m", parameters={"uri": str(path), "version": "2", **fields}))
    assert asyncio.run(model.load())
    tensor = types.RequestInput.from_tensor("x", Tensor.of(np.asarray(rows)))
    wanted = [types.RequestOutput(name=each) for each in outputs] or None
    found = asyncio.run(model.predict(types.InferenceRequest(inputs=[tensor], outputs=wanted)))
    assert (found.model_name, found.model_version) == ("m", "2")
    return list(found.outputs)


def values(output: types.ResponseOutput) -> Any:
    return output.to_tensor().data


async def test_signatures_of_mlflow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def column(type_: str, name: str | None = None) -> Any:
        return SimpleNamespace(name=name, type=SimpleNamespace(name=type_))

    def schema(*items: Any) -> Any:
        tensors = any(hasattr(each, "shape") for each in items)
        named = any(each.name for each in items)
        return SimpleNamespace(inputs=items, is_tensor_spec=lambda: tensors, has_input_names=lambda: named)

    async def loaded(inputs: Any, outputs: Any, *, has_signature: bool = True) -> MLflowRuntime:
        signature = SimpleNamespace(inputs=inputs, outputs=outputs) if has_signature else None
        model = SimpleNamespace(metadata=SimpleNamespace(signature=signature))
        monkeypatch.setitem(sys.modules, "mlflow.pyfunc", SimpleNamespace(load_model=lambda path: model))
        monkeypatch.setitem(sys.modules, "mlflow.exceptions", SimpleNamespace(MlflowException=KeyError))
        runtime = MLflowRuntime(
            ModelSettings(name="m", implementation=MLflowRuntime, parameters={"uri": str(tmp_path)})
        )
        assert await runtime.load()
        return runtime

    def described(tensors: Any) -> list[str]:
        return [f"{e.name} {e.datatype} {e.shape} {e.parameters.content_type}" for e in tensors]

    types_ = ("boolean", "integer", "long", "float", "double", "string", "binary", "datetime", "Any")
    columns = (*(column(each) for each in types_), SimpleNamespace(name="list", type=object()))
    tensor = SimpleNamespace(name=None, type=np.dtype("float32"), shape=(-1, 2))
    found = await loaded(schema(*columns), schema(tensor))
    assert described(found.inputs) == [
        "input-0 BOOL [-1, 1] np",
        "input-1 INT32 [-1, 1] np",
        "input-2 INT64 [-1, 1] np",
        "input-3 FP32 [-1, 1] np",
        "input-4 FP64 [-1, 1] np",
        "input-5 BYTES [-1, 1] str",
        "input-6 BYTES [-1, 1] base64",
        "input-7 BYTES [-1, 1] datetime",
        "input-8 BYTES [-1, 1] pd_json",
        "list BYTES [-1, 1] pd_json",
    ]
    assert described(found.outputs) == ["output-0 FP32 [-1, 2] np"]
    parameters = found.settings.parameters
    assert parameters is not None
    assert parameters.content_type == "pd"
    for inputs, content_type in (
        (schema(tensor), "np"),
        (schema(SimpleNamespace(**{**vars(tensor), "name": "a"})), "dict"),
        (None, None),
    ):
        found = await loaded(inputs, None)
        parameters = found.settings.parameters
        assert parameters is not None
        assert (parameters.content_type, found.outputs) == (content_type, [])
    assert (await loaded(None, None, has_signature=False)).inputs == []


def test_requests_of_named_arrays() -> None:
    arrays = {"a": np.array([1, 2], np.int32), "b": np.array([[0.5]])}
    assert TensorDictCodec.can_encode(arrays)
    assert not TensorDictCodec.can_encode({"a": [1]})
    assert not TensorDictCodec.can_encode([arrays["a"]])
    response = TensorDictCodec.encode_response("m", arrays, "2")
    assert (response.model_name, response.model_version) == ("m", "2")
    request = TensorDictCodec.encode_request(arrays)
    for tensors, parameters in ((response.outputs, response.parameters), (request.inputs, request.parameters)):
        assert [(each.name, each.datatype, each.shape) for each in tensors] == [
            ("a", "INT32", [2, 1]),
            ("b", "FP64", [1, 1]),
        ]
        assert parameters is not None
        assert parameters.content_type == "dict"
    decoded = TensorDictCodec.decode_response(response)
    assert {name: each.tolist() for name, each in decoded.items()} == {"a": [[1], [2]], "b": [[0.5]]}


def test_boosters_of_lightgbm(tmp_path: Path) -> None:
    lightgbm = pytest.importorskip("lightgbm")
    booster = lightgbm.train({"min_data_in_leaf": 1, "verbose": -1}, lightgbm.Dataset(X, Y), 3)
    booster.save_model(tmp_path / "model.bst")
    (found,) = answers(LightGBMModel, tmp_path)
    assert (found.name, found.shape) == ("predict", [4, 1])
    np.testing.assert_allclose(values(found).ravel(), booster.predict(X[:4]))
    with pytest.raises(Exception, match="Booster: The number of features in data") as error:
        answers(LightGBMModel, tmp_path, rows=X[:4, :1])
    assert error.value.status_code == 400  # type: ignore[attr-defined]
    with pytest.raises(Exception, match="LightGBMModel: unknown output 'predict_proba': expected one of 'predict'"):
        answers(LightGBMModel, tmp_path, "predict_proba")


def test_models_of_catboost(tmp_path: Path) -> None:
    catboost = pytest.importorskip("catboost")
    options = {"iterations": 3, "verbose": False, "allow_writing_files": False, "thread_count": 1}
    classifier = catboost.CatBoostClassifier(**options).fit(X, np.where(X[:, 0] > 0, "yes", "no"))
    classifier.save_model(tmp_path / "model.bin")
    (labels,) = answers(CatboostModel, tmp_path)
    assert values(labels).ravel().tolist() == [b"no", b"no", b"yes", b"yes"]
    with pytest.raises(Exception, match="CatBoostClassifier: Input data must have at least one feature") as error:
        answers(CatboostModel, tmp_path, rows=X[:4, :0])
    assert error.value.status_code == 400  # type: ignore[attr-defined]
    regressor = catboost.CatBoostRegressor(**options).fit(X, Y)
    regressor.save_model(tmp_path / "model.cbm")
    (numbers,) = answers(CatboostModel, tmp_path)  # `model.cbm` comes first
    np.testing.assert_allclose(values(numbers).ravel(), regressor.predict(X[:4]))


def test_models_of_xgboost(tmp_path: Path) -> None:
    xgboost = pytest.importorskip("xgboost")
    options = {"n_estimators": 3, "n_jobs": 1}
    regressor = xgboost.XGBRegressor(**options).fit(X, Y)
    ranker = xgboost.XGBRanker(**options).fit(X, (Y > 1).astype(int), qid=np.repeat([0, 1], 16))
    for model, name in ((regressor, "regressor"), (regressor.get_booster(), "booster"), (ranker, "ranker")):
        path = tmp_path / f"{name}.ubj"
        model.save_model(path)
        (found,) = answers(XGBoostModel, path)
        expected = ranker.predict(X[:4]) if model is ranker else regressor.predict(X[:4])
        assert values(found).ravel().tolist() == expected.tolist()
    with pytest.raises(Exception, match="XGBRegressor does not support 'predict_proba'"):
        answers(XGBoostModel, tmp_path / "booster.ubj", "predict_proba")


def test_outputs_of_scikit_learn(tmp_path: Path) -> None:
    from joblib import dump
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    several = RandomForestClassifier(2, random_state=0, n_jobs=1).fit(X, np.stack([X[:, 0], Y], 1))
    dump(several, tmp_path / "model.pkl")
    found = answers(SKLearnModel, tmp_path, "predict_proba")
    assert [(each.name, each.shape) for each in found] == [("predict_proba-0", [4, 2]), ("predict_proba-1", [4, 4])]
    np.testing.assert_array_equal(values(found[1]), several.predict_proba(X[:4])[1])
    encoder = OneHotEncoder().fit(X)
    dump(encoder, tmp_path / "model.pickle")  # whose result is sparse; `transform` is its only method
    (sparse,) = answers(SKLearnModel, tmp_path)
    assert (sparse.name, values(sparse).tolist()) == ("transform", encoder.transform(X[:4]).toarray().tolist())
    dump(StandardScaler().set_output(transform="pandas").fit(X), tmp_path / "model.joblib")
    assert [each.name for each in answers(SKLearnModel, tmp_path)] == ["x0", "x1"]
    with pytest.raises(Exception, match="output 'transform' is a data frame: request it alone"):
        answers(SKLearnModel, tmp_path, "transform", "transform")
    with pytest.raises(Exception, match="StandardScaler does not support 'predict'"):
        answers(SKLearnModel, tmp_path, extra={"predict_fn": "predict"})
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelFailed, match=r"no model file in '.*empty': expected 'model.joblib', 'model.pickle', "):
        answers(SKLearnModel, tmp_path / "empty")


def test_files_of_libraries_are_checked_before_they_are_loaded(tmp_path: Path) -> None:
    def spec(name: str, implementation: str, **fields: Any) -> ModelSpec:
        settings = {"name": "m", "implementation": implementation, "parameters": {"version": "2", "uri": "other"}}
        parameters = {"library": name, "model_settings": settings}
        return ModelSpec(name="m", runtime="mlserver", parameters=parameters, **fields)

    given = spec("xgboost", "mlserver_xgboost.XGBoostModel", uri=str(tmp_path))
    assert library.library_settings(given)["parameters"] == {"version": "2", "uri": str(tmp_path.resolve())}
    assert library.library_class(given) is XGBoostModel
    with pytest.raises(ModelFailed, match="no model file in"):
        library.check(given)
    (tmp_path / "m.joblib").write_bytes(b"\x80\x04N.")
    pickled = spec("sklearn", "mlserver_sklearn.sklearn.SKLearnModel", uri=str(tmp_path / "m.joblib"))
    with pytest.raises(ModelFailed, match="start with --allow-pickle"):
        library.library_class(pickled)
    with pytest.raises(ModelFailed, match="not found"):
        library.library_class(spec("lightgbm", "mlserver_lightgbm.LightGBMModel", uri=str(tmp_path / "none.bst")))
    with pytest.raises(ModelFailed, match=r"'.*m\.joblib' is not a folder: models are not downloaded"):
        library.library_class(
            spec("huggingface", "mlserver_huggingface.HuggingFaceRuntime", uri=str(tmp_path / "m.joblib"))
        )
