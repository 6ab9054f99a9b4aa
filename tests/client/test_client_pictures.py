"""Pictures as inputs, and the helper that converts them."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dragoman
from dragoman import errors
from dragoman.client import picture

Image = pytest.importorskip("PIL.Image")


def photo(width: int = 10, height: int = 8, mode: str = "RGB") -> Any:
    bands = len(Image.new(mode, (1, 1)).getbands())
    pixels = np.arange(width * height * bands, dtype=np.uint32) % 251
    shape = (height, width) if bands == 1 else (height, width, bands)
    return Image.fromarray(pixels.astype(np.uint8).reshape(shape), mode)


def test_a_picture_of_the_right_size_is_its_pixels(client: Any) -> None:
    image = photo()
    expected = np.asarray(image).transpose(2, 0, 1)
    np.testing.assert_array_equal(client.infer("Pixels", {"bytes": image})["bytes"], expected[None])
    np.testing.assert_array_equal(client.infer("Pixels", {"bytes": [image] * 2})["bytes"], np.stack([expected] * 2))


@pytest.mark.parametrize(
    ("name", "image", "message"),
    [
        (
            "bytes",
            photo(20, 16),
            "expected pictures of 8 x 10 pixels as UINT8, got 16 x 20: convert it with "
            'dragoman.client.picture(image, size=(8, 10), layout="NCHW")',
        ),
        (
            "floats",
            photo(),
            "expected pictures of 8 x 10 pixels as FP32, got 8 x 10: convert it with "
            'dragoman.client.picture(image, layout="NHWC", scale=1 / 255) '
            "(1 / 255 for values from 0 to 1, 1 for 0 to 255)",
        ),
        (
            "any",
            photo(),
            "expected pictures of any x any pixels as FP32, got 8 x 10: convert it with "
            'dragoman.client.picture(image, layout="NCHW", scale=1 / 255) '
            "(1 / 255 for values from 0 to 1, 1 for 0 to 255)",
        ),
        (
            "flat",
            photo(),
            "a picture needs an input [N, 3, H, W] or [N, H, W, 3], and this one has shape [-1, 240]",
        ),
    ],
)
def test_a_picture_that_needs_a_choice_is_rejected(client: Any, name: str, image: Any, message: str) -> None:
    with pytest.raises(errors.InvalidInput) as caught:
        client.infer("Pixels", {name: image})
    assert str(caught.value) == f"input '{name}': {message}"


def test_a_list_of_converted_pictures_is_a_batch(client: Any) -> None:
    arrays = [
        picture(photo(20, 16), size=(8, 10), layout="NHWC", scale=1 / 255),
        picture(photo(), layout="NHWC", scale=1),
    ]
    np.testing.assert_array_equal(client.infer("Pixels", {"floats": arrays})["floats"], np.concatenate(arrays))


def test_a_path_says_how_to_read_the_file(client: Any) -> None:
    with pytest.raises(errors.InvalidInput) as caught:
        client.infer("Pixels", {"floats": "photo.jpg"})
    advice = "; a file is read by dragoman.client.picture('photo.jpg', size=(8, 10), layout=\"NHWC\", scale=1 / 255)"
    assert str(caught.value) == f"input 'floats': expected datatype FP32, got BYTES{advice}"


def test_the_advice_works(client: Any) -> None:
    array = picture(photo(20, 16), size=(8, 10), layout="NHWC", scale=1 / 255)
    back = client.infer("Pixels", {"floats": array})["floats"]
    assert back.shape == (1, 8, 10, 3)
    assert 0 <= back.min() < back.max() <= 1


def test_pictures_for_text_inputs_are_files(client: Any) -> None:
    (back,) = client.infer("Echo", {"x": photo()})["x"]
    assert back.tobytes() == photo().tobytes()


def test_files_bytes_and_images_are_equal(tmp_path: Path) -> None:
    image = photo()
    file = io.BytesIO()
    image.save(file, "PNG")
    (tmp_path / "p.png").write_bytes(file.getvalue())
    expected = np.asarray(image).transpose(2, 0, 1)[None]
    for source in (image, tmp_path / "p.png", str(tmp_path / "p.png"), file.getvalue()):
        array = picture(source)
        assert array.dtype == np.uint8
        np.testing.assert_array_equal(array, expected)


def test_the_helper_is_public() -> None:
    assert dragoman.client.picture is picture


def test_sizes() -> None:
    wide = Image.new("RGB", (20, 10), (200, 0, 0))
    assert picture(wide, size=(4, 6)).shape == (1, 3, 4, 6)
    assert picture(wide, size=4).shape == (1, 3, 4, 4)
    letterbox = picture(wide, size=20, fit="letterbox", layout="NHWC")[0]
    assert letterbox[0, 0].tolist() == [114, 114, 114]
    assert letterbox[10, 0].tolist() == [200, 0, 0]
    assert (picture(wide, size=8, fit="crop", layout="NHWC") == [200, 0, 0]).all()


def test_scaling_and_channels() -> None:
    pixel = Image.new("RGBA", (1, 1), (255, 0, 51, 7))
    array = picture(pixel.convert("RGB"), scale=1 / 255, mean=[0.5, 0, 0], std=[0.5, 1, 0.1])
    assert array.dtype == np.float32
    np.testing.assert_allclose(array.reshape(-1), [1, 0, 2], rtol=1e-6)
    assert picture(pixel, channels=4).reshape(-1).tolist() == [255, 0, 51, 7]
    assert picture(Image.new("L", (2, 1), 9), channels=1).tolist() == [[[[9, 9]]]]


def test_what_is_transparent_becomes_white() -> None:
    pixel = Image.new("RGBA", (2, 1), (255, 0, 51, 51))
    pixel.putpixel((1, 0), (0, 0, 0, 0))
    assert picture(pixel, layout="NHWC").reshape(-1).tolist() == [255, 204, 214, 255, 255, 255]
    assert picture(Image.new("LA", (1, 1), (0, 0)), channels=1).item() == 255
    file = io.BytesIO()
    Image.new("P", (1, 1)).save(file, "PNG", transparency=0)
    assert picture(file.getvalue()).reshape(-1).tolist() == [255, 255, 255]
    bordered = picture(pixel, size=4, fit="letterbox", channels=4, layout="NHWC")[0]
    assert bordered[0, 0].tolist() == [114, 114, 114, 255]
    assert bordered[1, 3].tolist()[3] == 0


def test_a_side_in_proportion() -> None:
    wide = Image.new("RGB", (21, 10))
    assert picture(wide, size=(20, None)).shape == (1, 3, 20, 42)
    assert picture(wide, size=(None, 7)).shape == (1, 3, 3, 7)
    assert picture(wide, size=(None, 1)).shape == (1, 3, 1, 1)


@pytest.mark.parametrize(
    ("size", "target", "left", "top", "inner"),
    [((8, 5), (11, 8), 0, 0, (11, 7)), ((5, 8), (8, 11), 0, 0, (7, 11)), ((10, 3), (10, 6), 0, 1, (10, 3))],
)
def test_borders_of_a_letterbox(size: Any, target: Any, left: int, top: int, inner: Any) -> None:
    found = picture(Image.new("L", size, 200), channels=1, fit="letterbox", size=target[::-1])[0, 0] == 200
    expected = np.zeros(target[::-1], bool)
    expected[top : top + inner[1], left : left + inner[0]] = True
    np.testing.assert_array_equal(found, expected)


def test_photos_are_turned_upright() -> None:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    Image.new("RGB", (20, 10)).save(file, "JPEG", exif=exif)
    assert picture(file.getvalue()).shape == (1, 3, 20, 10)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (b"no image", {}, "these bytes are not a picture"),
        ("missing.png", {}, "the image cannot be read.*missing.png"),
        (3, {}, "expected a path, bytes or an image of Pillow, got int"),
        (Image.new("I;16", (1, 1)), {}, "expected 8 bits for each channel, got an image of mode I;16"),
        (photo(), {"size": 0}, r"size: expected \(height, width\) of at least one pixel"),
        (photo(), {"layout": "HWC"}, "layout: expected 'NCHW' or 'NHWC', got 'HWC'"),
        (photo(), {"fit": "pad"}, "fit: expected 'stretch', 'letterbox' or 'crop', got 'pad'"),
        (photo(), {"channels": 2}, "channels: expected 1, 3 or 4, got 2"),
    ],
)
def test_invalid_pictures_are_rejected(source: Any, options: Any, message: str) -> None:
    with pytest.raises(errors.InvalidInput, match=message):
        picture(source, **options)
