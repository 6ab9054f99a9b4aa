"""The command `dragoman` and its subcommands."""

import argparse
import errno
import importlib
import os
import re
import select
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from dragoman import hooks
from dragoman._version import __version__
from dragoman.cli.command import Command
from dragoman.cli.synonyms import same_meaning
from dragoman.cli.terminal import printable
from dragoman.core.errors import DragomanError
from dragoman.core.options import suggestion
from dragoman.system.cpus import limit_default_threads

# The commands of the server itself. Features and other packages add theirs as entry points of `dragoman.commands`.
_COMMANDS = {
    "serve": Command("serve models over HTTP and gRPC", "dragoman.cli.serve"),
    "init": Command("create a project with a model, a test and a Containerfile", "dragoman.cli.init"),
    "models": Command("list the models of a running server", "dragoman.cli.models"),
    "infer": Command("send an inference request", "dragoman.cli.infer"),
    "status": Command("show the models and workers of a running server", "dragoman.cli.status"),
    "doctor": Command("try each model of a folder, and report what will differ from its server", "dragoman.cli.doctor"),
    "keys": Command("create, list and delete API keys", "dragoman.cli.keys"),
    "digests": Command("print the SHA-256 digests of model files, for serve --model-digests", "dragoman.cli.digests"),
    "completion": Command("print a completion script for bash, zsh or fish", "dragoman.cli.completion"),
}

_DESCRIPTION = """\
Serve models over Open Inference (V2, REST and gRPC), KServe V1 and UM-Bridge, and language models also over the APIs of
OpenAI, Anthropic, Ollama, TGI and LMI."""
_EPILOG = """\
examples:
  dragoman serve model.onnx
  dragoman infer http://127.0.0.1:8080 model --example
  dragoman bench --help

Exit status: 0 success, 1 failure, 2 wrong arguments or settings, or no server, 130 stopped by Ctrl-C.
"""

# Errors of an output that cannot take more: a full disk, a quota, a limit of file sizes, a device that fails.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

# Metavariables of arguments that name files or folders.
_FILES = ("PATH", "FILE", "FOLDER", "MODEL", "OUT")


class CommandParser(argparse.ArgumentParser):
    """A parser that suggests the closest option or choice for a misspelled one.

    `--help` prints the help, `--help=WORD` the arguments that contain a word; `search` replaces both, with None for no
    word. `file_type` is the type that shtab completes as file names. Positional arguments may stand after options,
    unless the parser `has_commands`.
    """

    file_type: Any = None
    has_commands = False
    search: Callable[[str | None], str] | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, add_help=False, **options)
        self._add_help(self, "show this help; --help=WORD: the arguments that contain a word")

    @staticmethod
    def _add_help(parser: argparse.ArgumentParser, text: str) -> None:
        parser.add_argument("-h", "--help", nargs="?", const="", metavar="WORD", default=argparse.SUPPRESS, help=text)

    def _print_help(self, words: Sequence[str]) -> None:
        """Print the help and exit, if the arguments ask for it, even if other arguments are missing or wrong.

        argparse's own help action is not used: it runs while intermixed parsing hides the positional arguments, and it
        ignores
        errors of the output.
        """
        asked = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        self._add_help(asked, "")
        found, _ = asked.parse_known_args(words)
        if not hasattr(found, "help"):
            return
        word = found.help or None
        if self.search is not None:
            print(self.search(word))
        elif word is None:
            print(self.format_help(), end="")
        else:
            print(self._search_help(word))
        sys.exit(0)

    def _search_help(self, word: str) -> str:
        """Return the arguments of the help, under their titles, whose entry contains the word."""
        epilog, self.epilog = self.epilog, None
        text = self.format_help()
        self.epilog = epilog
        shown: list[str] = []
        for section in re.findall(r"^(\S.*:)\n((?:  .*\n|\n(?=  ))+)", text, re.M):
            entries = [e for e in re.findall(r"^  \S.*\n(?:   +.*\n)*", section[1], re.M) if word.lower() in e.lower()]
            shown += [section[0] + "\n" + "".join(entries)] if entries else []
        if not shown:
            self.error(f"no argument contains '{word}'; {self.prog} --help shows all")
        return "\n".join(shown).rstrip()

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        action = super().add_argument(*names, **options)
        if self.file_type is not None and action.metavar in _FILES:
            action.complete = self.file_type  # type: ignore[attr-defined]
        return action

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        self._print_help(words)
        parse = self.parse_known_args if self.has_commands else self.parse_known_intermixed_args
        found, unknown = parse(self._replace_synonyms(words), namespace)
        if unknown:
            if any(re.match(r"-([\d.,]|inf|nan)", each) for each in unknown):
                self.error(f"unrecognized arguments: {' '.join(unknown)}; put -- before values that begin with -")
            flag = next((each.partition("=")[0] for each in unknown if each.startswith("--")), "")
            known = [each for each in self._option_string_actions if each.startswith("--")]
            same = " or ".join(f"'{each}'" for each in same_meaning(flag, known))
            # The usage without its options, whose values can have the same names.
            positional = re.sub(r"--?[\w-]+( [A-Z]+)?", "", self.format_usage())
            word = flag[2:].upper()
            if word and re.search(rf"\b{re.escape(word)}\b", positional):
                self.error(f"unrecognized arguments: {' '.join(unknown)}; {word} is written without '{flag}'")
            hint = f"; did you mean {same}?" if same else suggestion(flag, known) if flag else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found

    def _replace_synonyms(self, words: Sequence[str]) -> list[str]:
        """Return the words with the flags of this parser for others of the same meaning."""
        known = self._option_string_actions
        end = words.index("--") if "--" in words else len(words)
        replaced = []
        for word in words[:end]:
            flag, equals, value = word.partition("=")
            same = same_meaning(flag, known) if flag.startswith("--") and flag not in known else []
            replaced.append(same[0] + equals + value if len(same) == 1 else word)
        return [*replaced, *words[end:]]

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        super().error(message + (suggestion(wrong[1], re.findall(r"[\w-]+", wrong[2])) if wrong else ""))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status.

    - 0: success
    - 1: failure, also to write the output
    - 2: invalid arguments or settings
    - 130: interrupted by Ctrl-C
    - 141: the reader of the output has closed it
    """
    try:
        try:
            return _run(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            for stream in filter(None, (sys.stdout, sys.stderr)):  # None if its descriptor is closed
                stream.flush()
    except BrokenPipeError:
        if not _discard_unread_output():
            raise
        return 141
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        _discard([sys.stdout.fileno()])
        try:
            print(f"dragoman: the output cannot be written: {error.strerror}", file=sys.stderr)
        except OSError:
            _discard([sys.stderr.fileno()])
        return 1


def _discard_unread_output() -> bool:
    """Redirect standard streams whose reader has closed them to the null device; return whether there are any."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        poll.register(stream.fileno(), 0)  # errors and hang-ups only
    closed = [descriptor for descriptor, _ in poll.poll(0)]
    _discard(closed)
    return bool(closed)


def _discard(descriptors: Sequence[int]) -> None:
    """Redirect descriptors to the null device, so that the interpreter can flush their streams at its end."""
    with open(os.devnull, "wb") as null:
        for descriptor in descriptors:
            os.dup2(null.fileno(), descriptor)


def _run(words: list[str]) -> int:
    if not words:
        main_parser().print_help(sys.stderr)
        return 2
    if words[0] == "--version":  # argparse ignores that its output cannot be written
        print(f"dragoman {__version__}")
        return 0
    found = _find_command(words)
    if found is None:
        main_parser().parse_args(words)  # prints the help, or an error that suggests a command
        return 2
    limit_default_threads()  # before a command loads such libraries
    name, command = found[0], importlib.import_module(found[1].module)
    words = words[len(name.split()) :]
    parser = CommandParser(prog=f"dragoman {name}", formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_arguments(parser)
    try:
        status: int = command.run(parser.parse_args(getattr(command, "expand", list)(words)))
    except DragomanError as error:
        print(f"dragoman: {printable(error.message)}", file=sys.stderr)
        return 2
    except OSError as error:
        if not error.filename:
            raise
        print(f"dragoman: '{error.filename}' cannot be read: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status


def _find_command(words: Sequence[str]) -> tuple[str, Command] | None:
    """Return the command that the first word or the first two words name, with its name."""
    if words[0] in _COMMANDS:
        return words[0], _COMMANDS[words[0]]
    for name in (" ".join(words[:2]), words[0]):
        if (command := _installed_commands().get(name)) is not None:
            return name, command
    return None


def _installed_commands() -> dict[str, Command]:
    """Return the commands of features and of other packages. The name of an entry point has `-` for a space."""
    return {name.replace("-", " "): command for name, command in hooks.all_of("commands").items()}


def main_parser(file_type: Any = None) -> CommandParser:
    """Return the parser of `dragoman`, without the arguments of its commands unless `file_type` is given.

    Their modules import NumPy, which `--help` must not wait for.
    """
    parser = CommandParser(
        prog="dragoman",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"dragoman {__version__}")
    parser.has_commands = True
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    all_commands = {**_COMMANDS, **_installed_commands()}
    for name, command in all_commands.items():
        if file_type is not None and " " in name:
            continue
        subparser = commands.add_parser(name, help=command.summary)
        if file_type is not None:
            subparser.file_type = file_type
            _add_second_words(subparser, name, all_commands, file_type)
            importlib.import_module(command.module).add_arguments(subparser)
    return parser


def _add_second_words(parser: CommandParser, first: str, commands: Mapping[str, Command], file_type: Any) -> None:
    """Add the commands of two words that begin with `first`, as commands within its parser."""
    found = {name.partition(" ")[2]: command for name, command in commands.items() if name.startswith(f"{first} ")}
    if found:
        within = parser.add_subparsers(metavar="COMMAND", required=False)
        for name, command in found.items():
            subparser = within.add_parser(name, help=command.summary)
            subparser.file_type = file_type
            importlib.import_module(command.module).add_arguments(subparser)
