"""`dragoman init [NAME]`: create a folder with a model, its test, a Containerfile and a README."""

import argparse
import json
import os
from pathlib import Path
from string import Template

from dragoman._version import __version__
from dragoman.core.errors import InvalidInput
from dragoman.core.spec import check_name

_TEMPLATES = Path(__file__).parent / "static"
# Paths in the new folder by template.
_FILES = {
    "model.txt": "models/$name/model.py",
    "test.txt": "tests/test_model.py",
    # Settings and a conftest.py of folders around the project are not those of its tests.
    "pytest.txt": "pytest.ini",
    "containerfile.txt": "Containerfile",
    "readme.txt": "README.md",
}
_EPILOG = """\
examples:
  dragoman init rainfall
  dragoman serve rainfall/models

Exit status: 0 success, 2 if the folder exists or cannot be written.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.description = "Create a project: a model, a test that needs no server, a Containerfile and a README."
    parser.epilog = _EPILOG
    parser.add_argument("name", nargs="?", default="my_model", metavar="NAME", help="folder (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(arguments: argparse.Namespace) -> int:
    """Write the files; return the exit status."""
    folder = Path(arguments.name)
    name = check_name(folder.resolve().name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidInput(f"'{folder}' exists already: expected a NAME of no file and no folder with files")
    values = {"name": name, "version": __version__, "folder": os.fspath(folder)}
    paths = []
    for template, path in _FILES.items():
        file = folder / Template(path).substitute(values)
        text = Template((_TEMPLATES / template).read_text()).substitute(values)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        except OSError as error:
            raise InvalidInput(f"'{file}' cannot be written: {error.strerror}") from error
        paths.append(os.fspath(file))
    if arguments.json:
        print(json.dumps({"name": name, "files": paths}))
    else:
        print("\n".join([*paths, "", f"next: cd {folder}, then see README.md"]))
    return 0
