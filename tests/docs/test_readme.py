"""The README: a first screen that fits a screen, and the whole page that can be read."""

from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()
FIRST, _, REST = README.partition("\n## ")


def test_the_first_screen_fits() -> None:
    assert len(FIRST.splitlines()) <= 50
    assert len(README.splitlines()) <= 160


def test_the_first_screen_has_the_command_for_a_smaller_pytorch() -> None:
    assert "`pip install torch --index-url https://download.pytorch.org/whl/cpu`" in FIRST


def test_the_first_screen_says_when_to_stay_with_what_one_uses() -> None:
    rows = [line.strip("| ").split(" | ") for line in FIRST.splitlines() if line.startswith("| ")]
    assert rows[0] == ["if you use", "you get here", "stay with it"]
    names = ("Ollama", "vLLM", "Triton", "MLServer", "KServe", "FastAPI", "BentoML", "LitServe")
    assert [row[0] for row in rows[1:]] == [*names, "Ray Serve", "TGI", "UM-Bridge", "Tesseract"]
    assert all(len(row) == 3 for row in rows)


def test_two_commands_are_enough_on_a_fresh_machine() -> None:
    assert "./scripts/demo " in REST
    assert "./scripts/test " in REST
