"""`dragoman check URL`: check that a server conforms to its protocols."""

import argparse

from dragoman.cli.connection import add_credentials

# The names of dragoman_check.conformance.runner.PROTOCOLS, which --help must not import; a test compares them.
PROTOCOL_NAMES = (
    "open-inference-rest", "open-inference-extensions", "open-inference-generate", "open-inference-grpc", "umbridge",
    "kserve-v1", "openai", "responses", "batches", "tgi", "lmi",
)  # fmt: skip

_EPILOG = """\
dragoman check URL sends requests for each clause of the protocols' documents to any server and reports, clause by
clause, what was sent, what was received, and whether the clause holds. Requests are derived from the model's metadata.
The server is not changed without --allow-changes.

examples:
  dragoman check http://127.0.0.1:8080
  dragoman check http://127.0.0.1:8080 --grpc 127.0.0.1:8081 --model iris --junit conformance.xml
  dragoman check http://127.0.0.1:4242 --protocol umbridge --only 'umbridge-error*'

Exit status: 0 if all checks pass, 1 if one fails, 2 if nothing could be checked.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.description = "Check that a server conforms to the specifications of its protocols."
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("url", metavar="URL", help="address of a server")
    add("--model", action="append", metavar="NAME", help="the model to check, if there are several; may be repeated")
    add("--config", default="{}", metavar="JSON", help="the config of every UM-Bridge call")
    add("--at", action="append", metavar="JSON", help="a point: one list of numbers for each input; may be repeated")
    add("--protocol", action="append", choices=PROTOCOL_NAMES, help="protocol to check; may be repeated")
    add("--only", action="append", metavar="PATTERN", help="clauses to check, such as rest-error-*; may be repeated")
    add("--grpc", default="", metavar="HOST:PORT", help="gRPC address (default: that of URL)")
    add("--request", default="", metavar="FILE", help="V2 request in JSON that the model accepts")
    add("--allow-changes", action="store_true", help="load and unload the model, upload files and run batches too")
    add_credentials(add)
    add("--timeout-s", type=float, default=30.0, metavar="S", help="time limit of one request (default 30)")
    add("--json", action="store_true", help="print the results as JSON")
    add("--junit", default="", metavar="FILE", help="write the results as JUnit XML")
    add("--strict", action="store_true", help="fail for recommendations too")
    add("--verbose", action="store_true", help="print every request and response")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    from dragoman_check.cli.conformance import check_server

    return check_server(arguments)
