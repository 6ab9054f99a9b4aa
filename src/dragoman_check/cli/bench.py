"""`dragoman bench URL MODEL`: measure latency and throughput of a model; `--compare A B`: compare two runs."""

import argparse

from dragoman.cli.connection import add_credentials

# Also in dragoman_check.load_test.jobs, which --help must not import; a test compares them.
PROTOCOL_NAMES = ("rest", "rest-binary", "grpc", "umbridge", "openai-chat", "openai-completions", "tgi", "lmi")

_EPILOG = """\
A closed loop has a number of clients, each of which sends the next request when it has the response: --concurrency. It
measures the largest throughput. An open loop sends requests at given times, whether responses come or not: --rate. It
measures the latency that users see. Its latencies count from the time at which a request was due, so that a request
that waits behind a slow one is counted with its wait.

examples:
  dragoman bench http://127.0.0.1:8080 iris
  dragoman bench http://127.0.0.1:8080 iris --protocol grpc --grpc 127.0.0.1:8081 --concurrency 1,8,64
  dragoman bench http://127.0.0.1:8080 iris --rate 100,200,400 --json after.json
  dragoman bench http://127.0.0.1:8080 llama --protocol openai-chat --concurrency 8 --max-tokens 128
  dragoman bench --compare before.json after.json

Exit status: 0 if every request succeeded, 1 if one failed (or, with --compare, if a value is worse by more than the
spread), 2 if nothing could be measured.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.usage = "dragoman bench [options] URL MODEL\n       dragoman bench --compare A B"
    parser.description = "Measure latency and throughput of a model over any of its protocols."
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("url", nargs="?", default="", metavar="URL", help="address of the server")
    add("model", nargs="?", default="", metavar="NAME", help="name of the model")
    add("--compare", nargs=2, metavar=("A", "B"), help="compare two files that --json wrote")
    _add_load_arguments(parser)
    _add_request_arguments(parser)
    add("--json", default="", metavar="FILE", help="write the results as JSON; - prints them instead of the table")


def _add_load_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("load").add_argument
    add("--concurrency", default="", metavar="N,...", help="closed loops of N clients (default: 1,4,16)")
    add("--rate", default="", metavar="X,...", help="open loops of X requests per second")
    add("--arrival", choices=("poisson", "constant"), default="poisson", help="times of an open loop (default poisson)")
    add("--seconds", type=float, default=10.0, metavar="S", help="measured time of each load (default 10)")
    add("--warmup-s", type=float, default=2.0, metavar="S", help="time before it that is not measured (default 2)")
    add("--repeat", type=int, default=1, metavar="N", help="run all loads N times, for the spread between runs")
    add("--connections", type=int, metavar="N", help="most connections of an open loop (default 256)")
    add("--timeout-s", type=float, default=60.0, metavar="S", help="time limit of one request (default 60)")
    add("--seed", type=int, default=0, metavar="N", help="seed of arrival times (default 0)")


def _add_request_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("requests").add_argument
    add("--protocol", choices=PROTOCOL_NAMES, default="rest", help="protocol (default rest)")
    add("--input", default="", metavar="FILE", help="body of the request in JSON (default: from the signature)")
    add("--rows", type=int, default=1, metavar="N", help="length of a variable first axis (default 1)")
    add("--prompt", default="", metavar="TEXT", help="prompt for text models")
    add("--max-tokens", type=int, default=64, metavar="N", help="most tokens of a response (default 64)")
    add("--grpc", default="", metavar="HOST:PORT", help="gRPC address (default: that of URL)")
    add_credentials(add)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    from dragoman_check.cli import load_test

    return load_test.compare(arguments) if arguments.compare else load_test.measure(arguments)
