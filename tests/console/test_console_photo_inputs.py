"""Photos in the console: the same elements as `dragoman infer` sends, for inputs and photos of all kinds."""

import asyncio
import io
import struct
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import dragoman
from console.browser import Browser, needs_chromium, png, serve_page
from dragoman import FP16, FP32, FP64, INT8, UINT8
from dragoman.cli import main

Image = pytest.importorskip("PIL.Image")
PngImagePlugin = pytest.importorskip("PIL.PngImagePlugin")
pytestmark = [needs_chromium, pytest.mark.asyncio(loop_scope="package")]

Shape = tuple[int, ...]
SENT: list[np.ndarray] = []


def keeping(name: str, datatype: Any, shape: Shape, outputs: Sequence[Shape] = (), example: Shape = ()) -> Any:
    """Return a class of models that keep what is sent to them in SENT, apart from trials, and declare these outputs."""

    class Keeping(dragoman.Model):
        placement = "inline"

        def infer(self, call: dragoman.Infer) -> dict[str, Any]:
            SENT.append(np.asarray(call.inputs["x"].data))
            return {f"y{i}": np.zeros([max(n, 1) for n in each], np.float32) for i, each in enumerate(outputs or [()])}

        def example_inputs(self) -> dict[str, Any] | None:
            return {"x": np.ones(example, datatype.dtype)} if example else None

    Keeping.__name__ = Keeping.__qualname__ = name
    Keeping.inputs = (dragoman.TensorSpec("x", datatype, shape),)
    Keeping.outputs = tuple(dragoman.TensorSpec(f"y{i}", FP32, each) for i, each in enumerate(outputs or [()]))
    return Keeping


CLASSES, IMAGENET, BOXES = [(1, 10)], [(1, 1000)], [(1, 5, 6)]
MODELS = [
    keeping("planes", FP32, (-1, 3, 30, 40)),
    keeping("classifier", FP32, (-1, 3, 30, 40), CLASSES),
    keeping("imagenet", FP32, (-1, 3, 30, 40), IMAGENET),
    keeping("boxes", FP32, (-1, 3, 41, 31), BOXES),
    keeping("last", FP64, (-1, 30, 41, 3), BOXES),
    keeping("bytes", UINT8, (-1, 30, 40, 3)),
    keeping("signed", INT8, (-1, 3, 30, 40), IMAGENET),
    keeping("half", FP16, (1, 1, 30, 40)),
    keeping("alpha", UINT8, (30, 41, 4), BOXES),
    keeping("digits", FP32, (-1, 28, 28)),
    keeping("free", FP32, (-1, 3, -1, -1)),
    keeping("free_classifier", FP32, (-1, -1, -1, 3), CLASSES),
    keeping("free_bytes", UINT8, (-1, -1, -1, 3), BOXES),
    keeping("open", FP32, (-1, -1, -1, -1), BOXES, (1, 80, 96, 1)),
    keeping("line", FP32, (-1, 1, 30, -1), [(1, 9, 97)]),
]


def file(image: Any, **options: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, "png", **options)
    return content.getvalue()


LINEAR = PngImagePlugin.PngInfo()
LINEAR.add(b"gAMA", struct.pack(">I", 100_000))
NOISE = np.random.default_rng(0).integers(0, 256, (30, 40, 4), np.uint8)
# A photo of one colour is the same however it is resampled; noise of the size of the input is not resampled.
PHOTOS = {
    "exact": png(40, 30, lambda x, y: tuple(NOISE[y, x, :3].tolist())),
    "plain": png(57, 20, lambda x, y: (200, 33, 90)),
    "tall": png(21, 1300, lambda x, y: (10, 250, 90)),
    "clear": file(Image.new("RGBA", (57, 40), (200, 33, 90, 77))),
    "holes": file(Image.fromarray(NOISE[..., :3] & 3).convert("P"), transparency=0),
    "gamma": file(Image.new("RGB", (40, 30), (200, 33, 90)), pnginfo=LINEAR),
    "grey": file(Image.new("L", (19, 40), 77)),
}


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def opened(chromium: Any) -> AsyncIterator[Browser]:
    async with serve_page(chromium, *MODELS) as page:
        yield page


async def by_console(browser: Browser, model: str, photo: bytes) -> np.ndarray:
    """Return what the console sends as it proposes."""
    await browser.open(f"/#/models/{model}", "Try it")
    chosen = {"name": "p.png", "mimeType": "image/png", "buffer": photo}
    await browser.page.set_input_files("input[type=file]", chosen)
    SENT.clear()
    await browser.press("Run")
    await browser.page.locator("section.output").first.wait_for()
    return SENT[0]


async def by_terminal(browser: Browser, model: str, path: Any, *words: str) -> np.ndarray:
    SENT.clear()
    assert await asyncio.to_thread(main, ["infer", browser.url, model, str(path), *words]) == 0
    return SENT[0]


@pytest.mark.parametrize("model", [each.__name__ for each in MODELS])
async def test_the_console_and_the_terminal_send_the_same(
    browser: Browser, model: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, photo in PHOTOS.items():
        path = tmp_path / f"{name}.png"
        path.write_bytes(photo)
        expected = await by_terminal(browser, model, path)
        if (name in ("exact", "holes")) and " to " in capsys.readouterr().err:
            continue  # its pixels are resampled
        found = await by_console(browser, model, photo)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype), name
        # A canvas keeps products of colours and transparency, as whole numbers.
        step = 1 if (model, name) == ("alpha", "clear") else 0
        np.testing.assert_allclose(found, expected, rtol=0, atol=step, err_msg=name)


async def test_a_photo_that_is_resampled_is_close(browser: Browser, tmp_path: Any) -> None:
    """Pillow's bilinear filter and that of a canvas agree when a photo is enlarged, and nearly when it is reduced."""
    yy, xx = np.mgrid[:90, :120]
    smooth = 127 + 60 * np.sin(xx / 9) + 60 * np.cos(yy / 7)
    for width, height, step in ((20, 15, 1), (120, 90, 6)):
        pixels = smooth[:height, :width].astype(np.uint8)
        photo = file(Image.fromarray(np.stack([pixels, 255 - pixels, pixels // 2], axis=-1)))
        path = tmp_path / f"{width}.png"
        path.write_bytes(photo)
        expected = (await by_terminal(browser, "bytes", path)).astype(int)
        found = (await by_console(browser, "bytes", photo)).astype(int)
        assert np.abs(found - expected).max() <= step
