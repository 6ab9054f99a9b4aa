"""A datatype that is added by one line of the table is served inline, in worker processes and by each protocol."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINE = 'FP8 = Datatype("FP8", np.dtype(ml_dtypes.float8_e4m3fn), 1, "float")\n'
CHECKS = Path(__file__).with_name("new_datatype_checks.py")
NAMES = ("rest_json", "rest_binary", "grpc_raw", "grpc_typed", "client_rest", "client_grpc", "asgi", "with_text")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run all checks in a process whose table has one line more; return the error of each, "" for those that pass."""
    source = tmp_path_factory.mktemp("source")
    link_except(ROOT / "src", source, ["dragoman", "core", "datatypes.py"])
    table = (ROOT / "src" / "dragoman" / "core" / "datatypes.py").read_text()
    before, bf16, after = table.partition("BF16 = Datatype(")
    (source / "dragoman" / "core" / "datatypes.py").write_text(before + LINE + bf16 + after)
    environment = {**os.environ, "PYTHONPATH": str(source)}
    command = [sys.executable, str(CHECKS), str(source)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    outcomes: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return outcomes


def link_except(folder: Path, target: Path, path: list[str]) -> None:
    """Link what is in a folder, but for one path, whose folders are made."""
    target.mkdir(exist_ok=True)
    for each in folder.iterdir():
        if each.name == path[0] and each.is_dir():
            link_except(each, target / each.name, path[1:])
        elif each.name not in (path[0], "__pycache__"):
            (target / each.name).symlink_to(each)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model", ["Inline", "Apart"])
def test_a_datatype_is_one_line(outcomes: dict[str, str], name: str, model: str) -> None:
    assert outcomes[f"{name} {model}"] == ""


@pytest.mark.parametrize("name", ["rounding", "overflow", "infinity"])
def test_values_are_rounded_to_nearest_or_rejected(outcomes: dict[str, str], name: str) -> None:
    assert outcomes[f"{name} Inline"] == ""


def test_the_datatype_is_in_metadata_and_openapi(outcomes: dict[str, str]) -> None:
    assert outcomes["described Inline"] == ""
