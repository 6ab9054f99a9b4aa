"""Which inputs get a photo in the console, and how it is sent to those with one matrix a row."""

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import dragoman
from console.browser import Browser, needs_chromium, png, serve_page

pytestmark = [needs_chromium, pytest.mark.asyncio(loop_scope="package")]

PICTURES = [
    [-1, 28, 28], [-1, 28, 28, 1],
    [-1, 1, 28, 28], [1, 28, 28], [224, 224, 3], [-1, -1, 3], [3, -1, -1], [-1, 3, -1, -1],
    [-1, -1, -1, 3], [1, 1, 64, -1], [-1, 3, 48, -1], [1, 3, 224, 224],
]  # fmt: skip
OTHERS = [
    [-1, 43844, 1], [-1, 901, 161],
    [-1, 30, 20], [-1, 100, 3], [-1, 3, 100], [-1, 4, 64], [2, -1, 128], [1, 1, 128], [28, 28],
    [-1, 3, 1, 160], [-1, 3, 16000],
]  # fmt: skip


class Digits(dragoman.Model):
    """Takes pictures of digits as matrices, and returns them."""

    placement = "inline"
    inputs = (dragoman.TensorSpec("digits", dragoman.FP32, (-1, 28, 28)),)
    outputs = (dragoman.TensorSpec("means", dragoman.FP32, (-1,)),)

    def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        return {"means": np.asarray(call.inputs["digits"].data).mean(axis=(1, 2))}


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def opened(chromium: Any) -> AsyncIterator[Browser]:
    async with serve_page(chromium, Digits) as page:
        yield page


async def test_inputs_that_take_pictures(browser: Any) -> None:
    await browser.open("/")
    script = """async (shapes) => {
        const { takesPictures } = await import("/console/assets/images.js");
        return shapes.map((shape) => takesPictures({ datatype: "FP32", shape, anyRank: false }));
    }"""
    found = await browser.page.evaluate(script, [*PICTURES, *OTHERS])
    assert [shape for shape, takes in zip([*PICTURES, *OTHERS], found, strict=True) if takes] == PICTURES


async def test_a_photo_for_a_batch_of_matrices_is_grey(browser: Any) -> None:
    await browser.open("/#/models/Digits")
    photo = png(56, 56, lambda x, y: (255, 255, 255) if x < 28 else (0, 0, 0))
    files = [{"name": f"{n}.png", "mimeType": "image/png", "buffer": photo} for n in range(2)]
    await browser.page.set_input_files("input[type=file]", files)
    await browser.press("Run")
    await browser.page.locator("section.output", has_text="[2]").wait_for()
    values = await browser.page.locator("section.output td").all_inner_texts()
    assert [round(float(value), 2) for value in values] == [0.5, 0.5]
    assert browser.problems == []
