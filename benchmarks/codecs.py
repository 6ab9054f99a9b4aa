"""Time to encode and decode a data frame, an array and strings, compared with the codecs of MLServer.

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

CASES = {"frame": "DataFrame 10,000 x 10", "array": "FP32 1000 x 1000", "strings": "10,000 strings"}
_TIMES = Path(__file__).with_name("codec_times.py")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codecs", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round, to check that it works")
    parser.add_argument("--install-peer", action="store_true", help="install mlserver into its own environment")
    options = parser.parse_args(arguments)
    rounds, times = (1, 1) if options.quick else (5, 7)
    interpreters = {"dragoman": Path(sys.executable)}
    if (found := peer.mlserver_python(install=options.install_peer)) is not None:
        interpreters["mlserver"] = found
    rows = list(measure_cases(interpreters, rounds, times))
    results = {"machine": machine.machine(), "versions": machine.versions(), "rows": rows}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "codecs.json").write_text(json.dumps(results, indent=2))
    print(machine.describe() + "\n\n" + table(rows))
    if "mlserver" not in interpreters:
        print("\nmlserver is not installed, so it is left out; --install-peer installs it into its own environment")


def measure_cases(interpreters: dict[str, Path], rounds: int, times: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each round, package and encoding. The packages take turns."""
    with contextlib.ExitStack() as running:
        sides = {name: running.enter_context(measuring_process(name, path)) for name, path in interpreters.items()}
        for case in CASES:
            for turn in range(rounds):
                for side, measure in sides.items():
                    response = measure(case, times)
                    for encoding, found in response["encodings"].items():
                        assert found["values"] == response["expected"], f"{side}: {case} was changed by {encoding}"
                        yield (
                            {"case": case, "round": turn, "side": side, "encoding": encoding}
                            | {key: statistics.median(found[key]) for key in ("encode_ms", "decode_ms")}
                            | {"bytes": found["bytes"]}
                        )


@contextlib.contextmanager
def measuring_process(side: str, interpreter: Path) -> Iterator[Any]:
    """Run a process that measures one package; yield a function that requests a measurement."""
    # Without -P the folder of the script would be on sys.path, where modules have names of the standard library.
    command = [str(interpreter), "-P", "-W", "ignore", str(_TIMES), side]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        requests, responses = child.stdin, child.stdout

        def measure(case: str, times: int) -> Any:
            requests.write(json.dumps({"case": case, "times": times}) + "\n")
            requests.flush()
            line = responses.readline()
            if not line:
                raise RuntimeError(f"the process of {side} ended; see its output above")
            return json.loads(line)

        yield measure
        requests.close()


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return medians of the rounds, and the speed relative to JSON of mlserver: medians of the ratios in each round."""
    lines = ["| value | | bytes | encode ms | decode ms | times as fast: encode | decode | both |"]
    lines += ["|---|---|---:|---:|---:|---:|---:|---:|"]
    for case, side, encoding in dict.fromkeys((r["case"], r["side"], r["encoding"]) for r in rows):
        group, beside = _group(rows, case, side, encoding), _group(rows, case, "mlserver", "JSON")
        cells = [CASES[case], f"{side}, {encoding}", f"{group[0]['bytes']:,}"]
        cells += [f"{statistics.median(r[key] for r in group):.2f}" for key in ("encode_ms", "decode_ms")]
        for keys in (("encode_ms",), ("decode_ms",), ("encode_ms", "decode_ms")):
            cells.append(_times_as_fast(group, beside, keys) if side != "mlserver" else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _times_as_fast(rows: Sequence[dict[str, Any]], beside: Sequence[dict[str, Any]], keys: Sequence[str]) -> str:
    pairs = zip(rows, beside, strict=False)
    ratios = [sum(other[key] for key in keys) / sum(row[key] for key in keys) for row, other in pairs]
    return f"{statistics.median(ratios):,.1f}" if ratios else "-"


def _group(rows: Sequence[dict[str, Any]], case: str, side: str, encoding: str) -> list[dict[str, Any]]:
    return [row for row in rows if (row["case"], row["side"], row["encoding"]) == (case, side, encoding)]


if __name__ == "__main__":
    main()
