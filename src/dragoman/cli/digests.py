"""`dragoman digests`: the list of SHA-256 digests of model files."""

import argparse
import json

from dragoman.core.model_digests import write_digests

_EPILOG = """\
The list has the format of sha256sum, which can check it too: sha256sum --check models.sha256. A server that is started
with it loads no model of which a file is missing in the list or differs from it.

examples:
  dragoman digests models/ > models.sha256
  dragoman serve models/ --model-digests models.sha256

Exit status: 0 success, 2 if a file cannot be read.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.description = "Print the SHA-256 digest of each model file, for `dragoman serve --model-digests FILE`."
    parser.epilog = _EPILOG
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a file, or a folder of models")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    lines = list(write_digests(arguments.paths))
    print(json.dumps({"lines": lines}, indent=2) if arguments.json else "\n".join(lines))
    return 0
