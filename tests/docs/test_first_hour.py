"""The page of twelve tasks: its form, and that following it finds what the page gets wrong."""

import re
from pathlib import Path

import pytest

from docs.first_hour import ROOT, read_tasks, walk

PAGE = (ROOT / "docs" / "first-hour.md").read_text()


def test_there_are_twelve_tasks_that_each_name_their_result() -> None:
    tasks = read_tasks(PAGE)
    assert [task.number for task in tasks] == [*range(1, 13)]
    for task in tasks:
        assert [step.kind for step in task.steps if step.kind in ("commands", "expected")][-2:] == [
            "commands",
            "expected",
        ], task.title
        assert all(step.shown for step in task.steps if step.kind == "open"), task.title
    # Nothing of a task is left out: each block is a step.
    fences = len(re.findall(r"^```\w+$", PAGE.partition("## 1.")[2], re.M))
    assert sum(step.kind != "open" for task in tasks for step in task.steps) == fences


WRONG = """\
## 1. Wrong result

```bash
dragoman --version
```

```text
dragoman 7
```

## 2. Command that fails

```bash
dragoman models http://127.0.0.1:1
```

```text
no
```

## 3. Server that does not start

```bash
dragoman serve none.onnx
```

```text
never
```

## 4. Nothing to see

```bash
dragoman --version
```

## 5. Right

`files/number.py`:

```python
print(6 * 7)
```

```bash
dragoman --version
python files/number.py
```

```text
dragoman 0
42
```
"""


def test_a_page_that_is_wrong_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(WRONG)
    results = walk(page, tmp_path / "out", with_browser=False)
    errors = [result.error for result in results]
    assert "expected 'dragoman 7' in the output" in errors[0]
    assert "exited with 2" in errors[1]
    assert "'Ctrl-C stops' did not appear" in errors[2]
    assert errors[3:] == ["the page names no result", ""]
    assert "\n42\n" in (tmp_path / "out" / "05.txt").read_text()
    assert "  5. Right" in capfd.readouterr().out
    assert results[4].seconds > 0


def test_a_server_is_started_and_stopped_as_the_page_says(tmp_path: Path) -> None:
    (result,) = walk(ROOT / "docs" / "first-hour.md", tmp_path, [3], with_browser=False)
    assert result.error == ""
    assert "ready in" in (tmp_path / "03.txt").read_text()


def test_a_task_may_not_take_longer_than_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("docs.first_hour.LIMIT_S", -1.0)
    page = tmp_path / "page.md"
    page.write_text("## 1. Quick\n\n```text\n```\n")
    (result,) = walk(page, tmp_path, with_browser=False)
    assert "expected at most -1 s" in result.error
