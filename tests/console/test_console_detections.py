"""Heads of detectors, masks and photos: pure functions of the console, and what a page shows of them."""

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray

import dragoman
from console.browser import Browser, needs_chromium, png, serve_page

pytestmark = [needs_chromium, pytest.mark.asyncio(loop_scope="package")]
CLASSES = 7


class Finder(dragoman.Model):
    """A detector with the head of YOLOv8: finds the red pixels of a picture."""

    placement = "inline"
    inputs = (dragoman.TensorSpec("images", dragoman.FP32, (-1, 3, -1, -1)),)
    outputs = (dragoman.TensorSpec("output0", dragoman.FP32, (-1, 4 + CLASSES, -1)),)

    def infer(self, call: dragoman.Infer) -> dict[str, NDArray[Any]]:
        pictures = np.asarray(call.inputs["images"].data)
        count, _, height, width = pictures.shape
        if height % 32 or width % 32:
            raise ValueError("expected multiples of 32")
        found = np.zeros((count, 4 + CLASSES, sum(height // s * (width // s) for s in (8, 16, 32))), np.float32)
        for head, (red, green, _) in zip(found, pictures, strict=True):
            rows, columns = np.nonzero((red > 0.9) & (green < 0.1))
            left, right, top, bottom = columns.min(), columns.max() + 1, rows.min(), rows.max() + 1
            head[:4, 5] = (left + right) / 2, (top + bottom) / 2, right - left, bottom - top
            head[4 + 2, 5] = 0.9
            head[:4, 6] = head[:4, 5] + 1  # nearly the same box
            head[4 + 2, 6] = 0.8
            head[:4, 7] = 40, 40, 20, 20
            head[4 + 3, 7] = 0.2
        return {"output0": found}


class Segmenter(dragoman.Model):
    """Classes of the pixels at half of the size, and their depth."""

    placement = "inline"
    inputs = (dragoman.TensorSpec("image", dragoman.FP32, (1, 3, 64, 64)),)
    outputs = (
        dragoman.TensorSpec("classes", dragoman.INT64, (1, 32, 32)),
        dragoman.TensorSpec("depth", dragoman.FP32, (1, 1, 64, 64)),
    )

    def infer(self, call: dragoman.Infer) -> dict[str, NDArray[Any]]:
        image = np.asarray(call.inputs["image"].data)
        return {"classes": (image[:, 0, ::2, ::2] > 0.5) * 3, "depth": image[:, :1] * 10}


SIDE = 96
CELLS_OF_SIDE = 12 * 12 + 6 * 6 + 3 * 3


class Poses(dragoman.Model):
    """YOLO with points: a person in the middle, whose last point is not seen."""

    placement = "inline"
    inputs = (dragoman.TensorSpec("images", dragoman.FP32, (1, 3, SIDE, SIDE)),)
    outputs: tuple[dragoman.TensorSpec, ...] = (dragoman.TensorSpec("output0", dragoman.FP32, (1, 56, CELLS_OF_SIDE)),)

    def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        head = np.zeros((1, 56, CELLS_OF_SIDE), np.float32)
        points = [(15 + 12 * (i % 6), 20 + 20 * (i // 6), 0.9 if i < 16 else 0.1) for i in range(17)]
        head[0, :, 50] = [48, 48, 80, 80, 0.8, *np.ravel(points)]
        return {"output0": head}


class Masks(Poses):
    """YOLO with masks, of two classes: the left half of a box."""

    outputs = (
        dragoman.TensorSpec("output0", dragoman.FP32, (1, 38, CELLS_OF_SIDE)),
        dragoman.TensorSpec("output1", dragoman.FP32, (1, 32, 24, 24)),
    )

    def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        head = np.zeros((1, 38, CELLS_OF_SIDE), np.float32)
        head[0, :, 50] = [48, 48, 48, 64, 0.1, 0.8, 2, -1, *[0] * 30]
        head[0, 6:, 7] = -3  # of a cell without a box
        prototypes = np.zeros((1, 32, 24, 24), np.float32)
        prototypes[0, 0, :, :12], prototypes[0, 0, :, 12:] = 1, -1
        prototypes[0, 1] = 1
        return {"output0": head, "output1": prototypes}


class Results(Poses):
    """The same poses after suppression, a row each."""

    outputs = (dragoman.TensorSpec("output0", dragoman.FP32, (1, 20, 57)),)

    def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        rows = np.zeros((1, 20, 57), np.float32)
        column = super().infer(call)["output0"][0, :, 50]
        rows[0, 0] = [8, 8, 88, 88, 0.8, 0, *column[5:]]
        return {"output0": rows}


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def opened(chromium: Any) -> AsyncIterator[Browser]:
    async with serve_page(chromium, Finder, Segmenter, Poses, Masks, Results) as page:
        yield page


def red_square(width: int, height: int) -> dict[str, Any]:
    """Return an upload of a grey photo with a red square from (20, 30) to (60, 70)."""
    content = png(width, height, lambda x, y: (255, 0, 0) if 20 <= x < 60 and 30 <= y < 70 else (90, 90, 90))
    return {"name": "square.png", "mimeType": "image/png", "buffer": content}


# --- heads ------------------------------------------------------------------------------------------------------------

# A picture of 320 x 256 has this many cells over strides of 8, 16 and 32.
WIDTH, HEIGHT, CELLS = 320, 256, 40 * 32 + 20 * 16 + 10 * 8


def draw_boxes(random: np.random.Generator) -> NDArray[Any]:
    """Return boxes that do not overlap: corners in pixels, score and class, the best first."""
    cells = random.permutation(20)[: random.integers(1, 12)]
    x, y = 60.0 * (cells % 5) + 4, 60.0 * (cells // 5) + 4
    size = random.uniform(5, 50, (len(cells), 2))
    scores = -np.sort(-random.uniform(0.05, 0.99, len(cells)))
    return np.column_stack([x, y, x + size[:, 0], y + size[:, 1], scores, random.integers(0, CLASSES, len(cells))])


def centred(boxes: NDArray[Any]) -> NDArray[Any]:
    corner, opposite = boxes[:, :2], boxes[:, 2:4]
    return np.hstack([(corner + opposite) / 2, opposite - corner])


def grid(boxes: NDArray[Any], count: int, has_objectness: bool, random: np.random.Generator) -> NDArray[Any]:
    """Return a raw head, [1, count, 4 (+ 1) + classes]: each box at a place of its own, and low scores elsewhere."""
    width = 4 + has_objectness + CLASSES
    head = random.uniform(0, 0.009, (1, count, width))
    head[0, :, :4] = random.uniform(1, 200, (count, 4))
    at = random.permutation(count)[: len(boxes)]
    head[0, at, :4] = centred(boxes)
    if has_objectness:
        head[0, at, 4] = 1
    head[0, at, 4 + has_objectness + boxes[:, 5].astype(int)] = boxes[:, 4]
    return head


def relative(boxes: NDArray[Any], random: np.random.Generator) -> NDArray[Any]:
    """Return a head of YOLOX: centres relative to cells and logarithms of sizes, in strides."""
    head = grid(boxes, CELLS, True, random)
    strides, columns, rows = [], [], []
    for stride in (8, 16, 32):
        y, x = np.mgrid[: HEIGHT // stride, : WIDTH // stride]
        strides += [stride] * x.size
        columns += x.ravel().tolist()
        rows += y.ravel().tolist()
    scale = np.array(strides)[:, None]
    head[0, :, :2] = head[0, :, :2] / scale - np.column_stack([columns, rows])
    head[0, :, 2:4] = np.log(head[0, :, 2:4] / scale)
    return head


def from_cells(head: NDArray[Any], boxes: NDArray[Any]) -> NDArray[Any]:
    """Return the raw head of YOLOX: offsets of centres from their cell, and logarithms of sizes."""
    raw = np.zeros_like(head)
    starts = {8: 0, 16: 40 * 32, 32: 40 * 32 + 20 * 16}
    for i, (box, (x, y, width, height)) in enumerate(zip(boxes, centred(boxes), strict=True)):
        stride = (8, 16, 32)[i % 3]
        column, row = int(x // stride), int(y // stride)
        at = raw[0, starts[stride] + row * (WIDTH // stride) + column]
        at[:4] = x / stride - column, y / stride - row, np.log(width / stride), np.log(height / stride)
        at[4], at[5 + int(box[5])] = 1, box[4]
    raw[0, 0, 2] = -1  # of a cell without a box
    return raw


def tensor(name: str, values: NDArray[Any], datatype: str = "FP32") -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(values.shape), "data": values.ravel().tolist()}


def encodings(boxes: NDArray[Any], random: np.random.Generator) -> dict[str, list[dict[str, Any]]]:
    """Return the outputs of detectors that found these boxes, by the kind of their head."""
    corners, scores, labels = boxes[:, :4], boxes[:, 4], boxes[:, 5]
    fractions = corners / [WIDTH, HEIGHT, WIDTH, HEIGHT]
    padded = np.zeros((1, 100, 6))
    padded[0, : len(boxes)] = boxes
    planes = np.zeros((1, len(boxes), 1 + CLASSES))
    planes[0, :, 0] = 1 - scores
    planes[0, np.arange(len(boxes)), 1 + labels.astype(int)] = scores
    logits = np.log(np.maximum(np.roll(planes, -1, axis=2), 1e-12))
    v8, v5 = grid(boxes, CELLS, False, random), grid(boxes, 3 * CELLS, True, random)
    found = {
        "v8": [tensor("output0", v8.transpose(0, 2, 1))],
        "v8 transposed": [tensor("output0", v8)],
        "v5": [tensor("output", v5)],
        "yolox": [tensor("output", relative(boxes, random))],
        "end to end": [tensor("output0", padded)],
        "yolov7": [tensor("output", np.insert(boxes[:, [0, 1, 2, 3, 5, 4]], 0, 0, axis=1))],
        "torchvision": [tensor("labels", labels, "INT64"), tensor("scores", scores), tensor("boxes", corners)],
        "tensorflow": [
            tensor("detection_scores", scores[None]),
            tensor("detection_boxes", fractions[None][:, :, [1, 0, 3, 2]]),
            tensor("detection_classes", labels[None]),
            tensor("num_detections", np.array([float(len(boxes))])),
        ],
    }
    found["yolox"] = [tensor("output", from_cells(v5[:, :CELLS], boxes))]
    if len(boxes) > 1:
        found["ssd"] = [tensor("scores", planes), tensor("boxes", fractions[None])]
        scaled = centred(boxes) / [WIDTH, HEIGHT, WIDTH, HEIGHT]
        found["detr"] = [tensor("pred_logits", logits), tensor("pred_boxes", scaled[None])]
    return found


READ = """async ([cases, size]) => {
    const { headsOf } = await import("/console/assets/detect.js");
    return cases.map(([outputs, names]) => {
        const [head] = headsOf(outputs, size, names);
        if (!head) return null;
        const boxes = head.read(0, head.orders[0]).filter((b) => b.score >= 0.04);
        return [head.isCertain, boxes.map((b) => [b.x0, b.y0, b.x1, b.y1, b.score, b.index])];
    });
}"""


async def test_boxes_of_each_kind_of_head_are_read_exactly(browser: Browser) -> None:
    random = np.random.default_rng(35)
    names = [f"name {i}" for i in range(CLASSES)]
    await browser.open("/")
    for _ in range(12):
        boxes = draw_boxes(random)
        found = encodings(boxes, random)
        for given in (names, None):
            # Names tell whether scores begin with one for the background; without them the class keeps its number.
            cases = [[outputs, given] for outputs in found.values()]
            answers = await browser.page.evaluate(READ, [cases, {"width": WIDTH, "height": HEIGHT}])
            for kind, answer in zip(found, answers, strict=True):
                assert answer is not None, kind
                is_certain, read = answer
                assert is_certain or kind == "v8 transposed", kind
                expected = boxes.copy()
                if kind == "ssd" and given is None:
                    expected[:, 5] += 1
                assert np.array(read) == pytest.approx(expected, rel=1e-4, abs=1e-3), (kind, given)


async def test_outputs_of_other_models_are_not_taken_for_boxes(browser: Browser) -> None:
    random = np.random.default_rng(3)
    shapes = [
        (1, 10),
        (1, 1000),
        (1, 3, 64, 64),
        (1, 197, 768),
        (1, 50, 4),
        (1, 1, 256, 320),
        (1, 300, 6),
        (8, 7),
        (2, 2),
        (4,),
    ]
    cases = [[[tensor("output", random.normal(size=shape))], None] for shape in shapes]
    await browser.open("/")
    found = await browser.page.evaluate(READ, [cases, {"width": WIDTH, "height": HEIGHT}])
    assert found == [None] * len(shapes)


async def test_overlapping_boxes_of_a_class_are_suppressed(browser: Browser) -> None:
    script = """async (all) => {
        const { overlap, suppress } = await import("/console/assets/detect.js");
        const boxes = all.map(([x0, y0, x1, y1, score, index]) => ({ x0, y0, x1, y1, score, index }));
        const kept = suppress(boxes);
        const clash = (a, b) => a !== b && a.index === b.index && overlap(a, b) > 0.45;
        return {
            kept: kept.length,
            clashes: kept.filter((a) => kept.some((b) => clash(a, b))).length,
            lost: boxes.filter((a) => !kept.includes(a) && !kept.some((b) => clash(a, b) && b.score >= a.score)).length,
            sorted: kept.every((box, i) => i === 0 || kept[i - 1].score >= box.score),
        };
    }"""
    random = np.random.default_rng(7)
    await browser.open("/")
    for _ in range(10):
        corner, size = random.uniform(0, 60, (120, 2)), random.uniform(5, 40, (120, 2))
        boxes = np.column_stack([corner, corner + size, random.uniform(0, 1, 120), random.integers(0, 2, 120)])
        found = await browser.page.evaluate(script, boxes.tolist())
        assert 1 < found["kept"] < 120
        assert (found["clashes"], found["lost"], found["sorted"]) == (0, 0, True)


async def test_a_box_on_the_photo_is_where_the_photo_was_drawn(browser: Browser) -> None:
    """Place a box of the photo into the picture that is sent, and map it back."""
    script = """async (cases) => {
        const { boxOnPhoto, placement } = await import("/console/assets/photos.js");
        return cases.map(([photo, sent, fit, [x0, y0, x1, y1]]) => {
            const place = placement(photo, sent, fit);
            const { scaleX, scaleY, x, y } = place;
            const box = { x0: scaleX * x0 + x, y0: scaleY * y0 + y, x1: scaleX * x1 + x, y1: scaleY * y1 + y };
            const back = boxOnPhoto(box, place, photo);
            const [w, h] = [photo.width * scaleX, photo.height * scaleY];
            return { back: [back.x0, back.y0, back.x1, back.y1], drawn: [x, y, w, h] };
        });
    }"""
    random = np.random.default_rng(9)
    cases: list[Any] = []
    for fit in ("letterbox", "crop", "stretch") * 40:
        width, height, sent_width, sent_height = (int(n) for n in random.integers(16, 2000, 4))
        x, y = np.sort(random.uniform(0, width, 2)), np.sort(random.uniform(0, height, 2))
        photo, sent = {"width": width, "height": height}, {"width": sent_width, "height": sent_height}
        cases.append([photo, sent, fit, [x[0], y[0], x[1], y[1]]])
    await browser.open("/")
    for (_, sent, fit, box), found in zip(cases, await browser.page.evaluate(script, cases), strict=True):
        assert found["back"] == pytest.approx(box, abs=1e-6)
        x, y, width, height = found["drawn"]
        if fit == "letterbox":
            assert min(sent["width"] - width, sent["height"] - height) == pytest.approx(0, abs=1)
            assert min(x, y) >= 0
        else:
            assert max(x, y) <= 1e-6
            assert min(x + width - sent["width"], y + height - sent["height"]) >= -1


# --- pages ------------------------------------------------------------------------------------------------------------


async def test_boxes_of_a_detector_are_drawn_on_the_photo(browser: Browser) -> None:
    page = browser.page
    await browser.open("/#/models/Finder", "Try it")
    await page.set_input_files("input[type=file]", red_square(300, 150))
    await page.wait_for_selector("text=square.png: 640 x 640, from 300 x 150")
    await browser.press("Run")
    boxes = page.get_by_label("Boxes on the photo")
    await page.get_by_role("img", name="Photo square.png with 1 box").wait_for()
    cells = await boxes.locator("tbody td, tbody th").all_inner_texts()
    assert cells[:2] == ["class 2", "90.0 %"]
    assert [float(cell) for cell in cells[2:]] == pytest.approx([20, 30, 40, 40], abs=1)
    style = await page.locator(".box").evaluate("(e) => [e.style.left, e.style.top, e.style.width, e.style.height]")
    assert [float(each.rstrip("%")) for each in style] == pytest.approx([100 / 15, 20, 200 / 15, 400 / 15], abs=0.5)
    await browser.keep("answers-boxes")
    await page.get_by_label("score from").fill("0.1")
    await boxes.get_by_text("2 boxes of 2").wait_for()
    await boxes.get_by_label("read as").select_option("off")
    assert await page.locator(".overlay").count() == 0
    await boxes.get_by_label("read as").select_option(index=0)
    assert await browser.find_violations() == []


async def test_a_photo_is_sent_in_the_size_and_order_that_was_chosen(browser: Browser) -> None:
    page = browser.page
    await browser.open("/#/models/Finder", "Try it")
    await page.set_input_files("input[type=file]", red_square(300, 150))
    await page.get_by_label("width").fill("96")
    await page.get_by_label("height").fill("48")
    await page.get_by_label("fit").select_option("stretch")
    await page.wait_for_selector("text=square.png: 96 x 48, from 300 x 150")
    await browser.press("Run")
    await page.wait_for_selector("text=expected multiples of 32")
    await page.get_by_label("fit").select_option("as it is")
    await page.wait_for_selector("text=square.png: 300 x 150")
    await page.get_by_label("fit").select_option("crop the middle")
    await page.get_by_label("height").fill("64")
    preview = page.get_by_role("img", name="Picture square.png as it is sent")
    await browser.draws(preview, "(e) => [e.width, e.height]", [96, 64])
    corner = "(e) => [...e.getContext('2d').getImageData(%d, %d, 1, 1).data]"
    await page.get_by_label("fit").select_option("letterbox")
    await browser.draws(preview, corner % (0, 0), [114, 114, 114, 255])
    await browser.draws(preview, corner % (12, 24), [255, 0, 0, 255])
    await page.get_by_label("colours").select_option("BGR")
    await browser.draws(preview, corner % (12, 24), [0, 0, 255, 255])


async def test_masks_and_maps_of_values_lie_on_the_photo(browser: Browser) -> None:
    page = browser.page
    await browser.open("/#/models/Segmenter", "Try it")
    await page.set_input_files("input[type=file]", red_square(128, 128))
    await browser.press("Run")
    classes = page.get_by_label("Output classes")
    await classes.get_by_role("img", name="classes: 2 classes").wait_for()
    await browser.has_texts(classes.locator(".legend-list li"), ["class 0 90.2 %", "class 3 9.77 %"])
    await page.set_input_files("input[type=file]", red_square(128, 64))
    await page.wait_for_selector("text=square.png: 64 x 64, from 128 x 64")
    await page.get_by_label("fit").select_option("letterbox")
    await browser.press("Run")
    # 10 x 8 of 32 x 16 pixels; those in the grey around the photo do not count.
    await browser.has_texts(classes.locator(".legend-list li"), ["class 0 84.4 %", "class 3 15.6 %"])
    await page.set_input_files("input[type=file]", red_square(128, 128))
    await page.wait_for_selector("text=square.png: 64 x 64, from 128 x 128")
    await browser.press("Run")
    await browser.has_texts(classes.locator(".legend-list li"), ["class 0 90.2 %", "class 3 9.77 %"])
    alpha = "(e) => [[10, 10], [40, 50]].map(([x, y]) => e.getContext('2d').getImageData(x, y, 1, 1).data[3])"
    await browser.draws(classes.locator("canvas").nth(1), alpha, [0, 140])
    depth = page.get_by_label("Output depth")
    await depth.get_by_role("img", name="depth: 3.53 to 10").wait_for()
    assert await browser.find_violations() == []
    await browser.keep("answers-masks")


async def test_grids_of_classes_and_pictures_are_told_apart(browser: Browser) -> None:
    script = """async (cases) => {
        const { maskOf, heatOf } = await import("/console/assets/masks.js");
        return cases.map(([name, datatype, shape, data, size]) => {
            const mask = maskOf({ name, datatype, shape, data }, size);
            const heat = heatOf({ name, datatype, shape, data }, size);
            return [mask && [mask.isCertain, mask.classes(0).slice(0, 2)], heat && heat.range];
        });
    }"""
    size, pixels = {"width": 32, "height": 16}, 8 * 16
    first = np.zeros((1, 5, 8, 16))
    first[0, 3] = 1
    first[0, 4, 0, 1] = 2
    cases: list[Any] = [
        ("y", "INT64", [1, 8, 16], [7, 2] * 64, size),
        ("y", "INT64", [1, 1, 8, 16], [7, 2] * 64, size),
        ("y", "INT64", [1, 8, 16, 1], [7, 2] * 64, size),
        ("y", "INT64", [1, 16, 16], [7, 2] * 128, size),  # not the sides of the picture
        ("y", "UINT8", [1, 8, 16], list(range(pixels)), size),  # more values than classes
        ("y", "FP32", [1, 5, 8, 16], first.ravel().tolist(), size),
        ("y", "FP32", [1, 8, 16, 5], first.transpose(0, 2, 3, 1).ravel().tolist(), size),
        ("y", "FP32", [1, 3, 8, 16], [0, 1, 2] * pixels, size),  # may be a picture
        ("y", "FP32", [1, 1, 8, 16], [0.5, 1.5] * 64, size),
        ("y", "FP32", [8, 16], [0.5, 1.5] * 64, None),
    ]
    await browser.open("/")
    assert await browser.page.evaluate(script, cases) == [
        [[True, [7, 2]], None],
        [[True, [7, 2]], None],
        [[True, [7, 2]], None],
        [None, None],
        [None, None],
        [[True, [3, 4]], None],
        [[True, [3, 4]], None],
        [[False, [1, 2]], None],
        [None, [0.5, 1.5]],
        [None, None],
    ]


async def drawn_above(browser: Browser, model: str) -> list[list[int]]:
    """Return the red, green, blue and alpha of each pixel above the photo, row by row."""
    page = browser.page
    await browser.open(f"/#/models/{model}")
    await page.set_input_files("input[type=file]", red_square(SIDE, SIDE))
    await browser.press("Run")
    boxes = page.get_by_label("Boxes on the photo")
    await boxes.get_by_text("1 box of").wait_for()
    await browser.keep(f"boxes-{model}")
    script = """(canvas) => {
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return Array.from({ length: data.length / 4 }, (_, i) => [...data.slice(4 * i, 4 * i + 4)]);
    }"""
    canvas = boxes.locator(".overlay canvas").nth(1)
    await browser.draws(canvas, f"(canvas) => ({script})(canvas).some((pixel) => pixel[3] > 0)", True)
    found: list[list[int]] = await canvas.evaluate(script)
    return found


@pytest.mark.parametrize("model", ["Poses", "Results"])
async def test_the_points_of_a_pose_are_drawn(browser: Browser, model: str) -> None:
    pixels = np.array(await drawn_above(browser, model)).reshape(SIDE, SIDE, 4)
    for i in range(16):
        assert (pixels[20 + 20 * (i // 6), 15 + 12 * (i % 6)] > 200).all(), f"point {i} is not there"
    assert (pixels[56:64, 58:70, 3] == 0).all(), "the last point was not seen"
    assert (pixels[60, 40:50, 3] > 0).all(), "13 and 15 are joined"
    assert (pixels[:14, :, 3] == 0).all()


async def test_the_masks_of_a_detector_are_drawn(browser: Browser) -> None:
    pixels = np.array(await drawn_above(browser, "Masks")).reshape(SIDE, SIDE, 4)
    inside = np.zeros((SIDE, SIDE), bool)
    inside[20:76, 28:44] = True  # of the box from (24, 16) to (72, 80), without the cells at its edges
    assert (pixels[inside][:, 3] > 100).all()
    assert (pixels[:, 52:, 3] == 0).all(), "the sum is negative there"
    assert (pixels[:12, :, 3] == 0).all(), "outside of the box"
    assert await browser.page.get_by_label("Output output1").count() == 0, "prototypes are not a picture"
    assert await browser.page.get_by_label("Output output0").count() == 1
