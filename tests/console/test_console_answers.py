"""Answers of models as bars, classes, lines and tables, in a real browser."""

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray

import dragoman
from console.browser import Browser, needs_chromium, serve_page

pytestmark = [needs_chromium, pytest.mark.asyncio(loop_scope="package")]


class Classifier(dragoman.Model):
    """Probabilities of three classes, raw scores of twelve, and the class."""

    placement = "inline"
    inputs = (dragoman.TensorSpec("x", dragoman.FP64, (-1, 3)),)
    outputs = (
        dragoman.TensorSpec("label", dragoman.INT64, (-1,)),
        dragoman.TensorSpec("share", dragoman.FP64, (-1, 3)),
        dragoman.TensorSpec("logits", dragoman.FP64, (-1, 12)),
    )

    def infer(self, call: dragoman.Infer) -> dict[str, NDArray[Any]]:
        x = np.asarray(call.inputs["x"].data)
        share = x / x.sum(axis=1, keepdims=True)
        return {"label": share.argmax(axis=1), "share": share, "logits": np.hstack([x, -x, x / 8, x * 3])}


class House(dragoman.Model):
    """A price for each row, and a vector."""

    placement = "inline"
    inputs = (dragoman.TensorSpec("x", dragoman.FP64, (-1, 3)),)
    outputs = (
        dragoman.TensorSpec("price", dragoman.FP64, (-1, 1)),
        dragoman.TensorSpec("vector", dragoman.FP64, (-1, 64)),
    )

    def infer(self, call: dragoman.Infer) -> dict[str, NDArray[Any]]:
        x = np.asarray(call.inputs["x"].data)
        return {"price": x.sum(axis=1, keepdims=True), "vector": np.repeat(x, 22, axis=1)[:, :64] / 3}


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def opened(chromium: Any) -> AsyncIterator[Browser]:
    async with serve_page(chromium, Classifier, House) as page:
        yield page


async def run(browser: Browser, model: str, table: str) -> None:
    await browser.open(f"/#/models/{model}", "Try it")
    await browser.page.fill("textarea", table)
    await browser.press("Run")
    await browser.page.wait_for_selector("section.output")


async def rows(output: Any) -> list[list[str]]:
    """Return the label and the value of each bar."""
    found: list[list[str]] = await output.locator("table.scores tr").evaluate_all(
        "(all) => all.map((row) => [row.querySelector('th').textContent, row.querySelector('.number').textContent])"
    )
    return found


async def test_probabilities_are_bars_with_percent_the_largest_first(browser: Browser) -> None:
    await run(browser, "Classifier", "1, 97.3, 1.7")
    share = browser.page.get_by_label("Output share")
    assert await rows(share) == [["1", "97.3 %"], ["2", "1.70 %"], ["0", "1.00 %"]]
    widths = await share.locator("svg rect").evaluate_all("(all) => all.map((e) => e.width.baseVal.value)")
    assert widths == pytest.approx([97.3, 1.7, 1])
    await share.get_by_role("button", name="Table").click()
    await browser.has_texts(share.locator("td"), ["0.01", "0.973", "0.017"])


async def test_raw_scores_become_probabilities_only_when_asked(browser: Browser) -> None:
    await run(browser, "Classifier", "1, 3, 2")
    logits = browser.page.get_by_label("Output logits")
    top = [["10", "9"], ["11", "6"], ["1", "3"], ["9", "3"], ["2", "2"]]
    assert await rows(logits) == top
    await logits.get_by_label("softmax of the values").check()
    assert [row[1] for row in await rows(logits)] == ["94.6 %", "4.71 %", "0.235 %", "0.235 %", "0.0863 %"]
    await logits.get_by_label("softmax of the values").uncheck()
    await logits.get_by_role("button", name="Show all 12 classes").click()
    assert len(await rows(logits)) == 12


async def test_rows_are_groups_of_bars(browser: Browser) -> None:
    await run(browser, "Classifier", "\n".join(["1, 3, 0", "5, 0, 5"] * 8))
    share = browser.page.get_by_label("Output share")
    groups = share.locator("table.scores")
    assert await groups.count() == 12
    assert await groups.nth(1).locator("caption").inner_text() == "row 2"
    assert (await rows(share))[3:6] == [["0", "50.0 %"], ["1", "0 %"], ["2", "50.0 %"]]
    await share.get_by_role("button", name="Show all 16 rows of 3 classes").click()
    assert await groups.count() == 16
    await browser.keep("answers-groups")


async def test_numbers_are_digits_and_long_vectors_lines(browser: Browser) -> None:
    await run(browser, "House", "1, 2, 0.123456789012")
    price, vector = browser.page.get_by_label("Output price"), browser.page.get_by_label("Output vector")
    await browser.has_texts(price.locator("td"), ["3.123456789012"])
    await vector.locator("path.line").wait_for()
    await run(browser, "House", "1, 2, 3\n4, 5, 6")
    await browser.has_texts(price.locator("td"), ["6", "15"])
    assert await vector.locator("path.line").count() == 0, "independent rows joined by lines"
    heights = await vector.locator("td").evaluate_all("(all) => all.map((e) => e.getClientRects()[0].height)")
    assert max(heights) < 40, "a number is broken over lines"


async def test_values_are_saved_as_the_server_sent_them(browser: Browser) -> None:
    page = browser.page
    await run(browser, "House", "0.1, 2, 3\n4, 5, 1e-7")
    vector = page.get_by_label("Output vector")
    for name, start in (
        ("CSV", "0.03333333333333333,"),
        ("JSON", '{"name": "vector", "datatype": "FP64", "shape": [2,64], '),
    ):
        async with page.expect_download() as download:
            await vector.get_by_role("button", name=name).click()
        assert (await download.value).suggested_filename == f"vector.{name.lower()}"
        assert (await (await download.value).path()).read_text().startswith(start)


# Name, datatype, shape, elements, names of classes, declared shape, and what was recognised.
READINGS: list[tuple[str, str, list[int], list[Any], list[str] | None, list[int] | None, str | None]] = [
    ("y", "FP32", [1, 3], [0.25, 0.25, 0.5], None, [-1, 3], "probabilities"),
    ("y", "FP16", [1, 2], [0.334, 0.67], None, None, "probabilities"),
    ("y", "FP32", [1, 2], [0.334, 0.67], None, None, "offered"),
    ("logits", "FP32", [2, 2], [1, -2, 3, None], None, None, "scores"),
    ("y", "FP32", [1, 3], [1, 2, 3], ["a", "b", "c"], None, "scores"),
    ("y", "FP32", [1, 3], [1, 2, 3], ["a", "b"], None, "offered"),
    ("y", "FP32", [1, 3, 1, 1], [0.5, 0.5, 0], None, None, "probabilities"),
    ("y", "FP32", [3], [0.5, 0.5, 0], None, [3], "probabilities"),
    ("y", "FP32", [3], [0.5, 0.5, 0], None, [-1], None),  # a number for each row
    ("y", "INT64", [1, 3], [0, 1, 0], None, None, None),
    ("y", "FP32", [2, 2, 2], [0.5] * 8, None, None, None),
    ("y", "FP32", [0, 3], [], None, None, None),
]


async def test_scores_are_recognised_by_values_and_names(browser: Browser) -> None:
    script = """async (cases) => {
        const { scoresOf } = await import("/console/assets/reading.js");
        return cases.map(([name, datatype, shape, data, names, declared]) => {
            const context = { names, declared: declared ?? undefined };
            const found = scoresOf({ name, datatype, shape, data }, context);
            return found && (found.isProbability ? "probabilities" : found.isCertain ? "scores" : "offered");
        });
    }"""
    await browser.open("/")
    assert await browser.page.evaluate(script, [list(case[:-1]) for case in READINGS]) == [
        case[-1] for case in READINGS
    ]


async def test_classes_have_their_names(browser: Browser) -> None:
    script = """async () => {
        const { classesOf, percent } = await import("/console/assets/reading.js");
        const names = ["cat", "dog"];
        const classes = (name, data, isLabelled = false) =>
            classesOf({ name, shape: [data.length], data }, { names, isLabelled });
        return [classes("label", [1, 0]), classes("y", [1]), classes("y", [1n], true), classes("label", [2]),
            classes("label", [0.5]),
            [0, 1e-7, 0.0000123456, 0.012345, 0.5, 0.99949, 0.99996, 1, null].map(percent)];
    }"""
    await browser.open("/")
    assert await browser.page.evaluate(script) == [
        ["dog", "cat"],
        None,
        ["dog"],
        None,
        None,
        ["0 %", "< 0.001 %", "0.00123 %", "1.23 %", "50.0 %", "99.9 %", "> 99.99 %", "100 %", "NaN"],
    ]


async def test_labels_of_the_model_name_bars_and_classes(browser: Browser) -> None:
    """The labels come with the model; here a component gets them."""
    script = """async () => {
        const { html, render } = await import("/console/assets/html.js");
        const { Outputs } = await import("/console/assets/outputs.js");
        const outputs = [
            { name: "label", datatype: "INT64", shape: [1], data: [1] },
            { name: "probabilities", datatype: "FP32", shape: [1, 2], data: [0.25, 0.75] },
        ];
        const holder = document.createElement("div");
        const model = { labels: { probabilities: ["<i>cat</i>", "dog"] } };
        render(html`<${Outputs} outputs=${outputs} model=${model} />`, holder);
        return [...holder.querySelectorAll("ul.classes, .scores th")].map((e) => e.textContent);
    }"""
    await browser.open("/")
    assert await browser.page.evaluate(script) == ["dog 1", "dog", "<i>cat</i>"]


async def test_a_long_line_keeps_its_extremes_and_gaps(browser: Browser) -> None:
    script = """async ([values]) => {
        const { thinned } = await import("/console/assets/plot.js");
        return [thinned(values), thinned([1, null, 2])];
    }"""
    random = np.random.default_rng(5)
    values = random.normal(size=10_000)
    values[[17, 9_999]] = 100, -100
    await browser.open("/")
    indices, few = await browser.page.evaluate(script, [values.tolist()])
    assert indices == sorted(set(indices))
    assert len(indices) <= 2_000
    assert {17, 9_999} <= set(indices)
    assert few == [0, 1, 2]


async def test_answers_have_no_violation_that_axe_finds(browser: Browser) -> None:
    found: list[str] = []
    for model, table in (("Classifier", "1, 3, 2"), ("Classifier", "1, 3, 0\n2, 2, 2"), ("House", "1, 2, 3")):
        await run(browser, model, table)
        found += await browser.find_violations()
    assert found == []
