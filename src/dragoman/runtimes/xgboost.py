"""XGBoost models, in its JSON or UBJSON form."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from dragoman.codecs.decode import Defaults
from dragoman.core.calls import Infer
from dragoman.core.datatypes import FP32, INT64, NUMERIC, Array
from dragoman.core.errors import ModelFailed
from dragoman.core.model import Model
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.spec import Placement
from dragoman.runtimes.contents import check_fp32, content, matrix
from dragoman.runtimes.files import model_path, package

# The objectives whose `predict` is a probability: from it the scikit-learn classifier takes its label.
_LABELLED = ("binary:logistic", "multi:softprob")


class XGBoostModel(Model):
    """A Booster. Its one input is a matrix [rows, features], where NaN is a missing value.

    It computes in FP32; of other types it takes what fits: floats are rounded, integers have to be there exactly.

    A call whose content type is `np` or `pd` brings an array or the columns of a data frame instead.

    Outputs: `predict`, as `Booster.predict` gives it: for a model that XGBClassifier saved these are the
    probabilities, [rows] of the second class or [rows, classes]. Computed only when asked for: `margin`, before
    the objective's transformation, and `label`, the class as XGBClassifier.predict gives it.
    """

    placement: Placement = "thread"

    def load(self) -> None:
        xgboost = package("xgboost", "xgboost")
        path = model_path(self.spec)
        self._booster = xgboost.Booster()
        try:
            self._booster.load_model(path)
        except (xgboost.core.XGBoostError, ValueError) as fault:
            raise ModelFailed(f"'{path.name}' is no XGBoost model: {str(fault).splitlines()[0]}") from fault
        self._matrix = xgboost.DMatrix
        self._defaults = Defaults.of(self.spec)
        self.platform = "xgboost_json" if path.suffix == ".json" else "xgboost_ubj"
        probe = np.zeros((1, self._booster.num_features()), np.float32)
        # A linear booster cannot predict in place; it needs its own copy of the matrix.
        self._in_place = self._try_in_place(probe, xgboost.core.XGBoostError)
        self._signature = self._probed(probe)

    def signature(self) -> Signature:
        return self._signature

    def infer(self, call: Infer) -> Mapping[str, Array]:
        rows = self._rows(call)
        wanted = call.outputs or ("predict",)
        result: dict[str, Array] = {}
        if "predict" in wanted or "label" in wanted:
            result["predict"] = self._predict(rows)
        if "label" in wanted:
            result["label"] = _labels(result["predict"])
        if "margin" in wanted:
            result["margin"] = self._predict(rows, margin=True)
        return result

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
            return np.asarray(booster.inplace_predict(rows, predict_type="margin" if margin else "value"))
        # The names are passed through: the matrix of a call has none, which is no mismatch.
        matrix = self._matrix(rows, feature_names=booster.feature_names, feature_types=booster.feature_types)
        return np.asarray(booster.predict(matrix, output_margin=margin))

    def _try_in_place(self, probe: Array, fault: type[Exception]) -> bool:
        try:
            self._booster.inplace_predict(probe)
        except fault:
            return False
        return True

    def _probed(self, probe: Array) -> Signature:
        predict, margin = self._predict(probe), self._predict(probe, margin=True)
        outputs = [
            TensorSpec("predict", FP32, (-1, *predict.shape[1:])),
            TensorSpec("margin", FP32, (-1, *margin.shape[1:]), optional=True),
        ]
        if _objective(self._booster) in _LABELLED:
            outputs.append(TensorSpec("label", INT64, (-1,), optional=True))
        return Signature(
            inputs=(TensorSpec("input", FP32, (-1, probe.shape[1]), accepts=NUMERIC),),
            outputs=tuple(outputs),
            batched=True,
            decodes=True,
            content_type=self._defaults.request,
        )


def _objective(booster: Any) -> str:
    return str(json.loads(booster.save_config())["learner"]["objective"]["name"])


def _labels(probabilities: Array) -> Array:
    if probabilities.ndim > 1:
        labels: Array = np.argmax(probabilities, axis=1).astype(np.int64)
        return labels
    return (probabilities > 0.5).astype(np.int64)
