"""LightGBM models, in its text form."""

from collections.abc import Mapping

import numpy as np

from dragoman.core.calls import Infer
from dragoman.core.datatypes import FP64, NUMERIC, Array
from dragoman.core.errors import ModelFailed
from dragoman.core.model import Model
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.spec import Placement
from dragoman.runtimes.files import model_path, package


class LightGBMModel(Model):
    """A Booster. Its one input is a matrix [rows, features], where NaN is a missing value.

    Outputs: `predict`, as `Booster.predict` gives it (for a classifier the probabilities, [rows] of the second
    class or [rows, classes]), and `raw_score`, before the objective's transformation, computed only when asked
    for.
    """

    platform = "lightgbm_text"
    placement: Placement = "thread"

    def load(self) -> None:
        lightgbm = package("lightgbm", "lightgbm")
        path = model_path(self.spec)
        try:
            self._booster = lightgbm.Booster(model_file=path)
        except lightgbm.basic.LightGBMError as fault:
            raise ModelFailed(f"'{path.name}' is no LightGBM text model: {fault}") from fault
        features = self._booster.num_feature()
        row = np.asarray(self._booster.predict(np.zeros((1, features))))
        self._signature = Signature(
            inputs=(TensorSpec("input", FP64, (-1, features), accepts=NUMERIC),),
            outputs=(
                TensorSpec("predict", FP64, (-1, *row.shape[1:])),
                TensorSpec("raw_score", FP64, (-1, *row.shape[1:]), optional=True),
            ),
            batched=True,
        )

    def signature(self) -> Signature:
        return self._signature

    def infer(self, call: Infer) -> Mapping[str, Array]:
        (tensor,) = call.inputs.values()
        return {
            name: np.asarray(self._booster.predict(tensor.data, raw_score=name == "raw_score"))
            for name in call.outputs or ("predict",)
        }
