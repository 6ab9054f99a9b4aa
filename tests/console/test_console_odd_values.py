"""Values and errors that are rare, in a real browser: none is shown as something else, and no page stays empty."""

import asyncio
import functools
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import dragoman
from console.browser import Browser, needs_chromium, png, serve_page

pytestmark = [needs_chromium, pytest.mark.asyncio(loop_scope="package")]
LARGE = 2**60 + 1
SPACES = "a\u00a0b\v c"
FILL = """() => {
    for (let n = 2 ** 22, i = 0; n >= 1; i++) {
        try { sessionStorage.setItem(i, "x".repeat(n)); } catch { n /= 2; }
    }
}"""
WIDE = 150_000  # more elements than a call of a function takes arguments


class Rare(dragoman.Model):
    """Infinities, a NaN among the classes, and texts that look like formulas."""

    placement = "inline"
    inputs = (dragoman.TensorSpec("x", dragoman.FP64, (-1,)),)
    outputs = (
        dragoman.TensorSpec("values", dragoman.FP64, (6,)),
        dragoman.TensorSpec("class_index", dragoman.FP64, (3,)),
        dragoman.TensorSpec("texts", dragoman.BYTES, (5,)),
        dragoman.TensorSpec("logits", dragoman.FP32, (-1, 3)),
    )
    labels = {"class_index": ["cat", "dog"]}  # noqa: RUF012

    def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        texts = [b'=HYPERLINK("http://x")', b"-1", b"@x NaN Infinity", "+1 \u00e9".encode(), b"word"]
        return {
            "values": np.array([np.inf, -np.inf, np.nan, -0.0, 1e300, 0.1]),
            "class_index": np.array([np.nan, 1, 0]),
            "texts": np.array(texts, object),
            "logits": np.array([[1, np.inf, -2], [0, 1, 2]], np.float32),
        }


class Wide(dragoman.Model):
    """As many scores as a vocabulary has words."""

    placement = "inline"
    inputs = (dragoman.TensorSpec("x", dragoman.FP64, (-1,)),)
    outputs = (dragoman.TensorSpec("logits", dragoman.FP32, (1, WIDE)),)

    def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        scores = np.zeros((1, WIDE), np.float32)
        scores[0, 7] = 20
        return {"logits": scores}


class Examples(dragoman.Model):
    """Inputs that snippets must write with care."""

    placement = "inline"
    inputs = (dragoman.TensorSpec("count", dragoman.INT64, (1,)), dragoman.TensorSpec("text", dragoman.BYTES, (1,)))
    outputs = (dragoman.TensorSpec("same", dragoman.BYTES, (1,)),)

    def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        text = call.inputs["text"].data[0].decode()
        return {"same": np.array([f"{int(call.inputs['count'].data[0])} {[ord(c) for c in text]}".encode()], object)}

    def example_inputs(self) -> dict[str, Any]:
        return {"count": np.array([LARGE]), "text": np.array([SPACES.encode()], object)}


class Finder(dragoman.Model):
    """Boxes, scores and labels in tensors of their own."""

    placement = "inline"
    inputs = (dragoman.TensorSpec("images", dragoman.FP32, (-1, 3, 64, 64)),)
    outputs = (
        dragoman.TensorSpec("boxes", dragoman.FP32, (-1, 4)),
        dragoman.TensorSpec("scores", dragoman.FP32, (-1,)),
        dragoman.TensorSpec("labels", dragoman.INT64, (-1,)),
    )

    def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        boxes = np.array([[0, 16, 32, 48]], np.float32)  # the left half of a photo of 2 to 1 in a letterbox
        return {"boxes": boxes, "scores": np.array([0.9], np.float32), "labels": np.array([1])}


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def opened(chromium: Any) -> AsyncIterator[Browser]:
    async with serve_page(chromium, Rare, Wide, Examples, Finder, nonfinite="literal") as page:
        yield page


async def run(browser: Browser, model: str) -> None:
    await browser.open(f"/#/models/{model}", "Try it")
    await browser.page.fill("textarea", "1")
    await browser.press("Run")
    await browser.page.wait_for_selector("section.output")


async def saved(browser: Browser, output: Any, button: str) -> str:
    async with browser.page.expect_download() as waiting:
        await output.get_by_role("button", name=button, exact=True).click()
    path = await (await waiting.value).path()
    return str(path.read_text())


async def test_infinities_and_minus_zero_are_shown_and_saved_as_they_came(browser: Browser) -> None:
    await run(browser, "Rare")
    output = browser.page.get_by_label("Output values", exact=True)
    values = ["Infinity", "-Infinity", "NaN", "-0", "1e+300", "0.1"]
    await browser.has_texts(output.locator("td"), values)
    assert (await saved(browser, output, "CSV")).split() == values
    assert "[Infinity, -Infinity, null, -0, 1e+300, 0.1]" in await saved(browser, output, "JSON")


async def test_nan_is_no_class(browser: Browser) -> None:
    await run(browser, "Rare")
    output = browser.page.get_by_label("Output class_index")
    assert await output.locator(".classes").count() == 0
    assert "cat" not in await output.inner_text()


async def test_texts_are_no_formulas_of_a_spreadsheet(browser: Browser) -> None:
    await run(browser, "Rare")
    output = browser.page.get_by_label("Output texts")
    lines = (await saved(browser, output, "CSV")).splitlines()
    assert lines == ['"\'=HYPERLINK(""http://x"")"', "-1", "'@x NaN Infinity", "'+1 \u00e9", "word"]
    assert '"=HYPERLINK(\\"http://x\\")", "-1", "@x NaN Infinity"' in await saved(browser, output, "JSON")


async def test_an_infinite_score_has_no_share(browser: Browser) -> None:
    await run(browser, "Rare")
    output = browser.page.get_by_label("Output logits")
    await output.get_by_label("softmax of the values").check()
    await browser.has_texts(output.locator("table.scores .number"), ["NaN", "NaN", "NaN", "9.00 %", "24.5 %", "66.5 %"])


async def test_scores_of_a_vocabulary_have_a_softmax(browser: Browser) -> None:
    await run(browser, "Wide")
    await browser.page.get_by_label("softmax of the values").check()
    await browser.has_texts(browser.page.locator("tr.top .number"), [f"{100 / (1 + (WIDE - 1) * np.exp(-20)):.2f} %"])


async def test_snippets_of_rare_values_run_as_pasted(browser: Browser) -> None:
    await browser.open("/#/models/Examples", "Code")
    expected = f"{LARGE} {[ord(c) for c in SPACES]}"
    code = browser.page.locator("pre.code")
    for title, start in (("curl", ["bash", "-c"]), ("Python", [sys.executable, "-c"])):
        if title == "curl" and not shutil.which("curl"):
            continue
        await browser.press(title)
        command = [*start, await code.inner_text()]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=False)
        assert expected in done.stdout, done.stderr


@pytest.mark.parametrize("title", ["Python", "curl"])
async def test_the_code_for_a_photo_reads_a_file(browser: Browser, tmp_path: Path, title: str) -> None:
    if not shutil.which("curl"):
        pytest.skip("needs curl")
    await browser.open("/#/models/Finder", "Code")
    await browser.press(title)
    code = await browser.page.locator("pre.code").inner_text()
    assert 'picture("photo.jpg", size=(64, 64), fit="letterbox", scale=1 / 255)' in code
    assert len(code) < 600
    (tmp_path / "photo.jpg").write_bytes(png(20, 10, lambda x, y: (x, y, 0)))  # Pillow looks at the content
    command = (
        ["sh", "-c", code.replace("python", sys.executable, 1)] if title == "curl" else [sys.executable, "-c", code]
    )
    execute = functools.partial(subprocess.run, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    done = await asyncio.to_thread(execute, command)
    expected = '"data":[0.0,16.0,32.0,48.0]' if title == "curl" else "boxes [[ 0. 16. 32. 48.]]"
    assert expected in done.stdout, done.stderr


async def test_a_photo_for_a_detector_is_in_a_letterbox(browser: Browser) -> None:
    await browser.open("/#/models/Finder", "Try it")
    photo = {"name": "wide.png", "mimeType": "image/png", "buffer": png(201, 101, lambda x, y: (x, y, 0))}
    await browser.page.set_input_files("input[type=file]", photo)
    assert await browser.page.get_by_label("fit").input_value() == "letterbox"
    await browser.press("Run")
    boxes = browser.page.get_by_label("List of boxes").locator("tbody tr")
    await browser.has_texts(boxes, ["class 190.0 %0.00.0100.5101.0"])


async def test_a_busy_server_does_not_take_the_control_buttons_away(chromium: Any) -> None:
    """A response of 503 is not a denial: the page asks again."""
    async with serve_page(chromium, Wide, control_open=True) as browser:
        busy = [True]

        async def answer(route: Any) -> None:
            await (route.fulfill(status=503, body='{"error": "busy"}') if busy else route.continue_())

        await browser.page.route("**/console/v2/repository/status", answer)
        await browser.open("/")
        await browser.page.get_by_text("ready").wait_for()
        assert await browser.page.get_by_label("Control Wide").count() == 0
        busy.clear()
        await browser.page.get_by_label("Control Wide").wait_for()


async def test_a_key_that_no_header_can_hold_is_refused_in_the_form(chromium: Any) -> None:
    async with serve_page(chromium, Wide) as browser:
        await browser.page.route("**/console/v2", lambda route: route.fulfill(status=401, body='{"error": "no key"}'))
        await browser.open("/")
        await browser.page.fill("#key", "caf\u00e9 \u2026")
        await browser.press("Open")
        await browser.page.wait_for_selector("text=A key has only letters")
        assert await browser.page.evaluate("() => sessionStorage.length") == 0


async def test_a_key_is_kept_although_chats_fill_the_storage(chromium: Any) -> None:
    async with serve_page(chromium, Wide) as browser:
        await browser.page.route("**/console/v2", lambda route: route.fulfill(status=401, body='{"error": "no key"}'))
        await browser.open("/")
        await browser.page.evaluate(FILL)
        await browser.page.fill("#key", "k" * 40)
        await browser.press("Open")
        await browser.page.wait_for_selector("text=This key is not accepted")
        assert await browser.page.evaluate("() => sessionStorage.getItem('dragoman-api-key')") == "k" * 40


async def test_an_output_that_cannot_be_drawn_leaves_the_rest_of_the_page(browser: Browser) -> None:
    async def answer(route: Any) -> None:
        bad = '{"name": "bad", "datatype": "FP32", "shape": null, "data": [1]}'
        good = '{"name": "good", "datatype": "FP32", "shape": [1], "data": [2]}'
        await route.fulfill(status=200, body=f'{{"outputs": [{bad}, {good}]}}')

    await browser.page.route("**/infer", answer)
    await run(browser, "Wide")
    await browser.page.unroute("**/infer")
    await browser.page.wait_for_selector("text=This part of the page has failed")
    assert "2" in await browser.page.get_by_label("Output good").inner_text()
    assert await browser.page.get_by_role("tab", name="Code").count() == 1
