"""The files beside a model that are about it: in its own folder, and not led out of it by a link.

What these files say is shown to every client, and whoever made a folder of a model need not be allowed to read what its
links lead to. A link counts as the file that it leads to if that is in the model's folder (as of a ConfigMap), in the
folder where the model's file really is (a farm of links), or among the blobs of the same cache of Hugging Face.
"""

from pathlib import Path

from dragoman.core.spec import ModelSpec
from dragoman.runtimes.recognise import is_candidate

EXAMPLES = "examples.json"
READMES = ("README.md", "readme.md", "Readme.md", "README", "README.txt", "README.rst")
LABELS = ("labels.txt", "classes.txt")
SAMPLES = "examples"  # a folder


class OwnFiles:
    """Files beside a model. folders: of which the files are about it; empty if there are none. is_object: the model is
    one of several in a Python file, and the README is about more.

    They are its own folder, or that of its file if no other model is there, and the folder of its versions.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.is_object = ".py:" in spec.uri
        path = Path(spec.uri.rpartition(":")[0] if self.is_object else spec.uri)
        self.folders: list[Path] = []
        self._examples: list[Path] = []
        self._roots: set[Path] = set()
        if spec.target is not None or not spec.uri or not path.exists():
            return
        if path.is_file():  # its own by name, also beside other models
            self._examples = [each for each in (path.parent / f"{path.stem}.{EXAMPLES}",) if each.is_file()]
        # Whether other models are there takes milliseconds to find out, and most folders have no such file.
        names = (EXAMPLES, *LABELS, SAMPLES, *([] if self.is_object else READMES))
        if any((folder / name).exists() for folder in _possible_folders(path, spec.version) for name in names):
            self.folders = _folders(path, spec.version)
        if not (self.folders or self._examples):
            return
        real = {path.parent if path.is_file() else path, *self.folders, *_folders(path.resolve(), spec.version)}
        self._roots = {folder.resolve() for folder in real}
        self._roots |= {each.parents[1] / "blobs" for each in self._roots if each.parent.name == "snapshots"}

    def __contains__(self, path: Path) -> bool:
        """Return whether the file or folder that a path leads to is one of the model's."""
        try:
            real = path.resolve(strict=True)
        except (OSError, RuntimeError):  # not found, a loop of links
            return False
        return (real.is_file() or real.is_dir()) and any(map(real.is_relative_to, self._roots))

    def examples(self) -> Path | None:
        """Return the file of examples: `NAME.examples.json`, or `examples.json` if no other model is there.

        The folder of a version may have one of its own.
        """
        files = [*self._examples, *(folder / EXAMPLES for folder in self.folders)]
        return next((file for file in files if file.is_file() and file in self), None)


def _folders(path: Path, version: str) -> list[Path]:
    """Return the folders of which all files are about a model; none if another model is there."""
    try:
        if path.is_file() and any(is_candidate(other) for other in path.parent.iterdir() if other != path):
            return []
    except OSError:  # a folder that may not be read
        return []
    return _possible_folders(path, version)


def _possible_folders(path: Path, version: str) -> list[Path]:
    folder = path if path.is_dir() else path.parent
    return [folder, folder.parent] if version and folder.name == version else [folder]
