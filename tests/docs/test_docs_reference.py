"""The reference pages list exactly the endpoints, errors, datatypes and metrics that exist."""

import re
import tomllib
from pathlib import Path

from dragoman.assembly import Assembly, load_protocols
from dragoman.core import errors
from dragoman.core.datatypes import DATATYPES
from dragoman.processes.server_process import process_metrics
from dragoman.settings import Settings
from dragoman.system.trace_settings import TraceSettings
from dragoman.transports.recent_requests import RecentRequests

ROOT = Path(__file__).parents[2]
HTTP, GRPC = load_protocols(Settings(umbridge_shared_memory=True))
COLUMNS = {  # of the table in errors.md
    "Open Inference, REST": "Open Inference (V2)",
    "generate": "Open Inference generate",
    "OpenAI": "OpenAI",
    "TGI": "TGI",
    "LMI": "LMI",
    "UM-Bridge": "UM-Bridge",
}


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def rows(text: str) -> list[list[str]]:
    """Return the cells of all table rows, without the separator lines."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|") and "---" not in line]
    return [[cell.strip() for cell in line] for line in lines]


def expand(path: str) -> list[str]:
    """Return the path with and without its optional part in brackets."""
    if "[" not in path:
        return [path]
    return [re.sub(r"\[.*?\]", "", path), re.sub(r"[\[\]]", "", path)]


def test_endpoints() -> None:
    documented = [
        (row[0], path)
        for row in rows(page("endpoints.md"))
        if row[0].isupper()
        for quoted in re.findall(r"`(.+?)`", row[1])
        for path in expand(quoted)
    ]
    protocols = Assembly(Settings(), TraceSettings()).with_pages(HTTP, RecentRequests(0))
    routes = [(route.method, route.pattern) for protocol in protocols for route in protocol.routes]
    assert sorted(documented) == sorted(routes)


def test_grpc_methods() -> None:
    section = page("endpoints.md").split("GRPCInferenceService")[1].split("\n## ")[0]
    documented = [name for row in rows(section) for name in re.findall(r"`(\w+)`", row[0])]
    assert documented == [method.name for protocol in GRPC for method in protocol.methods]


def test_error_statuses() -> None:
    heading, *lines = (row for row in rows(page("errors.md")) if len(row) == 9)
    named = {protocol.name: protocol for protocol in HTTP}
    for line in lines:
        error = getattr(errors, line[0].strip("`"))("x")
        assert line[2] == GRPC[0].status(error)
        for column, name in COLUMNS.items():
            assert (line[0], column, line[heading.index(column)]) == (
                line[0],
                column,
                str(named[name].format_error(error, "").status),
            )
    classes = (value for value in vars(errors).values() if isinstance(value, type))
    kinds = {value.__name__ for value in classes if issubclass(value, errors.DragomanError)}
    bases = {"DragomanError", "CallerError", "ServerError", "PathNotFound"}
    assert {line[0].strip("`") for line in lines} == kinds - bases


def test_datatypes() -> None:
    documented = {row[0].strip("`"): row[1:3] for row in rows(page("datatypes.md"))[1:]}
    assert documented == {d.name: [f"`{d.dtype}`", str(d.size or "")] for d in DATATYPES.values()}


def test_metrics() -> None:
    metric = re.compile(r"\bdragoman_(?:calls?|model|server_process|text)_\w+")
    source = "".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
    composed = {family.name for family in process_metrics(())}  # their names are composed
    assert {*metric.findall(page("metrics.md"))} == {*metric.findall(source)} - {"dragoman_server_process_"} | composed


def test_the_picture_of_the_layers_names_packages_that_exist() -> None:
    source = ROOT / "src" / "dragoman"
    picture = page("architecture.svg")
    titles = [name for text in re.findall(r'font-weight="bold">(.+?)<', picture) for name in text.split(", ")]
    assert len(titles) > 10
    words = re.findall(r">([\w .·]+)<", picture)
    protocols, runtimes, libraries = (
        [name for line in words if line.startswith(first) for name in line.split(" · ")]
        for first in ("open_inference", "python", "codecs")
    )
    paths = [*titles, *(f"protocols/{name}" for name in protocols), *libraries]
    missing = [name for name in paths if not ((source / name).is_dir() or (source / f"{name}.py").exists())]
    assert sorted(missing) == ["clients", "features", "libraries"]
    features = {path.name for path in source.parent.glob("dragoman_*") if (path / "__init__.py").exists()}
    assert {word for word in words if word.startswith("dragoman_")} == features
    assert {"python", "onnx"} <= {*runtimes} <= {path.stem for path in (source / "runtimes").iterdir()} | {"..."}


def test_extras_are_installed_from_the_repository() -> None:
    """No package of this name is published, so that `pip install 'dragoman[text]'` finds none, or one of others."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")):
        text = path.read_text()
        assert "install 'dragoman" not in text, path
        for names in re.findall(r"install '\.\[([\w,-]+)\]'", text):
            assert {*names.split(",")} <= extras.keys(), path


def test_every_hook_is_documented() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    section = page("contributing.md").split("## Hooks")[1].split("\n## ")[0]
    documented = {group for row in rows(section) for group in re.findall(r"`(dragoman\.[\w.]+)`", row[0])}
    assert documented == {*groups}
