"""Mutation tests: the page agrees with the results, every survivor has a reason, mutants are as documented."""

import sys
from pathlib import Path

import pytest
from coverage import CoverageData

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.mutation import page  # noqa: E402
from benchmarks.mutation.baseline import runners_by_line  # noqa: E402
from benchmarks.mutation.mutants import Mutants  # noqa: E402
from benchmarks.mutation.results import RESULTS, Results, interval  # noqa: E402
from benchmarks.mutation.targets import TARGETS, Target  # noqa: E402


def test_the_page_agrees_with_the_results() -> None:
    assert page.section(Results.load(RESULTS)) in page.PAGE.read_text()


def test_every_target_reaches_its_score_and_every_survivor_has_a_reason() -> None:
    results = Results.load(RESULTS)
    assert set(results.targets) <= {target.name for target in TARGETS}
    assert results.good_enough()
    known = page.reasons()
    missing = [str(each) for each in results.survivors() if (each.module, each.before, each.after) not in known]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_the_tests_of_a_target_exist(target: Target) -> None:
    assert target.paths()
    assert [test for test in target.tests if not (ROOT / test).exists()] == []


def changed_lines(source: str, folder: Path) -> list[str]:
    """Return the changed lines of all mutants of a module."""
    path = folder / "module.py"
    path.write_text(source)
    mutants = Mutants(path, "module.py")
    results = (mutants.render(index) for index in range(len(mutants)))
    return [mutant.after for mutant in results if mutant is not None]


def test_mutants_change_one_thing(tmp_path: Path) -> None:
    assert sorted(changed_lines("def f(a, b):\n    return a < b and g(a, 1)\n", tmp_path)) == [
        "return a < b and g(1)",
        "return a < b and g(None, 1)",
        "return a < b and g(a, )",
        "return a < b and g(a, 2)",
        "return a < b and g(a, None)",
        "return a < b or g(a, 1)",
        "return a <= b and g(a, 1)",
    ]

    assert changed_lines("x = False\nf(a=False)\n", tmp_path) == ["x = True", "f(a=True)"]


@pytest.mark.parametrize(
    "source",
    [
        '"""Text."""\n',
        "import a.b\n",
        "def f(x: int | None): ...\n",
        "Key = tuple[int, ...]\n_Job = tuple[int, ...]\n",
        "T = TypeVar('T')\n",
        "log.warning('model %s', 1 + 2)\n",
        "@wrapped(1)\nclass A(B, frozen=True):\n    __slots__ = ('a',)\n",
        "assert x < 1\n",
        "zip(a, strict=True)\n",
        "len(a + b)\n",
        "cast(1 + 2, x)\n",
    ],
)
def test_code_without_behaviour_is_not_mutated(source: str, tmp_path: Path) -> None:
    assert [line for line in changed_lines(source, tmp_path) if line != "zip(None, strict=True)"] == []


def test_performance_thresholds_are_not_mutated(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("LONG = 8  # performance only: bytes\n_FEW = 2  # performance only: bytes\n")
    source = "_SMALL = 1 << 9  # performance only: bytes\ny = a if len(x) <= _SMALL else b\nz = len(x) > other.LONG\n"
    assert changed_lines(source, tmp_path) == ["y = None", "z = None"]
    choice = "_A = 3  # performance only: bytes\n_B = 4{}\nif len(x) > (_A if u else _B):\n    z()\n"
    assert "if len(x) >= (_A if u else _B):" not in changed_lines(
        choice.format("  # performance only: bytes"), tmp_path
    )
    assert "if len(x) >= (_A if u else _B):" in changed_lines(choice.format(""), tmp_path)
    assert "z = x >= _FEW" in changed_lines("_FEW = 3  # elements\nz = x > _FEW\n", tmp_path)


def test_lines_that_a_fixture_runs_are_those_of_all_tests_that_share_it(tmp_path: Path) -> None:
    data = CoverageData(str(tmp_path / ".coverage"))
    for context, line in (("a.py::one|setup", 1), ("a.py::two|run", 2), ("gone.py::three|setup", 3), ("", 4)):
        data.set_context(context)
        data.add_lines({str(tmp_path / "module.py"): [line]})
    data.write()
    found = runners_by_line(tmp_path / ".coverage", tmp_path, ["a.py::one", "a.py::two", "b.py::four"])
    expected = {1: {"a.py::one", "a.py::two"}, 2: {"a.py::two"}, 3: {"gone.py::three"}, 4: {""}}
    assert found == {"module.py": expected}


def test_the_interval_narrows_with_the_share_of_mutants_run() -> None:
    low, high = interval(90, 100, 1_000_000)
    assert (round(low, 3), round(high, 3)) == (0.826, 0.945)  # Wilson score interval, as tabulated
    assert interval(90, 100, 100) == (0.9, 0.9)
    assert interval(0, 0, 5) == (0.0, 1.0)
