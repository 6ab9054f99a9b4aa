"""`dragoman check URL`: check that a server conforms to its protocols; `dragoman check derivatives MODEL`."""

import argparse

from dragoman.cli.connection import add_credentials
from dragoman.core.errors import InvalidInput

# The names of dragoman.conformance.runner.PROTOCOLS, which --help must not import; a test compares them.
PROTOCOL_NAMES = (
    "open-inference-rest", "open-inference-extensions", "open-inference-generate", "open-inference-grpc", "umbridge",
    "kserve-v1", "openai", "tgi", "lmi",
)  # fmt: skip

_EPILOG = """\
dragoman check URL sends requests for each clause of the protocols' documents to any server and reports, clause by
clause, what was sent, what was received, and whether the clause holds. Requests are derived from the model's metadata.
The server is not changed without --allow-changes.

dragoman check derivatives checks every output and input at every point, in random directions v and u and with random
weights s:
  apply_jacobian  each element of J v against central differences of the output: the smallest relative error of ten
                  step sizes, and the order at which errors fall (2 is expected; "exact" for linear functions)
  gradient        each element of Jᵀ s, and <v, Jᵀ s>, against central differences of <s, output>
  adjoint         <J v, s> = <v, Jᵀ s>
  apply_hessian   against central differences of the gradient
  symmetry        <u, H v> = <v, H u>

examples:
  dragoman check http://127.0.0.1:8080
  dragoman check http://127.0.0.1:8080 --grpc 127.0.0.1:8081 --model iris --junit conformance.xml
  dragoman check http://127.0.0.1:4242 --protocol umbridge --only 'umbridge-error*'
  dragoman check derivatives model.py:energy
  dragoman check derivatives examples/scientific --model beam --at '[[10, 10, ...]]' --plot beam.svg
  dragoman check derivatives http://127.0.0.1:4242 --model forward --config '{"level": 2}'

Exit status: 0 if all checks pass, 1 if one fails, 2 if nothing could be checked.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.usage = "dragoman check [options] URL\n       dragoman check derivatives [options] MODEL"
    parser.description = (
        "Check that a server conforms to the specifications of its protocols, or check the derivatives of a model."
    )
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("what", metavar="URL", help="address of a server, or the word derivatives")
    add("path", metavar="MODEL", nargs="?", default="", help="after derivatives: as for dragoman serve, or a server")
    add("--model", action="append", metavar="NAME", help="the model to check, if there are several; may be repeated")
    add("--config", default="{}", metavar="JSON", help="the config of every UM-Bridge call")
    add("--at", action="append", metavar="JSON", help="a point: one list of numbers for each input; may be repeated")
    _add_conformance_arguments(parser)
    _add_derivative_arguments(parser)


def _add_conformance_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("dragoman check URL").add_argument
    add("--protocol", action="append", choices=PROTOCOL_NAMES, help="protocol to check; may be repeated")
    add("--only", action="append", metavar="PATTERN", help="clauses to check, such as rest-error-*; may be repeated")
    add("--grpc", default="", metavar="HOST:PORT", help="gRPC address (default: that of URL)")
    add("--request", default="", metavar="FILE", help="V2 request in JSON that the model accepts")
    add("--allow-changes", action="store_true", help="load and unload the model too")
    add_credentials(add)
    add("--timeout-s", type=float, default=30.0, metavar="S", help="time limit of one request (default 30)")
    add("--json", action="store_true", help="print the results as JSON")
    add("--junit", default="", metavar="FILE", help="write the results as JUnit XML")
    add("--strict", action="store_true", help="fail for recommendations too")
    add("--verbose", action="store_true", help="print every request and response")


def _add_derivative_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("dragoman check derivatives").add_argument
    add("--points", type=int, default=5, metavar="N", help="number of random points, without --at (default 5)")
    add(
        "--spread",
        type=float,
        default=0.5,
        metavar="X",
        help="distance of random points from the model's default point, as logarithms of factors, or from zero; "
        "1/5 to 5 times X is tried (default 0.5)",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of points and directions (default 0)")
    add("--tolerance", type=float, default=1e-6, metavar="X", help="largest error of differences (default 1e-6)")
    add("--identity", type=float, default=1e-9, metavar="X", help="largest error of identities (default 1e-9)")
    add("--plot", metavar="FILE", help="plot errors by step size into an SVG file, or to the terminal with -")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    if arguments.what != "derivatives":
        if arguments.path:
            raise InvalidInput(f"expected one URL, got '{arguments.what}' and '{arguments.path}'")
        from dragoman.cli.conformance import check_server

        return check_server(arguments)
    if not arguments.path:
        raise InvalidInput("expected a model: dragoman check derivatives MODEL")
    if len(arguments.model or []) > 1:
        raise InvalidInput("expected one --model")
    from dragoman.cli.derivatives import check_derivatives

    arguments.model = arguments.model[0] if arguments.model else ""
    return check_derivatives(arguments)
