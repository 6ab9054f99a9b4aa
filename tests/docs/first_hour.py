"""Follow docs/first-hour.md in a real terminal and a real browser, and measure each task.

usage: scripts/first-hour [--only N,...] [--page FILE] [FOLDER]

Nothing is run but what the page has: its files are written, its `bash` blocks are typed into two terminals, the lines
of its `text` blocks must appear, and each address after "Open" must show the words in bold. Terminals are recorded and
screenshots kept in FOLDER (build/first-hour). The variable CONTAINER_BUILD_OPTIONS is added to `podman build`. Exit
status: 1 if a task fails or takes too long (a minute; two for the chat and the container), 2 for wrong arguments.
"""

import argparse
import fcntl
import json
import os
import pty
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "first-hour.md"
LIMIT_S = 60.0
LONG_S = 120.0
LONG_TASKS = (5, 11)  # the chat and the container
READY = "Ctrl-C stops"
READY_AS_JSON = '"message": "ready'  # the log of the image
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ENGINE = shutil.which("podman")

Kind = Literal["file", "commands", "expected", "open"]
_STEP = re.compile(
    r"^`(?P<file>[\w./-]+)`:\n\n```\w+\n(?P<text>.*?)^```"
    r"|^```bash\n(?P<commands>.*?)^```"
    r"|^```text\n(?P<expected>.*?)^```"
    r"|^Open <(?P<url>[^>]+)>(?P<shown>.*?)\n\n",
    re.S | re.M,
)
_ESCAPE = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[=>])")
_PROMPT = re.compile(r"\[(\d+)\] \$ ")


class TaskFailed(Exception):
    """What the page says did not happen."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the page: the file, commands, expected lines, or an address with the words that it shows."""

    kind: Kind
    text: str
    name: str = ""
    shown: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Task:
    number: int
    title: str
    steps: tuple[Step, ...]


@dataclass(slots=True)
class Result:
    number: int
    title: str
    seconds: float
    error: str = ""
    notes: list[str] = field(default_factory=list)


def read_tasks(page: str) -> list[Task]:
    """Return the tasks of a page: its numbered headings."""
    parts = re.split(r"^## (\d+)\. (.+)\n", page, flags=re.M)
    tasks = zip(parts[1::3], parts[2::3], parts[3::3], strict=True)
    return [Task(int(number), title, tuple(_steps(text))) for number, title, text in tasks]


def _steps(text: str) -> Iterator[Step]:
    for match in _STEP.finditer(text + "\n\n"):
        if match["file"] is not None:
            yield Step("file", match["text"], match["file"])
        elif match["commands"] is not None:
            yield Step("commands", match["commands"])
        elif match["expected"] is not None:
            yield Step("expected", match["expected"])
        else:
            yield Step("open", match["url"], shown=tuple(re.findall(r"\*\*(.+?)\*\*", match["shown"])))


class Terminal:
    """A bash in a terminal of its own."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._file, end = pty.openpty()
        # The leader of a session gets the first terminal that it opens; a fork here would copy the threads' locks.
        self._process = subprocess.Popen(
            ["bash", "-c", 'exec env PS1="$PROMPT" bash --norc --noprofile <>"$0" >&0 2>&0', os.ttyname(end)],
            cwd=folder,
            env={**environment, "PROMPT": "[$?] $ ", "TERM": "xterm"},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        fcntl.ioctl(self._file, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
        self._output = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.statuses(1, 20.0)
        os.close(end)

    def _read(self) -> None:
        with suppress(OSError):  # the other end is closed
            while data := os.read(self._file, 1 << 16):
                self._output += data

    @property
    def text(self) -> str:
        return _ESCAPE.sub("", self._output.decode(errors="replace")).replace("\r", "")

    def send(self, text: str) -> None:
        os.write(self._file, text.encode())

    def run(self, command: str, timeout_s: float) -> str:
        """Type a command, wait for its end, and return what it printed. Raises TaskFailed for another status than 0."""
        start, count = len(self.text), len(_PROMPT.findall(self.text))
        self.send(command + "\n")
        status = self.statuses(count + 1, timeout_s)[-1]
        printed = self.text[start:]
        if status != "0":
            raise TaskFailed(f"{command!r} exited with {status}: {printed[-2000:]}")
        return printed

    def statuses(self, count: int, timeout_s: float) -> list[str]:
        """Wait for this number of prompts; return the exit statuses that they show."""
        end_s = time.monotonic() + timeout_s
        while len(found := _PROMPT.findall(self.text)) < count:
            if time.monotonic() > end_s:
                raise TaskFailed(f"no prompt after {timeout_s:.0f} s: {self.text[-2000:]}")
            time.sleep(0.02)
        return found

    def wait_for(self, words: str, start: int, timeout_s: float) -> None:
        """Wait until the words appear after a position; a prompt there means that the command has ended."""
        end_s = time.monotonic() + timeout_s
        while words not in self.text[start:]:
            ended = len(_PROMPT.findall(self.text[start:])) > 0
            if ended or time.monotonic() > end_s:
                raise TaskFailed(f"{words!r} did not appear: {self.text[start:][-2000:]}")
            time.sleep(0.02)

    def close(self) -> None:
        with suppress(OSError):
            os.killpg(os.tcgetpgrp(self._file), signal.SIGTERM)
        self._process.send_signal(signal.SIGHUP)
        self._process.wait(20)
        os.close(self._file)
        self._reader.join(5)


class Walk:
    """Runs tasks in a folder, with a terminal for servers and one for other commands."""

    def __init__(self, folder: Path, output: Path, page: Any = None) -> None:
        self.folder, self.output, self._browser_page = folder, output, page
        self.port, grpc_port = _ports()
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("DRAGOMAN_", "PYTEST_"))}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        if self.port != 8080:
            environment |= {"DRAGOMAN_HTTP_PORT": str(self.port), "DRAGOMAN_GRPC_PORT": str(grpc_port)}
        self._environment = environment
        self.server = Terminal(folder, environment)
        self.client = Terminal(folder, environment)
        self._is_serving = False

    def close(self) -> None:
        for terminal in (self.server, self.client):
            terminal.close()

    def run(self, task: Task) -> Result:
        """Follow the steps of a task; the clock includes the start of its servers."""
        begin_s = time.monotonic()
        starts = len(self.server.text), len(self.client.text)
        result = Result(task.number, task.title, 0.0)
        try:
            self._follow(task, result)
            if not any(step.kind == "expected" for step in task.steps):
                raise TaskFailed("the page names no result")
        except TaskFailed as failure:
            result.error = str(failure)
        self._stop_server()
        result.seconds = time.monotonic() - begin_s
        limit_s = LONG_S if task.number in LONG_TASKS else LIMIT_S
        if not result.error and result.seconds > limit_s:
            result.error = f"took {result.seconds:.0f} s, expected at most {limit_s:.0f} s"
        texts = (self.server.text[starts[0] :], self.client.text[starts[1] :])
        name = f"{task.number:02d}.txt"
        (self.output / name).write_text("== terminal of the server ==\n{}\n\n== other terminal ==\n{}\n".format(*texts))
        return result

    def _follow(self, task: Task, result: Result) -> None:
        printed = ""
        for step in task.steps:
            match step.kind:
                case "file":
                    (self.folder / step.name).parent.mkdir(parents=True, exist_ok=True)
                    (self.folder / step.name).write_text(step.text)
                case "commands":
                    printed = "".join([self._type(command, result) for command in _commands(step.text)])
                case "expected":
                    _check(step.text, printed)
                case "open":
                    self._open(step, f"{task.number:02d}", result)

    def _type(self, command: str, result: Result) -> str:
        local = command.replace(":8080", f":{self.port}", 1 if command.startswith("podman ") else -1)
        engine = local.startswith("podman ")
        if engine and ENGINE is None:
            return self._without_engine(local, result)
        if local.startswith("podman build"):
            options = os.environ.get("CONTAINER_BUILD_OPTIONS", "")
            local = re.sub(r" \.$", f" {ROOT}", local.replace("build", f"build {options}", 1))
        if not local.startswith(("dragoman serve", "dragoman demo", "podman run")):
            return self.client.run(local, LONG_S)
        self._stop_server()
        start = len(self.server.text) + len(local)
        self.server.send(local + "\n")
        self._is_serving = True
        self.server.wait_for(READY_AS_JSON if engine else READY, start, LONG_S)
        return self.server.text[start:]

    def _without_engine(self, command: str, result: Result) -> str:
        """Run what an image would run, where no container engine is installed, and note what was not tried."""
        result.notes.append(f"not tried, no podman: {command}")
        if not command.startswith("podman run"):
            return ""
        image = command.split()[-1]
        variables, entry, health = _image(ROOT / "Containerfile")
        _, _, arguments = _containerfile(self.folder / image / "Containerfile")
        root = self.folder / image / "models"
        words = [*entry, *(str(root) if word == "/models" else word for word in arguments)]
        variables |= {"DRAGOMAN_HOST": "127.0.0.1", "DRAGOMAN_HTTP_PORT": str(self.port), "DRAGOMAN_GRPC_PORT": "-1"}
        variables["PATH"] = self._environment["PATH"]
        assignments = " ".join(f"'{name}={value}'" for name, value in variables.items())
        start = len(self.server.text)
        self.server.send(f"env -i {assignments} {' '.join(words)}\n")
        self._is_serving = True
        self.server.wait_for(READY_AS_JSON, start, LONG_S)
        check = subprocess.run([sys.executable, *health[1:]], env=variables, check=False, capture_output=True)
        if check.returncode:
            raise TaskFailed(f"the health check of the image failed: {check.stderr.decode()[-500:]}")
        result.notes.append("instead: entry point, variables and health check of the image, outside of a container")
        return self.server.text[start:]

    def _stop_server(self) -> None:
        if self._is_serving:
            count = len(_PROMPT.findall(self.server.text))
            self.server.send("\x03")
            self.server.statuses(count + 1, 60.0)
            self._is_serving = False

    def _open(self, step: Step, name: str, result: Result) -> None:
        if self._browser_page is None:
            result.notes.append(f"not opened, no browser: {step.text}")
            return
        page = self._browser_page
        page.goto("about:blank")
        page.goto(step.text.replace(":8080", f":{self.port}"))
        for words in step.shown:
            try:
                found = page.get_by_text(words).or_(page.get_by_role("tab", name=words)).first
                found.wait_for(timeout=30_000)
                if page.get_by_role("tab", name=words, exact=True).count():
                    page.get_by_role("tab", name=words, exact=True).click()
            except Exception as error:
                page.screenshot(path=self.output / f"{name}.png")
                raise TaskFailed(f"{step.text} does not show {words!r}: {str(error)[:500]}") from error
        page.wait_for_timeout(700)
        page.screenshot(path=self.output / f"{name}.png")


def _commands(text: str) -> list[str]:
    """Return the commands of a block; one may continue over lines within quotes."""
    commands: list[str] = []
    for line in text.splitlines():
        if commands and (commands[-1].count("'") % 2 or commands[-1].endswith("\\")):
            commands[-1] += "\n" + line
        elif line.strip() and not line.startswith("#"):
            commands.append(line)
    return commands


def _check(expected: str, printed: str) -> None:
    """Check that the lines appear in this order."""
    position = 0
    for line in filter(None, map(str.strip, expected.splitlines())):
        position = printed.find(line, position)
        if position < 0:
            raise TaskFailed(f"expected {line!r} in the output: {printed[-2000:]}")
        position += len(line)


def _containerfile(path: Path) -> tuple[dict[str, str], list[str], list[str]]:
    """Return variables, entry point and arguments of the last stage."""
    text = path.read_text().replace("\\\n", " ")
    stage = re.split(r"^FROM ", text, flags=re.M)[-1]
    words = " ".join(re.findall(r"^ENV (.*)$", stage, re.M)).split()
    found = {verb: json.loads(value) for verb, value in re.findall(r"^(ENTRYPOINT|CMD) (\[.*\])$", stage, re.M)}
    return dict(word.split("=", 1) for word in words), found.get("ENTRYPOINT", []), found.get("CMD", [])


def _image(path: Path) -> tuple[dict[str, str], list[str], list[str]]:
    """Return variables, entry point and health check of the server's image."""
    variables, entry, _ = _containerfile(path)
    health = re.findall(r"^HEALTHCHECK .*? CMD (\[.*\])$", path.read_text().replace("\\\n", " "), re.M)
    return variables, entry, json.loads(health[-1])


def _ports() -> tuple[int, int]:
    """Return 8080 and 8081, or other free ports if one is in use."""
    try:
        for port in (8080, 8081):
            socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
            return one.getsockname()[1], two.getsockname()[1]
    return 8080, 8081


def open_page(stack: ExitStack) -> Any:
    """Return a page of Chromium; None if it, or Playwright, is not installed."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    if CHROMIUM is None:
        return None
    driver = stack.enter_context(sync_playwright())
    browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
    stack.callback(browser.close)
    return browser.new_context(viewport={"width": 1200, "height": 850}).new_page()


def walk(page: Path, output: Path, only: Sequence[int] = (), *, with_browser: bool = True) -> list[Result]:
    """Follow the tasks of a page; return their results, each printed as it ends."""
    output.mkdir(parents=True, exist_ok=True)
    tasks = [task for task in read_tasks(page.read_text()) if not only or task.number in only]
    results = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name in ("examples", "Containerfile"):
            (folder / name).symlink_to(ROOT / name)
        walker = Walk(folder, output, open_page(stack) if with_browser else None)
        stack.callback(walker.close)
        for task in tasks:
            result = walker.run(task)
            results.append(result)
            print(f"{result.seconds:6.1f} s  {'failed' if result.error else 'done  '}  {task.number}. {task.title}")
            print("".join(f"          {line}\n" for line in [*result.notes, *result.error.splitlines()]), end="")
            sys.stdout.flush()
    fields = ("number", "title", "seconds", "error", "notes")
    (output / "results.json").write_text(json.dumps([{f: getattr(r, f) for f in fields} for r in results], indent=2))
    return results


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/first-hour", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", default=ROOT / "build" / "first-hour", type=Path)
    parser.add_argument("--only", default="", metavar="N,...", help="numbers of the tasks (default: all)")
    parser.add_argument("--page", default=PAGE, type=Path, help="another page")
    arguments = parser.parse_args()
    try:
        numbers = {task.number for task in read_tasks(arguments.page.read_text())}
    except OSError as error:
        parser.error(f"--page: '{error.filename}' cannot be read: {error.strerror}")
    wrong = [word for word in filter(None, arguments.only.split(",")) if word not in map(str, numbers)]
    if not numbers:
        parser.error(f"--page: expected numbered tasks in '{arguments.page}'")
    if wrong:
        parser.error(f"--only: expected numbers of tasks, {min(numbers)} to {max(numbers)}, got {wrong[0]!r}")
    only = [int(number) for number in filter(None, arguments.only.split(","))]
    results = walk(arguments.page, arguments.folder.resolve(), only)
    failed = [result for result in results if result.error]
    print(f"{len(results) - len(failed)} of {len(results)} tasks; terminals and screenshots in {arguments.folder}")
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main())
