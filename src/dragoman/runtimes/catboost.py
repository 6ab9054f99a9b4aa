"""CatBoost models, in its own binary form or in pickles."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dragoman.codecs.decode import Defaults
from dragoman.codecs.elements import strings
from dragoman.core.calls import Infer
from dragoman.core.datatypes import BYTES, FP32, FP64, NUMERIC, Array, datatype_of
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.model import Model
from dragoman.core.runtime import Runtime
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.tensor import Tensor
from dragoman.runtimes.class_names import estimator_kind
from dragoman.runtimes.files import model_path
from dragoman.runtimes.tables import check_fp32, columns_in_order, content, matrix

# CatBoost takes a category as text or as an integer, of which 1 and "1" are the same one.
_CATEGORIES = frozenset(d for d in NUMERIC if d.kind in ("bool", "int", "uint"))


class CatBoostModel(Model):
    """A CatBoost classifier if its loss function has classes, else a regressor or ranker. A pickle has its own class.

    Input: the matrix `input`, [rows, features], of any number type; NaN is a missing value. CatBoost computes in FP32:
    floats are rounded, and integers must be exact in it. A model with categorical or text features has one input per
    feature instead, with the names of the training data.

    Outputs: `predict`, as from CatBoostClassifier.predict or CatBoostRegressor.predict (labels of more than two classes
    are [rows, 1]); on request `predict_proba` of a classifier, and `raw`, before the transformation of the objective.
    """

    platform = "catboost_cbm"

    def load(self) -> None:
        catboost = RUNTIME.require("catboost")
        self._error_type: type[Exception] = catboost.CatBoostError
        file = Path(self.spec.uri).name
        if self.spec.target is None:
            try:
                self._model = _read(catboost, model_path(self.spec))
            except self._error_type as error:
                raise ModelFailed(f"'{file}' is no CatBoost model: {error}") from error
        else:
            self._model, self.platform = self.spec.target, "catboost_pickle"
            if not self._model.is_fitted():
                raise ModelFailed(f"'{file}' holds a {type(self._model).__name__} that was not fitted")
        if self._model.get_embedding_feature_indices():
            # The library reads past the end of a vector that is too short, and the file does not state its length.
            raise ModelFailed(f"'{file}' has embedding features, which cannot be checked and are not served")
        self._inputs = self._input_specs()
        self._is_matrix = self._inputs[0].name == "input" and len(self._inputs[0].shape or ()) == 2
        self._pandas = None if self._is_matrix else RUNTIME.require("pandas")
        self._defaults = Defaults.of(self.spec)
        self.kind = estimator_kind(self._model) if self.spec.target is not None else ""
        if hasattr(self._model, "predict_proba"):
            self.kind = "classifier"
        self._signature = Signature(
            inputs=self._inputs,
            outputs=self._output_specs(),
            batched=True,
            decodes=True,
            content_type=self._defaults.request,
            outputs_are_hints=True,
        )

    def signature(self) -> Signature:
        return self._signature

    def infer(self, call: Infer) -> Mapping[str, Array]:
        value = content(call, self._defaults)
        rows = self._rows(call.inputs) if value is None else self._from_content(value)
        try:
            return {name: self._predict(name, rows) for name in call.outputs or ("predict",)}
        except self._error_type as error:
            raise InvalidInput(f"CatBoost takes no such rows: {error}") from error

    def _predict(self, name: str, rows: Any) -> Array:
        if name == "predict_proba":
            return np.asarray(self._model.predict_proba(rows))
        chosen = {"prediction_type": "RawFormulaVal"} if name == "raw" else {}
        return np.asarray(self._model.predict(rows, **chosen))

    def _rows(self, tensors: Mapping[str, Tensor]) -> Any:
        if self._pandas is None:
            (tensor,) = tensors.values()
            check_fp32(tensor.data)
            return tensor.data
        # The library looks for each feature at its place.
        columns = {spec.name: tensors[spec.name] for spec in self._inputs}
        for spec in self._inputs:
            if spec.datatype is FP64:  # not a category
                check_fp32(columns[spec.name].data, (spec.name,))
        return self._pandas.DataFrame(
            {name: strings(t, name) if t.datatype is BYTES else t.data for name, t in columns.items()}
        )

    def _from_content(self, value: Any) -> Any:
        """Convert the value of a content type to the argument of the library."""
        names = self._model.feature_names_
        if self._pandas is None:
            # A model without feature names numbers its features.
            own = None if names == [str(i) for i in range(len(names))] else names
            rows = matrix(value, len(names), own)
            check_fp32(rows, own or list(map(str, getattr(value, "columns", ("input",)))))
            return rows
        if not hasattr(value, "columns"):
            raise InvalidInput(f"expected content type 'pd' with the inputs {', '.join(map(repr, names))}")
        frame = columns_in_order(value, names)
        for spec in self._inputs:
            if spec.datatype is FP64:
                check_fp32(frame[spec.name].to_numpy(), (spec.name,))
        return frame

    def _input_specs(self) -> tuple[TensorSpec, ...]:
        names = self._model.feature_names_
        categories = set(self._model.get_cat_feature_indices())
        texts = set(self._model.get_text_feature_indices())
        if not categories and not texts:
            own = () if names == [str(i) for i in range(len(names))] else tuple(names)
            return (TensorSpec("input", FP32, (-1, len(names)), accepts=NUMERIC, columns=own),)
        kinds = {**dict.fromkeys(categories, (BYTES, _CATEGORIES)), **dict.fromkeys(texts, (BYTES, frozenset()))}
        columns = [(name, *kinds.get(i, (FP64, NUMERIC))) for i, name in enumerate(names)]
        return tuple(TensorSpec(name, datatype, (-1,), accepts=accepts) for name, datatype, accepts in columns)

    def class_labels(self) -> Mapping[str, Sequence[str]]:
        has_labels = self._signature.output("predict_proba") is not None
        return {"predict_proba": [str(each) for each in self._model.classes_]} if has_labels else {}

    def _output_specs(self) -> tuple[TensorSpec, ...]:
        """Return the outputs, from a prediction for one row of zeros."""
        row = self._rows({spec.name: _sample(spec) for spec in self._inputs})
        classifies = hasattr(self._model, "predict_proba")
        names = ("predict", "predict_proba", "raw") if classifies else ("predict", "raw")
        outputs = {name: self._predict(name, row) for name in names}
        return tuple(
            TensorSpec(name, datatype_of(array.dtype), (-1, *array.shape[1:]), optional=name != "predict")
            for name, array in outputs.items()
        )


def _read(catboost: Any, path: Path) -> Any:
    classes = catboost.CatBoost().load_model(path).classes_
    model = catboost.CatBoostClassifier() if len(classes) else catboost.CatBoostRegressor()
    model.load_model(path)
    return model


def _sample(spec: TensorSpec) -> Tensor:
    shape = (1, *(spec.shape or ())[1:])
    return Tensor.of(np.full(shape, b"a", object) if spec.datatype is BYTES else np.zeros(shape))


RUNTIME = Runtime(
    load=CatBoostModel,
    packages=("catboost",),
    extra="catboost",
    suffixes=(".cbm", ".catboost"),
    objects=("catboost.core.CatBoost",),
    placement="thread",
)
