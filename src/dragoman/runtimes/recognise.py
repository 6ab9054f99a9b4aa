"""Recognise the runtime of model files and folders."""

from pathlib import Path

from dragoman import plugins
from dragoman.core.errors import ModelFailed
from dragoman.runtimes.unserved import UNKNOWN, reason_of, unknown_reason

# Suffixes that many other files have, too: such a file is reported only if it is called model.*
_COMMON_SUFFIXES = frozenset({".json", ".txt"})
_NAMED = 3  # files of a folder without a model that the reason names
_SCRIPT = (
    "a Python file in a folder is not a model by itself; name it in the command (dragoman serve FILE), or call it "
    "model.py in a sub-folder of its own"
)


def recognise(path: Path) -> str | None:
    """Return the name of the runtime that loads a file or folder; None if it is not a model that one knows."""
    if not (path.is_dir() or path.is_file()):
        return None
    for runtimes in (plugins.built_in_runtimes, plugins.other_runtimes):
        for name, runtime in runtimes().items():
            if runtime.recognises(path):
                return name
    return None


def own_name(path: Path) -> str:
    """Return the name that the contents of a file or folder give its model, "" for none."""
    name = recognise(path)
    runtime = plugins.runtime(name) if name else None
    return runtime.own_name(path) if runtime and runtime.own_name else ""


def refusal(path: Path) -> str:
    """Return why a file or folder that was named as a model is none, and what to serve instead."""
    if reason := reason_of(path) or _mismatch(path):
        return reason
    if not path.is_dir():
        return UNKNOWN
    inside = [(entry.name, skip_reason(entry)) for entry in sorted(path.iterdir()) if not entry.name.startswith(".")]
    reasons = [f"{name}: {reason}" for name, reason in inside if reason]
    return f"the folder holds no model; {'; '.join(reasons[:_NAMED]) or 'expected a model file'}"


def skip_reason(path: Path) -> str:
    """Return why a file or folder among models is not served; "" for what is not like a model, as a README."""
    suffix = path.suffix.lower()
    if suffix == ".py":
        return "" if path.name.startswith("__") else _SCRIPT
    if reason := reason_of(path):
        return reason
    if path.is_dir():
        return ""
    mismatch = _mismatch(path) if suffix not in _COMMON_SUFFIXES or path.stem == "model" else ""
    return mismatch or unknown_reason(path)


def _mismatch(path: Path) -> str:
    """Return why a file is not a model although its suffix is that of one; "" for any other file."""
    if not path.is_file():
        return ""
    suffix = path.suffix.lower()
    runtimes = (*plugins.built_in_runtimes().values(), *plugins.other_runtimes().values())
    expected = [each.expected for each in runtimes if suffix in each.shared_suffixes and each.expected]
    if not expected or recognise(path) is not None:
        return ""
    return f"'{path.name}' is not a model: expected {' or '.join(expected)}"


def model_file(folder: Path) -> Path | None:
    """Return the one model in a folder: the folder itself, a file, or a folder in it such as a SavedModel.

    Python files other than model.py are not models. Raises ModelFailed naming the models if there are several.
    """
    if recognise(folder) is not None:
        return folder
    files = sorted(entry for entry in folder.iterdir() if is_candidate(entry))
    if len(files) > 1:
        raise ModelFailed(
            f"folder '{folder.name}' holds several models: {', '.join(entry.name for entry in files)}; name one of "
            "them in its model-settings.json as parameters.uri"
        )
    return files[0] if files else None


def is_candidate(entry: Path) -> bool:
    """Return whether a file or folder in a model's folder is a model: no code beside the model."""
    if entry.name.startswith(".") or entry.suffix == ".py":
        return False
    runtime = recognise(entry)
    return runtime is not None and not (entry.is_dir() and runtime == "python")
