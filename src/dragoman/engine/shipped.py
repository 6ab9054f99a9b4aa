"""What the files beside a model say of it: a line from README.md, names of classes, and examples.

Only the model's own files are read (see `own_files`). All reading blocks and is bounded in size. A file that cannot be
read says nothing, except `examples.json`, whose errors are those of the trial.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from dragoman.core.about import first_paragraph
from dragoman.core.calls import ClassLabels, Tensors
from dragoman.core.datatypes import BYTES
from dragoman.core.errors import InvalidInput
from dragoman.core.kinds import named_outputs
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor, object_array
from dragoman.engine.own_files import LABELS, READMES, SAMPLES, OwnFiles
from dragoman.engine.warmup import read_requests
from dragoman.workers.pool import Loaded

_MAX_README_BYTES = 32_768
_MAX_EXAMPLES_BYTES = 4_000_000
_MAX_EXAMPLES = 20
_MAX_FILE_BYTES = 500_000
_MAX_LABELS_BYTES = 4_000_000
_MIN_CLASSES = 2


class Shipped(msgspec.Struct, frozen=True):
    """description: a line. labels: names of classes by output. examples: inputs of requests by name."""

    description: str = ""
    labels: Mapping[str, ClassLabels] = msgspec.field(default_factory=dict)
    examples: Mapping[str, Tensors] = msgspec.field(default_factory=dict)


def read_shipped(spec: ModelSpec, loaded: Loaded) -> Shipped:
    """Return what the files beside a loaded model say that it does not say itself."""
    own = OwnFiles(spec)
    has_labels = bool(spec.labels) or any(not _are_indices(names) for names in loaded.labels.values())
    return Shipped(
        loaded.description or ("" if own.is_object else _readme(own)),
        {} if has_labels else _labels(own, loaded.signature),
        _examples(own) or _samples(own, loaded.signature),
    )


def _are_indices(names: Sequence[str]) -> bool:
    """Return whether classes are called 0, 1, ..., as an estimator that was fitted with numbers calls them."""
    return all(name == str(i) for i, name in enumerate(names))


def _readme(own: OwnFiles) -> str:
    texts = (_read_text(folder / name, own, _MAX_README_BYTES, cut=True) for folder in own.folders for name in READMES)
    return next(filter(None, map(first_paragraph, filter(None, texts))), "")


def _labels(own: OwnFiles, signature: Signature) -> dict[str, ClassLabels]:
    """Return the names in `labels.txt` or `classes.txt`, if one output only has a value for each of them."""
    for file in (folder / name for folder in own.folders for name in LABELS):
        text = _read_text(file, own, _MAX_LABELS_BYTES)
        names = tuple(line.strip() for line in text.strip().splitlines())
        if len(names) < _MIN_CLASSES or not all(names):
            continue
        if found := named_outputs(names, signature.outputs):
            return {output: ClassLabels("", names) for output in found}
    return {}


def _examples(own: OwnFiles) -> dict[str, Tensors]:
    file = own.examples()
    try:
        if file is None or file.stat().st_size > _MAX_EXAMPLES_BYTES:
            return {}
        requests = read_requests(file)[:_MAX_EXAMPLES]
        return {name: request.inputs for name, request in zip(_names(file), requests, strict=False)}
    except (OSError, InvalidInput):
        return {}


def _samples(own: OwnFiles, signature: Signature) -> dict[str, Tensors]:
    """Return an example for each file in a folder of samples, by the names of the files, for a model of one input: the
    array of a `.npy`, the rows of numbers in a `.csv`, and for an input of bytes the content of any file."""
    required = [spec for spec in signature.inputs if not spec.optional] or [*signature.inputs[:1]]
    if len(required) != 1:
        return {}
    for folder in (each / SAMPLES for each in own.folders):
        found: dict[str, Tensors] = {}
        try:
            files = heapq.nsmallest(_MAX_EXAMPLES, folder.iterdir()) if folder in own else []
        except OSError:  # a file, or a folder that may not be read
            continue
        for file in files:
            if not file.name.startswith(".") and file.is_file() and file in own:
                try:
                    if file.stat().st_size > _MAX_FILE_BYTES:
                        continue
                    tensor = _sample(file, required[0])
                except (ValueError, InvalidInput, OSError, EOFError, MemoryError):  # a file of something else
                    continue
                if required[0].fits(tensor.shape):
                    found[file.stem] = {required[0].name: tensor}
        if found:
            return found
    return {}


def _sample(file: Path, spec: TensorSpec) -> Tensor:
    """Return the tensor in a file. Raises ValueError or InvalidInput if it is none for this input."""
    if spec.datatype is BYTES:
        return Tensor(object_array([file.read_bytes()], (1,) * len(spec.shape or (1,))), BYTES)
    if file.suffix.lower() == ".npy":
        array = np.load(file, allow_pickle=False)
    elif file.suffix.lower() == ".csv":
        lines = [line.split(",") for line in file.read_text(errors="replace").splitlines() if line.strip()]
        array = np.array([[*map(float, line)] for line in lines[_has_header(lines) :]])
    else:
        raise ValueError(f"'{file.name}' is not a table of numbers")
    return Tensor.of(array, spec.datatype)


def _has_header(lines: list[list[str]]) -> bool:
    """Return whether the first line of a table has names."""
    try:
        [float(cell) for cell in lines[0]]
    except (ValueError, IndexError):
        return bool(lines)
    return False


class _Named(msgspec.Struct):
    id: str = ""


def _names(file: Path) -> Iterator[str]:
    """Yield the names of the requests in a file: the id of each, else its number; no name twice."""
    text = file.read_bytes()
    try:
        entries = msgspec.json.decode(text, type=list[_Named] if text.lstrip().startswith(b"[") else _Named)
    except msgspec.DecodeError:  # an id that is no text
        entries = [_Named()] * _MAX_EXAMPLES
    used = set[str]()
    for number, entry in enumerate(entries if isinstance(entries, list) else [entries], 1):
        name = entry.id if entry.id and entry.id not in used else f"example {number}"
        used.add(name)
        yield name


def _read_text(file: Path, own: OwnFiles, max_bytes: int, *, cut: bool = False) -> str:
    if not file.is_file() or file not in own:
        return ""
    try:
        with file.open("rb") as content:
            data = content.read(max_bytes + 1)
    except OSError:
        return ""
    return data[:max_bytes].decode(errors="replace") if cut or len(data) <= max_bytes else ""
