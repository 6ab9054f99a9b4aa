"""The console in a real browser."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from console.browser import Browser, needs_chromium, png, serve_page
from console.console_models import (
    HOSTILE,
    Detector,
    Echo,
    Hostile,
    Mirror,
    Parrot,
    Planes,
    Sizes,
    Table,
    Wage,
    Wrong,
    decay,
    energy,
    write_graphs,
)

pytestmark = [needs_chromium, pytest.mark.asyncio(loop_scope="package")]
MODELS = (Table, energy, decay, Wrong, Parrot, Mirror, Planes, Sizes, Wage, Detector, Echo, Hostile)


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def opened(tmp_path_factory: pytest.TempPathFactory, chromium: Any) -> AsyncIterator[Browser]:
    """One server and one page for all tests: a browser takes longer to start than to show all views."""
    graphs = write_graphs(tmp_path_factory.mktemp("graphs"))
    async with serve_page(chromium, *MODELS, *graphs, control_open=True, recent_requests=50) as page:
        yield page


async def test_models_are_listed_and_controlled(browser: Browser) -> None:
    page = browser.page
    await browser.open("/")
    await page.wait_for_selector("li.model")
    assert await page.locator("li.model").count() == len(MODELS) + 2
    await browser.keep("models")
    card = page.locator("li.model", has=page.get_by_role("link", name="Table"))
    await card.get_by_label("Control Table").click()
    await card.get_by_role("button", name="Unload").click()
    await card.get_by_text("not loaded").wait_for()
    await card.get_by_role("button", name="Load Table", exact=True).click()
    await card.get_by_text("ready", exact=True).wait_for()


@pytest.mark.parametrize(
    ("values", "shape", "message"),
    [
        ("1,2,3\n1,two,3", "", "rows: row 2, value 2: expected FP32, got 'two'"),
        ("1,2,3", "1, three", "rows: expected a shape such as 2, 3, got '1, three'"),
        ("1,2,3,4", "2, 3", "input 'rows': shape [2, 3] needs 6 elements, got 4"),
        ('[[1, "two", 3]]', "", "input 'rows': data[0]: expected 'float | null', got 'str'"),
    ],
)
async def test_a_wrong_value_marks_its_field(browser: Browser, values: str, shape: str, message: str) -> None:
    page = browser.page
    await browser.open("/#/models/Table")
    await page.fill("textarea", values)
    await page.get_by_label("shape").fill(shape)
    await browser.press("Run")
    focused, found = await browser.marked()
    assert focused.startswith("input shape" if "three" in shape else "textarea values")
    assert found.startswith(message.partition("data[")[0])
    await page.locator(":focus").fill("4, 5, 6")
    assert await page.locator("[aria-invalid]").count() == 0


@pytest.mark.parametrize(
    ("datatype", "text", "expected"),
    [
        ("INT8", "-128", "-128"),
        ("INT8", "128", ""),
        ("UINT8", "-1", ""),
        ("UINT64", "+0018446744073709551615", str(2**64 - 1)),
        ("INT64", str(2**63), ""),
    ],
)
async def test_integers_have_the_range_of_their_datatype(
    browser: Browser, datatype: str, text: str, expected: str
) -> None:
    await browser.open("/")
    script = """async ([text, datatype]) => {
        const { elementText } = await import("/console/assets/tensors.js");
        try { return elementText(text, datatype); } catch (error) { return error.message; }
    }"""
    found = await browser.page.evaluate(script, [text, datatype])
    assert found == (expected or f"expected {datatype}, got '{text}'")


@pytest.mark.parametrize(
    ("address", "path", "found"),
    [
        ("/#/models/Table", "**/console/v2/models/Table", "textarea"),
        ("/#/models/Table", "**/console/v2/models/Table/openapi.json", "textarea"),
        ("/#/requests/none", "**/console/requests/none", "text=no request 'none' among the last 50"),
        ("/", "**/console/v2", "li.model"),
    ],
)
@pytest.mark.parametrize("status", [429, 503])
async def test_what_an_overloaded_server_did_not_answer_can_be_tried_again(
    browser: Browser, address: str, path: str, found: str, status: int
) -> None:
    page = browser.page
    await page.route(path, lambda route: route.fulfill(status=status, json={"error": "too many requests"}), times=1)
    await browser.open(address)
    await page.locator(".error", has_text="too many requests").wait_for()
    await browser.press("Try again")
    await page.wait_for_selector(found)
    await page.unroute(path)


async def test_a_pasted_table_and_its_outputs(browser: Browser) -> None:
    page = browser.page
    await browser.open("/#/models/Table")
    await page.wait_for_selector("textarea")
    await page.fill("textarea", "a,b,c\n1,2,3.5\n-1,.5,1e1")
    await browser.press("Run")
    await page.wait_for_selector("text=FP64 [2]")
    text = await browser.panel()
    assert "the first line, of names, was not sent" in text
    assert "6.5" in text
    assert "9.5" in text
    assert "9007199254740994" in text, "an integer beyond 2^53 was rounded"
    await browser.keep("try-it")
    await page.fill("textarea", "1,2")
    await browser.press("Run")
    await page.wait_for_selector("text=expected shape")
    await page.get_by_role("tab", name="Code").click()
    assert "/v2/models/Table/infer" in await browser.panel()
    await browser.keep("code")


# Text, datatype and rank; the JSON of the elements and the shape, or the error.
VALUES: list[tuple[str, str, int, str, list[int] | None]] = [
    ("1, 2\n3, 4", "FP32", 2, "[1, 2, 3, 4]", [2, 2]),
    ("1 2 3", "INT64", 1, "[1, 2, 3]", [3]),
    ("9007199254740993", "INT64", 1, "[9007199254740993]", [1]),
    ("18446744073709551615", "UINT64", 1, "[18446744073709551615]", [1]),
    ("0.1000000000000000055", "FP64", 1, "[0.1000000000000000055]", [1]),
    ("+1\t-.5\t2.\t007", "FP32", 1, "[1, -0.5, 2, 7]", [4]),
    ("nan, 1e-3", "FP64", 1, "[null, 1e-3]", [2]),
    ("true, 0", "BOOL", 1, "[true, false]", [2]),
    ("one, two\nthree", "BYTES", 1, '["one, two", "three"]', [2]),
    ('"a,b",c\nd,e', "BYTES", 2, '["a,b", "c", "d", "e"]', [2, 2]),
    ("[[1, 2], [3, 4]]", "FP32", 2, "[[1, 2], [3, 4]]", [2, 2]),
    ("5", "FP64", 0, "[5]", []),
    ("1.5", "INT32", 1, "row 1: expected INT32, got '1.5'", None),
    ("1,2\n3", "FP32", 2, "the rows differ in length", None),
    ("[[1, 2], [3]]", "FP32", 2, "the lists differ in length", None),
    ("1e5", "INT8", 1, "row 1: expected INT8, got '1e5'", None),
    ("1;2\n3;4", "FP32", 2, "[1, 2, 3, 4]", [2, 2]),
    ("1,5;2", "FP32", 2, "row 1, value 1: expected FP32, got '1,5'", None),
    ("1,,3", "FP32", 2, "row 1, value 2: expected FP32, got ''", None),
    ("1,2,", "FP32", 2, "row 1, value 3: expected FP32, got ''", None),
    ('"a ""b""\nc", d\n', "BYTES", 2, '["a \\"b\\"\\nc", "d"]', [1, 2]),
    ('"1" ,"2"\r\n3, 4\r\n', "FP32", 2, "[1, 2, 3, 4]", [2, 2]),
]


async def test_text_of_the_form_becomes_a_tensor_without_a_change_of_value(browser: Browser) -> None:
    script = """async (cases) => {
        const { parseValues } = await import("/console/assets/tensors.js");
        return cases.map(([text, datatype, rank]) => {
            try { const { data, shape } = parseValues(text, datatype, rank); return [data, shape]; }
            catch (error) { return [error.message, null]; }
        });
    }"""
    await browser.open("/")
    found = await browser.page.evaluate(script, [list(case[:3]) for case in VALUES])
    assert found == [list(case[3:]) for case in VALUES]


# Four colours, no two channels of which are equal.
CORNERS = {(0, 0): (10, 20, 30), (1, 0): (40, 50, 60), (0, 1): (70, 80, 90), (1, 1): (100, 110, 120)}
SMALL = png(2, 2, lambda x, y: CORNERS[x, y])


def upload(name: str, content: bytes, media_type: str) -> dict[str, Any]:
    return {"name": name, "mimeType": media_type, "buffer": content}


async def test_pictures_are_sent_and_shown(browser: Browser) -> None:
    page = browser.page
    await browser.open("/#/models/Mirror")
    await page.set_input_files("input[type=file]", upload("corners.png", SMALL, "image/png"))
    await page.wait_for_selector("text=corners.png: 2 x 2")
    await browser.press("Run")
    output = page.get_by_label("Output mirrored")
    await output.get_by_role("img").wait_for()
    shown = await output.locator("canvas").evaluate("(c) => [...c.getContext('2d').getImageData(0, 0, 2, 2).data]")
    expected = [[*CORNERS[x, y], 255] for y in (0, 1) for x in (1, 0)]
    assert shown == [value for pixel in expected for value in pixel]
    await output.get_by_role("button", name="Values").click()
    values = [value for y in (0, 1) for x in (1, 0) for value in CORNERS[x, y]]
    assert await output.locator("pre").inner_text() == " ".join(map(str, values))
    gradient = png(96, 64, lambda x, y: (2 * x, 3 * y, 90))
    await page.set_input_files("input[type=file]", upload("sunset.png", gradient, "image/png"))
    await page.wait_for_selector("text=sunset.png: 96 x 64")
    await browser.press("Run")
    await page.wait_for_selector("text=UINT8 [1, 64, 96, 3]")
    await browser.keep("pictures")


async def test_a_dropped_picture_becomes_planes_of_floats(browser: Browser) -> None:
    page = browser.page
    await browser.open("/#/models/Planes")
    await page.wait_for_selector("fieldset")
    transfer = await page.evaluate_handle(
        """(bytes) => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([new Uint8Array(bytes)], "large.png", { type: "image/png" }));
            return transfer;
        }""",
        [*png(4, 4, lambda x, y: CORNERS[x // 2, y // 2])],
    )
    await page.dispatch_event("fieldset", "drop", {"dataTransfer": transfer})
    await page.wait_for_selector("text=large.png: 2 x 2, from 4 x 4")
    await browser.press("Run")
    output = page.get_by_label("Output values")
    await output.get_by_role("button", name="Table").click()
    found = [float(text) for text in await output.locator("td").all_inner_texts()]
    planes = [CORNERS[x, y][channel] / 255 for channel in range(3) for y in (0, 1) for x in (0, 1)]
    assert found == pytest.approx(planes, abs=1e-6)
    await page.get_by_label("values of a pixel").select_option("ImageNet mean and deviation")
    await browser.press("Run")
    await output.get_by_role("button", name="Table").click()
    normalized = str((10 / 255 - 0.485) / 0.229)[:6]
    await output.locator("td", has_text=normalized).wait_for()
    await page.set_input_files("input[type=file]", upload("notes.png", b"no picture", "image/png"))
    await page.wait_for_selector("text='notes.png' is not a picture that this browser can read")


async def test_the_first_request_runs_with_several_free_axes(browser: Browser) -> None:
    await browser.open("/#/models/Detector")
    await browser.page.get_by_text("Numbers instead of a picture").click()
    shape = browser.page.get_by_label("shape")
    assert await shape.input_value() == "1, 3, 32, 32"
    await browser.press("Run")
    await browser.has_texts(browser.page.get_by_label("Output sides").locator("td"), ["32", "32"])
    await shape.fill("")
    await browser.press("Run")
    await browser.page.get_by_text("expected shape [-1, 3, -1, -1], got [3072]: type the shape").wait_for()


async def test_pixels_that_do_not_fit_the_datatype_are_not_sent(browser: Browser) -> None:
    script = """async (cases) => {
        const { pictureTensor } = await import("/console/assets/images.js");
        const picture = { width: 1, height: 1, rgba: new Uint8ClampedArray([0, 127, 200, 255]) };
        return cases.map(([datatype, values]) => {
            const settings = { layout: "NHWC", values };
            try { return [...pictureTensor([picture], { shape: [1, 1, 3], datatype }, settings).bytes]; }
            catch (error) { return error.message; }
        });
    }"""
    await browser.open("/")
    cases = [(t, v) for v, t in (
        ("0..255", "UINT8"), ("-128..127", "INT8"), ("0..1", "INT8"), ("0..255", "INT8"), ("-1..1", "UINT8"),
    )]  # fmt: skip
    assert await browser.page.evaluate(script, cases) == [
        [0, 127, 200],
        [128, 255, 72],
        [0, 0, 1],
        "the pixel value 200 does not fit INT8",
        "the pixel value -1 does not fit UINT8",
    ]


async def test_pictures_in_base64_are_shown_and_other_text_is_not(browser: Browser) -> None:
    page = browser.page
    encoded = base64.b64encode(SMALL).decode()
    await browser.open("/#/models/Echo")
    await page.fill("textarea", encoded)
    await browser.press("Run")
    picture = page.get_by_role("img", name="Picture 1 of text")
    await picture.wait_for()
    assert await picture.evaluate("(e) => e.decode().then(() => [e.naturalWidth, e.naturalHeight])") == [2, 2]
    for text in (f"{encoded}\nplain", f"{encoded}#fragment", "data:image/svg+xml,<svg/>"):
        await page.fill("textarea", text)
        await browser.press("Run")
        await page.get_by_label("Output text").get_by_text(text.splitlines()[-1]).wait_for()
        assert await page.locator("img").count() == 0


async def test_files_are_bytes_and_tables(browser: Browser) -> None:
    page = browser.page
    await browser.open("/#/models/Sizes")
    await page.set_input_files("input[type=file]", upload("blob.bin", bytes(range(256)), "application/octet-stream"))
    await page.wait_for_selector("text=blob.bin, 256 bytes")
    await browser.press("Run")
    size = page.get_by_label("Output size")
    await browser.has_texts(size.locator("td"), ["256"])
    await browser.press("Remove")
    await page.set_input_files("input[type=file]", upload("lines.csv", b"one\nthree", "text/csv"))
    await browser.press("Run")
    await size.get_by_text("INT64 [2]").wait_for()
    await browser.has_texts(size.locator("td"), ["3", "5"])


async def test_graphs_are_drawn_and_listed(browser: Browser) -> None:
    page = browser.page
    await browser.open("/#/models/kinetics", "Graph")
    await page.get_by_role("img", name="Graph of kinetics: 4 nodes, 6 edges").wait_for()
    assert sorted(await page.locator("svg.graph .node text:first-of-type").all_text_contents()) == [
        "energy",
        "speed",
        "square",
        "weight",
    ]
    assert await page.locator("svg.graph .edge").count() == 6
    heights = await page.locator("svg.graph .edge").evaluate_all(
        "(edges) => edges.map((e) => e.getPointAtLength(e.getTotalLength()).y - e.getPointAtLength(0).y)"
    )
    assert all(height > 0 for height in heights), "an edge runs upwards"
    rows = page.get_by_role("table", name="Edges").locator("tbody tr")
    assert "speed.0\tsquare.0\t2" in await rows.all_inner_texts()
    await browser.keep("graph")
    await browser.open("/#/models/payroll/1", "Graph")
    await page.get_by_role("img", name="Graph of payroll: 2 nodes, 5 edges").wait_for()
    assert "Wage (1).wage\tWage (2).hours\tgross" in await rows.all_inner_texts()
    assert await page.locator("svg.graph .label").all_text_contents() == ["time", "price", "gross", "price", "total"]


async def test_a_request_is_found_by_its_id(browser: Browser) -> None:
    page = browser.page
    await browser.open("/#/models/Table")
    await browser.press("Run")
    link = page.locator("a[href^='#/requests/']")
    request_id = await link.inner_text()
    await link.click()
    await page.get_by_role("table", name="Where the time went").wait_for()
    facts = await page.inner_text("dl.facts")
    assert "POST /v2/models/Table/infer" in facts
    assert "200" in facts
    assert "not traced" in facts
    await browser.keep("request")
    await browser.open("/#/requests")
    await page.get_by_role("link", name=request_id).wait_for()
    await browser.keep("requests")
    await page.fill("input[name=id]", "unknown/id")
    await browser.press("Find the id")
    await page.wait_for_selector("text=no request 'unknown/id' among the last 50")


async def test_names_and_outputs_of_a_model_stay_text(browser: Browser) -> None:
    page = browser.page
    await browser.open("/#/models/Hostile")
    await page.wait_for_selector("textarea")
    for tab in ("Code", "Try it"):
        await page.get_by_role("tab", name=tab).click()
        assert HOSTILE in await browser.panel()
    await browser.press("Run")
    await page.get_by_text("</pre><script>document.title = 'x'</script>").first.wait_for()
    await page.fill("textarea", "fail")
    await browser.press("Run")
    await page.get_by_text("</p><script>document.title = 'x'</script>").wait_for()
    await browser.open(f"/#/models/{HOSTILE}")
    await page.wait_for_selector("p.error")
    await browser.open(f"/#/requests/{HOSTILE}")
    await page.wait_for_selector("p.error")
    assert await page.title() == f"{HOSTILE} - Dragoman"
    assert await page.locator("img").count() == 0


async def run_shell(script: str) -> bytes:
    process = await asyncio.create_subprocess_exec("bash", "-c", script, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    return output


async def test_a_snippet_runs_for_any_name_of_a_tensor(browser: Browser) -> None:
    await browser.open("/#/models/Hostile", "Code")
    snippet = await browser.page.inner_text("pre.code")
    output = await run_shell(snippet.replace("curl", "curl -s", 1))
    assert json.loads(output)["outputs"][0]["datatype"] == "BYTES", snippet


async def test_the_first_request_of_a_simulator_is_that_of_its_protocol(browser: Browser) -> None:
    await browser.open("/#/models/energy", "Code")
    snippet = await browser.page.inner_text("pre.code")
    answers = [
        json.loads(await run_shell(line.replace("curl", "curl -s", 1)))["output"] for line in snippet.splitlines()
    ]
    assert answers == [[[4]], [2, 3]], snippet


async def test_a_snippet_is_copied_where_pages_have_no_clipboard(browser: Browser) -> None:
    """Browsers give `navigator.clipboard` to pages of https and localhost only."""
    page = browser.page
    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await browser.open("/#/models/Table", "Code")
    take = "Object.defineProperty(navigator, 'clipboard', { value: undefined, configurable: true })"
    await page.evaluate(f"() => {{ window.clipboard = navigator.clipboard; {take}; }}")
    await browser.press("Copy")
    await page.get_by_role("button", name="Copied").wait_for()
    assert await page.evaluate("() => clipboard.readText()") == await page.inner_text("pre.code")
    await page.evaluate("() => void delete navigator.clipboard")


async def test_a_simulator_and_its_gradient(browser: Browser) -> None:
    page = browser.page
    await browser.open("/#/models/energy", "Simulator")
    await page.get_by_label("value of x[0]").fill("2")
    await page.keyboard.press("Enter")
    await browser.has_texts(page.locator("td.number"), ["7", "4", "3"])  # 2^2 + 3, and its gradient
    await browser.press("Check")
    await page.wait_for_selector("text=differs from central differences")
    assert "too much" not in await browser.panel()
    values = [float(text) for text in await page.locator(".bars td.number").all_inner_texts()]
    assert values == pytest.approx([7, 4, 4, 3, 3], abs=1e-4)
    await page.get_by_role("button", name="Plot", exact=True).click()
    await page.get_by_role("button", name="Table of output_0 along x[0]").click()
    rows = page.get_by_label("Values of output_0 along x[0]").locator("tbody tr")
    found = [[float(cell) for cell in (await row.inner_text()).split()] for row in await rows.all()]
    assert len(found) == 25
    assert found[0] == [-5, 28, -21]  # x^2 + 3, and the tangent at 2
    assert found[-1] == [5, 28, 19]
    await browser.open("/#/models/decay", "Simulator")
    await page.get_by_role("img", name="output_0. 0.368 to 1").wait_for()
    await page.get_by_text("Ranges of the sliders").click()
    await page.get_by_label("least x[1]").fill("0")
    await page.get_by_label("greatest x[1]").fill("2")
    await page.get_by_label("x[1]", exact=True).press("End")
    await page.get_by_role("img", name="output_0. 0.135 to 1").wait_for()
    await browser.press("Check")
    await page.get_by_role("button", name="Plot", exact=True).click()
    await page.get_by_role("img", name="sum of output_0 along x[0]").wait_for()
    await browser.keep("simulator")


async def test_a_wrong_gradient_is_reported(browser: Browser) -> None:
    page = browser.page
    await browser.open("/#/models/Wrong", "Simulator")
    await browser.press("Check")
    await page.wait_for_selector("text=differs from central differences by 5.0e-1 of the largest component: too much")


async def test_live_plots(browser: Browser) -> None:
    page = browser.page
    await browser.open("/#/live")
    await page.wait_for_selector("figure .chart svg")
    # One sample would leave an axis of years.
    script = "() => import('/console/assets/plot.js').then(({ timeRange }) => timeRange([1000]))"
    assert await page.evaluate(script) == [970, 1000]
    missing = "() => fetch('/v2/models/none/infer', { method: 'POST', body: '{\"inputs\": []}' }).then((r) => r.status)"
    assert await page.evaluate(missing) == 404
    await page.get_by_role("table", name="Errors since the start").get_by_text("status 404").first.wait_for()
    titles = await page.locator("figcaption b").all_inner_texts()
    assert titles == ["Requests", "Latency", "Calls", "CPU of the server process", "Memory of the server process"]
    units = page.locator("figcaption .unit")
    assert await units.all_inner_texts() == ["/s", "ms", "cores", "MiB"]
    for axis in await page.locator("figure .chart svg").all():
        assert await axis.locator("text[text-anchor=end]").first.text_content() == "0"
    await page.get_by_role("button", name="Table of Requests").click()
    assert await page.locator("figure").first.locator("tbody tr").count() >= 1
    models = page.get_by_role("table", name="Models in the last two seconds")
    assert await models.locator("tbody tr").count() == len(MODELS) + 2
    await browser.keep("live")
    script = """async () => {
        const { increase, parseMetrics, quantile } = await import("/console/assets/metrics.js");
        const samples = parseMetrics('# HELP a\\na_total{model="x\\\\"y",le="+Inf"} 3\\n');
        const [before, after] = [[[1, 0], [2, 0], [Infinity, 0]], [[1, 1], [2, 3], [Infinity, 4]]];
        const quantiles = [quantile(0.5, before, after), quantile(0.99, before, after), quantile(0.5, after, after)];
        const restarted = increase([{ name: "a_total", labels: {}, value: 10 }], samples, "a_total");
        return [samples[0].labels.model, samples[0].value, ...quantiles, restarted];
    }"""
    assert await page.evaluate(script) == ['x"y', 3, 1.5, 2, None, 3]


# --- for everybody who cannot see the page, or has no mouse --------------------------------------------------


async def test_no_view_has_a_violation_that_axe_finds(browser: Browser) -> None:
    page = browser.page
    found: list[str] = []
    await browser.open("/#/models/Wage", "Try it")
    await browser.press("Run")  # there is a recent request, at least
    await page.wait_for_selector("section.output")
    for address, tab, selector in (
        ("/", "", "li.model"),
        ("/#/requests", "", "table.models"),
        ("/#/live", "", "figure .chart svg"),
        ("/#/models/kinetics", "Graph", "svg.graph"),
        ("/#/models/Table", "Code", "pre.code"),
        ("/#/models/decay", "Simulator", "figure .chart svg"),
        ("/#/models/Wage", "Try it", ".cells input"),
    ):
        await browser.open(address, tab)
        await page.wait_for_selector(selector)
        if tab == "Simulator":
            await browser.press("Check")
            await page.wait_for_selector("text=differs from central differences")
        if tab == "Try it":
            await browser.press("Run")
            await page.wait_for_selector("section.output")
        found += await browser.find_violations()
    await page.locator("a[href^='#/requests/']").click()
    await page.wait_for_selector("table.timeline")
    assert found + await browser.find_violations() == []


async def test_a_walk_with_the_keyboard_only(browser: Browser) -> None:
    page = browser.page
    press = page.keyboard.press
    await browser.open("/")
    await page.wait_for_selector("li.model")
    visited = []
    for _ in range(6):
        await press("Tab")
        visited.append(await browser.focused())
    assert visited == ["a Skip to the content", "a Dragoman", "a Models", "a Live", "a Requests", "a API"]
    while await browser.focused() != "a Table":
        await press("Tab")
    outline = await page.evaluate("() => getComputedStyle(document.activeElement, '::after').outlineStyle")
    assert outline == "solid", "the focus is not visible"
    await press("Enter")
    await page.wait_for_selector("[role=tab]")
    assert await page.evaluate("() => document.activeElement.id") == "main"
    assert await page.title() == "Table - Dragoman"
    while await browser.focused() != "button Try it":
        await press("Tab")
    await press("ArrowRight")
    assert await browser.focused() == "button Code"
    await page.wait_for_selector("pre.code")
    await press("Home")
    while await browser.focused() != "textarea values: rows of a table, or JSON":
        await press("Tab")
    await press("Control+a")
    await page.keyboard.type("4 5 6")
    while await browser.focused() != "button Run":
        await press("Tab")
    await press("Space")
    await browser.has_texts(page.get_by_label("Output sum").locator("td"), ["15"])
    while not (await browser.focused()).startswith("a ") or await browser.focused() == "a API":
        await press("Tab")
    await press("Enter")
    await page.get_by_role("table", name="Where the time went").wait_for()
