"""Run a script that imports `mlserver`, where that package is not installed.

usage: python -m dragoman.runtimes.mlserver SCRIPT [ARGUMENT ...]
"""

import os
import runpy
import sys

from dragoman.runtimes.mlserver.model import install


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m dragoman.runtimes.mlserver SCRIPT [ARGUMENT ...]")
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    install()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
