"""Tables of the state store have one owner each: another would warn of each of its rows, and leave it out."""

import re
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
_TABLE = re.compile(r'\btable\(\s*"([a-z_]+)"')


def test_each_table_is_asked_for_in_one_place() -> None:
    names = Counter(name for file in SOURCE.rglob("*.py") for name in _TABLE.findall(file.read_text()))
    assert {"models", "records", "service_jobs"} <= names.keys()
    assert [name for name, count in names.items() if count > 1] == []
