"""Secrets of the server: in an environment variable, in a file that another one names, or in a credential of systemd.

The secret of the variable `DRAGOMAN_API_KEY` may be in the file that `DRAGOMAN_API_KEY_FILE` names, as with Docker and
PostgreSQL, or in the file `dragoman_api_key` of the folder `$CREDENTIALS_DIRECTORY`, where systemd puts a credential of
that name. This is the one place that knows the rule.
"""

import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from dragoman.core.errors import InvalidInput

log = logging.getLogger("dragoman.server")

FILE_SUFFIX = "_FILE"
CREDENTIALS = "CREDENTIALS_DIRECTORY"
_MAX_BYTES = 1 << 16


def find_secret(variable: str, environment: Mapping[str, str]) -> str | None:
    """Return the secret of a variable, None without one; an empty variable is a value.

    One line break at the end of a file is not part of the secret. Raises InvalidInput that names the variables if the
    secret is given twice, or its file cannot be read or is empty.
    """
    given = {variable: environment[variable]} if variable in environment else {}
    files: dict[str, Path] = {}
    if (name := environment.get(variable + FILE_SUFFIX)) is not None:
        if not name.strip():
            raise InvalidInput(f"variable '{variable}{FILE_SUFFIX}': expected the name of a file, got an empty value")
        files[variable + FILE_SUFFIX] = Path(name)
    if folder := environment.get(CREDENTIALS):
        credential = Path(folder, variable.lower())
        if credential.exists():
            files[f"credential {credential.name}"] = credential
    sources = [*given, *files]
    if len(sources) > 1:
        raise InvalidInput(f"a secret is given twice: expected only one of {' and '.join(sources)}")
    for source, file in files.items():
        return read_secret_file(source, file)
    return given.get(variable)


def read_secret_file(source: str, file: Path) -> str:
    """Return the secret in a file, without a line break at its end; a warning says if every user can read it.

    source: what has named the file, for errors. Raises InvalidInput.
    """
    try:
        with file.open("rb") as opened:
            data = opened.read(_MAX_BYTES + 1)
            mode = os.fstat(opened.fileno()).st_mode
        text = data.decode()
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InvalidInput(f"{source}: file '{file}' cannot be read: {reason}") from error
    if len(data) > _MAX_BYTES:
        raise InvalidInput(f"{source}: file '{file}': expected at most {_MAX_BYTES} bytes")
    secret = text.removesuffix("\n").removesuffix("\r")
    if not secret.strip():
        raise InvalidInput(f"{source}: file '{file}': expected a secret, got an empty file")
    if mode & stat.S_IROTH:
        log.warning("every user of this machine can read a secret; chmod o-r %s", file)
    return secret
