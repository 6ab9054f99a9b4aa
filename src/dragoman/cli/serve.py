"""`dragoman serve PATH...`: serve models until the process is stopped."""

import argparse
import gc
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from dragoman.core.options import RENAMED, Option, suggestion
from dragoman.settings import GROUPS, PREFIX, SETTINGS

_USAGE = "dragoman serve [options] [PATH ...]"
_DESCRIPTION = "Serve models over HTTP and gRPC."
_PATHS = """\
PATH:
  model.onnx              a model file; runtime and name follow from the file
  models/                 a folder of models: each subfolder or file is one model
  resnet/                 one model; subfolders named by integers are its versions
  package.module:object   a dragoman.Model class or a function; also file.py:object
  model.py -- ARGUMENTS   a script of a KServe model, with its command-line arguments
"""
_EXAMPLES = """\
examples:
  dragoman serve model.onnx
  dragoman serve models/ --allow-pickle --http-port 9000
  dragoman serve my_module:predict --placement process --replicas 2

Exit status: 0 if it was stopped, 1 if no model can be loaded or a port is in use, 2 wrong arguments or settings, 130
if Ctrl-C stopped it before it had started.
"""
_RULE = """\
Each flag is also an environment variable (--http-port is DRAGOMAN_HTTP_PORT) and a key in the [server] table of a
dragoman.toml in a folder given as PATH. A flag overrides the variable, which overrides the file.
"""
_JSON_HELP = "as --log-format json"
_CHECK_HELP = "report every error of settings, certificates, keys, ports and models, and do not start"
_ALL = "all"
# Columns of flags and of help lines.
_FLAG_COLUMNS = 24
_MAX_COLUMNS = 110


def add_arguments(parser: Any) -> None:
    """Declare the arguments of the command: paths, and a flag for each setting."""
    parser.usage = _USAGE
    parser.description = _DESCRIPTION
    parser.search = lambda word: _settings_help(parser, word)
    parser.add_argument("paths", nargs="*", metavar="PATH", help="a model file, a folder, or module:object")
    parser.add_argument("--json", action="store_const", const="json", dest="log_format", help=_JSON_HELP)
    parser.add_argument("--check", action="store_true", help=_CHECK_HELP)
    groups: dict[str, Any] = {title: parser.add_argument_group(title) for title in GROUPS}
    for option in SETTINGS.values():
        if not option.secret:
            _add_flag(groups[option.group], option)
    for old, new in RENAMED.items():
        if new in SETTINGS:
            _add_flag(parser, replace(SETTINGS[new], name=old, help=argparse.SUPPRESS))


def _add_flag(group: Any, option: Option) -> None:
    common: Any = {"dest": option.name, "default": None, "help": option.help.replace("%", "%%")}
    words = tuple(filter(None, option.choices))
    if option.type is bool:
        group.add_argument(_flag(option), action=argparse.BooleanOptionalAction, **common)
    elif words:
        group.add_argument(_flag(option), choices=words, **common)
    else:
        group.add_argument(_flag(option), metavar=_metavar(option), **common)


def _flag(option: Option) -> str:
    return "--" + option.name.replace("_", "-")


def _metavar(option: Option) -> str:
    return option.name.rpartition("_")[2].upper()


# --- help ------------------------------------------------------------------------------------------------------------


def _settings_help(parser: argparse.ArgumentParser, word: str | None) -> str:
    """Return help on the settings most used; with a word, on those whose name, help or group contains it."""
    shown = [option for option in SETTINGS.values() if not option.secret]
    if word is None:
        lines = [f"usage: {_USAGE}", "", _DESCRIPTION, "", _PATHS, *_short_help(shown), "", _EXAMPLES]
    else:
        matching = shown if word.lower() == _ALL else [each for each in shown if _contains(each, word.lower())]
        if not matching:
            hint = suggestion(word.lower(), [part for each in shown for part in each.name.split("_")])
            parser.error(f"no setting contains '{word}'{hint or '; --help=all shows all settings'}")
        lines = [*_grouped_help(matching), "", _RULE.rstrip()]
    return "\n".join(lines).rstrip()


def _contains(option: Option, word: str) -> bool:
    if word in (_group_word(option.group), option.group.lower()):
        return True
    return any(word in text.lower() for text in (_flag(option), PREFIX + option.name, option.help))


def _group_word(group: str) -> str:
    return group.split()[0].lower()


def _short_help(options: Sequence[Option]) -> Iterator[str]:
    """Yield the common settings, and the groups of the others."""
    yield "settings:"
    for option in sorted(options, key=lambda each: GROUPS.index(each.group)):
        if option.common:
            yield from _describe(option)
    yield f"  {'--json':<{_FLAG_COLUMNS - 2}}{_JSON_HELP}"
    yield f"  {'--check':<{_FLAG_COLUMNS - 2}}{_CHECK_HELP}"
    yield ""
    yield "further settings:"
    for group in GROUPS:
        count = sum(option.group == group and not option.common for option in options)
        yield f"  --help={_group_word(group):<16} {count:>3} more: {group}"
    yield f"  --help={'WORD':<16}     those that contain a word, such as --help=timeout"
    yield f"  --help={_ALL:<16}     all"


def _grouped_help(options: Sequence[Option]) -> Iterator[str]:
    for group in GROUPS:
        members = [option for option in options if option.group == group]
        if members:
            yield f"{group}:"
        for option in members:
            yield from _describe(option)


def _describe(option: Option) -> Iterator[str]:
    """Yield the lines for a setting: its flag, its help and its default."""
    values = "" if option.type is bool else _metavar(option)
    if option.choices:
        values = "{" + ",".join(filter(None, option.choices)) + "}"
    column = f"  {_flag(option)} {values}".rstrip()
    default = option.shown_default
    if option.type is bool:
        default = f"on; --no-{_flag(option)[2:]}" if option.default else ""
    text = option.help + (f" (default: {default})" if default else "")
    width = min(shutil.get_terminal_size().columns, _MAX_COLUMNS) - _FLAG_COLUMNS
    lines = textwrap.wrap(text, max(width, 30), break_long_words=False, break_on_hyphens=False)
    if len(column) < _FLAG_COLUMNS - 1:
        column += " " * (_FLAG_COLUMNS - len(column)) + lines.pop(0)
    yield column
    for line in lines:
        yield " " * _FLAG_COLUMNS + line


# Arguments of KServe's scripts that are also settings of the server.
_SCRIPT_FLAGS = {"model_name": "--model-name", "http_port": "--http-port", "grpc_port": "--grpc-port"}


def expand(words: Sequence[str]) -> list[str]:
    """Return arguments of the command with those after `--`, for the script of a KServe model, as its settings."""
    if "--" not in words:
        return list(words)
    at = words.index("--")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in _SCRIPT_FLAGS:
        parser.add_argument(f"--{name}")
    parsed, _ = parser.parse_known_args(words[at + 1 :])
    shared = [f"{flag}={vars(parsed)[name]}" for name, flag in _SCRIPT_FLAGS.items() if vars(parsed)[name] is not None]
    return [*shared, *words[:at], f"--script-arguments={shlex.join(words[at + 1 :])}"]


def run(arguments: argparse.Namespace) -> int:
    """Serve until the process is stopped; return the exit status."""
    if arguments.check:
        return _serve(arguments)
    gc.disable()  # until the server has started: all that is imported stays
    import dragoman.runtimes.python.model
    import dragoman.workers.worker  # noqa: F401 - both for the spare process; the server itself is imported later
    from dragoman.workers.spare_process import fork_spare, release_spare

    fork_spare()
    try:
        return _serve(arguments)
    finally:
        release_spare()
        gc.enable()


def _serve(arguments: argparse.Namespace) -> int:
    from dragoman.cli.serving import serve

    if any(":" in path and not path.rpartition(":")[0].endswith(".py") for path in arguments.paths):
        sys.path.append(os.getcwd())  # so that `module:object` finds modules of the working directory, after all others
    names = {*SETTINGS, *RENAMED}
    flags = {name: value for name, value in vars(arguments).items() if name in names and value is not None}
    if arguments.check:
        from dragoman.cli.checking import check

        return check(arguments.paths, flags)
    return serve(arguments.paths, flags)
