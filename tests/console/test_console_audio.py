"""Sounds from files and the microphone, and outputs that are sounds, in a real browser."""

import base64
import io
import wave
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray

import dragoman
from console.browser import Browser, needs_chromium, serve_page

pytestmark = [needs_chromium, pytest.mark.asyncio(loop_scope="package")]


class Ear(dragoman.Model):
    """The number of samples, their strongest frequency by the rate that the model was told, and the loudest sample."""

    placement = "inline"
    inputs = (dragoman.TensorSpec("audio", dragoman.FP32, (-1, -1)), dragoman.TensorSpec("sr", dragoman.INT64, ()))
    outputs = (
        dragoman.TensorSpec("count", dragoman.INT64, (1,)),
        dragoman.TensorSpec("pitch", dragoman.FP64, (1,)),
        dragoman.TensorSpec("loudest", dragoman.FP64, (1,)),
    )

    def infer(self, call: dragoman.Infer) -> dict[str, NDArray[Any]]:
        samples, rate = np.asarray(call.inputs["audio"].data)[0], int(call.inputs["sr"].data)
        spectrum = np.abs(np.fft.rfft(samples))
        return {
            "count": np.array([len(samples)]),
            "pitch": np.array([float(np.fft.rfftfreq(len(samples), 1 / rate)[spectrum.argmax()])]),
            "loudest": np.array([float(np.abs(samples).max())]),
        }


class Voice(dragoman.Model):
    """Takes a second of 16-bit samples; returns half of them, and as a file."""

    placement = "inline"
    inputs = (dragoman.TensorSpec("pcm", dragoman.INT16, (1, 8000)),)
    outputs = (
        dragoman.TensorSpec("waveform", dragoman.INT16, (1, 8000)),
        dragoman.TensorSpec("file", dragoman.BYTES, (1,)),
        dragoman.TensorSpec("sample_rate", dragoman.INT32, (1,)),
    )

    def infer(self, call: dragoman.Infer) -> dict[str, NDArray[Any]]:
        pcm = np.asarray(call.inputs["pcm"].data)
        encoded = base64.b64encode(wav_file(1000, 0.1)["buffer"])
        rate = np.array([8000], np.int32)
        return {"waveform": pcm // 2, "file": np.array([encoded], object), "sample_rate": rate}


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def opened(chromium: Any) -> AsyncIterator[Browser]:
    async with serve_page(chromium, Ear, Voice) as page:
        yield page


def wav_file(pitch: float, seconds: float, rate: int = 8000) -> dict[str, Any]:
    """Return an upload of a tone at half of the full scale."""
    times = np.arange(int(seconds * rate)) / rate
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((16384 * np.sin(2 * np.pi * pitch * times)).astype("<i2").tobytes())
    return {"name": "tone.wav", "mimeType": "audio/wav", "buffer": content.getvalue()}


async def value(browser: Browser, output: str) -> float:
    return float(await browser.page.get_by_label(f"Output {output}").locator("td").inner_text())


async def test_a_sound_is_resampled_to_the_rate_that_the_model_is_told(browser: Browser) -> None:
    page = browser.page
    await browser.open("/#/models/Ear", "Try it")
    await page.get_by_role("group", name="audio").locator("input[type=file]").set_input_files(wav_file(440, 1))
    await page.wait_for_selector("text=tone.wav: 16000 samples, 1.00 s of 1.00 s")
    await browser.press("Run")
    await page.wait_for_selector("section.output")
    assert await value(browser, "count") == 16_000
    assert await value(browser, "pitch") == pytest.approx(440, abs=2)
    assert await value(browser, "loudest") == pytest.approx(0.5, abs=0.02)
    await page.get_by_label("samples a second").fill("8000")
    await page.get_by_label("from second").fill("0.25")
    await page.wait_for_selector("text=tone.wav: 6000 samples, 0.75 s of 1.00 s")
    await browser.press("Run")
    await browser.has_texts(page.get_by_label("Output count").locator("td"), ["6000"])
    assert await value(browser, "pitch") == pytest.approx(440, abs=2)  # the model was told the new rate
    duration = (
        "(e) => new Promise((done) => e.duration ? done(e.duration) : (e.ondurationchange = () => done(e.duration)))"
    )
    assert await page.get_by_label("Play tone.wav").evaluate(duration) == pytest.approx(0.75, abs=0.01)
    assert await browser.find_violations() == []
    await browser.keep("answers-audio")
    file = {"name": "noise.wav", "mimeType": "audio/wav", "buffer": b"no sound"}
    await page.get_by_role("group", name="audio").locator("input[type=file]").set_input_files(file)
    await page.wait_for_selector("text='noise.wav' is not a sound that this browser can read")


async def test_a_recording_of_the_microphone_is_sent(browser: Browser) -> None:
    page = browser.page
    await browser.open("/#/models/Ear", "Try it")
    await browser.press("Record")
    await page.get_by_role("button", name="Stop recording").wait_for()
    await page.wait_for_timeout(700)
    await browser.press("Stop recording")
    await page.get_by_text("recording: ").wait_for()
    await browser.press("Run")
    await page.wait_for_selector("section.output")
    assert await value(browser, "count") > 1_600


async def test_a_fixed_length_is_filled_and_outputs_are_played(browser: Browser) -> None:
    page = browser.page
    await browser.open("/#/models/Voice", "Try it")
    await page.set_input_files("input[type=file]", wav_file(500, 0.5, rate=16_000))
    await page.get_by_label("samples a second").fill("8000")
    await page.wait_for_selector("text=tone.wav: 8000 samples, 1.00 s of 0.50 s")
    await browser.press("Run")
    waveform = page.get_by_label("Output waveform")
    await waveform.get_by_role("img", name="Wave form of waveform").wait_for()
    assert await waveform.get_by_label("samples a second").input_value() == "8000"
    await waveform.get_by_role("button", name="Table").click()
    await waveform.get_by_text("The first 1000 of 8000 values.").wait_for()
    values = np.array([float(text) for text in await waveform.locator("td").all_text_contents()])
    assert np.abs(values).max() == pytest.approx(8192, rel=0.02)
    assert await page.get_by_label("Play sound 1 of file").count() == 1
    assert await browser.find_violations() == []


# Shape, and the axis of the samples.
AXES: list[tuple[list[int], int]] = [
    ([-1], 0),
    ([-1, -1], 1),
    ([1, -1], 1),
    ([-1, 16_000], 1),
    ([-1, 43_844, 1], 1),
    ([-1, 1, -1], 2),
    ([2, -1], -1),
    ([-1, 3], -1),
    ([1, 10], -1),
    ([], -1),
    ([-1, 80, 3000], -1),
]


async def test_the_axis_of_the_samples(browser: Browser) -> None:
    script = """async (shapes) => {
        const { sampleAxis } = await import("/console/assets/audio.js");
        return shapes.map(sampleAxis);
    }"""
    await browser.open("/")
    assert await browser.page.evaluate(script, [shape for shape, _ in AXES]) == [axis for _, axis in AXES]
