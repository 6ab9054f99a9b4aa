"""The documentation site, built as `scripts/site` does."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import dragoman

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "site"), str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def builder() -> dict[str, Any]:
    """Return the functions of `scripts/site`."""
    program = (ROOT / "scripts" / "site").read_text()
    scope: dict[str, Any] = {"__name__": "site_builder", "__file__": str(ROOT / "scripts" / "site")}
    exec(compile(program, "scripts/site", "exec"), scope)
    return scope


def pages_in(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for item in nav if isinstance(nav, list) else []:
        for each in item.values():
            yield from pages_in(each)


@pytest.fixture(scope="module")
def listed() -> set[str]:
    return {*pages_in(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])}


def test_every_page_is_in_the_navigation(listed: set[str]) -> None:
    found = {
        "all-pages.md" if name == "README.md" else name
        for name in (str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))
    }
    assert found <= listed


def test_few_pages_are_seen_before_a_group_is_opened() -> None:
    """Sections of the menu are open, groups in them are closed."""
    sections = [value for item in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"] for value in item.values()]
    pages = [value for value in sections if isinstance(value, str)]
    for section in sections:
        if not isinstance(section, str):
            pages += [value for item in section for value in item.values() if isinstance(value, str)]
    assert 10 < len(pages) <= 20


def test_language_models_get_an_index_and_all_pages(tmp_path: Path) -> None:
    pages, site = tmp_path / "pages", tmp_path / "site"
    program = builder()
    program["assemble"](pages)
    shutil.copytree(pages, site)
    program["write_llms"](pages, site, "https://dragoman.example/docs/")
    text = (site / "llms.txt").read_text()
    assert text.startswith("# Dragoman\n\n> One `pip install` serves")
    named = re.findall(r"^- \[[^\]]+\]\(https://dragoman\.example/docs/([\w./-]+)\)", text, re.M)
    docs = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert docs | {"changelog.md", "security-policy.md", "why/README.md", "content-types/README.md"} <= {*named}
    assert "- [Console](https://dragoman.example/docs/console.md): see, try and watch models in a browser\n" in text
    assert "- [A canary](https://dragoman.example/docs/recipes/canary.md): two versions" in text
    full = (site / "llms-full.txt").read_text()
    for name in named:
        assert (site / name).read_text() in full, name
    assert "::: dragoman" not in full.partition("api.md")[0]


def test_every_page_is_built(site: Path, listed: set[str]) -> None:
    """Also checks the links of the built pages, as the command does."""
    built = {str(path.relative_to(site)) for path in site.rglob("*.html")}
    assert {re.sub(r"README$", "index", name.removesuffix(".md")) + ".html" for name in listed} <= built


def test_every_public_name_is_documented(site: Path) -> None:
    text = (site / "api.html").read_text()
    functions_and_classes = [name for name in dragoman.__all__ if callable(getattr(dragoman, name))]
    assert len(functions_and_classes) > 20
    for name in functions_and_classes:
        assert re.search(rf'<h2 id="dragoman[\w.]*\b{name}"', text), name
    assert "Return an ASGI application" in text


def test_pages_load_nothing_from_other_hosts_and_can_be_searched(site: Path) -> None:
    loaded = re.compile(r'<(?:script|img|link rel="(?:stylesheet|preload|preconnect)")[^>]*(?:src|href)="https?://')
    assert [str(page) for page in site.rglob("*.html") if loaded.search(page.read_text())] == []
    assert "scikit-learn" in (site / "search.json").read_text()


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#here">b</a><a href="c.html">c</a><a href="b.html#there">d</a>')
    (tmp_path / "b.html").write_text('<p id="here">')
    assert sorted(builder()["broken_links"](tmp_path)) == ["a.html: b.html#there", "a.html: c.html"]
