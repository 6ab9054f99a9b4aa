"""Forms of models with an example that is too long to show, or without declared inputs, answer as they are opened."""

import asyncio
import json
import shutil
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import dragoman
from console.browser import Browser, needs_chromium, serve_page

pytestmark = [needs_chromium, pytest.mark.asyncio(loop_scope="package")]


class Photo(dragoman.Model):
    """Mean of a picture, which a trial fills with ones."""

    placement = "inline"
    inputs = (dragoman.TensorSpec("images", dragoman.FP32, (-1, 3, 64, 64)),)
    outputs = (dragoman.TensorSpec("mean", dragoman.FP32, (-1,)),)

    def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        images = np.asarray(call.inputs["images"].data)
        if not len(images):
            raise ValueError("no picture")
        return {"mean": images.mean(axis=(1, 2, 3))}


class Wave(Photo):
    """Mean of a sound that the model itself knows."""

    inputs = (dragoman.TensorSpec("sound", dragoman.FP32, (-1, 16000)),)

    def example_inputs(self) -> dict[str, Any]:
        return {"sound": np.linspace(0, 1, 16000, dtype=np.float32)[None]}

    def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        return {"mean": np.asarray(call.inputs["sound"].data).mean(axis=1)}


class Mixed(dragoman.Model):
    """The sums of inputs of several datatypes, three of them long."""

    placement = "inline"
    inputs = (
        dragoman.TensorSpec("wörter", dragoman.BYTES, (100,)),
        dragoman.TensorSpec("flags", dragoman.BOOL, (-1, 100)),
        dragoman.TensorSpec("half", dragoman.FP16, (100,)),
        dragoman.TensorSpec("short", dragoman.INT16, (3,)),
    )
    outputs = (dragoman.TensorSpec("sums", dragoman.FP64, (4,)),)

    def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        words, flags, half, short = (call.inputs[spec.name].data for spec in self.inputs)
        return {"sums": np.array([sum(map(len, words)), flags.sum(), half.sum(), short.sum()], np.float64)}


class Open(dragoman.Model):
    """Declares no inputs, and has an example."""

    placement = "inline"
    inputs = ()
    outputs = (dragoman.TensorSpec("sum", dragoman.FP64, (-1,)),)

    def example_inputs(self) -> dict[str, Any]:
        return {"x": np.array([1.5, 2.0])}

    def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        return {"sum": call.inputs["x"].data.sum(keepdims=True)}


class Classifier(dragoman.Model):
    """Returns a class, and its probabilities on request."""

    low = 0.25
    placement = "inline"
    inputs = (dragoman.TensorSpec("x", dragoman.FP32, (-1, 2)),)
    outputs = (
        dragoman.TensorSpec("predict", dragoman.INT64, (-1,)),
        dragoman.TensorSpec("raw", dragoman.FP32, (-1, 2), optional=True),
        dragoman.TensorSpec("predict_proba", dragoman.FP32, (-1, 2), optional=True),
    )

    def class_labels(self) -> dict[str, list[str]]:
        return {"predict_proba": ["cat", "dog"]}

    def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        count = len(call.inputs["x"].data)
        found = {
            "predict": np.ones(count, np.int64),
            "predict_proba": np.array([[float(self.low), 1 - self.low]] * count, np.float32),
        }
        return {name: found[name] for name in call.outputs or ("predict",)}


class Sure(Classifier):
    """Returns probabilities that could be indices of classes."""

    low = 0.0


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def opened(chromium: Any) -> AsyncIterator[Browser]:
    async with serve_page(chromium, Photo, Wave, Mixed, Open, Classifier, Sure) as page:
        yield page


@pytest.mark.parametrize(
    ("model", "value", "note"),
    [
        ("Photo", "1", "images: the example of 1 x 3 x 64 x 64 was sent"),
        ("Wave", "0.5", "sound: the example of 1 x 16000 was sent"),
        ("Open", "3.5", ""),
    ],
)
async def test_the_form_is_answered_as_it_is_opened(browser: Any, model: str, value: str, note: str) -> None:
    await browser.open(f"/#/models/{model}")
    await browser.press("Run")
    await browser.page.locator("section.output td").first.wait_for()
    assert float(await browser.page.inner_text("section.output td")) == pytest.approx(float(value), abs=1e-3)
    assert note in await browser.panel()
    assert ("the example of" in await browser.panel()) == bool(note)
    assert browser.problems == []


@pytest.mark.parametrize("model", ["Wave", "Mixed"])
async def test_the_curl_of_long_inputs_is_short_and_runs(browser: Any, model: str) -> None:
    """Zeros of any datatype; short inputs are written. Nothing else is sent."""
    if not shutil.which("curl"):
        pytest.skip("needs curl")
    await browser.open(f"/#/models/{model}", "Code")
    code = await browser.page.inner_text("pre.code")
    assert len(code) < 700
    process = await asyncio.create_subprocess_exec("sh", "-c", code, stdout=PIPE, stderr=DEVNULL)
    output, _ = await process.communicate()
    expected = [0.0] if model == "Wave" else [0.0, 0.0, 0.0, 3.0]
    assert json.loads(output)["outputs"][0]["data"] == expected


async def test_what_is_typed_replaces_the_example(browser: Any) -> None:
    await browser.open("/#/models/Wave")
    await browser.page.fill("textarea", "1, 2")
    await browser.press("Run")
    await browser.page.wait_for_selector("text=expected shape [-1, 16000]")


@pytest.mark.parametrize(("model", "share"), [("Classifier", "75.0 %"), ("Sure", "100 %")])
async def test_probabilities_with_class_names_are_requested(browser: Any, model: str, share: str) -> None:
    await browser.open(f"/#/models/{model}")
    await browser.press("Run")
    await browser.page.wait_for_selector(f"section[aria-label='Output predict_proba'] >> text={share}")
    assert await browser.page.locator("section.output h2 code").all_inner_texts() == ["predict", "predict_proba"]
    assert "dog" in await browser.panel()
