"""What models say of themselves: kind, description, class names and examples, over the routes of the console."""

import json
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import dragoman
from access.access_models import Doubler, KeyFile, Tripler, bearer
from access.conftest import keys as keys
from dragoman import Infer, TensorSpec
from dragoman.core.about import first_paragraph, first_sentence, one_line
from dragoman.core.calls import ClassLabels, Embed, Generate, ModelDescription, SignatureFor
from dragoman.core.kinds import KINDS, kind_of
from dragoman.core.scoring import Score
from dragoman.core.signature import Signature
from dragoman.runtimes.class_names import parse_names
from rest.rest_server import serving


async def read(server: Any, path: str, **headers: str) -> Any:
    response = await server.request("GET", path, None, headers)
    assert response.status == 200, response.body
    return json.loads(response.body)


class Iris(dragoman.Model):
    """Classify flowers, i.e. Irises, by four lengths. Trained on 150 of them.

    More.
    """

    inputs = (dragoman.TensorSpec("x", dragoman.FP32, (-1, 4)),)
    outputs = (dragoman.TensorSpec("probabilities", dragoman.FP32, (-1, 2)),)
    placement = "inline"

    def class_labels(self) -> dict[str, list[str]]:
        return {"probabilities": ["setosa", "virginica"]}

    def infer(self, call: Infer) -> dict[str, Any]:
        return {"probabilities": np.tile(np.array([0.25, 0.75], np.float32), (len(call.inputs["x"].data), 1))}


async def test_the_list_has_the_kind_and_description_of_each_model() -> None:
    async with serving(Iris, Doubler) as server:
        listed = await read(server, "/console/models")
    versions = [{"version": "", "state": "READY", "reason": ""}]
    assert listed == {
        "models": [
            {
                "name": "Doubler",
                "state": "READY",
                "kind": "function",
                "description": "",
                "platform": "python_function",
                "versions": versions,
            },
            {
                "name": "Iris",
                "state": "READY",
                "kind": "classifier",
                "description": "Classify flowers, i.e. Irises, by four lengths.",
                "platform": "python_function",
                "versions": versions,
            },
        ]
    }


async def test_one_model_has_its_class_names_and_an_example() -> None:
    async with serving(Iris) as server:
        about = await read(server, "/console/models/Iris")
        missing = await server.request("GET", "/console/models/rose")
    assert about == {
        "name": "Iris",
        "versions": [],
        "kind": "classifier",
        "description": "Classify flowers, i.e. Irises, by four lengths.",
        "platform": "python_function",
        "labels": {"probabilities": ["setosa", "virginica"]},
        "outputs": [],
        "pictures": {},
        "has_layers": False,
        "examples": [
            {
                "name": "example",
                "is_complete": True,
                "inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1.0, 1.0, 1.0, 1.0]}],
            }
        ],
    }
    assert missing.status == 404


async def test_a_key_sees_its_models_only(keys: KeyFile) -> None:
    keys.add("one", ["read"], ["Doubler"])
    keys.add("caller", ["infer"])
    async with serving(Doubler, Tripler, api_keys=str(keys.path)) as server:
        one, caller = bearer(keys.keys["one"]), bearer(keys.keys["caller"])
        listed = await read(server, "/console/models", **one)
        assert [model["name"] for model in listed["models"]] == ["Doubler"]
        assert (await read(server, "/console/models/Doubler", **one))["name"] == "Doubler"
        assert (await server.request("GET", "/console/models/Tripler", None, one)).status == 403
        for path in ("/console/models", "/console/models/Doubler", "/console/models/Doubler/versions/1"):
            assert (await server.request("GET", path, None, caller)).status == 403
            assert (await server.request("GET", path)).status == 401


@pytest.mark.parametrize(
    ("markdown", "line"),
    [
        ("A model of flowers.", "A model of flowers."),
        ("---\nlicense: mit\ntags:\n- vision\n---\n\n# Title\n\nWhat it **does** is `this`.", "What it does is this."),
        ("Title of it\n===========\n\nThe text of it.", "The text of it."),
        (
            "# Title\n[![CI](https://x/y.svg)](https://x)\n\nReads [a link](https://z) and more.",
            "Reads a link and more.",
        ),
        (
            "<p align='center'><img src='x.png'></p>\n<!-- no\n\n text here -->\n\nSome <b>bold</b> words.",
            "Some bold words.",
        ),
        ("```python\nprint('no prose here')\n```\n\nAfter the code.", "After the code."),
        ("| a | b | c |\n|---|---|---|\n\n- one two three\n\n> quoted words here\n\nProse it is.", "Prose it is."),
        ("<style>\np { color: red }\n</style>\n\nNo style sheet.", "No style sheet."),
        ("[![shield]][link] [![a][b]](https://c) ![d][e]\n\nBadges by name are none.", "Badges by name are none."),
        ("To see it, run this:\n\n    code\n\nThis is prose.", "This is prose."),
        ("Short.\n\nThis one counts.", "This one counts."),
        ("snake_case names and 2 * 3 * 4 stay", "snake_case names and 2 * 3 * 4 stay"),
        ("# Only a title", ""),
        ("---\nnever: closed", ""),
        ("", ""),
    ],
)
def test_the_first_prose_of_a_readme(markdown: str, line: str) -> None:
    assert first_paragraph(markdown) == line


def test_lines_are_bounded_and_plain() -> None:
    assert first_sentence("Returns x, e.g. 1. Then\nmore.\n\nArgs: no") == "Returns x, e.g. 1."
    assert first_sentence("One line\nof two") == "One line of two"
    assert first_sentence(None) == one_line(3) == ""
    assert one_line("a\x00\x1b[31mb\tc") == "a [31mb c"
    long = one_line("word " * 100)
    assert len(long) <= 200
    assert long.endswith("word…")


def test_a_hostile_readme_takes_no_time() -> None:
    size = 32_768
    began_s = time.process_time()
    for part in (
        "[",
        "*",
        "* ",
        "<a ",
        "`",
        "` ",
        "![",
        "_a",
        "<!-- ",
        "# \n",
        "```\n",
        "~~~\na\n",
        "[a](",
        "a. ",
        "<svg>",
    ):
        first_paragraph((part * size)[:size])
        first_sentence((part * size)[:size])
    assert time.process_time() - began_s < 5


def described(**fields: Any) -> ModelDescription:
    """Return the description of a model by its inputs and outputs, as name: shape, or name: (datatype, shape)."""

    def specs(tensors: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
        pairs = {n: value if isinstance(value, tuple) else (dragoman.FP32, value) for n, value in tensors.items()}
        return tuple(TensorSpec(n, datatype, None if s is None else tuple(s)) for n, (datatype, s) in pairs.items())

    signature = Signature(specs(fields.pop("inputs", {})), specs(fields.pop("outputs", {})))
    labels = {name: ClassLabels("", names) for name, names in fields.pop("labels", {}).items()}
    return ModelDescription("m", (), fields.pop("platform", "x"), signature, labels=labels, **fields)


TASK = "tasks"
PHOTO, FREE = {"images": [1, 3, 640, 640]}, {"images": [-1, 3, -1, -1]}
SCORES_PAIRS: dict[str, Any] = {"calls": frozenset({Score, Infer}), "details": {TASK: ["text-classification"]}}
TOKENS: dict[str, Any] = {"input_ids": (dragoman.INT64, [-1, -1])}
SOUND: dict[str, Any] = {"input": [-1, -1], "state": [2, -1, 128], "sr": (dragoman.INT64, [])}
EIGHTEEN = tuple(map(str, range(18)))
ROW = {"x": [-1, 4]}
INDEX = (dragoman.INT64, [-1])


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("chat", {"calls": frozenset({Generate})}),
        ("chat", {"calls": frozenset({Generate, Infer}), "details": {"chat_template": "jinja"}}),
        ("completion", {"calls": frozenset({Generate}), "details": {"chat_template": False}}),
        ("embeddings", {"calls": frozenset({Embed, Infer}), "details": {TASK: ["feature-extraction"]}}),
        ("embeddings", {"calls": frozenset({Embed})}),
        ("rerank", {**SCORES_PAIRS, "labels": {"output": ("LABEL_0",)}}),
        ("classifier", {**SCORES_PAIRS, "labels": {"output": ("no", "yes")}}),
        ("rerank", {"calls": frozenset({Score})}),
        ("speech", {"details": {TASK: ["automatic-speech-recognition"]}}),
        ("detector", {"details": {TASK: ["object-detection"]}}),
        ("simulator", {"calls": frozenset({Infer, SignatureFor})}),
        ("graph", {"calls": frozenset({Infer, SignatureFor}), "details": {"graph": {"nodes": {}, "edges": []}}}),
        ("ensemble", {"kind": "ensemble", "details": {"graph": {"nodes": {}, "edges": []}}}),
        ("regressor", {"kind": "regressor"}),
        ("model", {"kind": "linear", "inputs": ROW, "outputs": {"y": [-1, 1]}}),  # no kind that is known
        ("classifier", {"inputs": ROW, "outputs": {"label": INDEX, "probabilities": [-1, 3]}}),
        ("classifier", {"inputs": ROW, "outputs": {"y": [-1, 2]}, "labels": {"y": ("no", "yes")}}),
        ("detector", {"inputs": PHOTO, "outputs": {"output0": [1, 84, 8400]}}),
        ("detector", {"inputs": PHOTO, "outputs": {"output0": [1, 25200, 85]}}),
        ("detector", {"inputs": FREE, "outputs": {"output0": [-1, 22, -1]}, "labels": {"output0": EIGHTEEN}}),
        ("detector", {"inputs": PHOTO, "outputs": {"boxes": [-1, 4], "scores": [-1], "labels": INDEX}}),
        ("segmentation", {"inputs": PHOTO, "outputs": {"boxes": [-1, 4], "masks": [-1, 160, 160]}}),
        ("segmentation", {"inputs": PHOTO, "outputs": {"y": [1, 1, 640, 640]}}),
        ("image", {"inputs": PHOTO, "outputs": {"y": [1, 3, 640, 640]}}),
        ("image", {"inputs": {"x": [-1, -1, -1, 3]}, "outputs": {"y": [-1, -1, -1, 3]}}),
        ("model", {"inputs": PHOTO, "outputs": {"y": [1, 1000]}}),
        ("model", {"inputs": {"x": [1, 3, 224, 224]}, "outputs": {"y": [1, 7, 7, 512]}}),
        ("embeddings", {"inputs": TOKENS, "outputs": {"last_hidden_state": [-1, -1, 384]}}),
        ("audio", {"inputs": SOUND, "outputs": {"output": [-1, 1]}}),
        ("audio", {"inputs": {"x": [-1, 43844, 1]}, "outputs": {"note": [-1, 172, 88]}}),
        ("audio", {"inputs": {"x": [-1, 576]}, "outputs": {"speech_probs": [-1]}}),
        ("audio", {"inputs": {"degraded_audio": [-1, 1, -1, 257]}, "outputs": {"y": []}}),
        ("audio", {"inputs": {"x": [-1, -1], "rate": [1]}, "outputs": {"y": [-1, 1]}}),
        ("model", {"inputs": {"hours": [-1], "rate": [-1]}, "outputs": {"wage": [-1]}}),
        ("model", {"inputs": {"x": [-1, 43844]}, "outputs": {"y": [-1, 2]}}),
        ("ocr", {"inputs": {"x": [-1, 3, 48, -1]}, "outputs": {"y": [-1, -1, 6625]}}),
        ("text", {"inputs": TOKENS, "outputs": {"logits": [-1, -1, 15]}}),
        ("classifier", {"inputs": PHOTO, "outputs": {"y": [-1, 2]}, "distributions": frozenset("y")}),
        ("model", {"inputs": {"x": [-1, 8]}, "outputs": {"y": [-1, 9, 2]}, "distributions": frozenset("y")}),
        ("function", {"platform": "python_function", "calls": frozenset({Infer})}),
        ("model", {"inputs": {"x": None}, "outputs": {"y": None}}),
        ("model", {}),
    ],
)  # fmt: skip
def test_the_kind_follows_from_the_description(kind: str, model: dict[str, Any]) -> None:
    assert kind in KINDS
    assert kind_of(described(**model)) == kind


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("{0: 'person', 1: 'bicycle'}", ("person", "bicycle")),
        ("['a', 'b (c)']", ("a", "b (c)")),
        ('{"0": "a", "1": "b"}', ("a", "b")),
        ("[1, 2]", ("1", "2")),
        ("{1: 'a'}", ()),
        ("{0: 'a', 0.5: 'b'}", ()),
        ("{0: ['a']}", ()),
        ("[]", ()),
        ("__import__('os').system('true')", ()),
        ("[" * 10_000, ()),
        ("-" * 100_000 + "1", ()),
        ("person", ()),
        ("", ()),
        ("[" + "'a'," * 500_000 + "]", ()),
    ],
)
def test_class_names_in_metadata_are_parsed_and_never_executed(text: str, names: tuple[str, ...]) -> None:
    assert parse_names(text) == names
