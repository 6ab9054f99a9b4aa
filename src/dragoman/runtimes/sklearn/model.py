"""scikit-learn estimators and pipelines, saved by joblib or pickle, which are checked before they are loaded."""

import logging
import mmap
import pickletools
import warnings
from _compat_pickle import IMPORT_MAPPING
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from dragoman import plugins
from dragoman.codecs.decode import Defaults
from dragoman.core.calls import Infer
from dragoman.core.datatypes import BYTES, Array, datatype_of
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.model import Model
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor
from dragoman.runtimes.class_names import estimator_kind
from dragoman.runtimes.files import check_installed, check_pickle, model_path
from dragoman.runtimes.sklearn import RUNTIME
from dragoman.runtimes.sklearn.independence import has_independent_rows
from dragoman.runtimes.sklearn.inputs import Table, table_of
from dragoman.runtimes.sklearn.saved_version import describe, explain_version, saved_version
from dragoman.runtimes.tables import content

log = logging.getLogger("dragoman.model")

# The first bytes of compressed files: zlib, gzip, bz2, lzma, xz, lz4.
_COMPRESSED = (b"x", b"\x1f\x8b", b"BZ", b"]\x00", b"\xfd7zXZ", b"\x04\x22\x4d\x18")
# joblib writes the bytes of an array, which are not a pickle, behind an object of this module.
_ARRAYS = "joblib.numpy_pickle"
_MAX_OPCODES = 1_000_000  # some seconds of reading


def check_pickle_modules(spec: ModelSpec) -> None:
    """Raise ModelFailed if a file is not a pickle, or names a package that is not installed.

    A compressed file is not checked.
    """
    path = Path(spec.uri)
    with path.open("rb") as file:
        if file.read(8).startswith(_COMPRESSED):
            return
    try:
        for module in _modules(path):
            check_installed(module.partition(".")[0], path.name)
    except (ValueError, MemoryError, OverflowError) as error:  # such as a negative length
        reason = str(error) or type(error).__name__
        raise ModelFailed(f"'{path.name}' cannot be read as a pickle: {reason}") from error


def _modules(path: Path) -> Iterator[str]:
    """Yield the modules of the classes and functions that a pickle names, up to its first array."""
    memo: list[str] = []
    before = top = ""  # the last two strings on the stack, "" for anything else
    with path.open("rb") as file:
        for opcode, operand, _ in islice(pickletools.genops(file), _MAX_OPCODES):
            argument: Any = operand
            module = ""
            match opcode.name:
                case "MEMOIZE":
                    memo.append(top)
                    continue
                case "BINGET" | "LONG_BINGET":
                    before, top = top, memo[argument] if argument < len(memo) else ""
                case "SHORT_BINUNICODE" | "BINUNICODE" | "BINUNICODE8":
                    before, top = top, argument
                case "STACK_GLOBAL":
                    module, before, top = before, "", ""
                case "GLOBAL":
                    module, before, top = _python3_name(argument.partition(" ")[0]), "", ""
                case _:
                    before, top = "", ""
            if module == _ARRAYS:
                return
            if module:
                yield module


def _python3_name(module: str) -> str:
    """Return the name in Python 3 of a module that pickles of old protocols name as in Python 2."""
    return IMPORT_MAPPING.get(module, module)


def load(spec: ModelSpec) -> Model:
    """Return the model of a pickle: of the runtime whose objects it holds, such as a Booster of XGBoost, or an
    estimator. Raises ModelFailed if it cannot be read."""
    value = read_pickle(spec)
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(value).__mro__}
    for runtimes in (plugins.built_in_runtimes, plugins.other_runtimes):
        for runtime in runtimes().values():
            if kinds.intersection(runtime.objects):
                return runtime.load(replace(spec, target=value))
    return SklearnModel(replace(spec, target=value))


def read_pickle(spec: ModelSpec) -> Any:
    """Return the object in a file. Raises ModelFailed, with the version that has saved it if it is another one.

    With `parameters.mmap` its arrays are mapped, so that all processes share them: privately, because some estimators
    accept no read-only arrays.
    """
    path = model_path(spec)
    check_pickle(path, spec)
    is_mapped = _is_mapped(path, spec)
    joblib, sklearn = RUNTIME.require("joblib"), RUNTIME.require("sklearn")
    RUNTIME.require("sklearn.base")  # what takes the time, which is no time of reading the file
    try:
        return joblib.load(path, mmap_mode="c" if is_mapped else None)
    except Exception as error:  # whatever code in the file raises
        form = "by joblib" if path.suffix == ".joblib" else "by pickle"
        advice = explain_version(path.name, saved_version(path), sklearn.__version__)
        message = f"'{path.name}' cannot be read as a model saved {form}: {describe(error)}"
        raise ModelFailed(f"{message}; {advice}" if advice else message) from error


def _is_mapped(path: Path, spec: ModelSpec) -> bool:
    """Return whether to map the arrays of a file. Raises ModelFailed if joblib could not map them."""
    given = spec.parameters.get("mmap", False)
    if not isinstance(given, bool):
        raise ModelFailed(f"parameter 'mmap': expected true or false, got {given!r}")
    if given:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content[:8].startswith(_COMPRESSED) or content.find(_ARRAYS.encode()) < 0:
                raise ModelFailed(
                    f"parameter 'mmap': '{path.name}' has no arrays that can be mapped: save it by joblib.dump without "
                    "compression"
                )
    return given


# The methods that answer, each an output of its name; the first that an estimator has is the default output.
_METHODS = ("predict", "transform", "predict_proba", "decision_function")


_TEXT = {"content_type": "str"}


class SklearnModel(Model):
    """An estimator; its methods predict, transform, predict_proba and decision_function are outputs.

    Input: the matrix `input`, [rows, features], of any number type. A pipeline with text columns has one input per
    column instead, with the names of the training data. With content type `np` or `pd` a call sends an array or the
    columns of a data frame, with inputs of any name. The default output is `predict`, else `transform`; others are
    computed on request. A multi-output classifier has `predict_proba-0`, `predict_proba-1`, ...
    """

    def load(self) -> None:
        path = Path(self.spec.uri)
        self.platform = "sklearn_joblib" if path.suffix == ".joblib" else "sklearn_pickle"
        self._estimator = read_pickle(self.spec) if self.spec.target is None else self.spec.target
        saved, installed = saved_version(path), RUNTIME.require("sklearn").__version__
        self._advice = explain_version(path.name, saved, installed)
        if self._advice:
            log.warning("%s; its results may differ: model=%s", self._advice, self.spec.name)
        try:
            self._describe()
        except (ModelFailed, InvalidInput):
            raise
        except Exception as error:  # an attribute that this version expects is missing
            if not self._advice:
                raise
            raise ModelFailed(f"{type(self._estimator).__name__} raised {describe(error)}; {self._advice}") from error

    def _describe(self) -> None:
        """Find out methods, inputs and outputs of the estimator. Raises ModelFailed if it is none."""
        path = Path(self.spec.uri)
        self._methods = [name for name in _METHODS if callable(getattr(self._estimator, name, None))]
        fitted = callable(getattr(self._estimator, "fit", None))  # a data frame can transform, too
        usable = self._methods and (fitted or self._methods != ["transform"])
        if not usable or isinstance(self._estimator, type):
            raise ModelFailed(
                f"'{path.name}' holds {type(self._estimator).__name__}, which is not a model; "
                "expected a fitted scikit-learn estimator"
            )
        self.kind = estimator_kind(self._estimator)
        self._table: Table = table_of(self._estimator)
        # Which method gives each output; several give one output each only where it is a list of arrays.
        self._sources: dict[str, str] = {}
        self._keeps_rows = True
        outputs = [spec for method in self._methods for spec in self._probe(method)]
        self._defaults = Defaults.of(self.spec)
        if not has_independent_rows(self._estimator):
            self.merges = 0
        self._signature = Signature(
            inputs=self._table.inputs,
            outputs=tuple(outputs),
            batched=self._keeps_rows,
            decodes=True,
            content_type=self._defaults.request,
            outputs_are_hints=True,
        )

    def signature(self) -> Signature:
        return self._signature

    def example_inputs(self) -> Mapping[str, Any] | None:
        """Return the sample row: categories and texts that the estimator knows."""
        return self._table.sample()

    def class_labels(self) -> Mapping[str, Sequence[str]]:
        classes = getattr(self._estimator, "classes_", None)
        if classes is None or getattr(classes, "ndim", 0) != 1:
            return {}
        names = [str(each) for each in classes]
        scores = [self._signature.output(name) for name in ("predict_proba", "decision_function")]
        return {spec.name: names for spec in scores if spec is not None and spec.shape in (None, (-1, len(names)))}

    def infer(self, call: Infer) -> Mapping[str, Tensor | Array]:
        value = content(call, self._defaults)
        rows = self._table.rows(call.inputs) if value is None else self._table.from_content(value)
        names = call.outputs or tuple(s.name for s in self._signature.outputs if not s.optional)
        result: dict[str, Array] = {}
        for method in dict.fromkeys(self._sources[name] for name in names):
            result.update(self._compute(method, rows))
        return {name: _with_text(array) for name, array in result.items()}

    def _compute(self, method: str, rows: Any) -> dict[str, Array]:
        try:
            value = getattr(self._estimator, method)(rows)
        except ValueError as error:
            # scikit-learn checks its input itself: NaN where none may be, an unknown category.
            raise InvalidInput(f"{type(self._estimator).__name__}.{method}: {error}") from error
        except Exception as error:
            if not self._advice:
                raise
            what = f"{type(self._estimator).__name__}.{method} raised {describe(error)}"
            raise ModelFailed(f"{what}; {self._advice}") from error
        if isinstance(value, list):
            return {f"{method}-{i}": np.asarray(each) for i, each in enumerate(value)}
        # Encoders give sparse matrices, and `set_output` data frames; a tensor is dense.
        return {method: np.asarray(value.toarray() if hasattr(value, "toarray") else value)}

    def _probe(self, method: str) -> list[TensorSpec]:
        """Return the outputs of a method, from a prediction for a sample row; of unknown type if it rejects that
        row."""
        optional = method != self._methods[0]
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                outputs = self._compute(method, self._table.probe())
            self._keeps_rows &= all(array.shape[:1] == (1,) for array in outputs.values())
            specs = [
                TensorSpec(name, datatype_of(array.dtype), (-1, *array.shape[1:]), optional=optional)
                for name, array in outputs.items()
            ]
        except Exception:  # a made-up row may be one that the estimator refuses
            specs = [TensorSpec(method, optional=optional)]
        self._sources.update({spec.name: method for spec in specs})
        return specs


def _with_text(array: Array) -> Tensor | Array:
    """Return an output; labels that are text say so, and clients get them as text instead of bytes."""
    is_text = array.dtype.kind == "U" or (array.dtype.kind == "O" and all(isinstance(each, str) for each in array.flat))
    return Tensor.of(array, BYTES, _TEXT) if is_text and array.ndim == 1 else array
