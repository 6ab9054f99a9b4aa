"""Kinds, class names and descriptions that model files and the files beside them hold."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from skl2onnx import to_onnx
from sklearn.cluster import KMeans
from sklearn.datasets import load_iris
from sklearn.ensemble import IsolationForest
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import dragoman
from dragoman.core.calls import Describe, ModelDescription, Request
from dragoman.core.kinds import kind_of
from dragoman.engine.engine import Engine
from dragoman.engine_setup import open_engine
from rest.rest_server import RestServer, serving

NAMES = ("cat", "dog", "fox")


async def describe(path: Path, **settings: Any) -> ModelDescription:
    async with open_engine(path, allow_pickle=True, **settings) as engine:
        assert isinstance(engine, Engine)
        (name,) = {deployment.spec.name for deployment in engine.deployments()}
        return (await engine.call(Request(Describe(), name))).answer


def save_onnx(path: Path, shape: list[Any], metadata: dict[str, str], text: str = "") -> Path:
    """Save a graph from pictures to zeros of a shape."""
    zeros = helper.make_tensor("zeros", TensorProto.FLOAT, shape, np.zeros(shape, np.float32).tobytes(), raw=True)
    graph = helper.make_graph(
        [helper.make_node("Identity", ["zeros"], ["output0"]), helper.make_node("Identity", ["images"], ["same"])],
        "g",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, [1, 3, 8, 8])],
        [helper.make_tensor_value_info("output0", TensorProto.FLOAT, shape)],
        [zeros],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8, doc_string=text)
    helper.set_model_props(model, metadata)
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    ("estimator", "kind", "labels"),
    [
        (LogisticRegression(max_iter=1000), "classifier", ["predict_proba", "decision_function"]),
        (make_pipeline(StandardScaler(), LogisticRegression()), "classifier", ["predict_proba", "decision_function"]),
        (LinearRegression(), "regressor", []),
        (KMeans(2, n_init=1), "clustering", []),
        (IsolationForest(n_estimators=3), "outliers", []),
        (StandardScaler(), "preprocessor", []),
    ],
)
async def test_estimators_say_what_they_are(tmp_path: Path, estimator: Any, kind: str, labels: list[str]) -> None:
    x, y = load_iris(return_X_y=True)
    joblib.dump(estimator.fit(x, np.array(NAMES)[y] if kind == "classifier" else y), tmp_path / "iris.joblib")
    model = await describe(tmp_path / "iris.joblib")
    assert kind_of(model) == kind
    assert {name: each.names for name, each in model.labels.items()} == dict.fromkeys(labels, NAMES)


@pytest.mark.parametrize(
    ("shape", "metadata", "kind", "labels"),
    [
        ([1, 7, 21], {"names": "{0: 'cat', 1: 'dog', 2: 'fox'}", "task": "detect"}, "detector", NAMES),
        ([1, 300, 6], {"names": "{0: 'cat', 1: 'dog', 2: 'fox'}", "task": "detect"}, "detector", NAMES),
        ([1, 7, 21], {"names": "{0: 'cat', 1: 'dog', 2: 'fox'}"}, "model", ()),
        ([1, 3], {"names": "['cat', 'dog', 'fox']"}, "classifier", NAMES),
        ([1, 3], {"classes": '["cat", "dog", "fox"]'}, "classifier", NAMES),
        ([1, 4], {"names": "['cat', 'dog', 'fox']"}, "model", ()),
        ([1, 3], {"names": "open('/etc/passwd')"}, "model", ()),
    ],
)
async def test_names_in_the_metadata_of_a_graph(
    tmp_path: Path, shape: list[int], metadata: dict[str, str], kind: str, labels: tuple[str, ...]
) -> None:
    model = await describe(save_onnx(tmp_path / "animals.onnx", shape, metadata, "Find animals.\nIn pictures."))
    assert (kind_of(model), model.description) == (kind, "Find animals. In pictures.")
    assert {name: each.names for name, each in model.labels.items()} == ({"output0": labels} if labels else {})


@pytest.mark.parametrize("has_zip_map", [True, False])
@pytest.mark.parametrize("names", [NAMES, ("10", "-20", "30")])
async def test_classes_of_a_converted_classifier(tmp_path: Path, names: tuple[str, ...], has_zip_map: bool) -> None:
    x, y = load_iris(return_X_y=True)
    rows = x.astype(np.float32)
    values = np.array(names) if names is NAMES else np.array([*map(int, names)])
    classifier = LogisticRegression(max_iter=1000).fit(rows, values[y])
    path = tmp_path / "model.onnx"
    graph = to_onnx(classifier, rows[:1], options={"zipmap": has_zip_map}, target_opset=18)
    path.write_bytes(graph.SerializeToString())
    model = await describe(path)
    (labels,) = model.labels.values()
    assert (kind_of(model), labels.names) == ("classifier", tuple(map(str, classifier.classes_)))


@pytest.mark.parametrize(("own", "expected"), [(["0", "1", "2"], NAMES), (["a", "b", "c"], ("a", "b", "c"))])
async def test_a_file_of_labels_replaces_numbers_but_no_names(
    tmp_path: Path, own: list[str], expected: tuple[str, ...]
) -> None:
    path = save_onnx(tmp_path / "animals.onnx", [1, 3], {"names": str(own)})
    (tmp_path / "labels.txt").write_text("cat\ndog\nfox\n")
    (labels,) = (await describe(path)).labels.values()
    assert labels.names == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"labels.txt": "cat\ndog\r\nfox\n"}, NAMES),
        ({"classes.txt": "cat\ndog\nfox"}, NAMES),
        ({"labels.txt": "cat\ndog\n"}, ()),  # another number
        ({"labels.txt": "cat\n\nfox"}, ()),
        ({"labels.txt": "cat\ndog\nfox", "other.onnx": ""}, ()),  # of which model?
    ],
)
async def test_a_file_of_labels_beside_a_model(
    tmp_path: Path, files: dict[str, str], expected: tuple[str, ...]
) -> None:
    path = save_onnx(tmp_path / "animals.onnx", [1, 3], {})
    for name, text in files.items():
        (tmp_path / name).write_text(text, newline="")
    model = await describe(path)
    assert {name: each.names for name, each in model.labels.items()} == ({"output0": expected} if expected else {})
    assert kind_of(model) == ("classifier" if expected else "model")


@pytest.mark.parametrize(
    ("files", "description"),
    [
        ({"README.md": "---\nlicense: mit\n---\n# Animals\n\nFinds animals in photos.\n"}, "Finds animals in photos."),
        ({"README.md": "Finds all animals.", "dragoman.toml": '[model]\ndescription = "Own line."'}, "Own line."),
        ({"README.md": "\xff\x00 not text at all \x00"}, "ÿ not text at all"),
        ({}, ""),
    ],
)  # fmt: skip
async def test_the_description_of_a_file(tmp_path: Path, files: dict[str, str], description: str) -> None:
    (tmp_path / "animals").mkdir()
    save_onnx(tmp_path / "animals" / "model.onnx", [1, 3], {})
    for name, text in files.items():
        (tmp_path / "animals" / name).write_text(text)
    assert (await describe(tmp_path / "animals")).description == description


async def classes(server: RestServer, name: str) -> Any:
    """Return the two highest classes of the model."""
    outputs = [{"name": "output0", "parameters": {"classification": 2}}]
    inputs = [{"name": "images", "shape": [1, 3, 8, 8], "datatype": "FP32", "data": [0] * 192}]
    response = await server.request("POST", f"/v2/models/{name}/infer", {"inputs": inputs, "outputs": outputs})
    return response.json["outputs"][0]["data"]


@pytest.mark.parametrize(
    ("shape", "metadata", "config", "expected"),
    [
        ([1, 3], {"names": str(NAMES)}, "", ["0.000000:0:cat", "0.000000:1:dog"]),
        # The values of a detector are not those of classes.
        ([1, 7, 21], {"names": str([*NAMES]), "task": "detect"}, "", ["0.000000:0", "0.000000:1"]),
        # A configuration says itself which outputs have labels.
        ([1, 3], {"names": str(NAMES)}, 'backend: "onnxruntime"', ["0.000000:0", "0.000000:1"]),
    ],
)
async def test_the_classification_extension_has_the_same_names(
    tmp_path: Path, shape: list[int], metadata: dict[str, str], config: str, expected: list[str]
) -> None:
    folder = tmp_path / "animals" / "1"
    folder.mkdir(parents=True)
    save_onnx(folder / "model.onnx", shape, metadata)
    if config:
        (folder.parent / "config.pbtxt").write_text(config)
    async with serving(str(tmp_path)) as server:
        assert await classes(server, "animals") == expected
        about = (await server.request("GET", "/console/models/animals")).json
    assert about["labels"] == {"output0": [*NAMES]}


class Softmax(dragoman.Model):
    """Probabilities, as the file of a network without names returns them."""

    inputs = (dragoman.TensorSpec("x", dragoman.FP32, (-1, 3)),)
    outputs = (dragoman.TensorSpec("y", dragoman.FP32, (-1, 3)),)
    platform = "tests"

    def infer(self, call: dragoman.Infer) -> Any:
        powers = np.exp(call.inputs["x"].data)
        return {"y": powers / powers.sum(axis=1, keepdims=True) * self.spec.parameters.get("sum", 1)}


@pytest.mark.parametrize(("total", "kind"), [(1.0, "classifier"), (1.01, "model"), (-1.0, "model")])
async def test_the_answer_to_the_trial_shows_probabilities(total: float, kind: str) -> None:
    class Scaled(Softmax):
        def load(self) -> None:
            self.spec = dataclasses.replace(self.spec, parameters={"sum": total})

    async with serving(Scaled) as server:
        assert (await server.request("GET", "/console/models/Scaled")).json["kind"] == kind


@pytest.mark.parametrize(
    ("text", "attribute", "description"),
    [
        ('"""Of the file. More."""\n{head}def f(x: float) -> float:\n    """Of it."""\n    return x\n', "", "Of it."),
        ('"""Of the file. More."""\n{head}def f(x: float) -> float:\n    return x\n', "", "Of the file."),
        ('"""Of the file. More."""\n{head}def f(x: float) -> float:\n    return x\n', ":f", ""),
        ("{head}class M(dragoman.Model):\n    description = 'Own.'\n    infer = lambda self, call: {{}}\n", "", "Own."),
    ],
)
async def test_docstrings_of_python_models(tmp_path: Path, text: str, attribute: str, description: str) -> None:
    head = "import dragoman\n\n\n" + ("@dragoman.model\n" if "def f" in text else "")
    (tmp_path / "f.py").write_text(text.format(head=head))
    (tmp_path / "README.md").write_text("Of the project of this file.")
    async with serving(f"{tmp_path / 'f.py'}{attribute}") as server:
        assert (await server.request("GET", "/console/models/f")).json["description"] == description


async def test_a_model_that_is_loaded_on_demand_has_no_kind_before(tmp_path: Path) -> None:
    for name in ("animals", "plants"):
        (tmp_path / name).mkdir()
        save_onnx(tmp_path / name / "model.onnx", [1, 3], {"names": str([*NAMES])})
    (tmp_path / "animals" / "dragoman.toml").write_text('[model]\ndescription = "Find animals."')
    async with serving(str(tmp_path), load_on_demand=True) as server:
        listed = (await server.request("GET", "/console/models")).json["models"]
        assert [(m["name"], m["state"], m["kind"], m["description"]) for m in listed] == [
            ("animals", "READY", "model", "Find animals."),
            ("plants", "READY", "model", ""),
        ]
        assert (await server.request("GET", "/console/models/animals")).json["kind"] == "classifier"
        listed = (await server.request("GET", "/console/models")).json["models"]
        assert [m["kind"] for m in listed] == ["classifier", "model"]


async def test_examples_of_a_file_have_their_ids_as_names(tmp_path: Path) -> None:
    path = save_onnx(tmp_path / "animals.onnx", [1, 3], {})
    tensor = {"name": "images", "shape": [1, 3, 8, 8], "datatype": "FP32", "data": [0.5] * 192}
    requests = [{"id": "a cat", "inputs": [tensor]}, {"inputs": [tensor]}, {"id": "a cat", "inputs": [tensor]}]
    (tmp_path / "animals.examples.json").write_text(json.dumps(requests))
    async with serving(str(path)) as server:
        examples = (await server.request("GET", "/console/models/animals")).json["examples"]
    assert [each["name"] for each in examples] == ["a cat", "example 2", "example 3"]
    assert all(each == {"name": each["name"], "is_complete": True, "inputs": [tensor]} for each in examples)


async def test_a_folder_of_samples_beside_a_model(tmp_path: Path) -> None:
    x, y = load_iris(return_X_y=True)
    folder = tmp_path / "iris"
    (folder / "examples").mkdir(parents=True)
    joblib.dump(LogisticRegression(max_iter=1000).fit(x, y), folder / "model.joblib")
    (folder / "examples" / "two.csv").write_text("a,b,c,d\n1,2,3,4\n5,6,7,8\n")
    np.save(folder / "examples" / "one.npy", x[:1])
    np.save(folder / "examples" / "other.npy", x[:1, :3])  # of another shape
    np.save(folder / "examples" / "pickle.npy", np.array([{}]), allow_pickle=True)
    (folder / "examples" / "notes.txt").write_text("no numbers")
    (folder / "examples" / "words.csv").write_text("a,b,c,d\nw,x,y,z\n")
    async with serving(str(folder), allow_pickle=True) as server:
        examples = (await server.request("GET", "/console/models/iris")).json["examples"]
    tensors = {each["name"]: each["inputs"] for each in examples}
    assert {name: inputs[0]["data"] for name, inputs in tensors.items()} == {
        "one": x[0].tolist(),
        "two": [1, 2, 3, 4, 5, 6, 7, 8],
    }


async def test_files_for_a_model_that_takes_bytes(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import dragoman\n\n\nclass Reader(dragoman.Model):\n"
        "    inputs = (dragoman.TensorSpec('file', dragoman.BYTES, (-1,)),)\n\n"
        "    def infer(self, call):\n        return call.inputs\n"
    )
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "cat.png").write_bytes(b"\x89PNG\xff")
    (tmp_path / "examples" / "text.txt").write_text("words")
    async with serving(str(tmp_path), model_name="reader") as server:
        examples = (await server.request("GET", "/console/models/reader")).json["examples"]
    common = {"name": "file", "shape": [1], "datatype": "BYTES"}
    assert examples == [
        {"name": "cat", "is_complete": True, "inputs": [{**common, "base64": ["iVBOR/8="]}]},
        {"name": "text", "is_complete": True, "inputs": [{**common, "data": ["words"]}]},
    ]
