"""The console with the keyboard alone, enlarged, in the colours of the system, and with turned photos."""

import base64
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from console.browser import Browser, needs_chromium, playwright, serve_page
from console.chat_models import Talker
from console.console_models import Mirror, Table, Wage, energy

pytestmark = [needs_chromium, pytest.mark.asyncio(loop_scope="package")]


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def opened(chromium: Any) -> AsyncIterator[Browser]:
    async with serve_page(chromium, Mirror, Table, Wage, Talker, energy, recent_requests=10) as page:
        yield page


async def tab_to(browser: Browser, name: str) -> None:
    """Press Tab until the element has the focus."""
    for _ in range(40):
        if (await browser.focused()).startswith(name):
            return
        await browser.page.keyboard.press("Tab")
    raise AssertionError(f"Tab does not reach {name}")


async def test_a_request_is_sent_and_repeated_with_the_keyboard(browser: Browser) -> None:
    page = browser.page
    await browser.open("/")
    await page.wait_for_selector("li.model")
    await tab_to(browser, "a Table")
    await page.keyboard.press("Enter")
    await page.wait_for_selector("textarea")
    await tab_to(browser, "textarea values")
    await page.keyboard.press("Control+A")
    await page.keyboard.type("1, 2, 3")
    await tab_to(browser, "button Run")
    await page.keyboard.press("Enter")
    sums = page.get_by_label("Output sum").locator("td")
    await browser.has_texts(sums, ["6"])
    assert await browser.focused() == "button Run"
    async with page.expect_response("**/infer"):
        await page.keyboard.press("Enter")
    await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")  # the link to the request
    await page.get_by_role("heading", name="Send it again").wait_for()
    await tab_to(browser, "button Replay")
    await page.keyboard.press("Enter")
    await page.locator("section [aria-live] pre").wait_for()
    assert await browser.focused() == "button Replay"


async def test_a_chat_with_the_keyboard(browser: Browser) -> None:
    page = browser.page
    await browser.open("/#/models/Talker")
    await page.wait_for_selector("#draft:focus")
    await page.keyboard.type("one")
    await page.keyboard.press("Enter")
    await page.locator(".message .facts").wait_for()
    for _ in range(2):
        await page.keyboard.press("Shift+Tab")
    assert await browser.focused() == "button Try again"
    await page.keyboard.press("Enter")
    await page.locator(".message .facts").wait_for()
    await page.wait_for_selector("#draft:focus")


async def test_the_button_of_a_map_keeps_the_focus(browser: Browser) -> None:
    await browser.open("/#/models/energy", "Simulator")
    section = browser.page.get_by_role("region", name="Map")
    button = section.locator(".choices > button").first
    await playwright.expect(button).not_to_have_text("Stop")
    await button.focus()
    for text in ("Stop", "Continue"):
        await browser.page.keyboard.press("Enter")
        await playwright.expect(section.locator("button:focus")).to_have_text(text)


@pytest.mark.parametrize(
    "address", ["/", "/#/models/Wage", "/#/models/energy", "/#/models/Talker", "/#/live", "/#/requests"]
)
async def test_a_page_of_200_percent_fits_its_width(browser: Browser, chromium: Any, address: str) -> None:
    context = await chromium.new_context(viewport={"width": 640, "height": 360}, device_scale_factor=2)
    page = await context.new_page()
    await page.goto(browser.url + address)
    await page.wait_for_selector(".model, .cells, svg.map, #draft, .chart svg, h1:text('Requests')")
    assert await page.evaluate("() => document.documentElement.scrollWidth") <= 640
    if address.endswith("Talker"):
        await page.get_by_role("button", name="Settings").click()
        box = await page.locator(".composer").bounding_box()
        assert box["y"] >= 0
        assert box["y"] + box["height"] <= 360
    await context.close()


async def test_states_are_seen_in_the_colours_of_the_system(browser: Browser) -> None:
    """There are no backgrounds and shadows, and each border has one colour."""
    page = browser.page
    await page.emulate_media(forced_colors="active")
    style = "(all, name) => all.map((e) => getComputedStyle(e)[name])"
    await browser.open("/#/models/Wage")
    await page.get_by_label("hours, row 1").fill("many")
    await browser.press("Run")
    await page.get_by_label("rate, row 1").focus()
    cells = page.locator(".cells input")
    assert [each == "dashed" for each in await cells.evaluate_all(style, "outlineStyle")] == [True, False]
    borders = await page.locator("nav a").evaluate_all(style, "borderBottomColor")
    assert borders[0] not in borders[1:]
    tabs = await page.get_by_role("tab").evaluate_all(style, "borderBottomColor")
    assert tabs[0] != tabs[1]
    await page.get_by_role("tab", name="Code").click()
    await page.locator(".row button").nth(1).wait_for()
    buttons = await page.locator(".row button").evaluate_all(style, "backgroundColor")
    assert buttons[0] not in buttons[1:]
    await browser.open("/#/models/energy", "Simulator")
    await page.locator(".ramp").first.wait_for()
    assert "gradient" in (await page.locator(".ramp").evaluate_all(style, "backgroundImage"))[0]
    await page.emulate_media(forced_colors="none")


async def test_nothing_moves_for_readers_who_ask_for_that(browser: Browser) -> None:
    page = browser.page
    await page.emulate_media(reduced_motion="reduce")
    await browser.open("/")
    await page.wait_for_selector("li.model")
    assert await page.locator(".model").first.evaluate("(e) => getComputedStyle(e).transitionProperty") == "none"
    await browser.open("/#/models/Talker")
    await page.fill("#draft", "!wait")
    await browser.press("Send")
    dots = page.locator(".chat-writing i").first
    assert await dots.evaluate("(e) => getComputedStyle(e).animationName") == "none"
    await browser.press("Stop")
    await page.emulate_media(reduced_motion="no-preference")


async def test_a_photo_that_its_camera_turned_is_upright_and_sent_as_it_is_shown(browser: Browser) -> None:
    page = browser.page
    await browser.open("/#/models/Mirror")
    draw = """async () => {
        const canvas = new OffscreenCanvas(40, 20);
        const context = canvas.getContext("2d");
        [context.fillStyle = "red", context.fillRect(0, 0, 20, 20)];
        [context.fillStyle = "blue", context.fillRect(20, 0, 20, 20)];
        const blob = await canvas.convertToBlob({ type: "image/jpeg", quality: 1 });
        return btoa(String.fromCharCode(...new Uint8Array(await blob.arrayBuffer())));
    }"""
    jpeg = base64.b64decode(await page.evaluate(draw))
    # The orientation 6 of EXIF: to be turned by 90 degrees clockwise, so that red is above blue.
    exif = b"Exif\0\0MM\0*" + struct.pack(">IHHHIHHI", 8, 1, 0x0112, 3, 1, 6, 0, 0)
    turned = jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + jpeg[2:]
    await page.set_input_files("input[type=file]", {"name": "turned.jpg", "mimeType": "image/jpeg", "buffer": turned})
    await browser.has_texts(page.locator("figcaption"), ["turned.jpg: 20 x 40"])
    pixel = """(canvas) => {
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return [data[0] > data[2], data.at(-4) > data.at(-2)];
    }"""
    await browser.draws(page.locator("figure.photo canvas"), pixel, [True, False])
    async with page.expect_response("**/infer") as answer:
        await browser.press("Run")
    mirrored = (await (await answer.value).json())["outputs"][0]
    assert mirrored["shape"] == [1, 40, 20, 3]
    assert (mirrored["data"][0] > mirrored["data"][2], mirrored["data"][-3] > mirrored["data"][-1]) == (True, False)
