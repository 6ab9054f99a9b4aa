"""What it costs to make bytes of a data frame, an array and strings, and to make these of the bytes.

usage: python -m benchmarks.codecs [--quick]
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine, peer
from benchmarks.processes import RESULTS, ROOT

WHATS = {"frame": "DataFrame 10,000 x 10", "array": "FP32 1000 x 1000", "strings": "10,000 strings"}
_TIMES = Path(__file__).with_name("codec_times.py")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codecs", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of one each, to see that it works")
    parser.add_argument("--install-peer", action="store_true", help="install mlserver into an environment of its own")
    given = parser.parse_args(arguments)
    rounds, times = (1, 1) if given.quick else (5, 7)
    interpreters = {"dragoman": Path(sys.executable)}
    if (found := peer.mlserver_python(install=given.install_peer)) is not None:
        interpreters["mlserver"] = found
    rows = list(measured(interpreters, rounds, times))
    results = {"machine": machine.machine(), "versions": machine.versions(), "rows": rows}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "codecs.json").write_text(json.dumps(results, indent=2))
    print(machine.described() + "\n\n" + table(rows))
    if "mlserver" not in interpreters:
        print("\nmlserver is not installed, so ours alone; --install-peer installs it into an environment of its own")


def measured(interpreters: dict[str, Path], rounds: int, times: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each round, side and way. The sides take turns."""
    with contextlib.ExitStack() as running:
        sides = {name: running.enter_context(measuring_process(name, path)) for name, path in interpreters.items()}
        for what in WHATS:
            for turn in range(rounds):
                for side, measure in sides.items():
                    answer = measure(what, times)
                    for way, found in answer["ways"].items():
                        assert found["values"] == answer["wanted"], f"{side}: {what} came back changed as {way}"
                        yield (
                            {"what": what, "round": turn, "side": side, "way": way}
                            | {key: statistics.median(found[key]) for key in ("encode_ms", "decode_ms")}
                            | {"bytes": found["bytes"]}
                        )


@contextlib.contextmanager
def measuring_process(side: str, interpreter: Path) -> Iterator[Any]:
    """Run a process that measures one side; yield the function that does it."""
    # Without -P its folder would come first, where files are called as modules of Python are.
    command = [str(interpreter), "-P", "-W", "ignore", str(_TIMES), side]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        requests, responses = child.stdin, child.stdout

        def measure(what: str, times: int) -> Any:
            requests.write(json.dumps({"what": what, "times": times}) + "\n")
            requests.flush()
            line = responses.readline()
            if not line:
                raise RuntimeError(f"the process of {side} ended; what it said stands above")
            return json.loads(line)

        yield measure
        requests.close()


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Medians of the rounds, and how many times as fast as mlserver's JSON: the median of the rounds' own ratios."""
    lines = ["| what | | bytes | encode ms | decode ms | times as fast: encode | decode | both |"]
    lines += ["|---|---|---:|---:|---:|---:|---:|---:|"]
    for what, side, way in dict.fromkeys((r["what"], r["side"], r["way"]) for r in rows):
        group, beside = _group(rows, what, side, way), _group(rows, what, "mlserver", "JSON")
        cells = [WHATS[what], f"{side}, {way}", f"{group[0]['bytes']:,}"]
        cells += [f"{statistics.median(r[key] for r in group):.2f}" for key in ("encode_ms", "decode_ms")]
        for keys in (("encode_ms",), ("decode_ms",), ("encode_ms", "decode_ms")):
            cells.append(_times_as_fast(group, beside, keys) if side != "mlserver" else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _times_as_fast(rows: Sequence[dict[str, Any]], beside: Sequence[dict[str, Any]], keys: Sequence[str]) -> str:
    pairs = zip(rows, beside, strict=False)
    ratios = [sum(other[key] for key in keys) / sum(row[key] for key in keys) for row, other in pairs]
    return f"{statistics.median(ratios):,.1f}" if ratios else "-"


def _group(rows: Sequence[dict[str, Any]], what: str, side: str, way: str) -> list[dict[str, Any]]:
    return [row for row in rows if (row["what"], row["side"], row["way"]) == (what, side, way)]


if __name__ == "__main__":
    main()
