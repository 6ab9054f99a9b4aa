"""The table of a model whose inputs are its columns."""

import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import dragoman
from console.browser import Browser, needs_chromium, serve_page
from console.console_models import Wage

pytestmark = [needs_chromium, pytest.mark.asyncio(loop_scope="package")]


class Homes(dragoman.Model):
    """Text and numbers by column; the answer tells what was sent."""

    placement = "inline"
    inputs = (
        dragoman.TensorSpec("town", dragoman.BYTES, (-1,)),
        dragoman.TensorSpec("area", dragoman.FP64, (-1, 1)),
        dragoman.TensorSpec("rooms", dragoman.INT64, (-1,)),
    )
    outputs = (dragoman.TensorSpec("said", dragoman.BYTES, (-1,)),)

    def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        town, area, rooms = (call.inputs[name].data.ravel() for name in ("town", "area", "rooms"))
        if b"Fail" in town:
            raise dragoman.errors.InvalidInput(f"input 'town': data[{list(town).index(b'Fail')}]: no town of this name")
        rows = [f"{t.decode()} {a:g} {r}" for t, a, r in zip(town, area, rooms, strict=True)]
        return {"said": np.array(rows, object)}


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def opened(chromium: Any) -> AsyncIterator[Browser]:
    async with serve_page(chromium, Homes, Wage) as page:
        yield page


async def load(browser: Browser, text: str, name: str = "homes.csv") -> None:
    await browser.page.wait_for_selector(".cells input")
    file = {"name": name, "mimeType": "text/csv", "buffer": text.encode()}
    await browser.page.set_input_files("input[type=file]", [file])


async def said(browser: Browser, expected: list[str]) -> None:
    await browser.press("Run")
    found = browser.page.get_by_label("Output said").locator("td")
    await browser.has_texts(found, expected)


async def test_a_file_fills_the_rows(browser: Browser) -> None:
    """In any order of columns; columns that the model lacks are left out, and an empty cell of floats is NaN."""
    page = browser.page
    await browser.open("/#/models/Homes")
    await load(browser, 'rooms;price;town;area\n2;9;"Bath; UK";50.5\n3;8;Hull;\n')
    await page.wait_for_selector("text=homes.csv: 2 rows; left out, since no input has the name: price")
    await said(browser, ["Bath; UK 50.5 2", "Hull nan 3"])
    await load(browser, "town,area,rooms\nTrue,True,False\n")  # as pandas writes what was true and false in training
    await said(browser, ["True 1 0"])
    await load(browser, "York,1,2\nBath,3,4\nHull,5,6\n", "without-names.csv")
    await page.wait_for_selector("text=without-names.csv: 3 rows")
    await said(browser, ["York 1 2", "Bath 3 4", "Hull 5 6"])


async def test_rows_are_typed_and_added(browser: Browser) -> None:
    page = browser.page
    await browser.open("/#/models/Homes")
    for name, text in (("town", "Bath"), ("area", "70"), ("rooms", "4")):
        await page.get_by_label(f"{name}, row 1").fill(text)
    await browser.press("Add a row")
    await page.get_by_label("town, row 2").fill("Hull")
    await said(browser, ["Bath 70 4", "Hull 70 4"])
    await browser.press("Remove the last")
    await page.get_by_label("rooms, row 1").fill("5")
    await browser.press("Run")
    await page.get_by_text("Bath 70 5").wait_for()
    await browser.press("A field for each input")
    assert await page.input_value("#data-0") == '["Bath"]'
    assert await page.input_value("#data-2") == "5"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("town,rooms\nBath,2\n", "there is no column area; the first line has town, rooms"),
        ("town,surface,rooms\nBath,50,2\n", "there is no column area; the first line has town, surface, rooms"),
        ("town,area,rooms\nBath,50\n", "expected 3 cells a line, got 2 in line 2"),
        ("town,area,rooms\n", "expected a line of names and a line of values or more"),
        ("GIF89a\0\0", "'homes.csv' is not a table: expected CSV"),
    ],
)
async def test_a_file_that_does_not_fit_changes_nothing(browser: Browser, text: str, message: str) -> None:
    await browser.open("/#/models/Homes")
    await load(browser, "town,area,rooms\nYork,1,2\n")
    await browser.page.wait_for_selector("text=homes.csv: 1 row")
    await load(browser, text)
    await browser.page.locator("fieldset .error", has_text=message).wait_for()
    assert await browser.page.input_value("[aria-label='town, row 1']") == "York"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("Bath,fifty,2", "area: row 2: expected FP64, got 'fifty'"),
        ("Bath,50,", "rooms: row 2: expected INT64, got no value"),
    ],
)
async def test_a_wrong_cell_is_named(browser: Browser, row: str, message: str) -> None:
    await browser.open("/#/models/Homes")
    await load(browser, f"town,area,rooms\nYork,1,2\n{row}\n")
    await browser.page.wait_for_selector("text=homes.csv: 2 rows")
    await browser.press("Run")
    await browser.page.locator("[aria-live] .error", has_text=message).wait_for()
    assert await browser.marked() == (f"input {message.partition(':')[0]}, row 2", message)
    assert await browser.find_violations() == []
    await browser.keep(f"wrong-cell-{message[:4]}")
    await browser.page.keyboard.type("3")
    assert await browser.page.locator("[aria-invalid]").count() == 0


async def test_a_cell_that_the_server_rejects_is_marked_also_far_below(browser: Browser) -> None:
    await browser.open("/#/models/Homes")
    await load(browser, "town,area,rooms\n" + "York,1,2\n" * 199 + f"Bath,50,{2**70}\n" + "Hull,1,1\n" * 50)
    await browser.page.get_by_text("150 more rows are sent, and not shown.").wait_for()
    await browser.press("Run")
    message = f"rooms: row 200: expected INT64, got '{2**70}'"
    await browser.page.locator("[aria-live] .error", has_text=message).wait_for()
    assert await browser.marked() == ("input rooms, row 200", message)
    await browser.page.get_by_text("149 more rows are sent, and not shown.").wait_for()
    await browser.page.get_by_label("rooms, row 200").fill("7")
    await browser.page.get_by_label("town, row 2", exact=True).fill("Fail")
    await browser.press("Run")
    message = "input 'town': data[1]: no town of this name"
    await browser.page.locator("[aria-live] .error", has_text=message).wait_for()
    assert await browser.marked() == ("input town, row 2", message)


async def test_a_spreadsheet_is_pasted_into_a_cell(browser: Browser) -> None:
    await browser.open("/#/models/Homes")
    await browser.page.get_by_label("town, row 1").focus()
    paste = """(text) => {
        const clipboardData = new DataTransfer();
        clipboardData.setData("text", text);
        const event = new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true });
        document.activeElement.dispatchEvent(event);
    }"""
    await browser.page.evaluate(paste, "rooms\ttown\tarea\n2\tBath\t50\n3\tHull\t60\n")
    await said(browser, ["Bath 50 2", "Hull 60 3"])


async def test_many_rows_are_sent_and_not_all_shown(browser: Browser) -> None:
    await browser.open("/#/models/Wage")
    await browser.page.wait_for_selector("[aria-label='hours, row 1']")
    await load(browser, "rate,hours\n" + "2,3\n" * 250)
    await browser.page.wait_for_selector("text=150 more rows are sent, and not shown.")
    await browser.press("Run")
    await browser.page.get_by_label("Output wage").get_by_text("[250]").wait_for()


async def test_a_column_called_rate_does_not_make_its_neighbours_sounds(browser: Browser) -> None:
    await browser.open("/#/models/Wage")
    await browser.press("A field for each input")
    await browser.page.get_by_label("values: rows of a table, or JSON").nth(1).wait_for()
    assert await browser.page.get_by_role("button", name="Record").count() == 0
    script = """async () => {
        const { isRate } = await import("/console/assets/audio.js");
        const shapes = [["rate", [-1]], ["rate", []], ["rate", [1]], ["sr", [-1]]];
        return shapes.map(([name, shape]) => isRate({ name, shape, datatype: "INT64" }));
    }"""
    assert await browser.page.evaluate(script) == [False, True, True, True]


async def test_rows_are_counted_from_one(browser: Browser) -> None:
    await browser.open("/#/models/Wage")
    await load(browser, "rate,hours\n2,3\n4,5\n")
    await browser.press("Run")
    output = browser.page.get_by_label("Output wage")
    await output.locator("tbody tr").nth(1).wait_for()
    assert [" ".join((await row.inner_text()).split()) for row in await output.locator("tbody tr").all()] == [
        "1 6",
        "2 20",
    ]


async def test_code_has_a_line_for_each_input_and_a_command(browser: Browser) -> None:
    await browser.open("/#/models/Homes", "Code")
    curl = await browser.page.inner_text("pre.code")
    assert [line.strip()[:16] for line in curl.splitlines()[1:]] == [
        '{"name":"town","',
        '{"name":"area","',
        '{"name":"rooms",',
    ]
    assert json.loads(curl.partition(" -d '")[2].removesuffix("'"))["inputs"][1]["shape"] == [1, 1]
    await browser.press("Terminal")
    assert await browser.page.inner_text("pre.code") == f"dragoman infer {browser.url} Homes rows.csv"
    await browser.open("/#/models/Wage", "Code")
    await browser.press("Terminal")
    assert await browser.page.inner_text("pre.code") == f"dragoman infer {browser.url} Wage rows.csv"


async def test_nothing_is_wrong_for_axe(browser: Browser) -> None:
    await browser.open("/#/models/Homes")
    await browser.page.wait_for_selector(".cells input")
    assert await browser.find_violations() == []
    assert browser.problems == []


async def test_a_blank_cell_of_floating_point_is_nan(browser: Browser) -> None:
    await browser.open("/")
    script = """async (datatypes) => {
        const { columnTensor } = await import("/console/assets/table_input.js");
        const cells = ["1.5", " "];
        return datatypes.map((datatype) => columnTensor({ name: "x", datatype, shape: [-1], cells }).data);
    }"""
    assert await browser.page.evaluate(script, ["FP16", "BF16", "FP32", "FP64"]) == ["[1.5, null]"] * 4
