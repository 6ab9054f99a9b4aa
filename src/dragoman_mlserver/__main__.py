"""Use the module `mlserver` in client scripts where the package of that name is not installed.

usage: python -m dragoman_mlserver SCRIPT [ARGUMENT ...]   run a script with the module
       python -m dragoman_mlserver --install               let every script of this environment import it
       python -m dragoman_mlserver --uninstall             undo --install
"""

import os
import runpy
import sys
import sysconfig
from pathlib import Path

from dragoman_mlserver.model import install

# Python runs the import in a .pth file at its start. The finder is the last one: an installed package comes first.
_PTH = ("import_dragoman_mlserver.pth", "import import_dragoman_mlserver\n")
_FINDER = (
    "import_dragoman_mlserver.py",
    '''"""Import Dragoman's module `mlserver`; written and removed by `python -m dragoman_mlserver`."""

import sys


class MLServerFinder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "mlserver":
            return None
        try:
            from dragoman_mlserver.model import install
        except ImportError:
            return None
        install()
        from importlib.util import find_spec

        return find_spec(name)


sys.meta_path.append(MLServerFinder)
''',
)


def main() -> None:
    match sys.argv[1:]:
        case ["--install"]:
            _change_environment(installs=True)
        case ["--uninstall"]:
            _change_environment(installs=False)
        case [script, *_] if not script.startswith("-"):
            try:
                open(script, "rb").close()
            except OSError as error:
                raise SystemExit(f"'{script}' cannot be read: {error.strerror}") from None
            sys.argv = sys.argv[1:]
            sys.path[0] = os.path.dirname(os.path.abspath(script))
            install()
            runpy.run_path(script, run_name="__main__")
        case _:
            raise SystemExit((__doc__ or "").partition("\n\n")[2].strip())


def _change_environment(*, installs: bool) -> None:
    """Write the files that make the module importable, or remove them."""
    folder = Path(sysconfig.get_path("purelib"))
    try:
        for name, text in (_FINDER, _PTH):
            if installs:
                (folder / name).write_text(text)
            else:
                (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise SystemExit(
            f"'{folder}' cannot be changed: {error.strerror or error}; use a virtual environment"
        ) from error
    print(f"{'wrote' if installs else 'removed'} {_PTH[0]} and {_FINDER[0]} in {folder}")


if __name__ == "__main__":
    main()
