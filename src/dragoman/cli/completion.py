"""`dragoman completion SHELL`: print a script that completes commands, flags, choices and files in a shell."""

import argparse

from dragoman.core.errors import InvalidInput

_EPILOG = """\
examples:
  source <(dragoman completion bash)                       # this shell only
  dragoman completion bash > ~/.local/share/bash-completion/completions/dragoman
  dragoman completion zsh > "${fpath[1]}/_dragoman"
  dragoman completion fish > ~/.config/fish/completions/dragoman.fish

Exit status: 0 success, 2 if the package shtab is missing or the shell is unknown.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.description = "Print a completion script for a shell."
    parser.epilog = _EPILOG
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    try:
        import shtab
    except ImportError:
        raise InvalidInput("shell completion needs shtab: pip install 'dragoman[completion]'") from None
    from dragoman.cli import main_parser

    print(shtab.complete(main_parser(shtab.FILE), arguments.shell))
    return 0
