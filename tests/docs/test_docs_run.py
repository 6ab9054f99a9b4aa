"""The examples in the documentation work: Python code runs, servers start, requests succeed, links resolve."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.forked_process import TEXT, run_command
from e2e.server_process import ServerProcess

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
OTHER_PAGES = [
    ROOT / name
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "deploy/README.md", "benchmarks/README.md")
]
OTHER_PAGES += sorted((ROOT / "benchmarks" / "results").glob("*.md"))
_BLOCK = re.compile(r"(?:`([\w./-]+\.(?:py|toml|properties|jsonl))`:\n\n)?```(\w+)\n(.*?)```", re.S)


def blocks(page: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the file name before each code block, or "", its language and its text."""
    yield from _BLOCK.findall(page.read_text())


class Shell:
    """Run the commands of a page: a server in the background until the next one starts, curl against it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = 0
        self.server: ServerProcess | None = None
        self.imports: tuple[str, ...] = ()  # of servers

    def run(self, command: str) -> None:
        if command.startswith("dragoman serve"):
            self.serve(command.split()[2:])
        elif command.startswith("dragoman graph"):
            run_command(*command.split()[1:], folder=self.folder).check_returncode()
        elif command.startswith("curl"):
            self.curl(command)
        elif command.startswith("dragoman keys"):
            subprocess.run(f"{sys.executable} -m {command}", shell=True, cwd=self.folder, check=True)
        elif re.match(r"dragoman (batch|bench|check|doctor|infer|models)|python ", command):
            self.run_to_end(command)

    def run_to_end(self, command: str) -> None:
        """Run a command that exits by itself, with status 0."""
        command, _, output = command.partition("  #")[0].partition(" > ")
        words = command.replace("127.0.0.1:8080", f"127.0.0.1:{self.port}").split()
        words += ["--seconds", "0.2", "--warmup-s", "0"] if words[1:2] == ["bench"] else []
        if words[0] == "dragoman":
            process = run_command(*words[1:], folder=self.folder)
        else:
            process = subprocess.run([sys.executable, *words[1:]], cwd=self.folder, capture_output=True, text=True)
        assert process.returncode == 0, f"{command}: {process.stdout}{process.stderr}"
        if output:
            (self.folder / output).write_text(process.stdout)

    def serve(self, arguments: list[str]) -> None:
        self.stop()
        self.server = ServerProcess.on_free_ports(
            *arguments, "--grpc-port", "-1", folder=self.folder, imports=self.imports
        )
        self.port = self.server.http_port
        self.server.wait_until_ready()

    def curl(self, command: str) -> None:
        local = command.replace("127.0.0.1:8080", f"127.0.0.1:{self.port}")
        silent = local.replace("curl", "curl -sS --fail-with-body", 1)
        process = subprocess.run(silent, shell=True, cwd=self.folder, capture_output=True, check=True)
        assert process.stdout, f"no response to {command}"
        assert "error" not in json.loads(process.stdout), process.stdout

    def stop(self) -> None:
        if self.server is not None:
            server, self.server = self.server, None
            try:
                server.terminate()
                assert server.wait_for_exit(60) == 0
            finally:
                server.kill()


@pytest.fixture
def shell(tmp_path: Path, iris_onnx: bytes) -> Iterator[Shell]:
    (tmp_path / "iris.onnx").write_bytes(iris_onnx)
    (tmp_path / "models").mkdir()
    shutil.copy(tmp_path / "iris.onnx", tmp_path / "models")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    shell = Shell(tmp_path)
    yield shell
    shell.stop()


@pytest.fixture(scope="module")
def iris_onnx() -> bytes:
    from skl2onnx import to_onnx
    from sklearn.datasets import load_iris
    from sklearn.linear_model import LogisticRegression

    x, y = load_iris(return_X_y=True)
    model = LogisticRegression(max_iter=1000).fit(x, y)
    text: bytes = to_onnx(
        model, x[:1].astype("float32"), options={"zipmap": False}, target_opset=18
    ).SerializeToString()
    return text


@pytest.fixture(scope="module")
def my_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a tiny language model: its texts mean nothing."""
    from text_models import make_model

    return make_model(tmp_path_factory.mktemp("text") / "my-llama")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_page_works_as_written(page: Path, shell: Shell, request: pytest.FixtureRequest) -> None:
    if any(language == "sh" and "models/my-llama" in text for _, language, text in blocks(page)):
        shutil.copytree(request.getfixturevalue("my_llama"), shell.folder / "models" / "my-llama")
        shell.imports = TEXT
    for name, language, text in blocks(page):
        if name:
            (shell.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (shell.folder / name).write_text(text)
        elif language == "python":
            subprocess.run([sys.executable, "-W", "error", "-c", text], cwd=shell.folder, check=True)
        elif language == "sh":
            text = text.replace("\\\n", " ")
            for command in re.sub(r"'[^']*'", lambda m: m[0].replace("\n", " "), text).splitlines():
                shell.run(command)


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub generates them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", page.read_text()):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_page_is_in_the_index(page: Path) -> None:
    """Check that the index, or the index of the page's folder, links to the page."""
    docs = ROOT / "docs"
    if page not in (ROOT / "README.md", docs / "README.md"):
        index = docs / "README.md" if page.name == "README.md" or page.parent == docs else page.parent / "README.md"
        assert f"({page.relative_to(index.parent)})" in index.read_text()


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("migrate-from-*.md")), ids=lambda p: p.stem)
def test_a_migration_page_has_a_table_and_an_example(page: Path) -> None:
    text = page.read_text()
    assert "\n|---|---|\n" in text
    assert "dragoman serve" in text
    languages = {language for _, language, _ in blocks(page)}
    assert "sh" in languages
    assert "python" in languages or page.stem in ("migrate-from-tgi", "migrate-from-lmi")  # they serve folders


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_that_a_page_names_exist(page: Path) -> None:
    packages = [path.parent.name for path in (ROOT / "src" / "dragoman").glob("*/__init__.py")]
    named = re.findall(rf"(?<![\w/])((?:{'|'.join(packages)})/[\w/]+\.py)\b", page.read_text())
    assert [name for name in named if not (ROOT / "src" / "dragoman" / name).exists()] == []
