"""LightGBM models in text form, and Boosters in pickles."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dragoman.codecs.decode import Defaults
from dragoman.core.calls import Infer
from dragoman.core.datatypes import FP64, NUMERIC, Array
from dragoman.core.errors import ModelFailed
from dragoman.core.model import Model
from dragoman.core.runtime import Runtime
from dragoman.core.signature import Signature, TensorSpec
from dragoman.runtimes.files import model_path
from dragoman.runtimes.tables import content, matrix

# Kinds of models by their objectives; others rank, or the file does not say it.
_KINDS = {
    **dict.fromkeys(("binary", "multiclass", "multiclassova", "cross_entropy"), "classifier"),
    **dict.fromkeys(("regression", "regression_l1", "huber", "fair", "quantile", "mape", "poisson"), "regressor"),
    **dict.fromkeys(("gamma", "tweedie"), "regressor"),
}


class LightGBMModel(Model):
    """A Booster, in a text file or in a pickle.

    Its input is the matrix `input`, [rows, features]; NaN is a missing value.

    With content type `np` or `pd` a call sends an array or the columns of a data frame instead.

    Outputs: `predict`, as from `Booster.predict` (for a classifier probabilities, [rows] of the second class or [rows,
    classes]), and on request `raw_score`, before the transformation of the objective.
    """

    platform = "lightgbm_text"

    def load(self) -> None:
        lightgbm = RUNTIME.require("lightgbm")
        if self.spec.target is None:
            path = model_path(self.spec)
            try:
                self._booster = lightgbm.Booster(model_file=path)
            except lightgbm.basic.LightGBMError as error:
                raise ModelFailed(f"'{path.name}' is no LightGBM text model: {error}") from error
        else:
            self._booster, self.platform = self.spec.target, "lightgbm_pickle"
        self.kind = _KINDS.get(str(self._booster.params.get("objective", "")).partition(" ")[0], "")
        self._defaults = Defaults.of(self.spec)
        features = self._booster.num_feature()
        row = np.asarray(self._booster.predict(np.zeros((1, features))))
        names = self._booster.feature_name()
        # A model trained without names numbers its features.
        columns = () if names == [f"Column_{i}" for i in range(features)] else tuple(names)
        self._signature = Signature(
            inputs=(TensorSpec("input", FP64, (-1, features), accepts=NUMERIC, columns=columns),),
            outputs=(
                TensorSpec("predict", FP64, (-1, *row.shape[1:])),
                TensorSpec("raw_score", FP64, (-1, *row.shape[1:]), optional=True),
            ),
            batched=True,
            decodes=True,
            content_type=self._defaults.request,
            outputs_are_hints=True,
        )

    def signature(self) -> Signature:
        return self._signature

    def infer(self, call: Infer) -> Mapping[str, Array]:
        value = content(call, self._defaults)
        if value is None:
            (tensor,) = call.inputs.values()
            rows = tensor.data
        else:
            rows = matrix(value, self._booster.num_feature(), self._booster.feature_name())
        return {
            name: np.asarray(self._booster.predict(rows, raw_score=name == "raw_score"))
            for name in call.outputs or ("predict",)
        }


def _is_model_file(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(16).startswith((b"tree\n", b"tree\r\n"))


RUNTIME = Runtime(
    load=LightGBMModel,
    packages=("lightgbm",),
    extra="lightgbm",
    suffixes=(".lgb",),
    shared_suffixes=(".bst", ".json", ".model", ".txt"),
    is_model_file=_is_model_file,
    expected="a text file of save_model of LightGBM",
    objects=("lightgbm.basic.Booster",),
    placement="thread",
)
