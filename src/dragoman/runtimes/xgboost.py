"""XGBoost models in JSON or UBJSON form."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dragoman.codecs.decode import Defaults
from dragoman.core.calls import Infer
from dragoman.core.datatypes import FP32, NUMERIC, Array, datatype_of
from dragoman.core.documents import parse_json
from dragoman.core.errors import ModelFailed
from dragoman.core.kinds import named_outputs
from dragoman.core.model import Model
from dragoman.core.runtime import Runtime
from dragoman.core.signature import Signature, TensorSpec
from dragoman.formats.json_scan import check_depth
from dragoman.formats.policy import Policy
from dragoman.formats.ubjson import is_ubjson
from dragoman.runtimes.class_names import names_of
from dragoman.runtimes.files import model_path
from dragoman.runtimes.tables import check_fp32, content, matrix

# The objectives whose `predict` is a probability: from it the scikit-learn classifier takes its label.
_LABEL_OBJECTIVES = ("binary:logistic", "multi:softprob")


# Kinds of models by the starts of their objectives; others rank.
_KINDS = {"binary:": "classifier", "multi:": "classifier", "reg:": "regressor", "count:": "regressor"}
_KINDS |= dict.fromkeys(("survival:", "quantile"), "regressor")


class XGBoostModel(Model):
    """A Booster, in a file of its own or in a pickle.

    Its input is the matrix `input`, [rows, features]; NaN is a missing value.

    It computes in FP32: floats are rounded, integers must be exact. With content type `np` or `pd` a call sends an
    array or the columns of a data frame instead.

    Outputs: `predict`, as from `Booster.predict` (for a model saved by XGBClassifier probabilities, [rows] of the
    second class or [rows, classes]). On request: `margin`, before the transformation of the objective, and `label`,
    the class as from XGBClassifier.predict.

    With `parameters.sklearn_api = true` the outputs are those of XGBoost's scikit-learn interface: for a model saved by
    XGBClassifier `predict` is the label, and `predict_proba` is computed on request. A model trained with early
    stopping predicts by its best iteration.
    """

    def load(self) -> None:
        xgboost = RUNTIME.require("xgboost")
        self._booster = xgboost.Booster() if self.spec.target is None else self.spec.target
        self.platform = "xgboost_pickle"
        if self.spec.target is None:
            path = model_path(self.spec)
            self.platform = "xgboost_json" if path.suffix == ".json" else "xgboost_ubj"
            if path.suffix == ".json":  # on which XGBoost's parser, as on wrong UBJSON, would end the process
                check_depth(path.read_bytes(), Policy())
            elif path.suffix == ".ubj" and not is_ubjson(path.read_bytes()):
                raise ModelFailed(f"'{path.name}' is no XGBoost model: expected UBJSON as XGBoost writes it")
            try:
                self._booster.load_model(path)
            except (xgboost.core.XGBoostError, ValueError) as error:
                raise ModelFailed(f"'{path.name}' is no XGBoost model: {str(error).splitlines()[0]}") from error
        self._matrix = xgboost.DMatrix
        self._defaults = Defaults.of(self.spec)
        probe = np.zeros((1, self._booster.num_features()), np.float32)
        # A linear booster cannot predict in place; it needs its own copy of the matrix.
        self._in_place = self._try_in_place(probe, xgboost.core.XGBoostError)
        self._classes = _classes(self._booster)
        self._objective = _objective(self._booster)
        self.kind = next((kind for start, kind in _KINDS.items() if self._objective.startswith(start)), "")
        sklearn_api = bool(self.spec.parameters.get("sklearn_api"))
        self._is_classifier = sklearn_api and _is_saved_by_classifier(self._booster)
        self._range = _best_range(self._booster) if sklearn_api else (0, 0)
        self._signature = self._probe_signature(probe)

    def signature(self) -> Signature:
        return self._signature

    def class_labels(self) -> Mapping[str, Sequence[str]]:
        """Return the classes that XGBClassifier has noted in the file, which it did until they had to be 0, 1, ..."""
        names = names_of(parse_json(self._booster.attr("scikit_learn") or "{}").get("classes_"))
        return named_outputs(names, [s for s in self._signature.outputs if s.name in ("predict", "predict_proba")])

    def infer(self, call: Infer) -> Mapping[str, Array]:
        requested = set(call.outputs or ("predict",))
        return self._compute(self._rows(call), requested)

    def _compute(self, rows: Array, wanted: Collection[str]) -> dict[str, Array]:
        outputs: dict[str, Array] = {}
        if not {"predict", "label", "predict_proba"}.isdisjoint(wanted):
            outputs["predict"] = values = self._predict(rows)
            if self._is_classifier or "label" in wanted:
                outputs["predict" if self._is_classifier else "label"] = self._labels(values)
            if "predict_proba" in wanted:
                outputs["predict_proba"] = self._probabilities(values, rows)
        if "margin" in wanted:
            outputs["margin"] = self._predict(rows, margin=True)
        return outputs

    def _rows(self, call: Infer) -> Array:
        value = content(call, self._defaults)
        if value is None:
            (tensor,) = call.inputs.values()
            check_fp32(tensor.data)
            return tensor.data
        names = self._booster.feature_names
        rows = matrix(value, self._booster.num_features(), names)
        check_fp32(rows, names or list(map(str, getattr(value, "columns", ("input",)))))
        return rows

    def _predict(self, rows: Array, *, margin: bool = False) -> Array:
        booster = self._booster
        if self._in_place:
            kind = "margin" if margin else "value"
            return np.asarray(booster.inplace_predict(rows, iteration_range=self._range, predict_type=kind))
        # The names are passed through: the matrix of a call has none, which is not a mismatch.
        matrix = self._matrix(rows, feature_names=booster.feature_names, feature_types=booster.feature_types)
        return np.asarray(booster.predict(matrix, output_margin=margin))

    def _try_in_place(self, probe: Array, error: type[Exception]) -> bool:
        try:
            self._booster.inplace_predict(probe)
        except error:
            return False
        return True

    def _labels(self, values: Array) -> Array:
        """Return what XGBClassifier.predict makes of `Booster.predict`, in its dtypes."""
        if values.ndim > 1 and self._classes != 2:
            labels: Array = np.argmax(values, axis=1)
            return labels.astype(np.int64)
        if values.ndim > 1 and values.shape[1] != 1:  # one column for each of several labels
            return (values > 0.5).astype(np.float64)
        if self._objective == "multi:softmax":
            return values.astype(np.int32)
        return (values > 0.5).astype(np.int64).reshape(-1)

    def _probabilities(self, values: Array, rows: Array) -> Array:
        """Return what XGBClassifier.predict_proba makes of `Booster.predict`."""
        if self._objective == "multi:softmax":
            margin = self._predict(rows, margin=True)
            powers = np.exp(margin - margin.max(axis=1, keepdims=True))
            probabilities: Array = powers / powers.sum(axis=1, keepdims=True)
            return probabilities
        if values.ndim == 2 and (values.shape[1] == self._classes or (self._classes == 2 and values.shape[1] > 1)):
            return values
        return np.stack((1 - values.reshape(-1), values.reshape(-1)), axis=1)

    def _probe_signature(self, probe: Array) -> Signature:
        further = ("predict_proba",) if self._is_classifier else ()
        if not self._is_classifier and self._objective in _LABEL_OBJECTIVES:
            further = ("label",)
        probe_outputs = self._compute(probe, {"predict", "margin", *further})
        outputs = [
            TensorSpec(
                name,
                datatype_of(probe_outputs[name].dtype),
                (-1, *probe_outputs[name].shape[1:]),
                optional=name != "predict",
            )
            for name in ("predict", "margin", *further)
        ]
        columns = tuple(self._booster.feature_names or ())
        return Signature(
            inputs=(TensorSpec("input", FP32, (-1, probe.shape[1]), accepts=NUMERIC, columns=columns),),
            outputs=tuple(outputs),
            batched=True,
            decodes=True,
            content_type=self._defaults.request,
            outputs_are_hints=True,
        )


def _objective(booster: Any) -> str:
    return str(parse_json(booster.save_config())["learner"]["objective"]["name"])


def _classes(booster: Any) -> int:
    """Return the number of classes as XGBClassifier counts them: 2 where the model gives one probability a row."""
    return max(2, int(parse_json(booster.save_config())["learner"]["learner_model_param"]["num_class"]))


def _is_saved_by_classifier(booster: Any) -> bool:
    """Return whether XGBClassifier saved the model, as XGBoost's scikit-learn interface notes in the file."""
    return bool(parse_json(booster.attr("scikit_learn") or "{}").get("_estimator_type") == "classifier")


def _best_range(booster: Any) -> tuple[int, int]:
    """Return the iterations that XGBoost's scikit-learn interface predicts by; (0, 0) stands for all."""
    best = booster.attr("best_iteration")
    linear = parse_json(booster.save_config())["learner"]["gradient_booster"]["name"] == "gblinear"
    return (0, 0) if best is None or linear else (0, int(best) + 1)


def _is_model_file(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(4096)
    return start.startswith(b"{") and b"learner" in start


RUNTIME = Runtime(
    load=XGBoostModel,
    packages=("xgboost",),
    extra="xgboost",
    suffixes=(".ubj", ".xgb"),
    shared_suffixes=(".bst", ".json", ".model", ".txt"),
    is_model_file=_is_model_file,
    expected="a JSON or UBJSON file of save_model of XGBoost",
    objects=("xgboost.core.Booster",),
    placement="thread",
)
