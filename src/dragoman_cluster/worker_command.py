"""`dragoman worker --join HOST:PORT`: run a model for a server, which may be on another machine."""

import argparse
import os
import sys
from pathlib import Path

from dragoman.cli.terminal import printable
from dragoman.core.options import forget_secrets
from dragoman.system import logs, process
from dragoman.workers.process_group import start_guard
from dragoman_cluster.handshake import SECRET_VARIABLE, JoinError, read_secret

_EPILOG = f"""\
The server is started with --worker-port, and both have the same secret of 20 characters or more: in a file that
--secret-file and --worker-secret-file name, or in the variable {SECRET_VARIABLE}. Python has the same version on both
sides, Dragoman up to one patch release. The model's files have the same paths, unless the server sends them
(placement.files).

The connection uses TLS unless the server is on this machine. The worker ends when the server unloads the model. If the
server ends or cannot be reached any more, it looks for it for --rejoin-s seconds and keeps its model loaded. On
SIGTERM, and before its time limit, it gets no further calls, and ends after those that it has.

examples:
  dragoman worker --join 10.0.0.1:7070 --secret-file ~/.dragoman-secret
  dragoman worker --join node1:7070 --join node2:7070 --secret-file ~/.dragoman-secret
  srun --ntasks=8 dragoman worker --join login1:7070 --secret-file ~/.dragoman-secret --model banana

Exit status: 0 if the server has ended the connection, also after SIGTERM; 1 if it was lost; 2 if the server did not
accept the worker.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Run a model for a server, which may be on another machine."
    parser.epilog = _EPILOG
    parser.add_argument(
        "--join",
        metavar="HOST:PORT",
        action="append",
        required=True,
        help="worker port of the server; repeat it for several servers that share this worker",
    )
    parser.add_argument("--secret-file", metavar="FILE", default="", help="file with the secret of server and workers")
    parser.add_argument("--model", metavar="NAME", default="", help="only run this model; default: any that waits")
    encryption = parser.add_mutually_exclusive_group()
    encryption.add_argument("--plaintext", action="store_true", help="no TLS, for isolated networks")
    encryption.add_argument("--tls", action="store_true", help="TLS also to a server on this machine")
    parser.add_argument(
        "--connect-timeout-s", metavar="S", type=float, default=60.0, help="how long to try to connect (default: 60)"
    )
    parser.add_argument(
        "--rejoin-s",
        metavar="S",
        type=float,
        default=60.0,
        help="how long to look for a server that is gone, with the model loaded; 0: not at all (default: 60)",
    )
    parser.add_argument(
        "--time-limit-s",
        metavar="S",
        type=float,
        help="how long this process may run (default: in a SLURM job, its limit)",
    )
    parser.add_argument(
        "--drain-s",
        metavar="S",
        type=float,
        default=60.0,
        help="seconds before the limit in which no call is taken (default: 60)",
    )
    parser.add_argument(
        "--cache-dir",
        metavar="DIR",
        default="",
        help="folder for models that the server sends (default: ~/.cache/dragoman/models)",
    )
    parser.add_argument(
        "--cache-gib", metavar="GIB", type=float, default=64.0, help="maximum size of that folder (default: 64)"
    )
    parser.add_argument("--json", action="store_true", help="log JSON objects, for programs")


def run(arguments: argparse.Namespace) -> int:
    """Run the worker; return its exit status."""
    secret = read_secret(arguments.secret_file, os.environ.get(SECRET_VARIABLE, ""))
    forget_secrets()  # the model and programs that it starts must not see it
    process.keep_freed_memory()
    start_guard()
    from dragoman_cluster.file_cache import FileCache, default_folder
    from dragoman_cluster.join import JoinOptions, join, parse_addresses  # imports NumPy, after the guard was forked

    addresses = parse_addresses(arguments.join)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # so that `module:object` finds modules of the working directory
    logs.set_up("json" if arguments.json else "text")
    options = JoinOptions(
        addresses=addresses,
        secret=secret,
        model=arguments.model,
        plaintext=arguments.plaintext,
        tls=arguments.tls,
        connect_s=arguments.connect_timeout_s,
        rejoin_s=arguments.rejoin_s,
        time_limit_s=arguments.time_limit_s,
        drain_s=arguments.drain_s,
        cache=FileCache(Path(arguments.cache_dir or default_folder()), int(arguments.cache_gib * 2**30)),
    )
    try:
        return 0 if join(options) else 1
    except JoinError as error:
        print(f"dragoman: {printable(error.message)}", file=sys.stderr)
        return 2
