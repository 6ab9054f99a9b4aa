"""Declaration of a command of `dragoman`."""

from typing import NamedTuple


class Command(NamedTuple):
    """A command, such as `dragoman serve`.

    summary: its line in `dragoman --help`.
    module: the module that is imported when the command is chosen. It has `add_arguments(parser)` and
        `run(arguments)`, which returns the exit status, and perhaps
        `expand(words)`, which returns the arguments to parse.
    """

    summary: str
    module: str
