"""`dragoman check derivatives MODEL`: check the derivatives of a model."""

import argparse

_EPILOG = """\
The command checks every output and input at every point, in random directions v and u and with random
weights s:
  apply_jacobian  each element of J v against central differences of the output: the smallest relative error of ten
                  step sizes, and the order at which errors fall (2 is expected; "exact" for linear functions)
  gradient        each element of Jᵀ s, and <v, Jᵀ s>, against central differences of <s, output>
  adjoint         <J v, s> = <v, Jᵀ s>
  apply_hessian   against central differences of the gradient
  symmetry        <u, H v> = <v, H u>

examples:
  dragoman check derivatives model.py:energy
  dragoman check derivatives examples/scientific --model beam --at '[[10, 10, ...]]' --json
  dragoman check derivatives http://127.0.0.1:4242 --model forward --config '{"level": 2}'

Exit status: 0 if all checks pass, 1 if one fails, 2 if nothing could be checked.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.description = "Check the derivatives of a model against finite differences and against each other."
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("path", metavar="MODEL", help="as for dragoman serve, or the URL of a server")
    add("--model", default="", metavar="NAME", help="the model to check, if there are several")
    add("--config", default="{}", metavar="JSON", help="the config of every UM-Bridge call")
    add("--at", action="append", metavar="JSON", help="a point: one list of numbers for each input; may be repeated")
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
    approximate = "or 1e-2 if the model's derivatives are finite differences"
    add("--tolerance", type=float, metavar="X", help=f"largest error of differences (default 1e-6, {approximate})")
    add("--identity", type=float, metavar="X", help=f"largest error of identities (default 1e-9, {approximate})")
    add("--json", action="store_true", help="print the results as JSON, with the errors of each step size")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    from dragoman_simulators.cli.derivatives import check_derivatives

    return check_derivatives(arguments)
