"""The pictures of the pages are those that `scripts/screens` takes."""

import re
from pathlib import Path

from docs.screens import FOLDER, SCREENS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_every_picture_is_taken_by_the_script_and_shown_on_a_page() -> None:
    shown = {name for page in PAGES for name in re.findall(r"\bconsole/([\w-]+)\.png", page.read_text())}
    assert shown == {*SCREENS}
    assert {path.stem for path in FOLDER.iterdir()} == {*SCREENS}


def test_the_pictures_are_small() -> None:
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert sum(sizes.values()) < 1_000_000, sizes
