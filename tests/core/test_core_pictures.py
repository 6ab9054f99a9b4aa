"""How photos become inputs: which inputs take them, their axes, size, fit and values."""

from typing import Any

import pytest

from dragoman import BF16, BOOL, BYTES, FP16, FP32, INT8, INT64, UINT8, TensorSpec
from dragoman.core.pictures import kept_size, picture_settings, takes_pictures

PICTURES = [
    (-1, 28, 28), (-1, 28, 28, 1), (-1, 1, 28, 28), (1, 28, 28), (224, 224, 3), (-1, -1, 3), (3, -1, -1),
    (-1, 3, -1, -1),
    (-1, -1, -1, 3), (1, 1, 64, -1), (-1, 3, 48, -1), (1, 3, 224, 224), (-1, -1, -1, -1), (-1, 4, 64, 64),
]  # fmt: skip
OTHERS = [
    (-1, 43844, 1), (-1, 901, 161), (-1, 30, 20), (-1, 100, 3), (-1, 3, 100), (-1, 4, 64), (2, -1, 128), (1, 1, 128),
    (28, 28), (-1, 3, 1, 160), (-1, 3, 16000), (-1, 64), (), (-1, 3, 8, 64, 64),
]  # fmt: skip


def test_inputs_that_take_pictures() -> None:
    specs = [TensorSpec("x", FP32, shape) for shape in (*PICTURES, *OTHERS)]
    assert [spec.shape for spec in specs if takes_pictures(spec)] == PICTURES
    types: list[Any] = [FP16, UINT8, INT8, INT64, BF16, BOOL, BYTES, None]
    assert [each for each in types if takes_pictures(TensorSpec("x", each, (-1, 3, 8, 8)))] == [FP16, UINT8, INT8]
    assert not takes_pictures(TensorSpec("x", FP32, None))


def settings(shape: tuple[int, ...], *outputs: tuple[int, ...], datatype: Any = FP32, **options: Any) -> Any:
    specs = [TensorSpec(f"y{i}", FP32, each) for i, each in enumerate(outputs)]
    return picture_settings(TensorSpec("x", datatype, shape), outputs=specs, **options)


@pytest.mark.parametrize(
    ("shape", "example", "layouts", "channels"),
    [
        ((-1, 3, 8, 9), (), ["NCHW"], 3),
        ((-1, 8, 9, 4), (), ["NHWC"], 4),
        ((-1, -1, -1, 1), (), ["NHWC"], 1),
        ((4, 4, 3), (), ["NHWC", "NCHW"], 3),  # pictures are rather square
        ((3, 64, 4), (), ["NCHW", "NHWC"], 3),
        ((-1, -1, -1, -1), (), ["NCHW", "NHWC"], 3),
        ((-1, -1, -1, -1), (1, 80, 80, 1), ["NHWC", "NCHW"], 1),
        ((-1, -1, -1, -1), (1, 8, 8, 1), ["NCHW", "NHWC"], 3),  # a tiny example says nothing
        ((-1, 28, 28), (), ["NHW"], 1),
        ((-1, 30, 20), (), ["NHW"], 1),
        ((28, 28), (), None, 0),
        ((-1, 5, 8, 9), (), None, 0),
    ],
)
def test_axes(shape: tuple[int, ...], example: tuple[int, ...], layouts: list[str] | None, channels: int) -> None:
    found = settings(shape, example=example)
    if layouts is None:
        assert found is None
    else:
        assert ([*found.layouts], found.layout, found.channels) == (layouts, layouts[0], channels)


def test_a_chosen_layout() -> None:
    found = settings((4, 8, 3), layout="NCHW")
    assert (found.channels, found.height, found.width) == (4, 8, 3)
    assert settings((-1, 3, 8, 8), layout="NHWC") is None
    assert settings((-1, 3, 8, 8), layout="NHW") is None


CLASSES, MANY, BOXES, ROWS = (-1, 10), (-1, 1000), (-1, 100, 6), (-1, 4)


@pytest.mark.parametrize(
    ("shape", "datatype", "outputs", "size", "fit"),
    [
        ((-1, 3, 8, 9), FP32, [CLASSES], (8, 9), "crop"),
        ((-1, 3, 8, 9), FP32, [(-1,)], (8, 9), "crop"),
        ((-1, 3, 8, 9), FP32, [(-1, 10, 1, 1)], (8, 9), "crop"),
        ((-1, 3, 8, 9), FP32, [BOXES], (8, 9), "letterbox"),
        ((-1, 3, 8, 9), FP32, [ROWS], (8, 9), "crop"),  # four classes
        ((-1, 3, 8, 9), FP32, [ROWS, (-1,)], (8, 9), "letterbox"),  # boxes beside scores
        ((-1, 3, 8, 9), FP32, [(-1, 3, 8, 9)], (8, 9), "stretch"),
        ((-1, 3, 8, 9), FP32, [(-1, 1, 5)], (8, 9), "letterbox"),
        ((-1, 3, 8, 9), FP32, [], (8, 9), "stretch"),
        ((-1, 3, -1, -1), FP32, [CLASSES], (224, 224), "crop"),
        ((-1, 3, -1, -1), FP32, [(-1, 1, 1, 1)], (640, 640), "letterbox"),
        ((-1, 3, -1, -1), FP32, [(-1, 2)], (640, 640), "crop"),
        ((-1, 3, -1, -1), FP32, [BOXES], (640, 640), "letterbox"),
        ((-1, 3, -1, -1), FP32, [], (640, 640), "letterbox"),
        ((-1, 3, 48, -1), FP32, [(-1, -1, 97)], (48, None), "letterbox"),
        ((-1, -1, 64, 3), UINT8, [], (None, 64), "stretch"),
        ((-1, -1, -1, 3), UINT8, [BOXES], (640, 640), "letterbox"),
    ],
)
def test_size_and_fit(shape: Any, datatype: Any, outputs: Any, size: Any, fit: str) -> None:
    found = settings(shape, *outputs, datatype=datatype)
    assert ((found.height, found.width), found.fit) == (size, fit)
    assert found.is_free == (shape.count(-1) > 2)
    assert found.keeps_size == (found.is_free and datatype is UINT8)


def test_free_sides_have_the_size_of_a_useful_example() -> None:
    assert settings((-1, 3, -1, -1), example=(1, 3, 64, 96)).height == 64
    assert settings((-1, 3, -1, -1), example=(1, 3, 64, 96)).width == 96
    assert settings((-1, 3, -1, -1), example=(1, 3, 32, 32)).height == 640
    assert settings((-1, 3, 48, -1), example=(1, 3, 48, 96)).width is None


@pytest.mark.parametrize(
    ("shape", "datatype", "outputs", "values"),
    [
        ((-1, 3, 8, 8), FP32, [CLASSES], "0..1"),
        ((-1, 3, 8, 8), FP16, [MANY], "imagenet"),
        ((-1, 3, 8, 8), BF16, [(-1, 1001)], "imagenet"),
        ((-1, 1, 8, 8), FP32, [MANY], "0..1"),  # grey
        ((-1, 3, 8, 8), FP32, [(-1, 1000, 6)], "0..1"),  # 1000 boxes
        ((-1, 3, 8, 8), UINT8, [MANY], "0..255"),
        ((-1, 3, 8, 8), INT8, [MANY], "-128..127"),
    ],
)
def test_values(shape: Any, datatype: Any, outputs: Any, values: str) -> None:
    assert settings(shape, *outputs, datatype=datatype).values == values


def test_a_photo_keeps_its_size_as_far_as_it_is_not_too_large() -> None:
    assert kept_size(480, 640) == (480, 640)
    assert kept_size(3000, 4000) == (768, 1024)
    assert kept_size(4001, 3) == (1024, 1)
