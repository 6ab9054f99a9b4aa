"""Resolve the `url` of a model that is registered at run time, within the allowed folders."""

import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from dragoman.core.errors import Forbidden, InvalidInput, NotSupported

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_EXPECTED = "`url`: expected the absolute path, or the file:// URL, of a folder or file on the server's machine"


def model_path(url: str, folders: Sequence[str]) -> Path:
    """Return the path of a model, given as a path or `file://` URL, with links resolved.

    Raises NotSupported for other URLs, Forbidden outside of the allowed folders, and InvalidInput if nothing is
    there.
    """
    try:
        place = _path(url).resolve()
        if not any(Path(folder).resolve() in place.parents for folder in folders):
            named = f"below {' or '.join(folders)}" if folders else "in a folder of --model-folders, which names none"
            raise Forbidden(f"`url`: '{url[:256]}' may not be loaded; expected what lies {named}")
        place.stat()  # raises for a loop of links, which `resolve` returns as it is from Python 3.13 on
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InvalidInput(f"`url`: there is nothing at '{url[:256]}'") from error
    except (OSError, ValueError, RuntimeError) as error:  # impossible file names, loops of links
        raise InvalidInput(f"{_EXPECTED}, got '{url[:256]}', which leads nowhere") from error
    return place


def _path(url: str) -> Path:
    path = url
    if _SCHEME.match(url):
        parts = urlsplit(url)
        if parts.scheme != "file" or parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
            raise NotSupported(f"{_EXPECTED}, got '{url[:256]}'; what lies elsewhere must be downloaded before")
        path = unquote(parts.path)
    if not path.startswith("/"):
        raise NotSupported(f"{_EXPECTED}, got '{url[:256]}'")
    return Path(path)
