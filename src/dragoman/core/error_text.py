"""The text of an exception as clients may see it: its type and message, no traceback and no path of this server."""

import re
from pathlib import Path

MAX_CHARACTERS = 1000

# How the last line of a traceback begins, after which the message follows: `ValueError: ...`.
_ERROR_LINE = re.compile(r"[A-Za-z_][\w.]*(: |$)")
# An absolute path of two parts or more; what follows a word, as in m/s, or a scheme, as in http://, is none.
_PART = r"[^\s/:'\"()\[\],;<>]"
_PATH = re.compile(rf"(?:file://|(?<![\w/:.~-]))(/{_PART}+)((?:/{_PART}+)*)/({_PART}*)")
_FILE_NAME = re.compile(r".*\.[A-Za-z]\w{0,4}", re.ASCII)


def public_text(fault: BaseException) -> str:
    """Return `Type: message` of an exception, as `public_message` has it."""
    return public_message(f"{type(fault).__name__}: {fault}")


def public_message(text: str) -> str:
    """Return a message without the tracebacks in it and with paths shortened to the names of files, bounded in length.

    Frameworks put tracebacks of their own into messages, TorchScript for example.
    """
    if "Traceback " in text:
        text = _without_tracebacks(text)
    bounded = text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + " ..."
    return _PATH.sub(_short, bounded) if "/" in bounded else bounded


def _without_tracebacks(text: str) -> str:
    """Drop each traceback up to the line that names its error."""
    kept: list[str] = []
    inside = False
    for line in text.splitlines():
        before, found, _ = line.partition("Traceback ")
        if found:
            inside = True
            kept.append(before)
        elif not inside or _ERROR_LINE.match(line):
            inside = False
            kept.append(line)
    return "\n".join(filter(str.strip, kept))


def _short(path: re.Match[str]) -> str:
    """The name of a file or folder for its path, where it is one of this server or looks like a file's."""
    root, between, name = path.groups()
    if _FILE_NAME.fullmatch(name) or Path(root).exists():
        return name or (root + between).rpartition("/")[2]
    return path[0]
