"""The runtime of scikit-learn estimators and pipelines, saved by joblib or pickle."""

from pathlib import Path

from dragoman.core.runtime import Runtime, lazy_function

_SUFFIXES = (".joblib", ".pkl", ".pickle")
_COMPRESSED = (".bz2", ".gz", ".lzma", ".xz", ".z")


def _is_pickle(path: Path) -> bool:
    """Return whether a file is a pickle of protocol 2 to 5, or by its name one that joblib has compressed."""
    if path.suffix.lower() in _COMPRESSED:
        return Path(path.stem).suffix.lower() in _SUFFIXES
    with path.open("rb") as file:
        start = file.read(2)
    return start[:1] == b"\x80" and start[1:] in (b"\x02", b"\x03", b"\x04", b"\x05")


RUNTIME = Runtime(
    load=lazy_function("dragoman.runtimes.sklearn.model:load"),
    packages=("sklearn", "joblib"),
    extra="sklearn",
    suffixes=_SUFFIXES,
    shared_suffixes=(".p", ".pck", ".sav", ".save", *_COMPRESSED),
    is_model_file=_is_pickle,
    expected="a pickle, such as joblib.dump(estimator, file) writes",
    placement="thread",
    check=lazy_function("dragoman.runtimes.sklearn.model:check_pickle_modules"),
)
