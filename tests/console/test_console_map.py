"""The map of a simulator over two parameters, in a real browser."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray

import dragoman
from console.browser import Browser, needs_chromium, playwright, serve_page

pytestmark = [needs_chromium, pytest.mark.asyncio(loop_scope="package")]


def slope(x: NDArray[Any], *, height: float = 0.0) -> NDArray[Any]:
    value: NDArray[Any] = np.array([-2 * (x[0] - 2), -6 * (x[1] + 1)])
    return value


@dragoman.vector_function(inputs={"x": 2}, outputs={"log_density": 1}, gradient=slope, vectorised=True)
def hill(x: NDArray[Any], *, height: float = 0.0) -> NDArray[Any]:
    """The logarithm of a density with its top at (2, -1)."""
    value: NDArray[Any] = height - (x[..., :1] - 2) ** 2 - 3 * (x[..., 1:] + 1) ** 2
    return value


@dragoman.vector_function(inputs={"x": 3})
def slow(x: NDArray[Any]) -> NDArray[Any]:
    time.sleep(0.12)  # more than a map without a click may take
    value: NDArray[Any] = x[:1] * x[1] + x[2]
    return value


@dragoman.vector_function(inputs={"x": 2})
def bowl(x: NDArray[Any]) -> NDArray[Any]:
    value: NDArray[Any] = (x[:1] - 1) ** 2 + x[1] ** 2
    return value


def invert(mass_and_stiffness: NDArray[Any]) -> NDArray[Any]:
    """An oscillator's frequency, squared. It has none without a mass."""
    if (mass_and_stiffness[..., 0] <= 0).any():
        raise ValueError("no mass")
    value: NDArray[Any] = mass_and_stiffness[..., 1:] / mass_and_stiffness[..., :1]
    return value


@dragoman.vector_function(inputs={"mass_and_stiffness": 2}, outputs={"square": 1})
def fragile(mass_and_stiffness: NDArray[Any]) -> NDArray[Any]:
    return invert(mass_and_stiffness)


@dragoman.vector_function(inputs={"x": 2}, outputs={"square": 1}, vectorised=True)
def fragile_rows(x: NDArray[Any]) -> NDArray[Any]:
    return invert(x)


@dragoman.vector_function(inputs={"length": 1}, outputs={"doubled": 1}, gradient=lambda length, sens: 2 * sens)
def glacial(length: NDArray[Any]) -> NDArray[Any]:
    time.sleep(1.1)
    return 2 * length


@dragoman.vector_function(inputs={"x": 3}, at=[[200.0, -0.5, 0.0]], vectorised=True, gradient=lambda x: [x[1], x[0], 0])
def product(x: NDArray[Any]) -> NDArray[Any]:
    value: NDArray[Any] = x[..., :1] * x[..., 1:2]
    return value


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def opened(chromium: Any) -> AsyncIterator[Browser]:
    async with serve_page(chromium, hill, slow, bowl, glacial, product, fragile, fragile_rows) as page:
        yield page


def count_requests(browser: Browser, suffix: str) -> list[str]:
    """Return a list that gets the address of each request that ends with `suffix`."""
    found: list[str] = []
    browser.page.on("request", lambda request: found.append(request.url) if request.url.endswith(suffix) else None)
    return found


async def compute(browser: Browser) -> None:
    """Compute the map, or what a coarse one that was drawn without a click lacks."""
    section = browser.page.get_by_role("region", name="Map")
    await section.get_by_role("button", name=re.compile("^(Compute|Continue)")).click()


async def test_a_map_of_a_fast_model_is_drawn_by_few_requests(browser: Browser) -> None:
    page = browser.page
    requests = count_requests(browser, "/infer")
    await browser.open("/#/models/hill", "Simulator")
    section = page.get_by_role("region", name="Map")
    await compute(browser)
    await section.get_by_text("Least -157 at x[0] = -5, x[1] = 5; greatest 0 at x[0] = 2, x[1] = -1.").wait_for()
    assert 1 <= len(requests) <= 40, "1681 points or more"
    assert await section.get_by_text("exp(log_density), largest = 1").count() == 1
    await section.get_by_role("button", name="Table").click()
    table = section.locator("table")
    assert await table.locator("tbody tr").count() == 41
    assert await table.locator("tbody tr").nth(16).locator("td").nth(28).inner_text() == "0"  # the top
    assert await table.locator("tbody tr").nth(20).locator("td").nth(20).inner_text() == "-7"  # at (0, 0)
    async with page.expect_download() as download:
        await section.get_by_role("button", name="CSV").click()
    lines = (await (await download.value).path()).read_text().splitlines()
    assert len(lines) - 1 in (41**2, 121**2)  # a fast model gets the finer grid
    assert lines[:2] == ["x[0],x[1],log_density", "-5,-5,-97"]
    await section.get_by_role("button", name="Table").click()
    assert await browser.find_violations() == []
    await browser.keep("map")


async def test_the_point_follows_the_mouse_and_the_arrow_keys(browser: Browser) -> None:
    page = browser.page
    await browser.open("/#/models/hill", "Simulator")
    await compute(browser)
    drawing = page.get_by_role("application")
    await page.get_by_text("Least -157 at").wait_for()
    box = await drawing.bounding_box()
    assert box is not None
    scale = box["width"] / 446  # of the drawing's own units: 52 to 432 are -5 to 5
    await page.mouse.click(box["x"] + scale * (52 + 380 * 0.6), box["y"] + scale * (10 + 380 * 0.3))
    first, second = page.get_by_label("value of x[0]"), page.get_by_label("value of x[1]")
    assert [float(await each.input_value()) for each in (first, second)] == pytest.approx([1, 2], abs=0.05)
    await first.fill("1")
    await second.fill("2")
    await page.keyboard.press("Enter")
    await drawing.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "Shift+ArrowLeft", "ArrowUp"):
        await page.keyboard.press(key)
    assert [float(await each.input_value()) for each in (first, second)] == pytest.approx([0.25, 2])
    assert await drawing.get_attribute("aria-label") == (
        "Map over x[0] and x[1], the point at 0.250, 2. Arrow keys move it."
    )
    # The gradient at (0.25, 2) is (3.5, -18): down, and a little to the right.
    await page.locator("td.number", has_text="3.50").wait_for()
    path = await drawing.locator("path.arrow:not(.back)").get_attribute("d")
    assert path is not None
    x, y = (float(part) for part in path.split("l")[1].split())
    assert x > 0
    assert x / y == pytest.approx(3.5 / 18)


async def test_each_parameter_has_its_own_range_and_the_map_one_for_each_axis(browser: Browser) -> None:
    page = browser.page
    await browser.open("/#/models/product", "Simulator")
    section = page.get_by_role("region", name="Map")
    await section.get_by_text("Least -400 at x[0] = 400, x[1] = -1; greatest 0 at x[0] = 0, x[1] = -1.").wait_for()

    async def ends(name: str) -> list[float]:
        slider = page.get_by_label(name, exact=True)
        return [float(await slider.get_attribute(end) or "nan") for end in ("min", "max")]

    assert [await ends(f"x[{i}]") for i in range(3)] == [[0, 400], [-1, 0], [-400, 400]]
    drawing = section.get_by_role("application")
    await section.get_by_text("show").wait_for()
    # On a map of 400 by 1 the gradient (-0.5, 200) points left and up as (-200, 200).
    path = await drawing.locator("path.arrow:not(.back)").get_attribute("d")
    assert path is not None
    x, y = (float(part) for part in path.split("l")[1].split())
    assert x < 0
    assert x == pytest.approx(y)
    await page.get_by_text("Ranges of the sliders and of the map").click()
    await page.get_by_label("greatest x[1]").fill("3")
    await page.keyboard.press("Enter")
    await section.get_by_text("greatest 1200 at x[0] = 400, x[1] = 3.").wait_for()
    assert await ends("x[1]") == [-1, 3]
    assert await ends("x[0]") == [0, 400]
    await drawing.focus()
    await page.keyboard.press("ArrowRight")
    await page.keyboard.press("ArrowUp")
    values = [float(await page.get_by_label(f"value of x[{i}]").input_value()) for i in range(3)]
    assert values == pytest.approx([210, -0.4, 0])
    assert await browser.find_violations() == []
    await browser.keep("ranges")


@pytest.mark.parametrize("model", ["fragile", "fragile_rows"])
async def test_a_map_that_nobody_asked_for_stops_at_a_failure(browser: Browser, model: str) -> None:
    """A failure may be many lines of the server's log."""
    requests = count_requests(browser, "/Evaluate")
    await browser.open(f"/#/models/{model}", "Simulator")
    section = browser.page.get_by_role("region", name="Map")
    status = section.get_by_role("status")
    await status.get_by_text("The model fails somewhere in these ranges").wait_for()
    assert "no mass" in await status.inner_text()
    assert await section.locator(".error").count() == 0
    assert len(requests) < 20


async def test_points_where_the_model_fails_are_blank(browser: Browser) -> None:
    page = browser.page
    await browser.open("/#/models/fragile_rows", "Simulator")
    section = page.get_by_role("region", name="Map")
    status = section.get_by_role("status")
    await status.get_by_text("compute the map for the other points").wait_for()
    await section.get_by_role("button", name="Compute the map").click()
    await status.get_by_text("The model fails at").wait_for(timeout=60_000)
    text = await status.inner_text()
    assert "Least -20 at x[0] = 0.250, x[1] = -5; greatest 20 at x[0] = 0.250, x[1] = 5." in text
    assert "fails at 861 of 1681 points: model 'fragile_rows' failed: ValueError: no mass" in text
    await section.get_by_role("button", name="Table").click()
    cells = await section.locator("tbody tr").first.locator("td").all_inner_texts()
    assert cells[20] == cells[0] != cells[21]  # x[0] = 0 is the last without a mass
    await section.get_by_role("button", name="Table").click()
    await browser.keep("map_with_failures")


@pytest.mark.parametrize("width", [1280, 390])
async def test_names_of_parameters_do_not_lie_over_their_sliders(browser: Browser, width: int) -> None:
    page = browser.page
    await page.set_viewport_size({"width": width, "height": 900})
    await browser.open("/#/models/fragile", "Simulator")
    row = page.locator(".slider").first
    await row.wait_for()
    slider, number = [await row.locator(each).bounding_box() for each in ("[type=range]", "[type=number]")]
    text = await row.locator("label").evaluate(
        "(e) => { const r = document.createRange(); r.selectNodeContents(e); return r.getBoundingClientRect().right; }"
    )
    assert slider is not None
    assert number is not None
    assert text <= slider["x"]
    assert slider["x"] + slider["width"] <= number["x"]
    assert slider["width"] >= 48
    await page.set_viewport_size({"width": 1280, "height": 900})


async def test_a_finer_map_has_the_points_of_the_coarse_one(browser: Browser) -> None:
    points: list[str] = []
    browser.page.on(
        "request", lambda request: points.append(request.post_data) if request.url.endswith("/Evaluate") else None
    )
    await browser.open("/#/models/bowl", "Simulator")
    section = browser.page.get_by_role("region", name="Map")
    await compute(browser)
    await section.get_by_text("Least 0.0278 at x[0] = 0.833, x[1] = 0; greatest 61 at x[0] = -5, x[1] = -5.").wait_for()
    await section.get_by_role("button", name="Compute again").wait_for()
    grid = {point for point in points if json.loads(point)["input"] != [[1, 1]]}
    assert len(grid) == 625
    await section.get_by_role("button", name="Table").click()
    line = await section.locator("tbody tr").first.locator("td").all_inner_texts()
    expected = [(x - 1) ** 2 + 25 for x in np.linspace(-5, 5, 25)]
    assert [float(text) for text in line] == pytest.approx(expected, rel=5e-3)


async def test_a_wrong_configuration_is_marked(browser: Browser) -> None:
    config = browser.page.get_by_label("config")
    await browser.open("/#/models/hill", "Simulator")
    await config.fill("[1]")
    await browser.press("Apply")
    await browser.page.locator(".error", has_text="config: expected a JSON object").wait_for()
    assert await config.get_attribute("aria-invalid") == "true"
    assert await browser.focused() == "input config"
    await config.fill("{}")
    assert await config.get_attribute("aria-invalid") is None


async def test_a_map_with_a_configuration_calls_the_simulator_for_each_point(browser: Browser) -> None:
    page = browser.page
    await browser.open("/#/models/hill", "Simulator")
    await page.get_by_label("config").fill('{"height": 10}')
    await browser.press("Apply")
    requests = count_requests(browser, "/Evaluate")
    await compute(browser)
    await page.get_by_text("greatest 9.91 at x[0] = 2.08, x[1] = -0.833.").wait_for(timeout=60_000)
    assert len(requests) >= 25 * 25


async def test_a_slow_model_has_its_map_on_request_and_it_can_be_stopped_and_continued(browser: Browser) -> None:
    """A coarse map is drawn point by point. What has been computed is kept."""
    page = browser.page
    points: list[str] = []
    page.on("request", lambda request: points.append(request.post_data) if request.url.endswith("/Evaluate") else None)
    await browser.open("/#/models/slow", "Simulator")
    await page.get_by_label("across").select_option("x[2]")
    section = page.get_by_role("region", name="Map")
    status = section.get_by_role("status")
    await section.get_by_role("button", name="Compute the map").click()
    await section.get_by_text("computing").wait_for()
    await section.get_by_role("application").wait_for()
    await section.get_by_role("button", name="Stop").click()
    await status.get_by_text("points so far.").wait_for()
    assert 1 <= int((await status.inner_text()).split()[-4]) < 49
    await section.get_by_role("button", name="Table").click()
    cells = section.locator("tbody td")
    assert await cells.count() == 49
    assert "\N{EN DASH}" in await cells.all_inner_texts()
    await section.get_by_role("button", name="Continue").click()
    await section.get_by_text("computing").wait_for()
    await playwright.expect(cells.get_by_text("\N{EN DASH}")).to_have_count(0, timeout=60_000)
    finer = len(points)
    while len(points) < finer + 10:
        await asyncio.sleep(0.05)
    await section.get_by_role("button", name="Stop").click()
    await status.get_by_text("49 points so far.").wait_for()
    assert await cells.count() == 49
    assert len(points) - len(set(points)) <= 6, "more than those that were stopped were computed again"
    assert await section.get_by_role("button", name="Continue").count() == 1
    await page.get_by_label("value of x[0]").fill("2")
    await page.keyboard.press("Enter")
    await status.get_by_text("Something else has changed since: compute it again.").wait_for()
    assert await section.get_by_role("button", name="Compute again").count() == 1
    await section.get_by_role("button", name="Table").click()
    await page.get_by_label("up").select_option("x[2]")
    await section.get_by_text("Choose two different parameters.").wait_for()


async def test_contours_lie_where_the_value_is_the_level(browser: Browser) -> None:
    script = """async ([values, columns, rows, levels]) => {
        const { contours, ticks } = await import("/console/assets/grid.js");
        const lines = levels.map((level) => contours(values, columns, rows, level));
        return [lines, ...[[-5, 5], [0, 0.3], [999, 1001]].map((bounds) => ticks(...bounds))];
    }"""
    columns, rows = 33, 21
    x, y = np.meshgrid(np.arange(columns), np.arange(rows))
    values = np.hypot(x - 16, y - 10)
    levels = [3.5, 7.25, 9.1]
    await browser.open("/")
    found, *scales = await browser.page.evaluate(script, [values.ravel().tolist(), columns, rows, levels])
    for level, lines in zip(levels, found, strict=True):
        ends = np.array(lines).reshape(-1, 2)
        radius = np.hypot(ends[:, 0] - 16, ends[:, 1] - 10)
        assert radius == pytest.approx(np.full(len(ends), level), abs=0.06)
        length = np.hypot(*(np.array(lines)[:, :2] - np.array(lines)[:, 2:]).T).sum()
        assert length == pytest.approx(2 * np.pi * level, rel=0.02), "the circle is not closed"
    assert scales == [[-4, -2, 0, 2, 4], [0, 0.1, 0.2, 0.3], [999, 999.5, 1000, 1000.5, 1001]]


async def test_a_saddle_and_values_that_are_missing_have_no_wrong_lines(browser: Browser) -> None:
    script = """async (grids) => {
        const { contours } = await import("/console/assets/grid.js");
        return grids.map((values) => contours(values, 2, 2, 0.5));
    }"""
    await browser.open("/")
    high, low, missing = await browser.page.evaluate(script, [[1, 0, 0, 1], [0.6, 0, 0, 0.6], [1, 0, None, 1]])
    assert sorted(high) == [[0.5, 0, 1, 0.5], [0.5, 1, 0, 0.5]]  # the middle is above: the low corners are cut off
    assert len(low) == 2
    assert low[0][:2] == pytest.approx([1 / 6, 0])
    assert low[0][2:] == pytest.approx([0, 1 / 6])  # the middle is below: the high corners are
    assert missing == []


async def test_a_simulator_opens_with_sliders_and_a_slow_one_has_its_gradient_on_request(browser: Browser) -> None:
    page = browser.page
    await browser.open("/#/models/glacial")
    await page.get_by_role("tab", name="Simulator", selected=True).wait_for()
    requests = count_requests(browser, "/Gradient")
    await page.locator("td.number", has_text="2").first.wait_for()
    assert requests == []
    await browser.press("Compute the gradient")
    await page.get_by_text("gradient of doubled by length").wait_for()
    assert len(requests) == 1
