"""`dragoman infer` with pictures and sounds: size, layout, scale and rate by default and by options."""

import asyncio
import json
import struct
import sys
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import dragoman
from dragoman import BYTES, FP16, FP32, FP64, INT8, INT16, INT64, UINT8, Infer, Server, TensorSpec, errors
from dragoman.cli import main
from dragoman.cli.media import Media

Image = pytest.importorskip("PIL.Image")
ImageOps = pytest.importorskip("PIL.ImageOps")
pytestmark = pytest.mark.asyncio(loop_scope="module")


def echo(name: str, *specs: TensorSpec, example: dict[str, Any] | None = None) -> type[dragoman.Model]:
    """Return a class of models that return their inputs."""

    class Echo(dragoman.Model):
        placement = "inline"
        inputs = specs

        def infer(self, call: Infer) -> dict[str, Any]:
            return dict(call.inputs)

        def example_inputs(self) -> dict[str, Any] | None:
            return example

    Echo.__name__ = Echo.__qualname__ = name
    return Echo


class Files(dragoman.Model):
    """Takes files, and returns their sums."""

    placement = "inline"
    inputs = (TensorSpec("file", BYTES, (-1,)), TensorSpec("pixels", UINT8, (-1, -1, -1, 3), optional=True))

    def infer(self, call: Infer) -> dict[str, Any]:
        return {"sum": np.array([zlib.crc32(each) for each in call.inputs["file"].data])}


def seen(name: str, *shapes: tuple[int, ...]) -> type[dragoman.Model]:
    """Return a class of models whose outputs, of these shapes, are the pixels of a picture of 4 x 4."""
    names = [f"y{i}" for i in range(len(shapes))]

    class Seen(dragoman.Model):
        placement = "inline"
        inputs = (TensorSpec("x", UINT8, (-1, 4, 4, 3)),)
        outputs = tuple(TensorSpec(each, UINT8, shape) for each, shape in zip(names, shapes, strict=True))

        def infer(self, call: Infer) -> dict[str, Any]:
            pixels = np.asarray(call.inputs["x"].data)
            return {each: pixels.reshape(shape) for each, shape in zip(names, shapes, strict=True)}

    Seen.__name__ = Seen.__qualname__ = name
    return Seen


class Finder(dragoman.Model):
    """Finds a box."""

    placement = "inline"
    inputs = (TensorSpec("x", UINT8, (-1, 4, 4, 3)),)
    outputs = (TensorSpec("boxes", FP32, (-1, 4)), TensorSpec("scores", FP32, (-1,)))

    def infer(self, call: Infer) -> dict[str, Any]:
        return {"boxes": np.array([[0, 0, 2, 2]], np.float32), "scores": np.ones(1, np.float32)}


Finder.__name__ = Finder.__qualname__ = "finder"

MODELS = (
    Finder,
    seen("classes", (-1, 48)),
    seen("columns", (-1, 48, 1, 1)),
    seen("boxes", (-1, 16, 3)),
    seen("corners", (-1, 4), (-1,)),
    seen("planes", (-1, 4, 4, 3)),
    echo("fixed", TensorSpec("x", FP32, (-1, 3, 6, 8))),
    echo("last", TensorSpec("x", UINT8, (-1, 4, 4, 3))),
    echo("signed", TensorSpec("x", INT8, (4, 4, 1))),
    echo("half", TensorSpec("x", FP16, (1, 1, 6, 8))),
    echo("free", TensorSpec("x", FP32, (-1, 3, -1, -1))),
    echo("shown", TensorSpec("x", FP32, (-1, 3, -1, -1)), example={"x": np.ones((1, 3, 64, 96), np.float32)}),
    echo("unknown", TensorSpec("x", FP32, (-1, -1, -1, -1)), example={"x": np.ones((1, 80, 80, 1), np.float32)}),
    echo("bytes", TensorSpec("x", UINT8, (-1, -1, -1, 3))),
    echo("matrices", TensorSpec("x", FP32, (-1, 6, 8))),
    echo("line", TensorSpec("x", FP32, (-1, 3, 16, -1))),
    echo("rows", TensorSpec("x", FP64, (-1, 64))),
    Files,
    echo("vector", TensorSpec("x", FP32, (-1, 5))),
    echo("sound", TensorSpec("x", FP32, (-1, -1)), TensorSpec("sr", INT64, ())),
    echo(
        "detector",
        TensorSpec("x", FP32, (-1, -1)),
        TensorSpec("state", FP32, (2, -1)),
        TensorSpec("sr", INT64, ()),
        example={"x": np.zeros((1, 8), np.float32), "state": np.array([[5], [6]], np.float32), "sr": np.array(16000)},
    ),
    echo("pcm", TensorSpec("x", INT16, (-1,))),
    echo("windows", TensorSpec("x", FP32, (-1, 400, 1))),
    echo("one", TensorSpec("x", FP32, (1, 1, 1000))),
)
PIXELS = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    async with Server(*MODELS, http_port=0, grpc_port=-1) as server:
        yield server


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Image.fromarray(PIXELS).save("p.png")
    return tmp_path


async def run(*arguments: str) -> int:
    """Run a command in a thread, because the server runs in this event loop."""
    return await asyncio.to_thread(main, arguments)


async def infer(capsys: pytest.CaptureFixture[str], server: Server, *words: str) -> tuple[dict[str, Any], str]:
    """Return the outputs as arrays, and what standard error has."""
    assert await run("infer", server.http_url, *words, "--json") == 0, capsys.readouterr().err
    captured = capsys.readouterr()
    found = json.loads(captured.out)["outputs"]
    return {each["name"]: np.array(each["data"]).reshape(each["shape"]) for each in found}, captured.err


async def one(capsys: pytest.CaptureFixture[str], server: Server, *words: str) -> np.ndarray:
    found, _ = await infer(capsys, server, *words)
    return next(iter(found.values()))


# --- pictures --------------------------------------------------------------------------------------------------------


async def test_a_picture_gets_size_layout_and_scale_of_the_signature(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    found, notes = await infer(capsys, server, "fixed", "p.png")
    np.testing.assert_allclose(found["x"][0], PIXELS.transpose(2, 0, 1) / 255, rtol=1e-6)
    assert notes == "p.png: 8x6, values 0..1, NCHW\n"
    small = np.asarray(Image.fromarray(PIXELS).resize((4, 4), Image.Resampling.BILINEAR))
    found, notes = await infer(capsys, server, "last", "x=p.png")
    np.testing.assert_array_equal(found["x"][0], small)
    assert notes == "p.png: 8x6 to 4x4 stretched, values 0..255, NHWC\n"
    grey = np.asarray(Image.fromarray(PIXELS).convert("L").resize((4, 4), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(await one(capsys, server, "signed", "p.png"), grey[..., None].astype(int) - 128)
    exact = np.asarray(Image.fromarray(PIXELS).convert("L"))[None, None] / np.float32(255)
    half = await one(capsys, server, "half", "p.png")
    np.testing.assert_array_equal(half.astype(np.float16), exact.astype(np.float16))


async def test_several_pictures_are_rows(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    Image.fromarray(255 - PIXELS).save("q.png")
    found = await one(capsys, server, "fixed", "p.png,q.png")
    assert found.shape == (2, 3, 6, 8)
    np.testing.assert_allclose(found[0] + found[1], 1, atol=1e-6)
    Image.fromarray(PIXELS).resize((40, 40)).save("q.png")
    assert await run("infer", server.http_url, "free", "p.png,q.png", "--resize", "own") == 2
    assert "expected files of one size, got 3x6x8, 3x40x40" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("scale", "convert"),
    [
        ("0..255", lambda x: x),
        ("-1..1", lambda x: x / 127.5 - 1),
        ("0..16", lambda x: x / 255 * 16),
        ("imagenet", lambda x: (x / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]),
    ],
)
async def test_scales(server: Server, scale: str, convert: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found, notes = await infer(capsys, server, "fixed", "p.png", f"--scale={scale}")
    np.testing.assert_allclose(found["x"][0].transpose(1, 2, 0), convert(PIXELS.astype(float)), atol=2e-5)
    assert f"values {scale}" in notes


async def test_free_sizes(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    found, notes = await infer(capsys, server, "free", "p.png")
    assert found["x"].shape == (1, 3, 640, 640)  # its example is smaller
    assert notes == "p.png: 8x6 to 640x640 with borders, values 0..1, NCHW\n"
    assert (await one(capsys, server, "free", "p.png", "--resize", "own")).shape == (1, 3, 6, 8)
    assert (await one(capsys, server, "bytes", "p.png")).shape == (1, 6, 8, 3)
    assert (await one(capsys, server, "bytes", "p.png", "--resize", "5x4")).shape == (1, 4, 5, 3)
    assert (await one(capsys, server, "shown", "p.png")).shape == (1, 3, 64, 96)  # of its example
    assert (await one(capsys, server, "unknown", "p.png")).shape == (1, 80, 80, 1)
    assert (await one(capsys, server, "unknown", "p.png", "--layout", "nchw", "--resize", "9x7")).shape == (1, 3, 7, 9)
    assert (await one(capsys, server, "line", "p.png")).shape == (1, 3, 16, 21)  # in proportion
    assert (await one(capsys, server, "rows", "p.png")).shape == (1, 64)
    grey = np.asarray(Image.fromarray(PIXELS).convert("L"))[None] / np.float32(255)
    np.testing.assert_allclose(await one(capsys, server, "matrices", "p.png"), grey, rtol=1e-6)
    found, notes = await infer(capsys, server, "free", "p.png", "--resize", "16x16", "--letterbox", "--scale=0..255")
    expected = ImageOps.pad(Image.fromarray(PIXELS), (16, 16), Image.Resampling.BILINEAR, color=(114, 114, 114))
    np.testing.assert_array_equal(found["x"][0], np.asarray(expected).transpose(2, 0, 1))
    assert "to 16x16 with borders" in notes


@pytest.mark.parametrize(
    ("words", "fit"),
    [
        (["classes"], "crop"),
        (["columns"], "crop"),
        (["boxes"], "letterbox"),
        (["corners"], "letterbox"),
        (["planes"], "stretch"),
        (["classes", "--fit", "stretch"], "stretch"),
        (["classes", "--letterbox"], "letterbox"),
        (["boxes", "--fit", "crop"], "crop"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
async def test_a_picture_fits_as_the_outputs_need(
    server: Server, words: list[str], fit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    image, size, smooth = Image.fromarray(PIXELS), (4, 4), Image.Resampling.BILINEAR
    expected, note = {
        "crop": (ImageOps.fit(image, size, smooth), "cut to the middle"),
        "letterbox": (ImageOps.pad(image, size, smooth, color=(114, 114, 114)), "with borders"),
        "stretch": (image.resize(size, smooth), "stretched"),
    }[fit]
    found, notes = await infer(capsys, server, words[0], "p.png", *words[1:])
    np.testing.assert_array_equal(found["y0"].reshape(4, 4, 3), np.asarray(expected))
    assert notes == f"p.png: 8x6 to 4x4 {note}, values 0..255, NHWC\n"


async def test_where_boxes_are_drawn(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    place = f"drawn on the photo in the console: {server.http_url}/console#/models/finder"
    assert await run("infer", server.http_url, "finder", "p.png") == 0
    assert capsys.readouterr().err.splitlines()[1:] == [place]
    assert await run("infer", server.http_url, "finder", "p.png", "--json") == 0
    assert place not in capsys.readouterr().err
    assert await run("infer", server.http_url, "boxes", "p.png") == 0
    assert len(capsys.readouterr().err.splitlines()) == 1


async def test_a_model_that_takes_files(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    Path("q.jpg").write_bytes(b"\xff\x00")
    found = await one(capsys, server, "Files", "p.png,q.jpg")
    assert found.tolist() == [zlib.crc32(Path("p.png").read_bytes()), zlib.crc32(b"\xff\x00")]
    assert await run("infer", server.http_url, "Files", "p.png", "--resize", "9") == 2
    assert "--resize: the model decodes files itself, as input 'file' of bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["vector", "p.png"], "a picture needs an input [N,C,H,W], [N,H,W,C] or [N, pixels of a square], got [-1, 5]"),
        (["last", "x=p.png", "--resize", "own"], "--resize: the input takes 4x4 (-1: any), got own"),
        (["line", "p.png", "--resize", "9x9"], "--resize: the input takes -1x16 (-1: any), got 9x9"),
        (["fixed", "p.png", "--resize", "9x9"], "--resize: the input takes 8x6 (-1: any), got 9x9"),
        (["free", "p.png", "--resize", "0x9"], "--resize: expected WIDTHxHEIGHT in pixels, such as 640x480, or one"),
        (["fixed", "p.png", "--scale", "1..0"], "--scale: expected LOW..HIGH, such as 0..1, or imagenet, got '1..0'"),
        (["last", "p.png", "--scale", "0..1"], "--scale: UINT8 does not hold values 0..1"),
        (["last", "p.png", "--scale=-1..255"], "--scale: UINT8 does not hold values -1..255"),
        (["half", "p.png", "--scale", "imagenet"], "--scale imagenet: expected an input of floats with three channels"),
        (["fixed", "p.png", "--layout", "nhwc"], "expected 1, 3 or 4 channels, and as NHWC [-1, 3, 6, 8] has 8"),
        (["fixed", "text.png"], "'text.png' is not a picture"),
        (["fixed", "none.png"], "'none.png' cannot be read: No such file or directory"),
        (["fixed", "@p.png"], "'@p.png' cannot be read: No such file or directory; did you mean p.png, without @?"),
        (["sound", "s.wav"], "'s.wav': expected a WAV file"),
        (["fixed", "photo.gif"], "or a file (.npy, .json, .csv, .tsv, .parquet, .png, .jpg, .jpeg, .webp, .bmp, .wav)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
async def test_files_and_options_that_do_not_suit(
    server: Server, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.png").write_text("text")
    Path("s.wav").write_text("text")
    assert await run("infer", server.http_url, *words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1


async def test_without_pillow(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert await run("infer", server.http_url, "fixed", "p.png") == 2
    error = capsys.readouterr().err
    assert error == "dragoman: 'p.png' needs the package 'pillow': pip install 'dragoman[images]'\n"


# --- sounds ----------------------------------------------------------------------------------------------------------


def wav(samples: np.ndarray, rate: int, bits: int = 16, *, is_float: bool = False) -> bytes:
    """Return a WAV file of samples [n, channels]."""
    channels = samples.shape[1]
    if is_float:
        data = samples.astype(f"<f{bits // 8}").tobytes()
    elif bits == 8:
        data = (np.rint(samples * 127) + 128).astype(np.uint8).tobytes()
    else:
        whole = np.rint(samples * (2 ** (bits - 1) - 1)).astype(np.int64)
        data = b"".join(int(each).to_bytes(bits // 8, "little", signed=True) for each in whole.reshape(-1))
    width = bits // 8 * channels
    form = struct.pack("<HHIIHH", 3 if is_float else 1, channels, rate, rate * width, width, bits)
    chunks = b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(chunks) + 4) + b"WAVE" + chunks


SOUND = np.stack([np.sin(np.arange(1000) / 20), np.cos(np.arange(1000) / 30)], axis=1) * 0.9


@pytest.mark.parametrize("bits", [8, 16, 24, 32, -32, -64])
async def test_sounds_of_any_form_are_the_mean_of_their_channels(
    server: Server, bits: int, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("s.wav").write_bytes(wav(SOUND, 16000, abs(bits), is_float=bits < 0))
    found, notes = await infer(capsys, server, "sound", "x=s.wav")
    assert found["x"].shape == (1, 1000)
    np.testing.assert_allclose(found["x"][0], SOUND.mean(1), atol=2 / 2 ** (min(abs(bits), 24) - 1))
    assert found["sr"] == 16000  # the rate, for the input of its name
    assert notes == "s.wav: 1000 samples, 16000 Hz\nsr=16000\n"


async def test_an_example_fills_what_is_not_given(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.wav").write_bytes(wav(SOUND, 8000))
    assert await run("infer", server.http_url, "detector", "s.wav") == 2
    assert "not given: state=... (FP32[2,-1])" in capsys.readouterr().err
    found, notes = await infer(capsys, server, "detector", "s.wav", "--example")
    assert (found["x"].shape, found["sr"], found["state"].tolist()) == ((1, 1000), 8000, [[5.0], [6.0]])
    assert notes.endswith("sr=8000\n")
    assert await run("infer", server.http_url, "detector", "--example", "--data", '{"inputs": []}') == 2
    assert "--example: expected inputs by name beside it" in capsys.readouterr().err


async def test_a_sound_at_another_rate(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    tone = np.sin(2 * np.pi * 440 * np.arange(22050) / 22050)
    Path("s.wav").write_bytes(wav(tone[:, None], 22050, 32, is_float=True))
    found, notes = await infer(capsys, server, "sound", "x=s.wav", "--sample-rate", "16000")
    expected = np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
    np.testing.assert_allclose(found["x"][0, 200:-200], expected[200:-200], atol=2e-3)
    assert found["sr"] == 16000
    assert notes == "s.wav: 16000 samples, 22050 Hz to 16000 Hz\nsr=16000\n"


async def test_a_sound_in_the_declared_shape(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.wav").write_bytes(wav(SOUND, 8000))
    mono = SOUND.mean(1)
    found, notes = await infer(capsys, server, "windows", "s.wav")
    assert found["x"].shape == (3, 400, 1)
    np.testing.assert_allclose(found["x"].reshape(-1), np.pad(mono, (0, 200)), atol=1e-4)
    assert notes == "s.wav: 1000 samples, 8000 Hz, as 3 windows of 400 with zeros at the end\n"
    np.testing.assert_allclose((await one(capsys, server, "one", "s.wav"))[0, 0], mono, atol=1e-4)
    np.testing.assert_allclose(await one(capsys, server, "pcm", "s.wav"), mono * 32767, atol=1)
    assert await run("infer", server.http_url, "one", "s.wav", "--sample-rate", "16000") == 2
    assert "expected 1000 samples, got 2000: cut the file" in capsys.readouterr().err
    assert await run("infer", server.http_url, "last", "s.wav") == 2
    assert "a sound needs an input of floats, INT16 or bytes, got UINT8" in capsys.readouterr().err


async def test_several_pictures_need_an_axis_of_their_own(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    paths = [str(tmp_path / name) for name in ("a.png", "b.png")]
    for path in paths:
        image.new("RGB", (4, 4)).save(path)
    assert Media().read(",".join(paths), TensorSpec("x", FP32, (-1, 3, 4, 4))).shape == (2, 3, 4, 4)
    with pytest.raises(errors.InvalidInput, match=r"expected one picture for \[-1, 4, 4\], got 2"):
        Media().read(",".join(paths), TensorSpec("x", FP32, (-1, 4, 4)))
