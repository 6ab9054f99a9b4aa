"""The start page of the console, the page of a model, and the size and width of all pages."""

import json
import re
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
import pytest_asyncio

from console.browser import Browser, needs_chromium, playwright, serve_page
from console.console_models import Parrot, Table, Wage, decay, write_graphs

pytestmark = [needs_chromium, pytest.mark.asyncio(loop_scope="package")]
PHONE, WIDE = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def opened(tmp_path_factory: pytest.TempPathFactory, chromium: Any) -> AsyncIterator[Browser]:
    folder = tmp_path_factory.mktemp("models")
    (folder / "broken.onnx").write_bytes(b"not ONNX")
    models = (Table, Wage, Parrot, decay, *write_graphs(folder), str(folder / "broken.onnx"))
    async with serve_page(chromium, *models, recent_requests=50) as page:
        yield page


@pytest_asyncio.fixture(loop_scope="package")
async def browser(opened: Browser) -> AsyncIterator[Browser]:
    opened.problems.clear()
    await opened.page.set_viewport_size(WIDE)
    yield opened
    await opened.page.unroute_all()
    assert opened.problems == []


async def names(browser: Browser) -> list[str]:
    found: list[str] = await browser.page.locator("li.model h2").all_inner_texts()
    return found


def card(browser: Browser, name: str) -> Any:
    return browser.page.locator("li.model", has=browser.page.get_by_role("link", name=name, exact=True))


async def test_cards_say_what_a_model_is(browser: Browser) -> None:
    await browser.open("/")
    decaying = card(browser, "decay")
    await browser.has_texts(decaying.locator(".badge"), ["simulator"])
    await browser.has_texts(decaying.locator(".description"), ["A curve of 40 points by its amplitude and rate."])
    await browser.has_texts(card(browser, "Parrot").locator(".go"), ["Chat →"])
    await browser.has_texts(card(browser, "broken").locator(".state"), ["unavailable"])
    assert "in the log of the server" in await card(browser, "broken").locator(".reason").inner_text()
    await browser.has_texts(browser.page.locator(".page-title .note"), ["7 models, 6 ready, 1 failed"])


async def test_models_are_searched_and_filtered(browser: Browser) -> None:
    page = browser.page
    await browser.open("/")
    await page.get_by_label("Search models").fill("CURVE amplitude")
    await browser.has_texts(page.locator("li.model h2"), ["decay"])
    await page.get_by_role("link", name="decay").click()
    await page.get_by_role("tab").first.wait_for()
    await page.go_back()
    await browser.has_texts(page.locator("li.model h2"), ["decay"])
    await page.get_by_label("Search models").fill("")
    await page.get_by_role("button", name="graph 1").click()
    await browser.has_texts(page.locator("li.model h2"), ["kinetics"])
    await page.get_by_role("button", name="failed 1").click()
    await browser.has_texts(page.locator("li.model h2"), ["broken"])
    await page.get_by_label("Search models").fill("nothing like it")
    await page.get_by_role("status").filter(has_text="0 models found").wait_for(state="attached")
    await browser.press("Show all")
    assert len(await names(browser)) == 7


async def test_calls_per_second(browser: Browser) -> None:
    page = browser.page
    await browser.open("/")
    await card(browser, "Table").locator(".rate", has_text="0 calls/s").wait_for()
    body = json.dumps({"inputs": [{"name": "rows", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}]})
    send = "(body) => fetch('/v2/models/Table/infer', { method: 'POST', body })"
    for _ in range(30):
        await page.evaluate(send, body)
    await card(browser, "Table").locator("svg.spark").wait_for()
    assert await card(browser, "Wage").locator("svg.spark").count() == 0


async def test_of_a_thousand_models_few_are_drawn(browser: Browser) -> None:
    page, asked = browser.page, list[float]()
    version = {"version": "", "state": "READY", "reason": ""}
    models = [
        {"name": f"m{i:03}", "state": "READY", "kind": "classifier", "description": "x" * 80, "platform": "p",
         "versions": [version]}
        for i in range(1000)
    ]  # fmt: skip

    async def answer(route: Any) -> None:
        asked.append(time.monotonic())
        await route.fulfill(json={"models": models})

    await page.route("**/console/models", answer)
    await browser.open("/")
    await page.locator("li.model").first.wait_for()
    assert await page.locator("li.model").count() <= 100
    await browser.has_texts(page.locator(".page-title .note"), ["1000 models"])
    await page.mouse.wheel(0, 100_000)
    await page.get_by_text("m090", exact=True).wait_for()
    await page.get_by_label("Search models").fill("m99")
    await page.get_by_text("m995", exact=True).wait_for()
    assert len(await names(browser)) == 10
    await page.wait_for_timeout(4000)
    assert len(asked) == 1, "a large list is asked for as often as a small one"


async def test_an_empty_server_says_what_to_do(browser: Browser) -> None:
    await browser.page.route("**/console/models", lambda route: route.fulfill(json={"models": []}))
    await browser.open("/")
    await browser.page.get_by_role("heading", name="No models yet").wait_for()
    assert "dragoman serve model.onnx" in await browser.page.inner_text("pre")


async def test_a_page_opens_with_its_use_and_counts_requests(browser: Browser) -> None:
    page = browser.page
    await browser.open("/#/models/Wage")
    summary = page.locator(".summary")
    before = re.fullmatch(r"Python function · (?:(\d+) requests?,.*|no requests yet)", await summary.inner_text())
    assert before
    assert await page.get_by_role("tab", selected=True).inner_text() == "Try it"
    await browser.press("Run")
    after = int(before[1] or 0) + 1
    await page.locator(".summary", has_text=re.compile(rf"{after} requests?, [\d.]+ ms on average")).wait_for()
    await browser.open("/#/models/Parrot")
    await page.get_by_role("tab").first.wait_for()
    assert await page.get_by_role("tab", selected=True).inner_text() == "Chat"


EXAMPLES = {
    "kind": "function", "description": "", "labels": {}, "pictures": {}, "platform": "", "name": "Wage", "versions": [],
    "examples": [
        {"name": "a week", "is_complete": True, "inputs": [
            {"name": "hours", "shape": [2], "datatype": "FP64", "data": [40, 38.5]},
            {"name": "rate", "shape": [2], "datatype": "FP64", "fill": 10},
        ]},
        {"name": "secret", "is_complete": False, "inputs": [{"name": "hours", "shape": [10**9], "datatype": "FP64"}]},
    ],
}  # fmt: skip


async def test_examples_of_a_model_fill_the_form(browser: Browser) -> None:
    page = browser.page
    await page.route("**/console/models/Wage", lambda route: route.fulfill(json=EXAMPLES))
    await browser.open("/#/models/Wage")
    group = page.get_by_role("group", name="Examples")
    await browser.has_texts(group.get_by_role("button"), ["a week"])
    await group.get_by_role("button").click()
    await browser.press("Run")
    await browser.has_texts(page.get_by_label("Output wage").locator("td"), ["400", "385"])


async def test_no_page_is_wider_than_a_phone(browser: Browser) -> None:
    page = browser.page
    await page.set_viewport_size(PHONE)
    addresses = [
        "/",
        "/#/live",
        "/#/requests",
        "/#/models/Wage",
        "/#/models/Table",
        "/#/models/Parrot",
        "/#/models/decay",
    ]
    for address in [*addresses, "/#/models/kinetics"]:
        await browser.open(address)
        await page.get_by_role("heading", level=1).wait_for()
        tabs = await page.get_by_role("tab").count() if "models/" in address else 0
        for i in range(max(tabs, 1)):
            if tabs:
                await page.get_by_role("tab").nth(i).click()
            await page.wait_for_timeout(150)
            assert await page.evaluate("() => document.documentElement.scrollWidth") == 390, (address, i)
        header = await page.locator("header").bounding_box()
        assert header["height"] < 64, "the navigation takes several lines"


async def test_the_focus_frame_is_not_around_the_page(browser: Browser) -> None:
    page = browser.page
    await browser.open("/")
    await page.goto(f"{browser.url}/#/models/Table")
    await page.get_by_role("tab").first.wait_for()
    assert await page.evaluate("() => document.activeElement.id") == "main"
    assert await page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle") == "none"


async def test_headings_go_down_one_level_at_a_time(browser: Browser) -> None:
    for address in ("/", "/#/live", "/#/requests", "/#/models/Table", "/#/models/kinetics"):
        await browser.open(address)
        await browser.page.get_by_role("heading", level=1).wait_for()
        await browser.page.wait_for_timeout(300)
        found = await browser.page.locator("h1, h2, h3, h4").evaluate_all("(e) => e.map((h) => Number(h.tagName[1]))")
        assert found[0] == 1, address
        assert found.count(1) == 1, address
        assert all(b - a <= 1 for a, b in pairwise(found)), (address, found)


def chain(count: int) -> dict[str, Any]:
    """Return layers as the server sends them: blocks of a convolution, a sigmoid and their product."""
    nodes: list[dict[str, Any]] = []
    for i in range(0, count, 3):
        names = [f"t{i}", f"t{i + 1}", f"t{i + 2}", f"t{i + 3}"]
        common: dict[str, Any] = {"domain": "", "attributes": {}}
        nodes += [
            {**common, "name": f"conv{i}", "op": "Conv", "inputs": [names[0], f"w{i}"], "outputs": names[1:2]},
            {**common, "name": "", "op": "Sigmoid", "inputs": names[1:2], "outputs": names[2:3]},
            {**common, "name": "", "op": "Mul", "inputs": names[1:3], "outputs": names[3:4]},
        ]
    return {
        "producer": "tests", "opsets": {"": 17}, "name": "main", "nodes": nodes, "inputs": ["t0"],
        "outputs": [nodes[-1]["outputs"][0]], "tensors": {"t0": ["FP32", ["n", 3]]},
        "weights": {f"w{i}": ["FP32", [8, 3, 3, 3]] for i in range(0, count, 3)}, "is_complete": True,
    }  # fmt: skip


async def open_layers(browser: Browser, found: dict[str, Any]) -> None:
    about = {**EXAMPLES, "examples": [], "has_layers": True}
    await browser.page.route("**/console/models/Wage", lambda route: route.fulfill(json=about))
    await browser.page.route("**/console/models/Wage/layers", lambda route: route.fulfill(json=found))
    await browser.open("/#/models/Wage", "Layers")
    await browser.page.locator("svg.layers").wait_for()


async def test_layers_are_drawn_searched_and_described(browser: Browser) -> None:
    page = browser.page
    found = chain(6)
    found["nodes"][3]["attributes"] = {"strides": [2, 2], "then_branch": {"graph": "t", "operators": {"Relu": 2}}}
    await open_layers(browser, found)
    await browser.press("Fit")
    await playwright.expect(page.locator("svg.layers g")).to_have_count(8)
    assert await page.locator("svg.layers .edge").count() == 9
    panel = page.locator(".layers-panel")
    assert "6 nodes · 432 weights · opset 17 · written by tests" in await panel.inner_text()
    await page.get_by_label("Search nodes").fill("conv3")
    await panel.get_by_role("button", name="Conv").click()
    assert "strides\n[2, 2]\nthen_branch\ngraph t: 2 Relu" in await panel.inner_text()
    assert "FP32 [8, 3, 3, 3] weight" in await panel.inner_text()
    assert await page.locator("svg.layers .chosen text").first.inner_html() == "Conv"
    await panel.get_by_role("button", name="Sigmoid").click()
    await panel.get_by_role("heading", name="Sigmoid").wait_for()
    await page.locator("svg.layers g", has_text="t0").click()
    await panel.get_by_role("heading", name="t0 input").wait_for()
    assert await browser.find_violations() == []
    await browser.keep("layers")


async def test_of_many_layers_few_are_drawn(browser: Browser) -> None:
    page = browser.page
    await open_layers(browser, chain(9000))
    assert await page.locator("svg.layers g").count() < 60
    longest = """async () => {
        let [longest, last] = [0, performance.now()];
        const view = document.querySelector(".layers-view");
        for (let i = 0; i < 20; i++) {
            view.scrollTop += 4000;
            await new Promise(requestAnimationFrame);
            longest = Math.max(longest, performance.now() - last);
            last = performance.now();
        }
        return longest;
    }"""
    assert await page.evaluate(longest) < 1000
    await page.get_by_label("Search nodes").fill("conv8997")
    await page.locator(".layers-panel").get_by_role("button", name="Conv").click()
    await page.locator("svg.layers .chosen").wait_for()
